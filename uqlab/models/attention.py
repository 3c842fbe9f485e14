"""The attention of a network, described by its heads; and its classifier.

One entry in `FORMS`, and its names in `PROJECTIONS`, add a family of networks. In a
matrix that holds query, key and value, the rows are ordered [3, heads, size]. Where
several query heads share a key and value head, they are ordered
[heads + 2 groups, size].
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from uqlab.core.checks import Inputs, one_network, one_of
from uqlab.core.modules import classifier_of

Modules = Mapping[str, nn.Module]  # modules of a network by name

# Query, key, value and output projection, relative to the attention module. If one
# matrix holds query, key and value, the three names are equal.
FORMS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # ViT, DeiT, Swin, AST, Llama
    ("q_proj", "k_proj", "v_proj", "out_proj"),  # CLIP, Whisper
    ("query", "key", "value", "../output.dense"),  # BERT and its kin
    ("query_proj", "key_proj", "value_proj", "../output.dense"),  # DeBERTa
    ("query", "key", "value", "dense"),  # ALBERT
    ("q_lin", "k_lin", "v_lin", "out_lin"),  # DistilBERT
    ("qkv", "qkv", "qkv", "proj"),  # timm
    ("Wqkv", "Wqkv", "Wqkv", "Wo"),  # ModernBERT
    ("c_attn", "c_attn", "c_attn", "c_proj"),  # GPT-2
    ("in_proj_weight", "in_proj_weight", "in_proj_weight", "out_proj"),  # torch
)
FUSED = "query, key, value"  # a matrix that holds all three
# Other layers share these names, so they count only inside such a module.
_INSIDE = r"(attention|attn|self_attn)\."
# Regular expressions for the names of query, key, value, output and fused projections:
# names of modules or, in nn.MultiheadAttention, of parameters.
PROJECTIONS = {
    "query": r"(^|\.)(q_proj|query|query_proj|q_lin)$",
    "key": r"(^|\.)(k_proj|key|key_proj|k_lin)$",
    "value": r"(^|\.)(v_proj|value|value_proj|v_lin)$",
    "output": r"(^|\.)(o_proj|out_proj|out_lin|"
    rf"{_INSIDE}(output\.dense|dense|proj|Wo|c_proj))$",
    FUSED: rf"(^|\.)(in_proj_weight|{_INSIDE}(qkv|Wqkv|c_attn))$",
}
ATTENTION = "|".join(PROJECTIONS.values())
# Attributes with the size of a head, and with the number of heads.
SIZES = ("head_dim", "attention_head_size")
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")


class Projection(NamedTuple):
    """The position of the heads in a query, key, value or output projection."""

    parameter: str  # the name of its matrix in the network
    axis: int  # the axis of the heads in the matrix
    start: int  # index of the first head's first feature
    size: int  # features of a head
    heads: int

    @property
    def module(self) -> str:
        """The name of the module that holds the matrix."""
        return self.parameter.rpartition(".")[0]

    def rows(self, head: int) -> slice:
        """Return the indices of a head along the axis, and in an input bias."""
        first = self.start + head * self.size
        return slice(first, first + self.size)

    def of_head(self, matrix: Tensor, head: int) -> Tensor:
        """Return a head's part of the matrix, a view [size, other]."""
        turned = matrix if self.axis == 0 else matrix.mT
        return turned[self.rows(head)]

    def of(self, network: nn.Module, head: int) -> Tensor:
        """Return the weights of a head in a network, a detached view [size, other]."""
        return self.of_head(network.get_parameter(self.parameter).detach(), head)


