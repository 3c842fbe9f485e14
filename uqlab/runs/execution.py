"""Notebooks run with parameters, each once, into folders that appear whole or not.

A job is a notebook, its parameters and a result folder. Each runs in a process of its
own, started by any executor of `concurrent.futures`, into a hidden folder that is
renamed at the end. A lock beside the folder keeps two processes apart; the system
releases it when its holder dies. The jobs of a sweep have folders that are named by a
hash of the notebook's source and all parameters, so that several sweeps of one grid
share the work, and the same sweep does what an earlier one left.
"""

import functools
import getpass
import itertools
import json
import operator
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import click
from filelock import FileLock, Timeout

from uqlab.core.extras import extra
from uqlab.core.files import TRAININGS, StrPath, Values, fingerprint, sha256
from uqlab.core.recording import FOLDER, Record, plain
from uqlab.runs.manifest import Manifest, Present
from uqlab.runs.parameters import (
    checked,
    defaults,
    find,
    meant,
    overrides,
    source_sha256,
)

Grid = Mapping[str, Iterable[Any] | str]  # parameter -> its values, or their text


class RunError(RuntimeError):
    """A notebook failed: the message says in which cell and why."""


@dataclass
class Job:
    """One run: a notebook, parameters that are not its own, and a result folder.

    `values` are all parameters, `varied` those that a sweep varies, and `source` is the
    checksum of the notebook's source that the run is for. `status` is "would run",
    "done before", "ok", or "failed", and `reason` says why, or how long it took.
    """

    notebook: Path
    parameters: Values
    folder: Path
    profile: str
    values: Values
    source: str
    varied: Values = field(default_factory=dict)
    status: str = "would run"
    reason: str = ""

    @classmethod
    def of(
        cls, notebook: Path, parameters: Values, profile: str, folder: Path
    ) -> "Job":
        """Check parameters, which come on top of the profile's, and return the job."""
        given = overrides(notebook, profile, parameters)
        values = plain(notebook.stem, defaults(notebook)) | given
        folder = folder.expanduser().absolute()
        there = [*folder.glob("manifest.json"), *folder.glob("*/manifest.json")]
        for made in there[:1]:
            other = made.resolve().parent / Manifest.read(made.parent).notebook
            if other.is_file() and not other.samefile(notebook):
                raise ValueError(
                    f"{folder} is a result of {other.resolve()}, not of {notebook}: "
                    "name another folder (--output-dir), or another notebook's name"
                )
        return cls(notebook, given, folder, profile, values, source_sha256(notebook))

    def __str__(self) -> str:
        varied = " ".join(f"{name}={value}" for name, value in self.varied.items())
        return f"{varied or self.notebook.stem}  {self.status}  {self.reason}"


class Report(NamedTuple):
    """How the runs of a sweep ended, in the order of its grid, and their folder."""

    folder: Path
    outcomes: list[Job]

    @property
    def failed(self) -> list[Job]:
        """The runs that failed."""
        return [job for job in self.outcomes if job.status == "failed"]


# One run ------------------------------------------------------------------------------


def execute(
    notebook: StrPath,
    parameters: Values | None = None,
    *,
    profile: str = "quick",
    folder: StrPath | None = None,
    threads: int | None = None,
) -> Path:
    """Execute one notebook; return its result folder, which appears whole or not.

    Parameters
    ----------
    notebook
        A path, a stem or a unique prefix of one.
    parameters
        On top of those of the profile.
    profile
        Parameter set of profiles.yaml beside the notebook.
    folder
        Default figures/<profile>/<notebook>. An earlier result there is replaced only
        by a success; what a failed notebook executed is kept in <folder>.failed.
    threads
        Of the kernel; default all cores.

    Raises
    ------
    ValueError
        Before anything runs: notebook, profile or parameters.
    RunError
        The notebook failed.
    """
    notebook = find(notebook)
    folder = Path(folder or Path("figures", profile, notebook.stem))
    job = Job.of(notebook, parameters or {}, profile, folder)
    _compute(job, threads=threads)
    return job.folder


