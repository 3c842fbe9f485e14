"""Sweeps: a grid of runs of one notebook, each computed once into a folder named by what it depends on.

`run_one` is the plain function that a sweep, or any other scheduler, calls. A run is claimed by a lock on a file beside
its folder, which the system releases when its process dies, and the folder appears by one rename: several sweeps of one
grid share the work, and what was interrupted leaves nothing that counts.
"""

import asyncio
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import click

from uqlab import __version__
from uqlab.core.files import read_json, sha256
from uqlab.runs import execution
from uqlab.runs.parameters import checked, defaults, find, overrides, source_sha256

KILLS = 2  # after so many the run is given up; Dask would give up the whole sweep a little later


class Busy(RuntimeError):
    """Another process is computing this run."""


class Outcome(NamedTuple):
    """One run of a sweep: the parameters that the grid varies, and status "ok", "done before" or "failed"."""

    parameters: dict[str, Any]
    folder: Path
    status: str
    seconds: float = 0.0
    reason: str = ""

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.parameters.items()) or "the only run"


class Report(NamedTuple):
    """What became of a sweep, in the order of its grid; `folder` holds the result folders."""

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
) -> Path:
    """Return the result folder of one run, <root>/<profile>/<notebook>.sweep/<hash>, computing it if it is not there.

    The hash is of the notebook's source, all its parameters and the package's version. A finished folder is returned as
    it is; an incomplete or damaged one is computed anew. While another process computes the same run, `wait` waits for
    it (at most `timeout` seconds), else Busy is raised. Arguments and errors otherwise as in `runs.run_one`.
    """
    notebook = find(notebook)
    values = overrides(notebook, profile, parameters)
    folder = _folder(Path(root, profile), notebook.stem, source_sha256(notebook), defaults(notebook) | values)
    if finished(folder):
        return folder
    with _claimed(folder, wait, timeout):
        if finished(folder):
            return folder
        try:
            options = {"profile": profile, "folder": folder, "threads": threads, "timeout": timeout}
            return execution.run_one(notebook, parameters, **options)
        finally:  # not reached if this process is killed
            _clear(folder)


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
) -> Report:
    """Run a notebook on every point of a grid: `sweep("03", {"seed": range(5), "members": [5, 10]}, jobs=2)`.

    grid: parameter -> its values, or their text as `axis` reads it. parameters: the same for all runs.
    jobs: runs at a time, each with its share of the cores. timeout: seconds for each run.
    cluster: address of a running Dask scheduler, whose workers see the same files; each run is a task that needs
    `resources`, such as {"GPU": 1}. progress: a line for every run, else for failures only.

    Finished runs are skipped; a run that fails does not stop the others. Joblib's threads do the work, or whatever
    `joblib.parallel_config` says. Raises ValueError before anything runs (notebook, profile, parameters, cluster).
    """
    notebook, given = find(notebook), dict(parameters or {})
    folder = Path(root, profile, f"{notebook.stem}.sweep").absolute()
    plan = _plan(folder.parent, notebook, profile, grid, given)
    with futures.ThreadPoolExecutor() as pool:
        done = dict(zip(plan, pool.map(finished, plan), strict=True))
    outcomes = {path: Outcome(plan[path], path, "done before") for path in plan if done[path]}
    todo = [path for path in plan if not done[path]]
    if progress:
        click.echo(f"{notebook.stem}: {len(plan)} runs, {len(plan) - len(todo)} done before, {len(todo)} to do")
    if not todo:
        return Report(folder, list(outcomes.values()))
    killed = {path.name.split(".")[1] for path in folder.glob(".*.tmp-*")}
    for path in todo:
        if path.name in killed:
            with suppress(Busy), _claimed(path, wait=False):
                _clear(path)
    started, before = time.monotonic(), len(outcomes)
    execution.reset()
    try:
        with _workers(jobs, cluster, resources) as (threads, backend):
            common = {"profile": profile, "root": str(Path(root).absolute()), "threads": threads, "timeout": timeout}
            calls = {path: (str(notebook), given | plan[path], str(path), common) for path in todo}
            for path, (status, seconds, reason) in _results(calls, backend):
                outcomes[path] = outcome = Outcome(plan[path], path, status, seconds, reason)
                if progress or status == "failed":
                    count, pace = len(outcomes), (time.monotonic() - started) / (len(outcomes) - before)
                    click.echo(_line(outcome, count, len(plan), pace * (len(plan) - count)))
    except KeyboardInterrupt:
        execution.stop()
        click.echo(f"stopped; {len(outcomes)} of {len(plan)} runs are done, the same again does the rest", err=True)
        raise
    return Report(folder, [outcomes[path] for path in plan])