class Attention(NamedTuple):
    """The attention of one layer. All names are module names in the network."""

    layer: str  # the layer of the stack
    name: str  # the module with the query, key and value projections
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    tower: str = ""  # "text" or "vision" in a network that has both

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.query.heads

    @property
    def groups(self) -> int:
        """The number of key and value heads; each serves `heads / groups` queries."""
        return self.key.heads

    @property
    def size(self) -> int:
        """Features of a head."""
        return self.query.size

    @property
    def fused(self) -> bool:
        """Whether one matrix holds query, key and value."""
        return self.query.parameter == self.key.parameter

    @property
    def inside(self) -> bool:
        """Whether the module `name` contains the output projection."""
        return not self.name or self.output.parameter.startswith(f"{self.name}.")

    @property
    def unit(self) -> str:
        """The smallest module with the attention and its output projection."""
        return self.name if self.inside else self.name.rpartition(".")[0]

    @property
    def projections(self) -> list[Projection]:
        """Query, key, value and output."""
        return [self.query, self.key, self.value, self.output]

    def queries(self, group: int) -> range:
        """Return the query heads that a key and value head serves."""
        sharing = self.heads // self.groups
        return range(group * sharing, (group + 1) * sharing)

    def inputs(self, head: int) -> list[tuple[Projection, int]]:
        """Return the query, key and value projection, and the head's index in each."""
        group = head * self.groups // self.heads
        return [(self.query, head), (self.key, group), (self.value, group)]


def attentions(model: nn.Module) -> list[Attention]:
    """Find the attention of every layer of a network.

    Parameters
    ----------
    model : nn.Module
        A network with one stack of layers, perhaps in stages, or with CLIP's two
        towers. Attention outside the stack, such as attention pooling, is left out.

    Returns
    -------
    list of Attention
        From the first layer to the last, text before vision.

    Raises
    ------
    TypeError
        If `model` is not an `nn.Module`, or is an ensemble.
    ValueError
        If no attention has heads that can be separated, if one layer is used at several
        depths, or if there is more than one stack of layers.
    """
    one_network(model, "uqlab.heads")
    modules = dict(model.named_modules())
    layers = [a for name in modules if (a := _attention(name, modules)) is not None]
    layers = [a for a in layers if _listed(a.layer, modules)] or layers
    kind = type(model).__name__
    if not layers:
        raise ValueError(
            f"{kind} has no attention whose heads can be separated: its projections "
            "must be linear layers named as in one of uqlab.models.FORMS"
        )
    for attention in layers:
        if _is_shared(attention.layer, modules):
            raise ValueError(
                f"{kind} uses the layer {attention.layer} at several depths, so its "
                "heads cannot be separated"
            )
    if len({attention.layer for attention in layers}) < len(layers):
        raise ValueError(f"{kind} has layers with several attentions; give an encoder")
    return _with_towers(layers, kind)


class _Matrix(NamedTuple):
    """The matrix of a linear layer."""

    parameter: str
    axis: int  # of the outputs
    outputs: int
    inputs: int


def _attention(name: str, modules: Modules) -> Attention | None:
    """Describe the attention in a module; None if it holds none."""
    parent = name.rpartition(".")[0]
    for *inputs, output in FORMS:
        outside = parent if output.startswith("../") else name
        last = _matrix(f"{outside}.{output.removeprefix('../')}", modules)
        matrices = [_matrix(f"{name}.{own}", modules) for own in inputs]
        if last is None or None in matrices:
            continue
        size = _head_size(modules[name], last.inputs)
        if not size:
            return None
        query, key, value = _divided(name, matrices, last, size)
        out = Projection(last.parameter, 1 - last.axis, 0, size, query.heads)
        layer = outside
        while layer and not _listed(layer, modules):
            layer = layer.rpartition(".")[0]
        return Attention(layer or outside, name, query, key, value, out)
    return None


def _matrix(name: str, modules: Modules) -> Any:
    """Describe the matrix of a linear layer or of torch's attention, if it is one."""
    name = name.removeprefix(".")
    holder, _, last = name.rpartition(".")
    core = modules.get(holder)
    if last == "in_proj_weight" and isinstance(core, nn.MultiheadAttention):
        weight = core.in_proj_weight
        return None if weight is None else _Matrix(name, 0, *weight.shape)
    module = modules.get(name)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):  # perhaps computed, by a parametrization
        return None
    if isinstance(module, nn.Linear):
        return _Matrix(f"{name}.weight", 0, *weight.shape)
    if type(module).__name__ == "Conv1D" and weight.ndim == 2:  # of transformers
        return _Matrix(f"{name}.weight", 1, *weight.shape[::-1])
    return None


def _head_size(core: nn.Module, features: int) -> int:
    """Return the features of a head, given those of all heads; 0 if unknown."""
    for name in (*SIZES, *COUNTS):
        number = getattr(core, name, None)
        if isinstance(number, int) and number > 0:
            return number if name in SIZES else features // number
    return 0


