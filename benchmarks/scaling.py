"""Time and peak memory against size: members, widths, inputs, heads, layers, runs; exponents beside the theory's.

An exponent is the slope of the logarithm of the median time between the larger sizes, where overheads are small; "1"
means that twice the size takes twice the time. Each series runs in a process of its own, smallest size first, so that
its peak of memory above what it held before is its own. Exit status 1 if an exponent of time or memory is more than
0.2 above the theory's.

    python benchmarks/scaling.py [SERIES ...] [--device cuda] [--large]

--large: ten times the inputs and runs (10 million and 10,000). Memory is that of the device.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _timing import DEVICE, ON_GPU, peak_memory

ROOM = 0.2
INPUTS = (10_000, 100_000, 300_000, 1_000_000)


def logits(members, inputs, classes=10):
    return 3 * torch.randn(
        members, inputs, classes, generator=torch.Generator().manual_seed(0)
    )


def of_decompose(inputs):
    from uqlab import uncertainty

    z = logits(4, inputs, 5).to(DEVICE)
    return lambda: uncertainty.decompose(z)


def of_members(members):
    from uqlab import uncertainty

    z = logits(members, 20_000).to(DEVICE)
    return lambda: uncertainty.decompose(z)


def of_metrics(inputs):
    from uqlab import metrics

    z, y = logits(1, inputs, 5), torch.arange(inputs) % 5
    score = -z[0].amax(1)
    half = inputs // 2
    return lambda: (
        metrics.ece(z, y),
        metrics.aurc(z, y, score),
        metrics.ood_detection(score[:half], score[half:]),
    )


def of_cka(inputs):
    from uqlab.analysis import representations

    x = torch.randn(2, inputs, 16, generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    return lambda: representations.cka(x[0], x[1])


def fitting(members, width):
    from uqlab import ensembles, models, training

    ensemble = ensembles.deep(lambda: models.mlp(784, (width, width)), members).to(
        DEVICE
    )
    x, y = torch.rand(1024, 784), torch.arange(1024) % 10
    return lambda: training.fit(
        ensemble, x, y, epochs=1, lr=1e-3, batch_size=128, progress=False
    )


def of_lora(members):
    from uqlab import ensembles, models, training

    ensemble = ensembles.lora(models.embedded(), members, 4).to(DEVICE)
    x = torch.rand(64, 1, 28, 28)
    return lambda: training.predict(ensemble, x)


def searching(layers, count):
    from uqlab import heads, models

    torch.manual_seed(0)
    model = (
        models.vit(28, 4, width=8 * count, layers=layers, heads=count).eval().to(DEVICE)
    )
    x = torch.rand(64, 1, 28, 28).to(DEVICE)
    return lambda: heads.greedy_circuit(
        model, x, None, 1 - x, score="ood", budget=1, progress=False
    )


def finished(runs):
    """A folder of finished runs, in which nothing is left to do."""
    from sweeps import pretend, write_notebook

    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    notebook = folder / "work.ipynb"
    write_notebook(notebook)
    pretend(notebook, runs, 1000)
    return notebook


def of_collect(runs):
    from uqlab.runs import tables

    finished(runs)
    return lambda: tables.load("figures/quick/work.sweep")


def of_resume(runs):
    from uqlab.runs import sweep

    notebook = finished(runs)
    return lambda: sweep(notebook, {"seed": range(runs)}, progress=False)


def of_gallery(runs):
    from uqlab.runs import tables

    finished(runs)
    return lambda: tables.gallery(Path("figures"))


# Series: what is made for a size, the sizes, and the exponents of time and memory in theory (None: not fitted).
SERIES: dict[
    str, tuple[Callable[[int], Callable], tuple[int, ...], float, float | None]
] = {
    "decompose, inputs": (of_decompose, INPUTS, 1, 1),
    "decompose, members": (of_members, (1, 4, 16, 64), 1, 1),
    "ece + aurc + auroc, inputs": (of_metrics, INPUTS, 1.1, 1),  # sorting: n log n
    "CKA, inputs": (of_cka, INPUTS, 1, 1),
    "deep ensemble, members": (lambda m: fitting(m, 256), (4, 8, 16, 32), 1, 1),
    "deep ensemble, width": (lambda w: fitting(4, w), (256, 512, 1024, 2048), 2, 2),
    "LoRA-Ensemble, members": (of_lora, (4, 8, 16, 32), 1, 1),
    "circuit search, heads of fixed size": (
        lambda h: searching(4, h),
        (4, 8, 16),
        3,
        None,
    ),  # trials x width squared
    "circuit search, layers": (
        lambda n: searching(n, 4),
        (4, 8, 16),
        2,
        None,
    ),  # trials x layers after the head
    "collect, runs": (of_collect, (30, 100, 300, 1000), 1, 1),
    "resume, runs": (of_resume, (30, 100, 300, 1000), 1, 1),
    "gallery, runs": (of_gallery, (30, 100, 300, 1000), 1, 1),
}
LARGE = {"inputs": (10_000_000,), "runs": (10_000,)}


def measure(name: str, large: bool) -> None:
    """Print [size, seconds, bytes] of each size of a series as JSON."""
    make, sizes, *_ = SERIES[name]
    call, rows = make(sizes[0]), []
    call()  # libraries and threads
    for size in sizes + (LARGE.get(name.split(", ")[1], ()) if large else ()):
        call, seconds = make(size), []
        before = peak_memory()
        while len(seconds) < 3 or (sum(seconds) < 0.5 and len(seconds) < 30):
            started = time.perf_counter()
            call()
            if ON_GPU:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        rows.append((size, statistics.median(seconds), peak_memory() - before))
    print(json.dumps(rows))


def exponent(sizes, values) -> float:
    """The slope of a line through the logarithms of the larger half of the sizes, three or more of them."""
    x, y = (
        [math.log(max(value, 1e-12)) for value in each[-max(3, (len(each) + 1) // 2) :]]
        for each in (sizes, values)
    )
    return statistics.linear_regression(x, y).slope


def main() -> int:
    missed = []
    print(
        f"{'series':<36} {'smallest':>10} {'largest':>10} {'seconds':>9} {'MB':>7}  time ~ size^  memory ~ size^"
    )
    for name in [
        name
        for name in SERIES
        if not OPTIONS.series or any(part in name for part in OPTIONS.series)
    ]:
        command = [
            sys.executable,
            __file__,
            "--one",
            name,
            "--device",
            DEVICE,
            *["--large"] * OPTIONS.large,
        ]
        rows = json.loads(
            subprocess.run(
                command, check=True, stdout=subprocess.PIPE
            ).stdout.splitlines()[-1]
        )
        sizes, seconds, memory = zip(*rows, strict=True)
        _, _, in_time, in_memory = SERIES[name]
        found = [(exponent(sizes, seconds), in_time, "time")]
        if (
            in_memory is not None and memory[-1] > 2e7 and memory[-2] > 0
        ):  # below this it is noise
            found.append(
                (
                    math.log(memory[-1] / memory[-2]) / math.log(sizes[-1] / sizes[-2]),
                    in_memory,
                    "memory",
                )
            )
        shown = "".join(
            f"  {value:4.2f} (theory {theory:g})" for value, theory, _ in found
        )
        print(
            f"{name:<36} {sizes[0]:>10,} {sizes[-1]:>10,} {seconds[-1]:9.3f} {memory[-1] / 1e6:7.0f}{shown}",
            flush=True,
        )
        missed += [
            f"{name}: {what} {value:.2f}"
            for value, theory, what in found
            if value > theory + ROOM
        ]
    if missed:
        print("more than the theory says: " + "; ".join(missed))
    return int(bool(missed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("series", nargs="*", help="parts of names of series; none: all")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    OPTIONS = parser.parse_args()
    sys.exit(measure(OPTIONS.one, OPTIONS.large) if OPTIONS.one else main())
