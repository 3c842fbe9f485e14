"""Check the functions that a reader writes under "Your turn".

`check.exercise("10", hsic)` calls a function with the small input of check.yaml. If the
answer is wrong, it says which mistake leads to it.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml


class _NotYet(AssertionError):
    """An error in a reader's function; a notebook shows its message without a trace."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet: {self}."]


def exercise(lesson: str, function: Callable) -> None:
    """Call a reader's function with a known input; raise an AssertionError if wrong.

    Parameters
    ----------
    lesson
        The lesson's number, a key of check.yaml: "00".
    function
        The reader's function.
    """
    text = Path(__file__).with_suffix(".yaml").read_text("utf-8")
    case = yaml.safe_load(text)[lesson]
    right = case["right"]
    array = np.array if case.get("numpy") else torch.tensor
    given = [array(v) if isinstance(v, list) else v for v in case["given"]]
    answer = function(*given)
    parts = [answer] if len(right) == 1 else [*answer]
    if answer is None or len(parts) != len(right):
        raise _NotYet(f"your function should return {', '.join(right)}")
    _judge(dict(zip(right, map(_tensor, parts), strict=True)), case)
    print("Right: your function returns the known answer.")


def _judge(found, case):
    """Raise `_NotYet` with the mistake that leads to an answer, or the right one."""
    right = case["right"]
    for mistake in case["mistakes"]:
        if all(_same(found[name], mistake[name]) for name in right if name in mistake):
            raise _NotYet(mistake["says"])
    for name, value in right.items():
        if not _same(found[name], value):
            raise _NotYet(f"{name} is {found[name].tolist()}, it should be {value}")


def _tensor(value):
    return torch.as_tensor(value, dtype=torch.float32)


def _same(value, other):
    other = _tensor(other)
    if value.shape != other.shape:
        return False
    return torch.allclose(value, other, rtol=1e-3, atol=1e-4, equal_nan=True)
