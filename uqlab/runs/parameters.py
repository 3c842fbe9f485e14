"""Notebooks by name, and their parameters: read without running, checked before anything runs, data and never code."""

import ast
import difflib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import yaml

from uqlab.core.files import fingerprint, read_json
from uqlab.core.recording import plain

CELL = {"cell_type", "metadata", "source"}  # what every cell of a notebook has
PROJECT = Path(__file__).absolute().with_name("project")  # what `uqlab new` copies
PAGES = (PROJECT / "notebooks").resolve()  # in a checkout its notebooks/
DATA_FILE = r"\.(?:npz|[tc]sv(?:\.gz)?)"  # how the path of a user's own data ends, as a regular expression
PARSING = (
    threading.Lock()
)  # Python 3.11 counts the depth of all threads' syntax trees together, and fails


def find(name: str | os.PathLike) -> Path:
    """Return the notebook that a path, a stem or a unique prefix of one ("03") in the notebooks folder means."""
    if Path(name).is_file():
        return Path(name).absolute()
    notebooks = all_notebooks()
    found = [path for path in notebooks if path.stem == str(name)]
    found = found or [path for path in notebooks if path.stem.startswith(str(name))]
    if len(found) == 1:
        return found[0]
    stems = ", ".join(path.stem for path in found or notebooks)
    raise ValueError(
        f"{str(name)!r} {f'is the start of several: {stems}' if found else f'is no notebook of: {stems}'}"
    )


def all_notebooks() -> list[Path]:
    """Return [0-9]*.ipynb of notebooks/ in the current folder or, failing that, those that came with the package."""
    return sorted(Path.cwd().glob("notebooks/[0-9]*.ipynb")) or sorted(
        PAGES.glob("[0-9]*.ipynb")
    )


def new_project(folder: Path) -> None:
    """Write the pages, their profiles and the committed runs into a new or empty folder."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} holds files, and a project starts in a new or empty folder; name another"
        )
    left_out = shutil.ignore_patterns("*.sweep", ".*", "__pycache__")
    shutil.copytree(PROJECT, folder, ignore=left_out, dirs_exist_ok=True)


def defaults(notebook: str | os.PathLike) -> dict[str, Any]:
    """Read the parameters of a notebook and their values from its cell tagged `parameters`, without running it."""
    tagged = (
        cell
        for cell in cells(notebook)
        if "parameters" in cell["metadata"].get("tags", [])
    )
    source = "".join(next(tagged, {"source": ""})["source"])
    values = {}
    try:
        with PARSING:
            tree = ast.parse(source)
        for node in tree.body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    values[name] = ast.literal_eval(value)
                case _:
                    raise ValueError
    except (SyntaxError, ValueError) as error:
        rule = "holds only lines `name = literal  # meaning`; derived values go into the next cell"
        raise ValueError(
            f"{Path(notebook).name}: the parameters cell {rule}; found\n{source}"
        ) from error
    return values


def cells(notebook: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the cells of a notebook; raises ValueError for any other file."""
    found = read_json(Path(notebook)).get("cells")
    if not isinstance(found, list) or not all(
        isinstance(cell, dict) and cell.keys() >= CELL for cell in found
    ):
        raise ValueError(
            f"{notebook} is not a notebook of format 4, whose cells have {', '.join(sorted(CELL))}"
        )
    return found


def source_sha256(notebook: str | os.PathLike) -> str:
    """Return the checksum of the sources and tags of a notebook's cells; outputs that an editor left do not count."""
    return fingerprint(
        [
            [c["cell_type"], "".join(c["source"]), c["metadata"].get("tags", [])]
            for c in cells(notebook)
        ]
    )


