"""Ensembles on disk: what the members own, and the name of their common backbone. Shards are put together here too."""

import copy
import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from uqlab.core import door
from uqlab.core.checks import one_of
from uqlab.core.files import fingerprint, writing
from uqlab.ensembles.base import (
    Ensemble,
    FoldedEnsemble,
    SeparateEnsemble,
    member_range,
)
from uqlab.ensembles.batch_ensemble import batch
from uqlab.ensembles.dropout import FixedDropout, dropout
from uqlab.ensembles.film import film
from uqlab.ensembles.implicit import STATISTICS, has_statistics
from uqlab.ensembles.layers import PerMember
from uqlab.ensembles.lora import lora
from uqlab.ensembles.masksembles import masksembles
from uqlab.ensembles.members import Own, joined
from uqlab.ensembles.mimo import mimo
from uqlab.ensembles.packed import packed
from uqlab.ensembles.singular_value import singular_value

# What a file may ask for.
_METHODS: dict[str, Callable[..., Ensemble]] = {
    "lora": lora, "singular_value": singular_value, "batch": batch, "masksembles": masksembles, "film": film,
    "packed": packed, "mimo": mimo, "dropout": dropout,
}  # fmt: skip


def save(ensemble: Ensemble, path: str | os.PathLike, *, backbone: str = "") -> None:
    """Write an implicit ensemble's trainable parameters and how it was made to a .safetensors file.

    The frozen weights are not written, only a fingerprint of them and the backbone's name: `backbone`, or else the
    model's own `name` (models.from_pretrained). The file holds a checksum, and appears whole or not at all. Raises
    TypeError for an ensemble of another method than `lora`, `singular_value`, `batch`, `masksembles`, `film`, `packed`,
    `mimo`, `dropout`.
    """
    recipe = getattr(ensemble, "recipe", None)
    if (
        recipe is None
        or recipe["method"] not in _METHODS
        or member_range(recipe["members"]) != ensemble.member_ids
    ):
        kind = type(ensemble).__name__
        raise TypeError(
            f"save takes what {', '.join(_METHODS)} made, whole, got {kind}; else use torch.save"
        )
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in _learned(ensemble).items()
    }
    about = {
        "recipe": recipe,
        "backbone": backbone
        or str(getattr(getattr(ensemble, "network", None), "name", "")),
    }
    about["sha256"] = _checksum(tensors, about)
    with writing(path) as temporary:
        save_file(tensors, temporary, {"uqlab": json.dumps(about)})


