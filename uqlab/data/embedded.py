"""The data sets that need no download: built from what scikit-learn and matplotlib ship, or read from `assets/`.

Each builder takes a split and returns `(inputs, labels, classes, label_probs)` as NumPy arrays: inputs [N, 1, 8, 8] or
[N, 1, 28, 28], float32 in [0, 1] or uint8, labels int64 [N], label_probs float32 [N, C] or None. They are cached, so do
not write to them.
"""

import io
import lzma
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font, LoadFlags
from sklearn.datasets import load_digits, load_sample_images
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import euclidean_distances
from sklearn.model_selection import train_test_split

from uqlab.data.captions import captions, new_shapes
from uqlab.data.grey_images import FASHION, KUZUSHIJI
from uqlab.data.readers import DIGITS
from uqlab.data.sounds import sounds

ASSETS = Path(__file__).parent / "assets"
# Letters that a digit resembles are left out: D O Q o (0), I l i j (1), Z z (2), S s (5), G b (6), B (8),
# g q (9). So are small letters that look like the capital once the height is normalised: c k p u v w x y.
LETTERS = tuple("ACEFHJKLMNPRTUVWXYadefhmnrt")
# Small letters that differ from the capital by size only are left out, and l, which looks like I.
GLYPHS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijmnqrt")
FONTS = (
    "DejaVuSans",
    "DejaVuSerif",
    "STIXGeneral",
    "cmb10",
    "cmmi10",
    "cmr10",
    "cmss10",
    "cmti10",
    "cmtt10",
)


@cache
def digits(split):
    """Handwritten digits of scikit-learn (UCI, Alpaydin & Kaynak 1998): 1257 train, 540 test, stratified."""
    data: Any = load_digits()
    train, test = train_test_split(
        np.arange(len(data.target)), test_size=0.3, stratify=data.target, random_state=0
    )
    rows = train if split == "train" else test
    inputs = (data.images[rows, None] / 16).astype(
        np.float32
    )  # counts of set pixels in 4x4 blocks of a bitmap
    return inputs, data.target[rows].astype(np.int64), DIGITS, None


@cache
def ambiguous_digits(split):
    """Mixtures of two near digits of different classes, each with five sampled labels: 500 train, 200 test images."""
    train, test = digits("train"), digits("test")
    reference = LogisticRegression(C=10, max_iter=1000).fit(
        train[0].reshape(-1, 64), train[1]
    )
    images, labels = (train if split == "train" else test)[:2]
    rng = np.random.default_rng(0 if split == "train" else 1)
    return mixtures(
        images,
        labels,
        *between(images, labels, reference, 500 if split == "train" else 200, rng),
    )


def between(images, labels, reference, count, rng):
    """Pairs of near images of different classes, their weights [count, 2], soft labels [count, 2], five drawn labels.

    As in Ambiguous-MNIST (Mukhoti et al. 2023), a classifier gives the soft label. The log-odds of logistic regression
    are linear between two images: the weight for a wanted probability q is exact, and the soft label is (q, 1 - q).
    """
    x = images.reshape(len(images), -1).astype(np.float64)
    distance = euclidean_distances(x, squared=True)
    distance[labels[:, None] == labels] = np.inf
    near = np.argsort(distance, axis=1, kind="stable")[
        :, :3
    ]  # the three nearest digits of other classes
    pairs = np.stack([np.repeat(np.arange(len(x)), 3), near.ravel()], axis=1)
    i, j = np.unique(np.sort(pairs, axis=1), axis=0).T

    q = rng.uniform(0.2, 0.8, len(i))  # probability of the class of i
    scores = reference.decision_function(x)
    first, second = labels[i], labels[j]
    odds_i, odds_j = (
        scores[i, first] - scores[i, second],
        scores[j, first] - scores[j, second],
    )
    weight = (np.log(q / (1 - q)) - odds_j) / (odds_i - odds_j)
    probs = reference.predict_proba(
        weight[:, None] * x[i] + (1 - weight[:, None]) * x[j]
    )
    row = np.arange(len(i))
    plausible = (
        (odds_i > 0) & (odds_j < 0) & (abs(weight - 0.5) < 0.15)
    )  # both right, and a mixture of both
    plausible &= probs[row, first] + probs[row, second] > 0.95  # no third class
    order = np.argsort(distance[i, j], kind="stable")
    order = order[plausible[order]]
    couple = np.sort([first[order], second[order]], axis=0).T @ [10, 1]
    rank = [
        (couple[:k] == c).sum() for k, c in enumerate(couple)
    ]  # the nearest of each pair of classes first, so
    chosen = order[np.argsort(rank, kind="stable")][
        :count
    ]  # that 3-9 and 5-9 do not crowd out the others
    i, j, weight, q = i[chosen], j[chosen], weight[chosen], q[chosen]
    sampled = np.where(
        rng.random((len(chosen), 5)) < q[:, None], labels[i, None], labels[j, None]
    )
    return (
        np.stack([i, j], axis=1),
        np.stack([weight, 1 - weight], axis=1),
        np.stack([q, 1 - q], axis=1),
        sampled,
    )


def mixtures(images, labels, pairs, weights, probs, sampled):
    """What a builder returns, of the results of `between`: each mixture five times in a row."""
    mixed = (weights[:, :, None, None, None] * images[pairs]).sum(1).astype(np.float32)
    soft = np.zeros((len(pairs), 10), np.float32)
    np.put_along_axis(soft, labels[pairs], probs.astype(np.float32), axis=1)
    return (
        mixed.repeat(5, axis=0),
        sampled.ravel().astype(np.int64),
        DIGITS,
        soft.repeat(5, axis=0),
    )


