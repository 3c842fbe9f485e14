"""The attention of a fused ensemble, in which every member has its own heads."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from uqlab.ensembles import MemberLayer, plain_linear
from uqlab.heads.cutting import with_heads
from uqlab.models import Attention


class GroupedAttention(MemberLayer):
    """The attention of all members of one layer, with its output projection.

    The members are separate rows of the batch, so their heads never mix. One batched
    product gives the queries, keys and values of all members, another one applies their
    output projections. `in_weight` holds for each member and each of its heads the rows
    of query, key and value; `out_weight` the columns of the output projection as rows.

    If all members have the same number of heads, these are [members, heads * 3 * size,
    width] and [members, heads * size, width]. Otherwise the members' rows are joined
    along the first axis, and filled up with zeros in a pass of several members.

    Parameters
    ----------
    models : sequence of nn.Module
        The members.
    found : sequence of Attention
        Where the attention is in each of them.

    Raises
    ------
    ValueError
        If the attention is more than softmax(Q K^T / sqrt(size)) V.
    """

    def __init__(self, models: Sequence[nn.Module], found: Sequence[Attention]):
        super().__init__()
        self.attention, self.members = found[0], len(found)
        self.heads = [each.heads for each in found]
        self.even = len(set(self.heads)) == 1
        most = self.heads.index(max(self.heads))
        core: Any = copy.deepcopy(models[most].get_submodule(found[most].name))
        for name in self._names():
            setattr(core, name, nn.Identity())
        self.core = (core,)  # in a tuple, which hides it from torch
        rate: Any = getattr(core, "attention_dropout", getattr(core, "dropout", 0.0))
        self.dropout = float(getattr(rate, "p", rate))
        self.causal = bool(getattr(core, "is_causal", False))
        inputs, outputs = [], []
        for model, each in zip(models, found, strict=True):
            three = (each.query, each.key, each.value)
            inputs.append([model.get_submodule(part.module) for part in three])
            outputs.append(model.get_submodule(each.output.module))
        self._hold("in_weight", [self._rows(three, "weight") for three in inputs])
        self._hold("out_weight", [layer.weight.detach().mT for layer in outputs])
        self.in_bias = self.out_bias = None
        if inputs[0][0].bias is not None:
            self._hold("in_bias", [self._rows(three, "bias") for three in inputs])
        if outputs[0].bias is not None:
            biases = torch.stack([layer.bias.detach() for layer in outputs])
            self.out_bias = nn.Parameter(biases)
        for side, layer in (("in", inputs[0][0]), ("out", outputs[0])):
            for name, p in layer.named_parameters():
                self.get_parameter(f"{side}_{name}").requires_grad_(p.requires_grad)
        self.eval()._check_members()
        self.train(models[0].training)

    def _names(self) -> list[str]:
        """The names of the projections in the attention of a member."""
        at = self.attention
        projections = [at.query, at.key, at.value, *([at.output] if at.inside else [])]
        return [each.module.rpartition(".")[2] for each in projections]

    def _rows(self, three: Sequence[Any], name: str) -> Tensor:
        """The rows of query, key and value, head by head."""
        heads = []
        for layer in three:
            p = getattr(layer, name)
            rows = torch.zeros(len(layer.weight)) if p is None else p.detach()
            heads.append(rows.to(layer.weight).unflatten(0, (-1, self.attention.size)))
        return torch.stack(heads, 1).flatten(0, 2)

    def _hold(self, name: str, tensors: list[Tensor]) -> None:
        joined = torch.stack(tensors) if self.even else torch.cat(tensors)
        setattr(self, name, nn.Parameter(joined.contiguous()))

    @torch.no_grad()
    def _check_members(self) -> None:
        """Raise ValueError unless members alone give what this layer gives."""
        like = next(self.parameters())
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.members, 4, like.shape[-1], generator=generator).to(like)
        together, _ = self(x)
        tolerance = torch.finfo(x.dtype).eps ** 0.5
        for m in range(self.members):
            try:
                alone = self.member(m)(x[m : m + 1], attention_mask=None)[0]
                alone = alone if self.attention.inside else self.projection(m)(alone)
                same = torch.allclose(alone[0], together[m], rtol=0.0, atol=tolerance)
            except (TypeError, RuntimeError):
                same = False
            if not same:
                raise ValueError(
                    f"{type(self.core[0]).__name__} is more than "
                    "softmax(Q K^T / sqrt(size)) V and cannot be fused"
                )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend in hidden states [members * batch, tokens, width]."""
        heads, size = self.heads[self.active], self.attention.size
        tokens, width = hidden_states.shape[1:]
        x = hidden_states.reshape(len(heads), -1, width)
        out_bias = None if self.out_bias is None else self.out_bias[self.active, None]
        z = x.new_empty(*x.shape[:2], 0)
        if max(heads):
            in_bias = self._filled(self.in_bias, 3)
            in_bias = None if in_bias is None else in_bias.unsqueeze(1)
            qkv = _product(x, self._filled(self.in_weight, 3).mT, in_bias)
            qkv = qkv.view(len(hidden_states), tokens, max(heads), 3, size)
            causal = self.causal if is_causal is None else is_causal
            z = F.scaled_dot_product_attention(
                *qkv.permute(3, 0, 2, 1, 4).unbind(),
                attn_mask=attention_mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=causal and attention_mask is None and tokens > 1,
            )
            z = z.transpose(1, 2).reshape(*x.shape[:2], -1)
        y = _product(z, self._filled(self.out_weight, 1), out_bias)
        return y.view(hidden_states.shape), None

    def _filled(self, p: Any, share: int) -> Any:
        """The active members' rows [members, heads * share * size, ...].

        A member with fewer heads than another has zeros.
        """
        if p is None or self.even:
            return p if p is None or self.active == slice(None) else p[self.active]
        return pad_sequence(self._split(p, share)[self.active], batch_first=True)

    def _split(self, p: Tensor, share: int) -> list[Tensor]:
        """The rows of each member."""
        if self.even:
            return [*p]
        return [*p.split([heads * share * self.attention.size for heads in self.heads])]

    def _own(self, p: Tensor, index: int) -> list[Tensor]:
        """A copy of a member's rows of query, of key and of value."""
        rows = self._split(p.detach(), 3)[index]
        heads = rows.unflatten(0, (-1, 3, self.attention.size))
        return [part.flatten(0, 1).clone() for part in heads.unbind(1)]

    def own(self) -> dict[str, Any]:
        """As of any member layer; this one is its own member parameter."""
        return {"weight": self}

    @property
    def shape(self) -> torch.Size:
        """The shape of the largest member's `weight`."""
        rows = 4 * max(self.heads) * self.attention.size
        return torch.Size([rows, self.in_weight.shape[-1]])

    def weight(self, m: int) -> Tensor:
        """The rows of query, key and value, then of the output projection transposed.

        They are [4 * heads * size, width].
        """
        out = self._split(self.out_weight.detach(), 1)[m]
        return torch.cat([*self._own(self.in_weight, m), out])

    def start(self) -> None:
        """The members were pruned from weights that are not kept."""

    def update(self, m: int) -> None:
        """What changed is not known."""

    def member(self, index: int) -> nn.Module:
        """The attention of one member, as it was before fusion."""
        core = copy.deepcopy(self.core[0]).train(self.training)
        biases: list[Any] = [None] * 3
        if self.in_bias is not None:
            biases = self._own(self.in_bias, index)
        weights = self._own(self.in_weight, index)
        for name, weight, bias in zip(self._names(), weights, biases, strict=False):
            layer = plain_linear(weight, bias)
            setattr(core, name, layer.requires_grad_(self.in_weight.requires_grad))
        if self.attention.inside:
            setattr(core, self._names()[3], self.projection(index))
        return with_heads(core, self.attention, self.heads[index])

    def projection(self, index: int) -> nn.Linear:
        """The output projection of a member."""
        rows = self._split(self.out_weight.detach(), 1)[index]
        weight = rows.mT.clone(memory_format=torch.contiguous_format)
        bias = None if self.out_bias is None else self.out_bias.detach()[index].clone()
        return plain_linear(weight, bias).requires_grad_(self.out_weight.requires_grad)

    def shard(self, rows: slice) -> "GroupedAttention":
        """The same for some of the members, sharing their weights' memory."""
        heads = self.heads[rows]
        before = sum(self.heads[: range(self.members)[rows].start])

        def some(name: str, p: nn.Parameter) -> Tensor:
            if self.even or name == "out_bias":
                return p.data[rows]
            size = self.attention.size * (3 if name.startswith("in_") else 1)
            return p.data.narrow(0, before * size, sum(heads) * size)

        layer = self._changed(len(heads), some)
        layer.heads = heads
        return layer

    def extra_repr(self) -> str:
        """What torch prints."""
        return f"members={self.members}, heads={self.heads}, size={self.attention.size}"


class AppliedProjection(MemberLayer):
    """BERT's output projection, which the grouped attention has already applied."""

    def __init__(self, grouped: GroupedAttention):
        super().__init__()
        self.members, self.grouped = grouped.members, (grouped,)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x

    def member(self, index: int) -> nn.Linear:
        """The output projection of a member."""
        return self.grouped[0].projection(index)

    def shard(self, rows: slice) -> "AppliedProjection":
        """The same for some of the members."""
        return AppliedProjection(self.grouped[0].shard(rows))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [members, rows, in] by [members, in, out]; bias [members, 1, out]."""
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
