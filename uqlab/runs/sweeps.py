"""Sweeps: a grid of runs of one notebook, each computed once into a folder named by what it depends on.

A process claims a run by locking a file beside its folder; the system releases the lock when the process dies. So
several sweeps of one grid share the work, and an interrupted run leaves nothing that could be taken for a result.
"""

import itertools
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import click

from uqlab.core.files import read_json
from uqlab.runs import execution, identity, plans, tables, workers
from uqlab.runs.parameters import checked, defaults, find, overrides, source_sha256

POINTS = 100_000  # the most runs of one sweep
KILLS = 2  # a run whose process was killed so often is given up; Dask would give up the whole sweep a little later


class Busy(RuntimeError):
    """Another process is computing this run."""


class Outcome(NamedTuple):
    """One run of a sweep: the parameters that the grid varies, and status "ok", "done before" or "failed".

    reason: why it failed, or why it is stale.
    """

    parameters: dict[str, Any]
    folder: Path
    status: str
    seconds: float = 0.0
    reason: str = ""

    @property
    def label(self) -> str:
        return (
            " ".join(f"{name}={value}" for name, value in self.parameters.items())
            or "the only run"
        )


class Report(NamedTuple):
    """The outcomes of a sweep in the order of its grid; `folder` holds the result folders."""

    folder: Path
    outcomes: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]


def run_one(
    notebook: str | os.PathLike,
    parameters: dict[str, Any] | None = None,
    *,
    profile: str = "quick",
    root: str | os.PathLike = "figures",
    threads: int | None = None,
    timeout: float | int | None = None,
    wait: bool = True,
    keep_stale: bool = False,
    stop: Event | None = None,
) -> Path:
    """Return the result folder of one run, <root>/<profile>/<notebook>.sweep/<hash>, computing it if it is not there.

    The hash is of the notebook's source and all its parameters. A run that is damaged or, without `keep_stale`, stale
    is computed anew. While another process computes it, `wait` waits at most `timeout` seconds, else Busy is raised.
    Otherwise as `runs.execute`.
    """
    notebook, stop = find(notebook), stop or Event()
    values = overrides(notebook, profile, parameters)
    folder = _folder(
        Path(root, profile),
        notebook.stem,
        source_sha256(notebook),
        defaults(notebook) | values,
    )

    def done() -> bool:
        return finished(folder) and (
            keep_stale or not _stale(folder, identity.Present())
        )

    if done():
        return folder
    with _claimed(folder, wait, timeout, stop):
        execution.restore(folder)
        if done():
            return folder
        try:
            options = {
                "profile": profile,
                "folder": folder,
                "threads": threads,
                "timeout": timeout,
                "stop": stop,
            }
            return execution.execute(notebook, parameters, **options)
        finally:  # not reached if this process is killed
            execution.clear(folder)


