"""Checks of what users give: each error says what was given, what is accepted and what to do."""

import operator
import traceback
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

LIBRARIES = (
    "uqlab", "torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "seaborn", "ipywidgets", "traitlets",
    "transformers", "safetensors", "html", "json", "re", "textwrap",
)  # fmt: skip


def is_ours(error: Exception) -> bool:
    """Whether a line of this package raised an error, as a ValueError or TypeError, and said more than Python does."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    said = isinstance(error, ValueError | TypeError) and len(str(error).split()) > 3
    return said and frame.f_globals.get("__name__", "").startswith("uqlab.")


def of_a_library(error: Exception) -> bool:
    """Whether a library under this package refused what it was given: no file, no memory, and no code of a user."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    other = isinstance(error, OSError | MemoryError | torch.OutOfMemoryError | FloatingPointError | Warning)
    return not other and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES


def one_network(model: Any, user: str) -> None:
    """Raise TypeError unless `model` is one torch module and no ensemble; `user` is the function that wants it."""
    ensemble = hasattr(model, "member_ids")
    if ensemble or not isinstance(model, nn.Module):
        todo = "; take one of its networks: ensemble.member(0)" if ensemble else ""
        raise TypeError(f"{user} takes one torch module, got {type(model).__name__}{todo}")


def one_of(name: str, value: Any, accepted: Collection[Any]) -> None:
    """Raise ValueError unless `value` is among the accepted ones."""
    if value not in accepted:
        *others, last = (f'"{each}"' if isinstance(each, str) else str(each) for each in accepted)
        raise ValueError(f"{name} must be {', '.join(others)}{' or ' if others else ''}{last}, got {value!r}")


def at_least(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int; raises TypeError for what is no integer, ValueError for less than `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return number


def within(name: str, value: Any, interval: str) -> None:
    """Raise ValueError unless a number lies in an interval, written as "(0, 1]" or "[0, inf)"; NaN lies in none."""
    low, high = map(float, interval[1:-1].split(","))
    if not (low < value < high or (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")):
        raise ValueError(f"{name} must be in {interval}, got {value}")


def floating(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a floating tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a floating tensor, got {kind}; use torch.as_tensor(...).float()")


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor an infinite value."""
    if not tensor.is_floating_point() or tensor.detach().sum().isfinite():  # one pass, and no memory
        return True
    return bool(tensor.isfinite().all())  # a sum may also be too large


def finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError, which names the place of the first one, if a tensor holds NaN or an infinite value."""
    if not all_finite(tensor):
        first = (~tensor.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name} must be finite, got NaN or an infinite value at {first}; clean them first")


def representable(name: str, result: Tensor) -> None:
    """Raise ValueError if a result of finite values is not finite: they were too large for its precision."""
    if not all_finite(result):
        raise ValueError(f"some {name} are too large for {result.dtype}; use float64 or scale them")


def count_samples(inputs: Any) -> int:
    """The number of inputs [samples, ...], one tensor or several by name.

    Raises TypeError for anything else; ValueError unless they are finite and every tensor holds the same number of
    samples, at least one.
    """
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    if not tensors or not all(isinstance(t, Tensor) and t.ndim for t in tensors):
        raise TypeError(
            "inputs must be a tensor [samples, ...] or tensors by name, as tokenizers give; "
            f"got {type(inputs).__name__}; use torch.as_tensor(inputs)"
        )
    counts = {len(t) for t in tensors}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(f"inputs must have the same number of samples, at least one, got {sorted(counts)} samples")
    for t in tensors:
        finite("inputs", t)
    return counts.pop()


def class_labels(labels: Any, samples: int, classes: int | None = None) -> Tensor:
    """Labels [samples] as int64.

    Raises TypeError for what is no tensor of integers; ValueError for another shape and for labels outside 0 to
    classes - 1.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels must be a tensor of integers, got {kind}; use labels.long()")
    if labels.shape != (samples,):
        raise ValueError(f"labels must be [samples] = [{samples}] like the inputs, got {list(labels.shape)}")
    if classes is not None and len(labels):
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            missing = "; -1 stands for a missing label" if low == -1 else ""
            raise ValueError(
                f"labels must be 0 to {classes - 1}, one for each of {classes} outputs, got {low} to {high}{missing}"
            )
    return labels.to(torch.int64)
