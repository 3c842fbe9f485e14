"""Networks without some of their heads, for a while (ablate) or for good (prune), and what networks cost."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from uqlab.core.modules import Inputs, call, evaluating, like_parameters, trained_like
from uqlab.ensembles import plain_linear
from uqlab.heads.attention import Head, attentions, check_heads, linear, with_heads

Model = TypeVar("Model", bound=nn.Module)


@contextlib.contextmanager
def ablate(model: Model, heads: Iterable[Head]) -> Iterator[Model]:
    """The model without these heads inside the block: their columns of the output projections are 0 (Hydra, D.1.2).

    Afterwards these columns are what they were, bit for bit, whatever training made of them. Raises the errors of
    `shape`, and ValueError for heads that the model does not have or that are given twice.
    """
    found = attentions(model)
    pairs = check_heads(found, heads)
    columns = [linear(model, found[at].output).weight.detach()[:, found[at].columns(head)] for at, head in pairs]
    kept = [part.clone() for part in columns]
    try:
        for part in columns:
            part.zero_()
        yield model
    finally:
        for part, values in zip(columns, kept, strict=True):
            part.copy_(values)


def prune(model: Model, heads: Iterable[Head]) -> Model:
    """A smaller copy without these heads: it returns what the ablated model returns.

    The heads' rows of the query, key and value projections and their columns of the output projection are cut out. The
    remaining heads of a layer are numbered from 0 again. A layer may lose all its heads: its attention then gives only
    the output projection's bias, and the residual connection carries the layer's input past it. Raises the errors of
    `ablate`.
    """
    found = attentions(model)
    pairs = check_heads(found, heads)
    small = copy.deepcopy(model)
    for layer, attention in enumerate(found):
        gone = {head for at, head in pairs if at == layer}
        if not gone:
            continue
        left = torch.tensor([head not in gone for head in range(attention.heads)])
        kept = left.repeat_interleave(attention.size).to(linear(small, attention.output).weight.device)
        for name in attention.inputs:
            _cut(small, name, rows=kept)
        _cut(small, attention.output, columns=kept)
        core = small.get_submodule(attention.name)
        small.set_submodule(attention.name, with_heads(core, attention, attention.heads - len(gone)))
    return small


def _cut(model: nn.Module, name: str, rows: Any = slice(None), columns: Any = slice(None)) -> None:
    """Keep only these rows and columns of a linear layer."""
    layer = linear(model, name)
    bias = None if layer.bias is None else layer.bias.detach()[rows]
    model.set_submodule(name, trained_like(plain_linear(layer.weight.detach()[rows, columns], bias), layer))


def only_last(model: Model, layers: int) -> Model:
    """The model itself, in which from now on only the last layers and the classifier learn, from a classifier of zeros.

    So Hydra (D.2) trains a pruned network on for CIFAR-100: the last five of twelve layers; of 0 the classifier alone,
    as it also says there. Raises the errors of `shape`, and ValueError for more layers than there are.
    """
    names = [attention.layer for attention in attentions(model)]
    if not 0 <= layers <= len(names):
        raise ValueError(f"layers must be 0 to {len(names)}, the number of layers, got {layers}")
    *_, classifier = (part for part in model.modules() if isinstance(part, nn.Linear))
    for part in (model, *(model.get_submodule(name) for name in names[len(names) - layers :]), classifier):
        part.requires_grad_(part is not model)
    for p in classifier.parameters():
        nn.init.zeros_(p)
    return model


@torch.no_grad()
def multiply_adds(model: nn.Module, inputs: Inputs) -> int:
    """The multiply-adds of one pass over inputs [batch, ...], for a network or for all members of an ensemble.

    Matrix products, convolutions and attention count; biases, normalisation and activations do not.
    """
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch does not count it
    attention = {on_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)}
    here = like_parameters(model, inputs)
    counter = FlopCounterMode(display=False, custom_mapping=attention)
    with evaluating(model):
        call(model, here)  # an ensemble measures once how to split such inputs, which must not count
        with counter:
            call(model, here)
    return counter.get_total_flops() // 2
