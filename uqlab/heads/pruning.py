"""Heads by address; ablation and pruning of heads; the cost of a network."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from uqlab.core.modules import (
    Counted,
    Inputs,
    call,
    evaluating,
    like_parameters,
)
from uqlab.models import COUNTS, Attention, Projection, attentions

# (layer, head), or (tower, layer, head) of a network with two towers: ("vision", 0, 3)
# is head 3 of the first layer of the images' tower; its Place may be (4, 3), since text
# comes first.
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


def _find_heads(layers: list[Attention], heads: Iterable[Head]) -> list[Place]:
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


Model = TypeVar("Model", bound=nn.Module)
# Attention of transformers that is right for any number of heads. In other attention
# the columns of pruned heads become zeros.
CAN_SHRINK = {
    "ASTAttention",
    "BertSelfAttention",
    "CLIPAttention",
    "DeiTAttention",
    "DistilBertSelfAttention",
    "LlamaAttention",
    "ViTAttention",
    "WhisperAttention",
}


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
    places = _find_heads(layers, heads)
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
    for ViT, DeiT, AST, CLIP, Whisper, BERT, DistilBERT and Llama of transformers.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts. It is not changed.
    heads : iterable
        Pairs (layer, head), counted from 0; for two towers (tower, layer, head).

    Returns
    -------
    nn.Module
        The copy.

    Raises
    ------
    ValueError
        If a head does not exist or is given twice, or if `shape` raises one.
    """
    layers = attentions(model)
    gone: dict[int, set[int]] = {}
    for layer, head in _find_heads(layers, heads):
        gone.setdefault(layer, set()).add(head)
    small = copy.deepcopy(model)
    for layer, lost in gone.items():
        for head in lost:
            layers[layer].output.of(small, head).zero_()
        kind = type(small.get_submodule(layers[layer].name))
        if kind.__module__.startswith("transformers.") and kind.__name__ in CAN_SHRINK:
            _cut(small, layers[layer], lost)
    return small


def _cut(network: nn.Module, attention: Attention, lost: set[int]) -> None:
    """Cut heads out of one layer. Of those that share a key and value, all or none."""
    groups = []
    for group in range(attention.groups):
        if lost.issuperset(attention.queries(group)):
            groups.append(group)
    queries = [head for group in groups for head in attention.queries(group)]
    for projection, heads in zip(
        attention.projections, (queries, groups, groups, queries), strict=True
    ):
        _remove(network.get_submodule(projection.module), projection, heads)
    core: Any = network.get_submodule(attention.name)
    left = attention.heads - len(queries)
    for name in COUNTS:
        if isinstance(getattr(core, name, None), int):
            setattr(core, name, left)
    if not left:
        network.set_submodule(attention.name, _EmptyAttention(core, attention))


def _remove(layer: Any, projection: Projection, heads: list[int]) -> None:
    """Cut the rows or columns of heads out of a linear layer."""
    axis = projection.axis
    stay = torch.ones(layer.weight.shape[axis], dtype=torch.bool)
    for head in heads:
        stay[projection.rows(head)] = False
    stay = stay.nonzero().flatten().to(layer.weight.device)
    for name in ("weight",) if axis else ("weight", "bias"):
        old = getattr(layer, name)
        if old is not None:
            new = old.detach().index_select(axis, stay)
            setattr(layer, name, nn.Parameter(new, old.requires_grad))
    layer.out_features, layer.in_features = layer.weight.shape


class _EmptyAttention(nn.Module):
    """Attention without heads: the bias of its output projection, if it holds one.

    Parameters
    ----------
    core : nn.Module
        The attention, whose projections have no heads left.
    attention : Attention
        Its description.
    """

    def __init__(self, core: nn.Module, attention: Attention):
        super().__init__()
        self.head_dim = attention.size
        for name, child in core.named_children():
            self.add_module(name, child)
        inside = attention.inside
        self.last = attention.output.module.rpartition(".")[2] if inside else ""

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        z = hidden_states.new_empty(*hidden_states.shape[:-1], 0)
        return (self.get_submodule(self.last)(z) if self.last else z), None


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
