"""Checks of what users give: errors say what was given, what to do.

The public functions that take a user's arrays begin with the `as_...` functions, which
accept tensors, NumPy arrays and lists alike. Whatever else fits no signature raises
what Python or torch raise.
"""

import operator
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from uqlab.core.reading import held

ArrayLike = Tensor | np.ndarray | Sequence[Any]  # what `as_tensor` reads
Inputs = Tensor | Mapping[str, Tensor]  # several by name, as tokenizers make them
InputsLike = ArrayLike | Mapping[str, Any] | Dataset | Iterable[Any]  # of `as_inputs`
Target = str | Sequence[str]  # a regular expression, or how names end
LOGITS = "members batch classes"
IGNORED = -100  # the label of a place that has none, as in torch
HINT = (
    "; for a single model use logits[None], for groups decompose_groups, of dense "
    "outputs flatten pixels: logits.movedim(2, -1).flatten(1, -2)"
)


def as_tensor(
    name: str, value: Any, axes: str = "...", *, floating: bool = True, hint: str = ""
) -> Tensor:
    """Return real numbers as a tensor.

    Parameters
    ----------
    name
        What the parameter is called, for the message.
    value
        A tensor, returned as it is, or as int64 where torch hardly computes with it
        (uint16); an array or nested lists of numbers, copied.
        Integers of arrays and lists become float64 where floating numbers are wanted.
    axes
        The names of the axes, separated by spaces; "..." takes any number of them.
    floating
        Whether the numbers must be floating ones.
    hint
        What to do where the number of axes is wrong.

    Raises
    ------
    TypeError
        If it holds no real numbers: text, objects, complex or sparse tensors, the
        device "meta"; for a Dataset or a loader, of which nothing is read.
    ValueError
        For rows of different lengths, and for another number of axes.
    """
    wanted = f"[{', '.join(axes.split())}]"
    if not isinstance(value, Tensor):
        todo = f"{name} must be a tensor, an array or lists of numbers {wanted}"
        value = _copied(value, floating, todo)
    if value.layout is not torch.strided or value.is_meta:
        raise TypeError(
            f"{name} must hold its numbers, got a {value.layout} tensor "
            f"on {value.device}"
        )
    if value.dtype in (torch.uint16, torch.uint32, torch.uint64):
        value = value.long()
    if value.is_complex() or (floating and not value.is_floating_point()):
        raise TypeError(
            f"{name} must be a floating tensor, got {value.dtype}; use {name}.float()"
        )
    if axes != "..." and value.ndim != len(axes.split()):
        raise ValueError(f"{name} must be {wanted}, got {list(value.shape)}{hint}")
    return value


def _copied(value: Any, floating: bool, todo: str) -> Tensor:
    """Return an array or lists as a tensor; the messages begin with `todo`."""
    _no_stream(value, todo)
    try:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return torch.stack([*value]).detach()  # on any device
        array = np.asarray(value)
    except (ValueError, RuntimeError) as error:
        pairs = isinstance(value, list | tuple) and isinstance(value[0], tuple)
        more = "; of pairs (x, y): x, y = zip(*pairs)" if pairs else ""
        raise ValueError(f"{todo}, got rows of different lengths{more}") from error
    if np.ma.is_masked(value):
        raise ValueError(f"{todo}, got masked values; drop or fill them")
    if array.dtype.kind not in "fiub":
        raise TypeError(
            f"{todo}, got {type(value).__name__} of {array.dtype}; use .astype(float), "
            "of texts the ids of network.encode(texts) or a tokenizer, of labels "
            "numpy.unique(labels, return_inverse=True)[1]"
        )
    if floating and array.dtype.kind != "f":
        return torch.tensor(array.astype(np.float64))
    if array.dtype.kind == "u" and array.itemsize > 1:  # torch computes with few
        array = array.astype(np.int64)
    return torch.tensor(array.astype(array.dtype.newbyteorder("=")))


