"""What a command would run, what it keeps or reuses, and how long each took before."""

from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path

from uqlab.core.files import TRAININGS, Values
from uqlab.runs.execution import environment
from uqlab.runs.manifest import Manifest
from uqlab.runs.parameters import overrides


def of_run(
    plan: dict[Path, Values], root: Path, profile: str, jobs: int
) -> Iterator[str]:
    """Yield the lines that say what `uqlab run` would do.

    Parameters
    ----------
    plan
        Notebook -> its parameters.
    root, profile, jobs
        As the command takes them.
    """
    for path, parameters in plan.items():
        values = overrides(path, profile, parameters).items()
        said = " ".join(f"{name}={value!r}" for name, value in values)
        yield f"{path.stem:32}  {said}{last_time(root / path.stem)}"
    yield f"\nwould run {len(plan)} notebooks, {jobs} at a time, into {root}"
    yield _reused()


def of_sweep(
    name: str,
    labels: dict[Path, str],
    done: Collection[Path],
    stale: dict[Path, str],
    jobs: int,
) -> Iterator[str]:
    """Yield the lines that say what `uqlab sweep` would do.

    Parameters
    ----------
    name
        Of the notebook.
    labels
        Result folder -> what the grid varies there, for every run.
    done
        Folders of the runs that are done.
    stale
        Folder -> why its run is stale.
    jobs
        Runs at a time.
    """
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
    seconds = Manifest.read(folder).seconds
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
