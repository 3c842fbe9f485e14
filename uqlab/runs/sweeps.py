"""Sweeps: a grid of runs of one notebook, each computed once.

A run's folder is named by what it depends on. Several sweeps of one grid share the
work, and after an interruption the same sweep does what is missing.
"""

import itertools
import math
import re
import shutil
from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click

from uqlab.core.files import StrPath, Values
from uqlab.core.recording import Record
from uqlab.runs import execution, plans, tables
from uqlab.runs.execution import Job, Result
from uqlab.runs.manifest import Manifest, Present, Seconds, key
from uqlab.runs.parameters import checked, defaults, find, overrides, source_sha256

POINTS = 100_000  # the most runs of one sweep
Grid = Mapping[str, Iterable[Any] | str]  # parameter -> its values, or their text


class Outcome(NamedTuple):
    """One run of a sweep: status "ok", "done before" or "failed".

    `parameters` are those that the grid varies; `reason` is why it failed or is stale.
    """

    parameters: Values
    folder: Path
    status: str
    seconds: float = 0.0
    reason: str = ""


class Report(NamedTuple):
    """The outcomes of a sweep in the order of its grid, and the folder of its runs."""

    folder: Path
    outcomes: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """The runs that failed."""
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]


def labelled(job: Job, names: Iterable[str]) -> str:
    """Return those parameters of a run that its grid varies, as text."""
    values = " ".join(f"{name}={job.parameters[name]}" for name in names)
    return values or "the only run"


def run_one(
    notebook: StrPath,
    parameters: Values | None = None,
    *,
    profile: str = "quick",
    root: StrPath = "figures",
    threads: int | None = None,
    timeout: Seconds = None,
    wait: bool = True,
    keep_stale: bool = False,
) -> Path:
    """Return the result folder of one run, computing it if it is not there.

    The folder is <root>/<profile>/<notebook>.sweep/<hash>, the hash of the notebook's
    source and all parameters. A run that is damaged or, without `keep_stale`, stale is
    computed anew. While another process computes it, `wait` waits; without,
    RuntimeError is raised. Otherwise as `runs.execute`.
    """
    (job,) = jobs_of_grid(find(notebook), profile, root, {}, parameters or {}).values()
    execution.compute(
        job,
        wait=wait,
        reuse=True,
        keep_stale=keep_stale,
        threads=threads,
        timeout=timeout,
    )
    return job.folder


def sweep(
    notebook: StrPath,
    grid: Grid,
    parameters: Values | None = None,
    *,
    profile: str = "quick",
    root: StrPath = "figures",
    jobs: int = 1,
    timeout: Seconds = None,
    cluster: str | None = None,
    resources: Mapping[str, float | int] | None = None,
    gpus: Sequence[str] = (),
    progress: bool = True,
    keep_stale: bool = False,
    dry_run: bool = False,
) -> Report:
    """Run a notebook on every point of a grid.

    Parameters
    ----------
    notebook
        A path, a stem or a unique prefix of one.
    grid
        Parameter -> its values, or their text as `axis` reads it.
    parameters
        The same for all runs.
    profile
        Parameter set of profiles.yaml beside the notebook.
    root
        The runs lie in <root>/<profile>/<notebook>.sweep.
    jobs
        Runs at a time, each with its share of the cores.
    timeout
        Seconds for each run.
    cluster
        Address of a running Dask scheduler, whose workers see the same files.
    resources
        What each run needs of a worker, such as {"GPU": 1}, which gives it a GPU of the
        worker's for itself.
    gpus
        Numbers of GPUs of this machine, ["0", "1"]: each run has one for itself, and as
        many run at a time.
    progress
        Print a line for every run, else for failures only.
    keep_stale
        Skip finished runs although uqlab or their data have changed since.
    dry_run
        Only say what would be computed and how long it takes; the report is empty.

    Raises
    ------
    ValueError
        Before anything runs: notebook, profile, parameters or cluster.

    Examples
    --------
    >>> runs.sweep("03", {"seed": range(5)}, jobs=2)  # doctest: +SKIP
    """
    notebook = find(notebook)
    planned = jobs_of_grid(notebook, profile, root, grid, parameters or {})
    labels = {path: labelled(job, grid) for path, job in planned.items()}
    if dry_run:
        return _only_say(notebook.stem, labels, keep_stale, jobs)
    _tidy(planned)
    results, stale = _done(planned, keep_stale)
    _announce(notebook.stem if progress else "", len(planned), results, stale)
    todo = [job for path, job in planned.items() if path not in results]
    if todo:
        results |= execution.run_all(
            todo,
            labels,
            quiet=not progress,
            timeout=timeout,
            reuse=True,  # what another process finishes meanwhile
            keep_stale=keep_stale,
            cluster=cluster,
            resources=resources,
            gpus=gpus,
            at_a_time=jobs,
        )
    return _report(planned, grid, results)


def _only_say(
    name: str, labels: dict[Path, str], keep_stale: bool, jobs: int
) -> Report:
    """Say what would be computed, and return a report of no runs."""
    done, stale = _done(labels, keep_stale)
    for line in plans.of_sweep(name, labels, done, stale, jobs):
        click.echo(line)
    return Report(next(iter(labels)).parent, [])


