"""The finished runs of a sweep as one tidy table: a row a run, its parameters and what it recorded."""

import hashlib
import io
import json
import os
import uuid
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from uqlab.core.files import read_json, write
from uqlab.runs.parameters import find

if TYPE_CHECKING:
    from pandas import DataFrame

CIRCUMSTANCES = ("profile", "seconds", "device", "threads", "started", "notebook", "uqlab")


class Runs(NamedTuple):
    """The runs in a sweep's folder: a row each, the names of parameters and numbers, and what was left out and why."""

    rows: list[dict[str, Any]]
    parameters: list[str]
    numbers: list[str]
    left_out: list[str]


def read(sweep: Path) -> Runs:
    """Read the manifests and results in a sweep's folder; nothing but JSON is ever read.

    Left out are unfinished and damaged runs, and those of other versions of the notebook or the package than that of
    the latest run: numbers of different programs do not go into one mean.
    """
    found, left_out = [], []
    for folder in sorted(path for path in sweep.iterdir() if path.is_dir() and path.name[0] != "."):
        if folder.suffix == ".failed":
            continue
        manifest = read_json(folder / "manifest.json")
        results = _results(folder, manifest.get("files"))
        if results is None or not isinstance(manifest.get("parameters"), dict):
            left_out.append(f"{folder.name}: unfinished or damaged")
        else:
            found.append((folder.name, manifest, results))
    latest = max(found, key=lambda run: str(run[1].get("started")), default=None)
    rows: list[dict[str, Any]] = []
    parameters: dict[str, None] = {}
    numbers: dict[str, None] = {}
    for name, manifest, results in found:
        assert latest is not None
        if _version(manifest) != _version(latest[1]):
            left_out.append(f"{name}: of another version of the notebook or of uqlab")
            continue
        flat = {_free(key, manifest["parameters"]): value for key, value in _flat(results.get("numbers") or {}).items()}
        facts = {f"run_{fact}": manifest.get(fact) for fact in CIRCUMSTANCES}
        rows.append({"run": name} | manifest["parameters"] | flat | facts)
        parameters |= dict.fromkeys(manifest["parameters"])
        numbers |= dict.fromkeys(flat)
    rows.sort(key=lambda row: [_order(row.get(name)) for name in parameters])
    return Runs(rows, list(parameters), list(numbers), left_out)


def collect(sweep: str | os.PathLike) -> "DataFrame":
    """Write table.parquet and table.csv into a sweep's folder and return the table, as `load` gives it."""
    return save(_warned(read(Path(sweep)), sweep), Path(sweep))


def save(runs: Runs, sweep: Path) -> "DataFrame":
    """Write the table of runs into the sweep's folder, each file by an atomic rename."""
    frame = _frame(runs, sweep)
    memory = io.BytesIO()
    frame.to_parquet(memory)
    temporary = sweep / f".table.parquet.tmp-{uuid.uuid4().hex[:8]}"
    try:
        temporary.write_bytes(memory.getbuffer())
        os.replace(temporary, sweep / "table.parquet")
    finally:
        temporary.unlink(missing_ok=True)
    write(sweep / "table.csv", frame.to_csv(index=False))
    return frame


def load(sweep: str | os.PathLike, *, profile: str = "quick", root: str | os.PathLike = "figures") -> "DataFrame":
    """Return the finished runs of a sweep as a DataFrame: `run`, parameters, recorded numbers, circumstances `run_...`.

    sweep: its folder, a table.parquet that `uqlab collect` wrote, or a notebook, whose sweep then lies in
    <root>/<profile>. Lists stand as JSON text, dicts as one column an entry, `fall.id`. Rows are sorted by parameters.
    Raises ValueError where there is no finished run. Warns of runs that were left out.
    """
    path = locate(sweep, profile, root)
    if path.is_file():
        import pandas

        return pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
    return _frame(_warned(read(path), path), path)


def locate(sweep: str | os.PathLike, profile: str = "quick", root: str | os.PathLike = "figures") -> Path:
    """Return the folder or file of a sweep from its path or its notebook's name; a notebook looks beside its folder."""
    here = Path.cwd()
    bases = [here, here.parent] if here.name == "notebooks" else [here]
    paths = [base / sweep for base in bases]
    if not any(path.exists() and path.suffix != ".ipynb" for path in paths):
        name = f"{find(sweep).stem}.sweep"
        paths = [base / root / profile / name for base in bases]
    found = [path for path in paths if path.exists()]
    if not found:
        raise ValueError(f"no sweep in {paths[-1]}; first: uqlab sweep {sweep} --profile {profile} -g NAME VALUES")
    return found[0]


def _warned(runs: Runs, where: str | os.PathLike) -> Runs:
    if runs.left_out:
        several = f"{len(runs.left_out)} runs of {where} left out"
        warnings.warn(f"{several}: {'; '.join(runs.left_out[:3])}", stacklevel=3)
    return runs


def _frame(runs: Runs, where: Path) -> "DataFrame":
    import pandas

    if not runs.rows:
        raise ValueError(f"no finished run in {where}")
    names = dict.fromkeys(["run", *runs.parameters, *runs.numbers, *(f"run_{fact}" for fact in CIRCUMSTANCES)])
    return pandas.DataFrame({name: _column([row.get(name) for row in runs.rows]) for name in names})


def _column(values: list[Any]) -> list[Any]:
    """Values of one kind as they are (numbers, bools or text), others as JSON text: what a file's column can hold."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return [float(value) if isinstance(value, int) and abs(value) >= 2**63 else value for value in values]
    if len(kinds) == 1 and kinds <= {bool, str}:
        return values
    return [None if value is None else json.dumps(value) for value in values]


def _results(folder: Path, files: Any) -> dict[str, Any] | None:
    """Return results.json if it is the file that the manifest was written for."""
    with suppress(OSError, ValueError):
        data = (folder / "results.json").read_bytes()
        results = json.loads(data)
        whole = isinstance(files, dict) and files.get("results.json") == hashlib.sha256(data).hexdigest()
        return results if whole and isinstance(results, dict) else None
    return None


def _version(manifest: dict[str, Any]) -> tuple[Any, Any]:
    return manifest.get("source_sha256"), manifest.get("uqlab")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested dicts as one: {"fall": {"id": 2}} -> {"fall.id": 2}."""
    if not isinstance(value, dict):
        return {name: value}
    return {n: v for key, item in value.items() for n, v in _flat(item, f"{name}.{key}" if name else key).items()}


def _free(name: str, taken: dict[str, Any]) -> str:
    return f"{name}_recorded" if name in taken or name == "run" else name


def _order(value: Any) -> tuple[str, Any]:
    """A key that sorts numbers as numbers and never fails on values of different kinds."""
    return ("", value) if isinstance(value, int | float) else (type(value).__name__, json.dumps(value))
