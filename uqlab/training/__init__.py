"""Training and prediction of ensembles: one loop for all methods."""

from uqlab.core.devices import arithmetic, device
from uqlab.training.augmentation import crop_flip
from uqlab.training.batches import read_batches
from uqlab.training.loop import History, State, fit
from uqlab.training.losses import cross_entropy, member_mean
from uqlab.training.prediction import predict
from uqlab.training.workers import Workers

__all__ = [
    "History", "State", "Workers", "arithmetic", "crop_flip", "cross_entropy",
    "device", "fit", "member_mean", "predict", "read_batches",
]  # fmt: skip
