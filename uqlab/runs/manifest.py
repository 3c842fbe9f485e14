"""What a run depends on, in its manifest, and whether that has changed since.

Notebook source and parameters give the folder of a sweep's run its name. The manifest
holds uqlab's version and commit, and the checksums of the data files that parameters
name. If one of them differs now, the run is stale.
"""

import functools
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uqlab
from uqlab.core.files import Values, fingerprint, read_json, sha256, write
from uqlab.core.recording import known
from uqlab.runs.parameters import DATA_FILE

Seconds = float | int | None
PACKAGE = Path(uqlab.__file__).parent


@dataclass
class Manifest:
    """The content of manifest.json, which is written last into a run's folder."""

    notebook: str = ""
    source_sha256: str = ""
    profile: str = ""
    parameters: Values = field(default_factory=dict)
    data: dict[str, str | None] = field(default_factory=dict)
    started: str = ""
    seconds: Seconds = None
    threads: int | None = None
    device: str | None = None
    uqlab: str = ""
    commit: str = ""
    python: str = ""
    platform: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read manifest.json of a folder; an absent or damaged one is empty."""
        content = read_json(folder / "manifest.json")
        return cls(**known(cls, content)) if content == _sealed(content) else cls()

    def save(self, folder: Path) -> None:
        """Write manifest.json with a checksum of all that it says."""
        write(folder / "manifest.json", json.dumps(_sealed(asdict(self)), indent=1))

    def undamaged(self, folder: Path, names: Iterable[str] = ()) -> bool:
        """Return whether files of its folder, by default all, have their checksums."""
        if "results.json" not in self.files:
            return False
        with suppress(OSError):
            return all(
                sha256(folder / name) == self.files.get(name)
                for name in names or self.files
            )
        return False

    @property
    def code(self) -> str:
        """The version of uqlab and its commit."""
        return f"{self.uqlab} ({self.commit})" if self.commit else self.uqlab


def _sealed(content: Values) -> Values:
    """Return a manifest with a checksum of all that it says."""
    text = {name: value for name, value in content.items() if name != "sha256"}
    return text | {"sha256": fingerprint(json.dumps(text, sort_keys=True))}


def finished(folder: Path) -> bool:
    """Return whether a result folder is complete and every file undamaged."""
    return Manifest.read(folder).undamaged(folder)


def key(source: str, parameters: Values) -> str:
    """Return the name of a run's folder: a hash of notebook source and parameters."""
    values = {name: value for name, value in parameters.items() if name != "output_dir"}
    return fingerprint(json.dumps([source, values], sort_keys=True))[:16]


def commit() -> str:
    """Return the last commit of the package; empty where it is no git checkout.

    Where files have been changed since, a digest of the changes stands behind "+".
    """

    def git(*arguments):
        command = ["git", "--no-optional-locks", "-C", str(PACKAGE), *arguments]
        done = subprocess.run(command, capture_output=True, check=False)
        return done.stdout.decode(errors="replace").strip()

    try:
        last = git("log", "-1", "--format=%h", "--abbrev=9", "--", ".")
        changes = last and git("diff", "--no-ext-diff", "HEAD", "--", ".")
    except OSError:  # no git here
        return ""
    return f"{last}+{fingerprint(changes)[:8]}" if changes else last


def data_files(value: Any, folder: Path) -> Iterator[Path]:
    """Yield the data files that a parameter names, alone or in lists.

    Classes may stand behind a name: `mine.npz[0-3]`. Relative paths are seen from
    `folder`, the notebook's.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from data_files(item, folder)
    elif isinstance(value, str):
        path = re.fullmatch(rf"(.+{DATA_FILE})\s*(\[.*\])?", value.strip())
        if path:
            yield folder / Path(path[1]).expanduser()


class Present:
    """What is there now: uqlab's commit and data files, each read once."""

    def __init__(self) -> None:
        self.uqlab = uqlab.__version__
        self.commit = commit()
        self.digest = functools.cache(_digest)

    def data(self, parameters: Values, folder: Path) -> dict[str, str | None]:
        """Return the checksums of the data files that parameters name."""
        return {str(path): self.digest(path) for path in data_files(parameters, folder)}

    def stale(self, manifest: Manifest) -> str:
        """Say why a finished run is stale; empty if nothing has changed since."""
        if (manifest.uqlab, manifest.commit) != (self.uqlab, self.commit):
            now = Manifest(uqlab=self.uqlab, commit=self.commit)
            return f"of uqlab {manifest.code}, now {now.code}"
        for path, digest in manifest.data.items():
            if self.digest(Path(path)) != digest:
                return f"{Path(path).name} changed since"
        return ""


def _digest(path: Path) -> str | None:
    with suppress(OSError):  # a file that cannot be read has none
        return sha256(path)
    return None