def _no_stream(value: Any, todo: str) -> None:
    """Raise TypeError for a Dataset, a loader, or whatever must be read item by item.

    The same for a list of them. Nothing is read of it: NumPy would, without an end
    where there is none.
    """
    if isinstance(value, list | tuple) and value:
        return _no_stream(value[0], todo)
    array = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    other = isinstance(value, Sequence | Mapping | Set)
    if array or (other and not isinstance(value, Dataset)):
        return
    if hasattr(value, "toarray"):  # sparse, of SciPy
        how = "x = data.toarray()"
    elif hasattr(value, "with_format"):  # of Hugging Face
        how = 'rows = data.with_format("torch")[:]\n    x, y = rows["x"], rows["label"]'
    elif hasattr(value, "__iter__") or hasattr(value, "__getitem__"):
        loader = "data" if hasattr(value, "batch_size") else "DataLoader(data, 100)"
        how = (
            "from itertools import islice; from torch.utils.data import DataLoader\n"
            f"    x, y = map(torch.cat, zip(*islice({loader}, 1000)))  # 1,000 batches"
        )
    else:
        return
    raise TypeError(f"{todo}, got {type(value).__name__}; make them first:\n    {how}")


def as_logits(
    logits: Any, axes: str = LOGITS, hint: str = HINT, *, sigmoid: bool = False
) -> Tensor:
    """Return finite logits [members, batch, classes] of two classes or more.

    Of a sigmoid they are [..., 1]. Raises what `as_tensor` raises, and ValueError for
    logits that are empty, of another number of classes, not finite, or probabilities.
    """
    logits = as_tensor("logits", logits, axes, hint=hint)
    if 0 in logits.shape:
        raise ValueError(f"logits must not be empty, got {list(logits.shape)}")
    if logits.ndim == 0 or (logits.shape[-1] == 1) != sigmoid:
        need, todo = "two classes or more", "from a sigmoid's z use cat([0 * z, z], -1)"
        if sigmoid:
            need, todo = "one class", 'of several labels use outputs="multilabel"'
        raise ValueError(f"logits need {need}, got {list(logits.shape)}; {todo}")
    finite("logits", logits)
    if not sigmoid:
        no_probabilities(logits)
    return logits


def no_probabilities(logits: Tensor) -> None:
    """Raise ValueError for rows that sum to 1, whose softmax would be too uncertain.

    Rows of zeros and ones pass: examples have such logits.
    """
    logits = logits.detach()
    for z in (logits[(0,) * (logits.ndim - 1)], logits):  # all only if the first row is
        p = z.double()
        slack = max(1e-3, torch.finfo(z.dtype).eps)
        if ((100 * p).round() - 100 * p).abs().max() < 1e-4:  # of two digits
            slack = min(0.25, 0.005 * p.shape[-1] + 1e-6)
        if not (p.min() >= 0 and ((p.sum(-1) - 1).abs() < slack).all()):
            return
    if ((p == 0) | (p == 1)).all():
        return
    raise ValueError(
        "logits must not be probabilities, got rows that sum to 1; give their "
        "logarithm, or leave out the softmax"
    )


