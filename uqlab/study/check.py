"""Judge the functions that a reader writes under "Your turn", in words.

`check.page_10(hsic)` calls the function with a small input whose answer is known. If
the answer is another one, it says which mistake leads to it; check.yaml has the cases.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor


@cache
def cases() -> dict[str, Any]:
    """Return what each judge gives, expects and says: check.yaml."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


class NotYet(AssertionError):
    """Says what is wrong with a reader's function; a notebook shows this line alone."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet: {self}."]


def page_00(decompose: Callable) -> None:
    """Judge `decompose(p)`: total, aleatoric and epistemic uncertainty in nats.

    Probabilities [members, inputs, classes] give three parts [inputs].
    """
    _judge(decompose, cases()["page_00"])


def page_01(sub_ensembles: Callable, groups: int = 10) -> None:
    """Judge `sub_ensembles(networks, size)`: means of `size` networks each.

    Predictions [networks, grid] give [groups, ensembles, grid], as many groups as the
    page has.
    """
    networks = torch.arange(8.0 * groups).view(-1, 2).square()
    split = networks.view(groups, 2, 2, 2)
    right = split.mean(2)
    name = "the mean"
    again = "each group has the same networks; a network belongs to one group"
    other = "you do not average neighbours; the ensembles are [0, 1], [2, 3] and so on"
    mistakes = [
        {"says": "you add the networks up; divide by their number", name: 2 * right},
        {"says": again, name: right[:1].expand(groups, -1, -1)},
        {"says": other, name: split.mean(1)},
    ]
    case = {"given": [networks, 2], "right": {name: right}, "mistakes": mistakes}
    _judge(sub_ensembles, case)


def page_02(between_within: Callable) -> None:
    """Judge `between_within(p)`: mutual information between and within groups, in nats.

    Probabilities [groups, members, inputs, classes] give two parts [inputs].
    """
    _judge(between_within, cases()["page_02"])


def page_03(logit_variance: Callable) -> None:
    """Judge `logit_variance(z)`: the variance of logits between members, a number.

    Logits [members, inputs, classes] are centred over the classes; the variance divides
    by M - 1 and is averaged over inputs and classes.
    """
    _judge(logit_variance, cases()["page_03"])


def page_10(hsic: Callable) -> None:
    """Judge `hsic(gram, other)`: plug-in HSIC of two Gram matrices [N, N], a number.

    Both are centred, and the sum of their products is divided by (N - 1)^2.
    """
    _judge(hsic, cases()["page_10"])


def page_12(paired_interval: Callable) -> None:
    """Judge `paired_interval(one, other)`: mean, low and high end of `other - one`.

    Two sides [runs] of the same runs, arrays of NumPy; 95 %, by Student's t.
    """
    _judge(paired_interval, cases()["page_12"], np.array)


def _judge(
    function: Callable, case: dict[str, Any], array: Callable = torch.tensor
) -> None:
    """Print that a function is right, or raise a line that says what is wrong."""
    arguments = [array(v) if isinstance(v, list) else v for v in case["given"]]
    try:
        answer = function(*arguments)
    except NotImplementedError as error:
        raise NotYet("your function is still to be written") from error
    except Exception as error:
        kind = type(error).__name__
        raise NotYet(f"your function raised {kind}: {error}") from error
    values = _parts(answer, case["right"])
    for mistake in case["mistakes"]:
        if all(
            _same(value, mistake.get(name, value)) for name, value in values.items()
        ):
            raise NotYet(mistake["says"])
    for name, value in values.items():
        right = _tensor(case["right"][name])
        if not _same(value, right):
            raise NotYet(f"{name} is {value.tolist()}, it should be {right.tolist()}")
    print("Right: your function returns the known answer.")


def _parts(answer: Any, right: dict[str, Any]) -> dict[str, Tensor]:
    """Return the parts of an answer by name, each of the right shape."""
    answers = (answer,) if len(right) == 1 else answer
    names = ", ".join(right)
    if not isinstance(answers, Sequence | Tensor | np.ndarray):
        raise NotYet(f"your function should return {names}, it returned {answer!r}")
    if len(answers) != len(right):
        raise NotYet(f"your function should return {names}, not {len(answers)} things")
    values = dict(zip(right, answers, strict=True))
    for name, value in values.items():
        try:
            values[name] = _tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise NotYet(f"{name} should be numbers, it is {value!r}") from error
        shape = values[name].shape
        wanted = _tensor(right[name]).shape
        if shape != wanted:
            raise NotYet(f"{name} has the shape {[*shape]}, it should be {[*wanted]}")
        if values[name].isnan().any():
            raise NotYet(f"{name} has NaN; 0 log 0 is 0 (torch.special.entr)")
    return values


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _same(value: Tensor, right: Any) -> bool:
    return torch.allclose(value, _tensor(right), rtol=1e-3, atol=1e-4)
