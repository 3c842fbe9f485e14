"""Checks of what users give, and readers of their data.

The public functions that take a user's arrays begin with the `as_...` functions, which
accept tensors, NumPy arrays and lists alike. Whatever else fits no signature raises
what Python or torch raise.
"""

import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

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


# Arrays -------------------------------------------------------------------------------


def as_tensor(
    name: str, value: Any, axes: str = "...", *, floating: bool = True, hint: str = ""
) -> Tensor:
    """Return real numbers as a tensor.

    Parameters
    ----------
    name
        What the parameter is called, for the message.
    value
        A tensor, returned as it is; an array or nested lists of numbers, copied.
        Unsigned integers of 16 bits or more become int64, with which torch computes;
        integers of arrays and lists become float64 where floating numbers are wanted.
    axes
        The names of the axes, separated by spaces; "..." takes any number of them.
    floating
        Whether the numbers must be floating ones.
    hint
        What to do where the number of axes is wrong.

    Raises
    ------
    TypeError
        If it holds no real numbers, or rows of different lengths: text, objects,
        complex or sparse tensors, the device "meta"; for a Dataset or a loader, of
        which nothing is read.
    ValueError
        For another number of axes.
    """
    wanted = f"[{', '.join(axes.split())}]"
    if not isinstance(value, Tensor):
        todo = f"{name} must be a tensor, an array or lists of numbers {wanted}"
        value = _copied(value, floating, todo)
    if value.layout is not torch.strided or value.is_meta:
        raise TypeError(f"{name} must hold its numbers; load them, or use .to_dense()")
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
    """Return an array or lists as a tensor; the message begins with `todo`."""
    try:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return torch.stack([*value]).detach()  # on any device
        unread = isinstance(value, Dataset) or np.ma.is_masked(value)
        array = np.asarray(None if unread else value)
        kind = array.dtype.kind
        if kind not in "fiub":
            raise TypeError("no numbers")
        double = floating and kind != "f"
        native = np.float64 if double else array.dtype.newbyteorder("=")
        return torch.tensor(array.astype(native))
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{todo}, got {type(value).__name__} ({error}); of different lengths pad "
            "them, of objects use .astype(float), of masked arrays .filled(), of pairs "
            "(x, y) x, y = zip(*pairs), of texts the ids of network.encode(texts) or a "
            "tokenizer, of labels numpy.unique(labels, return_inverse=True)[1]"
        ) from error


def as_logits(
    logits: Any, axes: str = LOGITS, hint: str = HINT, *, sigmoid: bool = False
) -> Tensor:
    """Return finite logits [members, batch, classes] of two classes or more.

    Of a sigmoid they are [..., 1]. Raises what `as_tensor` raises, and ValueError for
    logits that are empty, of another number of classes, not finite, or probabilities.
    """
    logits = as_tensor("logits", logits, axes, hint=hint)
    if logits.numel() == 0:
        raise ValueError(f"logits must not be empty, got {list(logits.shape)}")
    if logits.ndim == 0 or (logits.shape[-1] == 1) != sigmoid:
        need = "one class" if sigmoid else "two classes or more"
        raise ValueError(
            f"logits need {need}, got {list(logits.shape)}; from a sigmoid's z use "
            'cat([0 * z, z], -1), of several labels outputs="multilabel", in fit '
            'loss="binary_cross_entropy"'
        )
    finite("logits", logits)
    if not sigmoid and _probabilities(logits.detach()):
        raise ValueError(
            "logits must not be probabilities, got rows that sum to 1; give their "
            "logarithm, or leave out the softmax"
        )
    return logits


def _probabilities(p: Tensor) -> bool:
    """Whether rows sum to 1, also rounded to two digits; their softmax would be flat.

    Zeros and ones alone may be logits, as in examples.
    """
    if p.min() < 0:
        return False
    slack = min(0.25, 0.005 * p.shape[-1])
    sums = p.sum(-1, dtype=torch.float64)
    return bool(((sums - 1).abs() <= slack).all() and not ((p == 0) | (p == 1)).all())


