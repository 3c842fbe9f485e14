"""The report of `uqlab doctor`: the installation as a kernel sees it, its folders."""

import subprocess
import sys
from pathlib import Path

from uqlab.core.files import read_json

# Run in a process of its own, as a kernel is: what is broken in there breaks no report.
PROBE = """import sys
import joblib, numpy, torch, transformers, uqlab
from uqlab import data, models
from uqlab.core import modules
from uqlab.runs import execution, parameters
pages = parameters.all_notebooks()
print("uqlab     ", uqlab.__version__, "in", uqlab.__path__[0])
print("Python    ", sys.version.split()[0], "in", sys.executable)
for package in (torch, transformers, numpy):
    print("package   ", package.__name__, package.__version__)
print("notebooks ", len(pages), "in", pages[0].parent)
print("trainings ", execution.environment()["UQLAB_CACHE"] or "none is kept")
print("data      ", *data.fetched()[:1], *(data.fetched()[1] or ["nothing fetched"]))
models.embedded()(data.load("mnist-mini").inputs[:1])
print("embedded   data and network work; lessons need no download")
place = modules.device()
gpu = place.type == "cuda" and torch.cuda.get_device_name()
print("device    ", gpu or "CPU, no GPU", "beside", joblib.cpu_count(), "cores")
"""


def report() -> tuple[list[str], list[str]]:
    """Return the lines of the report, and what is wrong and what to do."""
    probe, pip = _output("-c", PROBE), _output("-m", "pip", "check")
    missing = [line for line in pip.stdout.splitlines() if line.startswith("uqlab ")]
    todo = "pip install it, in a checkout with -c constraints.txt"
    wrong = [f"wrong      {line} {todo}" for line in missing]
    if probe.returncode:
        reason = probe.stderr.strip().rpartition("\n")[2]
        wrong.append(f"wrong      {reason}; install uqlab anew")
    return probe.stdout.splitlines(), wrong


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
    lines = []
    for name, size in about["data"].items():
        here = name in fetched.stdout.split()
        lines.append(f"{name}: {'here' if here else f'{size / 1e6:.0f} MB to fetch'}")
    return lines + about["notes"]
