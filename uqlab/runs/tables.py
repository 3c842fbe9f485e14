"""The finished runs of a sweep as one tidy table: a row a run, its parameters and what it recorded."""

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from uqlab.core.files import read_json, write, writing
from uqlab.runs.identity import Present, code, key, undamaged
from uqlab.runs.parameters import find

if TYPE_CHECKING:
    from pandas import DataFrame

CIRCUMSTANCES = (
    "profile",
    "seconds",
    "device",
    "threads",
    "started",
    "notebook",
    "uqlab",
)


class Runs(NamedTuple):
    """The runs in a sweep's folder, a row for each, and the names of parameters and numbers.

    left_out: runs that are not among them, and why. stale: runs that are, by name, and what has changed since.
    """

    rows: list[dict[str, Any]]
    parameters: list[str]
    numbers: list[str]
    left_out: list[str]
    stale: dict[str, str]

    @property
    def mixed(self) -> str:
        """A warning for the reader if some of the rows are stale; else empty."""
        if not self.stale:
            return ""
        codes = ", ".join(sorted({str(row["code"]) for row in self.rows}))
        several, why = (
            f"{len(self.stale)} of {len(self.rows)} runs",
            next(iter(self.stale.values())),
        )
        return f"{several} are stale: {why} (code: {codes})"


def read(sweep: Path) -> Runs:
    """Read the manifests and results in a sweep's folder; nothing but JSON is ever read.

    Left out: damaged runs, those of another version of the notebook than the latest run's, and all but the latest of
    the same parameters.
    """
    found, left_out = [], []
    for folder in sorted(
        path for path in sweep.glob("[!.]*/") if path.suffix != ".failed"
    ):
        manifest = read_json(folder / "manifest.json")
        if isinstance(manifest.get("parameters"), dict) and undamaged(
            folder, manifest, "results.json"
        ):
            found.append((folder.name, manifest, read_json(folder / "results.json")))
        else:
            left_out.append(f"{folder.name}: unfinished or damaged")
    found.sort(key=lambda run: str(run[1].get("started")))
    latest = {key("", manifest["parameters"]): name for name, manifest, _ in found}
    rows, parameters, numbers, stale, present = [], {}, {}, {}, Present()
    for name, manifest, results in found:
        given = manifest["parameters"]
        if manifest.get("source_sha256") != found[-1][1].get("source_sha256"):
            left_out.append(f"{name}: of another version of the notebook")
            continue
        if latest[key("", given)] != name:
            left_out.append(f"{name}: there is a later run of the same parameters")
            continue
        if reason := present.stale(manifest):
            stale[name] = reason
        held = {
            f"claim_{claim}": each["holds"]
            for claim, each in claims(sweep / name).items()
        }
        flat = {
            _free(number, given): value
            for number, value in _flat(results.get("numbers") or {}).items()
        } | held
        facts = {f"run_{fact}": manifest.get(fact) for fact in CIRCUMSTANCES} | {
            "run_stale": bool(reason)
        }
        rows.append({"run": name} | given | flat | {"code": code(manifest)} | facts)
        parameters |= dict.fromkeys(given)
        numbers |= dict.fromkeys(flat)
    rows.sort(key=lambda row: [_order(row.get(name)) for name in parameters])
    return Runs(rows, list(parameters), list(numbers), left_out, stale)


