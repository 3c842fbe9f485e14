"""The small networks are as they should be, and gradient scores are right on each."""

import pytest
import torch
from networks import NETWORKS, logits
from same import near
from torch import nn
from torch.nn.utils import parametrize

from uqlab import gradients

EVERY = pytest.mark.parametrize("name", NETWORKS)


@EVERY
def test_logits_repeat_and_differ_by_input(name):
    network = NETWORKS[name]
    found = logits(network.make(), network.inputs(5)).detach()
    assert found.isfinite().all()
    assert torch.pdist(found, float("inf")).min() > 1e-3
    assert torch.equal(logits(network.make(), network.inputs(5)), found)


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
    """Gradients of each log-probability of each input by plain autograd: their norms [layers, inputs, classes]."""
    owned = {name: [] for name in names}
    for key, p in model.named_parameters():
        owned.get(key.rpartition(".")[0], []).append(p)
    rows = []
    for x in inputs:
        for value in logits(model, x[None]).log_softmax(1)[0]:
            for own in owned.values():
                how = {"retain_graph": True, "allow_unused": True}
                found = torch.autograd.grad(value, own, **how)
                flat = [g.flatten() for g in found if g is not None]
                rows.append(torch.cat([*flat, torch.zeros(1).double()]))
    norms = (torch.stack([row.norm(q) for row in rows]) for q in (1, 2))
    return [n.view(len(inputs), 3, len(names)).movedim(2, 0) for n in norms]


@EVERY
def test_gradient_scores_are_those_of_a_loop(name):
    model, inputs = of_one_tensor(name)
    p = logits(model, inputs).detach().softmax(1)
    one, names, _ = gradients.gradient_norms(model, inputs, norm=1)
    two, _, _ = gradients.gradient_norms(model, inputs, norm=2)
    expected = loop(model, inputs, names)
    near([one, two], expected)
    near(gradients.exgrad(model, inputs), (p * expected[0][-1]).sum(1))
    depths = torch.linspace(0, 1, len(names), dtype=torch.float64)
    by_class = torch.tensordot((3 * depths).softmax(0), expected[1], 1)
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
            (gradient,) = torch.autograd.grad(uniform, linear[-1].weight)
            near(score, -gradient.abs().sum())
