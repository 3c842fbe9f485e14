"""Networks without some of their heads, for a while or for good, and their cost."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from uqlab.core.checks import between
from uqlab.core.modules import Counted, Inputs, call, evaluating, like_parameters
from uqlab.heads.attention import Head, check_heads
from uqlab.heads.cutting import TABLES, without
from uqlab.models import attentions, classifier

Model = TypeVar("Model", bound=nn.Module)


@contextlib.contextmanager
def ablate(model: Model, heads: Iterable[Head]) -> Iterator[Model]:
    """Remove heads inside a `with` block, by zeros in the output projections.

    Afterwards these columns are what they were, bit for bit, whatever training made of
    them (Hydra, D.1.2).

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts; it is changed in place.
    heads : iterable
        Pairs (layer, head), counted from 0; of two towers (tower, layer, head).

    Yields
    ------
    nn.Module
        The model.

    Raises
    ------
    ValueError
        For heads that the model does not have or that are given twice, and where
        `shape` raises one.
    """
    layers = attentions(model)
    places = check_heads(layers, heads)
    blocks = [layers[layer].output.of(model, head) for layer, head in places]
    saved = [block.clone() for block in blocks]
    try:
        for block in blocks:
            block.zero_()
        yield model
    finally:
        for block, values in zip(blocks, saved, strict=True):
            block.copy_(values)


def prune(model: Model, heads: Iterable[Head]) -> Model:
    """Return a smaller copy without these heads; it returns what `ablate` returns.

    The heads' parts of the query, key, value and output projections are cut out, and
    the other heads of a layer are numbered from 0 again. A layer may lose all its
    heads: its attention then gives only the output projection's bias.

    Where heads share the key and value of a group, a group is cut out when all its
    heads go; other heads become zeros in the output projection and still count. The
    same happens in a layer whose attention cannot work with fewer heads, such as one
    that reshapes to the width of its input: whether it can is found by running the cut
    attention and the ablated one on random numbers.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts; it is not changed.
    heads : iterable
        Pairs (layer, head), counted from 0; of two towers (tower, layer, head).

    Returns
    -------
    nn.Module
        The copy. An nn.MultiheadAttention that is cut becomes four linear layers.

    Raises
    ------
    ValueError
        For heads that the model does not have or that are given twice, and where
        `shape` raises one.
    """
    layers = attentions(model)
    places = check_heads(layers, heads)
    small = copy.deepcopy(model)
    units = tuple(f"{attention.unit}." for attention in layers)
    # BEiT's layers hand their attention a bias for each head.
    biased = any(
        name.endswith(TABLES) and not name.startswith(units)
        for name, _ in model.named_parameters()
    )
    for layer, attention in enumerate(layers):
        gone = [head for at, head in places if at == layer]
        for head in gone:
            attention.output.of(small, head).zero_()
        if gone and not biased:
            small = without(small, attention, set(gone))
    return small


def only_last(model: Model, layers: int) -> Model:
    """Let only the last layers and the classifier learn, from a classifier of zeros.

    So Hydra (D.2) trains a pruned network on for CIFAR-100: the last five of twelve
    layers, or the classifier alone.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts; it is changed in place.
    layers : int
        How many of the last layers learn; 0 for the classifier alone.

    Returns
    -------
    nn.Module
        The model.

    Raises
    ------
    ValueError
        For more layers than there are, and where `shape` raises one.
    """
    names = [attention.layer for attention in attentions(model)]
    between("layers", layers, 0, len(names), ", the number of layers")
    model.requires_grad_(False)
    head = classifier(model)
    if head.startswith(tuple(f"{name}." for name in names)):
        raise ValueError(f"{head!r} is no classifier; define the classifier last")
    last = model.get_submodule(head)
    last.requires_grad_()
    for name in names[len(names) - layers :]:
        model.get_submodule(name).requires_grad_()
    for p in last.parameters():
        nn.init.zeros_(p)
    return model


@torch.no_grad()
def multiply_adds(model: nn.Module, inputs: Inputs) -> int:
    """Count the multiply-adds of one pass.

    Matrix products, convolutions and attention count; biases, normalisation and
    activations do not.

    Parameters
    ----------
    model : nn.Module
        A network, or an ensemble, whose members are counted together.
    inputs
        A tensor [batch, ...], or tensors by name.

    Returns
    -------
    int
        The multiply-adds of the whole batch.
    """
    here, counted = like_parameters(model, inputs), Counted()
    with evaluating(model):
        call(model, here)  # an ensemble tries once how its members run
        with counted:
            call(model, here)
    return counted.multiply_adds
