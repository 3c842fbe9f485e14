"""What a user brings as data: tensors, mappings, datasets, loaders, of any maker."""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

LABELS = "labels", "label"  # in mappings, as transformers and datasets call them


def parted(batch: Any) -> tuple[Any, Any]:
    """Return inputs and labels of a batch; None in place of labels that it has not."""
    if isinstance(batch, Mapping):
        inputs = {**batch}
        for name in LABELS:
            if name in inputs:
                return inputs, inputs.pop(name)
        return inputs, None
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
    held = array or isinstance(data, Sequence | Mapping | Set)
    if isinstance(data, Dataset) or (
        not held and (hasattr(data, "__iter__") or has_rows(data))
    ):
        if labels is None:
            return data
        raise ValueError(
            f"labels come with the samples of a {type(data).__name__}, as (inputs, "
            "labels) or by name; give labels with tensors alone"
        )
    pair = isinstance(data, tuple) and len(data) == 2 and labels is None
    inputs, own = parted(data) if pair or isinstance(data, Mapping) else (data, None)
    return inputs, own if labels is None else labels


def has_rows(data: Any) -> bool:
    """Return whether a dataset gives any of its samples, in any order."""
    stream = isinstance(data, IterableDataset)
    return hasattr(data, "__getitem__") and not stream


def loader(data: Any, **how: Any) -> Any:
    """Return what yields batches of a dataset; a loader as it is."""
    dataset = has_rows(data) or isinstance(data, IterableDataset)
    return DataLoader(data, **how) if dataset else data


def read_batches(data: Any, batch_size: int = 1024) -> Iterator[tuple[Any, Any]]:
    """Yield inputs and labels, or None, batch by batch; what is in memory is one batch.

    Of a loader the size of batches is its own.
    """
    found, batch = opened(data), None
    held = isinstance(found, tuple)
    for batch in [found] if held else loader(found, batch_size=batch_size):
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
