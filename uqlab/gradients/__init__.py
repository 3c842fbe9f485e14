"""Uncertainty of one pretrained network from the gradients of its output by its weights."""

from uqlab.core import door
from uqlab.gradients.scores import (
    ClassWeight,
    exgrad,
    gradient_norms,
    gradnorm,
    layer_shares,
    reduce_norms,
    regrad,
)

__all__ = [
    "ClassWeight", "exgrad", "gradient_norms", "gradnorm", "layer_shares", "reduce_norms", "regrad",
]  # fmt: skip

door.room(__name__)
