"""Notebooks executed into result folders that appear whole or not at all.

A job is a notebook, its parameters and a folder. `run_many` gives jobs to any executor
of `concurrent.futures`; each runs in a process of its own. A locked file beside the
folder keeps two processes apart: the system releases the lock when its holder dies, so
an interrupted run leaves nothing that could be taken for a result.
"""

import functools
import getpass
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import click

from uqlab.core.extras import extra
from uqlab.core.files import TRAININGS, StrPath, Values, sha256, write
from uqlab.core.recording import FOLDER, Record
from uqlab.runs.manifest import Manifest, Present, Seconds, finished
from uqlab.runs.page import started
from uqlab.runs.parameters import defaults, find, overrides, source_sha256


class RunError(RuntimeError):
    """A notebook failed: the first line says in which cell and why."""


class Busy(RuntimeError):
    """Another process is computing this run."""


class Job(NamedTuple):
    """One run: its checked parameters, without the notebook's defaults, and its folder.

    `source` is the checksum of the notebook's source that the run is for.
    """

    notebook: Path
    parameters: Values
    folder: Path
    profile: str
    source: str


class Result(NamedTuple):
    """How a job ended: status "ok" or "failed", and why, first in one line."""

    status: str
    seconds: float = 0.0
    reason: str = ""


# One run ------------------------------------------------------------------------------


def job(notebook: Path, parameters: Values | None, profile: str, folder: Path) -> Job:
    """Check parameters, which come on top of the profile's, and return the job."""
    values = overrides(notebook, profile, parameters)
    return Job(notebook, values, folder.absolute(), profile, source_sha256(notebook))


