"""Ensembles: callables `inputs -> logits [members, batch, classes]`, however their members came to be."""

import copy
import operator
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from uqlab._ensemble import Ensemble, FoldedEnsemble, SeparateEnsemble, member_seed
from uqlab._implicit import DropoutEnsemble, batch, dropout, lora, singular_value
from uqlab._saving import load, save
from uqlab.layers import MemberDropout, MemberLinear, replace_layers

__all__ = [
    "DropoutEnsemble", "Ensemble", "FoldedEnsemble", "SeparateEnsemble", "batch", "deep", "dropout", "from_members",
    "load", "lora", "member_seed", "save", "singular_value", "snapshot",
]  # fmt: skip

ELEMENTWISE = {
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish,
}  # fmt: skip
# Modules that treat every row of a batch alike, so that members can be folded into the batch.
_ROW_BY_ROW = ELEMENTWISE | {nn.Sequential, nn.Linear, nn.Flatten}


def deep(
    make_model: Callable[[], nn.Module], members: int | range, seed: int = 0, *, fold: bool | None = None
) -> Ensemble:
    """A deep ensemble: networks of one architecture from independent initialisations (Lakshminarayanan et al., 2017).

    `make_model()` returns a new network; member m's weights depend on (seed, m) alone, so `members=range(4, 10)` are
    the last six of `members=10`. Networks of linear layers are folded: all members train as one batched program.
    `fold=True` insists on that, `fold=False` runs the members one after the other; None folds where it is known to be
    right: linear layers and elementwise ones of torch.nn, which treat every row of a batch alike.

    Noise is a member's own where it is `nn.Dropout`; other random layers and functions draw from torch's global
    generator. Raises ValueError for members < 1, a `make_model` that returns one network twice, and `fold=True` with
    parameters outside linear layers; TypeError for members that are neither an integer nor a range.
    """
    if not isinstance(members, range):
        members = range(operator.index(members))
    if len(members) < 1:
        raise ValueError(f"an ensemble needs at least one member, got members={members}")
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
