"""Timings that a noisy machine cannot bend: the candidates take turns, and medians are compared.

`--device cuda` on the command line of any benchmark sets DEVICE, where its networks and inputs then are. What is on no
device, such as the runner, the figures and a browser, is timed all the same.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch


def asked_device() -> str:
    """The device of the command line, which is taken off it."""
    if "--device" not in sys.argv[1:-1]:
        return "cpu"
    at = sys.argv.index("--device")
    name = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    return name


DEVICE = asked_device()
ON_GPU = DEVICE.startswith("cuda")


def interleaved(
    functions: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each function in each of `repeats` rounds; in a round every function runs once, in order.

    What runs on a GPU is awaited.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if ON_GPU:
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def report(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, float]:
    """Print medians with quartiles, and their ratios to the baseline with quartiles over rounds; return the ratios."""
    reference = statistics.median(seconds[baseline])
    ratios = {
        name: statistics.median(times) / reference for name, times in seconds.items()
    }
    width = max(map(len, seconds))
    for name, times in seconds.items():
        low, middle, high = _quartiles(times)
        line = f"{name:<{width}}  {1e3 * middle:9.2f} ms [{1e3 * low:.2f}, {1e3 * high:.2f}]"
        if name != baseline:
            low, _, high = _quartiles(
                [a / b for a, b in zip(times, seconds[baseline], strict=True)]
            )
            line += f"  ratio to {baseline} {ratios[name]:.2f} [{low:.2f}, {high:.2f}]"
        print(line)
    return ratios


def peak_memory() -> int:
    """The most memory of this process so far, in bytes: resident, or a GPU's."""
    if ON_GPU:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _quartiles(values: list[float]) -> list[float]:
    return (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else values * 3
    )
