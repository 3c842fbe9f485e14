"""Heads by number, attention without heads, and what a network is given and returns."""

import itertools
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import class_labels, count_samples
from uqlab.core.modules import Inputs, call, like_parameters, logits_of, map_tensors
from uqlab.models import Attention, attentions

Head = (
    tuple[int, int] | tuple[str, int, int]
)  # layer, head; of two towers: tower, layer, head
Place = tuple[int, int]  # the number of an attention among all of a network, head


def shape(model: nn.Module) -> tuple[int, int]:
    """(layers, heads); the layers of a pruned model differ, and the heads are those of the layer that has most.

    The layers of two towers are counted together. Raises TypeError unless the model is one network, ValueError unless
    it has one stack of layers with separable heads, or a text and a vision tower.
    """
    counts = count_heads(model)
    return len(counts), max(counts)


def count_heads(model: nn.Module) -> list[int]:
    """The number of heads of each layer, text before vision; raises the errors of `shape`."""
    return [attention.heads for attention in attentions(model)]


def towers(model: nn.Module) -> dict[str, range]:
    """Which rows of scores [layers, heads] belong to "text" and which to "vision"; of one stack of layers all to ""."""
    return _rows(attentions(model))


def _rows(found: list[Attention]) -> dict[str, range]:
    counts = Counter(attention.tower for attention in found)
    ends = itertools.accumulate(counts.values())
    return {
        tower: range(end - count, end)
        for (tower, count), end in zip(counts.items(), ends, strict=True)
    }


def check_heads(found: list[Attention], heads: Iterable[Head]) -> list[Place]:
    """Where the heads are; TypeError for what is no head's address, ValueError for heads absent or given twice."""
    rows = _rows(found)
    what = "pairs of integers (layer, head), such as [(0, 3), (2, 1)]"
    if len(rows) > 1:
        what = '(tower, layer, head), such as [("vision", 0, 3), ("text", 2, 1)]'
    try:
        given: list[Any] = [tuple(head) for head in heads]
        split = [head if len(rows) > 1 else ("", *head) for head in given]
        addresses = [
            (tower, operator.index(layer), operator.index(head))
            for tower, layer, head in split
        ]
    except (TypeError, ValueError) as error:
        raise TypeError(f"heads must be {what}") from error
    places = []
    for own, (tower, layer, head) in zip(given, addresses, strict=True):
        if tower not in rows:
            raise ValueError(f"head {own}: the towers are {' and '.join(rows)}")
        if not 0 <= layer < len(rows[tower]):
            raise ValueError(
                f"head {own}: there are layers 0 to {len(rows[tower]) - 1}"
            )
        count = found[rows[tower][layer]].heads
        if not 0 <= head < count:
            raise ValueError(
                f"head {own}: layer {layer} has {count} heads, counted from 0"
            )
        places.append((rows[tower][layer], head))
    if twice := [
        own for own, place in zip(given, places, strict=True) if places.count(place) > 1
    ]:
        raise ValueError(f"head {twice[0]} is given more than once")
    return places


def addresses(found: list[Attention], places: Iterable[Place]) -> list[Head]:
    """The heads at these places: the inverse of `check_heads`."""
    rows = _rows(found)
    if len(rows) == 1:
        return [*places]
    return [
        (found[row].tower, row - rows[found[row].tower].start, head)
        for row, head in places
    ]


def take(model: nn.Module, inputs: Inputs, rows: slice) -> Inputs:
    """Some of the inputs, on the model's device; floating-point ones in the model's precision."""
    return like_parameters(model, map_tensors(lambda t: t[rows], inputs))


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """The logits [batch, classes]."""
    logits = logits_of(call(model, inputs))
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        found = (
            f"a tensor {list(logits.shape)}"
            if isinstance(logits, Tensor)
            else type(logits).__name__
        )
        raise ValueError(
            f"{type(model).__name__} must return logits [batch, classes], got {found}"
        )
    return logits


def check_labels(model: nn.Module, inputs: Inputs, labels: Tensor) -> Tensor:
    """The labels as int64 on the model's device, one for each input."""
    with torch.no_grad():
        classes = run(model, take(model, inputs, slice(1))).shape[1]
    return class_labels(labels, count_samples(inputs), classes).to(
        next(model.parameters()).device
    )
