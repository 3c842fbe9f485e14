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
from uqlab.core.files import fingerprint
from uqlab.ensembles import LOADERS, Ensemble, Own
from uqlab.heads.pruning import Head, addresses, prune
from uqlab.models import Attention, attentions


class FusedEnsemble(Ensemble):
    """Pruned versions of one transformer in one network.

    It can be trained: shared parameters follow the members' mean loss. A member with
    fewer heads in a layer than another member has heads of zeros there. They stay zero.
    """

    @property
    def heads(self) -> list[list[int]]:
        """The number of heads, [layers][members]."""
        return self.recipe["heads"]

    def member(self, index: int) -> nn.Module:
        """Return one member as a plain network, with its own number of heads."""
        network = super().member(index)
        counts = [layer[index] for layer in self.heads]
        return prune(network, _after(network, counts))

    def shard(self, rows: slice) -> "FusedEnsemble":
        """Return the ensemble of some members; training it trains these."""
        shard, recipe = super().shard(rows), {**self.recipe}
        recipe["heads"] = [counts[rows] for counts in self.heads]
        return shard.with_recipe(recipe)


def _after(network: nn.Module, counts: Sequence[int]) -> list[Head]:
    """Return the heads of a network after the first of each layer, so many."""
    table = addresses(attentions(network))
    return [address for address, (row, head) in table.items() if head >= counts[row]]


class _ZeroPadded(Own):
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
    models: Sequence[nn.Module] | Ensemble,
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
        If there are no members, or if they differ in more than their heads.
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
    own = _own(network, layers[0], norms == "independent")
    heads = []
    for layer in zip(*layers, strict=True):
        counts = [attention.heads for attention in layer]
        _take_attention(network, members[counts.index(max(counts))], layer[0].unit)
        heads.append(counts)
    sees = _take_weights(network, members, own)
    fused = FusedEnsemble(network, len(members), sees).train(members[0].training)
    fused.borrowed = set()
    return fused.with_recipe({"method": "fuse", "heads": heads, "norms": norms})


def _again(network, members, heads, norms):
    """Return a fused ensemble of such heads, whose weights will follow."""
    kept = zip(*heads, strict=True)
    fused = fuse([prune(network, _after(network, c)) for c in kept], norms=norms)
    fused.member_ids = members
    return fused


LOADERS["fuse"] = _again


def _own(network: nn.Module, layers: list[Attention], norms: bool) -> set[str]:
    """Name the members' own parameters.

    These are the projections of attention, linear layers outside the stack, scalars
    such as the scale of CLIP, and perhaps LayerNorms.
    """
    stack = tuple(f"{attention.layer}." for attention in layers)
    projections = set()
    for attention in layers:
        projections.update(part.module for part in attention.projections)
    own = {name for name, p in network.named_parameters() if not p.ndim}
    for name, part in network.named_modules():
        linear = type(part) is nn.Linear and not name.startswith(stack)
        norm = norms and isinstance(part, nn.LayerNorm)
        if linear or norm or name in projections:
            own |= {f"{name}.{key}".lstrip(".") for key, _ in part.named_parameters()}
    return own


def _take_attention(network: nn.Module, widest: nn.Module, name: str) -> None:
    """Give a network the attention of the member with most heads."""
    network.set_submodule(name, copy.deepcopy(widest.get_submodule(name)))


@torch.no_grad()
def _take_weights(
    network: nn.Module, members: list[Any], own: set[str]
) -> dict[str, list[nn.Module]]:
    """Give a network the means of the members' weights; return what is their own.

    A head of zeros gives zeros, so padded weights change no output.
    """
    sees: dict[str, list[nn.Module]] = {}
    for name, p in network.named_parameters():
        each = [model.get_parameter(name).detach() for model in members]
        if name not in own:  # the float64 mean of equal values is that value
            p.copy_(torch.stack([t.double() for t in each]).mean(0))
            continue
        alike = all(t.shape == p.shape for t in each)
        parts = [Own(t) if alike else _ZeroPadded(t, p.shape) for t in each]
        sees[name] = [part.requires_grad_(p.requires_grad) for part in parts]
        p.requires_grad_(False)
    return sees


def _check_alike(models: list[Any], layers: list[list[Attention]]) -> None:
    """Raise ValueError unless the members differ only in their heads."""
    first, *others = map(_fixed, models, layers)
    for m, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"members 0 and {m} differ in {name}: {first.get(name)} and "
                    f"{other.get(name)}; only pruned versions of one model fuse"
                )


def _fixed(model: nn.Module, layers: list[Attention]) -> dict[str, Any]:
    """Return what all members must share, by name."""
    fixed: dict[str, Any] = {
        "the number of layers": len(layers),
        "the size of a head": layers[0].size,
    }
    # Attention may have fewer heads, but one matrix of query, key and value may not.
    units = tuple(f"{each.unit}." for each in layers if not each.fused)
    for name, p in model.named_parameters():
        if not name.startswith(units):
            fixed[name] = list(p.shape)
    return fixed | {"their buffers": fingerprint(*model.buffers())}
