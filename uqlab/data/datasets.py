"""One way to every data set: `load`, and the `Dataset` that it returns."""

import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import interpolate

from uqlab.core.checks import ArrayLike, as_labels, as_one, at_least, one_of
from uqlab.core.extras import extra
from uqlab.core.files import COMPARED, StrPath
from uqlab.core.reading import held

# These fill SOURCES and FILES.
from uqlab.data import colour_images, grey_images, sounds, texts, weights  # noqa: F401
from uqlab.data.downloads import FILES, fetch, places
from uqlab.data.embedded import EMBEDDED
from uqlab.data.own import SUFFIXES, own_file
from uqlab.data.readers import SOURCES, Items

STAND_INS = {  # fetched set -> the embedded one named where it is out of reach
    "mnist": "mnist-mini",
    "fashion-mnist": "fashion-mini",
    "kmnist": "kmnist-mini",
    "ambiguous-mnist": "ambiguous-mnist-mini",
    "dirty-mnist": "ambiguous-mnist-mini",
}


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
        int64; -1 where the set has none.
    name
        As it was loaded; of your own file the name without folder and suffix.
    split
        "train" or "test".
    classes
        The name of each label.
    label_probs
        Soft ground truth, of which labels may be samples.
    fine
        The images drawn anew in 28 x 28 pixels, where `resize` can take those.
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
        if isinstance(self.inputs, list):
            inputs = "texts"
        else:
            inputs = f"x {list(self.inputs.shape[1:])}"
        return (
            f"Dataset({self.name}, {self.split}: {len(self)} {inputs}, "
            f"{len(self.classes)} classes)"
        )

    def __getitem__(self, index: Any) -> Any:
        rows = torch.arange(len(self))[index]
        if rows.ndim == 0:
            return self.inputs[int(rows)], int(self.labels[rows])
        chosen: dict[str, Any] = {
            k: v[index] for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        if isinstance(self.inputs, list):
            chosen["inputs"] = [self.inputs[row] for row in rows.tolist()]
        about = {key: values[index] for key, values in self.about.items()}
        return replace(self, **chosen, about=about)

    def resize(self, size: int, channels: int | None = None) -> "Dataset":
        """Return the set with images of size x size pixels.

        They are shrunk by area averages or enlarged bilinearly. `letters` and `glyphs`
        are drawn in 8 x 8; what is larger is made of the same letters drawn in 28 x 28,
        like MNIST.

        Parameters
        ----------
        size
            Pixels of a side.
        channels
            1 (colour becomes luma, ITU-R BT.601), 3 (grey is repeated) or None for
            those that there are.

        Returns
        -------
        Dataset
            With new `inputs`.

        Raises
        ------
        TypeError
            For texts.
        ValueError
            For images that have neither 1 nor 3 channels and should have.
        """
        if isinstance(self.inputs, list):
            raise TypeError(f"{self.name} holds text; only images can be resized")
        at_least("size", size)
        x = self.inputs
        if self.fine is not None and size > x.shape[-1]:
            x = self.fine.float()
        x = _converted(self.name, x, channels)
        if x.shape[2:] != (size, size):
            mode = "area" if size < max(x.shape[2:]) else "bilinear"
            x = interpolate(x, (size, size), mode=mode)
        return replace(self, inputs=x.contiguous(), fine=None)


def _converted(name: str, x: Tensor, channels: int | None) -> Tensor:
    """Return images with so many channels, or None: with their own."""
    one_of("channels", channels, (None, 1, 3))
    if channels in (None, x.shape[1]):
        return x
    if x.shape[1] not in (1, 3):
        raise ValueError(
            f"{name} has {x.shape[1]} channels; only 1 and 3 are converted into each "
            "other"
        )
    if channels == 3:
        return x.expand(-1, 3, -1, -1)
    luma = x.new_tensor([0.299, 0.587, 0.114])[:, None, None]
    return (x * luma).sum(1, keepdim=True)


def names() -> list[str]:
    """Return the names that `load` knows, first the sets that need no download."""
    return [*EMBEDDED, *SOURCES]


def read(source: Any, labels: ArrayLike | None = None, name: str = "data") -> Dataset:
    """Return what you have as a Dataset: tensors, or a dataset or loader of torch.

    It is read once, whole, into memory.

    Parameters
    ----------
    source
        Inputs, (inputs, labels), or what gives such; a Dataset is returned as it is.
    labels
        Classes [samples], with tensors; the set may have none.
    name
        Of the set.

    Examples
    --------
    >>> read([[0.0, 1.0], [1.0, 0.0]], [0, 1])
    Dataset(data, test: 2 x [2], 2 classes)
    """
    if isinstance(source, Dataset):
        return source
    inputs, labels = held(source, labels)
    x = as_one(inputs)
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
    """Return one split of a data set by name or path.

    Parameters
    ----------
    name
        One of `names()`, or the path of your own data.

        Images: an `.npz` with `x` uint8 or in [0, 1], [N, H, W], [N, H, W, C] or
        [N, C, H, W] (the shorter of axes 1 and 3 holds the channels), and integer
        labels `y`; or with `x_train`, `y_train`, `x_test`, `y_test`.

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
        Of the subset.

    Returns
    -------
    Dataset
        Images float32 in [0, 1], or texts, and labels.

    Raises
    ------
    ValueError
        For what does not exist and for corrupted files.
    FileNotFoundError
        For files out of reach.

    Examples
    --------
    >>> load("digits[7-9]")
    Dataset(digits[7-9], test: 160 x [1, 8, 8], 3 classes)
    """
    one_of("split", split, ("train", "test"))
    limit = at_least("limit", limit or 0, 0)
    at_least("seed", seed, 0)
    full_name = os.fspath(name)
    bracket = re.fullmatch(r"(.+)\[([^\[]*)\]", full_name)
    base, ranges = bracket.groups() if bracket else (full_name, None)
    items = _read(base, split, root)
    data = _dataset(items, Path(full_name).name, split)
    if ranges is not None:
        data = _of_classes(data, ranges)
    if limit:
        generator = torch.Generator().manual_seed(seed)
        data = data[torch.randperm(len(data), generator=generator)[:limit]]
    if len(data) == 0:
        raise ValueError(f"{full_name} has no items in its {split} split")
    x = data.inputs
    if isinstance(x, list):
        return data
    return replace(data, inputs=x / 255 if x.dtype == torch.uint8 else x.float())


def check(
    task: StrPath,
    *others: StrPath,
    kinds: Collection[Literal["images", "texts", "sounds"]] = ("images",),
    root: StrPath | None = None,
) -> None:
    """Refuse sets that a page cannot take: its first step, before hours of training.

    Of the other sets one item is read.

    Parameters
    ----------
    task
        The set to learn.
    *others
        Sets of the same kind; empty names are left out.
    kinds
        What the page takes. Sounds are images, too.
    root
        As in `load`.

    Raises
    ------
    ValueError
        Unless all sets are there and of one kind that the page takes, the task has two
        classes or more, and soft labels are of the task's classes.
    """
    train, test = (load(task, split, root=root) for split in ("train", "test"))
    for data in (train, test):
        labels = data.labels.unique().tolist()
        if len(labels) < 2 or -1 in labels:
            raise ValueError(
                f"{task} must have labels of two classes or more to learn, "
                f"got {labels} in {data}"
            )
    for data in (train, *(load(name, limit=1, root=root) for name in others if name)):
        _fits(train, data, kinds)


def _fits(train: Dataset, data: Dataset, kinds: Collection[str]) -> None:
    """Raise ValueError unless a set is of these kinds and goes with the task."""
    if data.kind not in kinds and not (data.kind == "sounds" and "images" in kinds):
        raise ValueError(
            f"{data.name} holds {data.kind}, and this page takes {' or '.join(kinds)}"
        )
    if (data.kind == "texts") != (train.kind == "texts"):
        raise ValueError(
            f"{data.name} holds {data.kind}, and {train.name} does not; "
            "take sets of one kind"
        )
    if data.label_probs is not None and len(data.classes) != len(train.classes):
        raise ValueError(
            f"{data.name} has soft labels of {len(data.classes)} classes, and "
            f"{train.name} has {len(train.classes)}; take the same classes of both"
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
        For an unknown name or a corrupted file.
    FileNotFoundError
        For a file out of reach.
    """
    if name not in FILES:
        raise ValueError(_unknown("file", name, FILES))
    path = fetch(name, _folder(root)).absolute()
    COMPARED.add(path)
    return path


def fetched(root: StrPath | None = None) -> tuple[Path, list[str]]:
    """Return the folder that `load` reads, and what in it holds registered files."""
    folder = _folder(root)
    there = {Path(name).parts[0] for name in FILES if places(name, folder)}
    return folder, sorted(there)


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown {what} {name!r}{hint}; known: {', '.join(known)}"


def _read(name: str, split: str, root: StrPath | None) -> Items:
    """Read a set; where it is out of reach, name one that can stand in for it."""
    if name.endswith(SUFFIXES):
        return own_file(Path(name).expanduser(), split)
    if name in EMBEDDED:
        return EMBEDDED[name](split)
    if name not in SOURCES:
        raise ValueError(
            f"{_unknown('data set', name, names())}, or the path of a file "
            f"({', '.join(SUFFIXES)})"
        )
    try:
        return SOURCES[name](split, _folder(root))
    except FileNotFoundError as error:
        if name in STAND_INS:
            error.add_note(f"{STAND_INS[name]!r} is embedded and needs no download.")
        raise


def _dataset(items: Items, name: str, split: str) -> Dataset:
    """Return what was read as tensors; images are not yet scaled."""
    name = re.sub(rf"({'|'.join(SUFFIXES)})(?=\[|$)", "", name)
    tensors = _tensors(items._asdict())
    tensors["labels"] = tensors["labels"].long()
    return Dataset(name=name, split=split, **tensors)


def _tensors(value: Any) -> Any:
    """Copy arrays, alone or by name, so that writing to them changes no cache."""
    if isinstance(value, Mapping):
        return {key: _tensors(item) for key, item in value.items()}
    return torch.tensor(value) if isinstance(value, np.ndarray) else value


def _numbers(name: str, ranges: str, top: int) -> list[int]:
    """Return the class numbers of ranges like "0,2,5-7"."""
    numbers = []
    for item in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(
                f"{name!r}: classes must be like [0-6] or [0,2,5-7], got {item!r}"
            )
        if last > top:
            raise ValueError(f"{name}: classes are 0..{top}, got {last}")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{name!r} names a class twice")
    return numbers


def _of_classes(data: Dataset, ranges: str) -> Dataset:
    """Return the items of classes like "0,2,5-7", with labels in this order."""
    if not data.classes:
        raise ValueError(f"{data.name} has no labels, so classes cannot be selected")
    wanted = _numbers(data.name, ranges, len(data.classes) - 1)
    inside = torch.isin(data.labels, torch.tensor(wanted))
    if data.label_probs is not None:
        probs = data.label_probs[:, wanted]
        inside &= probs.sum(1) > 1 - 1e-5
        data = replace(data, label_probs=probs)
    data = data[inside]
    relabel = torch.full((len(data.classes),), -1)
    relabel[wanted] = torch.arange(len(wanted))
    classes = tuple(data.classes[label] for label in wanted)
    return replace(data, labels=relabel[data.labels], classes=classes)


def _folder(root: StrPath | None) -> Path:
    """Return where registered files are looked up and kept."""
    if named := root or os.environ.get("UQLAB_DATA"):
        return Path(named).expanduser()
    checkout = Path(__file__).resolve().parents[2]
    inside = (checkout / ".git").exists() and (checkout / "data").is_dir()
    if inside:
        return checkout / "data"
    with extra("notebooks"):
        import pooch
    return Path(pooch.os_cache("uqlab"))
