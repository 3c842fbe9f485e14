"""Networks that are written in a less usual way have the same members, or are refused in words."""

import pytest
import torch
from same import near
from torch import nn
from torch.nn.utils import prune

from uqlab import ensembles, extraction, training

S, L, R = nn.Sequential, nn.Linear, nn.ReLU


def inputs(rows=16):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))


# Half precision -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("additive", [False, True])
def test_batch_ensembles_of_half_precision_are_those_of_float32_rounded(dtype, additive):
    torch.manual_seed(0)
    perceptron, x = S(L(6, 8), R(), L(8, 3)), inputs()
    kernel = S(nn.Conv1d(6, 8, 3), R(), nn.Flatten(), L(16, 3))
    for net, given in ((perceptron, x), (kernel, x[..., None] * torch.ones(4))):
        half = ensembles.batch(net.to(dtype), 3, additive=additive)
        whole = ensembles.batch(net.float(), 3, additive=additive)
        for mode in ("vmap", "loop"):
            half.mode = mode
            found = half(given.to(dtype))
            assert found.dtype == dtype
            assert (found.float() - whole(given)).abs().max() < 0.05
