"""What a run depends on, in its manifest, and whether that has changed since.

Notebook source and parameters give the folder of a sweep's run its name. The manifest
holds uqlab's version and commit, and the checksums of the files that parameters name:
data, weights, and the module before a function with those beside it. If one of them
differs now, the run is stale.
"""

import functools
import glob
import itertools
import json
import os
import re
import subprocess
import sys
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
IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.M)
INSTALLED = {"site-packages", "dist-packages"}
PACKAGE = Path(uqlab.__file__).parent
# Folders that a page writes into, or whose files have published checksums.
APART = {"output_dir", "trained", "root"}


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

    Where files have been changed since, or added, a digest of all stands behind "+".
    """

    def git(*arguments):
        command = ["git", "--no-optional-locks", "-C", str(PACKAGE), *arguments]
        done = subprocess.run(command, capture_output=True, check=False)
        return done.stdout.decode(errors="replace").strip()

    try:
        last = git("log", "-1", "--format=%h", "--abbrev=9", "--", ".")
        changed = last and git("status", "--porcelain", "--", ".")
    except OSError:  # no git here
        return ""
    return f"{last}+{fingerprint(_digest(PACKAGE))[:8]}" if changed else last


def named_files(value: Any, folder: Path) -> Iterator[Path]:
    """Yield the files, folders and patterns that a parameter names, alone or in lists.

    Classes may stand behind a name, `mine.npz[0-3]`, and a function behind its module,
    `mine.py:make` or `mine:make`. Relative paths are seen from `folder`, the
    notebook's. Files of data count where they are missing too.
    """
    if isinstance(value, dict):
        value = [item for name, item in value.items() if name not in APART]
    if isinstance(value, list | tuple):
        for item in value:
            yield from named_files(item, folder)
    elif isinstance(value, str) and value.strip():
        text = os.path.expanduser(value.strip())
        data = re.fullmatch(rf"(.+{DATA_FILE})\s*(\[.*\])?", text)
        module, _, function = text.rpartition(":")
        if data:
            yield folder / data[1]
        elif module and function.isidentifier():
            yield from _module(module, folder)
        elif os.path.exists(folder / text) or glob.glob(str(folder / text)):
            yield folder / text


def _module(place: str, folder: Path) -> list[Path]:
    """Return the file of a module, by its path or its dotted name, if it is found.

    Or the pattern of its package; and what it may import, where that is not installed:
    the modules beside it, and the packages there that they name.
    """
    file = place.endswith(".py")
    stem = place.removesuffix(".py") if file else place.replace(".", "/")
    for at, name in itertools.product(
        (folder, *sys.path), (f"{stem}.py", f"{stem}/__init__.py")
    ):
        if Path(at, name).is_file():
            whole = Path(at, name if file or "/" not in name else stem.split("/")[0])
            alone = INSTALLED & {*whole.parts}
            return [*map(_pattern, [whole] if alone else _with_imports(whole))]
    return []


def _with_imports(whole: Path) -> list[Path]:
    """Return a module or a package, and all beside it that it may import."""
    found = [whole, *sorted(whole.parent.glob("*.py"))]
    for each in found:
        files = filter(Path.is_file, [each, *each.rglob("*.py")])  # no broken links
        text = "\n".join(file.read_text("utf-8", "replace") for file in files)
        beside = {whole.with_name(name) for name in IMPORT.findall(text)}
        found += sorted(p for p in beside - {*found} if p.is_dir())
    return [*dict.fromkeys(found)]


def _pattern(path: Path) -> Path:
    return Path(glob.escape(str(path)), "**/*.py") if path.is_dir() else path


class Present:
    """What is there now: uqlab's commit and files, each read once."""

    def __init__(self) -> None:
        self.uqlab = uqlab.__version__
        self.commit = commit()
        self.digest = functools.cache(_digest)

    def data(self, parameters: Values, folder: Path) -> dict[str, str | None]:
        """Return the checksums of the files that parameters name."""
        files = named_files(parameters, folder)
        return {str(path): self.digest(path) for path in files}

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
    """Return the checksum of a file, or of the files in a folder or of a pattern."""
    with suppress(OSError):  # a file that cannot be read has none
        if path.is_file():
            return sha256(path)
        found = glob.glob(str(path), recursive=True)
        there = [path] if path.is_dir() else map(Path, found)
        files = {str(file) for each in there for file in _files(each)}
        return fingerprint({file: sha256(file) for file in sorted(files)})
    return None


def _files(path: Path, *around: Path) -> Iterator[Path]:
    """Yield a file, or those in a folder; none of results, hidden ones and caches."""
    real = path.resolve()
    if path.is_file():
        yield path
    elif path.is_dir() and real not in around and path.name != "__pycache__":
        written = Manifest.read(path).notebook  # by a page
        for each in () if written else path.iterdir():
            if not each.name.startswith("."):
                yield from _files(each, *around, real)
