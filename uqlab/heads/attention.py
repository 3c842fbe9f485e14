"""Transformers taken apart: where the projections of their attention are, and what of them belongs to which head."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uqlab.core.modules import Inputs, map_tensors
from uqlab.ensembles import Ensemble

# The names of query, key, value and output projection: ViT and CLIP, BERT and its kin, DistilBERT.
_NAMES = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
_OUTPUTS = ("o_proj", "out_proj", "out_lin")
Head = tuple[int, int]  # layer, head


class Attention(NamedTuple):
    """The attention of one layer; all names are the model's."""

    layer: str  # the module that is one layer of the stack
    name: str  # the module that holds the projections of query, key and value
    inputs: tuple[str, str, str]  # those
    output: str  # the output projection, inside that module or beside it
    size: int  # features of a head
    heads: int

    @property
    def inside(self) -> bool:
        """Whether the output projection is applied inside the module `name`."""
        return self.output.startswith(f"{self.name}.")

    def columns(self, head: int) -> slice:
        """The columns of the output projection, and rows of the others, that belong to a head."""
        return slice(head * self.size, (head + 1) * self.size)


def attentions(model: nn.Module) -> list[Attention]:
    """The attention of every layer, first to last.

    Raises TypeError for what is no single network, ValueError for one without attention whose heads are apart, with
    heads that share keys or values, and with several stacks of layers.
    """
    if not isinstance(model, nn.Module) or isinstance(model, Ensemble):
        hint = "; take one of its networks: ensemble.member(0)" if isinstance(model, Ensemble) else ""
        raise TypeError(f"needs one torch module, got {type(model).__name__}{hint}")
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
        raise ValueError(
            f"{type(model).__name__} has layers with several attentions; heads of encoders alone are known"
        )
    return found


def _attention(name: str, modules: Mapping[str, nn.Module]) -> Attention | None:
    inputs = next((names for names in _NAMES if all(f"{name}.{each}" in modules for each in names)), None)
    if inputs is None:
        return None
    beside = f"{name.rpartition('.')[0]}.output.dense".lstrip(".")
    outputs = [own for each in _OUTPUTS if (own := f"{name}.{each}") in modules] or [beside]
    names = [*(f"{name}.{each}" for each in inputs), outputs[0]]
    parts = [modules.get(each) for each in names]
    core: Any = modules[name]
    size = getattr(core, "head_dim", getattr(core, "attention_head_size", None))
    if not isinstance(size, int) or not all(isinstance(part, nn.Linear) for part in parts):
        return None
    q, k, v, o = (part for part in parts if isinstance(part, nn.Linear))
    if not q.out_features == k.out_features == v.out_features == o.in_features or q.out_features % size:
        given = f"{q.out_features}, {k.out_features}, {v.out_features} and {o.in_features}"
        raise ValueError(
            f"the heads of {name} cannot be taken apart: query, key, value and output projection have {given} "
            f"features, which must be equal and a multiple of {size}"
        )
    layer = name
    while not isinstance(modules.get(layer.rpartition(".")[0]), nn.ModuleList | nn.Sequential):
        layer = layer.rpartition(".")[0]
        if not layer:
            raise ValueError(
                f"{name} is in no list of layers; heads are those of a stack of layers, one after the other"
            )
    return Attention(layer, name, (names[0], names[1], names[2]), names[3], size, q.out_features // size)


def linear(model: nn.Module, name: str) -> nn.Linear:
    part = model.get_submodule(name)
    assert isinstance(part, nn.Linear)
    return part


def check_heads(found: list[Attention], heads: Iterable[Head]) -> list[Head]:
    """The heads as pairs of int; raises TypeError, ValueError for what are no pairs, unknown or named twice."""
    try:
        pairs = [(int(layer), int(head)) for layer, head in heads]
    except (TypeError, ValueError) as error:
        raise TypeError("heads must be pairs (layer, head), such as [(0, 3), (2, 1)]") from error
    for layer, head in pairs:
        if not 0 <= layer < len(found):
            raise ValueError(f"head ({layer}, {head}): there are layers 0 to {len(found) - 1}")
        if not 0 <= head < found[layer].heads:
            raise ValueError(f"head ({layer}, {head}): layer {layer} has {found[layer].heads} heads, counted from 0")
    if twice := [pair for pair, count in Counter(pairs).items() if count > 1]:
        raise ValueError(f"head {twice[0]} is given more than once")
    return pairs


class Headless(nn.Module):
    """An attention without heads: of its output projection, if that is inside, the bias is left."""

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
    """The attention whose projections have been cut to so many heads."""
    for name in ("num_attention_heads", "num_heads", "n_heads"):
        if hasattr(core, name):
            setattr(core, name, heads)
    return core if heads else Headless(core, attention)


def length(inputs: Inputs) -> int:
    """The number of inputs; raises TypeError, ValueError for what are no tensors of equally many."""
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs.values()) if isinstance(inputs, Mapping) else []
    if not tensors or not all(isinstance(t, Tensor) and t.ndim for t in tensors):
        kind = type(inputs).__name__
        raise TypeError(
            f"inputs must be a tensor [samples, ...] or tensors by name, as tokenizers make them; got {kind}"
        )
    counts = {len(t) for t in tensors}
    if len(counts) > 1 or not counts.isdisjoint({0}):
        raise ValueError(f"inputs must be equally many and at least one, got {sorted(counts)} samples")
    if any(t.is_floating_point() and not t.isfinite().all() for t in tensors):
        raise ValueError("inputs hold NaN or infinite values; clean them first")
    return counts.pop()


def take(model: nn.Module, inputs: Inputs, rows: slice) -> Inputs:
    """Some of the inputs where the model is, floating ones in its precision."""
    p = next(model.parameters())
    return map_tensors(lambda t: t[rows].to(p.device, p.dtype if t.is_floating_point() else None), inputs)


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """The logits [batch, classes]; raises ValueError for a model that returns none."""
    output: Any = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    logits = getattr(output, "logits", output)  # transformers' models return several things
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        found = f"a tensor {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"{type(model).__name__} must return logits [batch, classes], got {found}")
    return logits


def check_labels(model: nn.Module, inputs: Inputs, labels: Tensor) -> Tensor:
    """The labels where the model is; raises TypeError, ValueError unless there is one of its classes for each input."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels must be a tensor of integers, got {kind}")
    if labels.shape != (length(inputs),):
        raise ValueError(f"labels must be [samples] = [{length(inputs)}] like the inputs, got {list(labels.shape)}")
    with torch.no_grad():
        classes = run(model, take(model, inputs, slice(1))).shape[1]
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(f"labels must be 0 to {classes - 1}, one for each of {classes} outputs, got {low} to {high}")
    return labels.to(next(model.parameters()).device, torch.int64)