def as_labels(
    labels: Any, samples: int, classes: int | None = None, *, places: Sequence = ()
) -> Tensor:
    """Return labels [samples], or [samples, *places] of dense outputs, as int64.

    Raises TypeError unless they are integers; ValueError for another shape and labels
    outside 0 to classes - 1. A place without a label is IGNORED.
    """
    labels = as_tensor("labels", labels, floating=False)
    if labels.shape != (samples, *places):
        columns = "; of columns take labels[:, 0], one-hot labels.argmax(1)"
        more = ", ...], of outputs [samples, classes, ..." if places else ""
        raise ValueError(
            f"labels must be [samples{more}] = {[samples, *places]} like the inputs, "
            f"got {list(labels.shape)}{columns if labels.ndim == 2 else ''}"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(
            f"labels must be integers, got {labels.dtype}; "
            "use labels.long(), of an array labels.astype(int)"
        )
    counted = labels[labels != IGNORED] if places else labels
    if classes is not None and len(counted):
        _within_classes(int(counted.min()), int(counted.max()), classes)
    return labels.to(torch.int64)


def _within_classes(low: int, high: int, classes: int) -> None:
    if low >= 0 and high < classes:
        return
    todo = ""
    if classes == 1:
        todo = (
            "; a classifier of two classes has two outputs, or in fit one with "
            'loss="binary_cross_entropy"'
        )
    elif low == 1 and high == classes:
        todo = "; counted from 1: labels - 1"
    elif low in (-1, -100):  # a missing label, here and in torch
        todo = "; leave out what has no label: keep = labels >= 0"
    raise ValueError(
        f"labels must be 0 to {classes - 1}, one for each of {classes} outputs, got "
        f"{low} to {high}{todo}"
    )


def as_scores(scores: Any, samples: int | None = None, name: str = "scores") -> Tensor:
    """Return finite scores [samples], at least one.

    Raises what `as_tensor` raises, and ValueError for another number of scores, for
    none, and for NaN or infinite ones.
    """
    scores = as_tensor(name, scores, "samples", floating=False)
    if len(scores) == 0 or len(scores) != (samples or len(scores)):
        raise ValueError(
            f"{name} must be [samples] = [{samples or 'one or more'}], "
            f"got {list(scores.shape)}"
        )
    finite(name, scores)
    return scores.detach()


def as_inputs(inputs: Any) -> Any:
    """Return a network's inputs: a tensor [samples, ...], or tensors by name.

    A dataset or a loader is read once, whole; labels are left out.

    Raises what `as_tensor` raises, and ValueError unless they are finite and every
    tensor holds the same number of samples, at least one.
    """
    return inputs_alone(held(inputs)[0])


def inputs_alone(inputs: Any) -> Any:
    """Return inputs as `as_inputs`, of what has no labels: two are no pair."""
    if isinstance(inputs, Mapping):
        inputs = {k: as_tensor(k, t, floating=False) for k, t in inputs.items()}
        tensors = list(inputs.values())
    else:
        inputs = as_tensor("inputs", inputs, floating=False)
        tensors = [inputs]
    counts = {len(t) if t.ndim else 0 for t in tensors}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "inputs must have the same number of samples, at least one, "
            f"got {sorted(counts)} samples"
        )
    for t in tensors:
        finite("inputs", t)
    return inputs


def as_one(inputs: Any) -> Tensor:
    """Return inputs [samples, ...] as `as_inputs`; TypeError for tensors by name."""
    inputs = as_inputs(inputs)
    if not isinstance(inputs, Tensor):
        raise TypeError(
            "inputs must be one tensor [samples, ...], got tensors by name "
            f"({', '.join(inputs)}); give a network that takes one"
        )
    return inputs


def first_tensor(inputs: Inputs) -> Tensor:
    """Return the tensor, or the first of several."""
    return inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))


def count(inputs: Inputs) -> int:
    """Return the number of samples of inputs that `as_inputs` returned."""
    return len(first_tensor(inputs))


def a_network(model: Any, user: str, what: str = "a torch module") -> None:
    """Raise TypeError unless `model` is a torch module, as `user` wants."""
    todo = ""
    if isinstance(model, torch.jit.ScriptModule):
        todo = "; give the module that it was made of"
    elif isinstance(model, nn.Module):
        if any(map(nn.parameter.is_lazy, model.parameters())):
            raise TypeError(f"{user}: call the lazy network once, to give it weights")
        return
    elif isinstance(model, str | os.PathLike | Mapping):
        todo = "; build the network and put weights into it: models.load_weights"
    elif isinstance(model, list | tuple):
        todo = "; of several make ensembles.from_members"
    elif isinstance(model, type) and issubclass(model, nn.Module):
        todo = f"; make one: {model.__name__}(...)"
    kind = "a class" if isinstance(model, type) else type(model).__name__
    raise TypeError(f"{user} takes {what}, got {kind}{todo}")