def profiles(notebook: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Read profiles.yaml beside a notebook: profile -> notebook stem -> {parameter: value}; `quick` may be absent."""
    path = notebook.parent / "profiles.yaml"
    try:
        read = (
            yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        ) or {}
        sets = {
            name: {stem: dict(v or {}) for stem, v in (entries or {}).items()}
            for name, entries in read.items()
        }
        json.dumps(sets, default=str)
    except (
        yaml.YAMLError,
        AttributeError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(
            f"{path} must map profile -> notebook -> {{parameter: value}}: {error}"
        ) from error
    return {"quick": {}} | sets


def overrides(
    notebook: Path, profile: str = "quick", given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the parameters that differ from a notebook's defaults: those of the profile, then the given ones.

    Text is parsed as data of the default's type (a Python literal, YAML's true or [a, b]) and never evaluated.
    Raises ValueError for an unknown profile or parameter and for a value of another type than the default's.
    """
    known = defaults(notebook)
    sets = profiles(notebook)
    if profile not in sets:
        raise ValueError(
            f"unknown profile {profile!r}; {notebook.parent / 'profiles.yaml'} has: {', '.join(sets)}"
        )
    return checked(
        {**sets[profile].get(notebook.stem, {}), **(given or {})}, known, notebook.stem
    )


def checked(given: dict[str, Any], known: dict[str, Any], where: str) -> dict[str, Any]:
    """Return given parameters as values of the types of the `known` defaults of the notebook named `where`."""
    values = {}
    for name, value in given.items():
        if name not in known:
            raise ValueError(unknown(name, known, where))
        if name == "output_dir":
            raise ValueError("output_dir is set by the runner; use --output-dir")
        values[name] = _typed(f"{where}: parameter {name}", value, known[name])
    return values


def per_notebook(
    names: Iterable[str], profile: str, given: dict[str, str]
) -> dict[Path, dict[str, Any]]:
    """Return the parameters given to each notebook (`names`: none for all), all checked.

    given: their text; each must be a parameter of at least one of the notebooks.
    Says on the terminal where a notebook lacks a parameter or an entry in the profile.
    """
    chosen = list(dict.fromkeys(map(find, names))) or all_notebooks()
    if len({path.stem for path in chosen}) < len(chosen):
        raise ValueError(
            f"two notebooks of one name would share a folder: {', '.join(map(str, chosen))}"
        )
    known = {path: defaults(path) for path in chosen}
    for name in given:
        lacking = [path.stem for path in chosen if name not in known[path]]
        if len(lacking) == len(chosen):
            raise ValueError(
                unknown(
                    name,
                    dict.fromkeys(n for k in known.values() for n in k),
                    " and ".join(lacking),
                )
            )
        if lacking:
            click.echo(f"note: no parameter {name!r} in {', '.join(lacking)}", err=True)
    given = {name: from_here(value) for name, value in given.items()}
    plan = {
        path: {name: value for name, value in given.items() if name in known[path]}
        for path in chosen
    }
    for path, values in plan.items():
        overrides(path, profile, values)
        if profile != "quick" and path.stem not in profiles(path)[profile]:
            click.echo(
                f"note: profile {profile!r} has no entry for {path.stem}: its defaults",
                err=True,
            )
    return plan


def from_here(text: str) -> str:
    """Make the paths of data files that exist in the current folder absolute, since kernels run in another one."""

    def absolute(match: re.Match[str]) -> str:
        return (
            Path(match[0]).absolute().as_posix()
            if Path(match[0]).is_file()
            else match[0]
        )

    return re.sub(
        rf"""[^\s'"\[\],][^'"\[\],]*{DATA_FILE}(?=['"\[\],\s]|$)""", absolute, text
    )


def unknown(name: str, known: Iterable[str], where: str) -> str:
    """Return the message that a parameter is unknown, with the nearest name and all names."""
    close = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"unknown parameter {name!r}{hint} {where} has: {', '.join(known) or 'no parameters'}"


def _typed(name: str, value: Any, default: Any) -> Any:
    if isinstance(value, str):
        value = _parse(value, default)
    value, default = (
        plain(name, value),
        list(default) if isinstance(default, tuple) else default,
    )
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if default is None or type(value) is type(default):
        return value
    kinds = f"must be {type(default).__name__}, like its default {default!r}"
    raise ValueError(f"{name} {kinds}; got {value!r} ({type(value).__name__})")


def _parse(text: str, default: Any) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
        with suppress(
            yaml.YAMLError, RecursionError
        ):  # for true, null, [a, b]; its other readings (1:30, dates, 1e-3) surprise
            read = yaml.safe_load(text)
            value = (
                read if read is None or isinstance(read, bool | list | dict) else text
            )
    return text if isinstance(default, str) and not isinstance(value, str) else value
