"""One notebook executed by papermill, in a process that the runner starts.

`python -m uqlab.runs.page` reads papermill's arguments as one line of JSON. When its
input is closed, by a runner that stops, is out of time or dies, it ends together with
its kernel.
"""

import json
import os
import sys
import threading

import click
import psutil


def main() -> None:
    """Execute the notebook; the last line of stderr says why that failed."""
    arguments = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_runner, daemon=True).start()
    from nbclient.exceptions import DeadKernelError
    from papermill import PapermillExecutionError, execute_notebook  # takes a second

    try:
        try:
            execute_notebook(**arguments)
        except RuntimeError as error:
            if isinstance(error, DeadKernelError):  # in a cell
                raise
            execute_notebook(**arguments)  # one start of a kernel in 270 fails
    except PapermillExecutionError as error:
        print(click.unstyle(str(error)), file=sys.stderr)
        reason = f"In [{error.exec_count}] {error.ename}: {error.evalue}"
        sys.exit(reason.splitlines()[0])


def end_with_runner() -> None:
    """Wait until the input is closed, then end this process and its kernel."""
    os.read(0, 1)
    kernels = psutil.Process().children(recursive=True)
    for process in kernels:
        process.kill()
    psutil.wait_procs(kernels, timeout=10)
    os._exit(1)


if __name__ == "__main__":
    main()
