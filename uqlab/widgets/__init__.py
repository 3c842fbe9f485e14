"""Explorers: sliders above a picture of what a page computed."""

from uqlab.widgets.explorer import Explorer
from uqlab.widgets.networks import gradients, head_map, masks, spectra
from uqlab.widgets.predictions import collapse, explore, groups, simplex, widths

__all__ = [
    "Explorer", "collapse", "explore", "gradients", "groups", "head_map", "masks", "simplex", "spectra", "widths",
]  # fmt: skip
