"""Addresses of heads, tables of scores, and calls of classifiers."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import as_labels, count
from uqlab.core.modules import Inputs, call, like_parameters, logits_of
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
    return _towers(attentions(model))


def _towers(layers: list[Attention]) -> dict[str, range]:
    names = [layer.tower for layer in layers]
    rows = {}
    for name in names:
        first = names.index(name)
        rows[name] = range(first, first + names.count(name))
    return rows


def addresses(layers: list[Attention]) -> dict[Head, Place]:
    """Return the place of every head of a network by its address, in their order.

    Parameters
    ----------
    layers : list of Attention
        The attention of every layer, from `attentions`.
    """
    places = {}
    for tower, rows in _towers(layers).items():
        for row in rows:
            for head in range(layers[row].heads):
                own = (row - rows.start, head)
                places[(tower, *own) if tower else own] = row, head
    return places


def find_heads(layers: list[Attention], heads: Iterable[Head]) -> list[Place]:
    """Find the places of heads.

    Parameters
    ----------
    layers : list of Attention
        The attention of every layer, from `attentions`.
    heads : iterable
        Pairs (layer, head), counted from 0; of two towers (tower, layer, head).

    Raises
    ------
    ValueError
        If a head does not exist or is given twice.
    """
    known = addresses(layers)
    places = []
    for head in heads:
        if not isinstance(head, tuple) or head not in known:
            form = "(tower, layer, head)" if layers[0].tower else "(layer, head)"
            raise ValueError(
                f"`heads` must be a list of {form}, counted from 0, of "
                f"{[layer.heads for layer in layers]} heads in the layers, got {head!r}"
            )
        if known[head] in places:
            raise ValueError(f"head {head} is given more than once")
        places.append(known[head])
    return places


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


def classify(model: nn.Module, inputs: Inputs) -> Tensor:
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
        classes = classify(model, like_parameters(model, inputs, slice(1))).shape[1]
    labels = as_labels(labels, count(inputs), classes)
    return labels.to(next(model.parameters()).device)
