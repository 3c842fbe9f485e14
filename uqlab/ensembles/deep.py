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
    if len(set(map(id, models))) < len(models):
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
    if plain_tensors(model) or not tensors or not list(model.parameters()):
        return None
    described: list[Any] = [(name, t.shape, t.dtype) for name, t in state.items()]
    for name, module in model.named_modules():
        settings = {
            key: str(value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | tuple | list)
        }
        described.append((name, type(module).__qualname__, settings))
    return described


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that a network holds as plain attributes."""
    registered = "_parameters", "_buffers", "_modules", "_flat_weights"
    found = []
    for module in model.modules():
        for key, value in vars(module).items():
            leaves = [] if key in registered else tree_leaves(value)
            found += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return found


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
    if not models:
        raise ValueError("from_members needs at least one model, got an empty list")
    for model in models:
        one_network(model, "from_members")
    return SeparateEnsemble(models, range(len(models)))


def _copies(network, members):
    """Return networks for members whose weights will follow, of one or of one each."""
    one = isinstance(network, nn.Module)
    networks = [network] * len(members) if one else network
    if len(networks) != len(members):
        raise ValueError(f"give a network, or {len(members)}, got {len(networks)}")
    return [copy.deepcopy(unwrapped(each)) for each in networks]


def _again(network, members, **_):
    return _joined(_copies(network, members), members)


def _separate(network, members, **_):
    return SeparateEnsemble(_copies(network, members), members)


METHODS |= {"deep": _again, "from_members": _separate, "snapshot": _separate}
