"""What tests compare: outputs up to rounding, and networks before and after a call."""

import contextlib
import copy
import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch.testing import assert_close

# Sums in another order.
near = functools.partial(assert_close, rtol=1e-4, atol=1e-5)
near_in_float64 = functools.partial(assert_close, rtol=1e-9, atol=1e-9)


@contextlib.contextmanager
def unchanged(*networks: nn.Module) -> Iterator[None]:
    """Every parameter and buffer has the same bits afterwards."""
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    yield
    for network, state in zip(networks, before, strict=True):
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, state[name]), name
