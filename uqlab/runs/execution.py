"""Notebooks executed by papermill, each in a kernel of its own, into result folders that appear whole or not at all."""

import fcntl
import functools
import glob
import json
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any

import click

from uqlab import __version__
from uqlab.core.files import read_json, sha256, write
from uqlab.core.recording import CODE
from uqlab.runs import kernels, plans, workers
from uqlab.runs.identity import Present, sealed
from uqlab.runs.parameters import defaults, find, overrides, source_sha256

logging.getLogger("papermill").addHandler(
    logging.NullHandler()
)  # its messages are in our own report


class RunError(RuntimeError):
    """A notebook failed: the cell, its source, the error and where the executed part is kept; `reason` in one line."""

    def __init__(self, message: str, reason: str):
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.args[0]


def execute(
    notebook: str | os.PathLike,
    parameters: dict[str, Any] | None = None,
    *,
    profile: str = "quick",
    folder: str | os.PathLike | None = None,
    threads: int | None = None,
    timeout: float | int | None = None,
    on_cell: Callable[[int, int], None] | None = None,
    stop: Event | None = None,
) -> Path:
    """Execute one notebook and return its result folder, which appears whole or not at all.

    notebook: a path, a stem or a unique prefix of one. parameters: on top of those of the profile.
    folder: default figures/<profile>/<notebook>; an earlier result there is replaced only by a success.
    threads: default all cores. timeout: seconds for the whole notebook, over 0. stop: ends the run when it is set.
    on_cell: called every second with the numbers of finished and of all code cells.
    Raises ValueError before anything runs (notebook, profile, parameters, timeout), RunError when the notebook
    fails or is stopped; what a failed notebook executed is kept in <folder>.failed.
    """
    notebook, stop = find(notebook), stop or Event()
    values = overrides(notebook, profile, parameters)
    known = defaults(notebook)
    folder = Path(folder or Path("figures", profile, notebook.stem)).absolute()
    if folder in notebook.parents:
        raise ValueError(
            f"{notebook} lies in its own result folder; choose another output folder"
        )
    failed = folder.with_name(f"{folder.name}.failed")
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    output = temporary / f"{notebook.stem}.ipynb"
    injected = values | (
        {"output_dir": str(temporary)} if "output_dir" in known else {}
    )
    started, clock = datetime.now(UTC), time.monotonic()
    deadline = until(timeout)
    environment = kernels.environment(threads, temporary)
    manifest = {
        "notebook": named(notebook),
        "notebook_sha256": sha256(notebook),
        "source_sha256": source_sha256(notebook),
        "profile": profile,
        "parameters": {
            name: value
            for name, value in (known | values).items()
            if name != "output_dir"
        },
        "data": Present().data(known | values, notebook.parent),
        "seed": (known | values).get("seed"),
        "started": started.isoformat(timespec="seconds"),
        "threads": int(environment["OMP_NUM_THREADS"].split(",")[0]),
        "uqlab": __version__,
        "git": _git(notebook.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(),
    }
    temporary.mkdir(parents=True)
    living = _hold(temporary)
    try:
        kernels.run_cells(
            notebook, output, injected, environment, deadline, stop, on_cell
        )
        manifest["code"] = read_json(temporary / CODE) or None
        (temporary / CODE).unlink(missing_ok=True)
        _readdress(output, temporary, folder)
        manifest["device"] = read_json(temporary / "results.json").get("device")
        manifest["seconds"] = round(time.monotonic() - clock, 3)
        paths = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest["files"] = {
            path.relative_to(temporary).as_posix(): sha256(path) for path in paths
        }
        write(temporary / "manifest.json", json.dumps(sealed(manifest), indent=1))
        _move(temporary, folder)
        shutil.rmtree(failed, ignore_errors=True)
    except Exception as error:
        if stop.is_set():
            raise RunError("stopped", "stopped") from error
        late = (
            f"it took more than {timeout:g} s (timeout)"
            if time.monotonic() > deadline
            else None
        )
        report, reason = _report(
            notebook.stem, output, late or f"{type(error).__name__}: {error}"
        )
        with suppress(OSError):
            write(temporary / "error.txt", report)
            _readdress(output, temporary, failed)
        _move(temporary, failed)
        raise RunError(
            f"{report}\nkept: {named(failed / output.name)}", reason
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if living is not None:
            os.close(living)
    return folder


def at_a_time(jobs: int | None, count: int) -> int:
    """Return how many of `count` notebooks run at a time: as many as cores, or one beside a GPU, which they share."""
    from joblib import cpu_count

    return jobs or (1 if shutil.which("nvidia-smi") else min(cpu_count(), count))


def until(timeout: float | int | None) -> float:
    """When a run ends that begins now, by `time.monotonic`; raises ValueError unless `timeout` is over 0, or None."""
    if timeout is None:
        return math.inf
    if not (
        isinstance(timeout, int | float) and timeout > 0
    ):  # not a number (nan) is not over 0
        raise ValueError(
            f"timeout must be a number of seconds over 0, or None for no limit, got {timeout!r}"
        )
    return time.monotonic() + timeout


def execute_all(
    plan: dict[Path, dict[str, Any]],
    root: Path,
    profile: str,
    jobs: int | None,
    timeout: float | None,
    quiet: bool,
) -> dict[Path, tuple[float, bool]]:
    """Execute notebooks (`plan`: notebook -> its parameters), `jobs` at a time, the longest first, into `root`.

    jobs: None as `at_a_time` chooses.
    Say on the terminal how each ended; return the seconds of each and whether it succeeded.
    """
    from tqdm import tqdm

    until(timeout)  # refused before anything runs
    jobs = at_a_time(jobs, len(plan))
    shape = {
        "bar_format": "{desc}  {bar:32}  {elapsed}",
        "dynamic_ncols": True,
        "leave": False,
    }
    bar = tqdm(total=len(plan), disable=quiet or None, **shape)  # None: on a terminal
    outcomes, running, begun, stop = {}, {}, {}, Event()
    likely = {
        path: plans.likely_seconds(path, root / path.stem, profile) for path in plan
    }

    def left() -> str:
        """How long the rest takes, if the machine goes on as slowly or fast as before."""
        done = [
            path
            for path, (_, succeeded) in outcomes.copy().items()
            if succeeded and likely[path] < math.inf
        ]
        ended = [(outcomes[path][0], likely[path]) for path in done]
        pace = (
            sum(took for took, _ in ended) / sum(said for _, said in ended)
            if ended
            else 1.0
        )
        rest = {path: pace * likely[path] for path in plan if path not in outcomes}
        now = time.monotonic()
        rest |= {
            path: max(0.0, rest[path] - (now - since))
            for path, since in begun.copy().items()
            if path in rest
        }
        return (
            plans.text(plans.together(rest.values(), jobs), "; about ", " left")
            if rest
            else ""
        )

    def attempt(path: Path, **options: Any) -> Exception | None:
        begun[path] = clock = time.monotonic()
        name, error = path.stem.partition("_")[0], None

        def on_cell(done: int, total: int) -> None:
            running[name] = done, total
            now = dict(running)
            bar.n = len(outcomes) + sum(done / total for done, total in now.values())
            where = ", ".join(
                f"{name} cell {done}/{total}" for name, (done, total) in now.items()
            )
            bar.set_description_str(
                f"{len(outcomes)} of {len(plan)} done; {where}{left()}"
            )

        try:
            restore(root / path.stem)
            clear(root / path.stem)
            clear(root / f"{path.stem}.failed")
            execute(
                path,
                plan[path],
                profile=profile,
                folder=root / path.stem,
                on_cell=on_cell,
                **options,
            )
        except Exception as failure:  # the others still run
            error = failure
        running.pop(name, None)
        outcomes[path] = time.monotonic() - clock, error is None
        return error

    try:
        with bar, workers.connected(jobs, None, None, stop) as (threads, pool):
            options = {"threads": threads, "timeout": timeout, "stop": stop}
            order = sorted(
                plan, key=lambda path: -plans.expected_seconds(path, root / path.stem)
            )
            pending = {pool.submit(attempt, path, **options): path for path in order}
            for number, future in enumerate(futures.as_completed(pending), 1):
                path, error = pending[future], future.result()
                if error or not quiet:
                    status = (
                        click.style("FAILED", fg="red")
                        if error
                        else click.style("ok", fg="green")
                    )
                    line = f"[{number}/{len(plan)}] {path.stem}  {status}  {outcomes[path][0]:.1f} s{left()}"
                    with tqdm.external_write_mode():
                        click.echo(line + (f"\n{error}\n" if error else ""))
    except KeyboardInterrupt:
        click.echo("stopped; results finished before are kept", err=True)
        raise
    return {path: outcomes[path] for path in plan}


def named(path: Path) -> str:
    """Return a path as a reader wants it: relative if it lies in the current folder."""
    return os.path.relpath(path) if Path.cwd() in path.parents else str(path)


@functools.cache
def packages() -> dict[str, str]:
    """Return the installed packages and their versions."""
    return dict(
        sorted(
            (str(package.metadata["Name"]), package.version)
            for package in metadata.distributions()
        )
    )


def _report(name: str, output: Path, reason: str) -> tuple[str, str]:
    """Say in plain text, and in a line, which cell failed and why; `reason` where the cell itself raised nothing."""
    started = kernels.started_cells(output)
    if not started:
        return f"{name} failed before its first cell: {reason}", workers.first_line(
            reason
        )
    source = "".join(started[-1]["source"]).replace("\n", "\n    ")
    raised = [item for item in started[-1]["outputs"] if item["output_type"] == "error"]
    if raised:
        reason = f"{raised[-1]['ename']}: {raised[-1]['evalue']}"
        end = len(reason.splitlines())  # the trace ends with the reason
        trace = click.unstyle("\n".join(raised[-1]["traceback"])).splitlines()
        trace = [
            line
            for line in trace
            if not re.match(r"-{9}|.*Traceback \(most recent", line)
        ]
        reason += "".join(f"\n    {line}" for line in trace[-12 - end : -end]).rstrip()
    where = f"{name} failed in cell In [{len(started)}]"
    return (
        f"{where}:\n    {source}\n{reason}",
        f"In [{len(started)}] {workers.first_line(reason)}",
    )


def _readdress(notebook: Path, old: Path, new: Path) -> None:
    """Let an executed notebook name the folder where it will lie instead of the temporary one."""
    text = notebook.read_text(encoding="utf-8")
    write(
        notebook, text.replace(json.dumps(str(old))[1:-1], json.dumps(str(new))[1:-1])
    )


def _move(folder: Path, target: Path) -> None:
    """Rename a folder to its final name; what lay there is removed only when the new one can take its place."""
    old = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:8]}")
    with suppress(FileNotFoundError):
        target.rename(old)
    folder.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def restore(folder: Path) -> None:
    """Undo what a process left that was killed while it moved a result to `folder`: the new one lies there, or the old.

    A manifest is written last, so where there is one the new result is whole.
    """
    old = leftovers(folder, "old")
    if old and not folder.exists():
        whole = [
            path for path in leftovers(folder) if (path / "manifest.json").is_file()
        ]
        (whole or old)[0].rename(folder)
    for path in leftovers(folder, "old") if folder.exists() else ():
        shutil.rmtree(path, ignore_errors=True)


def leftovers(folder: Path, kind: str = "tmp") -> list[Path]:
    """Return what lies beside a result folder: half-done ones, also of a process that lives, or old ones."""
    return list(folder.parent.glob(f".{glob.escape(folder.name)}.{kind}-*"))


def clear(folder: Path) -> None:
    """Remove the half-done folders beside a result folder whose processes are dead, with the files of their kernels."""
    for path in leftovers(folder):
        if (living := _hold(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(living)


def _hold(folder: Path) -> int | None:
    """Lock a half-done folder until this process closes it or dies; None where another holds it, or nobody can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout that holds a folder, and whether tracked files differ from it."""

    def ask(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {
            "commit": ask("rev-parse", "HEAD"),
            "dirty": bool(ask("status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.CalledProcessError):
        return None
