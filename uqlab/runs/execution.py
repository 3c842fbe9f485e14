"""Notebooks executed into result folders that appear whole or not at all.

A job is a notebook, its parameters and a folder. Each runs in a new process,
started by any executor of `concurrent.futures`, into a hidden folder that is renamed at
the end. A lock beside the folder keeps two processes apart; the system releases it when
its holder dies.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import click
from filelock import FileLock, Timeout

from uqlab.core.extras import extra
from uqlab.core.files import TRAININGS, StrPath, Values, sha256, write
from uqlab.core.recording import FOLDER, Record
from uqlab.runs.manifest import Manifest, Present, finished
from uqlab.runs.parameters import defaults, find, overrides, source_sha256


class RunError(RuntimeError):
    """A notebook failed: the first line says in which cell and why."""


class Job(NamedTuple):
    """One run: a notebook, parameters that are not its own, and a result folder.

    `values` are all parameters, `varied` those that a sweep varies, and `source` is the
    checksum of the notebook's source that the run is for.
    """

    notebook: Path
    parameters: Values
    folder: Path
    profile: str
    values: Values
    source: str
    varied: Values

    @property
    def label(self) -> str:
        """The name of the run on the terminal."""
        varied = [f"{name}={value}" for name, value in self.varied.items()]
        return " ".join(varied) or self.notebook.stem


class Result(NamedTuple):
    """How a job ended, and why.

    `status` is "ok", "failed", "done before", or "busy" while another process has it.
    """

    job: Job
    status: str
    seconds: float = 0.0
    reason: str = ""

    @property
    def folder(self) -> Path:
        """The result folder."""
        return self.job.folder

    @property
    def line(self) -> str:
        """What the terminal shows: the first line of the reason if it failed."""
        why = self.reason.partition("\n")[0] or f"{self.seconds:.1f} s"
        return f"{self.job.label}  {self.status}  {why}"


# One run ------------------------------------------------------------------------------


def make_job(
    notebook: Path, parameters: Values | None, profile: str, folder: Path
) -> Job:
    """Check parameters, which come on top of the profile's, and return the job."""
    given = overrides(notebook, profile, parameters)
    values = defaults(notebook) | given
    source = source_sha256(notebook)
    folder = folder.expanduser().absolute()
    return Job(notebook, given, folder, profile, values, source, {})


