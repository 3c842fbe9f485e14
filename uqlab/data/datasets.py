"""One way to every data set: `load`, and the `Dataset` that it returns."""

import difflib
import operator
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pooch
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import interpolate

from uqlab.core.files import COMPARED
from uqlab.data import colour_images, grey_images, sounds, texts, weights  # noqa: F401  they fill SOURCES and FILES
from uqlab.data.downloads import FILES, fetch, places
from uqlab.data.embedded import EMBEDDED, FINE
from uqlab.data.own import SUFFIXES, own
from uqlab.data.readers import SOURCES

Name = str | os.PathLike
STAND_INS = {  # fetched set -> the embedded one named where it is out of reach
    "mnist": "mnist-mini", "fashion-mnist": "fashion-mini", "kmnist": "kmnist-mini",
    "ambiguous-mnist": "ambiguous-mnist-mini", "dirty-mnist": "ambiguous-mnist-mini",
}  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Inputs and labels of one split; `data[i]` is (input, label), a slice, index or mask gives a Dataset."""

    # Images in [0, 1] [samples, channels, height, width], or texts; your own may be features or token ids.
    inputs: Shaped[Tensor, "samples ..."] | list[str]
    labels: Int[Tensor, " samples"]  # int64; -1 where the set has none
    name: str  # as it was loaded; of your own file the name without folder and suffix
    split: str
    classes: tuple[str, ...]  # the name of each label
    label_probs: Float[Tensor, "samples classes"] | None = (
        None  # soft ground truth, of which labels may be samples
    )
    rendered: Int[Tensor, " samples"] | None = (
        None  # rows of a set that `resize` can render in 28 x 28
    )
    about: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # of sounds: "waves" [N, T] at RATE, and "fold" [N]

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        kind = (
            "texts"
            if isinstance(self.inputs, list)
            else f"x {list(self.inputs.shape[1:])}"
        )
        return f"Dataset({self.name}, {self.split}: {len(self)} {kind}, {len(self.classes)} classes)"

    def __getitem__(self, index: Any) -> Any:
        if hasattr(index, "__index__") and not (
            isinstance(index, Tensor | np.ndarray) and index.ndim
        ):
            row = operator.index(index)
            return self.inputs[row], int(self.labels[row])
        inputs = self.inputs
        if isinstance(inputs, list):
            inputs = [inputs[row] for row in torch.arange(len(self))[index].tolist()]
        else:
            inputs = inputs[index]
        probs = None if self.label_probs is None else self.label_probs[index]
        rows = None if self.rendered is None else self.rendered[index]
        about = {key: values[index] for key, values in self.about.items()}
        return replace(
            self,
            inputs=inputs,
            labels=self.labels[index],
            label_probs=probs,
            rendered=rows,
            about=about,
        )

    def resize(self, size: int, channels: int | None = None) -> "Dataset":
        """The set with images of size x size pixels, shrunk by area averages or enlarged bilinearly.

        `letters` and `glyphs` are drawn in 8 x 8. Instead of enlarging them this draws them in 28 x 28, like MNIST.
        channels: 1 (colour becomes luma, ITU-R BT.601), 3 (grey is repeated) or None for those that there are.
        """
        if isinstance(self.inputs, list):
            raise TypeError(f"{self.name} holds text; only images can be resized")
        if size < 1 or channels not in (None, 1, 3):
            raise ValueError(
                f"size must be at least 1 and channels 1, 3 or None, got {size} and {channels}"
            )
        x = self.inputs
        if self.rendered is not None and size > x.shape[-1]:
            x = _images(FINE[_parse(self.name)[0]](self.split), self.rendered.numpy())
        have = x.shape[1]
        if channels == 3 and have == 1:
            x = x.expand(-1, 3, -1, -1)
        elif channels == 1 and have == 3:
            x = (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(
                1, keepdim=True
            )
        elif channels not in (None, have):
            raise ValueError(
                f"{self.name} has {have} channels; only 1 and 3 are converted into each other"
            )
        if x.shape[2:] != (size, size):
            x = interpolate(
                x, (size, size), mode="area" if size < max(x.shape[2:]) else "bilinear"
            )
        return replace(self, inputs=x.contiguous(), rendered=None)


def names() -> list[str]:
    """The names that `load` knows: first the embedded sets, which need no download."""
    return [*EMBEDDED, *SOURCES]


def load(
    name: Name,
    split: Literal["train", "test"] = "test",
    *,
    root: Name | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Dataset:
    """One split, "train" or "test", of a data set by name or path.

    name: one of `names()`, or the path of your own data.
        Images: an `.npz` with `x` uint8 or in [0, 1], [N, H, W], [N, H, W, C] or [N, C, H, W] (the shorter of axes 1
        and 3 holds the channels), and integer labels `y`; or with `x_train`, `y_train`, `x_test`, `y_test`.
        Texts: a table `.tsv` (without quoting) or `.csv`, also `.gz`, with a header and the columns `sentence` (or
        `text`, or the pair `sentence1`, `sentence2`), `label` and, if the splits are given, `split`. Classes are the
        sorted labels.
        A file without splits gives 70 % of each class to training; without labels every split holds all its items.
        Classes in brackets select and relabel in the order given: "mnist[0,2,5-7]" has labels 0 to 4. An item with
        soft labels remains only if its whole probability lies on these classes.
    root: where files are looked up and kept; else $UQLAB_DATA, else data/ of a git checkout, else the user's cache.
    limit: the size of a random subset, which depends on `seed`; None or 0: all. A larger limit adds to these items.

    Raises ValueError for what does not exist and for corrupted files, FileNotFoundError for files out of reach.
    """
    full_name = os.fspath(name)
    base, wanted = _parse(full_name)
    if limit is not None and limit < 0:
        raise ValueError(f"limit must be 0 (all), None (all) or positive, got {limit}")
    found: tuple[
        Any, ...
    ]  # inputs, labels, classes, soft labels or None; of sounds also what is known about each
    shown = full_name
    if base.endswith(SUFFIXES):
        found = own(Path(base).expanduser(), split)
        suffix = next(suffix for suffix in SUFFIXES if base.endswith(suffix))
        shown = Path(base).name.removesuffix(suffix) + full_name.removeprefix(base)
    elif base in EMBEDDED:
        found = EMBEDDED[base](split)
    elif base in SOURCES:
        try:
            found = SOURCES[base](split, _folder(root))
        except FileNotFoundError as error:
            near = (
                f" {STAND_INS[base]!r} is embedded and needs no download."
                if base in STAND_INS
                else ""
            )
            raise FileNotFoundError(f"{error}{near}") from error
    else:
        raise ValueError(
            f"{_unknown('data set', base, names())}, or the path of a file ({', '.join(SUFFIXES)})"
        )

    inputs, labels, classes, probs, *more = found
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
        [inputs[row] for row in rows]
        if isinstance(inputs, list)
        else _images(inputs, rows),
        torch.from_numpy(labels[rows]),
        shown,
        split,
        classes,
        None if probs is None else torch.from_numpy(probs[rows]),
        torch.from_numpy(rows) if base in FINE else None,
        {
            key: torch.from_numpy(values[rows])
            for key, values in (more[0] if more else {}).items()
        },
    )


def check(
    task: Name,
    *others: Name,
    kinds: Collection[Literal["images", "texts", "sounds"]] = ("images",),
    root: Name | None = None,
) -> None:
    """Raise ValueError unless all sets are there and of one of the kinds, and the task has two classes or more.

    A page's first step, before hours of training: it reads one item of each of the others. Empty names are left out.
    """
    train, test = (load(task, split, root=root) for split in ("train", "test"))
    for part in (train, test):
        if len(found := part.labels.unique()) < 2 or -1 in found:
            raise ValueError(
                f"{task} must have labels of two classes or more to learn, got {found.tolist()} in {part}"
            )
    for items in (train, *(load(name, limit=1, root=root) for name in others if name)):
        kind = (
            "texts"
            if isinstance(items.inputs, list)
            else "sounds"
            if "waves" in items.about
            else "images"
        )
        if kind not in kinds and not (
            kind == "sounds" and "images" in kinds
        ):  # a picture of it is what is learned
            raise ValueError(
                f"{items.name} holds {kind}, and this page takes {' or '.join(kinds)}"
            )
        if isinstance(items.inputs, list) != isinstance(train.inputs, list):
            raise ValueError(
                f"{items.name} holds {kind}, and {train.name} does not; take sets of one kind"
            )
        if items.label_probs is not None and len(items.classes) != len(train.classes):
            have = f"{len(items.classes)} classes, and {train.name} has {len(train.classes)}"
            raise ValueError(
                f"{items.name} has soft labels of {have}; take the same classes of both"
            )


def file(name: str, *, root: Name | None = None) -> Path:
    """The path of a registered file, such as "resnet_cifar10/resnet20-12fca82f.th"; root: as in `load`."""
    if name not in FILES:
        raise ValueError(_unknown("file", name, FILES))
    path = fetch(name, _folder(root)).absolute()
    COMPARED.add(path)
    return path


def fetched(root: Name | None = None) -> tuple[Path, list[str]]:
    """The folder that `load` reads, and its folders and files that hold registered files; root: as in `load`."""
    folder = _folder(root)
    return folder, sorted(
        {Path(name).parts[0] for name in FILES if places(name, folder)}
    )


def _unknown(what, name, known):
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown {what} {name!r}{hint}; known: {', '.join(known)}"


def _parse(name):
    """The name without its bracket, and the classes in it or None."""
    base, bracket, spec = name.rpartition("[")
    if not (bracket and spec.endswith("]")):
        return name, None
    wanted = []
    for part in spec[:-1].split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or not int(match[1]) <= int(match[2] or match[1]) < 10**6:
            raise ValueError(
                f"{name!r}: classes must be like [0-6] or [0,2,5-7], got {part!r}"
            )
        wanted += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"{name!r} names a class twice")
    return base, wanted


def _of_classes(name, labels, classes, probs, wanted):
    """Mask of the items that belong to the wanted classes."""
    if labels.max() < 0:
        raise ValueError(f"{name} has no labels, so classes cannot be selected")
    if max(wanted) >= len(classes):
        raise ValueError(
            f"{name}: classes are 0..{len(classes) - 1}, got {max(wanted)}"
        )
    inside = np.isin(labels, wanted)
    return inside if probs is None else inside & (probs[:, wanted].sum(1) > 1 - 1e-5)


def _images(inputs, rows):
    chosen = (
        inputs
        if len(rows) == len(inputs) and (rows[1:] > rows[:-1]).all()
        else inputs[rows]
    )
    x = torch.tensor(
        chosen
    )  # a copy, so that what the user writes to it changes no cache
    return x.float().div_(255) if x.dtype == torch.uint8 else x.float()


def _folder(root):
    if given := root or os.environ.get("UQLAB_DATA"):
        return Path(given).expanduser()
    checkout = Path(__file__).resolve().parents[2]
    inside = (checkout / ".git").exists() and (checkout / "data").is_dir()
    return checkout / "data" if inside else Path(pooch.os_cache("uqlab"))
