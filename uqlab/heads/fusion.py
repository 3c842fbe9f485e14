"""Pruned networks in one pass: grouped attention, merged MLPs, and the members' own LayerNorms and classifiers.

Hydra, section 4.2.
"""

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uqlab.core import devices, tuning
from uqlab.core.modules import Inputs, evaluating, first_tensor, map_tensors
from uqlab.ensembles import Ensemble, FoldedEnsemble, own_dropout, stack_layers
from uqlab.heads.grouped import AppliedProjection, GroupedAttention
from uqlab.models import Attention, ZeroShot, attentions

MOST = 64  # inputs in one pass of a fused ensemble, whatever the cache: enough for every core


class FusedEnsemble(FoldedEnsemble):
    """Pruned versions of one transformer in one network; on a CPU a batch goes through it in parts.

    Members go through together or one after the other, whichever is faster for such a batch (`uqlab.core.tuning`);
    `chunk`, if set, is the largest number of them in one pass. It can be trained: the shared parameters follow the
    members' mean loss. `clip` needs members with equal numbers of heads.
    """

    def __init__(self, network: nn.Module, member_ids: range):
        super().__init__(network, member_ids)
        self._bytes_of_input: dict[
            tuple, float
        ] = {}  # in a layer of one member, by the shape of an input
        self._parts: dict[tuple, tuple[int, int]] = {}

    def forward_members(self, x: Inputs) -> Tensor:
        first = first_tensor(x)
        if first.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward_members(x)
        return self._in_parts(x, *self.parts(x))

    def parts(self, x: Inputs) -> tuple[int, int]:
        """How many members, and how many inputs of each, go through a CPU at once, for x [members, batch, ...]."""
        first = first_tensor(x)
        key = (first.shape, self.chunk, torch.is_grad_enabled())
        if key not in self._parts:
            few = map_tensors(lambda t: t[:, :MOST], x)
            most, batch = self.chunk or self.members, min(first.shape[1], MOST)
            ways = {
                "together": (most, self.inputs_per_pass(x)),
                "one by one": (1, batch),
            }
            shape = (self.members, self.chunk, tuning.octave(batch), *first.shape[2:])
            kind = f"parts of a fused {type(self.network).__name__} {tuning.sizes(self.network)}"
            with evaluating(self.network):
                timed = {
                    name: partial(self._in_parts, few, *way)
                    for name, way in ways.items()
                }
                self._parts[key] = ways[
                    tuning.choose(kind, shape, first, timed, "together")
                ]
        return self._parts[key]

    def _in_parts(self, x: Inputs, members: int, inputs: int) -> Tensor:
        count, every = (
            -(-first_tensor(x).shape[1] // inputs),
            range(0, self.members, members),
        )
        rows = (
            [slice(m, m + members) for m in every]
            if members < self.members
            else [slice(None)]
        )
        parts = [
            map_tensors(lambda t, i=i: t.tensor_split(count, 1)[i], x)
            for i in range(count)
        ]
        each = [
            [self.run(map_tensors(lambda t, r=r: t[r], part), r) for r in rows]
            for part in parts
        ]
        return torch.cat([torch.cat(made) for made in each], 1)

    def inputs_per_pass(self, x: Inputs) -> int:
        """How many inputs of each member [members, batch, ...] keep what a linear layer reads and writes in the cache.

        The cache has FUSED_CACHE bytes.
        """
        first = first_tensor(x)
        batch, key = first.shape[1], tuple(first.shape[2:])
        if key not in self._bytes_of_input:
            few = map_tensors(lambda t: t[:, :8], x)
            self._bytes_of_input[key] = self._bytes_of_one(few, nn.Linear) / min(
                batch, 8
            )
        return max(
            1,
            min(
                batch,
                int(
                    devices.FUSED_CACHE
                    / max(1, self.members * self._bytes_of_input[key])
                ),
            ),
        )


class FusedTowers(Ensemble):
    """Pruned versions of one `ZeroShot`: their text towers are fused, and their vision towers."""

    def __init__(
        self,
        text: FoldedEnsemble,
        vision: FoldedEnsemble,
        scale: Tensor,
        prompts: Tensor,
        source: str,
    ):
        super().__init__(text.member_ids)
        self.text, self.vision, self.name = text, vision, source
        self.scale = nn.Parameter(scale.detach())  # [members, 1, 1]
        self.register_buffer("prompts", prompts)

    def forward_members(self, x: Inputs) -> Tensor:
        return (
            self.scale.exp()
            * self.vision.forward_members(x)
            @ self.text(self.prompts).mT
        )

    def member(self, index: int) -> ZeroShot:
        towers = self.text.member(index), self.vision.member(index)
        scale = nn.Parameter(self.scale.detach()[index, 0, 0].clone())
        return ZeroShot(*towers, scale, self.get_buffer("prompts"), self.name).train(
            self.training
        )

    def shard(self, rows: slice) -> "FusedTowers":
        towers = self.text.shard(rows), self.vision.shard(rows)
        return FusedTowers(
            *towers, self.scale[rows], self.get_buffer("prompts"), self.name
        ).train(self.training)

    def shared_parameters(self) -> dict[nn.Parameter, int]:
        return self.text.shared_parameters() | self.vision.shared_parameters()


def fuse(
    models: Sequence[nn.Module] | Ensemble,
    *,
    norms: Literal["independent", "merged"] = "independent",
) -> FusedEnsemble | FusedTowers:
    """An ensemble of pruned versions of one transformer that predicts in one pass (Hydra, 4.2, eqs. 4-7).

    models: the members, pruned (`prune`) differently and perhaps fine-tuned since. They are copied.
    norms: "independent", every member keeps its own LayerNorms; "merged", one set of LayerNorms with their mean.

    Every member keeps its own attention projections and its own linear layers outside the stack of layers, such as the
    classifier. All members share the rest, which is the mean of theirs: the MLPs, and the embeddings, which are equal
    unless they were trained. The paper does not specify LayerNorms, classifiers and embeddings. These choices reproduce
    its number of parameters, 4 M H_l / H d^2 + 8 d^2 for a layer, and they make the ensemble exact where the members
    have equal MLPs. Multiply-adds are those of the pruned members together: fusing saves passes and memory. Of
    `ZeroShot`s the text towers are fused, and the vision towers.

    Raises ValueError for no members, for members of different depth, width, head size or classes, and for attention
    that is more than softmax(Q K^T / sqrt(size)) V; TypeError for members that are not networks.
    """
    members = (
        [models.member(m) for m in range(models.members)]
        if isinstance(models, Ensemble)
        else list(models)
    )
    if not members:
        raise ValueError("fuse needs at least one model, got an empty list")
    if all(isinstance(model, ZeroShot) for model in members):
        return _fuse_towers(members, norms)
    found = [attentions(model) for model in members]
    for attention in itertools.chain.from_iterable(found):
        if attention.fused or attention.heads != attention.groups:
            kind = type(members[0]).__name__
            raise ValueError(
                f"{kind} has no separate query, key and value projections with a head "
                "for each other: it cannot be fused"
            )
    _check_alike(members, found)
    network = copy.deepcopy(members[0])
    with torch.no_grad():
        for name, p in network.named_parameters():
            each = [model.get_parameter(name) for model in members]
            if all(
                one.shape == p.shape for one in each
            ):  # float64: the mean of equal values is that value
                p.copy_(torch.stack([one.double() for one in each]).mean(0))
    layers = [attention.layer for attention in found[0]]
    for name, part in list(network.named_modules()):
        outside = not name.startswith(tuple(f"{layer}." for layer in layers))
        own = type(part) is nn.Linear and outside
        if isinstance(part, nn.LayerNorm) and norms == "independent":
            own = part.elementwise_affine
        if own:
            each = [model.get_submodule(name) for model in members]
            network.set_submodule(name, stack_layers(each))
    for i, attention in enumerate(found[0]):
        grouped = GroupedAttention(members, [each[i] for each in found])
        network.set_submodule(attention.name, grouped)
        if not attention.inside:
            network.set_submodule(attention.output.module, AppliedProjection(grouped))
    own_dropout(network, len(members))
    return FusedEnsemble(network, range(len(members))).train(members[0].training)


def _fuse_towers(
    members: Sequence[Any], norms: Literal["independent", "merged"]
) -> FusedTowers:
    first = members[0]
    if not all(torch.equal(first.prompts, each.prompts) for each in members):
        raise ValueError(
            "the members have different prompts; only pruned versions of one model fuse"
        )
    text, vision = (
        fuse([getattr(each, tower) for each in members], norms=norms)
        for tower in ("text", "vision")
    )
    scale = torch.stack([each.scale for each in members])[:, None, None]
    return FusedTowers(text, vision, scale, first.prompts, first.name).train(
        first.training
    )  # type: ignore[arg-type]


def _check_alike(models: Sequence[nn.Module], found: Sequence[list[Attention]]) -> None:
    """Raise ValueError unless the members differ only in their heads."""

    def described(model: nn.Module, own: list[Attention]) -> dict[str, Any]:
        units = tuple(f"{attention.unit}." for attention in own)
        width = model.get_parameter(own[0].output.parameter).shape[0]
        sizes: dict[str, Any] = {
            "number of layers": len(own),
            "width": width,
            "size of a head": own[0].size,
        }
        for name, p in model.named_parameters():
            if not name.startswith(units):
                sizes[name] = list(p.shape)
        return sizes

    first, *others = (
        described(model, own) for model, own in zip(models, found, strict=True)
    )
    for m, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if other.get(name) != first.get(name):
                given = f"{other.get(name, 'absent')} in member {m} and {first.get(name, 'absent')} in member 0"
                raise ValueError(
                    f"{name} is {given}; only pruned versions of one model fuse"
                )
