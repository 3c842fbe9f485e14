"""What `uqlab doctor` finds: the installation as a kernel sees it, and its folders."""

import json
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import uqlab
from uqlab.runs import execution, plans
from uqlab.runs.parameters import all_notebooks

# Run in a process of its own, as a kernel is: what is broken in there breaks no report.
PROBE = """import json, torch
from uqlab import data, models
from uqlab.core import devices
place = devices.device()
models.embedded()(data.load("mnist-mini").inputs[:1])
device, fast = "CPU, no GPU", torch.cpu.get_capabilities().get("amx_bf16", False)
if place.type == "cuda":
    free = devices.free_memory(place) / 1e9
    device, fast = f"{torch.cuda.get_device_name()}, {free:.0f} GB free", True
folder, fetched = data.fetched()
print(json.dumps({
    "device": device,
    "bfloat16": "yes" if fast else "no",
    "embedded": "the data and the network answer; a page needs no download",
    "data": f"{folder}: {', '.join(fetched) or 'nothing fetched'}",
}))"""


def report() -> tuple[dict[str, str], list[str]]:
    """Return the lines of the report by title, and what is wrong and what to do."""
    from joblib import cpu_count

    pages = all_notebooks()
    place = Path(uqlab.__file__).parent
    lines = {
        "uqlab": f"{uqlab.__version__} in {place}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "machine": f"{platform.platform()}, {cpu_count()} cores",
        "packages": ", ".join(
            f"{name} {execution.packages().get(name)}"
            for name in ("torch", "transformers", "numpy", "jupyterlab")
        )
        + ("" if find_spec("pip") else "; without pip here, not checked"),
        "pages": f"{len(pages)} in {pages[0].parent}",
        "trainings": plans.trainings() or "none is kept",
    }
    todo = "pip install it, in a checkout with -c constraints.txt"
    wrong = [f"{sentence} {todo}" for sentence in lacking()]
    try:
        return lines | _asked(), wrong
    except RuntimeError as error:
        reason = f"the embedded network does not answer: {error}; install uqlab anew"
        return lines, [*wrong, reason]


def _asked() -> dict[str, str]:
    """Return what PROBE prints; raises RuntimeError with the last line of its error."""
    command = [sys.executable, "-c", PROBE]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode:
        raise RuntimeError(probe.stderr.strip().rpartition("\n")[2])
    return json.loads(probe.stdout.splitlines()[-1])


def lacking() -> list[str]:
    """Return which requirements of the package are not met, as pip says it."""
    command = [sys.executable, "-m", "pip", "check"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line for line in said.splitlines() if line.startswith("uqlab ")]
