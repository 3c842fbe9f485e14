"""A user's own data by path: images in an .npz, texts in a table."""

from pathlib import Path
from typing import Any

import numpy as np

from uqlab.core.files import existing
from uqlab.data.readers import Items, npz, split_rows
from uqlab.data.texts import table

SUFFIXES = (".npz", ".tsv", ".tsv.gz", ".csv", ".csv.gz")


def own_file(path: Path, split: str) -> Items:
    """Return one split; `datasets.load` says what the file must hold."""
    path = existing(path)
    return _images(path, split) if path.suffix == ".npz" else table(path, split)


def _images(path: Path, split: str) -> Items:
    """Return one split of an .npz; without splits, a part of each class."""
    arrays = npz(path, "[xy](_train|_test)?")
    end = "" if "x" in arrays else f"_{split}"
    if f"x{end}" not in arrays:
        raise ValueError(f"{path} must hold arrays x, or x_{split}, got {[*arrays]}")
    x = _scaled(path, arrays[f"x{end}"])
    if f"y{end}" not in arrays:
        return Items(x, np.full(len(x), -1), ())
    y = arrays[f"y{end}"]
    every = [arrays[name] for name in arrays if "y" in name]
    classes = _classes(path, y, len(x), np.concatenate(every))
    rows = np.arange(len(y)) if end else split_rows(y, split)
    return Items(x[rows], y[rows].astype(int), classes)


def _classes(path: Path, y: np.ndarray, count: int, every: np.ndarray) -> Any:
    """Return the names of classes; ValueError unless labels are 0, 1, 2, ..."""
    numbers = np.unique(every)
    whole = every.dtype.kind in "iu" and (numbers == np.arange(len(numbers))).all()
    if y.shape != (count,) or not whole:
        raise ValueError(
            f"{path}: y must be {count} class numbers 0, 1, 2, ... without a gap, got "
            f"{y.dtype} {y.shape} of {numbers[:9]}; leave out images without a class, "
            "and use numpy.unique(y, return_inverse=True)[1]"
        )
    return tuple(map(str, numbers))


def _scaled(path: Path, x: np.ndarray) -> np.ndarray:
    """Return images [N, C, H, W]; ValueError unless uint8 or in [0, 1]."""
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4 or not x.size:
        raise ValueError(
            f"{path}: x must be [N, H, W], [N, H, W, C] or [N, C, H, W] and not empty, "
            f"got {x.shape}"
        )
    if x.shape[3] < x.shape[1]:
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.max() != 1:
        return x
    # The comparison is False for NaN too.
    if x.dtype.kind != "f" or not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(
            f"{path}: x must be uint8 up to 255, or floating point in [0, 1] without "
            f"NaN, got {x.dtype} {x.min()} to {x.max()}"
        )
    return x.astype(np.float32)
