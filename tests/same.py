"""That a call leaves networks as they were."""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def unchanged(*networks: nn.Module) -> Iterator[None]:
    """Every parameter and buffer has the same bits afterwards."""
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    yield
    for network, state in zip(networks, before, strict=True):
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, state[name]), name