def _compute(
    job: Job,
    *,
    wait: bool = True,
    reuse: bool = False,
    threads: int | None = None,
    stop: Event | None = None,
    gpus: Sequence[str] | None = (),
) -> float:
    """Compute a job while its folder is locked; return the seconds that it took.

    With `reuse` a finished run stays as it is, unless it is stale. If `gpus` are given,
    the run sees one of them, which no other run holds; None are all that this process
    may use. Raises filelock's Timeout if another process computes the job and `wait` is
    false, or `stop` is set meanwhile.
    """
    begun = time.monotonic()
    stop = stop or Event()
    # A link stays, and the folder that it leads to is replaced.
    job = replace(job, folder=job.folder.resolve())
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_hidden(job, "lock"))
    with lock.acquire(-1 if wait else 0, cancel_check=stop.is_set):
        with suppress(OSError):  # a kill came between the two renames of `_replace`
            _hidden(job, "old").rename(job.folder)
        if not (reuse and _done(job, Present())):
            _check_replaceable(job)
            with _one_gpu(gpus, stop) as variables:
                _run(job, _environment(threads) | variables, stop)
    return time.monotonic() - begun


def _done(job: Job, present: Present, keep_stale: bool = False) -> bool:
    """Return whether a run stays as it is; its `reason` says why it is stale."""
    manifest = Manifest.read(job.folder)
    if not manifest.undamaged(job.folder):
        return False
    job.reason = present.stale(manifest, job.notebook)
    return keep_stale or not job.reason


def _hidden(job: Job, kind: str) -> Path:
    """Return the hidden "tmp", "old" or "lock" beside a result folder."""
    return job.folder.with_name(f".{job.folder.name}.{kind}")


def _check_replaceable(job: Job) -> None:
    names = {path.name for path in job.folder.glob("*")}
    ours = names & {"manifest.json", "results.json"}
    if job.folder.is_file() or (names and not ours):
        raise ValueError(
            f"{job.folder} holds files that no run has written; name another folder"
        )
    if source_sha256(job.notebook) != job.source:
        raise ValueError("the notebook changed while the sweep ran; sweep again")