def execute(
    notebook: StrPath,
    parameters: Values | None = None,
    *,
    profile: str = "quick",
    folder: StrPath | None = None,
    threads: int | None = None,
    timeout: float | int | None = None,
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

    Raises
    ------
    ValueError
        Before anything runs: notebook, profile or parameters.
    RunError
        The notebook failed.
    """
    notebook = find(notebook)
    folder = Path(folder or Path("figures", profile, notebook.stem))
    job = make_job(notebook, parameters, profile, folder)
    compute(job, threads=threads, timeout=timeout)
    return job.folder


def compute(
    job: Job,
    *,
    wait: bool = True,
    reuse: bool = False,
    keep_stale: bool = False,
    threads: int | None = None,
    timeout: float | int | None = None,
    stop: Event | None = None,
    gpus: Sequence[str] | None = (),
) -> None:
    """Compute a job while its folder is locked; otherwise as `execute`.

    With `reuse` a finished run stays as it is, unless it is stale and `keep_stale` is
    false. If `gpus` are given, the run sees one of them, which no other run holds; None
    are all that this process may use. Raises filelock's Timeout if another process
    computes the job and `wait` is false, or `stop` is set meanwhile.
    """
    stop = stop or Event()
    # A link stays, and the folder that it leads to is replaced.
    job = job._replace(folder=job.folder.resolve())
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_hidden(job, "lock"))
    with lock.acquire(-1 if wait else 0, cancel_check=stop.is_set):
        with suppress(OSError):  # a kill came between the two renames of `_replace`
            _hidden(job, "old").rename(job.folder)
        done = reuse and finished(job.folder)
        if done and (keep_stale or not Present().stale(Manifest.read(job.folder))):
            return
        _check_replaceable(job)
        with _one_gpu(gpus, stop) as variables:
            _execute(job, environment(threads) | variables, timeout, stop)


def _hidden(job: Job, kind: str) -> Path:
    """Return the hidden "tmp", "old" or "lock" beside a result folder."""
    return job.folder.with_name(f".{job.folder.name}.{kind}")


def _check_replaceable(job: Job) -> None:
    folder = job.folder
    if folder in job.notebook.parents:
        raise ValueError(f"{job.notebook} lies in its result folder; name another")
    ours = any((folder / name).exists() for name in ("manifest.json", "results.json"))
    if not ours and (folder.is_file() or any(folder.glob("*"))):
        raise ValueError(
            f"{folder} holds files that no run has written; name another output folder"
        )
    if source_sha256(job.notebook) != job.source:
        raise ValueError("the notebook changed while the sweep ran; sweep again")


def _execute(
    job: Job, variables: dict[str, str], timeout: float | int | None, stop: Event
) -> None:
    """Run a job in a temporary folder, and rename it to the job's, or to .failed."""
    temporary = _hidden(job, "tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir()
    failed = job.folder.with_name(f"{job.folder.name}.failed")
    manifest = _manifest(job, variables)
    begun = time.monotonic()
    try:
        run_notebook(job, temporary, variables, timeout, stop)
        manifest.seconds = round(time.monotonic() - begun, 3)
        _finish(temporary, manifest)
        _replace(job, manifest)
        shutil.rmtree(failed, ignore_errors=True)
    except Exception as error:
        shutil.rmtree(failed, ignore_errors=True)
        if not stop.is_set():
            temporary.rename(failed)
        reason = f"{job.notebook.stem} failed: {error}\nkept: {named(failed)}"
        raise RunError(reason) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a finished run, with a checksum of every file."""
    if not (folder / "results.json").exists():  # the notebook recorded nothing
        write(folder / "results.json", "{}")
    manifest.device = Record.read(folder).device
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            manifest.files[path.relative_to(folder).as_posix()] = sha256(path)
    manifest.save(folder)


def _replace(job: Job, manifest: Manifest) -> None:
    """Rename the temporary folder; the old result goes when it has taken its place."""
    temporary, old = _hidden(job, "tmp"), _hidden(job, "old")
    written = {"manifest.json", *Manifest.read(job.folder).files, *manifest.files}
    for path in job.folder.rglob("*"):  # notes beside a result stay
        name = path.relative_to(job.folder)
        if path.is_file() and name.as_posix() not in written:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, temporary / name)
    shutil.rmtree(old, ignore_errors=True)
    with suppress(FileNotFoundError):
        job.folder.rename(old)
    temporary.rename(job.folder)
    shutil.rmtree(old, ignore_errors=True)


def run_notebook(
    job: Job,
    folder: Path,
    variables: dict[str, str],
    timeout: float | int | None,
    stop: Event,
) -> None:
    """Execute the notebook in a new process, which ends when its input closes.

    Raises RuntimeError with the last line that the process printed.
    """
    printed = folder / "error.txt"
    end = time.monotonic() + (timeout or float("inf"))
    with (
        printed.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "uqlab.runs.page"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=variables | {FOLDER: str(folder)},
            start_new_session=True,  # Ctrl-C reaches only the runner
            text=True,
        ) as process,
    ):
        print(_arguments(job, folder), file=process.stdin, flush=True)
        while process.poll() is None and time.monotonic() < end:
            if stop.wait(0.05):
                break
        running = process.poll() is None
    if process.returncode:
        lines = printed.read_text("utf-8", "replace").strip().splitlines()
        late = f"stopped, or it took more than {timeout} s (timeout)"
        raise RuntimeError(late if running or not lines else lines[-1][:160])
    printed.unlink()


def _arguments(job: Job, folder: Path) -> str:
    """Return papermill's arguments as a line of JSON."""
    output = folder / job.notebook.name
    arguments = {
        # papermill fills what stands in braces
        "input_path": str(job.notebook).replace("{", "{{").replace("}", "}}"),
        "output_path": str(output).replace("{", "{{").replace("}", "}}"),
        "parameters": job.parameters,
        "cwd": str(job.notebook.parent),
        "kernel_name": "python3",
        "language": "python",
        "progress_bar": False,
        "store_widget_state": False,  # it needs a CDN; explorers have HTML of their own
    }
    return json.dumps(arguments)


def environment(threads: int | None = None) -> dict[str, str]:
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


def _manifest(job: Job, variables: dict[str, str]) -> Manifest:
    """Return what a run depends on, as it is before it starts."""
    present = Present()
    values = {name: v for name, v in job.values.items() if name != "output_dir"}
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
        packages=packages(),
    )


@functools.cache
def packages() -> dict[str, str]:
    """Return the versions of Python and the installed packages."""
    versions = {each.name: each.version for each in metadata.distributions()}
    return {"python": platform.python_version()} | versions


def named(path: Path) -> str:
    """Return a path as a reader wants it: relative if it lies in the current folder."""
    return os.path.relpath(path) if Path.cwd() in path.parents else str(path)


# GPUs ---------------------------------------------------------------------------------


def _visible_gpus() -> list[str]:
    """Return the numbers of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and shutil.which("nvidia-smi"):
        listed = subprocess.check_output(["nvidia-smi", "-L"]).splitlines()
        visible = ",".join(map(str, range(len(listed))))
    return visible.split(",") if visible else []


@contextmanager
def _one_gpu(gpus: Sequence[str] | None, stop: Event) -> Iterator[dict[str, str]]:
    """Hold one of the GPUs, or of all; yield the variable that shows it alone."""
    numbers = _visible_gpus() if gpus is None else gpus
    place = Path(tempfile.gettempdir(), f"uqlab-gpus-{getpass.getuser()}")
    place.mkdir(exist_ok=True)
    while numbers and not stop.wait(0.1):
        for number in numbers:
            with suppress(Timeout), FileLock(place / number).acquire(0):
                yield {"CUDA_VISIBLE_DEVICES": number}
                return
    yield {}


# Many runs ----------------------------------------------------------------------------


def run_all(
    jobs: list[Job],
    *,
    at_a_time: int = 1,
    cluster: str | None = None,
    resources: Mapping[str, float | int] | None = None,
    gpus: Sequence[str] = (),
    quiet: bool = False,
    **options: Any,
) -> dict[Path, Result]:
    """Compute jobs here or on a cluster; return how each ended, by its folder.

    Jobs that another process is computing are waited for at the end. On a cluster a run
    that needs a GPU, by `resources`, has one of its worker's. `options` are keywords of
    `compute`.
    """
    from tqdm import tqdm

    results = {}
    pool = _cluster(cluster, resources) if cluster else _here(at_a_time, gpus)
    bar = tqdm(total=len(jobs), disable=quiet or None, leave=False)
    try:
        with bar, pool as (executor, more):
            for wait in (False, True):
                work = functools.partial(attempt, wait=wait, **options, **more)
                todo = [job for job in jobs if job.folder not in results]
                pending = {executor.submit(work, job): job for job in todo}
                for future in futures.as_completed(pending):
                    result = _result(future, pending[future])
                    if result.status != "busy":
                        results[result.folder] = result
                        bar.update()
                        if result.reason or not quiet:
                            bar.write(result.line)
    except KeyboardInterrupt:
        click.echo(f"stopped; {len(results)} of {len(jobs)} runs are done", err=True)
        raise
    return results


def _result(future: futures.Future, job: Job) -> Result:
    """Return how a job ended, also where its worker died or Dask gave it up."""
    try:
        return future.result()
    except Exception as error:
        return Result(job, "failed", reason=f"its worker died: {error!r}"[:160])


def attempt(job: Job, wait: bool, **options: Any) -> Result:
    """Compute a job in the process that the executor chose, and never raise."""
    begun = time.monotonic()
    try:
        compute(job, wait=wait, **options)
    except Timeout:
        return Result(job, "busy")
    except Exception as error:
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        return Result(job, "failed", reason=f"{kind}{error}")
    return Result(job, "ok", time.monotonic() - begun)


@contextmanager
def _here(jobs: int, gpus: Sequence[str]) -> Iterator[tuple[futures.Executor, Values]]:
    """Yield an executor of this machine, and keywords for `compute`.

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

    with Client(address, timeout=30, set_as_default=False) as client:
        gpus = None if (resources or {}).get("GPU", 0) >= 1 else ()
        yield client.get_executor(pure=False, resources=resources), {"gpus": gpus}


def default_jobs(count: int) -> int:
    """Return how many of `count` notebooks run at a time: one beside a GPU."""
    from joblib import cpu_count

    return 1 if shutil.which("nvidia-smi") else min(cpu_count(), count)
