"""What all tests share."""

import pytest
import torch
from jaxtyping import config

torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture
def unchecked():
    """Switch the shape checks of the test run off, to see the errors that a user gets without them."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
