"""Pruned networks in one: attention in groups, one MLP, LayerNorms and classifiers of the members' own (Hydra, 4.2)."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from uqlab.core import devices
from uqlab.core.modules import Inputs, map_tensors
from uqlab.ensembles import (
    Ensemble,
    FoldedEnsemble,
    MemberDropout,
    MemberLayer,
    MemberLinear,
    plain_linear,
    replace_layers,
)
from uqlab.heads.attention import Attention, attentions, linear, with_heads


class MemberLayerNorm(MemberLayer):
    """LayerNorm with weight [members, 1, features] and bias [members, 1, features] of the members' own."""

    def __init__(
        self, weight: Float[Tensor, "members 1 features"], bias: Float[Tensor, "members 1 features"], eps: float
    ):
        super().__init__()
        self.members, self.eps = weight.shape[0], eps
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.active != slice(None):
            weight, bias = weight[self.active], bias[self.active]
        rows = F.layer_norm(x, x.shape[-1:], eps=self.eps).view(len(weight), -1, x.shape[-1])
        return torch.addcmul(bias, rows, weight).view(x.shape)

    def member(self, index: int) -> nn.LayerNorm:
        norm = nn.LayerNorm(self.weight.shape[2:], self.eps, device=self.weight.device, dtype=self.weight.dtype)
        norm.weight.data, norm.bias.data = self.weight.data[index, 0].clone(), self.bias.data[index, 0].clone()
        return _trained_like(norm, self)

    def shard(self, rows: slice) -> "MemberLayerNorm":
        return _trained_like(MemberLayerNorm(self.weight.data[rows], self.bias.data[rows], self.eps), self)


