"""Networks of the members' own: deep ensembles, snapshots, shards put together."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import at_least, one_network
from uqlab.core.files import fingerprint
from uqlab.core.modules import unwrapped
from uqlab.ensembles.base import (
    GENERATOR,
    LOADERS,
    Ensemble,
    Members,
    OneNetwork,
    Own,
    SeparateEnsemble,
    member_range,
    member_seed,
)


def deep(
    make_model: Callable[[], nn.Module],
    members: Members,
    seed: int = 0,
) -> Ensemble:
    """Make a deep ensemble: networks of one architecture from independent starts.

    Parameters
    ----------
    make_model : callable
        Returns a new network at every call.
    members : int or range
        How many, or the numbers of a shard, `range(4, 10)`; see `concatenate`.
    seed : int
        The weights of member m depend on (seed, m) alone.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError
        For members below 1, and a `make_model` that returns one network twice.

    References
    ----------
    Lakshminarayanan, Pritzel, Blundell, "Simple and scalable predictive uncertainty
    estimation using deep ensembles", 2017.
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(
            "make_model must be a function that builds a new network, such as "
            f"lambda: Net(), got {type(make_model).__name__}"
        )
    ids = member_range(members)
    models: list[Any] = []
    started = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if started else []
    for m in ids:
        with GENERATOR, torch.random.fork_rng(devices):
            torch.manual_seed(member_seed(seed, m, "weights"))
            models.append(unwrapped(make_model()))
        one_network(models[-1], "deep")
    if len({*models}) < len(models):
        raise ValueError(
            "make_model returned the same network twice; "
            "it must build a new one in every call"
        )
    return _joined(models, ids).with_recipe({"method": "deep", "seed": seed})


def _joined(models, ids):
    """Return the ensemble of networks, stacked if they differ in tensors alone."""
    first, *others = map(_described, models)
    if first is None or any(other != first for other in others):
        return SeparateEnsemble(models, ids)
    network = copy.deepcopy(models[0])
    sees: dict[str, list[nn.Module]] = {}
    for name, p in network.named_parameters():
        each = [model.get_parameter(name).detach() for model in models]
        sees[name] = [Own(t).requires_grad_(p.requires_grad) for t in each]
    for name, _ in network.named_buffers():
        sees[name] = [Own(model.get_buffer(name), trained=False) for model in models]
    return Ensemble(network.requires_grad_(False), ids, sees)


def _described(model):
    """Return what tells architectures apart; None where members would share a tensor.

    They would share any that is a plain attribute, whatever it is for.
    """
    state = model.state_dict()
    tensors = all(isinstance(t, Tensor) for t in state.values())
    if (
        SeparateEnsemble.plain_tensors(model)
        or not tensors
        or not list(model.parameters())
    ):
        return None
    described: list[Any] = [(name, t.shape, t.dtype) for name, t in state.items()]
    simple = bool | int | float | str | tuple | list
    for name, module in model.named_modules():
        held = vars(module).items()
        settings = {key: str(value) for key, value in held if isinstance(value, simple)}
        described.append((name, type(module).__qualname__, settings))
    return described


def from_members(models: Sequence[nn.Module]) -> Ensemble:
    """Make the ensemble of networks trained elsewhere.

    `ensemble(x)[m]` equals `models[m](x)`. The modules are used as they are, not
    copied; their dropout draws from torch's global generator.

    Raises
    ------
    ValueError
        If the list is empty.
    TypeError
        Unless it is a list of modules.
    """
    if not isinstance(models, list | tuple | nn.ModuleList):
        raise TypeError(
            f"from_members takes a list of networks, got {type(models).__name__}"
        )
    for model in models:
        one_network(model, "from_members")
    return SeparateEnsemble(models, len(models))


