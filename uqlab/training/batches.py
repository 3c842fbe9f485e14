"""What `fit` and `predict` read: tensors, datasets, loaders; and their batches."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from uqlab.core.checks import as_inputs, at_least, count, first_tensor
from uqlab.core.modules import like_parameters, map_tensors, rows_of
from uqlab.ensembles import member_seed

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
            f"a batch must be (inputs, labels), or mappings, got {len(batch)} parts: "
            "several inputs go by name, with labels among them"
        )
    inputs, labels, *_ = *batch, None
    return inputs, labels


def as_given(model: Any, inputs: Any) -> Any:
    """Return inputs, checked, as a network takes them."""
    x = as_inputs(inputs)
    if isinstance(x, Tensor) and x.dtype == torch.uint8:
        raise ValueError(
            "inputs are uint8; give images as floating point in [0, 1]: "
            "inputs.float() / 255, of an array inputs / 255"
        )
    return like_parameters(model, map_tensors(Tensor.detach, x))


def opened(data: Any, labels: Any = None) -> Any:
    """Return (inputs, labels) of what is in memory, and datasets and loaders."""
    if hasattr(data, "with_format"):  # of Hugging Face
        data = data.with_format("torch")
    array = hasattr(data, "__array__") or hasattr(data, "toarray")
    held = array or isinstance(data, Sequence | Mapping)
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
    """Yield inputs and labels of whatever `fit` takes, batch by batch.

    Parameters
    ----------
    data
        As in `fit`; what is in memory is one batch.
    batch_size
        Of a dataset; a loader has its own.

    Yields
    ------
    tuple
        Inputs, and labels or None.
    """
    at_least("batch_size", batch_size)
    found = opened(data)
    held = isinstance(found, tuple)
    batch = None
    for batch in [found] if held else loader(found, batch_size=batch_size):
        yield parted(batch)
    if batch is None:
        raise ValueError("data yields nothing; give at least one sample")


class Tensors:
    """Samples in memory, on the ensemble's device."""

    place = None

    def __init__(self, ensemble, inputs, labels):
        self.inputs, self.labels = as_given(ensemble, inputs), labels
        self.samples = count(self.inputs)
        self.two = rows_of(self.inputs, slice(2))

    def check(self, check: Callable) -> None:
        """Check the labels by what `targets` returned."""
        where = first_tensor(self.two).device
        self.labels = check(self.labels, self.samples).to(where)
        self.about = {"inputs": self.inputs, "labels": self.labels}

    def epoch(self, _, orders, __):
        """Yield inputs and labels [members, batch, ...] of rows [members, batch].

        Inputs lie in the same memory in every step: fresh memory would cost as much as
        filling it.
        """
        memory: dict[int, Tensor] = {}

        def of(t, rows):
            out = memory.setdefault(id(t), t.new_empty(0))
            out.resize_(0)  # it keeps its bytes, and grows to what is drawn
            flat = torch.index_select(t, 0, rows.flatten(), out=out)
            return flat.unflatten(0, rows.shape)

        for order in orders:
            rows = order.to(self.labels.device)
            yield map_tensors(partial(of, rows=rows), self.inputs), self.labels[rows]


class Loaded:
    """A dataset or a loader, of which each batch is read and checked when it is due.

    A map-style dataset is read for all members' orders at once; what yields batches is
    read once for all members.
    """

    def __init__(
        self, ensemble, data, num_workers, *, seed, batch_size, drop_last, **_
    ):
        self.ensemble, self.seed, self.num_workers = ensemble, seed, num_workers
        self.data, self.samples, self.begun = data, None, None
        if has_rows(data):
            self.samples = len(data)
            few = default_collate([data[i] for i in range(min(2, self.samples))])
        else:
            how = {"batch_size": batch_size, "drop_last": drop_last}
            self.data = loader(data, num_workers=num_workers, **how)
            few, _ = self.begun = self._begin(0, self.data)
        self.two = rows_of(as_given(ensemble, parted(few)[0]), slice(2))
        self.about = {"data": [type(self.data), self.samples]}

    def check(self, check: Callable) -> None:
        """Check the labels of every batch by what `targets` returned."""
        self.labels_of = check

    @property
    def place(self) -> Tensor | None:
        """The state of the generator that a loader has of its own."""
        drawing = getattr(self.data, "generator", None)
        return drawing and drawing.get_state()

    @place.setter
    def place(self, state):
        self.begun = None
        if state is not None:
            self.data.generator.set_state(state)

    def _begin(self, epoch, batches):
        """Return an epoch's first batch, and the others.

        What draws from torch, as a loader that shuffles, follows from (seed, epoch).
        """
        with torch.random.fork_rng([]):
            torch.manual_seed(member_seed(self.seed, 0, "order", epoch))
            others = iter(batches)
            for first in others:
                return first, others
        raise ValueError(
            f"data yields nothing in epoch {epoch + 1}; give a loader with batches, "
            "which can be read anew in every epoch"
        )

    def epoch(self, number, orders, members):
        """Yield inputs and labels [members, batch, ...], of loaders [1, batch, ...]."""
        batches = self.data
        if self.samples:
            rows: Any = (order.flatten().tolist() for order in orders)
            workers = self.num_workers
            batches = DataLoader(self.data, batch_sampler=rows, num_workers=workers)
        else:
            members = 1
        begun, self.begun = self.begun, None
        first, others = begun or self._begin(number, batches)
        each = partial(torch.unflatten, dim=0, sizes=(members, -1))
        for batch in itertools.chain([first], others):
            inputs, labels = parted(batch)
            x = as_given(self.ensemble, inputs)
            y = self.labels_of(labels, count(x)).to(first_tensor(x).device)
            yield map_tensors(each, x), each(y)
