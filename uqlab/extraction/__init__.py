"""Ensembles extracted from one network: by masks, or by tiles of its feature map."""

from uqlab.extraction.masks import (
    Masked,
    MaskEnsemble,
    MaskHistory,
    Masks,
    fit_masks,
    mask_diversity,
    masks,
)
from uqlab.extraction.tiles import tiles

__all__ = [
    "MaskEnsemble",
    "MaskHistory",
    "Masked",
    "Masks",
    "fit_masks",
    "mask_diversity",
    "masks",
    "tiles",
]
