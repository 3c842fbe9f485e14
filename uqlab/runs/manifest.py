"""The manifest of a run: what it depends on, and whether that has changed since.

It holds the notebook's source and parameters, uqlab's version and commit, and checksums
of the files that parameters name: data, weights, and the module before a function with
the Python files in its folder, as of modules that the notebook imports from its own.
If one of them differs now, the run is stale. (A sweep names the folder of a run by the
notebook's source and parameters, so that of another source it finds no run at all.)
"""

import functools
import glob
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uqlab
from uqlab.core.files import (
    TRAININGS,
    Values,
    fingerprint,
    read_json,
    sha256,
    write,
)
from uqlab.core.recording import known
from uqlab.runs.parameters import cells

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = Path(uqlab.__file__).parent
# Folders that a notebook writes into, or whose files have published checksums.
_UNTRACKED = {"output_dir", "trained", "root"}


@dataclass
class Manifest:
    """The content of manifest.json, which is written last into a run's folder.

    `notebook` is its path as seen from there, so that both may move together.
    """

    notebook: str = ""
    source_sha256: str = ""
    profile: str = ""
    parameters: Values = field(default_factory=dict)
    data: dict[str, str | None] = field(default_factory=dict)
    started: str = ""
    seconds: float | int = 0
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
            return bool(sums) and sums == self.files
        return False

    @property
    def code(self) -> str:
        """The version of uqlab and its commit."""
        return f"{self.uqlab} ({self.commit})" if self.commit else self.uqlab


def _sealed(content: Values) -> Values:
    """Return a manifest's content with a checksum of it."""
    text = {name: value for name, value in content.items() if name != "sha256"}
    return text | {"sha256": fingerprint(json.dumps(text, sort_keys=True))}


def commit() -> str:
    """Return the package's last commit, if git knows it, and a digest of its files."""
    command = ["git", "log", "-1", "--format=%h", "--abbrev=9", "--", "."]
    found = ""
    with suppress(OSError):  # git is not installed
        how = {"cwd": PACKAGE, "capture_output": True, "text": True}
        found = subprocess.run(command, check=False, **how).stdout.strip()
    return f"{found}+{fingerprint(_digest(str(PACKAGE)))[:8]}"


class Present:
    """The version and commit of uqlab as they are `now`, and files, each read once."""

    def __init__(self) -> None:
        self.now = Manifest(uqlab=uqlab.__version__, commit=commit())
        self._digest = functools.cache(_digest)
        self._imported = functools.cache(_imported)

    def data(self, parameters: Values, notebook: Path) -> dict[str, str | None]:
        """Return the checksums of what parameters name and the notebook imports.

        Relative paths are seen from the notebook's folder.
        """
        places = [*_places(parameters, notebook.parent), *self._imported(notebook)]
        return {place: self._digest(place) for place in places}

    def stale(self, manifest: Manifest, notebook: Path | None = None) -> str:
        """Say why a finished run is stale; empty if nothing has changed since.

        With a notebook also files count that were not there, or lay elsewhere.
        """
        if manifest.code != self.now.code:
            return f"of uqlab {manifest.code}, now {self.now.code}"
        before, now = manifest.data, {p: self._digest(p) for p in manifest.data}
        if notebook:
            now = self.data(manifest.parameters, notebook)
        for place in now | before:
            if now.get(place) != before.get(place):
                return f"{_newer(place, manifest.started)} changed since"
        return ""


def _imported(notebook: Path) -> list[str]:
    """Return patterns of the Python files in a notebook's folder if it imports some."""
    code = "\n".join("".join(cell["source"]) for cell in cells(notebook))
    lines = re.findall(r"^\s*(?:from|import|%run)\b.*", code, re.MULTILINE)
    for name in re.findall(r"\w+", " ".join(lines)):
        own = notebook.with_name(name)
        if own.is_dir() or own.with_suffix(".py").is_file():
            return _modules(name, notebook.parent)
    return []


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
        module, _, function = text.rpartition(":")
        if module and function.isidentifier():
            yield from _modules(module, folder)
        for name in {text, re.sub(r"\s*\[[^]]*\]$", "", text)}:
            place = str(folder / name)
            if name and (os.path.exists(place) or glob.glob(place)):
                yield place


def _modules(module: str, folder: Path) -> list[str]:
    """Return patterns of a module and of the Python files that it may import.

    These are in its package, in the folder beside it and two levels below; an installed
    package counts alone.
    """
    path = folder / module
    if not module.endswith(".py"):
        top = module.split(".")[0]
        places = [place / top for place in (folder, *map(Path, sys.path))]
        own = [p for p in places if p.is_dir() or p.with_name(f"{top}.py").is_file()]
        if not own:
            return []
        path = own[0]
    root = path.parent
    if "-packages" in root.name:
        return [f"{path}*"]
    return [f"{path}/**/*.py", f"{root}/*.py", f"{root}/*/*.py", f"{root}/*/*/*.py"]


def _digest(place: str) -> str | None:
    """Return the checksum of a file, or of the files in a folder or of a pattern.

    Hidden files and caches of Python do not count.
    """
    with suppress(OSError):  # what cannot be read has none
        if os.path.isfile(place):
            return sha256(place)
        files = _files(place)
        top = os.path.commonpath([os.path.dirname(name) for name in files] or [place])
        return fingerprint({os.path.relpath(f, top): sha256(f) for f in files})
    return None


def _files(place: str) -> list[str]:
    """Return a file, or the files in a folder or of a pattern and below."""
    pattern = glob.escape(place) if os.path.exists(place) else place
    found = glob.glob(pattern, recursive=True)
    found += glob.glob(f"{pattern}/**", recursive=True)
    files = [name for name in sorted(found) if os.path.isfile(name)]
    return [name for name in files if not name.endswith(".pyc")]


def _newer(place: str, since: str) -> str:
    """Name the files of a place that were written since, else the place."""
    start = datetime.fromisoformat(since).timestamp()
    newer = [name for name in _files(place) if os.path.getmtime(name) > start]
    return ", ".join(map(os.path.basename, newer[:3])) or place


def cached(
    name: str, make: Callable[[], "Mapping[str, Tensor]"], *depends_on: Any
) -> "Mapping[str, Tensor]":
    """Return the tensors that `make` returns, from a file where it was called before.

    The variable UQLAB_CACHE, which `uqlab run` sets, names the folder of the files;
    where it is empty or absent, nothing is kept.

    Parameters
    ----------
    name
        What they are.
    make
        Returns tensors by name, as `state_dict` does. It should draw from no global
        generator, because where a file is read nothing is drawn.
    depends_on
        All that the result follows from: settings, data, initial weights. If one of
        them, a file of uqlab or torch's version changes, `make` is called again, as it
        is if the file is damaged.

    Returns
    -------
    Mapping
        The tensors; those of a file are on the CPU.

    Examples
    --------
    ::

        def trained():
            training.fit(ensemble, x, y, **settings)
            return ensemble.state_dict()

        weights = runs.cached("deep ensemble", trained, ensemble, x, y, settings)
        ensemble.load_state_dict(weights)
    """
    folder = os.environ.get(TRAININGS)
    if not folder:
        return make()
    import torch

    from uqlab.core.modules import load_tensors, save_tensors

    key = fingerprint(name, depends_on, torch.__version__, commit())
    path = Path(folder, f"{key}.safetensors")
    with suppress(OSError, ValueError):  # absent or damaged
        return load_tensors(path)[0]
    tensors = make()
    with suppress(OSError, RuntimeError):  # a full disk costs no training
        save_tensors(path, tensors, {"name": name})
    return tensors
