"""Ensembles: callables `inputs -> logits [members, batch, classes]`, however their members came to be."""

import copy
import operator
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from uqlab.ensembles.base import Ensemble, FoldedEnsemble, SeparateEnsemble, member_range, member_seed, member_text
from uqlab.ensembles.implicit import DropoutEnsemble, batch, dropout, lora, singular_value
from uqlab.ensembles.layers import FixedDropout, MemberDropout, MemberLayer, MemberLinear, replace_layers, with_layers
from uqlab.ensembles.storage import load, save

__all__ = [
    "DropoutEnsemble", "Ensemble", "FoldedEnsemble", "SeparateEnsemble", "batch", "concatenate", "deep", "dropout",
    "from_members", "load", "lora", "member_seed", "save", "singular_value", "snapshot",
]  # fmt: skip

ELEMENTWISE = {
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish,
}  # fmt: skip
# Modules that treat every row of a batch alike, so that members can be folded into the batch.
_ROW_BY_ROW = ELEMENTWISE | {nn.Sequential, nn.Linear, nn.Flatten}


def deep(
    make_model: Callable[[], nn.Module], members: int | str | range, seed: int = 0, *, fold: bool | None = None
) -> Ensemble:
    """A deep ensemble: networks of one architecture from independent initialisations (Lakshminarayanan et al., 2017).

    `make_model()` returns a new network; member m's weights depend on (seed, m) alone, so `members=range(4, 10)`, or
    its text "4:10", are the last six of `members=10`: see `concatenate`. Networks of linear layers are folded: all
    members train as one batched program. `fold=True` insists on that, `fold=False` runs the members one after the
    other; None folds where it is known to be right: linear layers and elementwise ones of torch.nn, which treat every
    row of a batch alike.

    Noise is a member's own where it is `nn.Dropout`; other random layers and functions draw from torch's global
    generator. Raises ValueError for members < 1, a `make_model` that returns one network twice, and `fold=True` with
    parameters outside linear layers; TypeError for members that are neither an integer nor a range nor text.
    """
    members = member_range(members)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    models = []
    for m in members:
        with torch.random.fork_rng(devices):
            torch.manual_seed(member_seed(seed, m, "weights"))
            models.append(make_model())
    if len({id(model) for model in models}) < len(models):
        raise ValueError("make_model returned the same network twice; it must build a new one in every call")
    if fold is None:
        fold = _stackable(models) and all(type(part) in _ROW_BY_ROW for part in models[0].modules())
        fold = fold and not any(part.start_dim != 1 for part in models[0].modules() if isinstance(part, nn.Flatten))
    if fold:
        return FoldedEnsemble(_stack(models), members)
    for model in models:
        if any(isinstance(part, nn.Dropout) for part in model.modules()):
            replace_layers(model, nn.Dropout, lambda _, layer: MemberDropout(1, layer.p))
    return SeparateEnsemble(models, members)


def from_members(models: Sequence[nn.Module]) -> Ensemble:
    """The ensemble of networks trained elsewhere; `ensemble(x)[m]` equals `models[m](x)`.

    The modules are used as they are, not copied; dropout of theirs draws from torch's global generator. Raises
    ValueError for an empty list, TypeError for what is no module.
    """
    if not models:
        raise ValueError("from_members needs at least one model, got an empty list")
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"from_members takes torch modules, got {type(model).__name__}")
    return SeparateEnsemble(models, range(len(models)))


def concatenate(shards: Sequence[Ensemble]) -> Ensemble:
    """One ensemble of shards that were made, and perhaps trained, apart; what is the members' own is copied.

    `concatenate([deep(make, "0:4", seed), deep(make, "4:9", seed)])` is `deep(make, 9, seed)`, also with `fit` called
    on the shards and on the whole, since what a member learns depends on (seed, its number) alone. The order of the
    shards does not matter.

    Raises ValueError for no shards, numbers that overlap or leave a gap, shards of different architectures or recipes,
    and where weights that all members share differ: then they were trained apart. TypeError for different kinds.
    """
    if not shards:
        raise ValueError("concatenate needs at least one shard, got an empty list")
    kinds = {type(shard) for shard in shards}
    if len(kinds) > 1 or not isinstance(shards[0], FoldedEnsemble | SeparateEnsemble):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"concatenate takes shards of one folded or separate ensemble, got {names}")
    shards = sorted(shards, key=lambda shard: shard.member_ids.start)
    first, ids = shards[0], [m for shard in shards for m in shard.member_ids]
    if ids != list(range(ids[0], ids[-1] + 1)):
        raise ValueError(f"shards must follow each other without gap or overlap, got members {ids}")
    members = range(ids[0], ids[-1] + 1)
    shapes = [[(name, p.shape) for name, p in shard.member(0).named_parameters()] for shard in shards]
    recipes = [{**(getattr(shard, "recipe", None) or {}), "members": None} for shard in shards]
    if any(shape != shapes[0] for shape in shapes) or any(recipe != recipes[0] for recipe in recipes):
        raise ValueError("shards must be of one ensemble: equal architecture, method, settings and seed")
    if isinstance(first, SeparateEnsemble):
        models = [model for shard in shards for model in cast(SeparateEnsemble, shard).models]
        return SeparateEnsemble(copy.deepcopy(models), members)
    folded = [cast(FoldedEnsemble, shard) for shard in shards]
    networks = [shard.network for shard in folded]
    names = {id(part): name for name, part in networks[0].named_modules() if isinstance(part, MemberLayer)}
    own = {id(p) for name in names.values() for p in _layer(networks[0], name).own_parameters()}
    state, *others = ({**dict(n.named_parameters()), **dict(n.named_buffers())} for n in networks)
    for name in (name for name, tensor in state.items() if id(tensor) not in own):
        for other in others:
            if state[name] is not other[name] and not torch.equal(state[name], other[name].to(state[name])):
                raise ValueError(f"shards differ in {name}, which all members share: train the ensemble as a whole")

    def join(layer: MemberLayer) -> MemberLayer:
        return _join([_layer(network, names[id(layer)]) for network in networks])

    whole = type(folded[0])(with_layers(networks[0], join), members).train(first.training)
    recipe, whole.chunk = folded[0].recipe, folded[0].chunk
    whole.recipe = recipe and recipe | {"members": member_text(members)}
    return whole


