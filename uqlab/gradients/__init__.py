"""Uncertainty of one network, from the gradients of its log-probabilities."""

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
    "ClassWeight",
    "exgrad",
    "gradient_norms",
    "gradnorm",
    "layer_shares",
    "reduce_norms",
    "regrad",
]
