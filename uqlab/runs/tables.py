"""The finished runs of a sweep as one tidy table: a row a run."""

import json
import os
import shlex
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uqlab.core.files import StrPath, Values, write, writing
from uqlab.core.recording import Record, project
from uqlab.runs.manifest import Manifest, Present
from uqlab.runs.parameters import all_notebooks, find, in_profile

if TYPE_CHECKING:
    from pandas import DataFrame

FACTS = ("profile", "seconds", "device", "threads", "started", "notebook", "code")


@dataclass
class Runs:
    """The runs in a sweep's folder.

    `left_out` are runs that are not among the rows, and why; `stale` are runs that are,
    by name, and what has changed since.
    """

    rows: list[Values] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    stale: dict[str, str] = field(default_factory=dict)

    @property
    def mixed(self) -> str:
        """A warning for the reader if some of the rows are stale; else empty."""
        if not self.stale:
            return ""
        why = next(iter(self.stale.values()))
        return f"{len(self.stale)} of {len(self.rows)} runs are stale: {why}"


def read(sweep: Path) -> Runs:
    """Read the manifests and results in a sweep's folder, which are JSON.

    Left out are damaged runs and those of an earlier version of the notebook.
    """
    manifests = {}
    runs = Runs()
    for folder in sorted(sweep.glob("[!.]*/")):
        manifest = Manifest.read(folder)
        if manifest.undamaged(folder, ["results.json"]):
            manifests[folder] = manifest
        elif folder.suffix != ".failed":
            runs.left_out.append(f"{folder.name}: unfinished or damaged")
    latest = max(manifests.values(), key=lambda each: each.started, default=Manifest())
    runs.parameters = list(latest.parameters)
    present = Present()
    for folder, manifest in manifests.items():
        if manifest.source_sha256 != latest.source_sha256:
            runs.left_out.append(f"{folder.name}: of another version of the notebook")
        else:
            _add(runs, folder, manifest, present.stale(manifest))
    runs.rows.sort(key=lambda row: [_order(row[name]) for name in runs.parameters])
    return runs


def _add(runs: Runs, folder: Path, manifest: Manifest, stale: str) -> None:
    """Add the row of a run; what it recorded has the name of no parameter."""
    record = Record.read(folder)
    recorded = {}
    for name, value in _flat(record.numbers).items():
        end = "_recorded" if name in manifest.parameters else ""
        recorded[name + end] = value
    for name, claim in record.claims.items():
        recorded[f"claim_{name}"] = claim.holds
    runs.numbers += [name for name in recorded if name not in runs.numbers]
    row = {"run": folder.name, "run_stale": bool(stale)}
    row |= {f"run_{fact}": getattr(manifest, fact) for fact in FACTS}
    runs.rows.append(row | manifest.parameters | recorded)
    if stale:
        runs.stale[folder.name] = stale


def _flat(values: Values, before: str = "") -> Values:
    """Return nested dicts as one: {"fall": {"id": 2}} -> {"fall.id": 2}."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat


def _order(value):
    """Return what sorts the values of one parameter, numbers as numbers."""
    return value if isinstance(value, int | float) else json.dumps(value)


def counted(held: list[bool], what: str = "claims hold") -> str:
    """Say how many claims, or runs of one claim, hold: 41 of 44 claims hold."""
    return f"{sum(held)} of {len(held)} {what}"


def as_frame(runs: Runs, where: Path) -> "DataFrame":
    """Return the runs as a table, a row each; ValueError if there is none."""
    import pandas

    if not runs.rows:
        raise ValueError(f"no finished run in {where}")
    facts = [name for name in runs.rows[0] if name.startswith("run_")]
    names = ["run", *runs.parameters, *runs.numbers, *facts]
    columns = {}
    for name in names:
        columns[name] = _column([row.get(name) for row in runs.rows])
    return pandas.DataFrame(columns)


def _column(values: list[Any]) -> list[Any]:
    """Return values as a file's column holds them: of one kind, else as JSON text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or kinds in ({bool}, {str}):
        return values
    return [None if value is None else json.dumps(value) for value in values]


def save(runs: Runs, sweep: Path) -> "DataFrame":
    """Write table.parquet and table.csv into the sweep's folder; return the table."""
    frame = as_frame(runs, sweep)
    with writing(sweep / "table.parquet") as temporary:
        frame.to_parquet(temporary)
    write(sweep / "table.csv", frame.to_csv(index=False))
    return frame


