"""Pictures of one shape with a caption each, such as "large striped red triangle": a world that a small CLIP can learn.

A caption names a size, a filling, a colour and a shape. A fifth of the pairs of colour and shape never occur in
training, though the words do. `NEW` are shapes that no caption of training names.
"""

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from scipy.ndimage import distance_transform_edt
from torch import Tensor

SIDE = 32
SIZES = {
    "large": (0.62, 0.78),
    "small": (0.34, 0.46),
}  # half of a shape's extent; the picture reaches from -1 to 1
FILLS = ("filled", "striped", "hollow")
COLOURS = {
    "red": (0.85, 0.1, 0.1), "orange": (0.95, 0.5, 0.05), "yellow": (0.9, 0.85, 0.1), "green": (0.1, 0.6, 0.15),
    "cyan": (0.1, 0.75, 0.8), "blue": (0.1, 0.2, 0.85), "purple": (0.5, 0.1, 0.7), "pink": (0.95, 0.45, 0.75),
}  # fmt: skip
SHAPES = (
    "circle", "square", "triangle", "diamond", "hexagon", "star", "cross", "arrow", "heart", "moon", "letter A",
    "letter S",
)  # fmt: skip
NEW = {
    "train": ("house", "drop", "letter H", "letter T"),
    "test": ("hourglass", "stairs", "letter R", "letter M"),
}
COPIES = {"train": 8, "test": 10}  # pictures of each caption
_CELLS = 96  # of a stencil, which reaches from -1.5 to 1.5; the shape from -1 to 1


def compositions(split: str) -> tuple[str, ...]:
    """The captions of training, or those of testing: every pair of colour and shape is in one of them."""
    held_out = {
        (c, s)
        for c in range(len(COLOURS))
        for s in range(len(SHAPES))
        if (c + s) % 5 == 0
    }
    pairs = itertools.product(enumerate(COLOURS), enumerate(SHAPES))
    chosen = [
        (colour, shape)
        for (c, colour), (s, shape) in pairs
        if ((c, s) in held_out) == (split == "test")
    ]
    return tuple(
        f"{size} {fill} {c} {shape}"
        for c, shape in chosen
        for size in SIZES
        for fill in FILLS
    )


def pictures(
    captions: Sequence[str], seed: int = 0
) -> Float[Tensor, "captions 3 32 32"]:
    """A picture of each caption; position, angle, shade, background and noise follow from the seed.

    Raises ValueError for a caption that is not "<size> <filling> <colour> <shape>" of known words.
    """
    rows = [_numbers(caption) for caption in captions]
    size, fill, colour, shape = torch.tensor(rows).reshape(-1, 4).T
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float, *more: int) -> Tensor:
        return low + (high - low) * torch.rand(len(rows), *more, generator=generator)

    low, high = torch.tensor(list(SIZES.values()))[size].T
    reach = low + (high - low) * draw(0.0, 1.0)
    angle, centre = draw(-0.25, 0.25), draw(-0.95, 0.95, 2) * (0.95 - reach[:, None])
    ticks = (torch.arange(SIDE) + 0.5) * 2 / SIDE - 1
    x = ticks - centre[:, :1]  # [captions, side]
    y = ticks - centre[:, 1:]
    x, y = x[:, None, :], y[:, :, None]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    local = torch.stack(
        [cos * x + sin * y, cos * y - sin * x], -1
    )  # turned about the shape's centre
    stencils = torch.stack([_stencil(name) for name in ALL_SHAPES])[shape][:, None]
    grid = local / reach[:, None, None, None] / 1.5
    inside = F.grid_sample(stencils, grid, padding_mode="border", align_corners=False)[
        :, 0
    ]
    inside = (
        inside * reach[:, None, None] * SIDE / 2
    )  # pixels to the outline, positive inside
    whole = (inside + 0.5).clamp(0, 1)
    outline = whole - (inside - 1.3).clamp(0, 1)
    stripes = (
        torch.sin(local[..., 1] * np.pi * SIDE / 4.4 + draw(0.0, 6.3)[:, None, None])
        * 2
        + 0.5
    ).clamp(0, 1)
    ink = torch.stack([whole, whole * stripes, outline], 1)[
        torch.arange(len(rows)), fill
    ][:, None]

    paint = (
        torch.tensor(list(COLOURS.values()))[colour] * draw(0.75, 1.1, 1)
        + draw(-0.08, 0.08, 3)
    )[:, :, None, None]
    slope = draw(-0.15, 0.15, 2, 1, 1)
    shade = (
        draw(0.15, 0.85, 1, 1, 1) + slope[:, :1] * ticks + slope[:, 1:] * ticks[:, None]
    )
    image = (
        shade
        + ink * (paint - shade)
        + 0.07 * torch.randn(len(rows), 3, SIDE, SIDE, generator=generator)
    )
    return image.clamp(0, 1)


