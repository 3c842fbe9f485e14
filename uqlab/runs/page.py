"""One notebook executed by papermill, in a process of its own that the runner starts.

`python -m uqlab.runs.page` reads papermill's arguments as one line of JSON. When its
input is closed, by a runner that stops, is out of time or dies, it ends together with
its kernel.
"""

import json
import os
import sys
import threading
from pathlib import Path

import click
import psutil

from uqlab.runs.parameters import cells


def main() -> None:
    """Execute the notebook; the last line of stderr says why that failed."""
    arguments = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_runner, daemon=True).start()
    from papermill import PapermillExecutionError, execute_notebook  # takes a second

    try:
        try:
            execute_notebook(**arguments)
        except RuntimeError:  # of kernels that start together one in 270 fails
            if started(Path(arguments["output_path"])):
                raise
            execute_notebook(**arguments)
    except PapermillExecutionError as error:
        print(click.unstyle(str(error)), file=sys.stderr)
        sys.exit(f"{error.ename}: {error.evalue}".splitlines()[0])


def end_with_runner() -> None:
    """Wait until the input is closed, then end this process and its kernel."""
    os.read(0, 1)
    kernels = psutil.Process().children(recursive=True)
    for process in kernels:
        process.kill()
    psutil.wait_procs(kernels, timeout=10)
    os._exit(1)


def started(output: Path) -> int:
    """Return how many code cells of a partly executed notebook were started."""
    try:
        all_cells = cells(output)
    except (OSError, ValueError):
        return 0
    count = 0
    for cell in all_cells:
        timed = cell["metadata"].get("papermill", {}).get("start_time")
        count += cell["cell_type"] == "code" and bool(timed)
    return count


if __name__ == "__main__":
    main()
