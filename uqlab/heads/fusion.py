"""Pruned networks in one pass: grouped attention and merged MLPs.

LayerNorms and classifiers are the members' own (Gabetni et al. 2025, section 4.2).
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uqlab.core import devices
from uqlab.core.checks import first_tensor, one_of
from uqlab.core.modules import Inputs, evaluating, first_of, layers_of, map_tensors
from uqlab.ensembles import Ensemble, FoldedEnsemble, own_dropout, stack_layers
from uqlab.heads.cutting import put, with_heads
from uqlab.heads.grouped import Ragged, grouped
from uqlab.models import Attention, ZeroShot, attentions

Members = Sequence[nn.Module]


class FusedEnsemble(FoldedEnsemble):
    """Pruned versions of one transformer in one network.

    It can be trained: the shared parameters follow the members' mean loss. `clip` needs
    members with equal numbers of heads. On a CPU a batch goes through in parts, so that
    what a linear layer reads and writes stays in the cache. Where members have
    different numbers of heads, a batch that is larger than that goes through member by
    member, because several at once are filled up with zeros.
    """

    def __init__(self, network: nn.Module, member_ids: range):
        super().__init__(network, member_ids)
        # In a layer of one member, by the shape of an input.
        self._bytes_of_input = {}
        self.layers: list[Attention] = []  # of a member

    def forward_members(self, x: Inputs) -> Tensor:
        """Each member on a batch of its own [members, batch, ...]."""
        first = first_tensor(x)
        if first.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward_members(x)
        parts = -(-first.shape[1] // self.inputs_per_pass(x))
        logits = []
        for i in range(parts):
            inputs = map_tensors(lambda t, i=i: t.tensor_split(parts, 1)[i], x)
            logits.append(super().forward_members(inputs))
        return torch.cat(logits, 1)

    def inputs_per_pass(self, x: Inputs) -> int:
        """How many inputs of each member go through a CPU at once.

        Parameters
        ----------
        x
            Inputs like these [members, batch, ...].
        """
        batch = first_tensor(x).shape[1]
        room = self._room(x)
        together = max(1, int(room / self.members))
        if batch <= together:
            return batch
        return together if self._even() else max(1, int(room))

    def members_per_pass(self, x: Inputs) -> int:
        """How many members go through at once."""
        first = first_tensor(x)
        if first.device.type != "cpu":
            return super().members_per_pass(x)
        fits = first.shape[1] <= max(1, self._room(x) / self.members)
        return self.members if fits or self._even() else 1

    def folds(self, x: Inputs) -> bool:
        """Whether several members may share a pass: attention has the batch first."""
        return True

    def _room(self, x: Inputs) -> float:
        """How many inputs of one member the cache holds, FUSED_CACHE bytes."""
        first = first_tensor(x)
        key = tuple(first.shape[2:])
        if key not in self._bytes_of_input:
            few = map_tensors(lambda t: t[:, :8], x)
            read = self._bytes_of_one(few, nn.Linear)
            self._bytes_of_input[key] = max(1, read) / min(first.shape[1], 8)
        return devices.FUSED_CACHE / self._bytes_of_input[key]

    def _even(self) -> bool:
        """Whether the members have the same number of heads in every layer."""
        return not layers_of(self.network, Ragged)

    def member(self, index: int) -> nn.Module:
        """One member as a plain network."""
        network = super().member(index)
        for attention in self.layers:
            core = network.get_submodule(attention.name)
            rows = network.get_parameter(attention.query.parameter).shape[0]
            cut = with_heads(core, attention, rows // attention.size)
            network = put(network, attention.name, cut)
        return network

    def shard(self, rows: slice) -> "FusedEnsemble":
        """Return the ensemble of some of the members, sharing their weights' memory."""
        shard = super().shard(rows)
        shard.layers = self.layers
        return shard


