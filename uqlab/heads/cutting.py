"""The attention of one layer with fewer heads, whatever form it has."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.modules import first_of, layers_of
from uqlab.ensembles import plain_linear
from uqlab.models import COUNTS, Attention, Projection, attentions

# Its parameters beside the projections that have a column for each head.
TABLES = ("relative_position_bias_table",)


class Headless(nn.Module):
    """An attention without heads: the bias of its output projection, if it holds that.

    Parameters
    ----------
    core : nn.Module
        The attention, whose projections have already been cut to no heads.
    attention : Attention
        Where the projections of `core` are.
    others : int or None
        How many outputs `core` returns after the first; None if it returns a tensor.
    """

    def __init__(self, core: nn.Module, attention: Attention, others: int | None = 1):
        super().__init__()
        self.head_dim = attention.size
        self.others = others
        for name, child in core.named_children():
            self.add_module(name, child)
        self.last = ""
        if attention.inside:
            self.last = attention.output.module.rpartition(".")[2]
        last = getattr(self, self.last, None)
        if last is not None and not isinstance(last, nn.Linear):
            # Transformers' Conv1D cannot take an input without features.
            last = plain_linear(last.weight.detach().mT, last.bias.detach())
            self.add_module(self.last, last)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        z = hidden_states.new_empty(*hidden_states.shape[:-1], 0)
        if self.last:
            z = self.get_submodule(self.last)(z)
        return z if self.others is None else (z, *[None] * self.others)


class OpenAttention(nn.Module):
    """Softmax attention with four linear layers, which may have any number of heads.

    They share the memory of the original's weights.
    """

    def __init__(self, core: nn.Module, attention: Attention):
        super().__init__()
        self.num_heads = attention.heads
        self.head_dim = attention.size
        names = ("q_proj", "k_proj", "v_proj")
        parts = (attention.query, attention.key, attention.value)
        for name, projection in zip(names, parts, strict=True):
            self.add_module(name, _linear(core, projection))
        self.out_proj: Any = _sharing(core.get_submodule(attention.output.module))
        self.train(core.training)

    def attend(self, inputs: list[Tensor], rate: float, **mask: Any) -> Tensor:
        """Attend from queries to keys and values, each [..., tokens, width]."""
        layers: list[Any] = [self.q_proj, self.k_proj, self.v_proj]
        size = (self.num_heads, self.head_dim)
        projected = []
        for layer, x in zip(layers, inputs, strict=True):
            projected.append(layer(x).unflatten(-1, size).transpose(-3, -2))
        rate = rate if self.training else 0.0
        z = F.scaled_dot_product_attention(*projected, dropout_p=rate, **mask)
        return self.out_proj(z.transpose(-3, -2).flatten(-2))


class TorchAttention(OpenAttention):
    """An nn.MultiheadAttention that returns no attention weights."""

    def __init__(self, core: nn.MultiheadAttention, attention: Attention):
        super().__init__(core, attention)
        self.batch_first = core.batch_first
        self.dropout = core.dropout
        # What torch's encoder asks before it takes a shortcut past this module.
        self.in_proj_bias = None
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend as nn.MultiheadAttention does, whose masks say what is left out."""
        turned = query.ndim == 3 and not self.batch_first
        inputs = [x.transpose(0, 1) if turned else x for x in (query, key, value)]
        mask = query.new_zeros(())
        if attn_mask is not None:
            mask = _added(attn_mask, query)
        if key_padding_mask is not None:
            mask = mask + _added(key_padding_mask, query)[..., None, None, :]
        y = self.attend(inputs, self.dropout, attn_mask=mask if mask.ndim else None)
        return (y.transpose(0, 1) if turned else y), None


class PlainAttention(OpenAttention):
    """An attention that takes tokens, and perhaps a mask, and returns tokens (timm)."""

    def __init__(self, core: nn.Module, attention: Attention):
        super().__init__(core, attention)
        drops = [part for part in core.children() if isinstance(part, nn.Dropout)]
        self.attn_drop, self.proj_drop = drops

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        inputs = [x, x, x]
        rate = self.attn_drop.p
        y = self.attend(inputs, rate, attn_mask=attn_mask, is_causal=is_causal)
        return self.proj_drop(y)


