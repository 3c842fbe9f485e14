"""One way to every data set: `load`, and the `Dataset` that it returns."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import interpolate

from uqlab.core.checks import (
    ArrayLike,
    as_inputs,
    as_labels,
    as_tensor,
    at_least,
    held,
    one_of,
)
from uqlab.core.extras import extra
from uqlab.core.files import StrPath
from uqlab.data.embedded import EMBEDDED
from uqlab.data.images import IMAGES
from uqlab.data.readers import FILES, Items, fetch
from uqlab.data.sounds import ENVIRONMENTAL
from uqlab.data.texts import FETCHED_TEXTS, SUFFIXES, own_file

FETCHED: dict[str, Any] = {**IMAGES, **FETCHED_TEXTS, **ENVIRONMENTAL}


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Inputs and labels of one split.

    `data[i]` is (input, label); a slice, indices or a mask give a Dataset.

    Parameters
    ----------
    inputs
        Images in [0, 1] [samples, channels, height, width], or texts; your own may be
        features or token ids.
    labels
        Class numbers, int64; -1 where the set has none.
    name
        The name given to `load`; for your own file without folder and suffix.
    split
        "train" or "test".
    classes
        Names of the classes.
    label_probs
        Soft ground truth, of which labels may be samples.
    fine
        The images drawn again in 28 x 28 pixels, where `resize` can take those.
    about
        Of sounds: "waves" [samples, T] at RATE, and "fold" or "speaker" [samples].
    """

    inputs: Shaped[Tensor, "samples ..."] | list[str]
    labels: Int[Tensor, " samples"]
    name: str
    split: str
    classes: tuple[str, ...]
    label_probs: Float[Tensor, "samples classes"] | None = None
    fine: Float[Tensor, "samples 1 28 28"] | None = None
    about: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What the set holds: "texts", "sounds" (as images) or "images"."""
        if isinstance(self.inputs, list):
            return "texts"
        return "sounds" if "waves" in self.about else "images"

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        inputs = "texts"
        if isinstance(self.inputs, Tensor):
            inputs = f"x {list(self.inputs.shape[1:])}"
        return (
            f"Dataset({self.name}, {self.split}: {len(self)} {inputs}, "
            f"{len(self.classes)} classes)"
        )

    def __getitem__(self, index: Any) -> Any:
        rows = torch.arange(len(self))[index]
        if rows.ndim == 0:
            return self.inputs[int(rows)], int(self.labels[rows])

        def chosen(values: Any) -> Any:
            if isinstance(values, Mapping):
                return {key: value[rows] for key, value in values.items()}
            if isinstance(values, list):
                return [values[row] for row in rows.tolist()]
            return values[rows] if isinstance(values, Tensor) else values

        return Dataset(**{name: chosen(values) for name, values in vars(self).items()})

    def resize(self, size: int, channels: int | None = None) -> "Dataset":
        """Resize images to size x size pixels.

        They are shrunk by area averages or enlarged bilinearly. `letters` and `glyphs`
        are drawn in 8 x 8; what is larger is made of the same letters drawn in 28 x 28,
        like MNIST.

        Parameters
        ----------
        size
            Side in pixels.
        channels
            1 (colour becomes luma, ITU-R BT.601), 3 (grey is repeated) or None, which
            keeps them.

        Returns
        -------
        Dataset
            With new `inputs`.
        """
        one_of("channels", channels, (None, 1, 3))
        at_least("size", size)
        x = as_tensor("inputs", self.inputs, "samples channels height width")
        if self.fine is not None and size > x.shape[-1]:
            x = self.fine.float()
        if channels not in (None, x.shape[1]):
            one_of(f"the channels of {self.name}", x.shape[1], (1, 3))
            luma = x.new_tensor([0.299, 0.587, 0.114])[:, None, None]
            grey = channels == 1
            x = (x * luma).sum(1, True) if grey else x.expand(-1, 3, -1, -1)
        if x.shape[2:] != (size, size):
            mode = "area" if size < max(x.shape[2:]) else "bilinear"
            x = interpolate(x, (size, size), mode=mode)
        return replace(self, inputs=x.contiguous(), fine=None)


def names() -> list[str]:
    """Return the names that `load` knows, first the sets that need no download."""
    return [*EMBEDDED, *FETCHED]


def read(source: Any, labels: ArrayLike | None = None, name: str = "data") -> Dataset:
    """Read what you have as a Dataset: tensors, or a dataset or loader of torch.

    It is read once, whole, into memory.

    Parameters
    ----------
    source
        Inputs, (inputs, labels), or a dataset or loader of such pairs; a Dataset is
        returned as it is.
    labels
        Classes [samples], with tensors; the set may have none.
    name
        Name of the set.

    Examples
    --------
    >>> read([[0.0, 1.0], [1.0, 0.0]], [0, 1])
    Dataset(data, test: 2 x [2], 2 classes)
    """
    if isinstance(source, Dataset):
        return source
    inputs, labels = held(source, labels)
    x = as_inputs(inputs, by_name=False)
    y = as_labels([-1] * len(x) if labels is None else labels, len(x))
    return Dataset(x, y, name, "test", (*map(str, range(int(y.max()) + 1)),))


def load(
    name: StrPath,
    split: Literal["train", "test"] = "test",
    *,
    root: StrPath | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Load one split of a data set by name or path.

    Parameters
    ----------
    name
        One of `names()`, or the path of your own data.

        Images: an `.npz` with `x` uint8 or in [0, 1], [N, H, W], [N, H, W, C] or
        [N, C, H, W] (the shorter of axes 1 and 3 holds the channels), and integer
        labels `y` from 0 without a gap; or with `x_train`, `y_train`, `x_test`,
        `y_test`.

        Texts: a table `.tsv` (without quoting) or `.csv`, also `.gz`, with a header and
        the columns `sentence` (or `text`, or the pair `sentence1`, `sentence2`),
        `label` and, if the splits are given, `split`. Classes are the sorted labels.

        A file without splits gives 70 % of each class to training; without labels every
        split holds all its items. Classes in brackets select and relabel in the order
        given: "mnist[0,2,5-7]" has labels 0 to 4. An item with soft labels remains only
        if its whole probability lies on these classes.
    split
        "train" or "test".
    root
        Where files are looked up and kept; else $UQLAB_DATA, else data/ of a git
        checkout, else the user's cache.
    limit
        The size of a random subset, which depends on `seed`; None or 0: all. A larger
        limit adds to these items.
    seed
        Seed of the random subset.

    Returns
    -------
    Dataset
        Images float32 in [0, 1], or texts, and labels.

    Raises
    ------
    ValueError
        If there is no such set, split or class, or a file is corrupted.
    FileNotFoundError
        If a file is missing and cannot be fetched.

    Examples
    --------
    >>> load("digits[7-9]")
    Dataset(digits[7-9], test: 160 x [1, 8, 8], 3 classes)
    """
    one_of("split", split, ("train", "test"))
    limit = at_least("limit", limit or 0, 0)
    at_least("seed", seed, 0)
    full_name = os.fspath(name)
    base, ranges = full_name, None
    if full_name.endswith("]"):
        base, _, ranges = full_name[:-1].rpartition("[")
    shown = re.sub(r"(\.npz|\.[ct]sv(\.gz)?)(?=\[|$)", "", Path(full_name).name)
    data = _dataset(_read(base, split, root), shown, split)
    if ranges is not None:
        data = _of_classes(data, ranges)
    if limit:
        generator = torch.Generator().manual_seed(seed)
        data = data[torch.randperm(len(data), generator=generator)[:limit]]
    if len(data) == 0:
        raise ValueError(f"{full_name} has no items in its {split} split")
    return data


