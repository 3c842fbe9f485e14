"""What `fit` and `predict` read: tensors, datasets, loaders; and their batches."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from uqlab.core.checks import at_least, count, first_tensor, inputs_alone
from uqlab.core.modules import like_parameters, map_tensors, rows_of
from uqlab.core.reading import has_rows, loader, parted
from uqlab.ensembles import GENERATOR, member_seed


def as_given(model: Any, inputs: Any) -> Any:
    """Return inputs, checked, as a network takes them."""
    x = inputs_alone(inputs)
    if isinstance(x, Tensor) and x.dtype == torch.uint8:
        raise ValueError(
            "inputs are uint8; give images as floating point in [0, 1]: "
            "inputs.float() / 255, of an array inputs / 255"
        )
    return like_parameters(model, map_tensors(Tensor.detach, x))


class Tensors:
    """Samples in memory, on the ensemble's device."""

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

    def __init__(self, ensemble, data, num_workers, seed, batch_size, drop_last):
        self.ensemble, self.seed, self.num_workers = ensemble, seed, num_workers
        self.data, self.samples, self.begun = data, None, None
        if has_rows(data):
            self.samples = len(data)
            at_least("samples of data", self.samples)
            few = default_collate([data[i] for i in range(min(2, self.samples))])
        else:
            how = {"batch_size": batch_size, "drop_last": drop_last}
            self.data = loader(data, num_workers=num_workers, **how)
            few, _ = self.begun = self._begin(0, self.data)
        self.two = rows_of(as_given(ensemble, parted(few)[0]), slice(2))
        size = getattr(self.data, "batch_size", None)
        self.about = {"data": [type(self.data), self.samples, size]}

    def check(self, check: Callable) -> None:
        """Check the labels of every batch by what `targets` returned."""
        self.labels_of = check

    def _begin(self, epoch, batches):
        """Return an epoch's first batch, and the others.

        What is drawn for it, as by a loader that shuffles, follows from (seed, epoch).
        """
        seed = member_seed(self.seed, 0, "order", epoch)
        batch_sampler = getattr(batches, "batch_sampler", None)
        parts = [batches, batch_sampler, getattr(batch_sampler, "sampler", None)]
        parts += [getattr(batches, name, None) for name in ("sampler", "dataset")]
        with GENERATOR, torch.random.fork_rng([]):
            for part in parts:
                if callable(getattr(part, "set_epoch", None)):
                    part.set_epoch(epoch)  # of distributed samplers, of streams
                if isinstance(getattr(part, "generator", None), torch.Generator):
                    part.generator.manual_seed(seed)
            torch.manual_seed(seed)
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
        first, others = begun if begun and not number else self._begin(number, batches)
        each = partial(torch.unflatten, dim=0, sizes=(members, -1))
        for batch in itertools.chain([first], others):
            inputs, labels = parted(batch)
            x = as_given(self.ensemble, inputs)
            y = self.labels_of(labels, count(x)).to(first_tensor(x).device)
            yield map_tensors(each, x), each(y)
