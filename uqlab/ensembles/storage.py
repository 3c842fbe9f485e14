"""Ensembles on disk: what the members own. Shards are put together here too."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import one_of
from uqlab.core.files import StrPath, fingerprint
from uqlab.core.tensors import load_tensors, save_tensors
from uqlab.ensembles.base import Ensemble, OneNetwork, SeparateEnsemble, member_range
from uqlab.ensembles.implicit import STATISTICS
from uqlab.ensembles.laplace import copies
from uqlab.ensembles.last_layer import own_classifiers
from uqlab.ensembles.recipes import METHODS


def _linearised(backbone: nn.Module, members: Any, lora: Any) -> Ensemble:
    one = _METHODS[lora.pop("method")](backbone, **lora)
    return copies(one, member_range(members), linearised=True)


_METHODS = METHODS | {"laplace_lora": _linearised, "laplace": own_classifiers}


def save(ensemble: Ensemble, path: StrPath, *, backbone: str = "") -> None:
    """Write what an implicit ensemble learned, and how it was made, to a file.

    Parameters
    ----------
    ensemble : Ensemble
        What `lora`, `singular_value`, `batch`, `masksembles`, `film`, `packed`, `mimo`,
        `dropout`, `laplace` or `laplace_lora` made.
    path : str or path
        A .safetensors file, which appears whole or not at all. The frozen weights are
        not written, only a fingerprint of them.
    backbone : str
        The backbone's name, which is noted; else the model's own `name`
        (models.from_pretrained).

    Raises
    ------
    TypeError
        For an ensemble of another method.
    """
    recipe = getattr(ensemble, "recipe", None) or {}
    if recipe.get("method") not in _METHODS:
        raise TypeError(
            f"save takes what {', '.join(_METHODS)} made, got "
            f"{type(ensemble).__name__}; else use torch.save"
        )
    name = getattr(ensemble.network, "name", "")
    header = {"recipe": recipe, "backbone": backbone or str(name)}
    save_tensors(path, _learned(ensemble), header | {"frozen": _common(ensemble)})


def load(path: StrPath, backbone: nn.Module) -> Ensemble:
    """Return the ensemble that `save` wrote, on the backbone that it was made from.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        For a file that `save` did not write or that was changed since, and for another
        backbone than the one it was made from.
    """
    tensors, header = load_tensors(path)
    try:
        recipe = dict(header["recipe"])
        method = recipe.pop("method")
        one_of("its method", method, _METHODS)
        ensemble = _METHODS[method](backbone, **recipe)
        learned = _learned(ensemble)
        alike = _shapes(tensors) == _shapes(learned)
        if not alike or header["frozen"] != _common(ensemble):
            raise ValueError("its frozen weights are not those given")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged or none of ours, or belongs to another backbone "
            f"({header.get('backbone') or 'unnamed'}): {error}"
        ) from error
    with torch.no_grad():
        for name, tensor in tensors.items():
            learned[name].copy_(tensor)
    return ensemble.eval()


@torch.no_grad()
def _learned(ensemble):
    """Return what training changes: trained parameters, and statistics that move."""
    learned: dict[str, Tensor] = {
        name: p
        for name, p in ensemble.named_parameters()
        if p.requires_grad or name.startswith("center.parts")  # of linearised ones
    }
    moving = dict(ensemble.named_buffers())
    if ensemble.seen:
        moving = ensemble.rows()
    for name, t in moving.items():
        if name.partition(" ")[0].rpartition(".")[2] in STATISTICS:
            learned[name] = t
    return learned


def _common(ensemble, trained=False):
    """Return a fingerprint of weights that all members read: the frozen, or all."""
    common = {
        name: p
        for name, p in ensemble.network.named_parameters()
        if (trained or not p.requires_grad) and name not in ensemble.replaced
    }
    return fingerprint(common)


def concatenate(shards: Sequence[Ensemble]) -> Any:
    """Make one ensemble of shards that were made and perhaps trained apart.

    What is the members' own is copied.
    `concatenate([deep(make, "0:4", seed), deep(make, "4:9", seed)])` is
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
        For what has no members that are apart.
    """
    if not shards:
        raise ValueError("concatenate needs at least one shard, got an empty list")
    ordered, members = _in_order(shards)
    first = ordered[0]
    if any(_described(shard) != _described(first) for shard in ordered):
        raise ValueError(
            "shards must be of one ensemble: equal architecture, method, settings and "
            "seed, and equal weights which all members share: train the ensemble as a "
            "whole"
        )
    if isinstance(first, SeparateEnsemble):
        models: list[nn.Module] = []
        for shard in ordered:
            models += map(shard.member, range(shard.members))
        whole = SeparateEnsemble(copy.deepcopy(models), members)
    else:
        whole = copy.deepcopy(first)
        whole.member_ids = members
        for name, part in whole.seen.items():
            parts = [each.seen[name].stacked() for each in ordered]
            for key, t in part.stacked().items():
                t.data = torch.cat([each[key].detach() for each in parts])
    return whole.with_recipe(first.recipe).train(first.training)


def _in_order(shards: Sequence[Any]) -> tuple[list[Any], range]:
    """Return the shards and their members in order, or raise."""
    for shard in shards:
        if not isinstance(shard, Ensemble) or isinstance(shard, OneNetwork):
            raise TypeError(
                "concatenate takes shards of one ensemble whose members are apart, got "
                f"{type(shard).__name__}"
            )
    shards = sorted(shards, key=lambda shard: shard.member_ids.start)
    ids = []
    for shard in shards:
        ids += shard.member_ids
    members = range(ids[0], ids[-1] + 1)
    if ids != list(members):
        raise ValueError(
            f"shards must follow each other without gap or overlap, got members {ids}"
        )
    return shards, members


def _described(shard):
    """Return what is equal for all shards of an ensemble."""
    own = _shapes(dict(shard.member(0).named_parameters()))
    recipe = {**(shard.recipe or {}), "members": None}
    return type(shard), recipe, own, _common(shard, trained=True)


def _shapes(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}