def as_labels(
    labels: Any, samples: int, classes: int | None = None, *, places: Sequence = ()
) -> Tensor:
    """Return labels [samples], or [samples, *places] of dense outputs, as int64.

    Raises TypeError unless they are integers; ValueError for another shape and labels
    outside 0 to classes - 1. A place without a label is IGNORED.
    """
    labels = as_tensor("labels", labels, floating=False)
    wanted, got = [samples, *places], list(labels.shape)
    if got != wanted:
        raise ValueError(
            f"labels must be [samples] = {wanted} like the inputs (of dense outputs "
            f"[samples, ...]), got {got}; of columns take "
            "labels[:, 0], one-hot labels.argmax(1)"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(
            f"labels must be integers, got {labels.dtype}; "
            "use labels.long(), of an array labels.astype(int)"
        )
    counted = labels[labels != IGNORED] if places else labels
    if classes is not None and len(counted):
        low, high = counted.min().item(), counted.max().item()
        if low < 0 or high >= classes:
            raise ValueError(
                f"labels must be 0 to {classes - 1}, one for each of {classes} outputs,"
                f" got {low} to {high}; counted from 1: labels - 1; leave out what has "
                "no label: keep = labels >= 0"
            )
    return labels.to(torch.int64)


def as_scores(scores: Any, samples: int | None = None, name: str = "scores") -> Tensor:
    """Return finite scores [samples], at least one.

    Raises what `as_tensor` raises, and ValueError for another number of scores, for
    none, and for NaN or infinite ones.
    """
    scores = as_tensor(name, scores, "samples", floating=False)
    if len(scores) != (samples or max(1, len(scores))):
        wanted = samples or "one or more"
        raise ValueError(f"{name} must be [samples] = [{wanted}], got {len(scores)}")
    finite(name, scores)
    return scores.detach()


def as_inputs(inputs: Any, *, read: bool = True, by_name: bool = True) -> Any:
    """Return a network's inputs: a tensor [samples, ...], or tensors by name.

    A dataset or a loader is read once, whole; labels are left out. Inputs that have no
    labels any more are not to be `read`: two are no pair.

    Raises what `as_tensor` raises, and ValueError unless they are finite and every
    tensor holds the same number of samples, at least one; TypeError for tensors by name
    unless these are taken.
    """
    found = held(inputs)[0] if read else inputs
    named = isinstance(found, Mapping)
    if named and not by_name:
        raise TypeError(
            "inputs must be one tensor [samples, ...], got tensors by name "
            f"({', '.join(found)}); give a network that takes one"
        )
    given = found if named else {"inputs": found}
    tensors = {name: as_tensor(name, t, floating=False) for name, t in given.items()}
    counts = {len(t) if t.ndim else 0 for t in tensors.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "inputs must have the same number of samples, at least one, "
            f"got {sorted(counts)} samples"
        )
    for t in tensors.values():
        finite("inputs", t)
    return tensors if named else tensors["inputs"]


def as_image(image: Any) -> Tensor:
    """Return an image [channels, height, width] as float32, bytes as 0 to 1.

    Raises what `as_tensor` raises, and ValueError unless it has 1, 3 or 4 channels.
    """
    hint = "; of images [samples, height, width] give images[:, None]"
    image = as_tensor(
        "image", image, "channels height width", floating=False, hint=hint
    )
    one_of("the number of channels, the first axis of an image", len(image), (1, 3, 4))
    return image.detach().float() / (255 if image.dtype == torch.uint8 else 1)


def first_tensor(inputs: Inputs) -> Tensor:
    """Return the tensor, or the first of several."""
    return inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))


def count(inputs: Inputs) -> int:
    """Return the number of samples of inputs that `as_inputs` returned."""
    return len(first_tensor(inputs))


def finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError for NaN or an infinite value, with the first one's place."""
    if not _all_finite(tensor):
        first = (~tensor.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{name} must be finite, got NaN or an infinite value at {first}; "
            "clean them first"
        )


def representable(name: str, result: Tensor) -> None:
    """Raise ValueError for results that are too large for their precision."""
    if not _all_finite(result):
        raise ValueError(
            f"some {name} are too large for {result.dtype}; use float64 or scale them"
        )


def _all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor an infinite value."""
    if not tensor.is_floating_point() or tensor.detach().sum().isfinite():
        return True  # one pass, and no memory
    return bool(tensor.isfinite().all())  # a sum may also be too large


# Networks and settings ----------------------------------------------------------------


def one_network(model: Any, user: str, *, or_ensemble: bool = False) -> None:
    """Raise TypeError unless `model` is one torch module, as `user` wants."""
    ensemble = hasattr(model, "member_ids") and not or_ensemble
    if ensemble or not isinstance(model, nn.Module):
        kind = "a class" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"{user} takes one torch module, got {kind}; of a class make one, of "
            "weights build the network and use models.load_weights, of several "
            "networks use ensembles.from_members, of an ensemble ensemble.member(0)"
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
    if value not in list(accepted):
        wanted = ", ".join(map(repr, accepted))
        raise ValueError(f"{name} must be one of {wanted}; got {value!r}")


def pattern_of(target: Target) -> str:
    """Return the regular expression of a target: itself, or of names that end so."""
    if not isinstance(target, str):
        return rf"(^|\.)({'|'.join(map(re.escape, target))})$"
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


def between(name: str, value: Any, low: int, high: int) -> None:
    """Raise ValueError unless a number is `low` to `high`."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be {low} to {high}, got {value}")