class GroupedAttention(MemberLayer):
    """The attention of all members, each with its own heads, output projection included.

    Members stay apart in the batch, so their heads never mix: one batched product is the queries, keys and values of
    all, one their output projections. in_weight holds, for each member and each of its heads, the rows of query, key
    and value; out_weight the columns of the output projection, as rows. With equally many heads these are in_weight
    [members, heads * 3 * size, width] and out_weight [members, heads * size, width]; else the members' rows lie one
    after the other, and are filled up with zeros to the largest number of heads for a product, which gives 0 for those,
    or on a CPU, where a batch is large enough to tell, multiplied one after the other.
    """

    def __init__(
        self,
        attention: Attention,
        core: nn.Module,
        heads: Sequence[int],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ):
        super().__init__()
        self.attention, self.heads, self.members = attention, list(heads), len(heads)
        self.core = (core,)  # what a member's attention is made of, without weights; in a tuple it is no part of this
        self.in_weight, self.out_weight = (nn.Parameter(weight) for weight in weights)
        self.in_bias, self.out_bias = (None if bias is None else nn.Parameter(bias) for bias in biases)
        rate: Any = getattr(core, "attention_dropout", getattr(core, "dropout", 0.0))
        self.dropout, self.causal = float(getattr(rate, "p", rate)), bool(getattr(core, "is_causal", False))

    @classmethod
    def of(cls, models: Sequence[nn.Module], found: Sequence[Attention]) -> "GroupedAttention":
        """The attention of one layer of the members: `found[m]` tells where it is in `models[m]`."""
        heads, size = [each.heads for each in found], found[0].size
        most = heads.index(max(heads))
        core = copy.deepcopy(models[most].get_submodule(found[most].name))
        for name in (*found[most].inputs, *([found[most].output] if found[most].inside else [])):
            setattr(core, name.rpartition(".")[2], nn.Identity())
        inputs = [[linear(model, name) for name in each.inputs] for model, each in zip(models, found, strict=True)]
        outputs = [linear(model, each.output) for model, each in zip(models, found, strict=True)]

        def rows(tensors: Sequence[Tensor]) -> Tensor:  # of query, key and value, head by head
            return torch.stack([t.detach().unflatten(0, (-1, size)) for t in tensors], 1).flatten(0, 2)

        join = torch.stack if len(set(heads)) == 1 else torch.cat
        own = [[part.bias for part in three if part.bias is not None] for three in inputs]
        last = [part.bias.detach() for part in outputs if part.bias is not None]
        weights = [join([rows([part.weight for part in three]) for three in inputs])]
        weights.append(join([part.weight.detach().mT for part in outputs]).contiguous())
        biases = [join([rows(three) for three in own]) if own[0] else None, torch.stack(last) if last else None]
        grouped = cls(found[0], core, heads, weights, biases)
        for side, part in (("in", inputs[0][0]), ("out", outputs[0])):
            for name, p in part.named_parameters():
                grouped.get_parameter(f"{side}_{name}").requires_grad_(p.requires_grad)
        return grouped

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, is_causal: bool | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        members = range(self.members)[self.active]
        causal = attention_mask is None and (self.causal if is_causal is None else is_causal)
        rows = len(hidden_states) // len(members)
        ragged = len({self.heads[m] for m in members}) > 1
        if not ragged or hidden_states.device.type != "cpu" or rows * hidden_states.shape[1] < devices.FUSED_ALONE:
            return self._attend(hidden_states, attention_mask, causal, self.active), None
        masks = [attention_mask] * len(members)
        if attention_mask is not None and len(attention_mask) == len(hidden_states):
            masks = attention_mask.split(rows)
        each = zip(hidden_states.split(rows), masks, members, strict=True)
        return torch.cat([self._attend(x, mask, causal, slice(m, m + 1)) for x, mask, m in each]), None

    def _attend(self, hidden: Tensor, mask: Tensor | None, causal: bool, active: slice) -> Tensor:
        """Some members: hidden [members * batch, tokens, width] -> the same."""
        heads, tokens, size = self.heads[active], hidden.shape[1], self.attention.size
        x = hidden.reshape(len(heads), -1, hidden.shape[2])  # [members, batch * tokens, width]
        out_bias = None if self.out_bias is None else self.out_bias[active, None]
        if not max(heads):
            return (torch.zeros_like(x) if out_bias is None else torch.zeros_like(x) + out_bias).view(hidden.shape)
        in_bias = self._filled(self.in_bias, 3, active)
        qkv = _product(x, self._filled(self.in_weight, 3, active).mT, None if in_bias is None else in_bias.unsqueeze(1))
        q, k, v = (
            qkv.view(-1, tokens, max(heads), 3, size).permute(3, 0, 2, 1, 4).unbind()
        )  # [rows, heads, tokens, size]
        dropout = self.dropout if self.training else 0.0
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and tokens > 1)
        z = z.transpose(1, 2).reshape(*x.shape[:2], -1)  # [members, batch * tokens, heads * size]
        return _product(z, self._filled(self.out_weight, 1, active), out_bias).view(hidden.shape)

    def _filled(self, p: Any, share: int, active: slice) -> Any:
        """Some members' own rows [members, heads * share * size, ...], with zeros where one has fewer heads."""
        if p is None or len(set(self.heads)) == 1:
            return p if p is None or active == slice(None) else p[active]
        rows = self._split(p, share)[active]
        return rows[0].unsqueeze(0) if len(rows) == 1 else pad_sequence(rows, batch_first=True)

    def _split(self, p: Tensor, share: int) -> list[Tensor]:
        """Each member's own rows."""
        if len(set(self.heads)) == 1:
            return list(p)
        return list(p.split([count * share * self.attention.size for count in self.heads]))

    def member(self, index: int) -> nn.Module:
        core, size = copy.deepcopy(self.core[0]).train(self.training), self.attention.size
        weight = self._split(self.in_weight.detach(), 3)[index].unflatten(0, (-1, 3, size))
        bias = None if self.in_bias is None else self._split(self.in_bias.detach(), 3)[index].view(-1, 3, size)
        for i, name in enumerate(self.attention.inputs):
            own = None if bias is None else bias[:, i].flatten().clone()
            part = plain_linear(weight[:, i].flatten(0, 1).clone(), own)
            setattr(core, name.rpartition(".")[2], part.requires_grad_(self.in_weight.requires_grad))
        if self.attention.inside:
            setattr(core, self.attention.output.rpartition(".")[2], self.projection(index))
        return with_heads(core, self.attention, self.heads[index])

    def projection(self, index: int) -> nn.Linear:
        """The output projection of a member."""
        weight = self._split(self.out_weight.detach(), 1)[index].mT.contiguous()
        bias = None if self.out_bias is None else self.out_bias.detach()[index].clone()
        return plain_linear(weight.clone(), bias).requires_grad_(self.out_weight.requires_grad)

    def shard(self, rows: slice) -> "GroupedAttention":
        kept = range(self.members)[rows]

        def some(p: Tensor | None, share: int) -> Tensor | None:
            if p is None or len(set(self.heads)) == 1:
                return p if p is None else p.data[rows]
            ends = [0, *itertools.accumulate(count * share * self.attention.size for count in self.heads)]
            return p.data[ends[kept[0]] : ends[kept[-1] + 1]]

        heads, out_bias = self.heads[rows], None if self.out_bias is None else self.out_bias.data[rows]
        parts = [some(self.in_weight, 3), some(self.out_weight, 1), some(self.in_bias, 3)]
        if len(set(heads)) == 1 < len(set(self.heads)):  # of the shard the heads are equally many
            parts = [None if part is None else part.unflatten(0, (len(heads), -1)) for part in parts]
        weights = [part for part in parts[:2] if part is not None]
        return _trained_like(GroupedAttention(self.attention, self.core[0], heads, weights, [parts[2], out_bias]), self)

    def extra_repr(self) -> str:
        return f"members={self.members}, heads={self.heads}, size={self.attention.size}"


