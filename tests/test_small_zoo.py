"""The small networks are as they should be, and gradient scores are right on each."""

import pytest
import torch
from networks import NETWORKS, logits
from same import near
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from uqlab import gradients

EVERY = pytest.mark.parametrize("name", NETWORKS)


@EVERY
def test_logits_are_finite_repeat_and_differ_by_input(name):
    network = NETWORKS[name]
    model, inputs = network.make(), network.inputs(5)
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) < 20_000
    found = logits(model, inputs).detach()
    assert found.shape == (5, 3)
    assert found.isfinite().all()
    between = torch.pdist(found, float("inf"))
    assert between.min() > 1e-3
    again = logits(network.make(), network.inputs(5)).detach()
    assert_close(again, found, rtol=0, atol=0)
    others = logits(model, network.inputs(5, seed=2))
    assert not torch.allclose(others, found, atol=1e-3)


class OfOneTensor(nn.Module):
    """A network of transformers that is given token ids alone makes its own mask."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        by_name = {"input_ids": x, "attention_mask": (x != 0).long()}
        return logits(self.inner, by_name)


def of_one_tensor(name, count=2):
    network = NETWORKS[name]
    model, inputs = network.make(), network.inputs(count)
    model.requires_grad_()  # frozen parameters count too
    if isinstance(inputs, dict):
        return OfOneTensor(model).double().eval(), inputs["input_ids"]
    return model.double(), inputs.double() if inputs.is_floating_point() else inputs


def loop(model, inputs, names):
    """Gradients of each log-probability of each input by plain autograd, by layer."""
    owned = {name: [] for name in names}
    for key, p in model.named_parameters():
        layer = key.rpartition(".")[0]
        if layer in owned:
            owned[layer].append(p)
    rows = []
    for x in inputs:
        for value in logits(model, x[None]).log_softmax(1)[0]:
            for own in owned.values():
                found = torch.autograd.grad(
                    value,
                    own,
                    retain_graph=True,
                    allow_unused=True,
                )
                flat = [g.flatten() for g in found if g is not None]
                rows.append(torch.cat([*flat, torch.zeros(1).double()]))
    norms = {q: torch.stack([row.norm(q) for row in rows]) for q in (1, 2)}
    shape = (len(inputs), 3, len(names))
    return {q: norm.view(shape).movedim(2, 0) for q, norm in norms.items()}


@EVERY
def test_gradient_scores_are_those_of_a_loop(name):
    model, inputs = of_one_tensor(name)
    log_p = logits(model, inputs).detach().log_softmax(1)
    p = log_p.exp()
    one, names, _ = gradients.gradient_norms(model, inputs, norm=1)
    two, _, _ = gradients.gradient_norms(model, inputs, norm=2)
    expected = loop(model, inputs, names)
    near(one, expected[1])
    near(two, expected[2])

    found = gradients.exgrad(model, inputs)
    near(found, (p * expected[1][-1]).sum(1))

    depths = torch.linspace(0, 1, len(names), dtype=torch.float64)
    by_class = torch.tensordot((3 * depths).softmax(0), expected[2], 1)
    found = gradients.regrad(model, inputs, perturbations=0)
    near(found, (p.sqrt() * by_class).sum(1))


@EVERY
def test_gradnorm_is_the_norm_of_a_gradient(name):
    model, inputs = of_one_tensor(name)
    found = gradients.gradnorm(model, inputs)
    linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
    with parametrize.cached():  # a weight that is computed stays the same tensor
        for x, score in zip(inputs, found, strict=True):
            uniform = -logits(model, x[None]).log_softmax(1).mean()
            (gradient,) = torch.autograd.grad(
                uniform, linear[-1].weight, retain_graph=True
            )
            near(score, -gradient.abs().sum())
