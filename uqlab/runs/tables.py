"""The finished runs of a sweep as one tidy table: a row a run."""

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uqlab.core.files import StrPath, Values, write, writing
from uqlab.core.recording import Record, project
from uqlab.runs.manifest import Manifest, Present
from uqlab.runs.parameters import find

if TYPE_CHECKING:
    from pandas import DataFrame

FIRST = "first: uqlab sweep NOTEBOOK -g NAME VALUES"
FACTS = ("profile", "seconds", "device", "threads", "started", "notebook", "code")


def read(sweep: Path) -> "DataFrame":
    """Read the manifests and results in a sweep's folder; its columns are `load`'s.

    Damaged runs and those of an earlier version of the notebook are left out.
    `attrs["problems"]` says which, and how many of the others are stale. Raises
    ValueError if no run is left.
    """
    problems = []
    manifests = {}
    for folder in sorted(sweep.glob("[!.]*/")):
        manifest = Manifest.read(folder)
        if manifest.undamaged(folder):
            manifests[folder] = manifest
        elif folder.suffix != ".failed":
            problems.append(f"{folder.name} left out: unfinished or damaged")
    if not manifests:
        raise ValueError(f"no finished run in {sweep}")
    latest = max(manifests.values(), key=lambda each: each.started)
    for folder, manifest in list(manifests.items()):
        if manifest.source_sha256 != latest.source_sha256:
            problems.append(f"{folder.name} left out: of another notebook version")
            del manifests[folder]
    present = Present()
    reasons = [present.stale(manifest) for manifest in manifests.values()]
    if stale := [reason for reason in reasons if reason]:
        problems.append(f"{len(stale)} of {len(reasons)} runs are stale: {stale[0]}")
    frame = _framed(manifests, list(map(bool, reasons)))
    frame.attrs["problems"] = problems
    return frame


def _framed(manifests: dict[Path, Manifest], stale: list[bool]) -> "DataFrame":
    """Return runs as a table, sorted by parameters; lists are JSON text."""
    import pandas

    records = [Record.read(folder) for folder in manifests]
    parameters = pandas.DataFrame([m.parameters for m in manifests.values()])
    numbers = pandas.json_normalize([record.numbers for record in records])
    claims = pandas.DataFrame(
        [{f"claim_{n}": c.holds for n, c in r.claims.items()} for r in records]
    )
    facts: Values = {"run_stale": stale}
    for fact in FACTS:
        facts[f"run_{fact}"] = [getattr(m, fact) for m in manifests.values()]
    parts = [
        pandas.DataFrame({"run": [folder.name for folder in manifests]}),
        parameters,
        numbers.rename(columns={name: f"{name}_recorded" for name in parameters}),
        claims,
        pandas.DataFrame(facts),
    ]
    frame = pandas.concat(parts, axis="columns")
    for name in frame:  # of several types, which no file could hold
        if pandas.api.types.infer_dtype(frame[name]).startswith("mixed"):
            frame[name] = frame[name].map(json.dumps, na_action="ignore")
    return frame.sort_values(list(parameters) or "run", ignore_index=True)


def save(sweep: Path) -> "DataFrame":
    """Write table.parquet and table.csv into a sweep's folder; return the table."""
    frame = read(sweep)
    with writing(sweep / "table.parquet") as temporary:
        frame.to_parquet(temporary)
    write(sweep / "table.csv", frame.to_csv(index=False))
    return frame


def joined(sweep: Path, name: str) -> tuple["DataFrame", Values]:
    """Return the tables that runs recorded under a name, one below the other.

    With them comes what they depend on, as `circumstances` says.
    """
    import pandas

    tables = {}
    for run in read(sweep).run:
        if table := Record.read(sweep / run).tables.get(name):
            tables[run] = pandas.DataFrame(table["data"], columns=table["columns"])
    if not tables:
        raise ValueError(f"no finished run in {sweep} has recorded a table {name!r}")
    about = circumstances([Manifest.read(sweep / run) for run in tables])
    return pandas.concat(tables.values(), ignore_index=True), about


def circumstances(runs: list[Manifest]) -> Values:
    """Return what runs depend on: hours, machines, packages and parameters."""
    names = dict.fromkeys(name for run in runs for name in run.parameters)
    return {
        "runs": len(runs),
        "hours": round(sum(run.seconds or 0 for run in runs) / 3600, 2),
        "device": _distinct(run.device for run in runs),
        "threads": _distinct(run.threads for run in runs),
        "uqlab": _distinct(run.code for run in runs),
        "packages": _distinct(run.packages for run in runs),
        "parameters": {n: _distinct(r.parameters.get(n) for r in runs) for n in names},
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
    frame = read(path)
    for problem in frame.attrs["problems"]:
        warnings.warn(f"{path}: {problem}", stacklevel=2)
    return frame


def locate(sweep: StrPath, profile: str = "quick", root: StrPath = "figures") -> Path:
    """Return the folder or file of a sweep from its path or its notebook's name.

    In a folder of notebooks the one above is searched too.
    """
    path = Path(sweep).expanduser()
    for base in (Path.cwd(), project(Path.cwd())):
        if path.suffix != ".ipynb" and (base / path).exists():
            return base / path
        if path.suffix != ".sweep":
            place = base / Path(root).expanduser() / profile
            place /= f"{find(sweep).stem}.sweep"
            if place.exists():
                return place
    raise ValueError(f"no sweep of {sweep} with profile {profile}; {FIRST}")
