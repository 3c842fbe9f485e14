"""Draw the files of `uqlab/data/assets/` that need no data: `python tools/draw_letters.py [TARGET]`.

`letters` and `glyphs` are drawn with the fonts that matplotlib ships, in 8 x 8 and in 28 x 28 pixels;
`shapes` are those that the pictures of `captions` show. Another version of FreeType may draw other pixels.
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np
from make_embedded import write
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font, LoadFlags
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from scipy.ndimage import distance_transform_edt

from uqlab.data.captions import ALL_SHAPES, REACH
from uqlab.data.embedded import GLYPHS, LETTERS
from uqlab.data.readers import ASSETS

CELLS = 96  # of a side of a drawn shape
FONTS = (
    "DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmb10", "cmmi10", "cmr10", "cmss10", "cmti10", "cmtt10",
)  # fmt: skip
NEAR = {
    "turn": 8,
    "slant": 0.15,
    "height": (29, 32),
    "stretch": (0.85, 1.1),
    "shift": 1.5,
}
FAR = {"turn": 15, "slant": 0.35, "height": (23, 32), "stretch": (0.7, 1.2), "shift": 3}
DRAWN = {  # set -> characters, copies of each character and font in each split, distortion
    "letters": (LETTERS, {"train": 4, "test": 3}, NEAR),
    "glyphs": (GLYPHS, {"train": 11, "test": 3}, FAR),
}
CORNERS = {
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


def as_mnist(images):
    """Images [N, 20, 20] centred by mass in 28 x 28, as MNIST was made."""
    field, at = np.zeros((len(images), 1, 28, 28), images.dtype), np.arange(20)
    images = images.astype(np.float32)
    mass = np.stack([images.sum(2) @ at, images.sum(1) @ at], axis=1)
    centres = mass / images.sum((1, 2))[:, None]
    corners = np.rint(13.5 - centres).astype(int).clip(0, 8)
    for image, room, (y, x) in zip(images, field, corners, strict=True):
        room[0, y : y + 20, x : x + 20] = image
    return field


def rendered(characters, split, copies, side, distortion):
    """Each character in each font of the split, `copies` times: images [N, side, side] and labels [N]."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = sorted(
        path
        for path in folder.glob("*.ttf")
        if path.stem.startswith(FONTS) and "Display" not in path.stem
    )
    fonts = [path for k, path in enumerate(paths) if (k % 3 == 0) == (split == "test")]
    rng = np.random.default_rng(0 if split == "train" else 1)
    images, labels = [], []
    for path in fonts:
        font = FT2Font(str(path))
        font.set_size(96, 72)
        for label, character in enumerate(characters):
            font.set_text(character, 0.0, flags=LoadFlags.NO_HINTING)
            font.draw_glyphs_to_bitmap()
            glyph = np.asarray(font.get_image()) > 127
            across = np.flatnonzero(
                glyph.any(1)
            )  # rows with ink; their first and last pixels bound all others
            ends = [
                glyph[across].argmax(1),
                glyph.shape[1] - 1 - glyph[across, ::-1].argmax(1),
            ]
            outline = np.concatenate(
                [np.stack([across, end], axis=1) for end in ends]
            )  # (y, x)
            images += [
                bitmap(glyph, outline, rng, 4 * side, **distortion)
                for _ in range(copies)
            ]
            labels += [label] * copies
    blocks = np.stack(images).reshape(-1, side, 4, side, 4).sum((2, 4)) / 16
    return blocks.astype(np.float16), np.array(labels, np.uint8)


