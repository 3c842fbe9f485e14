"""Processes of pytest-xdist that are forked from one which has imported the package: seconds less for each of them.

That process checks the package's shapes as theirs do (pyproject.toml, `addopts`), and so it is none of pytest's own.
"""

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import warnings
from unittest import mock

from execnet import gateway_io
from execnet.gateway_base import Popen2IO
from jaxtyping import install_import_hook

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}
ROOMS = [
    "models",
    "plots",
    "runs",
    "study",
    "widgets",
]
NETWORKS = ["bert.modeling_bert", "vit.modeling_vit", "clip.modeling_clip"]
OTHERS = [
    "hypothesis",
    "nbconvert",
    "papermill.execute",
    "playwright.sync_api",
    "pytest",
]
MODULES = [
    *(f"uqlab.{room}" for room in ROOMS),
    *(f"transformers.models.{name}" for name in NETWORKS),
    *OTHERS,
]

# In a forked process, the package itself: tests/conftest.py shows it when jaxtyping's plugin, which refuses to start
# where the package is imported already, has started.
PACKAGE: dict = {}


def serve(count: int) -> None:
    """Let the next processes that pytest-xdist starts, so many, be forked."""
    ours, theirs = (
        [],
        [],
    )  # ends of pipes: to write to a process and to read from it; what it reads, where it writes
    for _ in range(count):
        (reads, writes), (answers, says) = os.pipe(), os.pipe()
        ours.append((writes, answers))
        theirs.append((reads, says))
    command = f"import sys; sys.path[:] = {sys.path}; import warm_workers; warm_workers.fork({theirs})"
    ends = [end for pair in theirs for end in pair]
    server = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.DEVNULL, pass_fds=ends
    )
    close(theirs)
    start = gateway_io.create_io

    def create_io(
        spec, execmodel
    ):  # one that takes the place of a process that died starts as usual
        return (
            Forked(server, *ours.pop(0), execmodel) if ours else start(spec, execmodel)
        )

    mock.patch.object(gateway_io, "create_io", create_io).start()


class Forked(Popen2IO):
    """What execnet's Popen2IOMaster is for a process that it starts itself."""

    def __init__(self, server: subprocess.Popen, writes: int, answers: int, execmodel):
        super().__init__(os.fdopen(writes, "wb"), os.fdopen(answers, "rb"), execmodel)
        self.wait = server.wait  # it ends with the last of them
        self.number = int(self.infile.readline())

    def kill(self) -> None:
        with contextlib.suppress(
            ProcessLookupError
        ):  # it may have ended while it was waited for
            os.kill(self.number, signal.SIGKILL)


def fork(pipes: list[tuple[int, int]]) -> None:
    """Import, become a process for each pair of pipes, and wait for them."""
    gc.disable()
    os.environ |= ONE_THREAD
    sys.modules.setdefault("rfc3987_syntax", None)  # as in tests/conftest.py
    with (
        install_import_hook(["uqlab"], "beartype.beartype"),
        warnings.catch_warnings(action="error"),
    ):
        for name in MODULES:
            importlib.import_module(name)
    gc.freeze()
    for reads, says in pipes:
        if os.fork() == 0:
            become(reads, says, pipes)
    close(pipes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in pipes:
        os.wait()


def close(pipes: list[tuple[int, int]]) -> None:
    """Let the ends go: while anybody holds one that says something, nobody sees that its process has died."""
    for end in [end for pair in pipes for end in pair]:
        os.close(end)


def become(reads: int, says: int, pipes: list[tuple[int, int]]) -> None:
    """Be the process that `python -c` with execnet's line starts."""
    os.dup2(reads, 0)
    os.dup2(says, 1)
    close(pipes)
    print(os.getpid(), flush=True)
    PACKAGE["uqlab"] = sys.modules.pop("uqlab")
    # Modules of plugins, which pytest would load in its own way and does not miss.
    mock.patch(
        "_pytest.assertion.rewrite.AssertionRewritingHook._warn_already_imported"
    ).start()
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
    sys.exit()
