"""What a sweep costs beyond its notebooks: overhead of a run, two jobs and two workers against one, reruns, tables.

The notebook computes in one thread for a fixed number of steps and records how long that took. Targets: a run's
overhead (kernel, writing) below 3 s; two jobs at least 1.6x as fast as one; a Dask LocalCluster of two workers within
10 % of two jobs; `uqlab sweep` again on 200 finished runs of 1 MB each below 2 s and `uqlab collect` of 2,000 runs
below 5 s, as commands. The same loops in bare processes, one and two at a time, say what the machine itself has left:
its neighbours' work shows there too. Exit status 1 if a target is missed. Argument: rounds (3).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _timing import interleaved, report
from distributed import LocalCluster

import uqlab
from uqlab.core.files import sha256
from uqlab.runs import sweep
from uqlab.runs.manifest import Manifest, commit

RUNS, STEPS = 4, 40_000_000
SOURCE = """import time
from uqlab import runs
runs.begin(output_dir, "work")
started, total = time.perf_counter(), 0
for i in range(steps):
    total += i
runs.record("own_seconds", time.perf_counter() - started)"""
PARAMETERS = (
    f"seed = 0  # which run\nsteps = {STEPS}  # work\noutput_dir = ''  # folder"
)


def write_notebook(path: Path) -> None:
    def cell(source: str, **metadata: list[str]) -> dict:
        about = {"execution_count": None, "outputs": [], "id": f"cell-{len(source)}"}
        return {"cell_type": "code", "source": source, "metadata": metadata} | about

    cells = [cell(PARAMETERS, tags=["parameters"]), cell(SOURCE)]
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )


def pretend(notebook: Path, runs: int, size: int) -> None:
    """Write finished runs: `size` bytes of figures, and as many numbers and packages as a real run has."""
    now, packages = commit(), {f"package-{i}": "1.0" for i in range(200)}
    jobs = sweep(notebook, {"seed": range(runs)}, dry_run=True).outcomes
    for job in jobs:
        folder = job.folder
        folder.mkdir(parents=True)
        seed = job.parameters["seed"]
        numbers = {f"number_{i}": seed + i / 7 for i in range(40)}
        (folder / "results.json").write_text(
            json.dumps({"numbers": numbers, "tables": {}, "figures": {}}, indent=1)
        )
        (folder / "figure.png").write_bytes(os.urandom(size))
        manifest = Manifest(
            parameters={"steps": STEPS} | job.parameters,
            source_sha256=job.source,
            started=f"2026-01-01T00:00:00+00:00 {seed}",
            seconds=1.0,
            packages=packages,
            files={path.name: sha256(path) for path in folder.iterdir()},
            uqlab=uqlab.__version__,
            commit=now,
        )
        manifest.save(folder)


def bare(jobs: int) -> None:
    """The notebooks' loops without notebooks."""
    code = f"total = 0\nfor i in range({STEPS * RUNS // jobs}):\n    total += i"
    for process in [
        subprocess.Popen([sys.executable, "-c", code]) for _ in range(jobs)
    ]:
        process.wait()


def seconds_of(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "uqlab.runs", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    os.environ |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    missed, overheads = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        notebook = Path("work.ipynb").absolute()
        write_notebook(notebook)
        turn = iter(range(10**6))

        def swept(**options):
            done = sweep(
                notebook,
                {"seed": range(RUNS)},
                root=f"{next(turn)}",
                progress=False,
                **options,
            )
            assert not done.failed, done.failed
            for outcome in done.outcomes:
                took = json.loads((outcome.folder / "manifest.json").read_text())[
                    "seconds"
                ]
                own = json.loads((outcome.folder / "results.json").read_text())[
                    "numbers"
                ]["own_seconds"]
                overheads.append(took - own)

        with LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster:
            ways = {
                "1 job": lambda: swept(jobs=1),
                "2 jobs": lambda: swept(jobs=2),
                "2 workers": lambda: swept(cluster=cluster.scheduler_address),
                "1 process": lambda: bare(1),
                "2 processes": lambda: bare(2),
            }
            print(f"{RUNS} runs of a notebook that computes in one thread")
            seconds = interleaved(ways, rounds)
        report(seconds, "2 jobs")
        one, two, workers, alone, both = (
            statistics.median(times) for times in seconds.values()
        )
        overhead = statistics.median(overheads)
        print(
            f"overhead of a run: median {overhead:.2f} s, worst {max(overheads):.2f} s of {len(overheads)}"
        )
        print(
            f"2 jobs are {one / two:.2f}x one (2 bare processes {alone / both:.2f}x one)"
        )
        print(f"2 workers take {workers / two:.2f} of the time of 2 jobs")
        pretend(notebook, 200, 1_000_000)
        again = statistics.median(
            seconds_of("sweep", "work.ipynb", "-g", "seed", "0:200")
            for _ in range(rounds)
        )
        print(f"uqlab sweep on 200 finished runs of 1 MB: {again:.2f} s")
        other = Path("many.ipynb").absolute()
        write_notebook(other)
        pretend(other, 2000, 1000)
        collect = statistics.median(
            seconds_of("collect", "many.ipynb") for _ in range(rounds)
        )
        print(f"uqlab collect of 2,000 runs: {collect:.2f} s")
        targets = {
            f"overhead {overhead:.2f} s, not below 3": overhead < 3,
            f"2 jobs {one / two:.2f}x one, not 1.6x": one / two >= 1.6,
            f"2 workers {workers / two:.2f} of the time of 2 jobs, more than 1.1": workers
            / two
            <= 1.1,
            f"rerun {again:.2f} s, not below 2": again < 2,
            f"collect {collect:.2f} s, not below 5": collect < 5,
        }
        missed = [text for text, met in targets.items() if not met]
        os.chdir("/")
    if missed:
        sys.exit("targets missed: " + "; ".join(missed))
