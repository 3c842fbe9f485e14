"""Heads by number, and what a network is given and returns."""

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import as_labels, count
from uqlab.core.modules import Inputs, call, logits_of, take
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
    """Count the heads of each layer, text before vision.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts; for others it raises what `shape` raises.
    """
    return [layer.heads for layer in attentions(model)]


def towers(model: nn.Module) -> dict[str, range]:
    """Find the rows of scores [layers, heads] that belong to "text" and to "vision".

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts. Of one stack of layers all rows belong to "".
    """
    return _rows(attentions(model))


def _rows(layers: list[Attention]) -> dict[str, range]:
    names = [layer.tower for layer in layers]
    rows = {}
    for name in dict.fromkeys(names):
        first = names.index(name)
        rows[name] = range(first, first + names.count(name))
    return rows


def check_heads(layers: list[Attention], heads: Iterable[Head]) -> list[Place]:
    """Find the places of heads.

    Parameters
    ----------
    layers : list of Attention
        The attention of every layer, from `attentions`.
    heads : iterable
        Pairs (layer, head), counted from 0; of two towers (tower, layer, head).

    Raises
    ------
    TypeError
        For what is no head's address.
    ValueError
        For heads that are absent or given twice.
    """
    rows = _rows(layers)
    places = []
    for tower, layer, head in _numbers(heads, len(rows) > 1):
        name = f"head {(tower, layer, head) if len(rows) > 1 else (layer, head)}"
        if tower not in rows:
            raise ValueError(f"{name}: the towers are {' and '.join(rows)}")
        last = len(rows[tower]) - 1
        if not 0 <= layer <= last:
            raise ValueError(f"{name}: there are layers 0 to {last}")
        place = rows[tower][layer], head
        most = layers[place[0]].heads
        if not 0 <= head < most:
            raise ValueError(f"{name}: layer {layer} has {most} heads, counted from 0")
        if place in places:
            raise ValueError(f"{name} is given more than once")
        places.append(place)
    return places


def _numbers(heads: Iterable[Head], towers: bool) -> list[tuple[str, int, int]]:
    """Return addresses as tower, layer, head; without towers the first is ""."""
    try:
        addresses: list[Any] = [head if towers else ("", *head) for head in heads]
        return [(tower, index(layer), index(head)) for tower, layer, head in addresses]
    except (TypeError, ValueError) as error:
        what = "pairs of integers (layer, head), such as [(0, 3), (2, 1)]"
        if towers:
            what = '(tower, layer, head), such as [("vision", 0, 3), ("text", 2, 1)]'
        raise TypeError(f"heads must be {what}") from error


def addresses(layers: list[Attention], places: Iterable[Place]) -> list[Head]:
    """Return the heads at these places: the inverse of `check_heads`.

    Parameters
    ----------
    layers : list of Attention
        The attention of every layer, from `attentions`.
    places : iterable
        The number of an attention among all of the network, and the head's in it.
    """
    rows = _rows(layers)
    if len(rows) == 1:
        return [*places]
    heads = []
    for row, head in places:
        tower = layers[row].tower
        heads.append((tower, row - rows[tower].start, head))
    return heads


def score_table(layers: list[Attention], scores: Mapping[Place, float]) -> Tensor:
    """Return scores of heads as a table [layers, heads], float64.

    Parameters
    ----------
    layers : list of Attention
        The attention of every layer, from `attentions`.
    scores : mapping
        The score of each place; where there is none, the table has NaN.
    """
    most = max(layer.heads for layer in layers)
    table = torch.full((len(layers), most), torch.nan, dtype=torch.float64)
    for place, score in scores.items():
        table[place] = score
    return table


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits [batch, classes], or raise ValueError for other outputs.

    Parameters
    ----------
    model : nn.Module
        A classifier.
    inputs
        A batch, on the device and in the precision of the model.
    """
    logits = logits_of(call(model, inputs))
    if logits.ndim != 2:
        raise ValueError(
            f"{type(model).__name__} must return logits [batch, classes], got "
            f"{list(logits.shape)}"
        )
    return logits


def check_labels(model: nn.Module, inputs: Inputs, labels: Any) -> Tensor:
    """Return the labels as int64 on the model's device, one for each input.

    Parameters
    ----------
    model : nn.Module
        A classifier, which says how many classes there are.
    inputs
        A tensor [samples, ...], or tensors by name.
    labels
        Classes [samples]; others raise what `as_labels` raises.
    """
    with torch.no_grad():
        classes = run(model, take(model, inputs, slice(1))).shape[1]
    labels = as_labels(labels, count(inputs), classes)
    return labels.to(next(model.parameters()).device)
