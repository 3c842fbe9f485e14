"""Files that are fetched once, checked by checksum at every use, and kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pooch


@dataclass(frozen=True)
class Remote:
    """Where a file comes from and how it is checked."""

    checksum: str  # "sha256:..." or "md5:...", published or used by the loader named beside the entry
    urls: tuple[str, ...]  # mirrors, tried in this order
    also: tuple[str, ...] = ()  # other places below root where the file may lie


FILES: dict[
    str, Remote
] = {}  # path below root -> its source; filled by `readers.source` and `weights`


def remotes(
    folder: str,
    mirrors: Sequence[str],
    checksums: Mapping[str, str],
    also: Sequence[str] = (),
) -> dict[str, Remote]:
    """The entries of a folder's files. mirrors: addresses up to the file's name. also: folders of other loaders."""
    return {
        (Path(folder) / file).as_posix(): Remote(
            checksum,
            tuple(mirror + file for mirror in mirrors),
            tuple((Path(place) / file).as_posix() for place in also),
        )
        for file, checksum in checksums.items()
    }


def places(file: str, root: Path) -> list[Path]:
    """Where below root a registered file lies."""
    return [
        path for place in (file, *FILES[file].also) if (path := root / place).is_file()
    ]


def fetch(file: str, root: Path) -> Path:
    """The path of a registered file whose checksum is right: one that lies below root, else downloaded to root/file."""
    remote = FILES[file]
    method, expected = remote.checksum.split(":")
    wrong, failures = "", ""
    for path in places(file, root):
        if (found := pooch.file_hash(path, alg=method)) == expected:
            return path
        wrong += f"\n  {path}: {method} {found}"
    for url in remote.urls:
        try:  # pooch downloads to a temporary name, checks, then renames
            target = root / file
            return Path(
                pooch.retrieve(
                    url, remote.checksum, target.name, target.parent, progressbar=True
                )
            )
        except (OSError, ValueError) as error:
            failures += f"\n  {url}: {error}"
    todo = f"Put the right file there by hand ({method} {expected}) or name a folder that has it (root or $UQLAB_DATA)."
    if wrong:
        raise ValueError(
            f"corrupted file, not used; expected {method} {expected}, found{wrong}\n"
            f"Fetching it again as {root / file} failed:{failures}\n{todo}"
        )
    raise FileNotFoundError(
        f"{root / file} is missing and no mirror delivered it:{failures}\n{todo}"
    )