def sweep(
    notebook: str | os.PathLike,
    grid: Mapping[str, Iterable[Any] | str],
    parameters: dict[str, Any] | None = None,
    *,
    profile: str = "quick",
    root: str | os.PathLike = "figures",
    jobs: int = 1,
    timeout: float | int | None = None,
    cluster: str | None = None,
    resources: Mapping[str, float | int] | None = None,
    progress: bool = True,
    keep_stale: bool = False,
    dry_run: bool = False,
) -> Report:
    """Run a notebook on every point of a grid: `sweep("03", {"seed": range(5), "members": [5, 10]}, jobs=2)`.

    grid: parameter -> its values, or their text as `axis` reads it. parameters: the same for all runs.
    jobs: runs at a time, each with its share of the cores. timeout: seconds for each run.
    cluster: address of a running Dask scheduler, whose workers see the same files; each run is a task that needs
    `resources`, such as {"GPU": 1}. progress: a line for every run, else for failures only.
    keep_stale: skip finished runs although their code or data have changed since.
    dry_run: only say which runs would be computed, which are kept, and how long it takes; the report is empty.
    Raises ValueError before anything runs (notebook, profile, parameters, timeout, cluster).
    """
    execution.until(timeout)
    notebook, given = find(notebook), dict(parameters or {})
    folder = Path(root, profile, f"{notebook.stem}.sweep").absolute()
    points = folders_of_grid(folder.parent, notebook, profile, grid, given)
    if dry_run:
        kept, stale = _done(points, keep_stale)
        labels = {
            path: Outcome(point, path, "").label for path, point in points.items()
        }
        likely = plans.likely_seconds(notebook, Path(), profile)
        click.echo(
            "\n".join(plans.of_sweep(notebook.stem, labels, kept, stale, jobs, likely))
        )
        return Report(folder, [])
    killed = {path.name.split(".")[1] for path in folder.glob(".*.*")}
    for path in points:
        if path.name in killed:
            with suppress(Busy), _claimed(path, wait=False):
                execution.restore(path)
                execution.clear(path)
    (kept, stale), stop = _done(points, keep_stale), Event()
    outcomes = {
        path: Outcome(points[path], path, "done before", reason=stale.get(path, ""))
        for path in kept
    }
    todo = [path for path in points if path not in outcomes]
    if progress:
        seconds = plans.typical(points, plans.likely_seconds(notebook, Path(), profile))
        likely = (
            plans.text(plans.together([seconds] * len(todo), jobs), ", about ")
            if todo and not cluster
            else ""
        )
        click.echo(
            f"{notebook.stem}: {len(points)} runs, {len(outcomes)} done before, {len(todo)} to do{likely}"
        )
    if stale:
        reason = next(iter(stale.values()))
        then = "kept" if keep_stale else "computed anew (--keep-stale keeps them)"
        click.echo(
            f"{len(stale)} of {len({*kept, *stale})} finished runs are stale: {reason}; {then}",
            err=True,
        )
    if not todo:
        return Report(folder, list(outcomes.values()))
    started, before = time.monotonic(), len(outcomes)
    try:
        with workers.connected(jobs, cluster, resources, stop) as (threads, executor):
            common = {
                "profile": profile,
                "root": Path(root).absolute(),
                "threads": threads,
                "timeout": timeout,
            }
            common |= {"keep_stale": keep_stale, "stop": None if cluster else stop}
            calls = {
                path: (notebook, given | points[path], path, common) for path in todo
            }
            for path, (status, seconds, reason) in workers.results(
                executor, _attempt, calls
            ):
                outcomes[path] = outcome = Outcome(
                    points[path], path, status, seconds, reason
                )
                if progress or status == "failed":
                    count, pace = (
                        len(outcomes),
                        (time.monotonic() - started) / (len(outcomes) - before),
                    )
                    click.echo(
                        _line(outcome, count, len(points), pace * (len(points) - count))
                    )
    except KeyboardInterrupt:
        click.echo(
            f"stopped; {len(outcomes)} of {len(points)} runs are done, the same again does the rest",
            err=True,
        )
        raise
    return Report(folder, [outcomes[path] for path in points])


def _done(
    points: Iterable[Path], keep_stale: bool
) -> tuple[list[Path], dict[Path, str]]:
    """Return the finished runs that need not be computed anew, and why those that are stale are."""
    points, present = list(points), identity.Present()
    with futures.ThreadPoolExecutor() as pool:
        done = [
            path
            for path, whole in zip(points, pool.map(finished, points), strict=True)
            if whole
        ]
    stale = {path: reason for path in done if (reason := _stale(path, present))}
    return done if keep_stale else [path for path in done if path not in stale], stale


def finished(folder: Path) -> bool:
    """Whether a result folder is complete and undamaged: its manifest, written last, and every file's checksum."""
    return identity.undamaged(folder, read_json(folder / "manifest.json"))


def _stale(folder: Path, present: identity.Present) -> str:
    return present.stale(read_json(folder / "manifest.json"))


def axis(text: str, default: Any = None) -> list[Any]:
    """Return the values that a text means: 0:5 or 0:10:2, integers up to but without the end, or a list 1,2,4.

    default: the parameter's default; if it is text, 0:5 is text too. Commas in brackets and quotes separate nothing.
    """
    bounds = re.fullmatch(r"(-?\d+):(-?\d+)(?::(-?[1-9]\d*))?", text)
    if bounds and not isinstance(default, str):
        numbers = range(int(bounds[1]), int(bounds[2]), int(bounds[3] or 1))
        if numbers[POINTS:]:
            raise ValueError(
                f"{text} is more than the {POINTS:,} runs that a sweep may have"
            )
        values = list(numbers)
    else:
        values = []
        for part in text.split(","):
            if values and _is_open(values[-1]):
                values[-1] += f",{part}"
            else:
                values.append(part)
        values = [value.strip() for value in values]
    if not values or "" in values:
        raise ValueError(
            f"{text!r} has an empty range or item; give 0:5 (0 to 4), 0:10:2 or 1,2,4"
        )
    return values


def _is_open(text: str) -> bool:
    """Whether a bracket or a quote of a text is not closed."""
    bare = re.sub(r"""'[^']*'|"[^"]*\"""", "", text)
    return (
        "'" in bare
        or '"' in bare
        or sum(map(bare.count, "[{(")) > sum(map(bare.count, "]})"))
    )


