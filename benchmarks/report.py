"""Seconds of `uqlab report --logits`: 10,000 and a million inputs of three members and ten classes, with 1,000 OOD inputs.

A user waits for the whole command, so that starting it and the page are part of the time. Target: at most 60 s each;
exit status 1 if a median is above.

    python benchmarks/report.py [rounds]
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TARGET = 60.0
COUNTS = 10_000, 1_000_000


def file(folder: Path, count: int) -> Path:
    """Write logits whose labels are drawn from them, blurred by each member."""
    draw = np.random.default_rng(0)
    z = 5 * draw.standard_normal((count, 10), dtype="float32")
    labels = (z + draw.gumbel(size=z.shape)).argmax(1)
    logits = z + draw.standard_normal((3, *z.shape), dtype="float32") / 3
    path = folder / f"{count}.npz"
    np.savez(path, logits=logits, labels=labels, ood_far=logits[:, :1000] / 4)
    return path


def seconds(path: Path) -> float:
    """Run the command once."""
    command = [Path(sys.executable).with_name("uqlab"), "report", "--logits", path]
    start = time.perf_counter()
    quiet = {"cwd": path.parent, "check": True, "capture_output": True}
    subprocess.run(command, **quiet)
    return time.perf_counter() - start


def main(rounds: int = 3) -> bool:
    """Take the sizes in turn; return whether all medians are within the target."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {count: file(Path(folder), count) for count in COUNTS}
        taken = [{n: seconds(path) for n, path in paths.items()} for _ in range(rounds)]
    medians = {}
    for count in COUNTS:
        times = sorted(each[count] for each in taken)
        medians[count] = statistics.median(times)
        print(
            f"{count:>9,} inputs: {medians[count]:.1f} s {[round(t, 1) for t in times]}"
        )
    return max(medians.values()) <= TARGET


if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:])))
