"""Laplace-LoRA: the curvature against the full matrix, the draws against its inverse."""

import pytest
import torch
from same import near
from small_networks import cnn, images, moved, vit
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from uqlab import ensembles, training
from uqlab.ensembles import LowRank
from uqlab.ensembles.laplace import (
    Curvature,
    curvatures,
    projection_curvature,
)


def small(scale=1.0):
    """A LoRA layer of rank 2 between 4 features and 3, and a classifier of 3 classes, in float64."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    return moved(ensembles.lora(net, 1, 2, scale=scale))


def full(ensemble, inputs, name):
    """The whole generalised Gauss-Newton matrix of the summed cross-entropy by A or B, from Jacobians."""
    layer = next(part for part in ensemble.modules() if isinstance(part, LowRank))
    p = layer.get_parameter(name)
    total = torch.zeros(p.numel(), p.numel(), dtype=torch.float64)
    for x in inputs:
        logits = ensemble(x[None])[0, 0]
        slopes = torch.stack(
            [torch.autograd.grad(z, p, retain_graph=True)[0].flatten() for z in logits]
        )
        probabilities = logits.softmax(-1).detach()
        total += (
            slopes.T
            @ (torch.diag(probabilities) - torch.outer(probabilities, probabilities))
            @ slopes
        )
    return total


@pytest.mark.parametrize(("copies", "scale"), [(1, 1.0), (3, -2.5)])
def test_for_one_input_the_product_is_the_full_matrix(copies, scale):
    ensemble, x = small(scale), torch.rand(1, 4, dtype=torch.float64).expand(copies, -1)
    down, up = curvatures(ensemble, x, batch_size=2)["0.weight"]
    near(torch.kron(down.outputs, down.inputs), full(ensemble, x, "lora_A"))
    near(torch.kron(up.outputs, up.inputs), full(ensemble, x, "lora_B"))


class Patches(nn.Module):
    """What a convolution of 2 x 2 multiplies by its kernel: [batch, places, numbers]."""

    def __init__(self, dilation=1, padding=0, stride=1):
        super().__init__()
        self.how = dilation, padding, stride

    def forward(self, x):
        return F.unfold(x, 2, *self.how).mT


class Turned(nn.Module):
    def forward(self, x):
        return x.mT


@pytest.mark.parametrize(
    ("how", "patches"),
    [
        ({}, {}),
        ({"stride": 2, "padding": 1}, {"stride": 2, "padding": 1}),
        ({"padding": "same", "dilation": 2}, {"padding": 1, "dilation": 2}),
    ],
)
def test_a_convolution_is_a_linear_layer_on_its_patches(how, patches):
    torch.manual_seed(0)
    end = [nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)]
    net = nn.Sequential(nn.Conv2d(2, 3, 2, **how), *end).double()
    x = torch.rand(5, 2, 2, 2, dtype=torch.float64)
    net(x)
    linear = nn.Linear(8, 3).double()
    linear.weight.data, linear.bias.data = net[0].weight.flatten(1), net[0].bias
    twin = nn.Sequential(Patches(**patches), linear, Turned(), *end)
    ensemble, other = (
        moved(ensembles.lora(each, 1, 2, std=0.5)) for each in (net, twin)
    )
    near(ensemble(x), other(x))
    near(curvatures(ensemble, x)["0.weight"], curvatures(other, x)["1.weight"])
    if not how:  # the kernel covers the map
        for name, curvature in zip(
            ("lora_A", "lora_B"), curvatures(ensemble, x[:1])["0.weight"], strict=True
        ):
            near(
                torch.kron(curvature.outputs, curvature.inputs),
                full(ensemble, x[:1], name),
            )


def test_for_several_inputs_it_is_the_sum_by_outputs_and_the_mean_by_inputs():
    ensemble, x = small(), torch.rand(6, 4, dtype=torch.float64)
    layer, member = (
        next(part for part in ensemble.modules() if isinstance(part, LowRank)),
        ensemble.member(0),
    )
    outputs = torch.zeros(3, 3, dtype=torch.float64)
    for y in member[0](x).detach():
        slopes, p = (
            torch.autograd.functional.jacobian(member[1:], y),
            member[1:](y).softmax(-1).detach(),
        )
        outputs += slopes.T @ (torch.diag(p) - torch.outer(p, p)) @ slopes
    low, up = x @ layer.lora_A[0].detach().T, layer.lora_B[0].detach()
    for size in (6, 4):  # batches
        of_a, of_b = curvatures(ensemble, x, batch_size=size)["0.weight"]
        near(of_b, Curvature(outputs, low.T @ low / 6))
        near(of_a, Curvature(up.T @ outputs @ up, x.T @ x / 6))


def test_draws_have_the_inverse_as_their_covariance():
    torch.manual_seed(0)
    a, b = (
        torch.randn(3, 2, dtype=torch.float64),
        torch.randn(4, 3, dtype=torch.float64),
    )
    curvature, generator = Curvature(a @ a.T, b @ b.T), torch.Generator().manual_seed(0)
    drawn = torch.stack(
        [curvature.draw(0.5, generator).flatten() for _ in range(5_000)]
    )
    expected = torch.linalg.inv(
        torch.kron(a @ a.T, b @ b.T) + 0.5 * torch.eye(12, dtype=torch.float64)
    )
    assert_close(drawn.T.cov(), expected, rtol=0.1, atol=0.06)


def test_an_activation_in_place_has_the_curvature_of_one_that_is_not():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    trained, x = moved(ensembles.lora(net, 1, 2)), torch.randn(9, 4)
    pair = curvatures(trained, x)["0.weight"]
    trained.network[1].inplace = False
    near(pair, curvatures(trained, x)["0.weight"])


@pytest.mark.parametrize("network", [vit, cnn])
def test_members_lie_around_the_trained_network(network):
    (x, y), backbone = images(12), network()
    trained = ensembles.lora(backbone, 1, 2, seed=3)
    training.fit(
        trained,
        x,
        y,
        epochs=2,
        lr=0.02,
        optimizer="adamw",
        batch_size=4,
        progress=False,
    )
    before = trained(x).detach()
    ensemble = ensembles.laplace_lora(trained, x, 3, seed=1)
    together = ensemble(x)
    near(trained(x), before)
    narrow = ensembles.laplace_lora(trained, x, 3, prior_variance=1e-14)
    near(narrow(x), before.expand(3, -1, -1), atol=1e-4)
    shards = [
        ensembles.laplace_lora(trained, x, part, seed=1)
        for part in (range(0, 1), range(1, 3))
    ]
    near(ensembles.concatenate(shards)(x), together)


def test_a_projection_has_the_gauss_newton_matrix_of_its_own_logits():
    """Against J^T (diag p - p p^T) J with the Jacobian by autograd, summed over the samples."""
    torch.manual_seed(0)
    h, weight, others = (
        torch.randn(*size, dtype=torch.double) for size in ((5, 4), (3, 4), (6, 3))
    )

    def logits(z):
        return 7 * torch.nn.functional.normalize(z, dim=0) @ others.T

    expected = torch.zeros(3, 3, dtype=torch.double)
    for z in h @ weight.T:
        slopes, p = torch.func.jacrev(logits)(z), logits(z).softmax(0)
        expected += slopes.T @ (p.diag() - p.outer(p)) @ slopes
    found = projection_curvature(h, weight, others, 7.0)
    near(found, Curvature(expected, h.T @ h / 5))
    longer = projection_curvature(h, 2 * weight, others, 7.0)
    near(4 * longer.outputs, found.outputs)  # only the direction matters