def _layer(network: nn.Module, name: str) -> MemberLayer:
    return cast(MemberLayer, network.get_submodule(name))


def _join(layers: Sequence[MemberLayer]) -> MemberLayer:
    """The layer of all members of several."""
    joined = layers[0].shard(slice(None))
    joined.members = sum(layer.members for layer in layers)
    own = {id(p) for p in joined.own_parameters()}
    for name, p in list(joined.named_parameters(recurse=False)):
        parts = [getattr(layer, name).data for layer in layers] if id(p) in own else [p.data]
        if id(p) in own or p.requires_grad:
            setattr(joined, name, nn.Parameter(torch.cat(parts), requires_grad=p.requires_grad))
    if isinstance(joined, FixedDropout):
        joined.reseed([seed for layer in layers for seed in cast(FixedDropout, layer).seeds])
    elif isinstance(joined, MemberDropout):
        joined.reseed(range(joined.members))
    return joined


def snapshot(
    make_model: Callable[[], nn.Module], members: int, train: Callable[[Ensemble, int], object], seed: int = 0
) -> SeparateEnsemble:
    """A snapshot ensemble: one network trained in cycles, a member at the end of each (Huang et al., 2017).

    `train(ensemble, cycle)` trains the ensemble of one that holds the network through cycle 0, 1, ..., each with a
    learning rate that starts high and falls to zero; a longer first cycle is the burn-in of Muhlematter et al. 2024, U:

        cycle = {"epochs": 5, "lr": 0.1, "schedule": "cosine"}
        ensembles.snapshot(make_model, 4, lambda one, number: training.fit(one, x, y, seed=number, **cycle))

    Raises ValueError for members < 1, and what `train` raises.
    """
    if operator.index(members) < 1:
        raise ValueError(f"an ensemble needs at least one member, got members={members}")
    one = deep(make_model, 1, seed)
    found = []
    for cycle in range(members):
        train(one, cycle)
        found.append(copy.deepcopy(one.member(0)))
    return SeparateEnsemble(found, range(members))


def _stackable(models: Sequence[nn.Module]) -> bool:
    """All parameters belong to linear layers, equal in name and shape over the members, and nothing else has state."""
    if any(True for _ in models[0].buffers()):
        return False
    owners = [part for part in models[0].modules() if any(True for _ in part.parameters(recurse=False))]
    shapes = [[(name, weight.shape) for name, weight in model.named_parameters()] for model in models]
    return bool(owners) and all(type(part) is nn.Linear for part in owners) and all(s == shapes[0] for s in shapes)


def _stack(models: Sequence[nn.Module]) -> nn.Module:
    """One network whose linear layers hold the weights of all `models`."""
    if not _stackable(models):
        raise ValueError(
            "fold=True needs networks whose parameters all belong to nn.Linear layers of equal shapes; "
            "use fold=False, which runs the members one after the other"
        )
    network = copy.deepcopy(models[0])
    if isinstance(network, nn.Linear):  # logistic regression
        return nn.Sequential(MemberLinear.stack([cast(nn.Linear, model) for model in models]))

    def stack(name: str, _: nn.Linear) -> MemberLinear:
        return MemberLinear.stack([cast(nn.Linear, model.get_submodule(name)) for model in models])

    replace_layers(network, nn.Linear, stack)
    if any(isinstance(part, nn.Dropout) for part in network.modules()):
        replace_layers(network, nn.Dropout, lambda _, layer: MemberDropout(len(models), layer.p))
    return network
