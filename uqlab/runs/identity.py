"""What a run depends on, and whether that has changed since.

Notebook source and parameters give the folder of a sweep's run its name. The manifest holds the checksums of the data
files that parameters name and of the files of uqlab that the kernel imported. If one differs now, the run is stale.
"""

import functools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import uqlab
from uqlab.core.files import fingerprint, sha256
from uqlab.runs.parameters import DATA_FILE

PACKAGE = Path(uqlab.__file__).parent


def key(source: str, parameters: dict[str, Any]) -> str:
    """Return the name of a run's folder: a hash of its notebook's source (`source_sha256`) and all parameters."""
    values = {name: value for name, value in parameters.items() if name != "output_dir"}
    return fingerprint(json.dumps([source, values], sort_keys=True))[:16]


def code(manifest: dict[str, Any]) -> str | None:
    """Return a short digest of the files of uqlab that a run imported; None where they are not on record."""
    files = manifest.get("code")
    return (
        fingerprint(json.dumps(files, sort_keys=True))[:8]
        if isinstance(files, dict)
        else None
    )


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with a checksum of all that it says."""
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return said | {"sha256": fingerprint(json.dumps(said, sort_keys=True))}


def undamaged(folder: Path, manifest: dict[str, Any], *names: str) -> bool:
    """Whether a manifest has its own checksum, and the named files of its folder, by default all, have theirs.

    Manifests of before they had checksums are taken as they are.
    """
    files = manifest.get("files")
    if not isinstance(files, dict) or "results.json" not in files:
        return False
    last = [*manifest.values()][
        -1
    ]  # the checksum, also where a byte of its name is damaged
    if ("sha256" in manifest or (isinstance(last, str) and len(last) == 64)) and sealed(
        manifest
    ) != manifest:
        return False
    with suppress(OSError):
        return all(sha256(folder / name) == files.get(name) for name in names or files)
    return False


def data_files(value: Any, folder: Path) -> Iterator[Path]:
    """Yield the data files that a parameter names, alone or in lists, also with classes behind: `mine.npz[0-3]`.

    folder: the notebook's, from which its kernel reads relative paths.
    """
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from data_files(item, folder)
    elif isinstance(value, str) and (
        named := re.fullmatch(rf"(.+{DATA_FILE})\s*(\[.*\])?", value.strip())
    ):
        yield folder / Path(named[1]).expanduser()


def _digest(path: Path) -> str | None:
    with suppress(OSError):  # a file that cannot be read has none
        return sha256(path)
    return None


class Present:
    """The present checksums of data files and code; every file is read once."""

    def __init__(self) -> None:
        self.digest = functools.cache(_digest)

    def data(self, parameters: dict[str, Any], folder: Path) -> dict[str, str | None]:
        return {str(path): self.digest(path) for path in data_files(parameters, folder)}

    def stale(self, manifest: dict[str, Any]) -> str:
        """Say in a few words why a finished run is stale; empty if nothing that it depends on has changed."""
        files, data = manifest.get("code"), manifest.get("data")
        if not isinstance(files, dict) or not isinstance(data, dict):
            return "no record of its code"
        changed = [
            name
            for name, digest in files.items()
            if self.digest(PACKAGE / name) != digest
        ]
        changed += [
            Path(path).name
            for path, digest in data.items()
            if self.digest(Path(path)) != digest
        ]
        more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
        return f"{', '.join(changed[:2])}{more} changed since" if changed else ""
