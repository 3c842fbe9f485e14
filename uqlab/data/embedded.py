"""The data sets that need no download: stored in `assets/`, or drawn where asked for.

Scripts in `tools/` write the assets. What is returned may be cached.
"""

from functools import partial

import numpy as np

from uqlab.data.captions import captions, new_shapes
from uqlab.data.grey_images import FASHION, KUZUSHIJI
from uqlab.data.readers import DIGITS, Items, asset
from uqlab.data.sounds import sounds

# Letters that a digit resembles are left out: D O Q o (0), I l i j (1), Z z (2),
# S s (5), G b (6), B (8), g q (9). So are small letters that look like the capital once
# the height is normalised: c k p u v w x y.
LETTERS = tuple("ACEFHJKLMNPRTUVWXYadefhmnrt")
# Small letters that differ from the capital by size only are left out, and l, which
# looks like I.
GLYPHS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijmnqrt")


def stored(name, classes, split):
    """Return images of a file in `assets/`, whose README says what they are."""
    arrays = asset(name)
    if f"x_{split}" not in arrays:
        raise ValueError(
            f"{name} has no {split} split; it serves as out-of-distribution inputs"
        )
    images, labels = arrays[f"x_{split}"][:, None], arrays[f"y_{split}"]
    return Items(images, labels, classes, fine=arrays.get(f"fine_{split}"))


def ambiguous(name, split):
    """Return mixtures of two near images of different classes, five times in a row.

    Each has five sampled labels. `tools/make_embedded.py` chose the images of `name`
    and the weights.
    """
    base, mixed = asset(name), asset("ambiguous-" + name)
    images, labels = base[f"x_{split}"][:, None].astype(np.float32), base[f"y_{split}"]
    if base[f"x_{split}"].dtype == np.uint8:
        images /= 255
    pairs, weights, probs, sampled = (
        mixed[f"{kind}_{split}"] for kind in ("pairs", "weights", "probs", "sampled")
    )
    mixtures = (weights[:, :, None, None, None] * images[pairs]).sum(1)
    soft = np.zeros((len(pairs), 10), np.float32)
    np.put_along_axis(soft, labels[pairs].astype(int), probs, axis=1)
    images = mixtures.astype(np.float32).repeat(5, axis=0)
    return Items(images, sampled.ravel(), DIGITS, soft.repeat(5, axis=0))


EMBEDDED = {
    "digits": partial(stored, "digits", DIGITS),
    "ambiguous-digits": partial(ambiguous, "digits"),
    "letters": partial(stored, "letters", LETTERS),
    "textures": partial(stored, "textures", ("china", "flower")),
    "glyphs": partial(stored, "glyphs", GLYPHS),
    "mnist-mini": partial(stored, "mnist-mini", DIGITS),
    "ambiguous-mnist-mini": partial(ambiguous, "mnist-mini"),
    "fashion-mini": partial(stored, "fashion-mini", FASHION),
    "kmnist-mini": partial(stored, "kmnist-mini", KUZUSHIJI),
    "sounds": sounds,
    "captions": captions,
    "new-shapes": new_shapes,
}
