"""Timings that a noisy machine cannot bend: the candidates take turns, and medians are compared."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping


def interleaved(functions: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each function in each of `repeats` rounds; in a round every function runs once, in order.

    A function that launches work on a GPU synchronises before it returns.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def report(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, float]:
    """Print medians with quartiles, and their ratios to the baseline with quartiles over rounds; return the ratios."""
    reference = statistics.median(seconds[baseline])
    ratios = {name: statistics.median(times) / reference for name, times in seconds.items()}
    width = max(map(len, seconds))
    for name, times in seconds.items():
        low, middle, high = _quartiles(times)
        line = f"{name:<{width}}  {1e3 * middle:9.2f} ms [{1e3 * low:.2f}, {1e3 * high:.2f}]"
        if name != baseline:
            low, _, high = _quartiles([a / b for a, b in zip(times, seconds[baseline], strict=True)])
            line += f"  ratio to {baseline} {ratios[name]:.2f} [{low:.2f}, {high:.2f}]"
        print(line)
    return ratios


def peak_memory() -> int:
    """Peak resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