class FusedTowers(Ensemble):
    """Pruned versions of one `ZeroShot`: each of its towers is fused."""

    def __init__(
        self,
        text: FoldedEnsemble,
        vision: FoldedEnsemble,
        scale: Tensor,
        prompts: Tensor,
        source: str,
    ):
        super().__init__(text.member_ids)
        self.text = text
        self.vision = vision
        self.name = source
        self.scale = nn.Parameter(scale.detach())  # [members, 1, 1]
        self.register_buffer("prompts", prompts)

    def forward_members(self, x: Inputs) -> Tensor:
        """Each member on images of its own [members, batch, ...]."""
        prompts = self.text(self.prompts)
        return self.scale.exp() * self.vision.forward_members(x) @ prompts.mT

    def member(self, index: int) -> ZeroShot:
        """One member as a plain network."""
        towers = self.text.member(index), self.vision.member(index)
        scale = nn.Parameter(self.scale.detach()[index, 0, 0].clone())
        member = ZeroShot(*towers, scale, self.get_buffer("prompts"), self.name)
        return member.train(self.training)

    def shard(self, rows: slice) -> "FusedTowers":
        """Return the ensemble of some of the members."""
        towers = self.text.shard(rows), self.vision.shard(rows)
        prompts = self.get_buffer("prompts")
        shard = FusedTowers(*towers, self.scale[rows], prompts, self.name)
        return shard.train(self.training)

    def shared_parameters(self) -> dict[nn.Parameter, int]:
        """Return the trainable parameters that all members share."""
        return self.text.shared_parameters() | self.vision.shared_parameters()


def fuse(
    models: Members | Ensemble,
    *,
    norms: Literal["independent", "merged"] = "independent",
) -> FusedEnsemble | FusedTowers:
    """Fuse pruned versions of one transformer into an ensemble that needs one pass.

    Every member keeps its own attention projections and its own linear layers outside
    the stack of layers, such as the classifier. All members share the rest, which is
    the mean of theirs: the MLPs, and the embeddings, which are equal unless they were
    trained. The paper does not specify LayerNorms, classifiers and embeddings. These
    choices reproduce its number of parameters, 4 M H_l / H d^2 + 8 d^2 for a layer, and
    they make the ensemble exact where the members have equal MLPs. Multiply-adds are
    those of the pruned members together: fusing saves passes and memory. Of `ZeroShot`s
    each tower is fused.

    Parameters
    ----------
    models : sequence of nn.Module, or Ensemble
        The members, pruned (`prune`) differently and perhaps trained since. They are
        copied.
    norms : str
        "independent": every member keeps its own LayerNorms; "merged": one set of
        LayerNorms with their mean.

    Returns
    -------
    Ensemble
        Logits [members, batch, classes] from inputs [batch, ...].

    Raises
    ------
    ValueError
        For no members, for members of different depth, width, head size or classes, and
        for attention that is more than softmax(Q K^T / sqrt(size)) V.
    TypeError
        For members that are not networks.

    References
    ----------
    Gabetni et al. 2025, section 4.2, equations 4 to 7.
    """
    one_of("norms", norms, ("independent", "merged"))
    if isinstance(models, Ensemble):
        models = [models.member(m) for m in range(models.members)]
    members: list[Any] = list(models)
    if not members:
        raise ValueError("fuse needs at least one model, got an empty list")
    if all(isinstance(model, ZeroShot) for model in members):
        return _fuse_towers(members, norms == "independent")
    return _fuse_stacks(members, norms == "independent")


def _fuse_stacks(members: list[Any], own_norms: bool) -> FusedEnsemble:
    layers = [attentions(model) for model in members]
    _check_alike(members, layers)
    network = copy.deepcopy(members[0])
    _share_means(network, members)
    stack = tuple(f"{attention.layer}." for attention in layers[0])
    _keep_own(network, members, stack, own_norms)
    for layer in zip(*layers, strict=True):
        _group_heads(network, layer, members)
    own_dropout(network, len(members))
    fused = FusedEnsemble(network, range(len(members))).eval()
    fused.layers = layers[0]
    _check_attention(fused, members)
    _fill_up(fused)
    return fused.train(members[0].training)


@torch.no_grad()
def _share_means(network: nn.Module, members: Members) -> None:
    """Give a network the mean of the members' parameters, where their shapes agree."""
    for name, p in network.named_parameters():
        values = [model.get_parameter(name) for model in members]
        if all(value.shape == p.shape for value in values):
            # The float64 mean of equal values is that value.
            p.copy_(torch.stack([value.double() for value in values]).mean(0))


def _keep_own(
    network: nn.Module,
    members: Members,
    layers: tuple[str, ...],
    norms: bool,
) -> None:
    """Give every member its linear layers outside the stack, and perhaps its norms."""
    for name, part in list(network.named_modules()):
        linear = type(part) is nn.Linear and not name.startswith(layers)
        norm = isinstance(part, nn.LayerNorm) and part.elementwise_affine
        if linear or (norm and norms):
            copies = [model.get_submodule(name) for model in members]
            network.set_submodule(name, stack_layers(copies))


