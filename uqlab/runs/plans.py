"""What a command would run and how long that takes: from what it took before, or what a page says of itself."""

import math
import re
import statistics
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from uqlab.core.files import TRAININGS
from uqlab.runs.execution import environment
from uqlab.runs.manifest import Manifest
from uqlab.runs.parameters import cells, overrides

SHOWN = 20  # runs of a sweep that are listed, of each kind


def seconds_before(folder: Path) -> float:
    """Return what the run in a result folder took; infinity where there is none."""
    return Manifest.read(folder).seconds or math.inf


def expected_seconds(notebook: Path, folder: Path) -> float:
    """Return what the run in a folder took, or what the notebook's first cell says that it takes; else infinity."""
    if (seconds := seconds_before(folder)) < math.inf:
        return seconds
    numbers = {"a": 1.0, "one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "five": 5.0}
    text = "".join(cells(notebook)[0]["source"]).partition("**Takes**")[2]
    found = re.search(rf"\b(\d+|{'|'.join(numbers)})\s+(s\b|sec|min)", text)
    return (
        (numbers.get(found[1]) or float(found[1])) * (60 if found[2] == "min" else 1)
        if found
        else math.inf
    )


def likely_seconds(notebook: Path, folder: Path, profile: str) -> float:
    """Return `expected_seconds`, but infinity for a first run with other values than those that the page speaks of."""
    return (
        expected_seconds(notebook, folder)
        if profile == "quick"
        else seconds_before(folder)
    )


def together(seconds: Collection[float], jobs: int) -> float:
    """Return how long runs take, `jobs` at a time, the longest first."""
    return max(sum(seconds) / jobs, max(seconds)) if seconds else 0.0


def text(seconds: float, before: str = "", after: str = "") -> str:
    """Return a time as 0:01:30 between two other texts; nothing where it is not known."""
    return (
        f"{before}{timedelta(seconds=round(seconds))}{after}"
        if seconds < math.inf
        else ""
    )


def of_run(
    plan: dict[Path, dict[str, Any]], root: Path, profile: str, jobs: int
) -> Iterator[str]:
    """Yield the lines that say what `uqlab run` would do with a plan, notebook -> its parameters."""
    likely = {path: likely_seconds(path, root / path.stem, profile) for path in plan}
    width = max(len(path.stem) for path in plan)
    yield f"{'notebook':{width}}  last time  parameters that are not the page's own"
    for path, given in plan.items():
        took = text(seconds_before(root / path.stem)) or "-"
        values = " ".join(
            f"{name}={value!r}"
            for name, value in overrides(path, profile, given).items()
        )
        yield f"{path.stem:{width}}  {took:>9}  {values}".rstrip()
    there = sum((root / path.stem).is_dir() for path in plan)
    replaced = f", replacing {there} earlier results" if there else ""
    time = _estimate(together(likely.values(), jobs))
    yield f"\nwould run {len(plan)} notebooks, {jobs} at a time, into {root}{replaced}{time}"
    yield _trainings()


def of_sweep(
    name: str,
    labels: dict[Path, str],
    kept: Collection[Path],
    stale: dict[Path, str],
    jobs: int,
    likely: float,
) -> Iterator[str]:
    """Yield the lines that say what `uqlab sweep` would do: kept runs, those computed anew, and those never done.

    labels: of every run. stale: why a run is. likely: seconds of a run where none of this sweep is done.
    """
    todo = [path for path in labels if path not in kept]
    for title, paths in {
        "done before, kept": [path for path in labels if path in kept],
        "would run": todo,
    }.items():
        for path in paths[:SHOWN]:
            took = text(seconds_before(path), "  last time ")
            yield f"{title}: {labels[path]}{took}{f'  stale: {stale[path]}' if path in stale else ''}"
        if paths[SHOWN:]:
            yield f"{title}: {len(paths) - SHOWN} more"
    seconds = typical(labels, likely)
    time = _estimate(together([seconds] * len(todo), jobs)) if todo else ""
    yield f"\n{name}: {len(labels)} runs, {len(kept)} done before, would run {len(todo)}, {jobs} at a time{time}"
    yield _trainings()


def typical(folders: Iterable[Path], likely: float = math.inf) -> float:
    """Return the median time of the runs of a sweep that are done; `likely` where none is."""
    known = [
        seconds for path in folders if (seconds := seconds_before(path)) < math.inf
    ]
    return statistics.median(known) if known else likely


def _estimate(seconds: float) -> str:
    return (
        text(seconds, ": about ")
        or ": how long is not known, as some never ran with this profile"
    )


def _trainings() -> str:
    """What the runs find of trainings done before."""
    folder = environment(None, Path())[TRAININGS]
    if not folder:
        return "every network is trained anew, and no training is kept"
    files, size = kept(Path(folder))
    return f"networks trained before with the same values and code are reused: {files} in {folder}, {size / 1e6:.0f} MB"


def kept(folder: Path) -> tuple[int, int]:
    """Return the number of files in a folder, and their bytes."""
    sizes = (
        [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        if folder.is_dir()
        else []
    )
    return len(sizes), sum(sizes)
