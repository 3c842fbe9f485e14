"""Heads by number, and what a network is given and returns."""

from collections.abc import Iterable, Iterator, Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import as_labels, at_least, count
from uqlab.core.modules import Inputs, call, like_parameters, logits_of, map_tensors
from uqlab.models import Attention, attentions

# (layer, head), or (tower, layer, head) of a network with two towers.
Head = tuple[int, int] | tuple[str, int, int]
Place = tuple[int, int]  # the number of an attention among all of a network, head


def shape(model: nn.Module) -> tuple[int, int]:
    """Count layers and heads.

    Parameters
    ----------
    model : nn.Module
        One network with one stack of layers, or with a text and a vision tower.

    Returns
    -------
    tuple of int
        (layers, heads): the layers of two towers together; of a pruned model, the heads
        of the layer that has most.

    Raises
    ------
    TypeError
        If `model` is not one network.
    ValueError
        If its heads cannot be told apart.

    Examples
    --------
    >>> from uqlab import models
    >>> shape(models.vit(8, 4, width=16, layers=2, heads=4))
    (2, 4)
    """
    counts = count_heads(model)
    return len(counts), max(counts)


def count_heads(model: nn.Module) -> list[int]:
    """Count the heads of each layer, text before vision; raises what `shape` raises."""
    return [attention.heads for attention in attentions(model)]


def towers(model: nn.Module) -> dict[str, range]:
    """Find the rows of scores [layers, heads] that belong to "text" and to "vision".

    Of one stack of layers all rows belong to "".
    """
    return _rows(attentions(model))


def _rows(found: list[Attention]) -> dict[str, range]:
    names = [attention.tower for attention in found]
    rows = {}
    for name in dict.fromkeys(names):
        first = names.index(name)
        rows[name] = range(first, first + names.count(name))
    return rows


def check_heads(found: list[Attention], heads: Iterable[Head]) -> list[Place]:
    """Where the heads are.

    Raises TypeError for what is no head's address, ValueError for heads that are absent
    or given twice.
    """
    rows = _rows(found)
    what = "pairs of integers (layer, head), such as [(0, 3), (2, 1)]"
    if len(rows) > 1:
        what = '(tower, layer, head), such as [("vision", 0, 3), ("text", 2, 1)]'
    places: list[Place] = []
    try:
        addresses: list[Any] = [tuple(head) for head in heads]
        split = [head if len(rows) > 1 else ("", *head) for head in addresses]
        numbers = [(tower, index(layer), index(head)) for tower, layer, head in split]
    except (TypeError, ValueError) as error:
        raise TypeError(f"heads must be {what}") from error
    for name, (tower, layer, head) in zip(addresses, numbers, strict=True):
        if tower not in rows:
            raise ValueError(f"head {name}: the towers are {' and '.join(rows)}")
        last = len(rows[tower]) - 1
        if not 0 <= layer <= last:
            raise ValueError(f"head {name}: there are layers 0 to {last}")
        most = found[rows[tower][layer]].heads
        if not 0 <= head < most:
            raise ValueError(
                f"head {name}: layer {layer} has {most} heads, counted from 0"
            )
        places.append((rows[tower][layer], head))
        if places.count(places[-1]) > 1:
            raise ValueError(f"head {name} is given more than once")
    return places


def addresses(found: list[Attention], places: Iterable[Place]) -> list[Head]:
    """Return the heads at these places: the inverse of `check_heads`."""
    rows = _rows(found)
    if len(rows) == 1:
        return [*places]
    heads: list[Head] = []
    for row, head in places:
        tower = found[row].tower
        heads.append((tower, row - rows[tower].start, head))
    return heads


def score_table(found: list[Attention], scores: Mapping[Place, float]) -> Tensor:
    """Scores of heads as a table [layers, heads], float64; NaN where there is none."""
    most = max(attention.heads for attention in found)
    table = torch.full((len(found), most), torch.nan, dtype=torch.float64)
    for place, score in scores.items():
        table[place] = score
    return table


def take(model: nn.Module, inputs: Inputs, rows: slice) -> Any:
    """Return some of the inputs on the model's device, in its precision."""
    return like_parameters(model, map_tensors(lambda t: t[rows], inputs))


def batches(
    model: nn.Module, inputs: Inputs, batch_size: int
) -> Iterator[tuple[slice, Any]]:
    """Return the inputs in batches: their rows, and what the model is given."""
    at_least("batch_size", batch_size)
    for low in range(0, count(inputs), batch_size):
        rows = slice(low, low + batch_size)
        yield rows, take(model, inputs, rows)


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits [batch, classes]."""
    logits = logits_of(call(model, inputs))
    shape = list(getattr(logits, "shape", ()))
    if len(shape) != 2:
        kind = f"{type(logits).__name__} {shape or ''}"
        raise ValueError(
            f"{type(model).__name__} must return logits [batch, classes], got {kind}"
        )
    return logits


def check_labels(model: nn.Module, inputs: Inputs, labels: Any) -> Tensor:
    """Return the labels as int64 on the model's device, one for each input."""
    with torch.no_grad():
        classes = run(model, take(model, inputs, slice(1))).shape[1]
    labels = as_labels(labels, count(inputs), classes)
    return labels.to(next(model.parameters()).device)