def claims(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a run has claimed: name -> sentence, holds, margin, paper."""
    found = read_json(folder / "results.json").get("claims")
    named = found.items() if isinstance(found, dict) else ()
    return {
        name: claim
        for name, claim in named
        if isinstance(claim, dict) and "holds" in claim
    }


def counted(held: list[bool], what: str = "claims hold") -> str:
    """Say how many of the claims, or of the runs of one claim, hold: 41 of 44 claims hold."""
    return f"{sum(held)} of {len(held)} {what}"


def save(runs: Runs, sweep: Path) -> "DataFrame":
    """Write table.parquet and table.csv into the sweep's folder, and return the table."""
    frame = as_frame(runs, sweep)
    with writing(sweep / "table.parquet") as temporary:
        frame.to_parquet(temporary)
    write(sweep / "table.csv", frame.to_csv(index=False))
    return frame


def as_frame(runs: Runs, where: Path) -> "DataFrame":
    """The runs as a table, a row each."""
    import pandas

    if not runs.rows:
        raise ValueError(f"no finished run in {where}")
    facts = [*(f"run_{fact}" for fact in CIRCUMSTANCES), "run_stale"]
    names = dict.fromkeys(["run", *runs.parameters, *runs.numbers, "code", *facts])
    return pandas.DataFrame(
        {name: _column([row.get(name) for row in runs.rows]) for name in names}
    )


def joined(sweep: Path, name: str) -> tuple["DataFrame", dict[str, Any]]:
    """The tables that finished runs recorded under a name, one below the other, and what they depend on.

    That is: the runs' parameters, code, packages and machines, hours, and the other numbers that they recorded.
    """
    import pandas

    runs = read(sweep)
    found = {
        row["run"]: read_json(sweep / row["run"] / "results.json")["tables"].get(name)
        for row in runs.rows
    }
    parts = [
        pandas.DataFrame(table["data"], columns=table["columns"])
        for table in found.values()
        if table
    ]
    if not parts:
        raise ValueError(f"no finished run in {sweep} has recorded a table {name!r}")
    about = circumstances(runs, sweep, [row for row in runs.rows if found[row["run"]]])
    return pandas.concat(parts, ignore_index=True), about


def circumstances(
    runs: Runs, sweep: Path, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """What some of the runs depend on: hours, machines, code, packages, parameters, and the numbers they recorded."""
    packages = [
        read_json(sweep / row["run"] / "manifest.json").get("packages") for row in rows
    ]
    seen = {
        column: _distinct(row.get(column) for row in rows)
        for column in runs.parameters + runs.numbers
    }
    about = {
        "runs": len(rows),
        "hours": round(sum(row["run_seconds"] for row in rows) / 3600, 2),
    }
    about |= {
        fact: _distinct(row[f"run_{fact}"] for row in rows)
        for fact in ("device", "threads", "uqlab")
    }
    about |= {
        "code": _distinct(row["code"] for row in rows),
        "packages": _distinct(packages),
    }
    about |= {"parameters": {column: seen[column] for column in runs.parameters}}
    return about | {"recorded": {name: seen[name] for name in runs.numbers}}


def _distinct(values: Iterable[Any]) -> Any:
    """The value that all have, or the list of those that occur."""
    found = [
        json.loads(text)
        for text in dict.fromkeys(
            json.dumps(value) for value in values if value is not None
        )
    ]
    return found[0] if len(found) == 1 else found


def load(
    sweep: str | os.PathLike,
    *,
    profile: str = "quick",
    root: str | os.PathLike = "figures",
) -> "DataFrame":
    """Return the finished runs of a sweep as a DataFrame: `run`, parameters, numbers, `code`, circumstances `run_...`.

    sweep: its folder, its table.parquet or .csv, or a notebook, whose sweep lies in <root>/<profile>. Lists stand as
    JSON text, dicts as one column an entry, `fall.id`; `claim_<name>`: whether the run's claim holds; rows are sorted
    by parameters. `code` is a short digest of the code that a run imported; `run_stale`: code or data have changed.
    Warns of runs that are left out or stale.
    Raises ValueError where there is no finished run.
    """
    path = locate(sweep, profile, root)
    if path.is_file():
        import pandas

        return (
            pandas.read_parquet(path)
            if path.suffix == ".parquet"
            else pandas.read_csv(path)
        )
    runs = read(path)
    if runs.left_out:
        first = "; ".join(runs.left_out[:3])
        warnings.warn(
            f"{len(runs.left_out)} runs of {path} left out: {first}", stacklevel=2
        )
    if runs.mixed:
        warnings.warn(f"{path}: {runs.mixed}", stacklevel=2)
    return as_frame(runs, path)


def locate(
    sweep: str | os.PathLike,
    profile: str = "quick",
    root: str | os.PathLike = "figures",
) -> Path:
    """Return the folder or file of a sweep from its path or its notebook's name; a notebook looks beside its folder."""
    if not isinstance(sweep, str | os.PathLike):
        raise TypeError(
            f"a sweep is named by its folder or its notebook, got {type(sweep).__name__}"
        )
    here = Path.cwd()
    bases = [here, here.parent] if here.name == "notebooks" else [here]
    found = [
        path
        for base in bases
        if (path := base / sweep).exists() and path.suffix != ".ipynb"
    ]
    if not found:
        paths = [base / root / profile / f"{find(sweep).stem}.sweep" for base in bases]
        found = [path for path in paths if path.exists()]
        if not found:
            raise ValueError(
                f"no sweep in {paths[-1]}; first: uqlab sweep {sweep} --profile {profile} -g NAME VALUES"
            )
    return found[0]


def _column(values: list[Any]) -> list[Any]:
    """Return values of one kind unchanged, others as JSON text, because a column of a file holds values of one kind."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return [
            float(value) if isinstance(value, int) and abs(value) >= 2**63 else value
            for value in values
        ]
    if len(kinds) == 1 and kinds <= {bool, str}:
        return values
    return [None if value is None else json.dumps(value) for value in values]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested dicts as one: {"fall": {"id": 2}} -> {"fall.id": 2}."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        n: v
        for key, item in value.items()
        for n, v in _flat(item, f"{name}.{key}" if name else key).items()
    }


def _free(name: str, taken: dict[str, Any]) -> str:
    return f"{name}_recorded" if name in taken or name in ("run", "code") else name


def _order(value: Any) -> tuple[str, Any]:
    """A key that sorts numbers as numbers and never fails on values of different kinds."""
    return (
        ("", value)
        if isinstance(value, int | float)
        else (type(value).__name__, json.dumps(value))
    )
