"""What tests compare: numbers up to rounding, and networks before and after a call."""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.testing import assert_close

# What sums in another order, or by another processor's instructions, may differ by.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}


def near(found, expected, **tolerance) -> None:
    """Assert that numbers are equal up to rounding: a share of each, and a tenth of that share of the largest.

    The share is that of the coarser type of the two; a plain number counts as float32. A `tolerance` of
    `torch.testing.assert_close` is for numbers that were rounded more, or are what is left of larger ones.
    """
    if isinstance(expected, (list, tuple)) and not isinstance(expected[0], float):
        for pair in zip(found, expected, strict=True):
            near(*pair, **tolerance)
        return
    typed = isinstance(found, Tensor) and isinstance(expected, Tensor)
    found, expected = torch.as_tensor(found), torch.as_tensor(expected).detach()
    share = max(ROUNDING.get(each.dtype, 0.0) for each in (found, expected))
    sizes = expected.double().nan_to_num(0, 0, 0).abs()
    largest = sizes.max().item() if sizes.numel() else 0.0
    usual = {"rtol": share, "atol": share / 10 * largest, "check_dtype": typed}
    assert_close(found, expected, **usual | tolerance)


@contextlib.contextmanager
def unchanged(*networks: nn.Module) -> Iterator[None]:
    """Every parameter and buffer has the same bits afterwards."""
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    yield
    for network, state in zip(networks, before, strict=True):
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, state[name]), name
