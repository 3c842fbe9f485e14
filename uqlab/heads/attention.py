"""Where the attention projections of a transformer are, which rows and columns belong to which head, and its inputs."""

import itertools
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
_TOWERS = {"text": "text", "text_model": "text", "vision": "vision", "vision_model": "vision"}
Head = tuple[int, int] | tuple[str, int, int]  # layer, head; in a network of two towers: tower, layer, head
Place = tuple[int, int]  # the number of an attention among all of a network, head


class Attention(NamedTuple):
    """The attention of one layer; the names are names of the model's modules."""

    layer: str  # one layer of the stack
    name: str  # holds the query, key and value projections
    inputs: tuple[str, ...]  # the query, key and value projections
    output: str  # the output projection, inside `name` or beside it
    size: int  # features of a head
    heads: int
    tower: str = ""  # "text" or "vision" in a network that has both

    @property
    def inside(self) -> bool:
        """Whether the module `name` applies the output projection itself."""
        return self.output.startswith(f"{self.name}.")

    def columns(self, head: int) -> slice:
        """The columns of the output projection, and the rows of the other projections, that belong to a head."""
        return slice(head * self.size, (head + 1) * self.size)


def attentions(model: nn.Module) -> list[Attention]:
    """The attention of every layer, from the first to the last, text before vision; raises the errors of `shape`."""
    one_network(model, "uqlab.heads")
    modules = dict(model.named_modules())
    found = [attention for name in modules if (attention := _attention(name, modules)) is not None]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention whose heads can be told apart: it takes layers with linear "
            "projections q_proj, k_proj, v_proj and o_proj or out_proj, or query, key, value and output.dense, or "
            "q_lin, k_lin, v_lin and out_lin, as transformers' ViT, CLIP, BERT and DistilBERT have"
        )
    stacks = {attention.layer.rpartition(".")[0]: "" for attention in found}
    if len(stacks) > 1:
        stacks = {each: next((_TOWERS[part] for part in each.split(".") if part in _TOWERS), "") for each in stacks}
        if sorted(stacks.values()) != ["text", "vision"]:
            kind, names = type(model).__name__, ", ".join(stacks)
            raise ValueError(f"{kind} holds {len(stacks)} stacks of layers ({names}); give one, or CLIP's two towers")
        found = [each._replace(tower=stacks[each.layer.rpartition(".")[0]]) for each in found]
        found.sort(key=lambda attention: attention.tower)
    if len({attention.layer for attention in found}) < len(found):
        raise ValueError(f"{type(model).__name__} has layers with several attentions; give an encoder")
    return found


def shape(model: nn.Module) -> tuple[int, int]:
    """(layers, heads); the layers of a pruned model differ, and the heads are those of the layer that has most.

    The layers of two towers are counted together. Raises TypeError unless the model is one network, ValueError unless
    it has one stack of layers with separable heads, or a text and a vision tower.
    """
    counts = count_heads(model)
    return len(counts), max(counts)


def count_heads(model: nn.Module) -> list[int]:
    """The number of heads of each layer, text before vision; raises the errors of `shape`."""
    return [attention.heads for attention in attentions(model)]


def towers(model: nn.Module) -> dict[str, range]:
    """Which rows of scores [layers, heads] belong to "text" and which to "vision"; of one stack of layers all to ""."""
    return _rows(attentions(model))


def _rows(found: list[Attention]) -> dict[str, range]:
    counts = Counter(attention.tower for attention in found)
    ends = itertools.accumulate(counts.values())
    return {tower: range(end - count, end) for (tower, count), end in zip(counts.items(), ends, strict=True)}


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


def check_heads(found: list[Attention], heads: Iterable[Head]) -> list[Place]:
    """Where the heads are; TypeError for what is no head's address, ValueError for heads absent or given twice."""
    rows = _rows(found)
    what = "pairs of integers (layer, head), such as [(0, 3), (2, 1)]"
    if len(rows) > 1:
        what = '(tower, layer, head), such as [("vision", 0, 3), ("text", 2, 1)]'
    try:
        given: list[Any] = [tuple(head) for head in heads]
        split = [head if len(rows) > 1 else ("", *head) for head in given]
        addresses = [(tower, operator.index(layer), operator.index(head)) for tower, layer, head in split]
    except (TypeError, ValueError) as error:
        raise TypeError(f"heads must be {what}") from error
    places = []
    for own, (tower, layer, head) in zip(given, addresses, strict=True):
        if tower not in rows:
            raise ValueError(f"head {own}: the towers are {' and '.join(rows)}")
        if not 0 <= layer < len(rows[tower]):
            raise ValueError(f"head {own}: there are layers 0 to {len(rows[tower]) - 1}")
        count = found[rows[tower][layer]].heads
        if not 0 <= head < count:
            raise ValueError(f"head {own}: layer {layer} has {count} heads, counted from 0")
        places.append((rows[tower][layer], head))
    if twice := [own for own, place in zip(given, places, strict=True) if places.count(place) > 1]:
        raise ValueError(f"head {twice[0]} is given more than once")
    return places


def addresses(found: list[Attention], places: Iterable[Place]) -> list[Head]:
    """The heads at these places: the inverse of `check_heads`."""
    rows = _rows(found)
    if len(rows) == 1:
        return [*places]
    return [(found[row].tower, row - rows[found[row].tower].start, head) for row, head in places]


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
