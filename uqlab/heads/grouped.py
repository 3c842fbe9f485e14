"""The layers of a fused ensemble: LayerNorms and attention in which every member has its own weights."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from uqlab.core import devices, tuning
from uqlab.ensembles import MemberLayer, plain_linear
from uqlab.heads.cutting import with_heads
from uqlab.models import Attention


class GroupedAttention(MemberLayer):
    """The attention of all members with its output projection; every member has its own heads.

    The members are separate rows of the batch, so their heads never mix. One batched product gives the queries, keys
    and values of all members, another one applies their output projections. in_weight holds, for each member and each
    of its heads, the rows of query, key and value; out_weight holds the columns of the output projection as rows.

    If all members have the same number of heads, these are in_weight [members, heads * 3 * size, width] and out_weight
    [members, heads * size, width]. Otherwise the members' rows are joined along the first axis, and a product fills
    them up with zeros to the largest number of heads, unless the members are computed one after the other, which is
    faster for large batches on a CPU.
    """

    def __init__(self, models: Sequence[nn.Module], found: Sequence[Attention]):
        """The attention of one layer: `found[m]` says where it is in `models[m]`.

        Raises ValueError for attention that is more than softmax(Q K^T / sqrt(size)) V.
        """
        super().__init__()
        self.attention, self.heads, self.members = (
            found[0],
            [each.heads for each in found],
            len(found),
        )
        self.even = len(set(self.heads)) == 1
        first = found[0]
        own = [
            first.query,
            first.key,
            first.value,
            *([first.output] if first.inside else []),
        ]
        self.names = [
            projection.module.rpartition(".")[2] for projection in own
        ]  # in the attention
        most = self.heads.index(max(self.heads))
        core: Any = copy.deepcopy(models[most].get_submodule(found[most].name))
        for name in self.names:
            setattr(core, name, nn.Identity())
        self.core = (
            core,
        )  # a member's attention without its weights; the tuple hides it from torch
        rate: Any = getattr(core, "attention_dropout", getattr(core, "dropout", 0.0))
        self.dropout, self.causal = (
            float(getattr(rate, "p", rate)),
            bool(getattr(core, "is_causal", False)),
        )
        inputs: Any = []
        outputs: Any = []
        for model, each in zip(models, found, strict=True):
            three = (each.query, each.key, each.value)
            inputs.append(
                [model.get_submodule(projection.module) for projection in three]
            )
            outputs.append(model.get_submodule(each.output.module))
        join = torch.stack if self.even else torch.cat

        def rows(
            tensors: Sequence[Tensor],
        ) -> Tensor:  # of query, key and value, head by head
            heads = [
                t.detach().unflatten(0, (-1, self.attention.size)) for t in tensors
            ]
            return torch.stack(heads, 1).flatten(0, 2)

        self.in_weight = nn.Parameter(
            join([rows([part.weight for part in three]) for three in inputs])
        )
        self.out_weight = nn.Parameter(
            join([part.weight.detach().mT for part in outputs]).contiguous()
        )
        self.in_bias = self.out_bias = None
        if inputs[0][0].bias is not None:
            self.in_bias = nn.Parameter(
                join([rows([_bias(part) for part in three]) for three in inputs])
            )
        if outputs[0].bias is not None:
            self.out_bias = nn.Parameter(
                torch.stack([_bias(part).detach() for part in outputs])
            )
        for side, part in (("in", inputs[0][0]), ("out", outputs[0])):
            for name, p in part.named_parameters():
                self.get_parameter(f"{side}_{name}").requires_grad_(p.requires_grad)
        self.eval()._check_members()
        self.train(models[0].training)

    @torch.no_grad()
    def _check_members(self) -> None:
        """Raise ValueError unless the members' own attention gives what this layer gives."""
        like = next(self.parameters())
        x = torch.randn(
            self.members, 4, like.shape[-1], generator=torch.Generator().manual_seed(0)
        ).to(like)
        together, _ = self(x)
        for m in range(self.members):
            try:
                alone = self.member(m)(x[m : m + 1], attention_mask=None)[0]
                alone = alone if self.attention.inside else self.projection(m)(alone)
                same = torch.allclose(
                    alone[0],
                    together[m],
                    rtol=0.0,
                    atol=torch.finfo(x.dtype).eps ** 0.5,
                )
            except (TypeError, RuntimeError):
                same = False
            if not same:
                kind = type(self.core[0]).__name__
                raise ValueError(
                    f"{kind} is more than softmax(Q K^T / sqrt(size)) V and cannot be fused"
                )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        active = self.active
        members = range(self.members)[active]
        causal = attention_mask is None and (
            self.causal if is_causal is None else is_causal
        )
        rows = len(hidden_states) // len(members)

        def together() -> Tensor:
            return self._attend(hidden_states, attention_mask, causal, active)

        def alone() -> Tensor:
            masks = [attention_mask] * len(members)
            if attention_mask is not None and len(attention_mask) == len(hidden_states):
                masks = attention_mask.split(rows)
            each = zip(hidden_states.split(rows), masks, members, strict=True)
            return torch.cat(
                [self._attend(x, mask, causal, slice(m, m + 1)) for x, mask, m in each]
            )

        counts = [self.heads[m] for m in members]
        if len(set(counts)) == 1:
            return together(), None
        ways, tokens = {"together": together, "alone": alone}, hidden_states.shape[1]
        small = (
            hidden_states.device.type != "cpu" or rows * tokens < devices.FUSED_ALONE
        )
        way = "together" if small else "alone"
        if not self.training:  # dropout draws from torch's generator
            shape = (
                *counts,
                self.attention.size,
                tuning.octave(rows),
                tokens,
                hidden_states.shape[2],
                causal,
            )
            way = tuning.choose("uneven heads", shape, hidden_states, ways, way)
        return ways[way](), None

    def _attend(
        self, hidden: Tensor, mask: Tensor | None, causal: bool, active: slice
    ) -> Tensor:
        """The attention of the active members: hidden [members * batch, tokens, width] -> the same shape."""
        heads, tokens, size = self.heads[active], hidden.shape[1], self.attention.size
        x = hidden.reshape(
            len(heads), -1, hidden.shape[2]
        )  # [members, batch * tokens, width]
        out_bias = None if self.out_bias is None else self.out_bias[active, None]
        if not max(heads):
            return (
                torch.zeros_like(x)
                if out_bias is None
                else torch.zeros_like(x) + out_bias
            ).view(hidden.shape)
        in_bias = self._filled(self.in_bias, 3, active)
        qkv = _product(
            x,
            self._filled(self.in_weight, 3, active).mT,
            None if in_bias is None else in_bias.unsqueeze(1),
        )
        qkv = qkv.view(
            -1, tokens, max(heads), 3, size
        )  # [rows, tokens, heads, 3, size]
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind()  # [rows, heads, tokens, size]
        dropout = self.dropout if self.training else 0.0
        z = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and tokens > 1
        )
        z = z.transpose(1, 2).reshape(
            *x.shape[:2], -1
        )  # [members, batch * tokens, heads * size]
        return _product(z, self._filled(self.out_weight, 1, active), out_bias).view(
            hidden.shape
        )

    def _filled(self, p: Any, share: int, active: slice) -> Any:
        """The active members' rows [members, heads * share * size, ...], with zeros where a member has fewer heads."""
        if p is None or self.even:
            return p if p is None or active == slice(None) else p[active]
        rows = self._split(p, share)[active]
        return (
            rows[0].unsqueeze(0)
            if len(rows) == 1
            else pad_sequence(rows, batch_first=True)
        )

    def _split(self, p: Tensor, share: int) -> list[Tensor]:
        """The rows of each member."""
        return list(
            p
            if self.even
            else p.split([count * share * self.attention.size for count in self.heads])
        )

    def _own(self, p: Tensor, index: int) -> Tensor:
        """A copy of a member's rows of query, key and value [3, heads * size, ...]."""
        rows = self._split(p.detach(), 3)[index].unflatten(
            0, (-1, 3, self.attention.size)
        )
        return rows.transpose(0, 1).flatten(1, 2).clone()

    def own(self) -> dict[str, Any]:
        return {"weight": self}

    @property
    def shape(self) -> torch.Size:
        return torch.Size(
            [4 * max(self.heads) * self.attention.size, self.in_weight.shape[-1]]
        )

    def weight(self, m: int) -> Tensor:
        """The rows of query, key and value, then the output projection transposed [4 * heads * size, width]."""
        return torch.cat(
            [*self._own(self.in_weight, m), self._split(self.out_weight.detach(), 1)[m]]
        )

    def start(self) -> None:
        """The members were pruned from weights that are not kept."""

    def update(self, m: int) -> None:
        """What changed is not known."""

    def member(self, index: int) -> nn.Module:
        core = copy.deepcopy(self.core[0]).train(self.training)
        biases = [None] * 3 if self.in_bias is None else self._own(self.in_bias, index)
        for name, weight, bias in zip(
            self.names[:3], self._own(self.in_weight, index), biases, strict=True
        ):
            part = plain_linear(weight, bias).requires_grad_(
                self.in_weight.requires_grad
            )
            setattr(core, name, part)
        if self.attention.inside:
            setattr(core, self.names[3], self.projection(index))
        return with_heads(core, self.attention, self.heads[index])

    def projection(self, index: int) -> nn.Linear:
        """The output projection of a member."""
        weight = self._split(self.out_weight.detach(), 1)[index].mT.clone(
            memory_format=torch.contiguous_format
        )
        bias = None if self.out_bias is None else self.out_bias.detach()[index].clone()
        return plain_linear(weight, bias).requires_grad_(self.out_weight.requires_grad)

    def shard(self, rows: slice) -> "GroupedAttention":
        heads, before = (
            self.heads[rows],
            sum(self.heads[: range(self.members)[rows].start]),
        )

        def some(name: str, p: nn.Parameter) -> Tensor:
            if self.even or name == "out_bias":
                return p.data[rows]
            size = self.attention.size * (3 if name.startswith("in_") else 1)
            part = p.data.narrow(0, before * size, sum(heads) * size)
            return part.unflatten(0, (len(heads), -1)) if len(set(heads)) == 1 else part

        layer = self._changed(len(heads), some)
        layer.heads, layer.even = heads, len(set(heads)) == 1
        return layer

    def extra_repr(self) -> str:
        return f"members={self.members}, heads={self.heads}, size={self.attention.size}"


class AppliedProjection(MemberLayer):
    """Replaces BERT's output projection, which the grouped attention has already applied."""

    def __init__(self, grouped: GroupedAttention):
        super().__init__()
        self.members, self.grouped = grouped.members, (grouped,)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def member(self, index: int) -> nn.Linear:
        return self.grouped[0].projection(index)

    def shard(self, rows: slice) -> "AppliedProjection":
        return AppliedProjection(self.grouped[0].shard(rows))


def _bias(layer: nn.Linear) -> Tensor:
    return torch.zeros_like(layer.weight[:, 0]) if layer.bias is None else layer.bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [members, rows, in], weight [members, in, out] and bias [members, 1, out] -> [members, rows, out]."""
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
