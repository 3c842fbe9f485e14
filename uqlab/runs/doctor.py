"""What `uqlab doctor` finds: the installation as a kernel sees it, and the folders that are read and written."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement  # matplotlib needs it too

import uqlab
from uqlab.core.files import TRAININGS
from uqlab.runs import plans
from uqlab.runs.execution import environment
from uqlab.runs.parameters import all_notebooks

# Run in a process of its own, as a kernel is: what is broken in there does not break the report.
PROBE = """import json, torch
from uqlab import data, models
from uqlab.core import devices, tuning
place = devices.device()
models.embedded()(data.load("mnist-mini").inputs[:1])
gpu = f"{torch.cuda.get_device_name()}, {devices.free_memory(place) / 1e9:.0f} GB free" if place.type == "cuda" else ""
units = "yes" if gpu or torch.cpu.get_capabilities().get("amx_bf16", False) else "no"
folder, fetched = data.fetched()
choices = f"{tuning.choices()}: {len(tuning.known())} by measurement; UQLAB_TUNE=0 takes rules of thumb"
print(json.dumps([gpu or "CPU, no GPU", units, str(folder), fetched, choices]))"""


def report() -> tuple[dict[str, str], list[str]]:
    """Return the lines of the report by their titles, and what is wrong, each in a sentence that says what to do."""
    from joblib import cpu_count

    packages = {
        name: metadata.version(name)
        for name in ("torch", "transformers", "numpy", "jupyterlab")
        if has(name)
    }
    threads = {
        name: os.environ.get(name, "not set, runs set it")
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    }
    pages = all_notebooks()
    lines = {
        "uqlab": f"{uqlab.__version__} in {Path(uqlab.__file__).parent}",
        "Python": f"{platform.python_version()}, {sys.executable}, {platform.platform()}",
        "packages": ", ".join(
            f"{name} {version}" for name, version in packages.items()
        ),
        "cores": "; ".join(
            [str(cpu_count()), *(f"{name} {value}" for name, value in threads.items())]
        ),
    }
    wrong = [
        f"{each}: pip install it, in a checkout with -c constraints.txt"
        for each in lacking()
    ]
    seen = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    if seen.returncode:
        reason = (seen.stderr.strip() or "no reason given").splitlines()[-1]
        wrong.append(
            f"the embedded network does not answer: {reason}; install uqlab anew"
        )
    else:
        lines["device"], lines["bfloat16"], folder, fetched, lines["choices"] = (
            json.loads(seen.stdout.splitlines()[-1])
        )
        lines["embedded"] = "the data and the network answer; a page needs no download"
        lines["data"] = f"{folder}: {', '.join(fetched) or 'nothing fetched'}"
    lines["pages"] = f"{len(pages)} in {pages[0].parent}"
    trainings = environment(None, Path())[TRAININGS]
    count, size = plans.kept(Path(trainings)) if trainings else (0, 0)
    lines["trainings"] = (
        f"{trainings}: {count} files, {size / 1e6:.0f} MB"
        if trainings
        else "none is kept"
    )
    return lines, wrong


def has(name: str) -> bool:
    """Whether a package is installed."""
    return any(metadata.distributions(name=name))


def lacking(requirements: list[str] | None = None) -> list[str]:
    """Return which requirements, by default the package's own, are not met, and what is there instead."""
    found = []
    for wanted in map(
        Requirement,
        metadata.requires("uqlab") or () if requirements is None else requirements,
    ):
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = metadata.version(wanted.name) if has(wanted.name) else None
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            found.append(
                f"uqlab needs {wanted.name}{wanted.specifier}, here is {version or 'none'}"
            )
    return found