def _numbers(caption: str) -> tuple[int, int, int, int]:
    words = caption.split(" ", 3)
    known: list[list[str]] = [list(SIZES), list(FILLS), list(COLOURS), ALL_SHAPES]
    if len(words) != 4 or not all(
        word in options for word, options in zip(words, known, strict=True)
    ):
        options = "; ".join(", ".join(each) for each in known)
        raise ValueError(
            f"{caption!r} is no caption: give a size, a filling, a colour and a shape, of {options}"
        )
    size, fill, colour, shape = (
        options.index(word) for word, options in zip(words, known, strict=True)
    )
    return size, fill, colour, shape


ALL_SHAPES = [*SHAPES, *NEW["train"], *NEW["test"]]
_CORNERS = {
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": [(-1, 0.85), (1, 0.85), (0, -0.9)],
    "diamond": [(0, -1), (0.75, 0), (0, 1), (-0.75, 0)],
    "cross": [
        (-0.33, -1),
        (0.33, -1),
        (0.33, -0.33),
        (1, -0.33),
        (1, 0.33),
        (0.33, 0.33),
        (0.33, 1),
        (-0.33, 1),
        (-0.33, 0.33),
        (-1, 0.33),
        (-1, -0.33),
        (-0.33, -0.33),
    ],
    "arrow": [
        (-1, -0.3),
        (0.1, -0.3),
        (0.1, -0.85),
        (1, 0),
        (0.1, 0.85),
        (0.1, 0.3),
        (-1, 0.3),
    ],
    "house": [(-0.8, 1), (-0.8, -0.1), (0, -1), (0.8, -0.1), (0.8, 1)],
    "hourglass": [(-0.8, -1), (0.8, -1), (0.15, 0), (0.8, 1), (-0.8, 1), (-0.15, 0)],
    "stairs": [
        (-1, 1),
        (-1, 0.4),
        (-0.35, 0.4),
        (-0.35, -0.25),
        (0.3, -0.25),
        (0.3, -0.9),
        (1, -0.9),
        (1, 1),
    ],
}  # fmt: skip  x to the right, y downwards


@cache
def _stencil(shape: str) -> Tensor:
    """The signed distance to the outline [cells, cells], positive inside; the shape reaches from -1 to 1."""
    ticks = ((np.arange(_CELLS) + 0.5) / _CELLS * 2 - 1) * 1.5
    x, y = np.meshgrid(ticks, ticks)
    if shape == "circle":
        mask = x**2 + y**2 < 0.9**2
    elif shape == "moon":
        mask = (x**2 + y**2 < 1) & ((x - 0.5) ** 2 + y**2 > 0.75**2)
    elif shape == "heart":
        mask = (x**2 + (1.15 * y + np.sqrt(abs(x)) * 0.75 - 0.2) ** 2) < 0.9
    elif shape == "drop":
        mask = (x**2 + (y - 0.3) ** 2 < 0.65**2) | (
            (abs(x) < 0.62 * (y + 1) / 1.25) & (y < 0.3) & (y > -1)
        )
    else:
        mask = (
            _outline(shape)
            .contains_points(np.stack([x.ravel(), y.ravel()], 1))
            .reshape(x.shape)
        )
    inside, outside = (
        np.asarray(distance_transform_edt(each)) for each in (mask, ~mask)
    )
    return torch.from_numpy((inside - outside) * 3 / _CELLS).float()


def _outline(shape: str) -> Path:
    if shape == "hexagon":
        return Path.unit_regular_polygon(6)
    if shape == "star":
        return Path(-np.asarray(Path.unit_regular_star(5, 0.45).vertices), closed=True)
    if shape in _CORNERS:
        return Path([*_CORNERS[shape], _CORNERS[shape][0]], closed=True)
    letter = TextPath(
        (0, 0),
        shape[-1],
        size=10,
        prop=FontProperties(family="DejaVu Sans", weight="bold"),
    )
    points = np.asarray(letter.vertices)
    low, high = np.asarray(letter.get_extents().get_points())
    return Path(
        (points - (low + high) / 2) / (max(high - low) / 2) * [1, -1], letter.codes
    )


@cache
def captions(split):
    """Pictures of the captions of training, or of captions made of the same words that never occur there."""
    return _set(compositions(split), COPIES[split], split)


@cache
def new_shapes(split):
    """Pictures of shapes that no caption of `captions` names: four for a search, four others for testing."""
    kinds = itertools.product(SIZES, FILLS, COLOURS, NEW[split])
    return _set(
        tuple(f"{size} {fill} {colour} {shape}" for size, fill, colour, shape in kinds),
        3,
        split,
    )


def _set(labels: tuple[str, ...], copies: int, split: str):
    made = pictures(
        [label for label in labels for _ in range(copies)],
        seed=0 if split == "train" else 1,
    )
    return (
        (made * 255).round().byte().numpy(),
        np.arange(len(labels)).repeat(copies),
        labels,
        None,
    )