def within(name: str, value: Any, interval: str) -> None:
    """Raise unless a number lies in an interval like "(0, 1]" or "[0, inf)"."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number in {interval}, got {value!r}")
    low, high = map(float, interval[1:-1].split(","))
    at_end = (value == low and "[" in interval) or (value == high and "]" in interval)
    if not (low < value < high or at_end):
        raise ValueError(f"{name} must be in {interval}, got {value}")


def positive(name: str, value: Any) -> None:
    """Raise unless a number is above zero and finite."""
    within(name, value, "(0, inf)")


# Data ---------------------------------------------------------------------------------


def parted(batch: Any) -> tuple[Any, Any]:
    """Return inputs and labels of a batch; None in place of labels that it has not."""
    if isinstance(batch, Mapping):
        inputs = {**batch}
        name = "labels" if "labels" in inputs else "label"  # as of Hugging Face
        return inputs, inputs.pop(name, None)
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) > 2:
        raise ValueError(
            f"a batch must be (inputs, labels), or a mapping, got {len(batch)} parts: "
            "several inputs go by name, with labels among them"
        )
    inputs, labels, *_ = *batch, None
    return inputs, labels


def opened(data: Any, labels: Any = None) -> Any:
    """Return (inputs, labels) of what is in memory, and datasets and loaders."""
    if hasattr(data, "with_format"):  # of Hugging Face
        data = data.with_format("torch")
    array = hasattr(data, "__array__") or hasattr(data, "toarray")
    in_memory = array or isinstance(data, Sequence | Mapping | Set)
    stream = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if isinstance(data, Dataset) or (stream and not in_memory):
        by_index = hasattr(data, "__getitem__") and not hasattr(data, "__len__")
        if by_index and not isinstance(data, IterableDataset):
            raise TypeError(
                f"a {type(data).__name__} must say how many samples it holds: give it "
                "__len__, or a part of it: torch.utils.data.Subset(data, range(1000))"
            )
        if labels is None:
            return data
        raise ValueError(
            f"labels come with the samples of a {type(data).__name__}, as (inputs, "
            "labels) or by name; give labels with tensors alone"
        )
    pair = isinstance(data, tuple) and len(data) == 2 and labels is None
    inputs, own = parted(data) if pair or isinstance(data, Mapping) else (data, None)
    return inputs, own if labels is None else labels


def read_batches(data: Any, batch_size: int = 1024) -> Iterator[tuple[Any, Any]]:
    """Yield inputs and labels, or None, batch by batch; what is in memory is one batch.

    Of a loader the size of batches is its own.
    """
    found, batch = opened(data), None
    if isinstance(found, tuple):
        found = [found]
    elif hasattr(found, "__getitem__") or isinstance(found, IterableDataset):
        found = DataLoader(found, batch_size)
    for batch in found:
        yield parted(batch)
    if batch is None:
        raise ValueError("data yields nothing; give at least one sample")


def held(data: Any, labels: Any = None) -> tuple[Any, Any]:
    """Return inputs and labels in memory; a dataset or a loader is read once, whole.

    Raises
    ------
    TypeError
        For what does not know how much it holds, and may have no end.
    ValueError
        For what yields nothing.
    """
    found = opened(data, labels)
    if isinstance(found, tuple):
        return found
    try:
        len(found)
    except TypeError as error:
        raise TypeError(
            f"inputs must be data that end, got {type(found).__name__}, which has no "
            "length; take a part of it: itertools.islice(batches, 1000)"
        ) from error
    inputs, labels = zip(*read_batches(found), strict=True)
    return _joined(inputs), None if labels[0] is None else _joined(labels)


def _joined(parts: Sequence[Any]) -> Any:
    """Return batches as one."""
    if isinstance(parts[0], Mapping):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    if isinstance(parts[0], Tensor):
        return torch.cat([*parts])
    return list(chain.from_iterable(parts))  # texts
