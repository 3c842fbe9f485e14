"""Which of several equal ways is the fastest on this machine: timed once for a kind of work and a shape, then known.

What is found stays in the process and in a small file in the user's cache folder.
UQLAB_TUNE=0 takes the rules of thumb instead: runs of notebooks and tests do so,
because the last digits of a result depend on the way.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.files import fingerprint, read_json, write

TUNE = "UQLAB_TUNE"  # 0 turns choices by measurement off

BUDGET, ROUNDS = (
    0.9,
    6,
)  # seconds for one choice, unless two turns of each way take longer; most turns after the first
GAIN = 0.95  # another way than the rule's must take at most this share of its time
TICK = 5e-4  # seconds: what is shorter runs several times at once

_TORCH: Any = torch._C  # what says whether torch.func transforms
_FOUND: dict[tuple, str] = {}  # of this process
_TIMING = (
    threading.RLock()
)  # of this thread a choice may hold others: those of the layers in a network


def octave(number: int) -> int:
    """Numbers that are alike: a step up for every factor of the square root of two."""
    return round(2 * math.log2(max(1, number)))


def choose(
    kind: str,
    shape: Hashable,
    like: Tensor,
    ways: Mapping[str, Callable[[], object]],
    rule: str,
    work: Mapping[str, int] | None = None,
) -> str:
    """The name of the fastest of `ways`, which compute the same up to rounding; `rule` is the rule of thumb's choice.

    kind and shape say what the times depend on, besides type and device of `like` and
    the number of threads; `work`, how much of the whole each way does in a call. A way
    is called without gradients and must leave no trace. The rule's name comes back
    where nothing can be timed: with gradients, so that a training that is repeated
    gives equal bits, under torch.compile or a transform of torch.func, in a second
    thread, and with UQLAB_TUNE=0.
    """
    if (
        len(ways) < 2
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or os.environ.get(TUNE) == "0"
    ):
        return rule
    key = (kind, shape, like.dtype, like.device, torch.get_num_threads())
    found = _FOUND.get(key, "")
    if found in ways:
        return found
    if _TORCH._functorch.peek_interpreter_stack() is not None or not _TIMING.acquire(
        blocking=False
    ):
        return rule
    try:
        place = (
            torch.cuda.get_device_name(like.device)
            if like.is_cuda
            else like.device.type
        )
        line = f"{kind} {shape} {like.dtype} on {place}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        before = known()
        if before.get(line) not in ways:
            before[line] = fastest(
                ways, rule, like.device, work or dict.fromkeys(ways, 1)
            )
            with suppress(OSError):
                write(
                    choices(),
                    json.dumps(
                        known() | {line: before[line]}, indent=0, sort_keys=True
                    ),
                )
        _FOUND[key] = before[line]
        return before[line]
    finally:
        _TIMING.release()


def fastest(
    ways: Mapping[str, Callable[[], object]],
    rule: str,
    device: torch.device,
    work: Mapping[str, int],
) -> str:
    """The way with the shortest time of some interleaved rounds; the rule's unless another is clearly shorter."""
    started = time.perf_counter()
    best = {
        name: timed(way, 1, device) / work[name] for name, way in ways.items()
    }  # libraries, memory, inner choices
    tried = {
        name: way for name, way in ways.items() if best[name] < 3 * best[rule]
    }  # the others are hopeless
    for _ in range(ROUNDS):
        before = time.perf_counter()
        for name, way in tried.items():
            calls = max(1, int(TICK / (best[name] * work[name])))
            best[name] = min(best[name], timed(way, calls, device) / work[name])
        after = time.perf_counter()
        if after - started + after - before > BUDGET:  # no time for another round
            break
    first = min(best, key=lambda name: best[name])
    return first if best[first] < GAIN * best[rule] else rule


def timed(way: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of one of so many calls."""
    started = time.perf_counter()
    for _ in range(calls):
        way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / calls


def sizes(network: nn.Module) -> str:
    """Some letters for the shapes of a network's parameters."""
    return fingerprint([tuple(p.shape) for p in network.parameters()])[:8]


def choices() -> Path:
    """The file of what was found before."""
    from pooch import os_cache

    return Path(os_cache("uqlab")) / "choices.json"


def known() -> dict[str, str]:
    """What the file holds."""
    return {
        key: way for key, way in read_json(choices()).items() if isinstance(way, str)
    }
