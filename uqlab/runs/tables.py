"""What finished runs found: a sweep as one tidy table, and a page of all runs.

The page shows figures beside captions, parameters, numbers and claims; its HTML is in
gallery.html.j2. It works from disk: pictures and notebooks by relative links.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
from jinja2 import Environment, FileSystemLoader

from uqlab.core.files import StrPath, Values, write, writing
from uqlab.core.recording import Record, project
from uqlab.runs.manifest import Manifest, Present
from uqlab.runs.parameters import find

if TYPE_CHECKING:
    from pandas import DataFrame

FACTS = (
    *("profile", "seconds", "device", "threads", "started", "notebook", "code"),
    "source_sha256",
)


# The table of a sweep -----------------------------------------------------------------


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
    dicts as one column an entry, `fall.id`. A recorded name that a column has already
    gets "_recorded" at its end. Says which runs are left out or stale.

    Parameters
    ----------
    sweep
        Its folder, its table.parquet, or a notebook; table.csv, which holds no types,
        is for other programs.
    profile, root
        A notebook's sweep lies in <root>/<profile>.

    Raises
    ------
    ValueError
        There is no finished run, or a file is no table.parquet.
    """
    import pandas

    path = locate(sweep, profile, root)
    if path.suffix == ".parquet":
        return pandas.read_parquet(path)
    if path.is_file():
        raise ValueError(
            f"{path} holds no types: 001 may be a text or a number; give the folder of "
            "the sweep or its table.parquet, or read it by pandas.read_csv"
        )
    return _read(path)


def locate(sweep: StrPath, profile: str = "quick", root: StrPath = "figures") -> Path:
    """Return the folder or file of a sweep from its path or its notebook's name."""
    path = Path(sweep).expanduser()
    if path.suffix != ".ipynb" and path.exists():
        return path
    if path.suffix != ".sweep":
        path = project(Path.cwd()) / Path(root).expanduser() / profile
        path /= f"{find(sweep).stem}.sweep"
    if not path.exists():
        raise ValueError(
            f"no sweep of {sweep} with profile {profile}; "
            "first: uqlab sweep NOTEBOOK -g NAME VALUES"
        )
    return path


def _read(sweep: Path) -> "DataFrame":
    """Read the manifests and results in a sweep's folder; its columns are `load`'s.

    Damaged runs and those of an earlier version of the notebook are left out. Which,
    and how many of the others are stale, is said on stderr.
    """
    import pandas

    rows = _rows(sweep)
    if stale := [row["run_stale"] for row in rows if row["run_stale"]]:
        click.echo(f"{len(stale)} of {len(rows)} runs are stale: {stale[0]}", err=True)
    frame = pandas.DataFrame(rows)
    frame["run_stale"] = frame.run_stale.astype(bool)
    plain = {"string", "boolean", "empty"}
    for name in frame:  # lists, great integers, several types: no file could hold them
        kind = pandas.api.types.infer_dtype(frame[name])
        if frame[name].dtype == object and kind not in plain:
            frame[name] = frame[name].map(json.dumps, na_action="ignore")
    given = Manifest.read(sweep / rows[0]["run"]).parameters
    columns = [name for name in given if name in frame]
    return frame.sort_values(columns or "run", ignore_index=True)


def _rows(sweep: Path) -> list[Values]:
    """Return a row for each run of the latest version; say why others are left out."""
    rows, present = [], Present()
    for folder in sorted(sweep.glob("[!.]*/")):
        run = Manifest.read(folder)
        if run.undamaged(folder):
            rows.append(_row(folder, run) | {"run_stale": present.stale(run)})
        elif folder.suffix != ".failed":
            click.echo(f"{folder.name} left out: unfinished or damaged", err=True)
    if not rows:
        raise ValueError(f"no finished run in {sweep}")
    latest = max(rows, key=lambda row: row["run_started"])["run_source_sha256"]
    for row in [*rows]:
        if row["run_source_sha256"] != latest:
            click.echo(f"{row['run']} left out: of another notebook version", err=True)
            rows.remove(row)
    return rows


