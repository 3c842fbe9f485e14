"""Attention with fewer heads."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.modules import layers_of
from uqlab.ensembles import plain_linear
from uqlab.models import COUNTS, Attention, Projection, attentions

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


class EmptyAttention(nn.Module):
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


class TorchAttention(nn.Module):
    """An nn.MultiheadAttention of four linear layers, with any number of heads.

    It returns no attention weights, and shares the original's parameters.
    """

    def __init__(self, core: nn.MultiheadAttention):
        super().__init__()
        self.num_heads, self.head_dim = core.num_heads, core.head_dim
        matrix, bias = core.in_proj_weight, core.in_proj_bias
        biases = [None] * 3 if bias is None else bias.detach().chunk(3)
        names = ("q_proj", "k_proj", "v_proj")
        for name, w, b in zip(names, matrix.detach().chunk(3), biases, strict=True):
            layer = plain_linear(w, b).requires_grad_(matrix.requires_grad)
            self.add_module(name, layer)
        self.out_proj = core.out_proj
        self.batch_first = core.batch_first
        self.dropout = core.dropout
        # nn.TransformerEncoderLayer reads these before it takes its fast path.
        self.in_proj_bias = None
        self._qkv_same_embed_dim = False
        self.train(core.training)

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
        """Attend as nn.MultiheadAttention does."""
        turned = query.ndim == 3 and not self.batch_first
        heads = []
        for name, x in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
            y = self.get_submodule(name)(x.transpose(0, 1) if turned else x)
            y = y.unflatten(-1, (self.num_heads, self.head_dim))
            heads.append(y.transpose(-3, -2))
        mask = _mask(attn_mask, key_padding_mask, query)
        rate = self.dropout if self.training else 0.0
        z = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=rate)
        y = self.out_proj(z.transpose(-3, -2).flatten(-2))
        return (y.transpose(0, 1) if turned else y), None


def _mask(mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """Return both masks of nn.MultiheadAttention as one, to be added to logits."""
    total = None if mask is None else _added(mask, like)
    if padding is None:
        return total
    columns = _added(padding, like)[..., None, None, :]
    return columns if total is None else columns + total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask to add to logits. Torch's booleans mark what is left out."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask, -torch.inf)


def split_qkv(network: nn.Module, names: Iterable[str] | None = None) -> Any:
    """Split each nn.MultiheadAttention into four linear layers, in place.

    Attention with additional keys, `add_zero_attn` or `add_bias_kv`, is not split.

    Parameters
    ----------
    network : nn.Module
        A network that `shape` accepts.
    names : iterable of str, optional
        The modules to split; by default the attention of every layer.

    Returns
    -------
    nn.Module
        The network, or the split attention if the network is nothing else.
    """
    if names is None:
        names = [attention.name for attention in attentions(network)]
    for name in names:
        core = network.get_submodule(name)
        if not isinstance(core, nn.MultiheadAttention):
            continue
        if core.add_zero_attn or core.bias_k is not None:
            continue
        if not name:
            return TorchAttention(core)
        network.set_submodule(name, TorchAttention(core))
        for encoder in layers_of(network, nn.TransformerEncoder):
            encoder.use_nested_tensor = False  # only torch's attention reads them
    return network


def cut(network: nn.Module, attention: Attention, gone: set[int]) -> Any:
    """Cut heads out of one layer, in place, where its attention allows it.

    Parameters
    ----------
    network : nn.Module
        The network.
    attention : Attention
        One of its layers.
    gone : set of int
        The heads. Of those that share a key and value, all or none are cut.

    Returns
    -------
    nn.Module
        The network, or an `EmptyAttention` if the network is nothing else.
    """
    groups = range(attention.groups)
    lost = [group for group in groups if gone.issuperset(attention.queries(group))]
    core: Any = network.get_submodule(attention.name)
    ours = isinstance(core, TorchAttention)
    known = type(core).__name__ in CAN_SHRINK
    known = known and type(core).__module__.startswith("transformers.")
    if not lost or not (ours or known):
        return network
    queries = [head for group in lost for head in attention.queries(group)]
    for projection, heads in zip(
        attention.projections, (queries, lost, lost, queries), strict=True
    ):
        _remove(network.get_submodule(projection.module), projection, heads)
    left = attention.heads - len(queries)
    for name in COUNTS:
        if isinstance(getattr(core, name, None), int):
            setattr(core, name, left)
    if not left and known:
        empty = EmptyAttention(core, attention)
        if not attention.name:
            return empty
        network.set_submodule(attention.name, empty)
    return network


def _remove(layer: Any, projection: Projection, heads: list[int]) -> None:
    """Cut the rows or columns of heads out of a linear layer."""
    stay = torch.ones(layer.weight.shape[projection.axis], dtype=torch.bool)
    for head in heads:
        stay[projection.rows(head)] = False
    stay = stay.nonzero().flatten().to(layer.weight.device)
    axes = {"weight": projection.axis} | ({} if projection.axis else {"bias": 0})
    for name, axis in axes.items():
        old = getattr(layer, name)
        if old is not None:
            new = old.detach().index_select(axis, stay)
            setattr(layer, name, nn.Parameter(new, old.requires_grad))
    layer.out_features, layer.in_features = layer.weight.shape
