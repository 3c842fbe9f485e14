"""Explorers: controls above a picture of what a page has computed. Nothing is trained here.

Each function returns an `Explorer`, a box of ipywidgets; `explore` makes one of any drawing function. Arrow keys move a
slider that has the focus.
"""

from uqlab.widgets.explorer import Explorer
from uqlab.widgets.networks import gradients, head_map, masks, spectra
from uqlab.widgets.predictions import collapse, groups, simplex, widths

explore = Explorer

__all__ = [
    "Explorer", "collapse", "explore", "gradients", "groups", "head_map", "masks", "simplex", "spectra", "widths",
]  # fmt: skip
