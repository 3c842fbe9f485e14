"""What a command would run, what it keeps or reuses, and how long each took before."""

import math
import re
import statistics
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from uqlab.core.files import TRAININGS, read_json
from uqlab.runs.kernels import environment
from uqlab.runs.parameters import cells, overrides


def of_run(
    plan: dict[Path, dict[str, Any]], root: Path, profile: str, jobs: int
) -> Iterator[str]:
    """Yield the lines that say what `uqlab run` would do.

    Parameters
    ----------
    plan
        Notebook -> its parameters.
    root, profile, jobs
        As the command takes them.
    """
    for path, given in plan.items():
        values = overrides(path, profile, given).items()
        said = " ".join(f"{name}={value!r}" for name, value in values)
        yield f"{path.stem:32}  {said}{last_time(root / path.stem)}"
    yield f"\nwould run {len(plan)} notebooks, {jobs} at a time, into {root}"
    yield _reused()


def of_sweep(
    name: str,
    labels: dict[Path, str],
    kept: Collection[Path],
    stale: dict[Path, str],
    jobs: int,
    *_: Any,  # an estimate, which sweeps.py passes until it is rewritten
) -> Iterator[str]:
    """Yield the lines that say what `uqlab sweep` would do.

    Parameters
    ----------
    name
        Of the notebook.
    labels
        Result folder -> what the grid varies there, for every run.
    kept
        Folders of the runs that are done.
    stale
        Folder -> why its run is stale.
    jobs
        Runs at a time.
    """
    done = set(kept)
    for path, label in labels.items():
        status = "done before, kept" if path in done else "would run"
        why = f"  stale: {stale[path]}" if path in stale else ""
        yield f"{status}: {label}{last_time(path)}{why}"
    counts = f"{len(labels)} runs, {len(done)} done before"
    todo = len(labels) - len(done)
    yield f"\n{name}: {counts}, would run {todo}, {jobs} at a time"
    yield _reused()


def last_time(folder: Path) -> str:
    """Say what the run in a result folder took; "" where there is none."""
    seconds = read_json(folder / "manifest.json").get("seconds")
    return f"  last time {timedelta(seconds=round(seconds))}" if seconds else ""


def trainings() -> str:
    """Say where trainings done before are, and how much; "" where none is kept."""
    folder = environment(None, Path())[TRAININGS]
    if not folder:
        return ""
    sizes = [p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()]
    return f"{folder}: {len(sizes)} files, {sum(sizes) / 1e6:.0f} MB"


def _reused() -> str:
    if there := trainings():
        return f"networks trained before with the same values are reused from {there}"
    return "every network is trained anew, and no training is kept"


# Until execution.py and sweeps.py are rewritten: their estimates ---------------------


def _seconds_before(folder: Path) -> float:
    return float(read_json(folder / "manifest.json").get("seconds") or math.inf)


def expected_seconds(notebook: Path, folder: Path) -> float:
    """Return what the run in a folder took, else what the page says of itself."""
    if (seconds := _seconds_before(folder)) < math.inf:
        return seconds
    numbers = {"a": 1.0, "one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "five": 5.0}
    said = "".join(cells(notebook)[0]["source"]).partition("**Takes**")[2]
    match = re.search(rf"\b(\d+|{'|'.join(numbers)})\s+(s\b|sec|min)", said)
    if not match:
        return math.inf
    number = numbers.get(match[1]) or float(match[1])
    return number * (60 if match[2] == "min" else 1)


def likely_seconds(notebook: Path, folder: Path, profile: str) -> float:
    """Return `expected_seconds`, but infinity for a first run with other values."""
    if profile == "quick":
        return expected_seconds(notebook, folder)
    return _seconds_before(folder)


def together(seconds: Collection[float], jobs: int) -> float:
    """Return how long runs take, `jobs` at a time, the longest first."""
    return max(sum(seconds) / jobs, max(seconds)) if seconds else 0.0


def text(seconds: float, before: str = "", after: str = "") -> str:
    """Return a time as 0:01:30 between two other texts; "" where it is not known."""
    if seconds == math.inf:
        return ""
    return f"{before}{timedelta(seconds=round(seconds))}{after}"


def typical(folders: Iterable[Path], likely: float = math.inf) -> float:
    """Return the median time of the runs of a sweep that are done, else `likely`."""
    known = [s for s in map(_seconds_before, folders) if s < math.inf]
    return statistics.median(known) if known else likely
