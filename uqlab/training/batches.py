"""What `fit` and `predict` read: tensors, datasets, loaders; their batches; crops."""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from uqlab.core.checks import as_inputs, at_least, count, first_tensor, parted
from uqlab.core.files import fingerprint
from uqlab.core.modules import like_parameters, map_tensors, rows_of
from uqlab.ensembles import GENERATOR, member_seed


def as_given(model: Any, inputs: Any) -> Any:
    """Return inputs, checked, as a network takes them."""
    x = as_inputs(inputs, read=False)
    if isinstance(x, Tensor) and x.dtype == torch.uint8:
        raise ValueError(
            "inputs are uint8; give images as floating point in [0, 1]: "
            "inputs.float() / 255, of an array inputs / 255"
        )
    return like_parameters(model, map_tensors(Tensor.detach, x))


class Tensors:
    """Samples in memory, on the ensemble's device."""

    def __init__(self, task, inputs, labels):
        self.inputs, self.labels = as_given(task.ensemble, inputs), labels
        self.samples = count(self.inputs)
        self.two = rows_of(self.inputs, slice(2))

    def check(self, check: Callable) -> None:
        """Check the labels by what `targets` returned."""
        where = first_tensor(self.two).device
        self.labels = check(self.labels, self.samples).to(where)
        self.about = {"inputs": self.inputs, "labels": self.labels}

    def epoch(self, _, orders, __):
        """Yield inputs and labels [members, batch, ...] of rows [members, batch]."""
        for order in orders:
            rows = order.to(self.labels.device)
            of_rows = functools.partial(_taken, rows=rows)
            yield map_tensors(of_rows, self.inputs), self.labels[rows]


def _taken(t, rows):
    """Return rows [members, batch] of a tensor, faster than t[rows]."""
    return t.index_select(0, rows.flatten()).unflatten(0, rows.shape)


class Loaded:
    """A dataset or a loader, of which each batch is read and checked when it is due.

    A map-style dataset is read for all members' orders at once; what yields batches is
    read once for all members.
    """

    def __init__(self, task, data):
        self.task, self.samples, self.begun = task, None, None
        self.data: Any = data
        self.how = {"num_workers": task.num_workers}
        if isinstance(data, IterableDataset):
            more = {"batch_size": task.batch_size, "drop_last": task.drop_last}
            self.data = DataLoader(data, **self.how, **more)
        elif hasattr(data, "__getitem__"):
            self.samples = at_least("samples of data", len(data))
            few = default_collate([data[i] for i in range(min(2, self.samples))])
        if not self.samples:
            self.begun = few, _ = self._begin(0, self.data)
        self.two = rows_of(as_given(task.ensemble, parted(few)[0]), slice(2))
        names = "batch_size", "drop_last", "sampler"
        size, drop, sampler = (getattr(self.data, name, None) for name in names)
        how = [type(self.data), self.samples, size, drop, type(sampler)]
        self.about = {"data": [*how, task.resume and self._few()]}

    def check(self, check: Callable) -> None:
        """Check the labels of every batch by what `targets` returned."""
        self.labels_of = check

    def _few(self):
        """Return what tells a few items apart, unless each reading draws others."""
        rows = getattr(self.data, "dataset", self.data)
        if isinstance(rows, IterableDataset) or not hasattr(rows, "__getitem__"):
            return None
        found, bits = [], np.random.get_bit_generator()  # type: ignore
        before = random.getstate(), bits.state
        with GENERATOR, torch.random.fork_rng([]):
            for _ in range(2):
                torch.manual_seed(0)
                random.seed(0)
                bits.state = type(bits)(0).state
                few = range(0, len(rows), len(rows) // 8 + 1)
                found.append(fingerprint([rows[i] for i in few]))
            random.setstate(before[0])
            bits.state = before[1]
        return found[0] if len({*found}) == 1 else None

    def _begin(self, epoch, batches):
        """Return an epoch's first batch, and the others.

        What is drawn for it, as by a loader that shuffles, follows from (seed, epoch).
        """
        seed = member_seed(self.task.seed, 0, "order", epoch)
        sampler = getattr(batches, "batch_sampler", None)
        parts = [batches, sampler, getattr(sampler, "sampler", None)]
        parts += [getattr(batches, name, None) for name in ("sampler", "dataset")]
        with GENERATOR, torch.random.fork_rng([]):
            for part in parts:
                if hasattr(part, "set_epoch"):
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
            batches = DataLoader(self.data, batch_sampler=rows, **self.how)
        else:
            members = 1
        begun, self.begun = self.begun, None
        first, others = begun if begun and not number else self._begin(number, batches)
        each = functools.partial(torch.unflatten, dim=0, sizes=(members, -1))
        for batch in itertools.chain([first], others):
            inputs, labels = parted(batch)
            x = as_given(self.task.ensemble, inputs)
            y = self.labels_of(labels, count(x)).to(first_tensor(x).device)
            yield map_tensors(each, x), each(y)


def crop_flip(
    x: Tensor, generators: list[torch.Generator], padding: int = 4, flip: bool = True
) -> Tensor:
    """Return random crops of the zero-padded images; every second is mirrored.

    Parameters
    ----------
    x
        Images [members, batch, channels, height, width].
    generators
        One a member.
    padding
        Pixels on each side.
    flip
        Whether images are mirrored, each with probability one half.
    """
    _, batch, _, height, width = x.shape
    size = (2, batch, 1)
    corners = [torch.randint(2 * padding + 1, size, generator=g) for g in generators]
    down, right = torch.stack(corners, 1).to(x.device)  # [members, batch, 1] each
    draws = [torch.rand(batch, 1, generator=g) for g in generators]
    mirrored = torch.stack(draws).to(x.device) < 0.5 * flip
    rows = down + torch.arange(height, device=x.device)
    columns = right + torch.arange(width, device=x.device)
    columns = torch.where(mirrored, columns.flip(-1), columns)
    cropped = F.pad(x, (padding,) * 4).take_along_dim(rows[:, :, None, :, None], 3)
    return cropped.take_along_dim(columns[:, :, None, None], 4)
