"""Notebooks run headless: parameters checked first, numbers recorded, one self-describing folder per run.

In a notebook: `begin`, `record`. On the command line: `uqlab run`, `uqlab gallery`. From code: `run_one`.
Importing this module is cheap; papermill is imported where a notebook is executed.
"""

import asyncio
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from uqlab import __version__
from uqlab.parameters import all_notebooks, cells, defaults, find, from_here, overrides, profiles, unknown
from uqlab.recording import FOLDER, begin, describe_figure, output_dir, processor, read_json, record, write

__all__ = ["RunError", "begin", "describe_figure", "main", "output_dir", "record", "run_one"]

logging.getLogger("papermill").addHandler(logging.NullHandler())  # what it would say is in our own report
_stop = threading.Event()  # set on Ctrl-C: every kernel that this process started is killed


class RunError(RuntimeError):
    """A notebook failed; the message names the cell, its source, the error and where the executed part is kept."""


def run_one(
    notebook: str | os.PathLike,
    parameters: dict[str, Any] | None = None,
    *,
    profile: str = "quick",
    folder: str | os.PathLike | None = None,
    threads: int | None = None,
    timeout: float | None = None,
    on_cell: Callable[[int, int], None] | None = None,
) -> Path:
    """Execute one notebook by papermill and return its result folder, which appears whole or not at all.

    notebook: a path, a stem or a unique prefix of one. parameters: on top of those of the profile.
    folder: default figures/<profile>/<notebook>; an earlier result there is replaced only by a success.
    threads: for the kernel, default all cores. timeout: seconds for the whole notebook.
    on_cell: called with the numbers of finished and of all code cells.
    Raises ValueError before anything runs (notebook, profile, parameters), RunError when the notebook fails: what was
    executed is then kept in <folder>.failed.
    """
    notebook = find(notebook)
    values = overrides(notebook, profile, parameters)
    known = defaults(notebook)
    folder = Path(folder or Path("figures", profile, notebook.stem)).absolute()
    if folder in notebook.parents:
        raise ValueError(f"{notebook} lies in its own result folder; choose another output folder")
    failed = folder.with_name(f"{folder.name}.failed")
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    output = temporary / f"{notebook.stem}.ipynb"
    injected = values | ({"output_dir": str(temporary)} if "output_dir" in known else {})
    started, clock = datetime.now(UTC), time.monotonic()
    deadline = clock + (timeout or math.inf)
    environment = _environment(threads, temporary)
    manifest = {
        "notebook": os.path.relpath(notebook),
        "notebook_sha256": _sha256(notebook),
        "profile": profile,
        "parameters": {name: value for name, value in (known | values).items() if name != "output_dir"},
        "seed": (known | values).get("seed"),
        "started": started.isoformat(timespec="seconds"),
        "threads": int(environment["OMP_NUM_THREADS"].split(",")[0]),
        "uqlab": __version__,
        "git": _git(notebook.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
    }
    temporary.mkdir(parents=True)
    try:
        _execute(notebook, output, injected, environment, deadline, on_cell or (lambda done, total: None))
        _readdress(output, temporary, folder)
        if not (temporary / "results.json").exists():
            write(temporary / "results.json", json.dumps({"numbers": {}, "tables": {}, "figures": {}}))
        manifest["device"] = read_json(temporary / "results.json").get("device", processor())
        manifest["seconds"] = round(time.monotonic() - clock, 3)
        paths = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest["files"] = {path.relative_to(temporary).as_posix(): _sha256(path) for path in paths}
        write(temporary / "manifest.json", json.dumps(manifest, indent=1))
        _move(temporary, folder)
        shutil.rmtree(failed, ignore_errors=True)
    except Exception as error:
        if _stop.is_set():
            raise KeyboardInterrupt from error
        late = f"it took more than {timeout:g} s (timeout)" if time.monotonic() > deadline else None
        report = _report(notebook.stem, output, late or f"{type(error).__name__}: {error}")
        with suppress(OSError):
            _readdress(output, temporary, failed)
        _move(temporary, failed)
        with suppress(OSError):
            write(failed / "error.txt", report)
        raise RunError(f"{report}\nkept: {os.path.relpath(failed / output.name)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _execute(
    notebook: Path,
    output: Path,
    parameters: dict[str, Any],
    environment: dict[str, str],
    deadline: float,
    on_cell: Callable[[int, int], None],
) -> None:
    from papermill import execute_notebook

    total = bool(parameters) + sum(bool(_is_code(cell)) for cell in cells(notebook))
    done = itertools.count(1)
    for attempt in (1, 2):
        on_cell(0, total)
        try:
            execute_notebook(
                *(str(path).replace("{", "{{").replace("}", "}}") for path in (notebook, output)),  # format strings
                parameters=parameters,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                kernel_manager_class=_kernel_manager(environment, deadline),
                resources={"metadata": {"path": str(notebook.parent)}},  # not papermill's cwd: it is the process's
                on_cell_executed=lambda **_: on_cell(next(done), total),
            )
            return
        except Exception:  # one parallel kernel start in some 270 fails: again, but only if no cell has run
            if attempt == 2 or _started(output) or _stop.is_set():
                raise


def _kernel_manager(environment: dict[str, str], deadline: float) -> type:
    """Make the class of managers that start this very interpreter, whatever kernels are installed."""
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    own = get_kernel_dict(["--log-level=CRITICAL"])  # sys.executable; silent on loopback TCP and being shut down
    escaped = {name: value.replace("$", "$$") for name, value in environment.items()}  # values are templates
    spec = KernelSpec(argv=own["argv"], metadata=own["metadata"], language="python", env=escaped)

    class Manager(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            return spec

        async def _async_is_alive(self) -> bool:  # asked every second
            if (_stop.is_set() or time.monotonic() > deadline) and self.has_kernel:
                await self._async_signal_kernel(9)
            return await super()._async_is_alive()

    return Manager


def _environment(threads: int | None, folder: Path) -> dict[str, str]:
    """Return the variables of a kernel: threads that sleep while they wait, as many as given, unless the user set them.

    Spinning threads beside a busy neighbour were measured 10 to 50 times slower.
    """
    from joblib import cpu_count

    count = str(threads or cpu_count())
    wanted = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    fixed = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", FOLDER: str(folder)}
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | fixed


def _is_code(cell: dict[str, Any]) -> bool:
    return cell["cell_type"] == "code" and bool("".join(cell["source"]).strip())


def _started(output: Path) -> list[dict[str, Any]]:
    """Return the code cells of a partly executed notebook that were started; the last is where it stopped."""
    with suppress(OSError, ValueError):
        return [c for c in cells(output) if _is_code(c) and c["metadata"].get("papermill", {}).get("start_time")]
    return []


def _report(name: str, output: Path, reason: str) -> str:
    """Say in plain text which cell failed and why; the reason counts where the cell itself raised nothing."""
    started = _started(output)
    if not started:
        return f"{name} failed before its first cell: {reason}"
    source = "".join(started[-1]["source"]).replace("\n", "\n    ")
    raised = [item for item in started[-1]["outputs"] if item["output_type"] == "error"]
    if raised:
        reason = f"{raised[-1]['ename']}: {raised[-1]['evalue']}"
        trace = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", "\n".join(raised[-1]["traceback"])).splitlines()
        trace = [line for line in trace if not re.match(r"-{9}|.*Traceback \(most recent", line)]
        end = len(trace) - len(reason.splitlines())  # the trace ends with the reason
        reason += "".join(f"\n    {line}" for line in trace[max(0, end - 12) : end]).rstrip()
    return f"{name} failed in cell In [{len(started)}]:\n    {source}\n{reason}"


def _readdress(notebook: Path, old: Path, new: Path) -> None:
    """Let an executed notebook name the folder where it will lie, not the temporary one."""
    text = notebook.read_text(encoding="utf-8")
    write(notebook, text.replace(json.dumps(str(old))[1:-1], json.dumps(str(new))[1:-1]))


def _move(folder: Path, target: Path) -> None:
    """Rename a folder to its final name; what lay there goes only when the new one can take its place."""
    old = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:8]}")
    with suppress(FileNotFoundError):
        target.rename(old)
    folder.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout that holds a folder and whether tracked files differ from it."""

    def ask(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def _packages() -> dict[str, str]:
    return dict(sorted((str(package.metadata["Name"]), package.version) for package in metadata.distributions()))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Run the notebooks headless and look at what they found."""