def opened(network: nn.Module) -> nn.Module:
    """Return the network, in which each nn.MultiheadAttention has four linear layers.

    Hooks then see what the heads give, and what the output projection makes of it.

    Parameters
    ----------
    network : nn.Module
        A network that `shape` accepts; it is changed in place.
    """
    for attention in attentions(network):
        core = network.get_submodule(attention.name)
        if isinstance(core, nn.MultiheadAttention):
            (own,) = attentions(core)
            network = put(network, attention.name, TorchAttention(core, own))
    return network


def put(network: nn.Module, name: str, module: nn.Module) -> Any:
    """Put a module into a network, in place; return the network, or what replaces it.

    Parameters
    ----------
    network : nn.Module
        The network.
    name : str
        The place; if it is empty, `module` replaces the whole network.
    module : nn.Module
        What comes there.
    """
    if not name:
        return module
    if isinstance(module, TorchAttention):
        for encoder in layers_of(network, nn.TransformerEncoder):
            encoder.use_nested_tensor = False  # only torch's attention reads them
    network.set_submodule(name, module)
    return network


def without(network: nn.Module, attention: Attention, gone: set[int]) -> Any:
    """Cut out heads whose columns are zeros already, if the output stays the same.

    Parameters
    ----------
    network : nn.Module
        The network, which is changed in place.
    attention : Attention
        One of its layers of heads.
    gone : set of int
        The heads. Of those that share a key and value, all or none are cut out.

    Returns
    -------
    nn.Module
        The network, or what replaces it.
    """
    groups = range(attention.groups)
    lost = [group for group in groups if gone.issuperset(attention.queries(group))]
    unit = network.get_submodule(attention.unit)
    expected = _output(unit) if lost else None
    if expected is None:
        return network
    others = len(expected) - 1 if isinstance(expected, tuple) else None
    for form in _forms(unit):
        cut = _cut(*form, lost, others)
        if _same(_output(cut), expected):
            return put(network, attention.unit, cut)
    return network


def with_heads(
    core: Any, attention: Attention, heads: int, others: int | None = 1
) -> nn.Module:
    """Return an attention that works with fewer heads.

    Parameters
    ----------
    core : nn.Module
        The attention, whose projections are already cut; it is changed in place.
    attention : Attention
        Where these projections are.
    heads : int
        How many heads are left.
    others : int or None
        How many outputs it returns after the first; None if it returns a tensor.
    """
    if not heads and not isinstance(core, OpenAttention):
        return Headless(core, attention, others)
    for name in COUNTS:
        if isinstance(getattr(core, name, None), int):
            setattr(core, name, heads)
    return core


