"""The kernel of one run: papermill executes a notebook in it, and kills it at a deadline or when the run is stopped."""

import asyncio
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

from uqlab.core.files import TRAININGS, TUNE
from uqlab.core.recording import FOLDER
from uqlab.runs.parameters import cells

WATCH = "__import__('uqlab.core.recording', fromlist=['*']).watch_imports()"  # a kernel's first line; leaves no name


def run_cells(
    notebook: Path,
    output: Path,
    parameters: dict[str, Any],
    environment: dict[str, str],
    deadline: float,
    stop: Event,
    on_cell: Callable[[int, int], None] | None,
) -> None:
    """Execute a notebook in a new kernel and write it to `output`; `execution.execute` explains the arguments.

    Papermill works in a thread of its own: it leaves an event loop open there, and cannot run in a notebook's own loop.
    """
    if stop.is_set():
        raise RuntimeError("stopped")
    done, total = 0, bool(parameters) + sum(map(is_code, cells(notebook)))

    def report(more: int = 0) -> None:
        nonlocal done
        done += more
        if on_cell:
            on_cell(done, total)

    def work() -> None:
        execute_notebook = _papermill()
        for attempt in (1, 2):
            try:
                execute_notebook(
                    *(
                        str(path).replace("{", "{{").replace("}", "}}")
                        for path in (notebook, output)
                    ),  # formats
                    parameters=parameters,
                    kernel_name="python3",
                    language="python",
                    progress_bar=False,
                    kernel_manager_class=_kernel_manager(
                        output.parent, environment, deadline, stop, report
                    ),
                    resources={
                        "metadata": {"path": str(notebook.parent)}
                    },  # papermill's cwd is that of the process
                    on_cell_executed=lambda **_: report(1),
                    store_widget_state=False,  # it needs a kernel or a CDN; explorers have HTML of their own
                )
                return
            except Exception as error:  # about one parallel kernel start in 270 fails: again, if no cell has run
                if (
                    attempt == 2
                    or isinstance(error, OSError)
                    or started_cells(output)
                    or stop.is_set()
                ):
                    raise  # a full disk leaves no readable notebook that would tell which cells have run

    with futures.ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(work).result()
        except KeyboardInterrupt:
            stop.set()
            raise
        finally:
            pool.submit(lambda: asyncio.get_event_loop().close())


def _papermill() -> Callable[..., Any]:
    """Import papermill without the grammar of IRIs, which is never used here and takes two of three seconds."""
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    try:
        from papermill import execute_notebook
    finally:
        if sys.modules.get("rfc3987_syntax", ...) is None:
            sys.modules.pop("rfc3987_syntax", None)
    return execute_notebook


def _kernel_manager(
    folder: Path,
    environment: dict[str, str],
    deadline: float,
    stop: Event,
    tick: Callable[[], None],
) -> type:
    """Make the class of managers that start this very interpreter, whatever kernels are installed.

    A kernel's connection file lies in the folder, and goes with it if this process is killed.
    """
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    # --log-level: the kernel says nothing about loopback TCP and about being shut down
    own = get_kernel_dict(
        ["--log-level=CRITICAL", f"--IPKernelApp.exec_lines={WATCH}"]
    )  # argv: sys.executable
    escaped = {
        name: value.replace("$", "$$") for name, value in environment.items()
    }  # values are templates
    spec = KernelSpec(
        argv=own["argv"], metadata=own["metadata"], language="python", env=escaped
    )

    class Manager(AsyncKernelManager):
        def __init__(self, **options: Any):
            super().__init__(
                cache_ports=False,
                **options | {"connection_file": str(folder / ".kernel.json")},
            )
            ports = _free_ports(5)
            (
                self.shell_port,
                self.iopub_port,
                self.stdin_port,
                self.hb_port,
                self.control_port,
            ) = ports

        @property
        def kernel_spec(self) -> KernelSpec:
            return spec

        async def _async_is_alive(self) -> bool:  # called every second
            tick()
            if (stop.is_set() or time.monotonic() > deadline) and self.has_kernel:
                await self._async_signal_kernel(9)
            return await super()._async_is_alive()

    return Manager


def _free_ports(count: int) -> list[int]:
    """Choose free ports below those that the system gives to outgoing connections.

    A port of the system's own range may go to another process first: one parallel kernel in 270 could then not start,
    which takes a minute to notice.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(22_000)
        with suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


def environment(threads: int | None, folder: Path) -> dict[str, str]:
    """Return a kernel's variables: the result folder and, if the user has not set them, threads and kept trainings.

    Threads sleep while they wait: beside a busy neighbour, spinning ones were 10 to 50 times slower. Nothing is chosen
    by its time, so that a run that is repeated gives equal digits.
    """
    from joblib import cpu_count
    from pooch import os_cache

    count = str(threads or cpu_count())
    wanted = {
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
    }
    wanted |= {TRAININGS: str(os_cache("uqlab") / "trainings"), TUNE: "0"}
    fixed = {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        FOLDER: str(folder),
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | fixed


def is_code(cell: dict[str, Any]) -> bool:
    """Whether a cell is executed: code, and not blank."""
    return cell["cell_type"] == "code" and bool("".join(cell["source"]).strip())


def started_cells(output: Path) -> list[dict[str, Any]]:
    """Return the code cells of a partly executed notebook that were started; the last is where it stopped."""
    with suppress(OSError, ValueError):
        return [
            c
            for c in cells(output)
            if is_code(c) and c["metadata"].get("papermill", {}).get("start_time")
        ]
    return []