def _divided(
    name: str, matrices: list[Any], output: _Matrix, size: int
) -> list[Projection]:
    """Divide query, key and value into heads; raise ValueError if these do not fit."""
    query, key, _ = matrices
    heads = output.inputs // size
    if query.parameter == key.parameter:
        groups = (query.outputs // size - heads) // 2
        starts = [0, heads * size, (heads + groups) * size]
        rows = [(heads + 2 * groups) * size] * 3
    else:
        groups = key.outputs // size
        starts = [0, 0, 0]
        rows = [heads * size, groups * size, groups * size]
    features = [*(matrix.outputs for matrix in matrices), output.inputs]
    whole = heads and groups and heads % groups == 0
    if features != [*rows, heads * size] or not (whole or heads == 0):  # 0: all pruned
        raise ValueError(
            f"the heads of {name} cannot be separated: query, key, value and output "
            f"projection have {features} features, and a head has {size}"
        )
    counts = (heads, groups, groups)
    return [
        Projection(matrix.parameter, matrix.axis, start, size, count)
        for matrix, start, count in zip(matrices, starts, counts, strict=True)
    ]


def _listed(layer: str, modules: Modules) -> bool:
    """Whether a module is an entry of a list."""
    above = modules[layer.rpartition(".")[0]]
    return bool(layer) and isinstance(above, nn.ModuleList | nn.Sequential)


def _is_shared(layer: str, modules: Modules) -> bool:
    """Whether a layer is used at several depths, as in ALBERT."""
    above: Any = modules[layer.rpartition(".")[0]]
    repeated = _listed(layer, modules) and [*above].count(modules[layer]) > 1
    return repeated or "albert_layer_groups" in layer


def _with_towers(layers: list[Attention], kind: str) -> list[Attention]:
    """Name the tower of each attention if there are two stacks, and sort by tower."""
    towers = {}  # by stack; the stages of Swin are one
    placed = []
    for attention in layers:
        stack = re.sub(r"\.\d+(?=\.|$)", "", attention.layer.rpartition(".")[0])
        named = re.search(r"(^|\.)(text|vision)(_model)?(\.|$)", stack)
        towers[stack] = named[2] if named else ""
        placed.append(attention._replace(tower=towers[stack]))
    if len(towers) == 1:
        return layers
    if sorted(towers.values()) != ["text", "vision"]:
        raise ValueError(
            f"{kind} holds {len(towers)} stacks of layers ({', '.join(towers)}); "
            "give one, or CLIP's two towers"
        )
    return sorted(placed, key=lambda attention: attention.tower)


def classifier(network: nn.Module, named: str | None = None) -> str:
    """Return the name of the linear layer that is probably the classifier.

    `classifier_of` finds the classifier with a forward pass.

    Parameters
    ----------
    network : nn.Module
        Any network. Layers inside an nn.MultiheadAttention or a parametrization do not
        count.
    named : str, optional
        The layer's name; by default the last linear layer.

    Returns
    -------
    str
        The module's name; empty if the network itself is a linear layer.

    Raises
    ------
    ValueError
        If there is no linear layer, or no linear layer called `named`.

    Examples
    --------
    >>> classifier(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    '2'
    """
    linear = []
    for name, module in network.named_modules():
        in_attention = isinstance(module, NonDynamicallyQuantizableLinear)
        counts = not in_attention and "parametrizations" not in name.split(".")
        if isinstance(module, nn.Linear) and counts:
            linear.append(name)
    if not linear:
        kind = type(network).__name__
        raise ValueError(
            f"{kind} has no linear layer that could be its classifier; networks "
            "without one go to ensembles.deep, from_members and masksembles, with "
            "layers of nn.Dropout also to dropout"
        )
    if named is not None:
        one_of("classifier", named, linear)
    return linear[-1] if named is None else named


def check_classifier(network: nn.Module, inputs: Inputs) -> None:
    """Raise ValueError unless the output of the last linear layer is the logits."""
    taken, found = classifier(network), classifier_of(network, inputs)
    if taken != found:
        raise ValueError(
            f"{taken!r}, the last linear layer of {type(network).__name__}, was taken "
            f"for its classifier, but the logits are the output of {found!r}: give "
            f'classifier="{found}", or define this layer last'
        )