def _forms(unit: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield copies of an attention that may work with fewer heads, likeliest first.

    Each comes with the names of the numbers that are to follow the features of heads.
    """
    (attention,) = attentions(unit)
    if isinstance(unit, nn.MultiheadAttention):
        yield TorchAttention(unit, attention), []
        return
    features = attention.heads * attention.size
    numbers = vars(unit.get_submodule(attention.name)).items()
    yield _sharing(unit), [n for n, i in numbers if type(i) is int and i == features]
    yield _sharing(unit), []
    # The form of timm, if it can be nothing else.
    drops = [part for part in unit.children() if isinstance(part, nn.Dropout)]
    masks = set(inspect.signature(unit.forward).parameters) - {"x"}
    if attention.fused and len(drops) == 2 and masks <= {"attn_mask", "is_causal"}:
        yield PlainAttention(unit, attention), []


def _cut(
    unit: nn.Module, widths: list[str], lost: list[int], others: int | None
) -> Any:
    """Cut groups of heads out of an attention, in place; its weights are new ones.

    Parameters
    ----------
    unit : nn.Module
        An attention with its output projection.
    widths : list of str
        Its attributes that hold the number of features of all heads.
    lost : list of int
        The groups: key and value heads, with all their query heads.
    others : int or None
        How many outputs it returns after the first; None if it returns a tensor.
    """
    (attention,) = attentions(unit)
    queries = []
    for group in lost:
        queries += attention.queries(group)
    # From the last rows to the first, so that those of a fused matrix keep their place.
    _remove(unit, attention.value, lost)
    _remove(unit, attention.key, lost)
    _remove(unit, attention.query, queries)
    _remove(unit, attention.output, queries, bias=False)
    _cut_tables(unit, attention.heads, queries)
    core: Any = unit.get_submodule(attention.name)
    left = attention.heads - len(queries)
    for name in widths:
        setattr(core, name, left * attention.size)
    if hasattr(core, "num_key_value_heads"):
        core.num_key_value_heads = attention.groups - len(lost)
    return put(unit, attention.name, with_heads(core, attention, left, others))


def _remove(
    unit: nn.Module, projection: Projection, heads: list[int], bias: bool = True
) -> None:
    """Cut heads out of a projection and, if its outputs are meant, out of its bias."""
    layer = unit.get_submodule(projection.module)
    length = unit.get_parameter(projection.parameter).shape[projection.axis]
    stay = torch.ones(length, dtype=torch.bool)
    for head in heads:
        stay[projection.rows(head)] = False
    _keep(layer, "weight", projection.axis, stay)
    if bias:
        _keep(layer, "bias", 0, stay)


def _cut_tables(unit: nn.Module, heads: int, gone: list[int]) -> None:
    """Cut the heads' columns out of tables of position biases."""
    stay = torch.ones(heads, dtype=torch.bool)
    stay[gone] = False
    for module in unit.modules():
        for name in TABLES:
            table = getattr(module, name, None)
            if table is not None and table.shape[1] == heads:
                _keep(module, name, 1, stay)


def _keep(layer: Any, name: str, axis: int, stay: Tensor) -> None:
    """Keep some rows (axis 0) or columns (axis 1) of a parameter, if there is one."""
    old = getattr(layer, name, None)
    if old is None:
        return
    stay = stay.to(old.device)
    new = old.detach()[stay] if axis == 0 else old.detach()[:, stay]
    setattr(layer, name, nn.Parameter(new, old.requires_grad))
    if name == "weight" and isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = new.shape
    elif name == "weight":  # transformers' Conv1D
        layer.nx, layer.nf = new.shape


def _sharing(unit: nn.Module) -> Any:
    """Return a copy that shares parameters, buffers and configurations."""
    shared = [*unit.parameters(), *unit.buffers()]
    shared += [getattr(module, "config", None) for module in unit.modules()]
    return copy.deepcopy(unit, {id(thing): thing for thing in shared})


def _linear(core: nn.Module, projection: Projection) -> nn.Linear:
    """Return the query, key or value projection as a layer of its own."""
    matrix = core.get_parameter(projection.parameter)
    rows = slice(projection.start, projection.rows(projection.heads).start)
    turned = matrix.mT if projection.axis else matrix
    bias: Any = core.get_submodule(projection.module)
    bias = bias.bias if projection.module else bias.in_proj_bias
    bias = None if bias is None else bias.detach()[rows]
    layer = plain_linear(turned.detach()[rows], bias)
    return layer.requires_grad_(matrix.requires_grad)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask to be added to logits; torch's booleans say what is left out."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask, -torch.inf)


@torch.no_grad()
def _output(unit: nn.Module) -> Any:
    """Return what an attention gives for random numbers, or None if it cannot run.

    What it raises is no error here: of a kind of attention whose arguments cannot be
    guessed, heads become zeros instead of smaller matrices.
    """
    try:
        probe = copy.deepcopy(unit).cpu().double().eval()
        x, arguments = _arguments(probe)
        return probe(x, **arguments)
    except Exception:
        return None


def _arguments(unit: nn.Module) -> tuple[Tensor, dict[str, Any]]:
    """Random hidden states, and the other arguments, guessed from their names."""
    (attention,) = attentions(unit)
    width = attention.query.of(unit, 0).shape[1]
    sizes = {"window_area": 4, "pos_ebd_size": 1}  # tokens of Swin; of DeBERTa
    for module in unit.modules():
        for name in sizes:
            sizes[name] = getattr(module, name, sizes[name])
    tokens = sizes["window_area"]
    x = _random(2, tokens, width)
    angles = _random(1, tokens, attention.size)
    known = {
        "key": x,
        "value": x,
        "position_embeddings": (angles.cos(), angles.sin()),
        "rel_embeddings": _random(2 * sizes["pos_ebd_size"], width),
        "attention_mask": x.new_ones(1, 1, tokens, tokens),
    }
    arguments = {}
    for p in [*inspect.signature(unit.forward).parameters.values()][1:]:
        needed = p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD
        if needed or (p.name in known and p.name != "attention_mask"):
            arguments[p.name] = known.get(p.name)
    return x, arguments


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _same(actual: Any, expected: Any) -> bool:
    """Whether two attentions gave the same first output, in the same form."""
    if actual is None or isinstance(actual, tuple) != isinstance(expected, tuple):
        return False
    a = first_of(actual)
    b = first_of(expected)
    return torch.allclose(a, b, rtol=0, atol=1e-6 * (1e-3 + b.abs().max().item()))