def joined(sweep: Path, name: str) -> tuple["DataFrame", Values]:
    """Return the tables that runs recorded under a name, one below the other.

    Beside them stands what they depend on, as `circumstances` says.
    """
    import pandas

    runs = read(sweep)
    tables = []
    rows = []
    for row in runs.rows:
        if table := Record.read(sweep / row["run"]).tables.get(name):
            tables.append(pandas.DataFrame(table["data"], columns=table["columns"]))
            rows.append(row)
    if not tables:
        raise ValueError(f"no finished run in {sweep} has recorded a table {name!r}")
    about = circumstances(runs, sweep, rows)
    return pandas.concat(tables, ignore_index=True), about


def circumstances(runs: Runs, sweep: Path, rows: list[Values]) -> Values:
    """Return what rows depend on: hours, machines, packages, parameters, numbers."""
    packages = [Manifest.read(sweep / row["run"]).packages for row in rows]
    seen = {}
    for name in rows[0]:
        seen[name] = _distinct(row.get(name) for row in rows)
    return {
        "runs": len(rows),
        "hours": round(sum(row["run_seconds"] for row in rows) / 3600, 2),
        "device": seen["run_device"],
        "threads": seen["run_threads"],
        "uqlab": seen["run_code"],
        "packages": _distinct(packages),
        "parameters": {name: seen[name] for name in runs.parameters},
        "recorded": {name: seen.get(name) for name in runs.numbers},
    }


def _distinct(values: Iterable[Any]) -> Any:
    """Return the value that all have, or the list of those that occur."""
    texts = dict.fromkeys(json.dumps(value) for value in values if value is not None)
    found = [json.loads(text) for text in texts]
    return found[0] if len(found) == 1 else found


def load(
    sweep: StrPath,
    *,
    profile: str = "quick",
    root: StrPath = "figures",
) -> "DataFrame":
    """Return the finished runs of a sweep as a table, sorted by parameters.

    Its columns are `run`, the parameters, the recorded numbers, `claim_<name>` whether
    a claim holds, and circumstances: `run_code` is uqlab's version and its commit,
    `run_stale` whether uqlab or data have changed since. Lists stand as JSON text,
    dicts as one column an entry, `fall.id`. Warns of runs that are left out or stale.

    Parameters
    ----------
    sweep
        Its folder, its table.parquet or .csv, or a notebook.
    profile, root
        A notebook's sweep lies in <root>/<profile>.

    Raises
    ------
    ValueError
        There is no finished run.
    """
    import pandas

    path = locate(sweep, profile, root)
    if path.suffix == ".parquet":
        return pandas.read_parquet(path)
    if path.is_file():
        return pandas.read_csv(path)
    runs = read(path)
    if runs.left_out:
        first = "; ".join(runs.left_out[:3])
        text = f"{len(runs.left_out)} runs of {path} left out: {first}"
        warnings.warn(text, stacklevel=2)
    if runs.mixed:
        warnings.warn(f"{path}: {runs.mixed}", stacklevel=2)
    return as_frame(runs, path)


def locate(
    sweep: StrPath,
    profile: str = "quick",
    root: StrPath = "figures",
) -> Path:
    """Return the folder or file of a sweep from its path or its notebook's name.

    In a folder of notebooks the one above is searched too.
    """
    here = Path.cwd()
    bases = [here, project(here)]
    sweep, root = (os.path.expanduser(place) for place in (sweep, root))
    if Path(sweep).suffix != ".ipynb":
        for base in bases:
            if (base / sweep).exists():
                return base / sweep
    name, path = str(sweep), Path(sweep)
    if path.suffix == ".sweep":  # a folder that is not there
        name, profile, root = path.stem, path.parent.name, path.parents[1]
    else:
        for base in bases:
            path = base / root / profile / f"{find(sweep).stem}.sweep"
            if path.exists():
                return path
    first = f"uqlab sweep {name} -g NAME VALUES{options(profile, root)}"
    raise ValueError(f"no sweep in {path}; first: {first}")


def options(profile: str, root: StrPath, usual: str = "figures") -> str:
    """Return the options of a command whose results go into <root>/<profile>."""
    in_profile(all_notebooks()[0], profile)  # a command with another would be refused
    of_profile = "" if profile == "quick" else f" --profile {profile}"
    into = f" --output-dir {shlex.quote(str(root))}"
    return of_profile + ("" if Path(root) == Path(usual) else into)
