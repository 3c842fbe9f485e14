"""Files that are fetched once, checked by checksum at every use, and kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from uqlab.core.extras import extra


@dataclass(frozen=True)
class Remote:
    """Where a file comes from and how it is checked."""

    # "sha256:..." or "md5:...", published or used by the loader named beside the entry
    checksum: str
    urls: tuple[str, ...]  # mirrors, tried in this order
    also: tuple[str, ...] = ()  # other places below root where the file may lie


# Path below root -> its source; filled by `register` and `weights`.
FILES: dict[str, Remote] = {}


def register(
    folder: str,
    mirrors: Sequence[str],
    checksums: Mapping[str, str],
    also: Sequence[str] = (),
) -> None:
    """Register a folder's files.

    `mirrors` are addresses up to the file's name, `also` the folders of other loaders.
    """
    for file, checksum in checksums.items():
        urls = tuple(mirror + file for mirror in mirrors)
        others = tuple((Path(place) / file).as_posix() for place in also)
        FILES[(Path(folder) / file).as_posix()] = Remote(checksum, urls, others)


def places(file: str, root: Path) -> list[Path]:
    """Return where below root a registered file lies."""
    paths = [root / place for place in (file, *FILES[file].also)]
    return [path for path in paths if path.is_file()]


def fetch(file: str, root: Path) -> Path:
    """Return the path of a registered file whose checksum is right.

    It lies below root, or is downloaded to root/file.
    """
    with extra("notebooks"):
        import pooch

    remote = FILES[file]
    target = root / file
    method, expected = remote.checksum.split(":")
    wrong = ""
    failures = ""
    for path in places(file, root):
        checksum = pooch.file_hash(path, alg=method)
        if checksum == expected:
            return path
        wrong += f"\n  {path}: {method} {checksum}"
    for url in remote.urls:
        try:  # pooch downloads to a temporary name, checks, then renames
            pooch.retrieve(
                url, remote.checksum, target.name, target.parent, progressbar=True
            )
            return target
        except (OSError, ValueError) as error:
            failures += f"\n  {url}: {error}"
    todo = (
        f"Put the right file there by hand ({method} {expected}) or name a folder that "
        "has it (root or $UQLAB_DATA)."
    )
    if wrong:
        raise ValueError(
            f"corrupted file, not used; expected {method} {expected}, found{wrong}\n"
            f"Fetching it again as {target} failed:{failures}\n{todo}"
        )
    raise FileNotFoundError(
        f"{target} is missing and no mirror delivered it:{failures}\n{todo}"
    )
