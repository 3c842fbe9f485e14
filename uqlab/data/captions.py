"""Pictures of one shape with a caption each: a world that a small CLIP can learn.

A caption such as "large striped red triangle" names a size, a filling, a colour and a
shape. A fifth of the pairs of colour and shape never occur in training, though the
words do. `NEW` are shapes that no caption of training names.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from uqlab.data.readers import Items, asset

SIDE = 32
# The coordinates of the pixels' centres; the picture reaches from -1 to 1.
TICKS = (torch.arange(SIDE) + 0.5) * 2 / SIDE - 1
SIZES = {"large": (0.62, 0.78), "small": (0.34, 0.46)}  # half of a shape's extent
FILLS = ("filled", "striped", "hollow")
COLOURS = {
    "red": (0.85, 0.1, 0.1),
    "orange": (0.95, 0.5, 0.05),
    "yellow": (0.9, 0.85, 0.1),
    "green": (0.1, 0.6, 0.15),
    "cyan": (0.1, 0.75, 0.8),
    "blue": (0.1, 0.2, 0.85),
    "purple": (0.5, 0.1, 0.7),
    "pink": (0.95, 0.45, 0.75),
}
PAINTS = torch.tensor([*COLOURS.values()])
SHAPES = (
    "circle", "square", "triangle", "diamond", "hexagon", "star", "cross", "arrow",
    "heart", "moon", "letter A", "letter S",
)  # fmt: skip
NEW = {
    "train": ("house", "drop", "letter H", "letter T"),
    "test": ("hourglass", "stairs", "letter R", "letter M"),
}
ALL_SHAPES = [*SHAPES, *NEW["train"], *NEW["test"]]
WORDS = [[*SIZES], [*FILLS], [*COLOURS], ALL_SHAPES]
# The signed distances to outlines [shapes, cells, cells] reach from -REACH to REACH,
# the shapes in them from -1 to 1.
REACH = 1.5


def pictures(
    captions: Sequence[str], seed: int = 0
) -> Float[Tensor, "captions 3 32 32"]:
    """Draw a picture of each caption "<size> <filling> <colour> <shape>", in [0, 1].

    Position, angle, shade, background and noise depend on the seed.
    """
    size, fill, colour, shape = _numbers(captions)
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *more):
        drawn = torch.rand(len(captions), *more, generator=generator)
        return low + (high - low) * drawn

    ink = _filled(fill, *_placed(size, shape, draw), draw)
    paint = PAINTS[colour] * draw(0.75, 1.1, 1) + draw(-0.08, 0.08, 3)
    paint = paint[:, :, None, None]
    slope = draw(-0.15, 0.15, 2, 1, 1)
    brightness = draw(0.15, 0.85, 1, 1, 1)
    shade = brightness + slope[:, :1] * TICKS + slope[:, 1:] * TICKS[:, None]
    noise = torch.randn(len(captions), 3, SIDE, SIDE, generator=generator)
    return (shade + ink * (paint - shade) + 0.07 * noise).clamp(0, 1)


def _numbers(captions):
    """Return the number of each caption's size, filling, colour and shape."""
    columns = zip(*(caption.split(" ", 3) for caption in captions), strict=True)
    return [
        torch.tensor([known.index(word) for word in column])
        for known, column in zip(WORDS, columns, strict=True)
    ]


def _placed(size, shape, draw):
    """Return each pixel's distance to the outline and how far below the centre it is.

    Both are [captions, side, side], the distance in pixels and positive inside; a shape
    is drawn turned, anywhere in the picture.
    """
    reach = draw(*torch.tensor([*SIZES.values()])[size].T)
    angle = draw(-0.25, 0.25)
    centre = draw(-0.95, 0.95, 2) * (0.95 - reach[:, None])
    x = (TICKS - centre[:, :1])[:, None, :]
    y = (TICKS - centre[:, 1:])[:, :, None]
    turned = _turned(x, y, angle[:, None, None])
    reach = reach[:, None, None, None]
    outlines = torch.from_numpy(asset("shapes")["distances"])[shape][:, None]
    distance = F.grid_sample(
        outlines, turned / reach / REACH, padding_mode="border", align_corners=False
    )
    return (distance * reach * SIDE / 2)[:, 0], turned[..., 1]


def _turned(x, y, angle):
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos * x + sin * y, cos * y - sin * x], -1)


def _filled(fill, inside, down, draw):
    """Return how much of each pixel the colour covers [captions, 1, side, side]."""
    whole = (inside + 0.5).clamp(0, 1)
    outline = whole - (inside - 1.3).clamp(0, 1)
    phase = draw(0.0, 6.3)[:, None, None]
    waves = torch.sin(down * math.pi * SIDE / 4.4 + phase)
    stripes = (waves * 2 + 0.5).clamp(0, 1)
    fillings = torch.stack([whole, whole * stripes, outline], 1)
    return fillings[torch.arange(len(fill)), fill][:, None]


@cache
def captions(split):
    """Return pictures of the captions of training, or of those kept for testing.

    The captions for testing are made of the same words and never occur in training.
    """
    shown = []
    pairs = itertools.product(enumerate(COLOURS), enumerate(SHAPES))
    for (c, colour), (s, shape) in pairs:
        if ((c + s) % 5 == 0) == (split == "test"):
            sizes = itertools.product(SIZES, FILLS)
            shown += [f"{size} {fill} {colour} {shape}" for size, fill in sizes]
    return _items(shown, 8 if split == "train" else 10, split)


@cache
def new_shapes(split):
    """Return pictures of shapes that no caption of `captions` names.

    Four are for a search, four others for testing.
    """
    words = itertools.product(SIZES, FILLS, COLOURS, NEW[split])
    return _items([*map(" ".join, words)], 3, split)


def _items(classes, copies, split):
    """Return so many pictures of each caption, which are the classes."""
    numbers = np.arange(len(classes)).repeat(copies)
    shown = pictures([classes[k] for k in numbers], seed=int(split == "test"))
    return Items((shown * 255).round().byte().numpy(), numbers, tuple(classes))
