"""What the readers of data sets share: files that are fetched once, arrays, archives.

A fetched file is compared with a checksum at every use. A reader of an embedded set
takes the split, that of a fetched set `(split, root)`; both return `Items`. Files
without a published checksum (unpacked archives, .npz) are read only where the file with
a checksum is missing.
"""

import io
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from uqlab.core.extras import extra


class _Remote(NamedTuple):
    """Where a file comes from, and its checksum."""

    checksum: str  # "sha256:..." or "md5:..."
    urls: list[str]  # mirrors, tried in this order


def _registered() -> dict[str, _Remote]:
    files = {}
    groups = json.loads(Path(__file__).with_name("files.json").read_text())
    for group in groups:
        for file, checksum in group["files"].items():
            urls = [mirror.format(file=file) for mirror in group["mirrors"]]
            files[group["folder"] + file] = _Remote(checksum, urls)
    return files


FILES = _registered()  # by their paths below root


def fetch(file: str, root: Path) -> Path:
    """Return the path of a registered file, downloaded if it is missing or damaged."""
    with extra("notebooks"):
        import pooch

    remote = FILES[file]
    path = root / file
    failures = ""
    for url in remote.urls:
        try:  # the file appears whole and compared, or not at all
            pooch.retrieve(
                url, remote.checksum, path.name, path.parent, progressbar=True
            )
            return path
        except (OSError, ValueError) as error:
            failures += f"\n  {url}: {error}"
    damaged = path.is_file()
    kind = ValueError if damaged else FileNotFoundError
    raise kind(
        f"{path} is {'corrupted' if damaged else 'missing'}, and no mirror delivered "
        f"it:{failures}\nPut the file with the checksum {remote.checksum} there by "
        "hand, or name another folder (root or $UQLAB_DATA)."
    )


ASSETS = Path(__file__).parent / "assets"
DIGITS = tuple("0123456789")


class Items(NamedTuple):
    """One split of a set; caches may hold the arrays, so do not write to them."""

    inputs: Any  # [N, C, H, W], uint8 or floating in [0, 1]; or a list of texts
    labels: np.ndarray  # integers [N]; -1: none
    classes: tuple[str, ...]
    label_probs: np.ndarray | None = None  # float32 [N, C]
    fine: np.ndarray | None = None  # images drawn again in 28 x 28, for `resize`
    about: Mapping[str, np.ndarray] = {}  # of sounds: "waves" [N, T], and more


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one ValueError naming it."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read: {error!r}; it may be damaged or of another format "
            "(arrays of numbers, texts in UTF-8)"
        ) from error


@cache
def asset(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one file of `assets/`, which scripts in `tools/` write."""
    packed = lzma.decompress((ASSETS / f"{name}.npz.xz").read_bytes())
    return dict(np.load(io.BytesIO(packed)))


def asset_split(name: str, split: str) -> dict[str, np.ndarray]:
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


def npz(path: Path, names: str) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz whose names match a regular expression."""
    with reading(path), path.open("rb") as file, np.load(file) as stored:
        return {name: stored[name] for name in stored if re.fullmatch(names, name)}


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


def unpacked(archive: str, members: Sequence[str], root: Path) -> list[bytes]:
    """Return members of an archive; without it, of its unpacked files below `root`."""
    loose = [root / member for member in members]
    if not (root / archive).exists() and all(path.is_file() for path in loose):
        return [path.read_bytes() for path in loose]
    path = fetch(archive, root)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as packed:
            return [packed.read(member) for member in members]
    with tarfile.open(path) as packed:
        files: list[Any] = [packed.extractfile(member) for member in members]
        return [file.read() for file in files]