class AppliedProjection(MemberLayer):
    """Stands where BERT has its output projection, which the grouped attention has applied."""

    def __init__(self, grouped: GroupedAttention):
        super().__init__()
        self.members, self.grouped = grouped.members, (grouped,)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def member(self, index: int) -> nn.Linear:
        return self.grouped[0].projection(index)

    def shard(self, rows: slice) -> "AppliedProjection":
        return AppliedProjection(self.grouped[0].shard(rows))


class FusedEnsemble(FoldedEnsemble):
    """Members that keep heads of one transformer, in one network; on a CPU a batch goes through it in parts.

    `inputs_per_pass` says how many inputs of each member stay in the cache together; `chunk`, if set, also splits the
    members. It can be trained (its shared parameters on the mean loss); `clip` needs members with equally many heads.
    """

    def __init__(self, network: nn.Module, member_ids: range):
        super().__init__(network, member_ids)
        self._bytes_of_input: dict[tuple, float] = {}  # in a layer of one member, by the shape of an input

    def forward_members(self, x: Inputs) -> Tensor:
        first = x if isinstance(x, Tensor) else next(iter(x.values()))
        batch, through = first.shape[1], super().forward_members
        count = -(-batch // self.inputs_per_pass(x))
        if count == 1:
            return through(x)
        bounds = [round(i * batch / count) for i in range(count + 1)]  # parts of about equal size
        return torch.cat(
            [through(map_tensors(lambda t, a=a, b=b: t[:, a:b], x)) for a, b in itertools.pairwise(bounds)], 1
        )

    def inputs_per_pass(self, x: Inputs) -> int:
        """How many of the inputs x [members, batch, ...] go through the network at once: all, but on a CPU only so many
        that what a linear layer reads and writes for all members stays in the cache (FUSED_CACHE bytes)."""
        first = x if isinstance(x, Tensor) else next(iter(x.values()))
        batch = first.shape[1]
        if first.device.type != "cpu" or torch.compiler.is_compiling():
            return batch
        key = tuple(first.shape[2:])
        if key not in self._bytes_of_input:
            few = map_tensors(lambda t: t[:, :8], x)
            self._bytes_of_input[key] = self._bytes_of_one(few) / min(batch, 8)
        return max(1, min(batch, int(devices.FUSED_CACHE / max(1, self.members * self._bytes_of_input[key]))))

    def _pass(self, x: Inputs, rows: slice) -> Tensor:
        if len(range(self.members)[rows]) < self.members:
            return super()._pass(x, rows)
        folded = map_tensors(lambda t: t.flatten(0, 1), x)  # all members, as the layers expect: nothing to tell them
        output = self.network(folded) if isinstance(folded, Tensor) else self.network(**folded)
        return getattr(output, "logits", output).unflatten(0, (self.members, -1))

    @torch.no_grad()
    def _bytes_of_one(self, x: Inputs) -> int:
        """The most that a linear layer of the MLPs reads and writes for one member."""
        found, modes = [0], {part: part.training for part in self.network.modules()}

        def note(_: nn.Module, args: tuple, output: Tensor) -> None:
            found.append(args[0].nbytes + output.nbytes)

        hooks = [part.register_forward_hook(note) for part in modes if isinstance(part, nn.Linear)]
        try:
            self.network.eval()  # no noise is drawn
            self._pass(map_tensors(lambda t: t[:1], x), slice(1))
        finally:
            for hook in hooks:
                hook.remove()
            for part, mode in modes.items():
                part.training = mode
        return max(found)


def fuse(
    models: Sequence[nn.Module] | Ensemble, *, norms: Literal["independent", "merged"] = "independent"
) -> FusedEnsemble:
    """Pruned versions of one transformer as an ensemble that predicts in one pass (Hydra, 4.2, eqs. 4-7).

    models: the members, pruned (`prune`) differently and perhaps fine-tuned since; a layer may have a different number
        of heads in each. They are copied. Also an ensemble of them, as it comes from `training.fit`.
    norms: LayerNorms "independent", one for each member, or "merged", their mean.

    Attention projections and the linear layers outside the stack of layers, the classifier among them, are the members'
    own; everything else is one for all, the mean of the members': the MLPs, and the embeddings, which are equal unless
    they were trained. (The paper leaves LayerNorms, classifiers and embeddings open; these choices reproduce its number
    of parameters, 4 M H_l / H d^2 + 8 d^2 a layer, and make members of equal MLPs exact.) Multiply-adds are those of
    the pruned members together: what is saved is the passes, and the memory.

    Raises ValueError for no members, for members of different depth, width, size of heads or classes, and for attention
    that is more than softmax(Q K^T / sqrt(size)) V; TypeError for what are no transformers.
    """
    members = [models.member(m) for m in range(models.members)] if isinstance(models, Ensemble) else list(models)
    if not members:
        raise ValueError("fuse needs at least one model, got an empty list")
    if norms not in ("independent", "merged"):
        raise ValueError(f'norms must be "independent" or "merged", got {norms!r}')
    found = [attentions(model) for model in members]
    _check_alike(members, found)
    network = copy.deepcopy(members[0])
    with torch.no_grad():
        for name, p in network.named_parameters():
            each = [model.get_parameter(name) for model in members]
            if all(one.shape == p.shape for one in each):  # float64: the mean of equal values is that value
                p.copy_(torch.stack([one.double() for one in each]).mean(0))
    layers = [attention.layer for attention in found[0]]
    for name, part in list(network.named_modules()):
        each: list[Any] = [model.get_submodule(name) for model in members]
        if isinstance(part, nn.LayerNorm) and part.elementwise_affine and norms == "independent":
            network.set_submodule(name, _stack_norms(each))
        elif type(part) is nn.Linear and not any(name.startswith(f"{layer}.") for layer in layers):
            network.set_submodule(name, _trained_like(MemberLinear.stack(each), part))
    for i, attention in enumerate(found[0]):
        grouped = GroupedAttention.of(members, [each[i] for each in found])
        _check_plain(grouped)
        network.set_submodule(attention.name, grouped.train(network.training))
        if not attention.inside:
            network.set_submodule(attention.output, AppliedProjection(grouped))
    if any(isinstance(part, nn.Dropout) for part in network.modules()):
        replace_layers(network, nn.Dropout, lambda _, layer: MemberDropout(len(members), layer.p))
    return FusedEnsemble(network, range(len(members))).train(members[0].training)


def _rows(p: Any, rows: slice) -> Any:
    """Some members' part of a parameter; all of it without a call, which small batches would notice."""
    return p if p is None or rows == slice(None) else p[rows]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [members, rows, in], weight [members, in, out] and bias [members, 1, out] -> [members, rows, out]."""
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)


def _check_alike(models: Sequence[nn.Module], found: Sequence[list[Attention]]) -> None:
    """Raises ValueError unless the members differ in their heads alone."""
    sizes = [
        (len(each), linear(model, each[0].output).out_features, each[0].size)
        for model, each in zip(models, found, strict=True)
    ]
    for m, size in enumerate(sizes):
        if size != sizes[0]:
            kinds = [f"{layers} layers of width {width} with heads of {dim}" for layers, width, dim in (size, sizes[0])]
            raise ValueError(
                f"member {m} has {kinds[0]}, member 0 has {kinds[1]}; only pruned versions of one model fuse"
            )
    heads = {name for attention in found[0] for name in (*attention.inputs, attention.output)}
    shapes = [
        {name: list(p.shape) for name, p in model.named_parameters() if name.rpartition(".")[0] not in heads}
        for model in models
    ]
    for m, each in enumerate(shapes):
        for name in {**shapes[0], **each}:
            if each.get(name) != shapes[0].get(name):
                given = f"{each.get(name, 'absent')} in member {m} and {shapes[0].get(name, 'absent')} in member 0"
                raise ValueError(f"{name} is {given}; only pruned versions of one model fuse")


@torch.no_grad()
def _check_plain(grouped: GroupedAttention) -> None:
    """Raises ValueError unless the members' own attention gives what the grouped one gives."""
    like = next(grouped.parameters())
    x = torch.randn(grouped.members, 4, like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like)
    together, _ = grouped.eval()(x)
    for m in range(grouped.members):
        try:
            alone = grouped.member(m)(x[m : m + 1], attention_mask=None)[0]
            alone = alone if grouped.attention.inside else grouped.projection(m)(alone)
            same = torch.allclose(alone[0], together[m], rtol=0.0, atol=torch.finfo(x.dtype).eps ** 0.5)
        except (TypeError, RuntimeError):
            same = False
        if not same:
            kind = type(grouped.core[0]).__name__
            raise ValueError(f"{kind} is more than softmax(Q K^T / sqrt(size)) V and cannot be fused")


def _stack_norms(norms: Sequence[Any]) -> MemberLayerNorm:
    weight = torch.stack([norm.weight.detach() for norm in norms])
    bias = torch.stack([torch.zeros_like(norm.weight) if norm.bias is None else norm.bias.detach() for norm in norms])
    return _trained_like(MemberLayerNorm(weight.unsqueeze(1), bias.unsqueeze(1), norms[0].eps), norms[0])


def _trained_like(made: Any, part: nn.Module) -> Any:
    """`made`, whose parameters are trained, or not, like those of `part` that have their names."""
    wanted = {name: p.requires_grad for name, p in part.named_parameters()}
    for name, p in made.named_parameters():
        p.requires_grad_(wanted.get(name, False))
    return made.train(part.training)