def one_network(model: Any, user: str) -> None:
    """Raise TypeError unless `model` is one torch module, as `user` wants."""
    a_network(model, user, "one torch module")
    if hasattr(model, "member_ids"):
        raise TypeError(
            f"{user} takes one torch module, got {type(model).__name__}; take one of "
            "its networks: ensemble.member(0)"
        )


def one_ensemble(ensemble: Any, user: str) -> None:
    """Raise TypeError unless `ensemble` is one; `user` wants it."""
    if not hasattr(ensemble, "member_ids"):
        raise TypeError(
            f"{user} takes an ensemble, got {type(ensemble).__name__}; "
            "wrap models by ensembles.from_members"
        )


def one_of(name: str, value: Any, accepted: Collection[Any]) -> None:
    """Raise ValueError unless `value` is among the accepted ones."""
    if not any(type(value) is type(other) and value == other for other in accepted):
        *others, last = (f'"{a}"' if isinstance(a, str) else str(a) for a in accepted)
        raise ValueError(
            f"{name} must be {', '.join(others)}{' or ' if others else ''}{last}, "
            f"got {value!r}"
        )


def several(name: str, value: Any, such: str = "a list") -> list[Any]:
    """Return the items of `value`; TypeError for one thing, where `such` is wanted."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        kind = type(value).__name__
        raise TypeError(f"{name} must be several, such as {such}, got one {kind}")
    return list(value)


def pattern_of(target: Target) -> str:
    """Return the regular expression of a target: itself, or of names that end so."""
    if not isinstance(target, str):
        names = several("target", target, '["q_proj", "v_proj"]')
        return rf"(^|\.)({'|'.join(map(re.escape, names))})$"
    try:
        re.compile(target)
    except re.error as error:
        wrong = f"target {target!r} is no regular expression: {error}"
        raise ValueError(wrong) from error
    return target


def by_name(name: str, value: Any, such: str) -> None:
    """Raise TypeError unless `value` holds things by name, as `such` does."""
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise TypeError(f"{name} must be by name, such as {such}, got {kind}")


def at_least(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int; raise for no integer and for less than `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return number


def between(name: str, value: Any, low: int, high: int, more: str = "") -> None:
    """Raise ValueError unless a number is `low` to `high`; `more` explains these."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be {low} to {high}{more}, got {value}")


def within(name: str, value: Any, interval: str) -> None:
    """Raise unless a number lies in an interval like "(0, 1]" or "[0, inf)"."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number in {interval}, got {value!r}")
    low, high = map(float, interval[1:-1].split(","))
    above = value > low or (value == low and interval[0] == "[")
    below = value < high or (value == high and interval[-1] == "]")
    if not (above and below):
        raise ValueError(f"{name} must be in {interval}, got {value}")


def positive(name: str, value: Any) -> None:
    """Raise unless a number is above zero and finite."""
    within(name, value, "(0, inf)")


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor an infinite value."""
    if not tensor.is_floating_point() or tensor.detach().sum().isfinite():
        return True  # one pass, and no memory
    return bool(tensor.isfinite().all())  # a sum may also be too large


def finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError for NaN or an infinite value, with the first one's place."""
    if not all_finite(tensor):
        first = (~tensor.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{name} must be finite, got NaN or an infinite value at {first}; "
            "clean them first"
        )


def representable(name: str, result: Tensor) -> None:
    """Raise ValueError for results that are too large for their precision."""
    if not all_finite(result):
        raise ValueError(
            f"some {name} are too large for {result.dtype}; use float64 or scale them"
        )