def _read(name: str, split: str, root: StrPath | None) -> Items:
    if name.endswith(SUFFIXES):
        return own_file(Path(name), split)
    if name in EMBEDDED:
        return EMBEDDED[name](split)
    one_of("name", name, [*names(), f"the path of a file ({', '.join(SUFFIXES)})"])
    try:
        return FETCHED[name](split, _folder(root))
    except FileNotFoundError as error:
        error.add_note(f"These need no download: {', '.join(EMBEDDED)}.")
        raise


def _dataset(items: Items, name: str, split: str) -> Dataset:
    """Copy the arrays of a reader, so that writing to the set changes no cache."""

    def copied(values: Any) -> Any:
        return torch.tensor(values) if isinstance(values, np.ndarray) else values

    x = copied(items.inputs)
    if isinstance(x, Tensor):
        x = x / 255 if x.dtype == torch.uint8 else x.float()
    labels = copied(items.labels).long()
    about = {key: copied(values) for key, values in items.about.items()}
    probs, fine = copied(items.label_probs), copied(items.fine)
    return Dataset(x, labels, name, split, items.classes, probs, fine, about)


def _numbers(name: str, ranges: str, count: int) -> list[int]:
    """Return the class numbers of ranges like "0,2,5-7"."""
    numbers = []
    for item in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        numbers += range(first, min(last, count) + 1)
        if not first <= last < count or len({*numbers}) < len(numbers):
            raise ValueError(
                f"{name}: classes must be like [0-6] or [0,2,5-7], each once and out "
                f"of {count}, got {item!r}"
            )
    return numbers


