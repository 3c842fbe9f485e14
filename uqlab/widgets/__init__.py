"""Explorers of what a page has computed. Nothing is trained here.

Each is a `Hand`, a JavaScript module that answers in the browser, with a kernel or
without one; `explore` makes one of any drawing function, `guess` asks the reader first.
"""

from uqlab.core.extras import extra

with extra("notebooks"):
    from uqlab.widgets.frames import Control, collapse, explore, head_map, masks
    from uqlab.widgets.hands import (
        Hand,
        alarm,
        cloud,
        draw,
        front,
        guess,
        spectra,
    )

__all__ = [
    "Control",
    "Hand",
    "alarm",
    "cloud",
    "collapse",
    "draw",
    "explore",
    "front",
    "guess",
    "head_map",
    "masks",
    "spectra",
]