@main.command()
@click.argument("notebooks", nargs=-1, metavar="[NOTEBOOK]...")
@click.option("--profile", default="quick", show_default=True, help="Parameter set of notebooks/profiles.yaml.")
@click.option("-p", "--parameter", "given", type=(str, str), multiple=True, metavar="NAME VALUE", help="Repeatable.")
@click.option("--output-dir", default="figures", show_default=True, type=click.Path(path_type=Path))
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Notebooks at a time.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds for each notebook.")
@click.option("--quiet", is_flag=True, help="No progress: failures and the summary only.")
def run(notebooks, profile, given, output_dir, jobs, timeout, quiet) -> None:
    """Execute notebooks into OUTPUT_DIR/PROFILE/NOTEBOOK and build the gallery.

    NOTEBOOK is a path, a name or the start of one (03); default all. Exit code 1 if any fails.
    """
    from uqlab import gallery

    try:
        plan = _plan(notebooks, profile, dict(given))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    root = output_dir / profile
    try:
        outcomes = _run_all(plan, root, profile, jobs, timeout, quiet)
    except KeyboardInterrupt:
        click.echo("stopped; results finished before are kept", err=True)
        raise SystemExit(130) from None
    width = max(len(path.stem) for path in plan)
    click.echo(f"\n{'notebook':{width}}  status  seconds  numbers  figures")
    for path, (seconds, succeeded) in outcomes.items():
        status = click.style("ok    ", fg="green") if succeeded else click.style("FAILED", fg="red")
        found = read_json(root / path.stem / "results.json") if succeeded else {}
        counts = f"{len(found.get('numbers', {})):7}  {len(found.get('figures', {})):7}" if succeeded else ""
        click.echo(f"{path.stem:{width}}  {status}  {seconds:7.1f}  {counts}".rstrip())
    click.echo(f"\nresults: {root}\nlook at: {gallery.build(root)}")
    if not all(succeeded for _, succeeded in outcomes.values()):
        raise SystemExit(1)


