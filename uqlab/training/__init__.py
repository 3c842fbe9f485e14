"""Training and prediction of ensembles: one loop for all methods."""

from uqlab.core import door
from uqlab.core.devices import arithmetic, device
from uqlab.training.loop import History, Workers, crop_flip, fit, predict
from uqlab.training.steps import Optimizer, cross_entropy, make_step

__all__ = [
    "History", "Optimizer", "Workers", "arithmetic", "crop_flip", "cross_entropy", "device", "fit", "make_step",
    "predict",
]  # fmt: skip

door.room(__name__)
