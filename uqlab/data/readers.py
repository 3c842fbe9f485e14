"""What all readers of data sets share; the readers stand in files by subject.

Files without a published checksum (unpacked archives, .npz) are read only where the
verified file is not there. A reader of a fetched set takes `(split, root)`, that of an
embedded one the split, and both return `Items`.
"""

import csv
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from uqlab.data.downloads import fetch, places, register

ASSETS = Path(__file__).parent / "assets"
DIGITS = tuple("0123456789")
Arrays = dict[str, np.ndarray]  # of a file, by their names
BROKEN = (
    NotImplementedError,
    MemoryError,
    ValueError,
    TypeError,
    KeyError,
    OSError,
    EOFError,
    zlib.error,
    struct.error,
    zipfile.BadZipFile,
    csv.Error,
)


class Items(NamedTuple):
    """What a reader returns; caches may hold the arrays, so do not write to them."""

    inputs: Any  # [N, C, H, W], uint8 or floating in [0, 1]; or a list of texts
    labels: np.ndarray  # integers [N]; -1: none
    classes: tuple[str, ...]
    label_probs: np.ndarray | None = None  # float32 [N, C]
    fine: np.ndarray | None = None  # images drawn anew in 28 x 28, for `resize`
    about: Mapping[str, np.ndarray] = {}  # of sounds: "waves" [N, T], and more


Reader = Callable[[str, Path], Items]
SOURCES: dict[str, Reader] = {}  # name of a set -> its reader


def source(
    name: str, *files: Any, folder: str | None = None, also: Sequence[str] = ()
) -> Callable[[Reader], Reader]:
    """Register a reader by its set's name, and its files as `register` takes them.

    The files lie in `folder`, by default `name`.
    """
    if files:
        register(name if folder is None else folder, *files, also=also)

    def add(read):
        SOURCES[name] = read
        return read

    return add


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one ValueError naming it."""
    try:
        yield
    except BROKEN as error:
        todo = "it is cut off or no such file: copy or fetch it anew"
        if isinstance(error, UnicodeDecodeError):
            todo = "save it as UTF-8"
        elif "allow_pickle" in str(error):
            todo = "make arrays of numbers: images of one shape, labels of integers"
        raise ValueError(f"{path} cannot be read: {error}; {todo}") from error


@cache
def asset(name: str) -> Arrays:
    """Return the arrays of one file of `assets/`, which scripts in `tools/` write."""
    packed = lzma.decompress((ASSETS / f"{name}.npz.xz").read_bytes())
    return dict(np.load(io.BytesIO(packed), allow_pickle=False))


def asset_split(name: str, split: str) -> Arrays:
    """Return the arrays of one split in a file of `assets/`, named without the split.

    Raises
    ------
    ValueError
        If the set has no such split.
    """
    end = f"_{split}"
    arrays = {k.removesuffix(end): v for k, v in asset(name).items() if k.endswith(end)}
    if not arrays:
        raise ValueError(
            f"{name} has no {split} split; it serves as out-of-distribution inputs"
        )
    return arrays


def npz(path: Path, *keys: str) -> Arrays:
    """Return those of the arrays of an .npz that are there, in native byte order.

    Those that are not asked for are empty.
    """
    with (
        reading(path),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as contents,
    ):
        arrays = {key: contents[key] for key in contents if key in keys}
        arrays = {k: a.astype(a.dtype.newbyteorder("=")) for k, a in arrays.items()}
        return dict.fromkeys(contents, np.empty(0)) | arrays


def split_rows(y: np.ndarray, split: str) -> np.ndarray:
    """Return the rows of a split of 70 % and 30 % of every class, to within one item.

    The split is random and always the same.
    """
    shuffled = np.random.default_rng(0).permutation(len(y))
    by_class = shuffled[np.argsort(y[shuffled], kind="stable")]
    at = 3 * np.arange(len(y))
    # Three of every ten in a row; never two neighbours.
    test = (at + 8) // 10 > (at + 5) // 10
    return np.sort(by_class[test == (split == "test")])


def unpacked(
    archive: str, members: Sequence[str], root: Path
) -> tuple[Path, list[bytes]]:
    """Return the path to name in errors, and the contents of an archive's members.

    Where the archive is absent, the members are files below `root`.
    """
    loose = [root / member for member in members]
    if not places(archive, root) and all(path.is_file() for path in loose):
        return loose[0].parent, [path.read_bytes() for path in loose]
    path = fetch(archive, root)
    with reading(path):
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as packed:
                return path, [packed.read(member) for member in members]
        contents = {}
        with tarfile.open(path, "r|gz") as tar:  # one pass, nothing is written
            for entry in tar:
                if entry.name in members:
                    contents[entry.name] = tar.extractfile(entry).read()  # type: ignore
        return path, [contents[member] for member in members]


def checked(
    path: Path,
    images: np.ndarray,
    labels: np.ndarray,
    shape: tuple[int, ...],
    classes: tuple[str, ...],
) -> Items:
    """Return the items of a file; ValueError unless images and labels are as wanted."""
    if images.shape != labels.shape + shape or images.dtype != np.uint8:
        raise ValueError(
            f"{path}: images must be uint8 of shape {labels.shape + shape}, one for "
            f"each label, got {images.dtype} {images.shape}"
        )
    if labels.min() < 0 or labels.max() >= len(classes):
        raise ValueError(
            f"{path}: labels must lie in 0..{len(classes) - 1}, "
            f"got {labels.min()}..{labels.max()}"
        )
    return Items(images, labels, classes)