def _plan(names: tuple[str, ...], profile: str, given: dict[str, str]) -> dict[Path, dict[str, Any]]:
    """Return the parameters given to each chosen notebook, all checked; raises ValueError before anything runs."""
    chosen = list(dict.fromkeys(map(find, names) if names else all_notebooks()))
    if len({path.stem for path in chosen}) < len(chosen):
        raise ValueError(f"two notebooks of one name would share a folder: {', '.join(map(str, chosen))}")
    known = {path: defaults(path) for path in chosen}
    for name in given:
        lacking = [path.stem for path in chosen if name not in known[path]]
        if len(lacking) == len(chosen):
            raise ValueError(unknown(name, dict.fromkeys(n for k in known.values() for n in k), " and ".join(lacking)))
        if lacking:
            click.echo(f"note: no parameter {name!r} in {', '.join(lacking)}", err=True)
    given = {name: from_here(value) for name, value in given.items()}
    plan = {path: {name: value for name, value in given.items() if name in known[path]} for path in chosen}
    for path, values in plan.items():
        overrides(path, profile, values)
        if profile != "quick" and path.stem not in profiles(path)[profile]:
            click.echo(f"note: profile {profile!r} has no entry for {path.stem}: its defaults", err=True)
    return plan


def _run_all(
    plan: dict[Path, dict[str, Any]], root: Path, profile: str, jobs: int, timeout: float | None, quiet: bool
) -> dict[Path, tuple[float, bool]]:
    """Run the notebooks, some at a time, and return for each the seconds taken and whether it succeeded."""
    from joblib import cpu_count
    from tqdm import tqdm

    threads = max(1, cpu_count() // jobs)
    labels = {path: f"[{i}/{len(plan)}] {path.stem}" for i, path in enumerate(plan, 1)}
    style = {
        "bar_format": "{desc}  {bar:32}  cell {n_fmt}/{total_fmt}  {elapsed}",
        "leave": False,
        "dynamic_ncols": True,
        "disable": True if quiet else None,  # None: only on a terminal
    }
    bars: set[tqdm] = set()

    def attempt(path: Path) -> tuple[float, Exception | None]:
        clock = time.monotonic()
        with tqdm(desc=labels[path].ljust(max(map(len, labels.values()))), total=1, **style) as bar:
            bars.add(bar)

            def on_cell(done: int, total: int) -> None:
                bar.n, bar.total = done, total
                bar.refresh()

            error = None
            try:
                folder = root / path.stem
                options = {"profile": profile, "threads": threads, "timeout": timeout, "on_cell": on_cell}
                run_one(path, plan[path], folder=folder, **options)
            except Exception as caught:  # the others still run
                error = caught
            with suppress(RuntimeError):
                asyncio.get_event_loop().close()  # papermill leaves one open in each thread
            bars.discard(bar)
        return time.monotonic() - clock, error

    outcomes = {}
    _stop.clear()
    with futures.ThreadPoolExecutor(jobs) as pool:
        pending = {pool.submit(attempt, path): path for path in plan}
        try:
            while pending:
                for future in futures.wait(pending, 0.5, futures.FIRST_COMPLETED).done:
                    path = pending.pop(future)
                    seconds, error = future.result()
                    outcomes[path] = seconds, error is None
                    if error or not quiet:
                        status = click.style("FAILED", fg="red") if error else click.style("ok", fg="green")
                        with tqdm.external_write_mode():
                            click.echo(f"{labels[path]}  {status}  {seconds:.1f} s" + (f"\n{error}\n" if error else ""))
                for bar in tuple(bars):
                    bar.refresh()  # the clock goes on during a long cell
        except KeyboardInterrupt:
            _stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return {path: outcomes[path] for path in plan}


@main.command("gallery")
@click.option("--output-dir", default="figures", show_default=True, type=click.Path(path_type=Path))
@click.option("--profile", default="quick", show_default=True)
def show(output_dir: Path, profile: str) -> None:
    """Write OUTPUT_DIR/PROFILE/index.html: every figure beside its parameters and numbers."""
    from uqlab import gallery

    if not (output_dir / profile).is_dir():
        raise click.UsageError(f"no runs in {output_dir / profile}; first: uqlab run --profile {profile}")
    click.echo(gallery.build(output_dir / profile))


if __name__ == "__main__":
    main()