def execute(
    notebook: StrPath,
    parameters: Values | None = None,
    *,
    profile: str = "quick",
    folder: StrPath | None = None,
    threads: int | None = None,
    timeout: Seconds = None,
    stop: Event | None = None,
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
    timeout
        Seconds for the whole notebook.
    stop
        Ends the run when it is set.

    Raises
    ------
    ValueError
        Before anything runs: notebook, profile or parameters.
    RunError
        The notebook failed or was stopped.
    """
    notebook = find(notebook)
    folder = Path(folder or Path("figures", profile, notebook.stem))
    folder = folder.expanduser().absolute()
    if folder in notebook.parents:
        raise ValueError(
            f"{notebook} lies in its own result folder; choose another output folder"
        )
    todo = job(notebook, parameters, profile, folder)
    compute(todo, threads=threads, timeout=timeout, stop=stop)
    return folder


def compute(
    job: Job,
    *,
    wait: bool = True,
    reuse: bool = False,
    keep_stale: bool = False,
    threads: int | None = None,
    timeout: Seconds = None,
    stop: Event | None = None,
    gpus: Sequence[str] | None = (),
) -> None:
    """Compute a job while its folder is locked; otherwise as `execute`.

    With `reuse` a finished run stays as it is, unless it is stale and `keep_stale` is
    false. Of some GPUs it sees one alone that no other run holds, None: of all that
    this process may use. Raises Busy where another process computes it and `wait` is
    false.
    """
    stop = stop or Event()
    # A link stays, and its folder is replaced where it lies.
    job = job._replace(folder=job.folder.resolve())
    with locked(job.folder, wait, stop):
        if tidy(job.folder):
            _note_death(job.folder)
        _check_replaceable(job.folder)  # another process may have replaced it
        done = reuse and finished(job.folder)
        if done and (keep_stale or not Present().stale(Manifest.read(job.folder))):
            return
        if source_sha256(job.notebook) != job.source:
            raise ValueError("the notebook changed while the sweep ran; sweep again")
        with a_gpu(_gpus() if gpus is None else gpus, stop) as one:
            _execute(job, threads, timeout, stop, one)


def _gpus() -> list[str]:
    """Return the numbers of the GPUs that this process may use."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False)
        return [str(n) for n, _ in enumerate(listed.stdout.splitlines())]
    return said.split(",") if said else []


@contextmanager
def a_gpu(numbers: Sequence[str], stop: Event) -> Iterator[dict[str, str]]:
    """Hold one of these GPUs; yield the variable that shows it alone, or none."""
    from filelock import FileLock, Timeout

    place = Path(tempfile.gettempdir(), f"uqlab-gpus-{getpass.getuser()}")
    place.mkdir(exist_ok=True)
    held = None
    while numbers and not held:
        for number in numbers:
            lock = FileLock(place / number)
            with suppress(Timeout):
                held = lock.acquire(0)
                break
        else:
            if stop.wait(0.1):
                raise RunError("stopped")
    with held or nullcontext():
        yield {"CUDA_VISIBLE_DEVICES": number} if held else {}


def _execute(
    job: Job, threads: int | None, timeout: Seconds, stop: Event, gpu: dict[str, str]
) -> None:
    """Run a job in a temporary folder, and rename it to the job's, or to .failed."""
    temporary = hidden(job.folder, "tmp")
    output = temporary / f"{job.notebook.stem}.ipynb"
    variables = environment(threads, temporary) | gpu
    manifest = _manifest(job, variables)
    temporary.mkdir()
    begun = time.monotonic()
    try:
        _papermill(job, output, variables, timeout, stop)
        _readdress(output, job.folder)
        manifest.seconds = round(time.monotonic() - begun, 3)
        _finish(temporary, manifest)
        _keep_others(job.folder)
        _replace(job.folder)
        shutil.rmtree(_failed(job.folder), ignore_errors=True)
    except Exception as error:
        if stop.is_set():
            raise RunError("stopped") from error
        raise _keep(output, job.folder, str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(hidden(job.folder, "died"), ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    """Raise ValueError if the folder holds files that no run has written."""
    ours = any((folder / name).exists() for name in ("manifest.json", "results.json"))
    if not ours and (folder.is_file() or (folder.is_dir() and any(folder.iterdir()))):
        raise ValueError(
            f"{folder} holds what no run has written, which the result would replace; "
            "name another output folder"
        )


def _note_death(folder: Path) -> None:
    """Note that a process was killed; at the second time give the run up.

    Otherwise it would kill the workers of a cluster until none is left.
    """
    try:
        hidden(folder, "died").mkdir()
    except FileExistsError:
        hidden(folder, "died").rmdir()
        raise RuntimeError(
            "the process that computed it was killed twice; out of memory?"
        ) from None


def _failed(folder: Path) -> Path:
    """Return where a failed notebook is kept."""
    return folder.with_name(f"{folder.name}.failed")


def _keep(output: Path, folder: Path, said: str) -> RunError:
    """Keep what a failed notebook executed; return the error that says so."""
    count = started(output)
    failed = _failed(folder)
    place = f"In [{count}]" if count else "before its first cell:"
    trace, _, reason = said.rpartition("\n")
    report = f"{output.stem} failed {place} {reason[:160]}\n{trace}"
    with suppress(OSError):
        write(output.with_name("error.txt"), report)
        _readdress(output, failed)
    shutil.rmtree(failed, ignore_errors=True)
    output.parent.rename(failed)
    return RunError(f"{report}\nkept: {named(failed / output.name)}")


def _finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a finished run, with a checksum of every file."""
    if not (folder / "results.json").exists():  # the notebook recorded nothing
        write(folder / "results.json", "{}")
    manifest.device = Record.read(folder).device
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            manifest.files[path.relative_to(folder).as_posix()] = sha256(path)
    manifest.save(folder)


def _papermill(
    job: Job,
    output: Path,
    variables: dict[str, str],
    timeout: Seconds,
    stop: Event,
) -> None:
    """Execute the notebook in a process of its own, which ends when its input closes.

    Raises RuntimeError with what the process said.
    """
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-m", "uqlab.runs.page"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | variables,
            start_new_session=True,  # Ctrl-C comes here alone
        ) as process,
    ):
        assert process.stdin
        process.stdin.write(f"{json.dumps(_arguments(job, output))}\n".encode())
        process.stdin.flush()
        end = time.monotonic() + (timeout or float("inf"))
        while process.poll() is None:
            if time.monotonic() > end:
                raise RuntimeError(f"it took more than {timeout:g} s (timeout)")
            if stop.wait(0.05):
                raise RuntimeError("stopped")
        if process.returncode:
            log.seek(0)
            said = log.read().decode(errors="replace").strip()
            code = f"its process ended with code {process.returncode}"
            raise RuntimeError(said or code)


def _arguments(job: Job, output: Path) -> Values:
    """Return papermill's arguments."""
    parameters = dict(job.parameters)
    if "output_dir" in defaults(job.notebook):
        parameters["output_dir"] = str(output.parent)
    return {
        "input_path": _escaped(job.notebook),
        "output_path": _escaped(output),
        "parameters": parameters,
        "cwd": str(job.notebook.parent),
        "kernel_name": "python3",
        "language": "python",
        "progress_bar": False,
        "store_widget_state": False,  # it needs a CDN; explorers have HTML of their own
    }


def _escaped(path: Path) -> str:
    """Return a path as papermill takes it, which fills what stands in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _readdress(output: Path, folder: Path) -> None:
    """Let an executed notebook name the folder where it will lie."""
    text = output.read_text(encoding="utf-8")
    old, new = (json.dumps(str(path))[1:-1] for path in (output.parent, folder))
    write(output, text.replace(old, new))


def environment(threads: int | None, folder: Path) -> dict[str, str]:
    """Return a kernel's variables; those of threads and trainings may be the user's.

    Threads sleep while they wait: beside a busy neighbour, spinning ones were 10 to 50
    times slower. The kernel is that of this Python, whatever kernels are installed.
    """
    from joblib import cpu_count
    from pooch import os_cache

    count = str(threads or cpu_count())
    wanted = {
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        TRAININGS: str(os_cache("uqlab") / "trainings"),
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "JUPYTER_PATH": "",
        "JUPYTER_PREFER_ENV_PATH": "1",
        FOLDER: str(folder),
    }


def _manifest(job: Job, variables: dict[str, str]) -> Manifest:
    """Return what a run depends on, as it is before it starts."""
    present = Present()
    values = defaults(job.notebook) | job.parameters
    values.pop("output_dir", None)
    return Manifest(
        notebook=named(job.notebook),
        source_sha256=job.source,
        profile=job.profile,
        parameters=values,
        data=present.data(values, job.notebook.parent),
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        threads=int(variables["OMP_NUM_THREADS"].split(",")[0]),
        uqlab=present.uqlab,
        commit=present.commit,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages(),
    )


@functools.cache
def packages() -> dict[str, str]:
    """Return the installed packages and their versions."""
    versions = [(str(p.metadata["Name"]), p.version) for p in metadata.distributions()]
    return dict(sorted(versions))


def first_line(reason: str) -> str:
    """Return the first line of a reason."""
    return reason.partition("\n")[0]


def named(path: Path) -> str:
    """Return a path as a reader wants it: relative if it lies in the current folder."""
    return os.path.relpath(path) if Path.cwd() in path.parents else str(path)


# Folders ------------------------------------------------------------------------------


@contextmanager
def locked(
    folder: Path, wait: bool = False, stop: Event | None = None
) -> Iterator[None]:
    """Hold the lock of a result folder; Busy if another process has it, or `stop`."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(hidden(folder, "lock"))
    try:
        lock.acquire(-1 if wait else 0, cancel_check=stop.is_set if stop else None)
    except Timeout:
        raise Busy(f"another process is computing {folder.name}") from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes it with the lock
            hidden(folder, "lock").unlink()
        lock.release()


def hidden(folder: Path, kind: str) -> Path:
    """Return the hidden "tmp", "old", "lock" or "died" beside a result folder."""
    return folder.with_name(f".{folder.name}.{kind}")


def tidy(folder: Path) -> bool:
    """Put right what a killed process left; return whether that was half done.

    Where the kill came between the two renames of `_replace`, the new result takes its
    place if it is whole, which its manifest says, and else the old one.
    """
    new = hidden(folder, "tmp")
    old = hidden(folder, "old")
    if not folder.exists():
        if (new / "manifest.json").is_file():
            new.rename(folder)
        elif old.exists():
            old.rename(folder)
    half_done = new.exists()
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return half_done


def _keep_others(folder: Path) -> None:
    """Copy files that the earlier run did not write, such as notes, to the new one."""
    written = {"manifest.json", *Manifest.read(folder).files}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        copy = hidden(folder, "tmp") / name
        if path.is_file() and name.as_posix() not in written and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def _replace(folder: Path) -> None:
    """Rename the temporary folder; the old result goes when it has taken its place."""
    with suppress(FileNotFoundError):
        folder.rename(hidden(folder, "old"))
    hidden(folder, "tmp").rename(folder)
    shutil.rmtree(hidden(folder, "old"), ignore_errors=True)


# Many runs ----------------------------------------------------------------------------


def run_many(
    jobs: Iterable[Job],
    executor: futures.Executor,
    on_progress: Callable[[Job, Result], None],
    **options: Any,
) -> dict[Path, Result]:
    """Compute jobs in parallel; return how each ended, by its folder.

    Jobs that another process is computing, and those whose worker died, are tried again
    at the end; the former are waited for.

    Parameters
    ----------
    jobs
        In the order in which they start.
    executor
        Any executor of `concurrent.futures`: threads here, Dask's, MPI's.
    on_progress
        Called with every job as soon as it has ended.
    options
        Keywords of `compute`.

    Raises
    ------
    ConnectionError
        The executor has given up its jobs.
    """
    results = {}
    for wait in (False, True):
        work = functools.partial(attempt, wait=wait, **options)
        pending = {executor.submit(work, job): job for job in jobs}
        jobs = []
        for future in futures.as_completed(pending):
            job = pending[future]
            try:
                result = future.result()
            except futures.CancelledError as error:
                raise ConnectionError(
                    "the Dask scheduler is gone; the same again does what is missing"
                ) from error
            except Exception as error:
                status = "failed" if wait else "lost"
                result = Result(status, reason=f"its worker died: {error}"[:160])
            if result.status in ("busy", "lost"):
                jobs.append(job)
            else:
                results[job.folder] = result
                on_progress(job, result)
    return results


def attempt(job: Job, wait: bool, **options: Any) -> Result:
    """Compute a job in the process that the executor chose, and never raise."""
    begun = time.monotonic()
    try:
        compute(job, wait=wait, **options)
    except Busy:
        return Result("busy")
    except Exception as error:
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        return Result("failed", time.monotonic() - begun, f"{kind}{error}")
    return Result("ok", time.monotonic() - begun)


def run_all(
    jobs: list[Job],
    labels: dict[Path, str],
    *,
    at_a_time: int = 1,
    cluster: str | None = None,
    resources: Any = None,
    gpus: Sequence[str] = (),
    quiet: bool = False,
    **options: Any,
) -> dict[Path, Result]:
    """Compute jobs here or on a cluster; say by their labels how each ended.

    On a cluster a run that needs a GPU, by `resources`, has one of its worker's.

    On a terminal there is a bar with the time that is left. Otherwise as `run_many`.
    """
    from tqdm import tqdm

    ended = []
    pool = _cluster(cluster, resources) if cluster else _here(at_a_time, gpus)
    bar = tqdm(total=len(jobs), disable=quiet or None, leave=False)

    def on_progress(job, result):
        ended.append(job)
        bar.update()
        if result.status == "failed":
            bar.write(f"{labels[job.folder]}  FAILED  {first_line(result.reason)}")
        elif not quiet:
            bar.write(f"{labels[job.folder]}  {result.status}  {result.seconds:.1f} s")

    try:
        with bar, pool as (executor, more):
            return run_many(jobs, executor, on_progress, **options, **more)
    except KeyboardInterrupt:
        done = f"{len(ended)} of {len(jobs)} runs are done"
        todo = "the rest" if options.get("reuse") else "all of them"
        click.echo(f"stopped; {done}, the same again does {todo}", err=True)
        raise


@contextmanager
def _here(jobs: int, gpus) -> Iterator[tuple[futures.Executor, Values]]:
    """Yield an executor of this machine, and what `compute` must know of it.

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
    address: str, resources: Mapping[str, float | int] | None
) -> Iterator[tuple[futures.Executor, Values]]:
    """Yield the executor of a running Dask scheduler, as `_here` does."""
    with extra("cluster"):
        from distributed import Client

    try:
        client = Client(address, timeout=30, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler at {address}: {error}") from error
    with client:
        if not client.scheduler_info()["workers"]:
            click.echo("waiting for a worker; now there is none", err=True)
        gpus = None if (resources or {}).get("GPU", 0) >= 1 else ()
        yield client.get_executor(pure=False, resources=resources), {"gpus": gpus}


def at_a_time(jobs: int | None, count: int) -> int:
    """Return how many of `count` notebooks run at a time by default.

    As many as there are cores, or one beside a GPU, which they would share.
    """
    from joblib import cpu_count

    return jobs or (1 if shutil.which("nvidia-smi") else min(cpu_count(), count))


def execute_all(
    plan: dict[Path, Values],
    root: Path,
    profile: str,
    jobs: int | None,
    timeout: Seconds,
    quiet: bool,
    gpus: Sequence[str] = (),
) -> dict[Path, Result]:
    """Execute notebooks, notebook -> its parameters, into folders of `root`.

    Those that took longest before start first. Say on the terminal how each ended.
    """
    todo = {}
    labels = {}
    for path, given in plan.items():
        todo[path] = job(path, given, profile, root / path.stem)
        labels[todo[path].folder] = path.stem
    results = run_all(
        sorted(todo.values(), key=_time_before, reverse=True),
        labels,
        at_a_time=at_a_time(jobs, len(plan)),
        timeout=timeout,
        quiet=quiet,
        gpus=gpus,
    )
    ended = {path: results[todo[path].folder] for path in plan}
    for result in ended.values():
        if result.reason:
            click.echo(f"\n{result.reason}")
    return ended


def _time_before(job: Job) -> float:
    """Return the seconds that a job took before; infinity if it is new."""
    return Manifest.read(job.folder).seconds or float("inf")
