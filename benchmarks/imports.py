"""What `import` of the four rooms that a script needs costs, beside the two libraries that they stand on.

Targets: less than 3 seconds of a processor, and at most 1.1 times what torch and scikit-learn's metrics take alone. Processes take
turns; the seconds are theirs, so that a busy neighbour counts little. Exit status 1 if one is missed.
Run: python benchmarks/imports.py [ROUNDS]
"""

import resource
import statistics
import subprocess
import sys

MAX_SECONDS, MAX_RATIO = 3.0, 1.1
LINES = {
    "torch": "import torch",
    "torch, sklearn.metrics": "import torch, sklearn.metrics",
    "the four rooms": "from uqlab import ensembles, metrics, training, uncertainty",
}


def seconds(line: str) -> float:
    """Return the seconds of a processor that a Python takes to run one line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", line], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    taken = {name: [] for name in LINES}
    for turn in range(1 + rounds):
        for name, line in LINES.items():
            spent = seconds(line)
            if turn:  # the first reads the files from the disk
                taken[name].append(spent)
    for name, values in taken.items():
        print(
            f"{name:<23} {statistics.median(values):.2f} s [{min(values):.2f}, {max(values):.2f}]"
        )
    pairs = zip(taken["the four rooms"], taken["torch, sklearn.metrics"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    print(f"ratio {ratio:.2f} (at most {MAX_RATIO})")
    slow = statistics.median(taken["the four rooms"]) > MAX_SECONDS
    return int(slow or ratio > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())
