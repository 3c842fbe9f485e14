"""Sweeps: a grid of runs of one notebook, each computed once.

A run's folder is named by a hash of the notebook's source and all parameters. Several
sweeps of one grid share the work, and after an interruption the same sweep does what is
missing.
"""

import itertools
import json
import math
import re
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml

from uqlab.core.files import StrPath, Values, fingerprint
from uqlab.runs import execution
from uqlab.runs.execution import Job, Result
from uqlab.runs.manifest import Manifest, Present
from uqlab.runs.parameters import checked, find

MOST_RUNS = 100_000  # of one sweep
Grid = Mapping[str, Iterable[Any] | str]  # parameter -> its values, or their text


class Report(NamedTuple):
    """How the runs of a sweep ended, in the order of its grid, and their folder."""

    folder: Path
    outcomes: list[Result]

    @property
    def failed(self) -> list[Result]:
        """The runs that failed."""
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]


def run_one(
    notebook: StrPath,
    parameters: Values | None = None,
    *,
    profile: str = "quick",
    root: StrPath = "figures",
    threads: int | None = None,
    timeout: float | int | None = None,
    keep_stale: bool = False,
) -> Path:
    """Return the result folder of one run, computing it if it is not there.

    The folder is <root>/<profile>/<notebook>.sweep/<hash>, the hash of the notebook's
    source and all parameters. A run that is damaged or, without `keep_stale`, stale is
    computed anew. Otherwise as `runs.execute`.
    """
    (job,) = jobs_of_grid(find(notebook), profile, root, {}, parameters or {})
    execution.compute(
        job, reuse=True, keep_stale=keep_stale, threads=threads, timeout=timeout
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
    timeout: float | int | None = None,
    cluster: str | None = None,
    resources: Mapping[str, float | int] | None = None,
    gpus: Sequence[str] = (),
    progress: bool = True,
    keep_stale: bool = False,
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

    Raises
    ------
    ValueError
        Before anything runs: notebook, profile or parameters.

    Examples
    --------
    >>> runs.sweep("03", {"seed": range(5)}, jobs=2)  # doctest: +SKIP
    """
    planned = jobs_of_grid(find(notebook), profile, root, grid, parameters or {})
    results = done_before(planned, keep_stale)
    todo = [job for job in planned if job.folder not in results]
    if progress:
        click.echo(f"{len(results)} of {len(planned)} runs done before")
    if todo:
        results |= execution.run_all(
            todo,
            quiet=not progress,
            timeout=timeout,
            reuse=True,  # what another process finishes meanwhile
            keep_stale=keep_stale,
            cluster=cluster,
            resources=resources,
            gpus=gpus,
            at_a_time=jobs,
        )
    outcomes = [results[job.folder] for job in planned]
    return Report(planned[0].folder.parent, outcomes)


def done_before(jobs: list[Job], keep_stale: bool) -> dict[Path, Result]:
    """Return the finished runs that stay as they are, and say how many are stale."""
    finished = {}
    present = Present()
    for job in jobs:
        manifest = Manifest.read(job.folder)
        if manifest.undamaged(job.folder):
            why = present.stale(manifest)
            finished[job.folder] = Result(job, "done before", reason=why)
    if stale := [result for result in finished.values() if result.reason]:
        then = "kept" if keep_stale else "computed anew (--keep-stale keeps them)"
        many = f"{len(stale)} of {len(finished)} finished runs are stale"
        click.echo(f"{many}: {stale[0].reason}; {then}", err=True)
    return {f: r for f, r in finished.items() if keep_stale or not r.reason}


# 010 and 1:30, which YAML takes for 8 and 90
OTHER_BASES = re.compile(r"(^|[,[])\s*[-+]?(0\d+|\d+:[\d:]+)\s*(?=[],]|$)")


def axis(text: str, default: Any = None) -> list[Any]:
    """Return the values that a text means.

    0:5 or 0:10:2 are integers up to but without the end, 1,2,4 or [1],[1,2] are the
    items of a list in YAML. If the parameter's default is text, so are the values.
    """
    values = []
    bounds = re.fullmatch(r"(-?\d+):(-?\d+)(?::(-?[1-9]\d*))?", text)
    if isinstance(default, str):
        values = re.split(r",\s*(?![^\[]*\])", text)  # not in digits[0,1]
    elif bounds:
        numbers = range(*map(int, bounds.groups("1")))
        values = list(numbers[: MOST_RUNS + 1])  # enough to be refused for its length
    elif not OTHER_BASES.search(text):
        with suppress(yaml.YAMLError):
            values = yaml.safe_load(f"[{text}]")
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
) -> list[Job]:
    """Return the jobs of a grid, each once, all parameters checked."""
    if twice := sorted(grid.keys() & parameters.keys()):
        raise ValueError(f"{twice[0]}: in the grid and given as one value; choose")
    place = Path(root, profile, f"{notebook.stem}.sweep")
    same = execution.make_job(notebook, parameters, profile, place)
    jobs = {}
    for point in itertools.product(*_axes(grid, same.values, notebook.stem)):
        varied = dict(ChainMap(*reversed(point)))
        values = same.values | varied
        identity = json.dumps(
            [same.source, values | {"output_dir": ""}], sort_keys=True
        )
        folder = same.folder / fingerprint(identity)[:16]
        jobs[folder] = Job(
            notebook,
            same.parameters | varied,
            folder,
            profile,
            values,
            same.source,
            varied,
        )
    return list(jobs.values())


def _axes(grid: Grid, known: Values, stem: str) -> list[list[Values]]:
    """Return the checked values of each parameter of a grid, which is counted first."""
    axes = {}
    for name, values in grid.items():
        if not isinstance(values, Iterable):
            raise TypeError(f"{name} must be several, as range(5), got {values!r}")
        text = isinstance(values, str)
        axes[name] = axis(values, known.get(name)) if text else [*values]
    if not 0 < math.prod(map(len, axes.values())) <= MOST_RUNS:
        raise ValueError(
            f"a sweep has 1 to {MOST_RUNS:,} runs; the grid has more or none"
        )
    return [
        [checked({name: value}, known, stem) for value in values]
        for name, values in axes.items()
    ]


def summary(report: Report) -> str:
    """Return how many runs ended how, and why some failed."""
    statuses = Counter(outcome.status for outcome in report.outcomes)
    lines = [f"{status}: {count}" for status, count in statuses.items()]
    return "\n".join([*lines, *(outcome.line for outcome in report.failed)])
