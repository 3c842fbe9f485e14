"""Check the functions that a reader writes under "Your turn".

`check.exercise("10", hsic)` calls a function with the small input of check.yaml. If the
answer is wrong, it says which mistake leads to it.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml


class NotYet(AssertionError):
    """An error in a reader's function; a notebook shows its message without a trace."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet: {self}."]


def exercise(lesson: str, function: Callable) -> None:
    """Call a reader's function with a known input; raise `NotYet` if it is wrong.

    Parameters
    ----------
    lesson
        The lesson's number, a key of check.yaml: "00".
    function
        The reader's function.
    """
    text = Path(__file__).with_suffix(".yaml").read_text("utf-8")
    case = yaml.safe_load(text)[lesson]
    right = {name: torch.tensor(value) for name, value in case["right"].items()}
    answers = _answers(function, case, len(right))
    for answer, (name, value) in zip(answers, right.items(), strict=True):
        if answer.shape != value.shape:
            raise NotYet(f"{name} has shape {[*answer.shape]}, not {[*value.shape]}")
    parts = dict(zip(right, answers, strict=True))
    for mistake in case["mistakes"]:
        if all(_same(value, mistake.get(name, value)) for name, value in parts.items()):
            raise NotYet(mistake["says"])
    for name, value in parts.items():
        if not _same(value, right[name]):
            raise NotYet(
                f"{name} is {value.tolist()}, it should be {right[name].tolist()}"
            )
    print("Right: your function returns the known answer.")


def _answers(function, case, count):
    """Return the parts of a function's answer as tensors."""
    array = np.array if case.get("numpy") else torch.tensor
    given = [array(v) if isinstance(v, list) else v for v in case["given"]]
    try:
        answer = function(*given)
        parts = [answer] if count == 1 else [*answer]
        parts = [torch.as_tensor(part, dtype=torch.float32) for part in parts]
    except NotImplementedError as error:
        raise NotYet("your function is still to be written") from error
    except Exception as error:
        kind = type(error).__name__
        raise NotYet(f"your function raised {kind}: {error}") from error
    if len(parts) != count:
        raise NotYet(f"your function should return {count} results, not {len(parts)}")
    return parts


def _same(value, other):
    other = torch.as_tensor(other, dtype=torch.float32)
    return torch.allclose(value, other, rtol=1e-3, atol=1e-4, equal_nan=True)
