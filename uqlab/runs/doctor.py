"""The report of `uqlab doctor`: the installation as a kernel sees it, its folders."""

import subprocess
import sys
from pathlib import Path

import uqlab
from uqlab.core.files import TRAININGS, read_json
from uqlab.runs import execution
from uqlab.runs.parameters import all_notebooks

# Run in a process of its own, as a kernel is: what is broken in there breaks no report.
PROBE = """import torch
from uqlab import data, models
from uqlab.core import devices
place = devices.device()
models.embedded()(data.load("mnist-mini").inputs[:1])
device = "CPU, no GPU"
if place.type == "cuda":
    free = devices.free_memory(place) / 1e9
    device = f"{torch.cuda.get_device_name()}, {free:.0f} GB free"
folder, fetched = data.fetched()
print(f"device     {device}")
print("embedded   the data and the network work; lessons need no download")
print(f"data       {folder}: {', '.join(fetched) or 'nothing fetched'}")
"""


def report() -> tuple[list[str], list[str]]:
    """Return the lines of the report, and what is wrong and what to do."""
    versions = execution.packages()
    names = ("torch", "transformers", "numpy", "jupyterlab")
    pages = all_notebooks()
    probe, pip = _output("-c", PROBE), _output("-m", "pip", "check")
    lines = [
        f"uqlab      {uqlab.__version__} in {uqlab.__path__[0]}",
        f"Python     {versions['python']}, {sys.executable}",
        "packages   " + ", ".join(f"{name} {versions.get(name)}" for name in names),
        f"pages      {len(pages)} in {pages[0].parent}",
        f"trainings  {execution.environment()[TRAININGS] or 'none is kept'}",
        *probe.stdout.splitlines(),
    ]
    todo = "pip install it, in a checkout with -c constraints.txt"
    missing = [line for line in pip.stdout.splitlines() if line.startswith("uqlab ")]
    wrong = [f"wrong      {line} {todo}" for line in missing]
    if probe.returncode:
        reason = probe.stderr.strip().rpartition("\n")[2]
        wrong.append(f"wrong      {reason}; install uqlab anew")
    return lines, wrong


def _output(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def needs(notebook: Path, profile: str) -> list[str]:
    """Return what a notebook's metadata says that a profile needs.

    Data that uqlab has fetched are here; others have their size.
    """
    metadata = read_json(notebook).get("metadata", {})
    about = metadata.get("uqlab", {}).get("needs", {}).get(profile)
    if not about:
        return []
    fetched = _output("-c", "from uqlab import data; print(*data.fetched()[1])")
    lines = [
        f"{name}: {'here' if name in fetched.stdout.split() else f'{size:,} bytes to fetch'}"
        for name, size in about["data"].items()
    ]
    return [*lines, *about["notes"]]