def folders_of_grid(
    root: Path,
    notebook: Path,
    profile: str,
    grid: Mapping[str, Iterable[Any] | str],
    given: dict[str, Any],
) -> dict[Path, dict[str, Any]]:
    """Return the folder of every point of the grid, all parameters checked; a point given twice is one."""
    if twice := sorted(grid.keys() & given.keys()):
        raise ValueError(
            f"{', '.join(twice)}: in the grid and given as one value; choose"
        )
    known, source = defaults(notebook), source_sha256(notebook)
    same = known | overrides(notebook, profile, given)
    axes = []
    for name, values in grid.items():
        listed = (
            axis(values, known.get(name)) if isinstance(values, str) else list(values)
        )
        if not listed:
            raise ValueError(f"the grid has no value for {name}")
        axes.append([checked({name: value}, known, notebook.stem) for value in listed])
    if (count := math.prod(map(len, axes))) > POINTS:
        raise ValueError(
            f"the grid has {count:,} points, more than the {POINTS:,} runs that a sweep may have"
        )
    points = [
        {name: value for part in parts for name, value in part.items()}
        for parts in itertools.product(*axes)
    ]
    return {
        _folder(root, notebook.stem, source, same | point): point for point in points
    }


def _folder(root: Path, stem: str, source: str, values: dict[str, Any]) -> Path:
    return (root / f"{stem}.sweep" / identity.key(source, values)).absolute()


@contextmanager
def _claimed(
    folder: Path,
    wait: bool,
    timeout: float | int | None = None,
    stop: Event | None = None,
) -> Iterator[None]:
    """Hold the lock of a run's folder; Busy if another process has it, or has it for longer than the timeout."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(path)
    deadline = execution.until(timeout) if wait else 0.0
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0.5 if wait else 0)
            if (
                not path.exists()
            ):  # its last holder removed it while this process waited
                lock.release()
        except Timeout:
            if time.monotonic() >= deadline or (stop and stop.is_set()):
                raise Busy(
                    f"another process has been computing {folder.name} for {timeout or 0:g} s"
                ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def _attempt(
    notebook: Path,
    parameters: dict[str, Any],
    folder: Path,
    options: dict[str, Any],
    wait: bool,
) -> workers.Result:
    """Compute a run in the process that the scheduler chose; return (status, seconds, reason), never raise."""
    started, status, reason = time.monotonic(), "failed", ""
    if len(execution.leftovers(folder)) >= KILLS:
        execution.clear(folder)
        return (
            status,
            0.0,
            "the process that computed it was killed twice; out of memory?",
        )
    try:
        if run_one(notebook, parameters, wait=wait, **options) == folder:
            status = "ok"
        else:
            reason = "the notebook changed while the sweep ran; sweep again"
    except Busy as error:
        status, reason = "failed" if wait else "busy", str(error)
    except Exception as error:
        reason = getattr(error, "reason", f"{type(error).__name__}: {error}")
    return status, time.monotonic() - started, reason


def _line(outcome: Outcome, count: int, total: int, left: float) -> str:
    number = f"[{count:{len(str(total))}}/{total}]"
    if outcome.status == "failed":
        return f"{number} {outcome.label}  {click.style('FAILED', fg='red')}  {outcome.reason}"
    rest = f"  {timedelta(seconds=round(left))} left" if count < total else ""
    return f"{number} {outcome.label}  {click.style(outcome.status, fg='green')}  {outcome.seconds:.1f} s{rest}"


def summary(report: Report) -> str:
    """Return a table of how many runs ended how, in how many each claim holds, and why and where runs failed."""
    ended = [
        "stale, kept" if o.status == "done before" and o.reason else o.status
        for o in report.outcomes
    ]
    lines = [f"{'status':<12}  runs"]
    lines += [
        f"{s:<12}  {ended.count(s):4}"
        for s in ("done before", "stale, kept", "ok", "failed")
        if s in ended
    ]
    held: dict[str, list[bool]] = {}
    for outcome in report.outcomes:
        if outcome.status != "failed":
            for name, claim in tables.claims(outcome.folder).items():
                held.setdefault(name, []).append(claim["holds"])
    if held:
        width = max(5, *map(len, held))
        lines += ["", f"{'claim':<{width}}  holds in"]
        lines += [
            f"{name:<{width}}  {tables.counted(each, 'runs')}"
            for name, each in held.items()
        ]
    if report.failed:
        width = max(len(outcome.label) for outcome in report.failed)
        lines += ["", f"{'failed':<{width}}  because"]
        for outcome in report.failed:
            kept = outcome.folder.with_name(f"{outcome.folder.name}.failed")
            where = f" ({execution.named(kept)})" if kept.is_dir() else ""
            lines.append(f"{outcome.label:<{width}}  {outcome.reason}{where}")
    return "\n".join(lines)
