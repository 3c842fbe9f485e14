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
    answers = _answers(function, case)
    if len(answers) != len(right):
        raise _NotYet(
            f"your function should return {len(right)} results, not {len(answers)}"
        )
    found = dict(zip(right, answers, strict=True))
    for mistake in case["mistakes"]:
        if all(_same(found[name], mistake[name]) for name in right if name in mistake):
            raise _NotYet(mistake["says"])
    for name, value in right.items():
        if not _same(found[name], value):
            raise _NotYet(f"{name} is {found[name].tolist()}, it should be {value}")
    print("Right: your function returns the known answer.")


def _answers(function, case):
    """Return the parts of a function's answer as tensors."""
    array = np.array if case.get("numpy") else torch.tensor
    given = [array(v) if isinstance(v, list) else v for v in case["given"]]
    try:
        answer = function(*given)
        parts = [answer] if len(case["right"]) == 1 else [*answer]
        return [torch.as_tensor(part, dtype=torch.float32) for part in parts]
    except NotImplementedError as error:
        raise _NotYet("your function is still to be written") from error
    except Exception as error:
        kind = type(error).__name__
        raise _NotYet(f"your function raised {kind}: {error}") from error


def _same(value, other):
    other = torch.as_tensor(other, dtype=torch.float32)
    if value.shape != other.shape:
        return False
    return torch.allclose(value, other, rtol=1e-3, atol=1e-4, equal_nan=True)
