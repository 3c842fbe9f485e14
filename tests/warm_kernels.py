"""Kernels that are forked from a process which has imported torch and the like: seconds less for every page."""

import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["warm_imports"])
SERVER, ADDRESS = forkserver._forkserver, "UQLAB_TESTS_FORK_SERVER"
LAUNCH = "jupyter_client.provisioning.local_provisioner.launch_kernel"
SAVE = "papermill.engines.NotebookExecutionManager.save"
SKETCHED = (
    "UQLAB_TESTS_SKETCHED"  # in a kernel's environment: no test looks at its figures
)


def follow() -> None:
    """End with the process that asked for this one, even if it is killed: with it goes the other end of a pipe."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def sketch() -> None:
    """Paint every figure of this kernel once, as PNG and as its cell left it: layout and PDF take more than that."""
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure

    Figure.get_layout_engine = lambda self: None
    Figure.get_tightbbox = lambda self, *_, **__: self.bbox_inches
    FigureCanvasPdf.print_pdf = lambda self, path, **_: Path(path).write_bytes(b"%PDF-")


def save(manager: Any, **_: Any) -> None:
    """Write a page when it is done or has failed, instead of twice for each of its cells."""
    if manager.end_time:
        from papermill.iorw import write_ipynb  # as late as uqlab/runs/kernels.py

        write_ipynb(manager.nb, manager.output_path)


def main(command: list[str], folder: str, environment: dict[str, str]) -> None:
    """Become the kernel that `python -m ipykernel_launcher ...` starts, in the process that was forked."""
    _, _, module, *sys.argv[1:] = command
    os.setsid()
    threading.Thread(target=follow, daemon=True).start()
    os.chdir(folder)
    os.environ.clear()
    if environment.get(SKETCHED):
        sketch()
    os.environ.update(
        environment | {SKETCHED: "1"}
    )  # and so for the runs of a sweep on a page
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    # What this kernel starts, as page 12 does, is forked too, by the server that forked it and is not its child.
    SERVER.ensure_running = lambda: None
    with mock.patch(LAUNCH, Forked):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


class Forked:
    """As much of subprocess.Popen as a kernel's manager asks for."""

    stdin = stdout = stderr = None

    def __init__(
        self, command: list[str], *, env: dict[str, str], cwd: str | None = None, **_
    ):
        self.process = FORKS.Process(
            target=main, args=(command, cwd or os.getcwd(), env)
        )
        self.process.start()
        self.pid = self.process.pid
        while (
            os.getpgid(self.pid) != self.pid
        ):  # signals go to the whole group, which must be the kernel's own
            time.sleep(0.001)

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def serve() -> None:
    """Start the process that forks kernels; the processes of this test run that start later share it."""
    with mock.patch.dict(
        os.environ, PYTHONPATH=os.pathsep.join(sys.path)
    ):  # where warm_imports lies
        forkserver.ensure_running()
    os.environ[ADDRESS] = os.fsdecode(SERVER._forkserver_address)


def kernelspec(folder: Path) -> Path:
    """Tell a server with the folder in its JUPYTER_PATH to start this file, which lets a kernel be forked and waits."""
    place = folder / "kernels" / "python3" / "kernel.json"
    place.parent.mkdir(parents=True)
    argv = [sys.executable, __file__, "--log-level=CRITICAL", "-f", "{connection_file}"]
    place.write_text(
        json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"})
    )
    return folder


@contextmanager
def warm(sketched: bool = False) -> Iterator[None]:
    """Let all kernels that are started in the block be forked; `sketched` where no test looks at their figures."""
    if ADDRESS not in os.environ:
        serve()
    elif not SERVER._forkserver_address:  # it is the child of another process
        SERVER._forkserver_address, SERVER._forkserver_alive_fd = (
            os.environ[ADDRESS],
            os.open(os.devnull, os.O_RDONLY),
        )
        SERVER.ensure_running = lambda: None
    variables = {SKETCHED: "1"} if sketched else {}
    with (
        mock.patch(LAUNCH, Forked),
        mock.patch(SAVE, save),
        mock.patch.dict(os.environ, variables),
    ):
        yield


if __name__ == "__main__":
    import warm_kernels  # by its name, under which the server knows it

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warm_kernels.warm():
        kernel = warm_kernels.Forked(
            ["python", "-m", "ipykernel_launcher", *sys.argv[1:]], env=dict(os.environ)
        )
    signal.signal(
        signal.SIGINT,
        lambda number, _: kernel.poll() is None and kernel.send_signal(number),
    )
    sys.exit(kernel.wait())