@cache
def letters(split, side=8):
    """Letters of matplotlib's fonts, processed as the UCI digits were: 1512 train, 648 test images of other fonts."""
    return *_rendered(LETTERS, split, 4 if split == "train" else 3, side), LETTERS, None


@cache
def glyphs(split, side=8):
    """40 kinds of letters, distorted far more than `letters`: 6160 train, 960 test. A task to learn before `digits`."""
    far = {
        "turn": 15,
        "slant": 0.35,
        "height": (23, 32),
        "stretch": (0.7, 1.2),
        "shift": 3,
    }
    return (
        *_rendered(GLYPHS, split, 11 if split == "train" else 3, side, **far),
        GLYPHS,
        None,
    )


def as_mnist(render, split):
    """The images of `letters` or `glyphs`, drawn in 20 x 20 pixels and centred by mass in 28 x 28, as MNIST was."""
    images = render(split, side=20)[0][:, 0]
    field, at = np.zeros((len(images), 1, 28, 28), np.float32), np.arange(20)
    centres = (
        np.stack([images.sum(2) @ at, images.sum(1) @ at], axis=1)
        / images.sum((1, 2))[:, None]
    )
    for image, room, (y, x) in zip(
        images, field, np.rint(13.5 - centres).astype(int).clip(0, 8), strict=True
    ):
        room[0, y : y + 20, x : x + 20] = image
    return field


def _rendered(characters, split, copies, side, **distortion):
    """Each character in each font of the split, `copies` times: images [N, 1, side, side] and labels [N]."""
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
                _bitmap(glyph, outline, rng, 4 * side, **distortion)
                for _ in range(copies)
            ]
            labels += [label] * copies
    blocks = np.stack(images).reshape(-1, 1, side, 4, side, 4).sum((3, 5)) / 16
    return blocks.astype(np.float32), np.array(labels)


def _bitmap(
    glyph,
    outline,
    rng,
    cells,
    *,
    turn=8,
    slant=0.15,
    height=(29, 32),
    stretch=(0.85, 1.1),
    shift=1.5,
):
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
    scale = (
        np.array([tall, min(28, size[1] * tall / size[0] * rng.uniform(*stretch))])
        / size
    )
    offset = (32 - scale * size) / 2 + [0, rng.uniform(-shift, shift)]
    cell = (np.arange(cells) + 0.5) * (32 / cells)  # the centres of the cells
    down, right = (cell - offset[:, None]) / scale[:, None] + low[:, None]
    y, x = (
        np.floor(a * down[:, None] + b * right).astype(int)
        for a, b in np.linalg.inv(turned)
    )
    inside = (y >= 0) & (y < glyph.shape[0]) & (x >= 0) & (x < glyph.shape[1])
    return glyph.take(np.where(inside, y * glyph.shape[1] + x, 0)) & inside


@cache
def textures(split):
    """Grey patches of scikit-learn's two photographs, from disjoint bands: 800 train, 400 test, the least flat ones."""
    inputs = []
    for photo in load_sample_images().images:  # uint8 [427, 640, 3]
        grey = (
            photo[:424] @ np.array([0.299, 0.587, 0.114]) / 255
        )  # luma of ITU-R BT.601
        patches = grey.reshape(53, 8, 80, 8).transpose(
            2, 0, 1, 3
        )  # columns, rows, height, width
        band = (
            np.arange(80) // 8 % 3 == 2
        )  # every third band of 64 pixels is for testing
        patches = patches[band if split == "test" else ~band].reshape(-1, 1, 8, 8)
        order = np.argsort(
            -patches.std((1, 2, 3)), kind="stable"
        )  # sky and blurred background come last
        inputs.append(patches[np.sort(order[: 400 if split == "train" else 200])])
    labels = np.repeat(np.arange(2), len(inputs[0]))
    return np.concatenate(inputs).astype(np.float32), labels, ("china", "flower"), None


@cache
def asset(name):
    """The arrays of one file of `assets/`, which `make_embedded` wrote."""
    packed = lzma.decompress((ASSETS / f"{name}.npz.xz").read_bytes())
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return dict(arrays)


def mini(name, classes, split):
    """Images drawn from an official set, as many of each class; uint8."""
    arrays = asset(name)
    if f"x_{split}" not in arrays:
        raise ValueError(
            f"{name} has no {split} split; it serves as out-of-distribution inputs"
        )
    return (
        arrays[f"x_{split}"][:, None],
        arrays[f"y_{split}"].astype(np.int64),
        classes,
        None,
    )


@cache
def ambiguous_mnist_mini(split):
    """`ambiguous_digits` of mnist-mini: 1200 train, 400 test images."""
    images, labels, _, _ = EMBEDDED["mnist-mini"](split)
    mixed = asset("ambiguous-mnist-mini")
    kinds = (
        mixed[f"{kind}_{split}"] for kind in ("pairs", "weights", "probs", "sampled")
    )
    return mixtures(images.astype(np.float32) / 255, labels, *kinds)


FINE = {
    "letters": partial(as_mnist, letters),
    "glyphs": partial(as_mnist, glyphs),
}  # set -> its images of 28 x 28
EMBEDDED = {
    "digits": digits,
    "ambiguous-digits": ambiguous_digits,
    "letters": letters,
    "textures": textures,
    "glyphs": glyphs,
    "mnist-mini": partial(mini, "mnist-mini", DIGITS),
    "ambiguous-mnist-mini": ambiguous_mnist_mini,
    "fashion-mini": partial(mini, "fashion-mini", FASHION),
    "kmnist-mini": partial(mini, "kmnist-mini", KUZUSHIJI),
    "sounds": sounds,
    "captions": captions,
    "new-shapes": new_shapes,
}
