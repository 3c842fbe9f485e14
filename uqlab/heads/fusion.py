"""Pruned networks in one: attention of their own and merged MLPs.

LayerNorms and classifiers are the members' own (Gabetni et al. 2025, section 4.2).
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from uqlab.core.checks import one_of
from uqlab.core.modules import evaluating, first_of
from uqlab.ensembles import METHODS, Ensemble, OneNetwork, Own
from uqlab.heads.attention import addresses, count_heads
from uqlab.heads.pruning import prune
from uqlab.models import Attention, ZeroShot, attentions

Members = Sequence[nn.Module]


class FusedEnsemble(Ensemble):
    """Pruned versions of one transformer in one network.

    It can be trained: the shared parameters follow the members' mean loss. Members with
    fewer heads in a layer than others have heads of zeros there, which stay zeros.
    """

    @property
    def heads(self) -> list[list[int]]:
        """The number of heads, [layers][members]."""
        return (self.recipe or {})["heads"]

    def tensor(self, name: str, index: int) -> Tensor:
        """Return a member's tensor, without the heads of zeros."""
        tensor, part = super().tensor(name, index), self.seen.get(name)
        if part is None or not isinstance(part.kind, Filled):
            return tensor
        return tensor[tuple(map(slice, part.kind.sizes[index].tolist()))]

    @torch.no_grad()
    def member(self, index: int) -> nn.Module:
        """Return one member as a plain network, with its own number of heads."""
        self._check_index(index)
        filled = [
            (layer, head)
            for layer, attention in enumerate(attentions(self.network))
            for head in range(self.heads[layer][index], attention.heads)
        ]
        if not filled:
            return super().member(index)
        network = prune(self.network, filled)
        for name, p in self.network.named_parameters():
            network.get_parameter(name).requires_grad_(p.requires_grad)
        return self.put(network, index)

    def shard(self, rows: slice) -> "FusedEnsemble":
        """Return the ensemble of some members; training it trains these."""
        shard = super().shard(rows)
        return shard.with_recipe(_some(self.recipe, rows))


def _some(recipe, rows):
    """Return the recipe of some of the members."""
    return {**recipe, "heads": [counts[rows] for counts in recipe["heads"]]}


class Filled(Own):
    """A member's tensor that is filled up with zeros, which stay zeros."""

    kept: Tensor
    sizes: Tensor

    def __init__(self, t: Tensor, shape: torch.Size):
        here = tuple(map(slice, t.shape))
        value, kept = t.new_zeros(shape), t.new_zeros(shape)
        value[here], kept[here] = t, 1
        super().__init__(value)
        self.register_buffer("kept", kept, persistent=False)
        self.register_buffer("sizes", torch.tensor(t.shape), persistent=False)

    def forward(self, w):
        """Return the tensor with its zeros."""
        return self.value * self.kept


class FusedTowers(OneNetwork):
    """Pruned versions of one `ZeroShot`: each of its towers is fused."""

    def __init__(
        self,
        text: FusedEnsemble,
        vision: FusedEnsemble,
        scale: Tensor,
        prompts: Tensor,
        source: str,
    ):
        super().__init__(nn.Identity(), text.member_ids)
        self.text = text
        self.vision = vision
        self.name = source
        self.scale = nn.Parameter(scale.detach())  # [members, 1, 1]
        self.register_buffer("prompts", prompts)

    def _run(self, args, named, each, members):
        prompts = self.text(self.prompts)[members]
        images = self.vision._run(args, named, each, members)
        return self.scale[members].exp() * images @ prompts.mT

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
        return shard.with_recipe(_some(self.recipe, rows)).train(self.training)

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters that all members share."""
        return self.text.shared_parameters() + self.vision.shared_parameters()


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
    those of the pruned members together, of members that were pruned alike: fusing
    saves passes and memory. Of `ZeroShot`s each tower is fused.

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
        for attention that heads of zeros would change.
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
    towers = all(isinstance(model, ZeroShot) for model in members)
    made = (_fuse_towers if towers else _fuse_stacks)(members, norms == "independent")
    heads = zip(*map(count_heads, members), strict=True)
    recipe = {"method": "fuse", "heads": [*map(list, heads)], "norms": norms}
    return made.with_recipe(recipe)


def _again(network, members, heads, norms):
    """Return a fused ensemble of such heads, whose weights will follow."""
    layers = attentions(network)
    pruned = []
    for counts in zip(*heads, strict=True):
        gone = []
        for number, kept in enumerate(counts):
            gone += [(number, head) for head in range(kept, layers[number].heads)]
        pruned.append(prune(network, addresses(layers, gone)))
    fused = fuse(pruned, norms=norms)
    fused.member_ids = members
    return fused


METHODS["fuse"] = _again


def _fuse_stacks(members: list[Any], own_norms: bool) -> FusedEnsemble:
    layers = [attentions(model) for model in members]
    _check_alike(members, layers)
    network = copy.deepcopy(members[0])
    _share_means(network, members)
    stack = tuple(f"{attention.layer}." for attention in layers[0])
    own = _own(network, stack, own_norms)
    sees = {n: [Own(m.get_parameter(n).detach()) for m in members] for n in own}
    for layer in zip(*layers, strict=True):
        sees |= _heads(network, layer, members)
    for name, p in network.named_parameters():
        for part in sees.get(name, ()):
            part.requires_grad_(p.requires_grad)
        p.requires_grad_(p.requires_grad and name not in sees)
    fused = FusedEnsemble(network, len(members), sees).eval()
    fused.borrowed = set()
    heads = [[a.heads for a in layer] for layer in zip(*layers, strict=True)]
    fused.with_recipe({"method": "fuse", "heads": heads})
    _check_attention(fused, layers[0], members)
    return fused.train(members[0].training)


@torch.no_grad()
def _share_means(network: nn.Module, members: Members) -> None:
    """Give a network the mean of the members' parameters, where their shapes agree."""
    for name, p in network.named_parameters():
        values = [model.get_parameter(name) for model in members]
        if all(value.shape == p.shape for value in values):
            # The float64 mean of equal values is that value.
            p.copy_(torch.stack([value.double() for value in values]).mean(0))


