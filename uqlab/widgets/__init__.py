"""Explorers of what a page has computed. Nothing is trained here.

`cloud`, `alarm`, `front`, `head_map` and `draw` return a `Hand`, a JavaScript module
that answers while the hand moves. The others return an `Explorer`, controls above a
picture from the kernel; `explore` makes one of any drawing function.
"""

from uqlab.widgets.explorer import Explorer
from uqlab.widgets.hands import Hand, alarm, cloud, draw, front, head_map
from uqlab.widgets.networks import gradients, masks, spectra
from uqlab.widgets.predictions import collapse

explore = Explorer

__all__ = [
    "Explorer",
    "Hand",
    "alarm",
    "cloud",
    "collapse",
    "draw",
    "explore",
    "front",
    "gradients",
    "head_map",
    "masks",
    "spectra",
]