def _of_classes(data: Dataset, ranges: str) -> Dataset:
    """Return the items of classes like "0,2,5-7", with labels in this order."""
    wanted = _numbers(data.name, ranges, len(data.classes))
    inside = torch.isin(data.labels, torch.tensor(wanted))
    probs = data.label_probs
    if probs is not None:
        probs = probs[:, wanted]
        inside &= probs.sum(1) > 1 - 1e-5
    data = replace(data, label_probs=probs)[inside]
    labels = [wanted.index(label) for label in data.labels.tolist()]
    classes = tuple(data.classes[label] for label in wanted)
    return replace(data, labels=torch.tensor(labels).long(), classes=classes)


def check(
    task: StrPath,
    *others: StrPath,
    kinds: Collection[Literal["images", "texts", "sounds"]] = ("images",),
    root: StrPath | None = None,
) -> None:
    """Refuse sets that a lesson cannot take: its first step, before hours of training.

    One item of each other set is read.

    Parameters
    ----------
    task
        The set to learn.
    *others
        Sets of the same kind; empty names are left out.
    kinds
        What the lesson takes. Sounds are images, too.
    root
        As in `load`.

    Raises
    ------
    ValueError
        Unless all sets are there and of a kind that the lesson takes, the task has two
        classes or more, and soft labels are of its classes.
    """
    train, test = (load(task, split, root=root) for split in ("train", "test"))
    for data in (train, test):
        if data.labels.min() < 0 or data.labels.unique().numel() < 2:
            raise ValueError(
                f"{data} must have labels of two classes or more to learn: a table the "
                "column label, an .npz the array y"
            )
    for data in (train, *(load(name, limit=1, root=root) for name in others if name)):
        taken = {*kinds, "sounds"} if "images" in kinds else {*kinds}
        mixed = (data.kind == "texts") != (train.kind == "texts")
        if mixed or data.kind not in taken:
            raise ValueError(
                f"{data.name} holds {data.kind}, and this lesson takes "
                f"{' or '.join(kinds)}, all sets of one kind"
            )
        if data.label_probs is not None and len(data.classes) != len(train.classes):
            raise ValueError(
                f"{data.name} has soft labels of {len(data.classes)} classes; take "
                f"those of {train.name}"
            )


def file(name: str, *, root: StrPath | None = None) -> Path:
    """Return the path of a registered file, fetched if need be and compared.

    Parameters
    ----------
    name
        Such as "resnet_cifar10/resnet20-12fca82f.th".
    root
        As in `load`.

    Raises
    ------
    ValueError
        If the name is unknown or the file is corrupted.
    FileNotFoundError
        If the file is missing and cannot be fetched.
    """
    one_of("name", name, FILES)
    return fetch(name, _folder(root)).absolute()


def fetched(root: StrPath | None = None) -> tuple[Path, list[str]]:
    """Return the folder that `load` reads, and what in it holds registered files."""
    folder = _folder(root)
    there = {Path(name).parts[0] for name in FILES if (folder / name).is_file()}
    return folder, sorted(there)


def _folder(root: StrPath | None) -> Path:
    """Return where registered files are looked up and kept."""
    if named := root or os.environ.get("UQLAB_DATA"):
        return Path(named).expanduser()
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / ".git").exists() and (checkout / "data").is_dir():
        return checkout / "data"
    with extra("notebooks"):
        import pooch
    return Path(pooch.os_cache("uqlab"))
