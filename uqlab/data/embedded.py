"""The data sets that need no download: stored in `assets/`, or drawn when loaded.

Scripts in `tools/` write the assets. What is returned may be cached.
"""

from functools import partial

import numpy as np

from uqlab.data.captions import captions, new_shapes
from uqlab.data.images import FASHION, KUZUSHIJI
from uqlab.data.readers import DIGITS, Items, asset_split
from uqlab.data.sounds import recordings

# Letters that a digit resembles are left out: D O Q o (0), I l i j (1), Z z (2),
# S s (5), G b (6), B (8), g q (9). So are small letters that look like the capital once
# the height is normalised: c k p u v w x y.
LETTERS = tuple("ACEFHJKLMNPRTUVWXYadefhmnrt")
# Small letters that differ from the capital by size only are left out, and l, which
# looks like I.
GLYPHS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijmnqrt")
EVERYDAY = (
    "dog", "rain", "sea waves", "crying baby", "clock tick", "sneezing", "helicopter",
    "chainsaw", "rooster", "crackling fire",
)  # fmt: skip


def _stored(name, classes, split):
    """Return images of a file in `assets/`, whose README describes them."""
    arrays = asset_split(name, split)
    return Items(arrays["x"][:, None], arrays["y"], classes, fine=arrays.get("fine"))


def _ambiguous(name, split):
    """Return mixtures of two near images of different classes, five times in a row.

    Each has five sampled labels. `tools/make_embedded.py` chose the images of `name`
    and the weights.
    """
    base = asset_split(name, split)
    mixed = asset_split(f"ambiguous-{name}", split)
    pairs = mixed["pairs"]  # [N, 2]
    images = base["x"].astype(np.float32)
    if base["x"].dtype == np.uint8:
        images /= 255
    weights = mixed["weights"][:, :, None, None]
    mixtures = (weights * images[pairs]).sum(1).astype(np.float32)
    soft = np.zeros((len(pairs), 10), np.float32)
    np.put_along_axis(soft, base["y"][pairs].astype(int), mixed["probs"], axis=1)
    x = mixtures[:, None].repeat(5, axis=0)
    return Items(x, mixed["sampled"].ravel(), DIGITS, soft.repeat(5, axis=0))


EMBEDDED = {
    "digits": partial(_stored, "digits", DIGITS),
    "ambiguous-digits": partial(_ambiguous, "digits"),
    "letters": partial(_stored, "letters", LETTERS),
    "textures": partial(_stored, "textures", ("china", "flower")),
    "glyphs": partial(_stored, "glyphs", GLYPHS),
    "mnist-mini": partial(_stored, "mnist-mini", DIGITS),
    "ambiguous-mnist-mini": partial(_ambiguous, "mnist-mini"),
    "fashion-mini": partial(_stored, "fashion-mini", FASHION),
    "kmnist-mini": partial(_stored, "kmnist-mini", KUZUSHIJI),
    "spoken-digits": partial(recordings, "spoken-digits", DIGITS),
    "everyday-sounds": partial(recordings, "everyday-sounds", EVERYDAY),
    "captions": captions,
    "new-shapes": new_shapes,
}