def _announce(
    name: str, count: int, done: Collection[Path], stale: dict[Path, str]
) -> None:
    """Say how much there is to do, and how many finished runs are stale."""
    if name:
        todo = f"{len(done)} done before, {count - len(done)} to do"
        click.echo(f"{name}: {count} runs, {todo}")
    if stale:
        finished = {*done, *stale}
        anew = "computed anew (--keep-stale keeps them)"
        then = "kept" if len(finished) == len(done) else anew
        first = next(iter(stale.values()))
        many = f"{len(stale)} of {len(finished)} finished runs are stale"
        click.echo(f"{many}: {first}; {then}", err=True)


def _report(
    planned: dict[Path, Job], names: Iterable[str], results: Mapping[Path, Result]
) -> Report:
    outcomes = []
    for folder, job in planned.items():
        varied = {name: job.parameters[name] for name in names}
        outcomes.append(Outcome(varied, folder, *results[folder]))
    return Report(next(iter(planned)).parent, outcomes)


def _tidy(folders: Iterable[Path]) -> None:
    """Put right what killed sweeps left, unless another process is computing it."""
    for folder in folders:
        # A new result before it takes its place, the one that it replaces, the lock of
        # who computes it, and a note that its worker died.
        kinds = ("tmp", "old", "lock", "died")
        if any(execution.hidden(folder, kind).exists() for kind in kinds):
            with suppress(execution.Busy), execution.locked(folder):
                execution.tidy(folder)
                shutil.rmtree(execution.hidden(folder, "died"), ignore_errors=True)


def _done(
    folders: Iterable[Path], keep_stale: bool
) -> tuple[dict[Path, Result], dict[Path, str]]:
    """Return the finished runs that stay as they are, and why those stale are stale."""
    done = {}
    stale = {}
    present = Present()
    for folder in folders:
        manifest = Manifest.read(folder)
        if manifest.undamaged(folder):
            if reason := present.stale(manifest):
                stale[folder] = reason
            if keep_stale or not reason:
                done[folder] = Result("done before", reason=reason)
    return done, stale


def axis(text: str, default: Any = None) -> list[Any]:
    """Return the values that a text means.

    0:5 or 0:10:2 are integers up to but without the end, 1,2,4 is a list. If the
    parameter's default is text, 0:5 is text too. Commas in brackets separate
    nothing.
    """
    bounds = re.fullmatch(r"(-?\d+):(-?\d+)(?::(-?[1-9]\d*))?", text)
    if bounds and not isinstance(default, str):
        numbers = range(*map(int, bounds.groups("1")))
        values = list(numbers[: POINTS + 1])  # enough to be refused for its length
    else:
        depths = itertools.accumulate((c in "[({") - (c in "])}") for c in text)
        pairs = zip(text, depths, strict=True)
        items = "".join("\0" if pair == (",", 0) else pair[0] for pair in pairs)
        values = [item.strip() for item in items.split("\0")]
    if not values or "" in values:
        raise ValueError(
            f"{text!r} has an empty range or item; give 0:5 (0 to 4), 0:10:2 or 1,2,4"
        )
    return values


def jobs_of_grid(
    notebook: Path,
    profile: str,
    root: StrPath,
    grid: Grid,
    parameters: Values,
) -> dict[Path, Job]:
    """Return the jobs of a grid by their folders, all parameters checked."""
    if twice := sorted(grid.keys() & parameters.keys()):
        raise ValueError(f"{twice[0]}: in the grid and given as one value; choose")
    known = defaults(notebook)
    source = source_sha256(notebook)
    same = overrides(notebook, profile, parameters)
    axes = _axes(grid, known, notebook.stem)
    place = Path(root, profile, f"{notebook.stem}.sweep").expanduser().absolute()
    jobs = {}
    for point in itertools.product(*axes):
        values = dict(ChainMap(*point, same))
        folder = place / key(source, known | values)
        jobs[folder] = Job(notebook, values, folder, profile, source)
    return jobs


def _axes(grid: Grid, known: Values, stem: str) -> Iterator[list[Values]]:
    """Yield the checked values of each parameter of a grid, which is counted first."""
    axes = {}
    for name, values in grid.items():
        if not isinstance(values, Iterable):
            raise TypeError(f"{name} must be several, as range(5), got {values!r}")
        text = isinstance(values, str)
        axes[name] = axis(values, known.get(name)) if text else [*values]
    if not 0 < math.prod(map(len, axes.values())) <= POINTS:
        raise ValueError(f"a sweep has 1 to {POINTS:,} runs; the grid has more or none")
    for name, values in axes.items():
        yield [checked({name: value}, known, stem) for value in values]


def summary(report: Report) -> str:
    """Return a table of how runs ended, in how many each claim holds, what failed."""
    lines = ["status        runs"]
    statuses = Counter(
        "stale, kept"
        if outcome.reason and outcome.status == "done before"
        else outcome.status
        for outcome in report.outcomes
    )
    for status, count in sorted(statuses.items()):
        lines.append(f"{status:<12}  {count:4}")
    held = {}
    for outcome in report.outcomes:
        for name, claim in Record.read(outcome.folder).claims.items():
            held.setdefault(name, []).append(claim.holds)
    if held:
        lines += ["", "claim  holds in"]
    for name, answers in held.items():
        lines.append(f"{name}  {tables.counted(answers, 'runs')}")
    if report.failed:
        lines += ["", "failed because"]
    for outcome in report.failed:
        lines.append(f"{outcome.parameters}  {execution.first_line(outcome.reason)}")
    return "\n".join(lines)