def bitmap(glyph, outline, rng, cells, *, turn, slant, height, stretch, shift):
    """A glyph, turned by up to `turn` degrees, as a bitmap of cells x cells: full height, at most 28/32 wide, like the
    UCI digits. Lengths are in units of 1/32 of the bitmap's side.
    """
    angle, shear = np.deg2rad(rng.uniform(-turn, turn)), rng.uniform(-slant, slant)
    turned = np.array(
        [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    ) @ [[1, 0], [shear, 1]]
    ink = outline @ turned.T
    low, size = ink.min(0), np.ptp(ink, axis=0) + 1
    tall = rng.uniform(*height)
    wide = min(28, size[1] * tall / size[0] * rng.uniform(*stretch))
    scale = np.array([tall, wide]) / size
    offset = (32 - scale * size) / 2 + [0, rng.uniform(-shift, shift)]
    cell = (np.arange(cells) + 0.5) * (32 / cells)  # the centres of the cells
    down, right = (cell - offset[:, None]) / scale[:, None] + low[:, None]
    y, x = (
        np.floor(a * down[:, None] + b * right).astype(int)
        for a, b in np.linalg.inv(turned)
    )
    inside = (y >= 0) & (y < glyph.shape[0]) & (x >= 0) & (x < glyph.shape[1])
    return glyph.take(np.where(inside, y * glyph.shape[1] + x, 0)) & inside


def letters(name):
    """The arrays of one set: `x` in 8 x 8 and `fine` in 28 x 28 pixels, both in [0, 1], and labels `y`."""
    characters, copies, distortion = DRAWN[name]
    arrays = {}
    for split, count in copies.items():
        small, labels = rendered(characters, split, count, 8, distortion)
        large, _ = rendered(characters, split, count, 20, distortion)
        arrays |= {
            f"x_{split}": small,
            f"fine_{split}": as_mnist(large),
            f"y_{split}": labels,
        }
    return arrays


def mask(shape):
    """Where a shape is [CELLS, CELLS]; it reaches from -1 to 1 in a frame from -REACH to REACH."""
    ticks = ((np.arange(CELLS) + 0.5) / CELLS * 2 - 1) * REACH
    x, y = np.meshgrid(ticks, ticks)
    if shape == "circle":
        return x**2 + y**2 < 0.9**2
    if shape == "moon":
        return (x**2 + y**2 < 1) & ((x - 0.5) ** 2 + y**2 > 0.75**2)
    if shape == "heart":
        return (x**2 + (1.15 * y + np.sqrt(abs(x)) * 0.75 - 0.2) ** 2) < 0.9
    if shape == "drop":
        ball, tip = x**2 + (y - 0.3) ** 2 < 0.65**2, abs(x) < 0.62 * (y + 1) / 1.25
        return ball | (tip & (y < 0.3) & (y > -1))
    return (
        outline(shape)
        .contains_points(np.stack([x.ravel(), y.ravel()], 1))
        .reshape(x.shape)
    )


def outline(shape):
    if shape == "hexagon":
        return Outline.unit_regular_polygon(6)
    if shape == "star":
        return Outline(
            -np.asarray(Outline.unit_regular_star(5, 0.45).vertices), closed=True
        )
    if shape in CORNERS:
        return Outline([*CORNERS[shape], CORNERS[shape][0]], closed=True)
    bold = FontProperties(family="DejaVu Sans", weight="bold")
    letter = TextPath((0, 0), shape[-1], size=10, prop=bold)
    points = np.asarray(letter.vertices)
    low, high = np.asarray(letter.get_extents().get_points())
    return Outline(
        (points - (low + high) / 2) / (max(high - low) / 2) * [1, -1], letter.codes
    )


def made():
    """File of `assets/` -> its arrays."""
    masks = [mask(shape) for shape in ALL_SHAPES]
    distances = [distance_transform_edt(m) - distance_transform_edt(~m) for m in masks]
    outlines = np.stack(distances) * 2 * REACH / CELLS  # positive inside
    shapes = {"shapes": {"distances": outlines.astype(np.float32)}}
    return {name: letters(name) for name in DRAWN} | shapes


if __name__ == "__main__":
    write(made(), *sys.argv[1:] or [ASSETS])
