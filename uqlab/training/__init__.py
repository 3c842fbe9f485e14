"""Training and prediction of ensembles: one loop for all methods."""

from uqlab.core.modules import arithmetic, device
from uqlab.training.batches import crop_flip
from uqlab.training.loop import History, State, fit
from uqlab.training.losses import cross_entropy, gaussian_nll, member_mean
from uqlab.training.prediction import predict
from uqlab.training.sharded import fit_sharded

__all__ = [
    "History", "State", "arithmetic", "crop_flip", "cross_entropy",
    "device", "fit", "fit_sharded", "gaussian_nll", "member_mean", "predict",
]  # fmt: skip
