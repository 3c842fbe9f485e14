"""Deep ensembles: networks of one architecture, trained apart, folded into one batched program where they can be."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from uqlab.ensembles.base import (
    Ensemble,
    FoldedEnsemble,
    SeparateEnsemble,
    member_range,
    member_seed,
)
from uqlab.ensembles.layers import own_dropout, replace_layers
from uqlab.ensembles.members import stack_layers

ELEMENTWISE = {
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish,
}  # fmt: skip
# Modules that treat every row of a batch alike, so that members can be folded into the batch.
_ROW_BY_ROW = ELEMENTWISE | {nn.Sequential, nn.Linear, nn.Flatten}


def deep(
    make_model: Callable[[], nn.Module],
    members: int | str | range,
    seed: int = 0,
    *,
    fold: bool | None = None,
) -> Ensemble:
    """A deep ensemble: networks of one architecture from independent initialisations (Lakshminarayanan et al. 2017).

    make_model: returns a new network at every call.
    members: how many, or the numbers of a shard, "4:10"; see `concatenate`. The weights of member m depend on (seed, m)
        alone.
    fold: True trains all members as one batched program, which needs parameters in linear layers alone; False runs one
        member after the other; None folds linear and elementwise layers of torch.nn, which treat every row alike.

    `nn.Dropout` becomes noise of a member's own; other random layers draw from torch's global generator. Raises
    ValueError for members < 1, a `make_model` that returns one network twice, and fold=True where it cannot be.
    """
    members = member_range(members)
    devices = (
        list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    )
    models = []
    for m in members:
        with torch.random.fork_rng(devices):
            torch.manual_seed(member_seed(seed, m, "weights"))
            models.append(make_model())
    if len({id(model) for model in models}) < len(models):
        raise ValueError(
            "make_model returned the same network twice; it must build a new one in every call"
        )
    by_rows = all(type(part) in _ROW_BY_ROW for part in models[0].modules())
    by_rows = by_rows and not any(
        part.start_dim != 1
        for part in models[0].modules()
        if isinstance(part, nn.Flatten)
    )
    if fold or (fold is None and by_rows and _stackable(models)):
        ensemble = FoldedEnsemble(_stack(models), members)
        ensemble._folds = True if by_rows else None
        return ensemble
    for model in models:
        own_dropout(model, 1)
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
            raise TypeError(
                f"from_members takes torch modules, got {type(model).__name__}"
            )
    return SeparateEnsemble(models, range(len(models)))


def _stackable(models: Sequence[nn.Module]) -> bool:
    """All parameters belong to linear layers, equal in name and shape over the members, and nothing else has state."""
    if list(models[0].buffers()):
        return False
    owners = [
        part for part in models[0].modules() if list(part.parameters(recurse=False))
    ]
    shapes = [
        [(name, weight.shape) for name, weight in model.named_parameters()]
        for model in models
    ]
    return (
        bool(owners)
        and all(type(part) is nn.Linear for part in owners)
        and all(s == shapes[0] for s in shapes)
    )


def _stack(models: Sequence[nn.Module]) -> nn.Module:
    """One network whose linear layers hold the weights of all `models`."""
    if not _stackable(models):
        raise ValueError(
            "fold=True needs networks whose parameters all belong to nn.Linear layers of equal shapes; "
            "use fold=False, which runs the members one after the other"
        )
    network = stacked(models, (nn.Linear,))
    own_dropout(network, len(models))
    return network


def stacked(
    models: Sequence[nn.Module], kinds: tuple[type[nn.Module], ...]
) -> nn.Module:
    """One network whose layers of these kinds hold the weights of all `models`."""
    if isinstance(
        models[0], kinds
    ):  # the model is one layer, as in logistic regression
        return nn.Sequential(stack_layers(list(models)))
    network = copy.deepcopy(models[0])
    replace_layers(
        network,
        kinds,
        lambda name, _: stack_layers([model.get_submodule(name) for model in models]),
    )
    return network
