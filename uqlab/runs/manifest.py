"""The manifest of a run: what it depends on, and whether that has changed since.

It holds the notebook's source and parameters, uqlab's version and commit, and checksums
of the files that parameters name: data, weights, and the module before a function with
the Python files in its folder. If one of them differs now, the run is stale.
"""

import functools
import glob
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uqlab
from uqlab.core.files import Values, fingerprint, read_json, sha256, write
from uqlab.core.recording import known
from uqlab.runs.parameters import DATA_FILE

PACKAGE = Path(uqlab.__file__).parent
# Folders that a notebook writes into, or whose files have published checksums.
_UNTRACKED = {"output_dir", "trained", "root"}


@dataclass
class Manifest:
    """The content of manifest.json, which is written last into a run's folder."""

    notebook: str = ""
    source_sha256: str = ""
    profile: str = ""
    parameters: Values = field(default_factory=dict)
    data: dict[str, str | None] = field(default_factory=dict)
    started: str = ""
    seconds: float | int | None = None
    threads: int | None = None
    device: str | None = None
    uqlab: str = ""
    commit: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read manifest.json of a folder; an absent or damaged one is empty."""
        content = read_json(folder / "manifest.json")
        return cls(**known(cls, content)) if content == _sealed(content) else cls()

    def save(self, folder: Path) -> None:
        """Write manifest.json with a checksum of the content."""
        write(folder / "manifest.json", json.dumps(_sealed(asdict(self)), indent=1))

    def undamaged(self, folder: Path) -> bool:
        """Return whether all files of the run are there and have their checksums."""
        with suppress(OSError):
            sums = {name: sha256(folder / name) for name in self.files}
            return "results.json" in sums and sums == self.files
        return False

    @property
    def code(self) -> str:
        """The version of uqlab and its commit."""
        return f"{self.uqlab} ({self.commit})" if self.commit else self.uqlab


def _sealed(content: Values) -> Values:
    """Return a manifest's content with a checksum of it."""
    text = {name: value for name, value in content.items() if name != "sha256"}
    return text | {"sha256": fingerprint(json.dumps(text, sort_keys=True))}


def finished(folder: Path) -> bool:
    """Return whether a result folder is complete and every file undamaged."""
    return Manifest.read(folder).undamaged(folder)


def commit() -> str:
    """Return the package's last commit, if git knows it, and a digest of its files."""
    command = [
        "git",
        "-C",
        PACKAGE,
        "log",
        "-1",
        "--format=%h",
        "--abbrev=9",
        "--",
        ".",
    ]
    digest = fingerprint(_digest(str(PACKAGE)))[:8]
    with suppress(OSError):  # git is not installed
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return f"{done.stdout.strip()}+{digest}"
    return f"+{digest}"


class Present:
    """The current version and commit of uqlab, and files, each read once."""

    def __init__(self) -> None:
        self.uqlab = uqlab.__version__
        self.commit = commit()
        self._digest = functools.cache(_digest)

    def data(self, parameters: Values, folder: Path) -> dict[str, str | None]:
        """Return the checksums of the files that parameters name.

        Relative paths are seen from `folder`, the notebook's.
        """
        return {place: self._digest(place) for place in _places(parameters, folder)}

    def stale(self, manifest: Manifest) -> str:
        """Say why a finished run is stale; empty if nothing has changed since."""
        now = Manifest(uqlab=self.uqlab, commit=self.commit).code
        if manifest.code != now:
            return f"of uqlab {manifest.code}, now {now}"
        for place, digest in manifest.data.items():
            if self._digest(place) != digest:
                return f"{Path(place).name} changed since"
        return ""


def _places(value: Any, folder: Path) -> Iterator[str]:
    """Yield the files, folders and patterns that a parameter names, alone or in lists.

    Classes may follow a name, `mine.npz[0-3]`, and a function its module,
    `mine.py:make` or `mine:make`.
    """
    if isinstance(value, dict):
        value = [item for name, item in value.items() if name not in _UNTRACKED]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _places(item, folder)
    elif isinstance(value, str) and value.strip():
        text = os.path.expanduser(value.strip())
        data = re.fullmatch(rf"(.+{DATA_FILE})\s*(\[.*\])?", text)
        place = str(folder / (data[1] if data else text))
        module, _, function = text.rpartition(":")
        if module and function.isidentifier():
            yield from _modules(module, folder)
        elif os.path.exists(place) or glob.glob(place):
            yield place


def _modules(module: str, folder: Path) -> list[str]:
    """Return patterns of a module and of the Python files that it may import.

    These are in its package, in the folder beside it and two levels below; an installed
    package counts alone.
    """
    own = []
    if module.endswith(".py"):
        root = (folder / module).parent
    else:
        top = module.split(".")[0]
        for root in (folder, *map(Path, sys.path)):
            if (root / top).is_dir() or (root / f"{top}.py").is_file():
                break
        else:
            return []
        if "-packages" in root.name:
            return [f"{root}/{top}*"]
        own = [f"{root}/{top}/**/*.py"]
    return [*own, f"{root}/*.py", f"{root}/*/*.py", f"{root}/*/*/*.py"]


def _digest(place: str) -> str | None:
    """Return the checksum of a file, or of the files in a folder or of a pattern.

    Hidden files and caches of Python do not count.
    """
    with suppress(OSError):  # a file that cannot be read has none
        if os.path.isfile(place):
            return sha256(place)
        pattern = glob.escape(place) if os.path.isdir(place) else place
        found = {
            *glob.glob(pattern, recursive=True),
            *glob.glob(f"{pattern}/**", recursive=True),
        }
        files = [name for name in sorted(found) if os.path.isfile(name)]
        sums = {name: sha256(name) for name in files if not name.endswith(".pyc")}
        return fingerprint(sums)
    return None
