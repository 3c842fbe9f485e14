"""Training and prediction of ensembles: one loop for all methods."""

from uqlab.core.devices import arithmetic, device
from uqlab.training.augmentation import crop_flip
from uqlab.training.loop import History, State, fit
from uqlab.training.losses import cross_entropy, gaussian_nll, member_mean
from uqlab.training.prediction import predict
from uqlab.training.sharded import fit_sharded
from uqlab.training.workers import Workers

__all__ = [
    "History", "State", "Workers", "arithmetic", "crop_flip", "cross_entropy",
    "device", "fit", "fit_sharded", "gaussian_nll", "member_mean", "predict",
]  # fmt: skip