def finished(folder: Path) -> bool:
    """Whether a result folder is complete and undamaged: its manifest, written last, and every file's checksum."""
    files = read_json(folder / "manifest.json").get("files")
    if not isinstance(files, dict) or "results.json" not in files:
        return False
    with suppress(OSError):
        return all(sha256(folder / name) == digest for name, digest in files.items())
    return False


def axis(text: str, default: Any = None) -> list[Any]:
    """Return the values that a text means: 0:5 or 0:10:2, integers up to but without the end, or a list 1,2,4.

    default: the parameter's; where it is text, 0:5 is text too. Commas in brackets and quotes separate nothing.
    Raises ValueError for a range or an item that is empty.
    """
    bounds = re.fullmatch(r"(-?\d+):(-?\d+)(?::(-?[1-9]\d*))?", text)
    if bounds and not isinstance(default, str):
        values: list[Any] = list(range(int(bounds[1]), int(bounds[2]), int(bounds[3] or 1)))
    else:
        values, depth, quote = [""], 0, ""
        for letter in text:
            if letter == "," and not depth and not quote:
                values.append("")
                continue
            if letter in "'\"" and quote in ("", letter):
                quote = "" if quote else letter
            if not quote:
                depth += (letter in "[{(") - (letter in "]})")
            values[-1] += letter
        values = [value.strip() for value in values]
    if not values or "" in values:
        raise ValueError(f"{text!r} has an empty range or item; give 0:5 (0 to 4), 0:10:2 or 1,2,4")
    return values


def _plan(
    root: Path, notebook: Path, profile: str, grid: Mapping[str, Iterable[Any] | str], given: dict[str, Any]
) -> dict[Path, dict[str, Any]]:
    """Return the folder of every point of the grid, all parameters checked; a point given twice is one."""
    if twice := sorted(grid.keys() & given.keys()):
        raise ValueError(f"{', '.join(twice)}: in the grid and given as one value; choose")
    known, source = defaults(notebook), source_sha256(notebook)
    same = known | overrides(notebook, profile, given)
    axes = []
    for name, values in grid.items():
        listed = axis(values, known.get(name)) if isinstance(values, str) else list(values)
        if not listed:
            raise ValueError(f"the grid has no value for {name}")
        axes.append([checked({name: value}, known, notebook.stem) for value in listed])
    points = [{name: value for part in parts for name, value in part.items()} for parts in itertools.product(*axes)]
    return {_folder(root, notebook.stem, source, same | point): point for point in points}


def _folder(root: Path, stem: str, source: str, values: dict[str, Any]) -> Path:
    values = {name: value for name, value in values.items() if name != "output_dir"}
    said = json.dumps([source, values, __version__], sort_keys=True)
    return (root / f"{stem}.sweep" / hashlib.sha256(said.encode()).hexdigest()[:16]).absolute()


