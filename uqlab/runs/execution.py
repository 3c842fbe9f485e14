"""One notebook executed by papermill in a kernel of its own, into a result folder that appears whole or not at all."""

import functools
import itertools
import json
import logging
import math
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from uqlab import __version__
from uqlab.core.files import read_json, sha256, write
from uqlab.core.recording import FOLDER, processor
from uqlab.runs.parameters import cells, defaults, find, overrides, source_sha256

logging.getLogger("papermill").addHandler(logging.NullHandler())  # what it would say is in our own report
_stop = threading.Event()  # set on Ctrl-C: every kernel that this process started is killed
_running: set[Path] = set()  # the temporary folders of runs in progress in this process


class RunError(RuntimeError):
    """A notebook failed; the message names the cell, its source, the error and where the executed part is kept.

    reason: the same in one line.
    """

    def __init__(self, message: str, reason: str):
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.args[0]


def run_one(
    notebook: str | os.PathLike,
    parameters: dict[str, Any] | None = None,
    *,
    profile: str = "quick",
    folder: str | os.PathLike | None = None,
    threads: int | None = None,
    timeout: float | int | None = None,
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
        "notebook": named(notebook),
        "notebook_sha256": sha256(notebook),
        "source_sha256": source_sha256(notebook),
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
    _running.add(temporary)
    try:
        _execute(notebook, output, injected, environment, deadline, on_cell or (lambda done, total: None))
        _readdress(output, temporary, folder)
        if not (temporary / "results.json").exists():
            write(temporary / "results.json", json.dumps({"numbers": {}, "tables": {}, "figures": {}}))
        manifest["device"] = read_json(temporary / "results.json").get("device", processor())
        manifest["seconds"] = round(time.monotonic() - clock, 3)
        paths = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest["files"] = {path.relative_to(temporary).as_posix(): sha256(path) for path in paths}
        write(temporary / "manifest.json", json.dumps(manifest, indent=1))
        _move(temporary, folder)
        shutil.rmtree(failed, ignore_errors=True)
    except Exception as error:
        if _stop.is_set():
            raise KeyboardInterrupt from error
        late = f"it took more than {timeout:g} s (timeout)" if time.monotonic() > deadline else None
        report, reason = _report(notebook.stem, output, late or f"{type(error).__name__}: {error}")
        with suppress(OSError):
            _readdress(output, temporary, failed)
        _move(temporary, failed)
        with suppress(OSError):
            write(failed / "error.txt", report)
        raise RunError(f"{report}\nkept: {named(failed / output.name)}", reason) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _running.discard(temporary)
    return folder


def stop() -> None:
    """Kill every kernel that this process started, and wait until their half-done folders are gone."""
    _stop.set()
    while _running:
        time.sleep(0.05)


def reset() -> None:
    """Let runs start again after `stop`."""
    _stop.clear()


def stopping() -> bool:
    return _stop.is_set()


def named(path: Path) -> str:
    """Return a path as a reader wants it: from the current folder if it lies in it."""
    return os.path.relpath(path) if Path.cwd() in path.parents else str(path)


def _execute(
    notebook: Path,
    output: Path,
    parameters: dict[str, Any],
    environment: dict[str, str],
    deadline: float,
    on_cell: Callable[[int, int], None],
) -> None:
    execute_notebook = _papermill()
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
        except Exception as error:  # one parallel kernel start in some 270 fails: again, but only if no cell has run
            if attempt == 2 or isinstance(error, OSError) or _started(output) or _stop.is_set():
                raise  # a full disk leaves no readable notebook that would tell which cells have run


def _papermill() -> Callable[..., Any]:
    """Import papermill without the grammar of IRIs that jsonschema would compile, two of its three seconds.

    Nothing here has an IRI to check, and jsonschema does without where that package is missing.
    """
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    try:
        from papermill import execute_notebook
    finally:
        if sys.modules.get("rfc3987_syntax", ...) is None:
            sys.modules.pop("rfc3987_syntax", None)
    return execute_notebook


def _kernel_manager(environment: dict[str, str], deadline: float) -> type:
    """Make the class of managers that start this very interpreter, whatever kernels are installed."""
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    own = get_kernel_dict(["--log-level=CRITICAL"])  # sys.executable; silent on loopback TCP and being shut down
    escaped = {name: value.replace("$", "$$") for name, value in environment.items()}  # values are templates
    spec = KernelSpec(argv=own["argv"], metadata=own["metadata"], language="python", env=escaped)

    class Manager(AsyncKernelManager):
        def __init__(self, **options: Any):
            super().__init__(cache_ports=False, **options)
            ports = _free_ports(5)
            self.shell_port, self.iopub_port, self.stdin_port, self.hb_port, self.control_port = ports

        @property
        def kernel_spec(self) -> KernelSpec:
            return spec

        async def _async_is_alive(self) -> bool:  # asked every second
            if (_stop.is_set() or time.monotonic() > deadline) and self.has_kernel:
                await self._async_signal_kernel(9)
            return await super()._async_is_alive()

    return Manager


def _free_ports(count: int) -> list[int]:
    """Choose ports below those of outgoing connections: of kernels among these one in some 270 cannot start, which
    takes a minute to notice, because another process was given one of its ports first.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(22_000)
        with suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


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


def _report(name: str, output: Path, reason: str) -> tuple[str, str]:
    """Say in plain text, and in a line, which cell failed and why; `reason` where the cell itself raised nothing."""
    started = _started(output)
    if not started:
        return f"{name} failed before its first cell: {reason}", first_line(reason)
    source = "".join(started[-1]["source"]).replace("\n", "\n    ")
    line = first_line(reason)
    raised = [item for item in started[-1]["outputs"] if item["output_type"] == "error"]
    if raised:
        reason = f"{raised[-1]['ename']}: {raised[-1]['evalue']}"
        line = first_line(reason)
        trace = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", "\n".join(raised[-1]["traceback"])).splitlines()
        trace = [line for line in trace if not re.match(r"-{9}|.*Traceback \(most recent", line)]
        end = len(trace) - len(reason.splitlines())  # the trace ends with the reason
        reason += "".join(f"\n    {line}" for line in trace[max(0, end - 12) : end]).rstrip()
    return f"{name} failed in cell In [{len(started)}]:\n    {source}\n{reason}", f"In [{len(started)}] {line}"


def first_line(reason: str) -> str:
    """Return the first line of a reason, no longer than a line of a terminal."""
    return next(iter(reason.strip().splitlines()), "no reason given")[:160]


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
