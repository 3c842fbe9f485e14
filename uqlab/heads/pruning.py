"""Ablation and pruning of heads, partial fine-tuning, and cost."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from uqlab.core.checks import between
from uqlab.core.modules import Counted, Inputs, call, evaluating, like_parameters
from uqlab.heads.attention import Head, check_heads
from uqlab.heads.cutting import cut, split_qkv
from uqlab.models import attentions, classifier

Model = TypeVar("Model", bound=nn.Module)


@contextlib.contextmanager
def ablate(model: Model, heads: Iterable[Head]) -> Iterator[Model]:
    """Ablate heads inside a `with` block, by zeros in the output projections.

    At the end the heads' columns get their old values back, bit for bit, even if they
    were trained inside (Hydra, D.1.2).

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts. It is changed in place.
    heads : iterable
        Pairs (layer, head), counted from 0; for two towers (tower, layer, head).

    Yields
    ------
    nn.Module
        The model.

    Raises
    ------
    ValueError
        If a head does not exist or is given twice, or if `shape` raises one.
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
    """Return a smaller copy without these heads. Its outputs are those of `ablate`.

    The heads' parts of the query, key, value and output projections are cut out, and
    the remaining heads of a layer are numbered from 0 again. A layer without heads
    returns the bias of its output projection.

    Some heads become zeros in the output projection instead; they still count, and
    training can bring them back. These are heads whose key and value serve a remaining
    head, and heads of attention that is not known to work with fewer heads. It works
    for ViT, DeiT, AST, CLIP, Whisper, BERT, DistilBERT and Llama of transformers and
    for nn.MultiheadAttention.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts. It is not changed.
    heads : iterable
        Pairs (layer, head), counted from 0; for two towers (tower, layer, head).

    Returns
    -------
    nn.Module
        The copy. An nn.MultiheadAttention that is cut becomes four linear layers.

    Raises
    ------
    ValueError
        If a head does not exist or is given twice, or if `shape` raises one.
    """
    layers = attentions(model)
    gone: dict[int, set[int]] = {}
    for layer, head in check_heads(layers, heads):
        gone.setdefault(layer, set()).add(head)
    small = split_qkv(copy.deepcopy(model), [layers[layer].name for layer in gone])
    layers = attentions(small)
    for layer, lost in gone.items():
        for head in lost:
            layers[layer].output.of(small, head).zero_()
        small = cut(small, layers[layer], lost)
    return small


def only_last(model: Model, layers: int) -> Model:
    """Freeze all but the last layers and the classifier, which is set to zero.

    Hydra (D.2) fine-tunes a pruned network for CIFAR-100 like this: the last five of
    twelve layers, or only the classifier.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts. It is changed in place.
    layers : int
        Number of last layers to train; 0 trains only the classifier.

    Returns
    -------
    nn.Module
        The model.

    Raises
    ------
    ValueError
        If `layers` is larger than the number of layers, if the last linear layer is
        inside a layer, or if `shape` raises one.
    """
    names = [attention.layer for attention in attentions(model)]
    between("layers", layers, 0, len(names), ", the number of layers")
    model.requires_grad_(False)
    head = classifier(model)
    if head.startswith(tuple(f"{name}." for name in names)):
        raise ValueError(
            f"{head!r}, the last linear layer, is inside a layer of attention; define "
            "the classifier last"
        )
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

    Matrix products, convolutions and attention count. Biases, normalization and
    activations do not.

    Parameters
    ----------
    model : nn.Module
        A network, or an ensemble, for which the count covers all members.
    inputs
        A tensor [batch, ...], or tensors by name.

    Returns
    -------
    int
        The multiply-adds of the whole batch.
    """
    here, counted = like_parameters(model, inputs), Counted()
    with evaluating(model):
        call(model, here)  # in its first call an ensemble tries vmap
        with counted:
            call(model, here)
    return counted.multiply_adds