def _row(folder: Path, run: Manifest) -> Values:
    """Return what a run contributes to the table; no name stands for two things."""
    record, found = Record.read(folder), {}
    ends = {f"claim_{n}": claim.holds for n, claim in record.claims.items()}
    ends |= {f"run_{fact}": getattr(run, fact) for fact in FACTS}
    for given in (run.parameters, record.numbers):
        for name, value in _entries(given):
            while name in found or name in ends or name in ("run", "run_stale"):
                name += "_recorded"
            found[name] = value
    return {"run": folder.name, **found, **ends}


def _entries(values: Values) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a column each."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in _entries(value))
        else:
            yield name, value


def save(sweep: Path) -> "DataFrame":
    """Write table.parquet and table.csv into a sweep's folder; return the table."""
    frame = _read(sweep)
    with writing(sweep / "table.parquet") as temporary:
        frame.to_parquet(temporary)
    write(sweep / "table.csv", frame.to_csv(index=False))
    return frame


def join(sweep: Path, name: str) -> int:
    """Write the tables that runs recorded under a name, one below the other.

    NAME.csv holds them, and NAME.json what they depend on. Returns the number of rows.
    """
    import pandas

    if name == "table":
        raise ValueError("table.csv is the sweep's own; record it under another name")
    frames, runs = [], []
    for run in _read(sweep).run:
        if table := Record.read(sweep / run).tables.get(name):
            frames.append(pandas.DataFrame(table["data"], columns=table["columns"]))
            runs.append(Manifest.read(sweep / run))
    if not frames:
        raise ValueError(f"no finished run in {sweep} has recorded a table {name!r}")
    frame = pandas.concat(frames, ignore_index=True)
    write(sweep / f"{name}.csv", frame.to_csv(index=False, float_format="%.5g"))
    write(sweep / f"{name}.json", json.dumps(circumstances(runs), indent=1))
    return len(frame)


def circumstances(runs: list[Manifest]) -> Values:
    """Return what runs depend on: hours, machines, packages and parameters."""
    names = dict.fromkeys(name for run in runs for name in run.parameters)
    values = {name: [run.parameters.get(name) for run in runs] for name in names}
    return {
        "runs": len(runs),
        "hours": round(sum(run.seconds for run in runs) / 3600, 2),
        "device": _distinct([run.device for run in runs]),
        "threads": _distinct([run.threads for run in runs]),
        "uqlab": _distinct([run.code for run in runs]),
        "packages": _distinct([run.packages for run in runs]),
        "parameters": {name: _distinct(values[name]) for name in names},
    }


def _distinct(values: list[Any]) -> Any:
    """Return the value that all have, or the list of those that occur."""
    found = [v for i, v in enumerate(values) if v is not None and v not in values[:i]]
    return found[0] if len(found) == 1 else found


# The page of all runs -----------------------------------------------------------------


def gallery(root: Path) -> Path:
    """Write index.html for all runs in a folder and below; return its path."""
    present = Present()
    found = set()
    for depth in ("*", "*/*", "*/*/*"):  # also behind links
        found |= {path.parent for path in root.glob(f"{depth}/manifest.json")}
        failed = root.glob(f"{depth}.failed/error.txt")
        found |= {path.parent.with_suffix("") for path in failed}
    shown = [folder for folder in sorted(found) if folder.name[0] != "."]
    if not shown:
        raise ValueError(f"no runs in {root}; first: uqlab run NOTEBOOK")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
    )
    runs = [_run(root, folder, present) for folder in shown]
    page = environment.get_template("gallery.html.j2").render(root=root.name, runs=runs)
    write(root / "index.html", page.encode(errors="replace").decode())
    return root / "index.html"


def _run(root: Path, folder: Path, present: Present) -> Values:
    """Return what a result folder holds, and the failure of a later run."""
    manifest, problem = Manifest.read(folder), ""
    failed = folder.with_name(f"{folder.name}.failed")
    if (failed / "error.txt").exists():
        problem = f"The last run failed.\n{(failed / 'error.txt').read_text('utf-8')}"
    elif not manifest.undamaged(folder):
        problem = "Incomplete: files or manifest.json are missing or damaged."
    elif why := present.stale(manifest):
        problem = f"Stale: {why}"
    files = sorted({*folder.glob("*.*"), *failed.glob("*.ipynb")})
    return {
        "name": folder.relative_to(root).as_posix(),
        "problem": problem,
        "manifest": manifest,
        "record": Record.read(folder),
        "files": {f.name: quote(f.relative_to(root).as_posix()) for f in files},
    }
