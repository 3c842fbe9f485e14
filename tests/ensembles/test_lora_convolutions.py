"""Convolutions of implicit ensembles: LoRA's kernel of low rank beside a frozen one, BatchEnsemble's scaling."""

import pytest
import torch
from same import near
from torch import nn
from torch.func import functional_call

from uqlab.ensembles import LowRank, Scaled

SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": "same"}]
)


@SETTINGS
@pytest.mark.parametrize(("size", "scale"), [(1, 1.0), (3, 1.0), (3, -2.5)])
def test_it_is_a_convolution_with_another_kernel(size, scale, settings):
    torch.manual_seed(0)
    plain, x = nn.Conv2d(2, 5, size, **settings), torch.rand(4, 2, 9, 9)
    low = LowRank(torch.randn(2, 2 * size**2), torch.randn(5, 2), scale)
    kernel = low(plain.weight)
    update = scale * low.lora_B @ low.lora_A
    near((kernel - plain.weight).flatten(1), update)
    # A convolution to two channels, and one of 1 x 1.
    down, up = (
        nn.Conv2d(2, 2, size, **settings, bias=False),
        nn.Conv2d(2, 5, 1, bias=False),
    )
    down.weight.data = low.lora_A.data.view_as(down.weight)
    up.weight.data = low.lora_B.data.view_as(up.weight)
    member = functional_call(plain, {"weight": kernel}, (x,))
    near(member, plain(x) + scale * up(down(x)))


@SETTINGS
def test_batch_ensemble_scales_the_channels_of_one_kernel(settings):
    torch.manual_seed(0)
    plain, x = nn.Conv2d(2, 5, 3, **settings), torch.rand(4, 2, 9, 9)
    scaled = Scaled(torch.randn(5), torch.randn(2))
    member = functional_call(plain, {"weight": scaled(plain.weight)}, (x,))
    bias = plain.bias.view(-1, 1, 1)
    inputs = x * scaled.s.view(-1, 1, 1)
    near(member, (plain(inputs) - bias) * scaled.r.view(-1, 1, 1) + bias)
