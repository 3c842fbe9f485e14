"""Gradient scores leave the model as it was, and refuse bad input with a clear error."""

import copy

import pytest
import torch
from same import near
from test_gradients import make
from torch import nn

from uqlab import gradients


def test_the_model_is_left_as_it_was(unchecked):
    model, inputs = make("conv")
    model.train()
    model[0].eval()
    model[0].weight.requires_grad_(False)
    model[5].weight.grad = torch.ones_like(model[5].weight)
    before = copy.deepcopy(model)
    rng = torch.get_rng_state()

    def unchanged():
        assert [part.training for part in model.modules()] == [
            part.training for part in before.modules()
        ]
        for (name, p), q in zip(
            model.named_parameters(), before.parameters(), strict=True
        ):
            assert torch.equal(p, q), name
            assert p.requires_grad == q.requires_grad
            assert (
                torch.equal(p.grad, torch.ones_like(p))
                if name == "5.weight"
                else p.grad is None
            )
        for a, b in zip(model.buffers(), before.buffers(), strict=True):
            assert torch.equal(a, b)
        assert not any(
            part._forward_hooks or part._forward_pre_hooks for part in model.modules()
        )
        assert torch.equal(rng, torch.get_rng_state())

    with torch.no_grad():
        switched = gradients.regrad(model, inputs)
    unchanged()
    near(gradients.regrad(copy.deepcopy(model).eval(), inputs), switched)
    with pytest.raises(RuntimeError, match="to have 2 channels") as error:
        gradients.regrad(model, inputs[:, :1])  # one channel of two
    assert "in layer '0', Conv2d" in error.value.__notes__[0]
    unchanged()


class Returns(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(4, 3), change

    def forward(self, x):
        return self.change(self.linear(x))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda y: y[:, 0], ValueError, r"logits \[samples, C\]"),
        (lambda y: y[:, :1], ValueError, "C >= 2"),
        (lambda y: y[None], ValueError, r"ensemble\.member"),
        (lambda y: y.argmax(1, keepdim=True).expand(-1, 3), ValueError, "floating"),
        (lambda y: {"logits": y.tolist()}, TypeError, "must return logits"),
        (lambda y: y.detach(), ValueError, "no gradient path"),
        (lambda y: y * torch.nan, ValueError, "must be finite"),
        (lambda y: y - 3 * y.mean(0), ValueError, "rest of its batch"),
    ],
)
def test_models_that_are_refused(unchecked, change, error, match):
    for score in (gradients.exgrad, gradients.regrad, gradients.gradient_norms):
        with pytest.raises(error, match=match):
            score(Returns(change), torch.rand(5, 4))


MODEL, INPUTS = nn.Linear(4, 3), torch.linspace(0, 1, 20).reshape(5, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradients.exgrad(lambda x: x, INPUTS), "torch module"),
        (lambda: gradients.exgrad(MODEL, INPUTS[:0]), "at least one"),
        (lambda: gradients.exgrad(MODEL, INPUTS / 0), "must be finite"),
        (lambda: gradients.exgrad(nn.Flatten(), INPUTS), "no gradient path"),
        (
            lambda: gradients.gradnorm(Returns(lambda y: 2 * y), INPUTS),
            "whose output is the logits",
        ),
        (lambda: gradients.regrad(MODEL, INPUTS, sigma=1e30), "use float64"),
    ],
)
def test_bad_input(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": 3}, "norm must be"),
        ({"layers": "head"}, "a list of names among"),
        ({"layers": ["linear"]}, "a list of names among"),
        ({"class_weight": "log_p"}, "class_weight must be"),
        ({"reduction": "D"}, "reduction must be"),
        ({"reduction": "B", "class_weight": "uniform"}, "B and C weigh classes by p"),
        ({"perturbations": -1}, "perturbations must be at least 0"),
        ({"sigma": float("nan")}, r"sigma must be in \[0, inf\), got nan"),
        ({"depth": float("inf")}, r"depth must be in \(-inf, inf\), got inf"),
    ],
)
def test_bad_settings(settings, message, unchecked):
    with pytest.raises(ValueError, match=message):
        gradients.regrad(MODEL, INPUTS, **settings)