def load(path: str | os.PathLike, backbone: nn.Module) -> Ensemble:
    """The ensemble that `save` wrote, on the backbone that it was made from.

    Raises FileNotFoundError; ValueError for a file that `save` did not write or that was changed since, and for another
    backbone than the one it names.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path.absolute()}; relative paths start at the working folder"
        )
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["uqlab"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about.pop("sha256") != _checksum(tensors, about):
            raise ValueError("its checksum is wrong")
        recipe, named = about["recipe"], about["backbone"] or "unnamed"
        one_of("its method", recipe["method"], _METHODS)
        make, members = (
            door.guarded(_METHODS[recipe["method"]]),
            len(member_range(recipe["members"])),
        )
        settings = {
            name: value
            for name, value in recipe.items()
            if name not in ("method", "backbone")
        }
        inspect.signature(make).bind(backbone, **settings)
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        lacks = "it has no " if isinstance(error, LookupError) else ""
        raise ValueError(
            f"{path} is damaged or none of ours: {lacks}{error}"
        ) from error
    if members > sum(tensor.numel() for tensor in tensors.values()):
        raise ValueError(
            f"{path} names {members} members and holds fewer numbers than that; it is none of ours"
        )
    ensemble = make(backbone, **settings)
    own = _learned(ensemble)
    fits = own.keys() == tensors.keys() and all(
        own[name].shape == tensor.shape for name, tensor in tensors.items()
    )
    if not fits or ensemble.recipe != recipe:
        raise ValueError(
            f"{path} belongs to another backbone ({named}): its frozen weights are not those given"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    return ensemble.eval()


def _learned(ensemble: Ensemble) -> dict[str, Tensor]:
    """What tells an ensemble from its backbone: trainable parameters, batch statistics that move, seeds of dropout."""
    learned: dict[str, Tensor] = {
        name: p for name, p in ensemble.named_parameters() if p.requires_grad
    }
    for name, part in ensemble.named_modules():
        apart = has_statistics(part) and not isinstance(ensemble, FoldedEnsemble)
        buffers = (
            part.member_buffers
            if isinstance(part, Own)
            else STATISTICS
            if apart
            else ()
        )
        learned |= {f"{name}.{buffer}": getattr(part, buffer) for buffer in buffers}
        if isinstance(part, FixedDropout):
            learned[f"{name}.seeds"] = torch.tensor(part.seeds)
    return learned


def _checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    return fingerprint(dict(sorted(tensors.items())), json.dumps(about, sort_keys=True))


def concatenate(shards: Sequence[Ensemble]) -> Ensemble:
    """One ensemble of shards that were made and perhaps trained apart; what is the members' own is copied.

    `concatenate([deep(make, "0:4", seed), deep(make, "4:9", seed)])` is `deep(make, 9, seed)`, before and after `fit`.
    Raises ValueError for no shards, numbers that overlap or leave a gap, shards of different architectures or recipes,
    and shared weights that differ because they were trained apart; TypeError for shards of different kinds.
    """
    if not shards:
        raise ValueError("concatenate needs at least one shard, got an empty list")
    kinds = {type(shard) for shard in shards}
    if len(kinds) > 1 or not isinstance(shards[0], FoldedEnsemble | SeparateEnsemble):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(
            f"concatenate takes shards of one folded or separate ensemble, got {names}"
        )
    shards = sorted(shards, key=lambda shard: shard.member_ids.start)
    first, ids = shards[0], [m for shard in shards for m in shard.member_ids]
    if ids != list(range(ids[0], ids[-1] + 1)):
        raise ValueError(
            f"shards must follow each other without gap or overlap, got members {ids}"
        )
    members = range(ids[0], ids[-1] + 1)
    shapes = [
        [(name, p.shape) for name, p in shard.member(0).named_parameters()]
        for shard in shards
    ]
    recipes = [
        {**(getattr(shard, "recipe", None) or {}), "members": None} for shard in shards
    ]
    if any(shape != shapes[0] for shape in shapes) or any(
        recipe != recipes[0] for recipe in recipes
    ):
        raise ValueError(
            "shards must be of one ensemble: equal architecture, method, settings and seed"
        )
    if isinstance(first, SeparateEnsemble):
        models = [
            model for shard in shards for model in cast(SeparateEnsemble, shard).models
        ]
        return first._with_recipe(SeparateEnsemble(copy.deepcopy(models), members))
    folded = [cast(FoldedEnsemble, shard) for shard in shards]
    networks = [shard.network for shard in folded]
    layers = [layer for layer in networks[0].modules() if isinstance(layer, PerMember)]
    own = {id(p) for layer in layers for p in layer.own_parameters()}
    own |= {
        id(getattr(layer, name)) for layer in layers for name in layer.member_buffers
    }
    state, *others = (
        {**dict(n.named_parameters()), **dict(n.named_buffers())} for n in networks
    )
    for name in (name for name, tensor in state.items() if id(tensor) not in own):
        for other in others:
            if state[name] is not other[name] and not torch.equal(
                state[name], other[name].to(state[name])
            ):
                raise ValueError(
                    f"shards differ in {name}, which all members share: train the ensemble as a whole"
                )

    whole = type(folded[0])(joined(networks[0], networks[1:]), members).train(
        first.training
    )
    whole.chunk = folded[0].chunk
    return first._with_recipe(whole)
