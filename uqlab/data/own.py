"""A user's own data by path: images in an .npz, texts in a table. Both give what the readers of fetched sets give."""

from pathlib import Path

import numpy as np

from uqlab.data.readers import npz, part
from uqlab.data.texts import table

TABLES = (".tsv", ".tsv.gz", ".csv", ".csv.gz")
SUFFIXES = (".npz", *TABLES)


def own(path: Path, split: str):
    """(inputs, labels, classes, None) of one split; `datasets.load` says what the file must hold."""
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path.absolute()}; relative paths start at the working folder"
        )
    return (table if path.name.endswith(TABLES) else _images)(path, split)


def _images(path, split):
    arrays = npz(
        path, "x", "y", "x_train", "y_train", "x_test", "y_test", optional=True
    )
    suffix = "" if "x" in arrays else f"_{split}"
    if "x" + suffix not in arrays:
        raise ValueError(
            f"{path} holds neither x nor x_{split}, but {sorted(arrays) or 'none of x, x_train, x_test'}"
        )
    x, y = arrays["x" + suffix], arrays.get("y" + suffix)

    if x.ndim not in (3, 4) or 0 in x.shape:
        raise ValueError(
            f"{path}: x must be [N, H, W], [N, H, W, C] or [N, C, H, W] and not empty, got {x.shape}"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.shape[3] < x.shape[1]:
        x = x.transpose(0, 3, 1, 2)
    if x.dtype.kind == "f":
        if not (x.min() >= 0 and x.max() <= 1):  # False for NaN too
            raise ValueError(
                f"{path}: floating-point x must lie in [0, 1] without NaN, got {x.min()} to {x.max()}; "
                "scale it, or store uint8"
            )
    elif x.dtype != np.uint8:
        raise ValueError(
            f"{path}: x must be uint8 or floating point in [0, 1], got {x.dtype}"
        )
    if y is None:
        return x, np.full(len(x), -1), (), None
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: y must be {len(x)} integers, one per image, got {y.dtype} {y.shape}"
        )
    labels = [
        value
        for key, value in arrays.items()
        if key[0] == "y" and value.dtype.kind in "iu" and value.size
    ]
    low, top = int(y.min()), max(int(value.max()) for value in labels)
    if low < 0 or top >= max(1000, *(value.size for value in labels)):
        raise ValueError(
            f"{path}: y must be class numbers 0, 1, 2, ..., got {low} to {top}; number the classes from 0"
        )
    classes = tuple(str(label) for label in range(top + 1))
    rows = np.arange(len(y)) if suffix else part(y, split)
    return x[rows], y[rows].astype(np.int64), classes, None
