"""Where the attention projections of a transformer are, which rows and columns belong to which head, and its inputs."""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uqlab.core.checks import class_labels, count_samples, one_network
from uqlab.core.modules import Inputs, call, like_parameters, logits_of, map_tensors

# The names of the query, key and value projections in ViT and CLIP, in BERT and its kin, and in DistilBERT.
_NAMES = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
_OUTPUTS = ("o_proj", "out_proj", "out_lin")
Head = tuple[int, int]  # layer, head


class Attention(NamedTuple):
    """The attention of one layer; the names are names of the model's modules."""

    layer: str  # one layer of the stack
    name: str  # holds the query, key and value projections
    inputs: tuple[str, ...]  # the query, key and value projections
    output: str  # the output projection, inside `name` or beside it
    size: int  # features of a head
    heads: int

    @property
    def inside(self) -> bool:
        """Whether the module `name` applies the output projection itself."""
        return self.output.startswith(f"{self.name}.")

    def columns(self, head: int) -> slice:
        """The columns of the output projection, and the rows of the other projections, that belong to a head."""
        return slice(head * self.size, (head + 1) * self.size)


def attentions(model: nn.Module) -> list[Attention]:
    """The attention of every layer, from the first to the last; raises the errors of `shape`."""
    one_network(model, "uqlab.heads")
    modules = dict(model.named_modules())
    found = [attention for name in modules if (attention := _attention(name, modules)) is not None]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention whose heads can be told apart: it takes layers with linear "
            "projections q_proj, k_proj, v_proj and o_proj or out_proj, or query, key, value and output.dense, or "
            "q_lin, k_lin, v_lin and out_lin, as transformers' ViT, CLIP, BERT and DistilBERT have"
        )
    stacks = Counter(attention.layer.rpartition(".")[0] for attention in found)
    if len(stacks) > 1:
        names = ", ".join(stacks)
        raise ValueError(f"{type(model).__name__} holds {len(stacks)} stacks of layers ({names}); give one of them")
    if len({attention.layer for attention in found}) < len(found):
        raise ValueError(f"{type(model).__name__} has layers with several attentions; give an encoder")
    return found


def shape(model: nn.Module) -> tuple[int, int]:
    """(layers, heads); the layers of a pruned model differ, and the heads are those of the layer that has most.

    Raises TypeError unless the model is one network, ValueError unless it has one stack of layers with separable heads.
    """
    counts = count_heads(model)
    return len(counts), max(counts)


def count_heads(model: nn.Module) -> list[int]:
    """The number of heads of each layer; raises the errors of `shape`."""
    return [attention.heads for attention in attentions(model)]


def _attention(name: str, modules: Mapping[str, nn.Module]) -> Attention | None:
    inputs = next((names for names in _NAMES if all(f"{name}.{each}" in modules for each in names)), None)
    if inputs is None:
        return None
    beside = f"{name.rpartition('.')[0]}.output.dense".lstrip(".")
    outputs = [own for each in _OUTPUTS if (own := f"{name}.{each}") in modules] or [beside]
    names = [*(f"{name}.{each}" for each in inputs), outputs[0]]
    projections = [part for each in names if isinstance(part := modules.get(each), nn.Linear)]
    core: Any = modules[name]
    size = getattr(core, "head_dim", getattr(core, "attention_head_size", None))
    if not isinstance(size, int) or len(projections) < len(names):
        return None
    features = [*(part.out_features for part in projections[:3]), projections[3].in_features]
    if len(set(features)) > 1 or features[0] % size:
        raise ValueError(
            f"the heads of {name} cannot be taken apart: query, key, value and output projection have {features} "
            f"features, which must be equal and a multiple of {size}"
        )
    layer = name
    while not isinstance(modules.get(layer.rpartition(".")[0]), nn.ModuleList | nn.Sequential):
        layer = layer.rpartition(".")[0]
        if not layer:
            raise ValueError(f"{name} is not in a list of layers; the layers must be a stack, one after the other")
    return Attention(layer, name, tuple(names[:3]), names[3], size, features[0] // size)


def linear(model: nn.Module, name: str) -> nn.Linear:
    part = model.get_submodule(name)
    assert isinstance(part, nn.Linear)
    return part


def check_heads(found: list[Attention], heads: Iterable[Head]) -> list[Head]:
    """The heads as pairs of int; TypeError for what is no pair, ValueError for heads that are absent or given twice."""
    try:
        pairs = [(operator.index(layer), operator.index(head)) for layer, head in heads]
    except (TypeError, ValueError) as error:
        raise TypeError("heads must be pairs of integers (layer, head), such as [(0, 3), (2, 1)]") from error
    for layer, head in pairs:
        if not 0 <= layer < len(found):
            raise ValueError(f"head ({layer}, {head}): there are layers 0 to {len(found) - 1}")
        if not 0 <= head < found[layer].heads:
            raise ValueError(f"head ({layer}, {head}): layer {layer} has {found[layer].heads} heads, counted from 0")
    if twice := [pair for pair, count in Counter(pairs).items() if count > 1]:
        raise ValueError(f"head {twice[0]} is given more than once")
    return pairs


class Headless(nn.Module):
    """An attention without heads, which gives the bias of its output projection if it holds that projection."""

    def __init__(self, core: nn.Module, attention: Attention):
        super().__init__()
        self.head_dim = attention.size
        for name, part in core.named_children():
            self.add_module(name, part)
        self.last = attention.output.rpartition(".")[2] if attention.inside else ""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        z = hidden_states.new_empty(*hidden_states.shape[:-1], 0)
        return (self.get_submodule(self.last)(z) if self.last else z), None


def with_heads(core: Any, attention: Attention, heads: int) -> nn.Module:
    """The attention `core`, whose projections have already been cut to this number of heads."""
    for name in ("num_attention_heads", "num_heads", "n_heads"):
        if hasattr(core, name):
            setattr(core, name, heads)
    return core if heads else Headless(core, attention)


def take(model: nn.Module, inputs: Inputs, rows: slice) -> Inputs:
    """Some of the inputs, on the model's device; floating-point ones in the model's precision."""
    return like_parameters(model, map_tensors(lambda t: t[rows], inputs))


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """The logits [batch, classes]."""
    logits = logits_of(call(model, inputs))
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        found = f"a tensor {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"{type(model).__name__} must return logits [batch, classes], got {found}")
    return logits


def check_labels(model: nn.Module, inputs: Inputs, labels: Tensor) -> Tensor:
    """The labels as int64 on the model's device, one for each input."""
    with torch.no_grad():
        classes = run(model, take(model, inputs, slice(1))).shape[1]
    return class_labels(labels, count_samples(inputs), classes).to(next(model.parameters()).device)