@contextmanager
def _claimed(folder: Path, wait: bool, timeout: float | int | None = None) -> Iterator[None]:
    """Hold the lock of a run's folder; Busy if another process has it, or has it for longer than the timeout."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    deadline = time.monotonic() + (timeout or math.inf if wait else 0)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0.5 if wait else 0)
        except Timeout:
            if time.monotonic() >= deadline or execution.stopping():
                raise Busy(f"another process has been computing {folder.name} for {timeout or 0:g} s") from None
    try:
        yield
    finally:
        lock.release()


def _leftovers(folder: Path) -> list[Path]:
    """Return the half-done folders of a run: one being computed, or such whose process was killed."""
    return list(folder.parent.glob(f".{folder.name}.tmp-*"))


def _clear(folder: Path) -> None:
    for path in _leftovers(folder):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _workers(
    jobs: int, cluster: str | None, resources: Mapping[str, float | int] | None
) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield the threads of each run's kernel and the arguments of joblib.Parallel, connected to a cluster if asked."""
    from joblib import cpu_count, parallel_config

    if cluster is None:
        yield max(1, cpu_count() // jobs), {"n_jobs": jobs, "prefer": "threads"}
        return
    if jobs > 1:
        raise ValueError("jobs are for this machine alone; on a cluster its workers say how many runs go at a time")
    try:
        from distributed import Client
    except ImportError as error:
        raise ValueError("a cluster needs dask.distributed: pip install 'uqlab[cluster]'") from error
    from joblib._dask import DaskDistributedBackend

    class Backend(DaskDistributedBackend):
        """Joblib's own, which would wait for ever for a task that Dask has given up because its workers died, and
        would compute in this process what it has one worker for.
        """

        def effective_n_jobs(self, n_jobs):
            return max(2, len(self.client.ncores()))  # type: ignore[arg-type]

        def submit(self, func, callback=None):
            future = super().submit(func, callback)
            future.add_done_callback(lambda done: callback and done.exception() and callback(done.exception()))
            return future

        def retrieve_result_callback(self, out):
            if isinstance(out, BaseException):
                raise out
            return super().retrieve_result_callback(out)

    try:
        client = Client(cluster, timeout=30, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler at {cluster}: {error}") from error
    with client:
        if not client.ncores():
            click.echo("waiting for the cluster's first worker", err=True)
            client.wait_for_workers(1)
        offers = [worker.get("resources") or {} for worker in client.scheduler_info(-1)["workers"].values()]
        if resources and not any(all(each.get(k, 0) >= n for k, n in resources.items()) for each in offers):
            click.echo(f"waiting for a worker that offers {resources}; now none does", err=True)
        with parallel_config(backend=Backend(client=client, resources=resources)):  # type: ignore[arg-type]
            yield None, {"pre_dispatch": "all"}  # a cluster may grow


def _results(calls: dict[Path, tuple], backend: dict[str, Any]) -> Iterator[tuple[Path, tuple[str, float, str]]]:
    """Make the calls in parallel and yield what came of each, as it comes.

    Those that another process is computing are waited for at the end. A worker that dies may take all that run with it:
    what is left runs again, at first one by one if nothing has come of it, so that only the one to blame fails.
    """
    from joblib import Parallel, delayed

    left, alone, wait = dict(calls), False, False
    options: dict[str, Any] = {"return_as": "generator_unordered", "batch_size": 1} | backend
    while left:
        batch, broken = list(left)[: 1 if alone else None], ""
        before = len(left)
        try:
            work = [delayed(_attempt)(*left[path], wait) for path in batch]
            for path, *result in cast(Iterator[tuple], Parallel(**options)(work)):
                if result[0] != "busy":
                    del left[Path(path)]
                    yield Path(path), tuple(result)
        except Exception as error:
            broken = execution.first_line(f"its worker died: {type(error).__name__}: {error}")
        if broken and alone:
            del left[batch[0]]
            yield batch[0], ("failed", 0.0, broken)
        wait = not broken and not alone
        alone = bool(broken) and len(left) == before


def _attempt(
    notebook: str, parameters: dict[str, Any], folder: str, options: dict[str, Any], wait: bool
) -> tuple[str, str, float, str]:
    """Compute a run wherever the scheduler puts it and return (folder, status, seconds, reason), whatever happens."""
    started = time.monotonic()

    def ended(status: str, reason: str = "") -> tuple[str, str, float, str]:
        return folder, status, time.monotonic() - started, reason

    if len(_leftovers(Path(folder))) >= KILLS:
        _clear(Path(folder))
        return ended("failed", "the process that computed it was killed twice; out of memory?")
    try:
        found = _in_thread(lambda: run_one(notebook, parameters, wait=wait, **options))
    except Busy as error:
        return ended("failed", str(error)) if wait else ended("busy")
    except Exception as error:
        return ended("failed", getattr(error, "reason", f"{type(error).__name__}: {error}"))
    if str(found) != folder:
        return ended("failed", "the notebook or the package changed while the sweep ran; sweep again")
    return ended("ok")


def _in_thread(work: Any) -> Any:
    """Papermill leaves an event loop open in its thread, and could not run where a notebook's own loop runs."""
    result: futures.Future = futures.Future()

    def target() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error if isinstance(error, Exception) else RuntimeError("stopped"))
        with suppress(RuntimeError):
            asyncio.get_event_loop().close()

    threading.Thread(target=target, daemon=True).start()
    return result.result()


def _line(outcome: Outcome, count: int, total: int, left: float) -> str:
    """Say in a line how a run ended and how long the rest will take."""
    number = f"[{count:{len(str(total))}}/{total}]"
    if outcome.status == "failed":
        return f"{number} {outcome.label}  {click.style('FAILED', fg='red')}  {outcome.reason}"
    rest = f"  {duration(left)} left" if count < total else ""
    return f"{number} {outcome.label}  {click.style(outcome.status, fg='green')}  {duration(outcome.seconds)}{rest}"


def duration(seconds: float) -> str:
    """Return seconds as a reader wants them: 9.8 s, 4 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def summary(report: Report) -> str:
    """Return a table of how many runs ended how, and of those that failed why, and where to look."""
    counts = {status: sum(o.status == status for o in report.outcomes) for status in ("done before", "ok", "failed")}
    lines = [f"{'status':<12}  runs", *(f"{status:<12}  {count:4}" for status, count in counts.items() if count)]
    if report.failed:
        width = max(len(outcome.label) for outcome in report.failed)
        lines += ["", f"{'failed':<{width}}  because"]
        for outcome in report.failed:
            kept = outcome.folder.with_name(f"{outcome.folder.name}.failed")
            where = f" ({execution.named(kept)})" if kept.is_dir() else ""
            lines.append(f"{outcome.label:<{width}}  {outcome.reason}{where}")
    return "\n".join(lines)
