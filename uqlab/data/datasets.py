"""Data sets by name: embedded ones, downloads checked by checksum, and your own arrays.

test = load("digits[0-6]"); ood = load("digits[7-9]"); far = load("cifar10", limit=1000).resize(8, channels=1)
"""

import difflib
import operator
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import interpolate

from uqlab.data.downloads import FILES, fetch
from uqlab.data.embedded import EMBEDDED
from uqlab.data.readers import SOURCES, npz

__all__ = ["Dataset", "file", "load", "names"]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Inputs and labels of one split; `data[i]` is (input, label), a slice, index or mask gives a Dataset."""

    inputs: Float[Tensor, "samples channels height width"] | list[str]  # images in [0, 1], or texts
    labels: Int[Tensor, " samples"]  # int64; -1 where the set has none
    name: str
    split: str
    classes: tuple[str, ...]  # the name of each label
    label_probs: Float[Tensor, "samples classes"] | None = None  # soft ground truth, of which labels may be samples

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        kind = "texts" if isinstance(self.inputs, list) else f"x {list(self.inputs.shape[1:])}"
        return f"Dataset({self.name}, {self.split}: {len(self)} {kind}, {len(self.classes)} classes)"

    def __getitem__(self, index: Any) -> Any:
        if hasattr(index, "__index__") and not (isinstance(index, Tensor | np.ndarray) and index.ndim):
            row = operator.index(index)
            return self.inputs[row], int(self.labels[row])
        inputs = self.inputs
        if isinstance(inputs, list):
            inputs = [inputs[row] for row in torch.arange(len(self))[index].tolist()]
        else:
            inputs = inputs[index]
        probs = None if self.label_probs is None else self.label_probs[index]
        return replace(self, inputs=inputs, labels=self.labels[index], label_probs=probs)

    def resize(self, size: int, channels: int | None = None) -> "Dataset":
        """The set with images brought to size x size pixels, and to 1 or 3 channels if given.

        Shrinks by area averaging, enlarges bilinearly. Grey is repeated; colour becomes luma (ITU-R BT.601). Raises
        TypeError for text, ValueError for a size below 1 or another number of channels.
        """
        if isinstance(self.inputs, list):
            raise TypeError(f"{self.name} holds text; only images can be resized")
        if size < 1 or channels not in (None, 1, 3):
            raise ValueError(f"size must be at least 1 and channels 1, 3 or None, got {size} and {channels}")
        x = self.inputs
        have = x.shape[1]
        if channels == 3 and have == 1:
            x = x.expand(-1, 3, -1, -1)
        elif channels == 1 and have == 3:
            x = (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
        elif channels not in (None, have):
            raise ValueError(f"{self.name} has {have} channels; only 1 and 3 are converted into each other")
        if x.shape[2:] != (size, size):
            smaller = size < max(x.shape[2:])
            x = interpolate(x, (size, size), mode="area") if smaller else interpolate(x, (size, size), mode="bilinear")
        return replace(self, inputs=x.contiguous())


def names() -> list[str]:
    """The names that `load` knows: first the embedded sets, which need no download."""
    return [*EMBEDDED, *SOURCES]


def load(
    name: str | os.PathLike,
    split: str = "test",
    *,
    root: str | os.PathLike | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Dataset:
    """A data set by name, as float32 images [N, C, H, W] in [0, 1] (or a list of texts) and int64 labels [N].

    name: one of `names()`, or the path of an `.npz` with your own data: `x` uint8 [N, H, W], [N, H, W, C] or
        [N, C, H, W], or floating point in [0, 1] (the shorter of axes 1 and 3 holds the channels), and integer labels
        `y` from 0. Of `x` and `y` 70 % are for training and 30 % for testing, drawn at random once for all and by
        class; `x_train`, `y_train`, `x_test`, `y_test` are the splits as given. Without `y` every label is -1, and
        whatever needs labels will refuse them; `x` alone is every split.
        Classes in brackets select and relabel: "digits[7-9]" has labels 0, 1, 2 and "mnist[0,2,5-7]" 0 to 4, in the
        order given. Of a set with soft labels only the items whose whole mass lies on these classes remain.
    split: "train" or "test".
    root: where files are looked up and kept; else $UQLAB_DATA, else data/ of a git checkout, else the user's cache.
    limit: None or 0 for all, else a random subset of at most that many, a function of `seed`: the first items stay the
        same for a larger limit.

    Raises ValueError for a name, split, class or limit that does not exist, for bad arrays and for a corrupted file
    that cannot be fetched again; FileNotFoundError if a file is missing and no mirror delivers it.
    """
    full_name = os.fspath(name)
    base, wanted = _parse(full_name)
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", got {split!r}')
    if limit is not None and limit < 0:
        raise ValueError(f"limit must be 0 (all), None (all) or positive, got {limit}")
    found: tuple[Any, Any, Any, Any]  # inputs, labels, classes, soft labels or None
    if base.endswith(".npz"):
        found = _own(Path(base).expanduser(), split)
    elif base in EMBEDDED:
        found = EMBEDDED[base](split)
    elif base in SOURCES:
        found = SOURCES[base](split, _folder(root))
    else:
        close = difflib.get_close_matches(base.lower(), names(), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown data set {base!r}{hint}; known: {', '.join(names())}, or the path of an .npz file")

    inputs, labels, classes, probs = found
    rows = np.arange(len(labels))
    if wanted is not None:
        rows = rows[_of_classes(full_name, labels, classes, probs, wanted)]
        relabel = np.full(len(classes), -1)
        relabel[wanted] = np.arange(len(wanted))
        labels, classes = relabel[labels], tuple(classes[label] for label in wanted)
        probs = None if probs is None else probs[:, wanted]
    if limit:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        rows = rows[order[:limit].numpy()]
    if len(rows) == 0:
        raise ValueError(f"{full_name} has no items in its {split} split")
    return Dataset(
        [inputs[row] for row in rows] if isinstance(inputs, list) else _images(inputs, rows),
        torch.from_numpy(labels[rows]),
        full_name,
        split,
        classes,
        None if probs is None else torch.from_numpy(probs[rows]),
    )


def file(name: str, *, root: str | os.PathLike | None = None) -> Path:
    """The path of a registered file, such as "resnet_cifar10/resnet20-12fca82f.th", once its checksum is right.

    root: as in `load`. Raises ValueError for an unknown name and for a corrupted file that cannot be fetched again,
    FileNotFoundError if the file is missing and no mirror delivers it.
    """
    if name not in FILES:
        close = difflib.get_close_matches(name, FILES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown file {name!r}{hint}; known: {', '.join(FILES)}")
    return fetch(name, _folder(root))


def _parse(name):
    """The name without its bracket, and the classes in it or None."""
    base, bracket, spec = name.rpartition("[")
    if not (bracket and spec.endswith("]")):
        return name, None
    wanted = []
    for part in spec[:-1].split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{name!r}: classes must be like [0-6] or [0,2,5-7], got {part!r}")
        wanted += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"{name!r} names a class twice")
    return base, wanted


def _of_classes(name, labels, classes, probs, wanted):
    """Mask of the items that belong to the wanted classes."""
    if labels.max() < 0:
        raise ValueError(f"{name} has no labels, so classes cannot be selected")
    if max(wanted) >= len(classes):
        raise ValueError(f"{name}: classes are 0..{len(classes) - 1}, got {max(wanted)}")
    inside = np.isin(labels, wanted)
    return inside if probs is None else inside & (probs[:, wanted].sum(1) > 1 - 1e-5)


def _images(inputs, rows):
    """Rows of uint8 or floating-point images as a new float32 tensor."""
    chosen = inputs if len(rows) == len(inputs) and (rows[1:] > rows[:-1]).all() else inputs[rows]
    x = torch.tensor(chosen)  # a copy: what the user writes to it stays out of the caches
    return x.float().div_(255) if x.dtype == torch.uint8 else x.float()


def _folder(root):
    """Where files are looked up and kept."""
    if root is not None or os.environ.get("UQLAB_DATA"):
        return Path(root if root is not None else os.environ["UQLAB_DATA"]).expanduser()
    checkout = Path(__file__).resolve().parents[2]
    inside = (checkout / ".git").exists() and (checkout / "data").is_dir()
    return checkout / "data" if inside else Path(pooch.os_cache("uqlab"))


def _own(path, split):
    """A user's own arrays: (inputs, labels, classes, None)."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.absolute()}; relative paths start at the working folder")
    arrays = npz(path, "x", "y", "x_train", "y_train", "x_test", "y_test", optional=True)
    suffix = "" if "x" in arrays else f"_{split}"
    if "x" + suffix not in arrays:
        raise ValueError(f"{path} holds neither x nor x_{split}, but {sorted(arrays) or 'none of x, x_train, x_test'}")
    x, y = arrays["x" + suffix], arrays.get("y" + suffix)

    if x.ndim not in (3, 4) or 0 in x.shape:
        raise ValueError(f"{path}: x must be [N, H, W], [N, H, W, C] or [N, C, H, W] and not empty, got {x.shape}")
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
        raise ValueError(f"{path}: x must be uint8 or floating point in [0, 1], got {x.dtype}")
    if y is None:
        return x, np.full(len(x), -1), (), None
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise ValueError(f"{path}: y must be {len(x)} integers, one per image, got {y.dtype} {y.shape}")
    if y.min() < 0:
        raise ValueError(f"{path}: y must count from 0, got {y.min()}")
    labels = [value for key, value in arrays.items() if key[0] == "y" and value.dtype.kind in "iu" and value.size]
    top = max(int(value.max()) for value in labels)
    if top >= max(1000, *(value.size for value in labels)):
        raise ValueError(f"{path}: y must be class numbers counted from 0, got {top}; number the classes 0, 1, 2, ...")
    classes = tuple(str(label) for label in range(top + 1))
    if not suffix:
        rows = _part(y, split)
        x, y = x[rows], y[rows]
    return x, y.astype(np.int64), classes, None


def _part(y, split):
    """Rows of a fixed random 70 : 30 split, in which every class has its share to within one item."""
    shuffled = np.random.default_rng(0).permutation(len(y))
    by_class = shuffled[np.argsort(y[shuffled], kind="stable")]
    at = 3 * np.arange(len(y))
    test = (at + 8) // 10 > (at + 5) // 10  # three of every ten in a row; never two neighbours
    return np.sort(by_class[test == (split == "test")])