def _run(job: Job, variables: dict[str, str], stop: Event) -> None:
    """Run a job in a temporary folder, and rename it to the job's, or to .failed."""
    temporary = _hidden(job, "tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir()
    failed = job.folder.with_name(f"{job.folder.name}.failed")
    manifest = _manifest(job, variables)
    begun = time.monotonic()
    try:
        run_notebook(job, temporary, variables, stop)
        manifest.seconds = round(time.monotonic() - begun, 3)
        _finish(temporary, manifest)
        _replace(job, manifest)
        shutil.rmtree(failed, ignore_errors=True)
    except Exception as error:
        shutil.rmtree(failed, ignore_errors=True)
        if not stop.is_set():
            temporary.rename(failed)
        reason = f"{job.notebook.stem} failed: {error}; kept: {failed}"
        raise RunError(reason) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _manifest(job: Job, variables: dict[str, str]) -> Manifest:
    """Return what a run depends on, as it is before it starts."""
    present = Present()
    values = {name: v for name, v in job.values.items() if name != "output_dir"}
    versions = {each.name: each.version for each in metadata.distributions()}
    return replace(
        present.now,
        notebook=os.path.relpath(job.notebook.resolve(), job.folder),
        source_sha256=job.source,
        profile=job.profile,
        parameters=values,
        data=present.data(values, job.notebook),
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        threads=int(variables["OMP_NUM_THREADS"].split(",")[0]),
        packages={"python": platform.python_version()} | versions,
    )


def _finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a finished run, with a checksum of every file."""
    manifest.device = Record.read(folder).device
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            manifest.files[path.relative_to(folder).as_posix()] = sha256(path)
    manifest.save(folder)


def _replace(job: Job, manifest: Manifest) -> None:
    """Rename the temporary folder; the old result goes when it has taken its place."""
    temporary, old = _hidden(job, "tmp"), _hidden(job, "old")
    written = {"manifest.json", "results.json", *manifest.files}
    written |= Manifest.read(job.folder).files.keys()

    def of_runs(place, names):
        paths = {name: Path(place, name).relative_to(job.folder) for name in names}
        return [name for name in names if paths[name].as_posix() in written]

    if job.folder.exists():  # notes beside a result stay
        shutil.copytree(job.folder, temporary, ignore=of_runs, dirs_exist_ok=True)
        shutil.rmtree(old, ignore_errors=True)
        job.folder.rename(old)
    temporary.rename(job.folder)
    shutil.rmtree(old, ignore_errors=True)


def run_notebook(
    job: Job, folder: Path, variables: dict[str, str], stop: Event
) -> None:
    """Execute the notebook in a new process, which ends when its input closes.

    Raises RuntimeError with the last line that the process printed.
    """
    printed = folder / "error.txt"
    with (
        printed.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "uqlab.runs.execution"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=variables | {FOLDER: str(folder)},
            start_new_session=True,  # Ctrl-C reaches only the runner
            text=True,
        ) as process,
    ):
        arguments = [str(job.notebook), str(folder / job.notebook.name), job.parameters]
        print(json.dumps(arguments), file=process.stdin, flush=True)
        while process.poll() is None and not stop.wait(0.05):
            pass
    if process.returncode:
        lines = printed.read_text("utf-8", "replace").split("\n")
        raise RuntimeError(next(filter(None, reversed(lines)), "stopped")[:600])
    printed.unlink()


def _papermill() -> None:
    """Execute a notebook, named by a line of input; the last line says why it failed.

    When the input is closed, by a runner that stops or dies, this process ends together
    with its kernel.
    """
    notebook, output, parameters = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_runner, daemon=True).start()
    from nbclient.exceptions import DeadKernelError
    from papermill import PapermillExecutionError, execute_notebook  # takes a second

    start = functools.partial(
        execute_notebook,
        notebook,
        output,
        parameters,
        cwd=os.path.dirname(notebook),
        kernel_name="python3",
        language="python",
        progress_bar=False,
        store_widget_state=False,  # it needs a CDN; explorers have HTML of their own
    )
    try:
        try:
            start()
        except RuntimeError as error:
            if isinstance(error, DeadKernelError):  # in a cell
                raise
            start()  # one start of a kernel in 270 fails
    except PapermillExecutionError as error:
        print(click.unstyle(str(error)), file=sys.stderr)
        reason = f"In [{error.exec_count}] {error.ename}: {error.evalue}"
        sys.exit(" ".join(reason.split()))


def _end_with_runner() -> None:
    """Wait until the input is closed, then end this process and its kernel."""
    import psutil

    os.read(0, 1)
    kernels = psutil.Process().children(recursive=True)
    for process in kernels:
        process.kill()
    psutil.wait_procs(kernels, timeout=10)
    os._exit(1)


def _environment(threads: int | None = None) -> dict[str, str]:
    """Return a kernel's variables; the user may set those of threads and trainings.

    Threads sleep while they wait: beside a busy neighbour, spinning ones were 10 to 50
    times slower. The kernel is that of this Python, whatever kernels are installed.
    """
    from joblib import cpu_count
    from pooch import os_cache

    count = str(threads or cpu_count())
    return {
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        TRAININGS: str(os_cache("uqlab") / "trainings"),
        **os.environ,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "JUPYTER_PATH": "",
        "JUPYTER_PREFER_ENV_PATH": "1",
    }


@contextmanager
def _one_gpu(gpus: Sequence[str] | None, stop: Event) -> Iterator[dict[str, str]]:
    """Hold one of the GPUs, or of all; yield the variable that shows it alone."""
    if gpus is None:
        import torch

        every = map(str, range(torch.cuda.device_count()))
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every)).split(",")
    place = f"{tempfile.gettempdir()}/uqlab-{getpass.getuser()}-gpu"
    while any(gpus) and not stop.wait(0.1):
        for number in gpus:
            with suppress(Timeout), FileLock(f"{place}-{number}").acquire(0):
                yield {"CUDA_VISIBLE_DEVICES": number}
                return
    yield {}


# Many runs ----------------------------------------------------------------------------


def run_all(
    jobs: list[Job],
    *,
    at_a_time: int = 1,
    cluster: str | None = None,
    resources: Values | None = None,
    gpus: Sequence[str] = (),
    quiet: bool = False,
    reuse: bool = False,
) -> None:
    """Compute jobs here or on a cluster; their `status` says how each ended.

    Jobs that another process is computing are waited for at the end. On a cluster a run
    that needs a GPU, by `resources`, has one of its worker's. For `reuse` see
    `_compute`.
    """
    from tqdm import tqdm

    pool = _cluster(cluster, resources) if cluster else _here(at_a_time, gpus)
    bar = tqdm(total=len(jobs), disable=quiet or None, leave=False)
    with bar, pool as (executor, more):
        for wait in (False, True):
            work = functools.partial(_compute, wait=wait, reuse=reuse, **more)
            todo = [job for job in jobs if job.status == "would run"]
            pending = {executor.submit(work, job): job for job in todo}
            for future in futures.as_completed(pending):
                if _ended(future, job := pending[future]):
                    bar.update()
                    if job.status == "failed" or not quiet:
                        bar.write(str(job))


def _ended(future: futures.Future, job: Job) -> bool:
    """Set a job's status; return False while another process computes it."""
    try:
        job.status, job.reason = "ok", f"{future.result():.1f} s"
    except Timeout:
        return False
    except Exception as error:  # also that of a worker that died
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        job.status, job.reason = "failed", f"{kind}{error}"
    return True


@contextmanager
def _here(jobs: int, gpus: Sequence[str]) -> Iterator[tuple[futures.Executor, Values]]:
    """Yield an executor of this machine, and keywords for `_compute`.

    Its threads only wait for processes. At the end, also on Ctrl-C, all are stopped.
    """
    from joblib import cpu_count

    stop, jobs = Event(), max(jobs, len(gpus))
    pool = futures.ThreadPoolExecutor(jobs)
    threads = max(1, cpu_count() // jobs)
    try:
        yield pool, {"threads": threads, "stop": stop, "gpus": gpus}
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _cluster(
    address: str, resources: Values | None
) -> Iterator[tuple[futures.Executor, Values]]:
    """Yield the executor of a running Dask scheduler, as `_here` does."""
    with extra("cluster"):
        from distributed import Client

    with Client(address, timeout=30, set_as_default=False) as client:
        gpus = None if (resources or {}).get("GPU", 0) >= 1 else ()
        yield client.get_executor(pure=False, resources=resources), {"gpus": gpus}


# A grid of runs -----------------------------------------------------------------------


def run_one(
    notebook: StrPath,
    parameters: Values | None = None,
    *,
    profile: str = "quick",
    root: StrPath = "figures",
    keep_stale: bool = False,
) -> Path:
    """Return the result folder of one run, computing it if it is not there.

    The folder is <root>/<profile>/<notebook>.sweep/<hash>, the hash of the notebook's
    source and all parameters. A run that is damaged or, without `keep_stale`, stale is
    computed anew. Otherwise as `runs.execute`.
    """
    (job,) = _jobs_of_grid(find(notebook), profile, root, {}, parameters or {})
    if not _done(job, Present(), keep_stale):
        _compute(job, reuse=True)
    return job.folder


def sweep(
    notebook: StrPath,
    grid: Grid,
    parameters: Values | None = None,
    *,
    profile: str = "quick",
    root: StrPath = "figures",
    jobs: int = 1,
    progress: bool = True,
    keep_stale: bool = False,
    dry_run: bool = False,
    **options: Any,
) -> Report:
    """Run a notebook on every point of a grid.

    Parameters
    ----------
    notebook
        A path, a stem or a unique prefix of one.
    grid
        Parameter -> its values, or text: 0:5 or 0:10:2 are integers up to but without
        the end, 1,2,4 or [1],[1,2] are the items of a list. If the parameter's default
        is text, so are the values.
    parameters
        The same for all runs.
    profile
        Parameter set of profiles.yaml beside the notebook.
    root
        The runs lie in <root>/<profile>/<notebook>.sweep.
    jobs
        Runs at a time, each with its share of the cores.
    progress
        Print a line for every run, else for failures only.
    keep_stale
        Skip finished runs although uqlab or their data have changed since.
    dry_run
        Compute nothing; the `status` of the outcomes says what would run.
    **options
        `gpus`, numbers of GPUs of this machine,
        ["0", "1"]: each run has one for itself, and as many run at a time; `cluster`,
        the address of a running Dask scheduler, whose workers see the same files, and
        `resources`, what each run needs of a worker, such as {"GPU": 1}, which gives it
        a GPU of the worker's for itself.

    Raises
    ------
    ValueError
        Before anything runs: notebook, profile or parameters.

    Examples
    --------
    >>> runs.sweep("03", {"seed": range(5)}, jobs=2)  # doctest: +SKIP
    """
    planned = _jobs_of_grid(find(notebook), profile, root, grid, parameters or {})
    present, todo = Present(), []
    for job in planned:
        if _done(job, present, keep_stale):
            job.status = "done before"
        else:
            todo.append(job)
    if stale := [job.reason for job in planned if job.reason]:
        then = "kept" if keep_stale else "computed anew (--keep-stale keeps them)"
        click.echo(f"{len(stale)} runs are stale: {stale[0]}; {then}", err=True)
    if progress:
        before = len(planned) - len(todo)
        click.echo(f"{before} of {len(planned)} runs done before")
    if todo and not dry_run:
        # Another process may finish some of them meanwhile.
        run_all(todo, quiet=not progress, at_a_time=jobs, reuse=True, **options)
    return Report(planned[0].folder.parent, planned)


def summary(report: Report) -> str:
    """Return how many runs ended how, and why some failed."""
    statuses = Counter(job.status for job in report.outcomes)
    lines = [f"{status}: {count}" for status, count in statuses.items()]
    return "\n".join([*lines, *map(str, report.failed)])


def _jobs_of_grid(
    notebook: Path, profile: str, root: StrPath, grid: Grid, parameters: Values
) -> list[Job]:
    """Return the jobs of a grid, each once, all parameters checked."""
    if twice := sorted(grid.keys() & parameters.keys()):
        raise ValueError(f"{twice[0]}: in the grid and given as one value; choose")
    place = Path(root, profile, f"{notebook.stem}.sweep")
    same = Job.of(notebook, parameters, profile, place)
    jobs = {}
    for point in itertools.product(*[_axis(n, grid[n], same) for n in grid]):
        varied = functools.reduce(operator.or_, point, {})
        values = same.values | varied
        given = json.dumps([same.source, values | {"output_dir": ""}], sort_keys=True)
        folder = same.folder / fingerprint(given)[:16]
        parameters = same.parameters | varied
        job = replace(same, parameters=parameters, values=values, folder=folder)
        jobs[folder] = replace(job, varied=varied)
    if not jobs:
        raise ValueError("the grid has a parameter without values")
    return list(jobs.values())


def _axis(name: str, values: Iterable[Any] | str, same: Job) -> list[Values]:
    """Return the checked values of one parameter of a grid."""
    if isinstance(values, str):
        values = _listed(values, same.values.get(name))
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be several, as range(5), got {values!r}")
    points = ({name: value} for value in values)
    return [checked(point, same.values, same.notebook.stem) for point in points]


def _listed(text: str, default: Any) -> list[Any]:
    """Return the values that a text of a grid means."""
    if isinstance(default, str):
        values = re.split(r",\s*(?![^\[]*\])", text)  # not in digits[0,1]
    elif bounds := re.fullmatch(r"(-?\d+):(-?\d+)(?::(-?[1-9]\d*))?", text):
        values = range(*map(int, bounds.groups("1")))
    else:
        values = meant(f"[{text}]")
    if not isinstance(values, list | range) or not values or "" in values:
        raise ValueError(
            f"{text!r} has an empty range or item, or cannot be read; give 0:5 (0 to "
            '4), 0:10:2, 1,2,4, or of lists ["a"],["b"]'
        )
    return list(values)


if __name__ == "__main__":
    _papermill()