def _group_heads(
    network: nn.Module, layer: Sequence[Attention], members: Members
) -> None:
    """Give every member its heads in a layer; `layer` has one attention a member."""
    most = max(zip(layer, members, strict=True), key=lambda pair: pair[0].heads)
    core = copy.deepcopy(most[1].get_submodule(layer[0].name))
    network.set_submodule(layer[0].name, core)
    for projections in zip(*(a.projections for a in layer), strict=True):
        modules: list[Any] = [
            model.get_submodule(projection.module)
            for model, projection in zip(members, projections, strict=True)
        ]
        network.set_submodule(projections[0].module, grouped(modules))


@torch.no_grad()
def _check_attention(fused: FusedEnsemble, members: Members) -> None:
    """Raise ValueError unless the attention gives what the members' own one gives."""
    for attention in fused.layers:
        width = members[0].get_parameter(attention.output.parameter)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(len(members), 4, len(width), generator=generator).to(width)
        try:
            together = _attended(fused.network, attention, x)
            alone = [
                _attended(member, attention, x[m : m + 1])
                for m, member in enumerate(members)
            ]
            tolerance = torch.finfo(x.dtype).eps ** 0.5
            same = torch.allclose(torch.cat(alone), together, rtol=0, atol=tolerance)
        except (TypeError, RuntimeError):
            same = False
        if not same:
            kind = type(members[0].get_submodule(attention.name)).__name__
            raise ValueError(
                f"{kind} is more than its four projections and their heads: "
                "it cannot be fused"
            )


def _fill_up(fused: FusedEnsemble) -> None:
    """Fill members up to equal lengths where attention does not take fewer heads."""
    ragged = layers_of(fused.network, Ragged)
    if ragged and not _passes_alone(fused):
        for tensors in ragged:
            tensors.fill(max(tensors.lengths))


def _passes_alone(fused: FusedEnsemble) -> bool:
    """Whether attention takes fewer heads where a member with fewer is alone.

    It does not where its forward pass counts on the number of heads that it was made
    with, as Whisper's.
    """
    for attention in fused.layers:
        output: Any = fused.network.get_submodule(attention.output.module)
        width = output.weight.weight(0)
        for m in range(fused.members):
            alone = fused.shard(slice(m, m + 1)).network
            try:
                _attended(alone, attention, width.new_zeros(1, 4, len(width)))
            except RuntimeError:
                return False
    return True


def _attended(network: nn.Module, attention: Attention, x: Tensor) -> Tensor:
    """Return what an attention with its output projection gives in evaluation mode."""
    unit = network.get_submodule(attention.unit)
    with evaluating(unit):
        output = unit(x, attention_mask=None)
    return first_of(output)


def _fuse_towers(members: list[ZeroShot], own_norms: bool) -> FusedTowers:
    first = members[0]
    if not all(torch.equal(first.prompts, member.prompts) for member in members):
        raise ValueError(
            "the members have different prompts; only pruned versions of one model fuse"
        )
    text = _fuse_stacks([member.text for member in members], own_norms)
    vision = _fuse_stacks([member.vision for member in members], own_norms)
    scale = torch.stack([member.scale for member in members])[:, None, None]
    fused = FusedTowers(text, vision, scale, first.prompts, first.name)
    return fused.train(first.training)


def _check_alike(models: Members, layers: Sequence[list[Attention]]) -> None:
    """Raise ValueError unless the members differ only in their heads."""
    for attention in itertools.chain.from_iterable(layers):
        if attention.fused or attention.heads != attention.groups:
            raise ValueError(
                f"{type(models[0]).__name__} has no separate query, key and value "
                "projections with a head for each other: it cannot be fused"
            )
    first, *others = map(_sizes, models, layers)
    for m, other in enumerate(others, start=1):
        for name in {**first, **other}:
            here = other.get(name, "absent")
            there = first.get(name, "absent")
            if here != there:
                raise ValueError(
                    f"{name} is {here} in member {m} and {there} in member 0; only "
                    "pruned versions of one model fuse"
                )


def _sizes(model: nn.Module, layers: list[Attention]) -> dict[str, Any]:
    """Return what members must have in common, by name."""
    units = tuple(f"{attention.unit}." for attention in layers)
    sizes: dict[str, Any] = {
        "number of layers": len(layers),
        "width": model.get_parameter(layers[0].output.parameter).shape[0],
        "size of a head": layers[0].size,
    }
    for name, p in model.named_parameters():
        if not name.startswith(units):
            sizes[name] = list(p.shape)
    return sizes
