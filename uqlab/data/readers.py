"""What all readers of fetched data sets share; the readers themselves stand in files by subject.

Files without a published checksum (unpacked archives, .npz) are read only where the verified file is not there. Each
reader takes `(split, root)` and returns `(inputs, labels, classes, label_probs)`: images uint8 (or float32 in [0, 1])
[N, C, H, W] or a list of texts, labels int64 [N] (-1: none).
"""

import csv
import math
import tarfile
import wave
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from uqlab.data.downloads import FILES, fetch, places, remotes

Reader = Callable[[str, Path], Any]
SOURCES: dict[str, Reader] = {}  # name of a set -> its reader
DIGITS = tuple("0123456789")
BROKEN = (
    NotImplementedError, ValueError, TypeError, KeyError, OSError, EOFError, zlib.error, zipfile.BadZipFile, csv.Error,
    wave.Error,
)  # fmt: skip


def source(
    name: str, *files: Any, folder: str | None = None, also: Sequence[str] = ()
) -> Callable[[Reader], Reader]:
    """Register a reader under the name of its set, and its files, given as to `remotes`; folder: default `name`."""

    def register(read: Reader) -> Reader:
        if files:
            FILES.update(remotes(name if folder is None else folder, *files, also=also))
        SOURCES[name] = read
        return read

    return register


@contextmanager
def reading(path: Path):
    """Turn whatever goes wrong while a file is read into one ValueError that names it."""
    try:
        yield
    except BROKEN as error:
        raise ValueError(
            f"{path} cannot be read: {error}. Delete or replace it."
        ) from error


def npz(path: Path, *keys: str, optional: bool = False) -> dict[str, np.ndarray]:
    """The arrays of an .npz by these keys, in this order; all of them must be there unless they are optional."""
    with (
        reading(path),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        there = [key for key in keys if not optional or key in arrays]
        for key in there:
            with arrays.zip.open(
                f"{key}.npy"
            ) as array:  # before there is memory for what its header claims
                form = np.lib.format
                read = {
                    (1, 0): form.read_array_header_1_0,
                    (2, 0): form.read_array_header_2_0,
                }[form.read_magic(array)]
                shape, _, kind = read(array)
            if (
                math.prod(shape) * kind.itemsize
                > arrays.zip.getinfo(f"{key}.npy").file_size
            ):
                raise ValueError(
                    f"{key} is said to be {shape} {kind}, but the file holds fewer bytes"
                )
        found = {key: arrays[key] for key in there}
        return {
            key: array.astype(array.dtype.newbyteorder("="), copy=False)
            for key, array in found.items()
        }


def part(y: np.ndarray, split: str) -> np.ndarray:
    """Rows of one part of a fixed random split: 70 % and 30 % of every class, to within one item."""
    shuffled = np.random.default_rng(0).permutation(len(y))
    by_class = shuffled[np.argsort(y[shuffled], kind="stable")]
    at = 3 * np.arange(len(y))
    test = (at + 8) // 10 > (
        at + 5
    ) // 10  # three of every ten in a row; never two neighbours
    return np.sort(by_class[test == (split == "test")])


def unpacked(
    archive: str, members: Sequence[str], root: Path
) -> tuple[Path, list[bytes]]:
    """The path to name in errors, and the members' contents: of the archive, or of files below root if it is absent."""
    loose = [root / member for member in members]
    if not places(archive, root) and all(path.is_file() for path in loose):
        return loose[0].parent, [path.read_bytes() for path in loose]
    path = fetch(archive, root)
    with reading(path):
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as packed:
                return path, [packed.read(member) for member in members]
        with tarfile.open(path, "r|gz") as tar:  # one pass, nothing is written
            found = {
                entry.name: tar.extractfile(entry).read()
                for entry in tar
                if entry.name in members
            }  # type: ignore
        return path, [found[member] for member in members]


def checked(path, images, labels, shape, classes):
    if images.shape[1:] != shape or images.dtype != np.uint8:
        raise ValueError(
            f"{path}: images must be uint8 of shape {shape}, got {images.dtype} {images.shape[1:]}"
        )
    if labels.shape != images.shape[:1] or len(images) == 0:
        raise ValueError(
            f"{path}: {len(images)} images do not go with labels of shape {labels.shape}"
        )
    labels = labels.astype(np.int64)
    if labels.min() < 0 or labels.max() >= len(classes):
        raise ValueError(
            f"{path}: labels must lie in 0..{len(classes) - 1}, got {labels.min()}..{labels.max()}"
        )
    return images, labels, classes, None
