"""Pruned versions of one transformer, fused into one ensemble.

Members keep their attention, LayerNorms and classifier, and share the mean of their
MLPs (Gabetni et al. 2025, section 4.2).
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uqlab.core.checks import one_of
from uqlab.ensembles import METHODS, Ensemble, Own
from uqlab.heads.attention import addresses
from uqlab.heads.pruning import prune
from uqlab.models import Attention, ZeroShot, attentions

Members = Sequence[nn.Module]


class FusedEnsemble(Ensemble):
    """Pruned versions of one transformer in one network.

    It can be trained: shared parameters follow the members' mean loss. A member with
    fewer heads in a layer than another member has heads of zeros there. They stay zero.
    """

    @property
    def heads(self) -> list[list[int]]:
        """The number of heads, [layers][members]."""
        return (self.recipe or {})["heads"]

    def member(self, index: int) -> nn.Module:
        """Return one member as a plain network, with its own number of heads."""
        network = super().member(index)
        counts = [layer[index] for layer in self.heads]
        return prune(network, _after(network, counts))

    def shard(self, rows: slice) -> "FusedEnsemble":
        """Return the ensemble of some members; training it trains these."""
        shard, recipe = super().shard(rows), {**(self.recipe or {})}
        recipe["heads"] = [counts[rows] for counts in self.heads]
        return shard.with_recipe(recipe)


def _after(network: nn.Module, counts: Sequence[int]) -> list[Any]:
    """Return the heads of a network after the first of each layer, so many."""
    layers = attentions(network)
    places = []
    for layer, count in enumerate(counts):
        places += [(layer, head) for head in range(count, layers[layer].heads)]
    return addresses(layers, places)


class ZeroPadded(Own):
    """A member's tensor, padded with zeros that training does not change."""

    kept: Tensor

    def __init__(self, t: Tensor, shape: torch.Size):
        value, kept = t.new_zeros(shape), t.new_zeros(shape)
        here = tuple(map(slice, t.shape))
        value[here], kept[here] = t, 1
        super().__init__(value)
        self.register_buffer("kept", kept, persistent=False)

    def forward(self, w: Tensor) -> Tensor:
        """Return the tensor with its zeros."""
        return self.value * self.kept


def fuse(
    models: Members | Ensemble,
    *,
    norms: Literal["independent", "merged"] = "independent",
) -> FusedEnsemble:
    """Fuse pruned versions of one transformer into an ensemble that needs one pass.

    Every member keeps its attention projections and its linear layers outside the stack
    of layers, such as the classifier. All members share the mean of their other
    parameters: the MLPs, and the embeddings, which are equal unless they were trained.

    The paper does not specify LayerNorms, classifiers and embeddings. These choices
    reproduce its number of parameters, 4 M H_l / H d^2 + 8 d^2 for a layer. They make
    the ensemble exact where the members have equal MLPs. Members with fewer heads are
    padded with heads of zeros. Otherwise the multiply-adds are those of the members
    together: fusing saves passes and memory.

    Parameters
    ----------
    models : sequence of nn.Module, or Ensemble
        The members, pruned differently by `prune` and perhaps trained since. They are
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
        If there are no members, if they differ in depth, width, head size, classes or
        prompts, or if their query, key and value are one matrix.
    TypeError
        If a member is not a network.

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
    layers = [attentions(model) for model in members]
    _check_alike(members, layers)
    network = copy.deepcopy(members[0])
    _share_means(network, members)
    sees = {}
    for name in _own(network, layers[0], norms == "independent"):
        sees[name] = [Own(model.get_parameter(name).detach()) for model in members]
    for layer in zip(*layers, strict=True):
        sees |= _pad_heads(network, layer, members)
    _freeze(network, sees)
    fused = FusedEnsemble(network, len(members), sees).train(members[0].training)
    fused.borrowed = set()
    heads = [[each.heads for each in layer] for layer in zip(*layers, strict=True)]
    return fused.with_recipe({"method": "fuse", "heads": heads, "norms": norms})


def _freeze(network: nn.Module, sees: dict[str, list[nn.Module]]) -> None:
    """Train what members see in place of the network's parameters that were trained."""
    for name, p in network.named_parameters():
        for part in sees.get(name, ()):
            part.requires_grad_(p.requires_grad)
        p.requires_grad_(p.requires_grad and name not in sees)


def _again(network, members, heads, norms):
    """Return a fused ensemble of such heads, whose weights will follow."""
    kept = zip(*heads, strict=True)
    fused = fuse([prune(network, _after(network, c)) for c in kept], norms=norms)
    fused.member_ids = members
    return fused


METHODS["fuse"] = _again


@torch.no_grad()
def _share_means(network: nn.Module, members: Members) -> None:
    """Give a network the mean of the members' parameters, where their shapes agree."""
    for name, p in network.named_parameters():
        values = [model.get_parameter(name) for model in members]
        if all(value.shape == p.shape for value in values):
            # The float64 mean of equal values is that value.
            p.copy_(torch.stack([value.double() for value in values]).mean(0))


def _own(network: nn.Module, layers: list[Attention], norms: bool) -> list[str]:
    """Name the members' own parameters outside of attention.

    These are linear layers outside the stack, scalars such as the scale of CLIP, and
    perhaps LayerNorms.
    """
    stack = tuple(f"{attention.layer}." for attention in layers)
    own = [name for name, p in network.named_parameters() if not p.ndim]
    for name, part in network.named_modules():
        linear = type(part) is nn.Linear and not name.startswith(stack)
        norm = isinstance(part, nn.LayerNorm) and part.elementwise_affine
        if linear or (norm and norms):
            own += [f"{name}.{key}".lstrip(".") for key, _ in part.named_parameters()]
    return own


def _pad_heads(
    network: nn.Module, layer: Sequence[Attention], members: Members
) -> dict[str, list[nn.Module]]:
    """Give the network the widest attention of a layer; return the members' weights.

    `layer` has the attention of each member. A head of zeros gives zeros, so padded
    weights change no output.
    """
    counts = [attention.heads for attention in layer]
    widest, unit = members[counts.index(max(counts))], layer[0].unit
    network.set_submodule(unit, copy.deepcopy(widest.get_submodule(unit)))
    sees: dict[str, list[nn.Module]] = {}
    for projection in layer[0].projections:
        place = projection.module
        for key, p in network.get_submodule(place).named_parameters():
            name = f"{place}.{key}"
            each = [model.get_parameter(name).detach() for model in members]
            alike = all(t.shape == p.shape for t in each)
            sees[name] = [Own(t) if alike else ZeroPadded(t, p.shape) for t in each]
    return sees


def _check_alike(models: Members, layers: Sequence[list[Attention]]) -> None:
    """Raise ValueError unless the members differ only in their heads."""
    for attention in (attention for layer in layers for attention in layer):
        if attention.fused or attention.heads != attention.groups:
            raise ValueError(
                f"{type(models[0]).__name__} has no separate query, key and value "
                "projections with equally many heads: it cannot be fused"
            )
    prompts = [model.prompts for model in models if isinstance(model, ZeroShot)]
    if not all(torch.equal(prompts[0], each) for each in prompts):
        raise ValueError(
            "the members have different prompts; only pruned versions of one model fuse"
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
    """Return the sizes that all members must share, by name."""
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
