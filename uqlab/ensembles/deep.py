"""Deep ensembles: networks of one architecture, trained apart."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from uqlab.core.checks import one_network
from uqlab.ensembles.base import (
    Ensemble,
    Members,
    SeparateEnsemble,
    member_range,
    member_seed,
)
from uqlab.ensembles.functional import GENERATOR, Own, unwrapped
from uqlab.ensembles.recipes import METHODS


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
    members : int, str or range
        How many, or the numbers of a shard, "4:10"; see `concatenate`.
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
    _check_function(make_model)
    ids = member_range(members)
    models = _built(make_model, seed, ids)
    if len(set(map(id, models))) < len(models):
        raise ValueError(
            "make_model returned the same network twice; "
            "it must build a new one in every call"
        )
    kind = stacked if _of_one_architecture(models) else SeparateEnsemble
    return kind(models, ids).with_recipe({"method": "deep", "seed": seed})


def _built(make_model: Callable[[], nn.Module], seed: int, ids: range) -> list[Any]:
    """Return a network for each member, and leave torch's generator as it was."""
    started = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if started else []
    models = []
    for m in ids:
        with GENERATOR, torch.random.fork_rng(devices):
            torch.manual_seed(member_seed(seed, m, "weights"))
            models.append(unwrapped(make_model()))
        one_network(models[-1], "deep")
    return models


def stacked(models: Sequence[nn.Module], ids: range) -> Ensemble:
    """Return the ensemble of networks that differ in their tensors alone."""
    network = copy.deepcopy(models[0])
    sees: dict[str, list[nn.Module]] = {}
    for name, p in network.named_parameters():
        trained = p.requires_grad
        each = [model.get_parameter(name).detach() for model in models]
        sees[name] = [Own(t).requires_grad_(trained) for t in each]
    for name, _ in network.named_buffers():
        sees[name] = [Own(model.get_buffer(name), trained=False) for model in models]
    return Ensemble(network.requires_grad_(False), ids, sees)


def _check_function(make_model):
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(
            "make_model must be a function that builds a new network, such as "
            f"lambda: Net(), got {type(make_model).__name__}"
        )


def from_members(models: Sequence[nn.Module]) -> Ensemble:
    """Make the ensemble of networks trained elsewhere.

    `ensemble(x)[m]` equals `models[m](x)`. The modules are used as they are, not
    copied; their dropout draws from torch's global generator.

    Raises
    ------
    ValueError
        For an empty list.
    TypeError
        For what is no module.
    """
    if not isinstance(models, list | tuple | nn.ModuleList):
        raise TypeError(
            f"from_members takes a list of networks, got {type(models).__name__}"
        )
    if not models:
        raise ValueError("from_members needs at least one model, got an empty list")
    for model in models:
        one_network(model, "from_members")
    return SeparateEnsemble(models, range(len(models)))


def _of_one_architecture(models: Sequence[nn.Module]) -> bool:
    """Return whether networks differ in nothing but parameters and buffers."""
    first, *others = map(_described, models)
    return None not in first.values() and all(other == first for other in others)


def _described(model: nn.Module) -> dict[str, Any]:
    """Return what tells architectures apart; None stands for a tensor as an attribute.

    Members would share such a tensor, whatever it is for.
    """
    described: dict[str, Any] = {
        name: (t.shape, t.dtype) if isinstance(t, Tensor) else None
        for name, t in model.state_dict().items()
    }
    if not list(model.parameters()):
        described["parameters"] = None
    for name, module in model.named_modules():
        described[f"{name}."] = type(module).__qualname__
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(module, nn.RNNBase) and key.startswith("_flat"):
                continue  # its parameters again
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                described[f"{name}.{key}"] = None
            elif isinstance(value, bool | int | float | str | tuple | list):
                described[f"{name}.{key}"] = str(value)
    return described


def _copies(network, members):
    """Return networks for members whose weights will follow, of one or of one each."""
    one = isinstance(network, nn.Module)
    networks = [network] * len(members) if one else network
    if len(networks) != len(members):
        raise ValueError(f"give a network, or {len(members)}, got {len(networks)}")
    return [copy.deepcopy(unwrapped(each)) for each in networks]


def _again(network, members, seed):
    return deep(iter(_copies(network, members)).__next__, members, seed)


def _separate(network, members, **_):
    return SeparateEnsemble(_copies(network, members), members)


METHODS |= {"deep": _again, "from_members": _separate, "snapshot": _separate}
