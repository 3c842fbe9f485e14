"""Devices by name."""

import pytest
import torch

from uqlab.core.devices import device

HERE = {
    "cuda": torch.cuda.is_available(),
    "mps": torch.backends.mps.is_available(),
}


@pytest.mark.parametrize("name", HERE)
def test_a_gpu_is_taken_by_name_where_it_is_and_refused_elsewhere(name):
    if HERE[name]:
        assert device(name).type == name
    else:
        with pytest.raises(ValueError, match=r'"mps".*"cuda"'):
            device(name)


def test_a_mac_s_gpu_is_taken_by_its_name(monkeypatch):
    """As on a Mac: tensors can be made there."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device: empty(*sizes))
    assert device("mps") == torch.device("mps")


@pytest.mark.parametrize("name", ["meta", "gpu", "cuda:99", ""])
def test_what_does_not_compute_is_refused(name):
    with pytest.raises(ValueError, match="device must be"):
        device(name)


def test_auto_is_a_device_that_computes():
    assert torch.ones(2, device=device()).sum() == 2
