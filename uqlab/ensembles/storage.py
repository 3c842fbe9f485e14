"""Ensembles on disk: what the members own, and the name of the backbone that they share."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from uqlab.ensembles import implicit
from uqlab.ensembles.base import FoldedEnsemble, member_range


def save(ensemble: FoldedEnsemble, path: str | os.PathLike, *, backbone: str = "") -> None:
    """Write an implicit ensemble's trainable parameters and how it was made to a .safetensors file.

    The frozen weights are not written, only a fingerprint of them and the backbone's name: `backbone`, or else the
    model's own `name` (models.from_pretrained). Written under a temporary name and renamed. Raises TypeError for an
    ensemble that `lora`, `singular_value` or `batch` did not make.
    """
    recipe = getattr(ensemble, "recipe", None)
    if recipe is None or member_range(recipe["members"]) != ensemble.member_ids:
        kind = type(ensemble).__name__
        raise TypeError(f"save takes what lora, singular_value or batch made, whole, got {kind}; else use torch.save")
    tensors = {name: p.detach().cpu().contiguous() for name, p in ensemble.named_parameters() if p.requires_grad}
    about = {"recipe": recipe, "backbone": backbone or str(getattr(ensemble.network, "name", ""))}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, temporary, {"uqlab": json.dumps(about)})
    os.replace(temporary, path)


def load(path: str | os.PathLike, backbone: nn.Module) -> FoldedEnsemble:
    """The ensemble that `save` wrote, on the backbone that it was made from.

    Raises FileNotFoundError if there is no such file; ValueError for a file that `save` did not write, and for another
    backbone than the one it names.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.absolute()}; relative paths start at the working folder")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["uqlab"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged or none of ours: {error}") from error
    recipe = about["recipe"]
    settings = {name: value for name, value in recipe.items() if name not in ("method", "backbone")}
    ensemble = getattr(implicit, recipe["method"])(backbone, **settings)
    own = {name: p for name, p in ensemble.named_parameters() if p.requires_grad}
    fits = own.keys() == tensors.keys() and all(own[name].shape == tensor.shape for name, tensor in tensors.items())
    if not fits or ensemble.recipe != recipe:
        named = about["backbone"] or "unnamed"
        raise ValueError(f"{path} belongs to another backbone ({named}): its frozen weights are not those given")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    return ensemble.eval()
