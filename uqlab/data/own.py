"""A user's own data by path: images in an .npz, texts in a table."""

from pathlib import Path

import numpy as np

from uqlab.core.files import existing
from uqlab.data.readers import Items, npz, split_rows
from uqlab.data.texts import table

TABLES = (".tsv", ".tsv.gz", ".csv", ".csv.gz")
SUFFIXES = (".npz", *TABLES)


def own_file(path: Path, split: str) -> Items:
    """Return one split; `datasets.load` says what the file must hold."""
    read = table if path.name.endswith(TABLES) else _images
    return read(existing(path), split)


def _images(path: Path, split: str) -> Items:
    """Return one split of an .npz; without splits, a part of each class."""
    arrays = npz(path, "x", "y", "x_train", "y_train", "x_test", "y_test")
    suffix = "" if "x" in arrays else f"_{split}"
    if "x" + suffix not in arrays:
        raise ValueError(
            f"{path} holds neither x nor x_{split}, "
            f"but {sorted(arrays)}; "
            'numpy.savez("mine.npz", x=images, y=labels)'
        )
    x = _scaled(path, arrays["x" + suffix])
    if "y" + suffix not in arrays:
        return Items(x, np.full(len(x), -1), ())
    y = arrays["y" + suffix]
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: y must be {len(x)} integers, got {y.dtype} {y.shape}; use "
            "y.astype(int), of columns y.argmax(1), of texts numpy.unique(y, "
            "return_inverse=True)[1]"
        )
    other = arrays.get("y_train" if split == "test" else "y_test", y)
    classes = _classes(path, np.append(y, other))
    rows = np.arange(len(y)) if suffix else split_rows(y, split)
    return Items(x[rows], y[rows], classes)


def _classes(path: Path, labels: np.ndarray) -> tuple[str, ...]:
    """Return the names of classes; ValueError unless labels are their numbers."""
    low = int(labels.min())
    top = int(labels.max())
    ignored = top == 255 and 254 not in labels  # uint8 writes "no label" so
    if low < 0 or low == 1 < top or ignored or top >= max(1000, len(labels)):
        raise ValueError(
            f"{path}: y must be class numbers 0, 1, 2, ..., got {low} to {top}; "
            "number the classes from 0, y - y.min(), and leave out images without one"
        )
    return tuple(map(str, range(top + 1)))


def _scaled(path: Path, x: np.ndarray) -> np.ndarray:
    """Return images [N, C, H, W]; ValueError unless uint8 or in [0, 1]."""
    if x.ndim not in (3, 4) or 0 in x.shape:
        raise ValueError(
            f"{path}: x must be [N, H, W], [N, H, W, C] or [N, C, H, W] and not empty, "
            f"got {x.shape}"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.shape[3] < x.shape[1]:
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.max() != 1:
        return x
    # The comparison is False for NaN too.
    if x.dtype.kind != "f" or not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(
            f"{path}: x must be uint8, or floating point in [0, 1] without NaN, "
            f"got {x.dtype} {x.min()} to {x.max()}; scale it, or store uint8 up to 255"
        )
    return x