def snapshot(
    make_model: Callable[[], nn.Module],
    members: int,
    train: Callable[[Ensemble, int], object],
    seed: int = 0,
) -> SeparateEnsemble:
    """Make a snapshot ensemble: one network trained in cycles, a member at each end.

    Parameters
    ----------
    make_model : callable
        Returns the network.
    members : int
        How many cycles.
    train : callable
        Trains an ensemble of one through cycle 0, 1, ..., each with a learning rate
        that falls to zero; a longer first cycle is the burn-in of Muhlematter et al.
        2024, U::

            cycle = {"epochs": 5, "lr": 0.1, "scheduler": "cosine"}
            def train(one, number):
                training.fit(one, x, y, seed=number, **cycle)
            ensembles.snapshot(make_model, 4, train)
    seed : int
        Of the network's start.

    References
    ----------
    Huang et al., "Snapshot ensembles: train 1, get M for free", 2017.
    """
    at_least("members", members)
    one = deep(make_model, 1, seed)
    networks = []
    for cycle in range(members):
        train(one, cycle)
        networks.append(copy.deepcopy(one.member(0)))
    ensemble = SeparateEnsemble(networks, members)
    return ensemble.with_recipe({"method": "snapshot", "seed": seed})


def _again(network, members, separate=True, **_):
    """Return an ensemble whose weights will follow, of one network or of one each."""
    one = isinstance(network, nn.Module)
    networks = [network] * len(members) if one else network
    if callable(networks):
        raise TypeError(f"give a network that is built, or {len(members)} in a list")
    if len(networks) != len(members):
        raise ValueError(f"give a network, or {len(members)}, got {len(networks)}")
    networks = [copy.deepcopy(unwrapped(each)) for each in networks]
    return (SeparateEnsemble if separate else _joined)(networks, members)


_stacked = functools.partial(_again, separate=False)
LOADERS |= {"deep": _stacked, "from_members": _again, "snapshot": _again}


def concatenate(shards: Sequence[Ensemble]) -> Any:
    """Make one ensemble of shards that were made and perhaps trained apart.

    What is the members' own is copied.
    `concatenate([deep(make, range(4), seed), deep(make, range(4, 9), seed)])` is
    `deep(make, 9, seed)`, before and after `fit`.

    Parameters
    ----------
    shards : sequence of Ensemble
        Of one method, settings and seed.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError
        For no shards, numbers that overlap or leave a gap, shards of different kinds,
        architectures or recipes, and shared weights that differ because they were
        trained apart.
    TypeError
        If the members cannot be separated.
    """
    ordered = _in_order(shards)
    first = ordered[0]
    if any(_shared(shard) != _shared(first) for shard in ordered):
        raise ValueError(
            "shards must be of one ensemble: equal architecture, method, settings and "
            "seed, and equal weights which all members share: train the ensemble as a "
            "whole"
        )
    if isinstance(first, SeparateEnsemble):
        models = [model for shard in ordered for model in shard.network]
        whole: Any = SeparateEnsemble(copy.deepcopy(models), len(models))
    else:
        whole = copy.deepcopy(first)
        for name, part in whole.seen.items():
            parts = [each.seen[name].stacked() for each in ordered]
            for key, t in part.stacked().items():
                t.data = torch.cat([each[key].detach() for each in parts])
    start, last = first.member_ids[0], ordered[-1].member_ids[-1]
    whole.member_ids = range(start, last + 1)
    return whole.with_recipe(first.recipe).train(first.training)


def _in_order(shards):
    """Return shards in the order of their members, or raise."""
    for shard in shards:
        if not isinstance(shard, Ensemble) or isinstance(shard, OneNetwork):
            raise TypeError(
                "concatenate takes shards of one ensemble whose members are apart, got "
                f"{type(shard).__name__}"
            )
    ordered = sorted(shards, key=lambda shard: shard.member_ids.start)
    ids = list(itertools.chain(*(shard.member_ids for shard in ordered)))
    if not ids or ids != list(range(ids[0], ids[-1] + 1)):
        raise ValueError(
            f"shards must follow each other without gap or overlap, got members {ids}"
        )
    return ordered


def _shared(shard):
    """Return what is equal for all shards of an ensemble."""
    own = {name: p.shape for name, p in shard.member(0).named_parameters()}
    separate = isinstance(shard, SeparateEnsemble)
    common = {} if separate else dict(shard.network.named_parameters())
    read = {name: p for name, p in common.items() if name not in shard.replaced}
    return type(shard), shard.recipe, own, fingerprint(read)