def _own(network: nn.Module, layers: tuple[str, ...], norms: bool) -> list[str]:
    """Return what members keep: linear layers outside the stack, and perhaps norms."""
    own = []
    for name, part in network.named_modules():
        linear = type(part) is nn.Linear and not name.startswith(layers)
        norm = isinstance(part, nn.LayerNorm) and part.elementwise_affine
        if linear or (norm and norms):
            own += [f"{name}.{key}".lstrip(".") for key, _ in part.named_parameters()]
    return own


def _heads(
    network: nn.Module, layer: Sequence[Attention], members: Members
) -> dict[str, list[nn.Module]]:
    """Give the network the widest attention of a layer; return the members' heads.

    `layer` has one attention a member. Those with fewer heads are filled up with zeros:
    a head of zeros gives zeros, which zeros in the output projection ignore.
    """
    most = max(zip(layer, members, strict=True), key=lambda pair: pair[0].heads)
    core = copy.deepcopy(most[1].get_submodule(most[0].unit))
    network.set_submodule(most[0].unit, core)
    sees: dict[str, list[nn.Module]] = {}
    for projections in zip(*(a.projections for a in layer), strict=True):
        modules = [
            model.get_submodule(projection.module)
            for model, projection in zip(members, projections, strict=True)
        ]
        for name, p in network.get_submodule(projections[0].module).named_parameters():
            each = [module.get_parameter(name).detach() for module in modules]
            alike = all(t.shape == p.shape for t in each)
            sees[f"{projections[0].module}.{name}"] = [
                Own(t) if alike else Filled(t, p.shape) for t in each
            ]
    return sees


@torch.no_grad()
def _check_attention(
    fused: FusedEnsemble, layers: list[Attention], members: Members
) -> None:
    """Raise ValueError unless the attention gives what the members' own one gives."""
    for m, member in enumerate(members):
        padded = {n: Ensemble.tensor(fused, n, m) for n in fused.seen}
        for attention in layers:
            like = member.get_parameter(attention.output.parameter)
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(1, 4, len(like), generator=generator).to(like)
            try:
                there = _attended(fused.network, attention, x, padded)
                here = _attended(member, attention, x, {})
                tolerance = torch.finfo(x.dtype).eps ** 0.5
                same = torch.allclose(here, there, rtol=0, atol=tolerance)
            except (TypeError, RuntimeError):
                same = False
            if not same:
                kind = type(member.get_submodule(attention.name)).__name__
                raise ValueError(
                    f"{kind} is more than its four projections and their heads: "
                    "it cannot be fused"
                )


def _attended(
    network: nn.Module, attention: Attention, x: Tensor, state: dict[str, Tensor]
) -> Tensor:
    """Return what an attention with its output projection gives in evaluation mode."""
    unit, name = network.get_submodule(attention.unit), f"{attention.unit}."
    own = {n.removeprefix(name): t for n, t in state.items() if n.startswith(name)}
    with evaluating(unit):
        output = functional_call(unit, own, (x,), {"attention_mask": None})
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
