"""Deep ensembles: networks of one architecture, trained apart.

They are folded into one batched program where they can be.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from uqlab.core.checks import one_network
from uqlab.ensembles.base import (
    Ensemble,
    FoldedEnsemble,
    Members,
    SeparateEnsemble,
    member_range,
    member_seed,
)
from uqlab.ensembles.layers import own_dropout, replace_layers, shapes_of
from uqlab.ensembles.members import stack_layers

ELEMENTWISE = {
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish,
}  # fmt: skip


def deep(
    make_model: Callable[[], nn.Module],
    members: Members,
    seed: int = 0,
    *,
    fold: bool | None = None,
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
    fold : bool, optional
        True trains all members as one batched program, which needs parameters in linear
        layers alone; False runs one member after the other; None folds linear and
        elementwise layers of torch.nn, which treat every row alike.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError
        For members below 1, a `make_model` that returns one network twice, and
        fold=True where it cannot be.

    Notes
    -----
    `nn.Dropout` becomes noise of a member's own; other random layers draw from torch's
    global generator.

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
    by_rows = all(map(_treats_rows_alike, models[0].modules()))
    stackable = _stackable(models)
    if fold and not stackable:
        raise ValueError(
            "fold=True needs networks whose parameters all belong to nn.Linear "
            "layers of equal shapes; use fold=False, which runs the members one "
            "after the other"
        )
    if fold or (fold is None and by_rows and stackable):
        network = stacked(models, (nn.Linear,))
        own_dropout(network, len(models))
        ensemble = FoldedEnsemble(network, ids)
        ensemble._folds = by_rows or None
        return ensemble
    for model in models:
        own_dropout(model, 1)
    return SeparateEnsemble(models, ids)


def _built(make_model: Callable[[], nn.Module], seed: int, ids: range) -> list:
    """Return a network for each member, and leave torch's generator as it was."""
    started = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if started else []
    models = []
    for m in ids:
        with torch.random.fork_rng(devices):
            torch.manual_seed(member_seed(seed, m, "weights"))
            models.append(make_model())
        one_network(models[-1], "deep")
    return models


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


def _treats_rows_alike(module):
    """Return whether members can be folded into the batch of a module."""
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1
    return type(module) in ELEMENTWISE | {nn.Sequential, nn.Linear}


def _stackable(models):
    """Return whether all that networks hold is linear layers of equal shapes."""
    modules = models[0].modules()
    holders = {
        type(module) for module in modules if list(module.parameters(recurse=False))
    }
    first, *others = (shapes_of(model.named_parameters()) for model in models)
    alike = all(shapes == first for shapes in others)
    return alike and holders == {nn.Linear} and not list(models[0].buffers())


def stacked(
    models: Sequence[nn.Module], kinds: tuple[type[nn.Module], ...]
) -> nn.Module:
    """Return one network whose layers of these kinds hold the weights of all models."""
    if isinstance(models[0], kinds):  # one layer, as in logistic regression
        return nn.Sequential(stack_layers(models))
    network = copy.deepcopy(models[0])
    replace_layers(
        network,
        kinds,
        lambda name, _: stack_layers([model.get_submodule(name) for model in models]),
    )
    return network
