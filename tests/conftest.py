"""What all tests share."""

import os

import pytest
import torch
from jaxtyping import config

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_sessionstart():
    """Before tests are collected, because they are skipped where their files are missing."""
    if folder := os.environ.get("UQLAB_DATA"):
        import repacked  # not earlier: the hook that checks shapes must come before the package

        repacked.unpack(folder)


@pytest.fixture
def unchecked():
    """Switch the shape checks of the test run off, to see the errors that a user gets without them."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
