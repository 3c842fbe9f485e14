"""Addresses of heads, tables of scores, and calls of classifiers."""

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
    """Count the layers and heads of a network.

    Parameters
    ----------
    model : nn.Module
        One network with one stack of layers, or with a text and a vision tower.

    Returns
    -------
    tuple of int
        (layers, heads): the layers of both towers together, and the heads of the layer
        with most heads.

    Raises
    ------
    TypeError
        If `model` is not one network.
    ValueError
        If its heads cannot be separated.

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
        A network that `shape` accepts.
    """
    return [layer.heads for layer in attentions(model)]


def towers(model: nn.Module) -> dict[str, range]:
    """Find the rows of scores [layers, heads] that belong to "text" and to "vision".

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts. In one stack of layers all rows belong to "".
    """
    return _rows(attentions(model))


def _rows(layers: list[Attention]) -> dict[str, range]:
    names = [layer.tower for layer in layers]
    rows = {}
    for name in dict.fromkeys(names):
        first = names.index(name)
        rows[name] = range(first, first + names.count(name))
    return rows


def _addresses(layers: list[Attention]) -> dict[Place, Any]:
    """Return the address of every place."""
    rows = _rows(layers)
    table = {}
    for row, layer in enumerate(layers):
        own = row - rows[layer.tower].start
        for head in range(layer.heads):
            two = bool(layer.tower)
            table[row, head] = (layer.tower, own, head) if two else (row, head)
    return table


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
        If an address is not a pair of integers, or not (tower, layer, head).
    ValueError
        If a head does not exist or is given twice.
    """
    known = {address: place for place, address in _addresses(layers).items()}
    form, kinds = "pairs of integers (layer, head)", [int, int]
    if layers[0].tower:
        form, kinds = '(tower, layer, head), "text" or "vision" first', [str, int, int]
    places = []
    for head in heads:
        try:
            each: Any = head
            address = tuple(n if isinstance(n, str) else int(index(n)) for n in each)
        except TypeError:
            address = ()
        if [*map(type, address)] != kinds:
            raise TypeError(f"heads must be {form}, got {head!r}")
        if address not in known:
            counts = {
                name: [layers[row].heads for row in rows]
                for name, rows in _rows(layers).items()
            }
            raise ValueError(
                f"there is no head {address}: heads are {form}, counted from 0, and "
                f"the layers have {counts.get('', counts)} heads"
            )
        if known[address] in places:
            raise ValueError(f"head {address} is given more than once")
        places.append(known[address])
    return places


def addresses(layers: list[Attention], places: Iterable[Place]) -> list[Head]:
    """Return the addresses of heads: the inverse of `check_heads`.

    Parameters
    ----------
    layers : list of Attention
        The attention of every layer, from `attentions`.
    places : iterable
        The number of a layer among all layers of the network, and of a head in it.
    """
    table = _addresses(layers)
    return [table[place] for place in places]


def score_table(layers: list[Attention], scores: Mapping[Place, float]) -> Tensor:
    """Return scores of heads as a table [layers, heads], float64.

    Parameters
    ----------
    layers : list of Attention
        The attention of every layer, from `attentions`.
    scores : mapping
        The score of each place. The table has NaN elsewhere.
    """
    most = max(layer.heads for layer in layers)
    table = torch.full((len(layers), most), torch.nan, dtype=torch.float64)
    for place, score in scores.items():
        table[place] = score
    return table


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits [batch, classes]; raise ValueError for other outputs.

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
        A classifier, whose logits give the number of classes.
    inputs
        A tensor [samples, ...], or tensors by name.
    labels
        Classes [samples].
    """
    with torch.no_grad():
        classes = run(model, take(model, inputs, slice(1))).shape[1]
    labels = as_labels(labels, count(inputs), classes)
    return labels.to(next(model.parameters()).device)
