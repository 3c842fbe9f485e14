"""Members of a LoRA-Ensemble as adapters that PEFT reads."""

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from uqlab import models
from uqlab.core.files import StrPath, write, writing
from uqlab.ensembles.base import Ensemble
from uqlab.ensembles.lora import LowRank


def to_peft(ensemble: Ensemble, m: int, folder: StrPath) -> None:
    """Write one member of a LoRA-Ensemble as an adapter of PEFT.

    `peft.PeftModel.from_pretrained(backbone, folder)` is that member then, on the
    backbone that the ensemble was made of. The folder gets "adapter_config.json" and
    "adapter_model.safetensors", with the member's classifier.

    Parameters
    ----------
    ensemble : Ensemble
        What `lora` made, or `laplace_lora` with linearised=False.
    m : int
        The member, counted from 0.
    folder : str or path
        Made if it is not there.

    Raises
    ------
    ValueError
        For other ensembles, a trained backbone, and weights that PEFT does not take:
        of other modules than linear layers and plain convolutions.
    IndexError
        For a member that is not there.
    """
    recipe = getattr(ensemble, "recipe", None) or {}
    if recipe.get("method") != "lora" or recipe["train_backbone"]:
        raise ValueError(
            "to_peft takes a LoRA-Ensemble whose backbone is frozen, got "
            f"{recipe or type(ensemble)}"
        )
    network = ensemble.member(m)
    head = _classifier(network, recipe["classifier"])
    tensors, ranks = _tensors(ensemble, m, network, head)
    alphas = {name: recipe["scale"] * rank for name, rank in ranks.items()}
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": getattr(network, "name", None),
        "target_modules": "|".join(ranks),
        "modules_to_save": [head],
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }
    named = {f"base_model.model.{k}": t.cpu().contiguous() for k, t in tensors.items()}
    with writing(Path(folder, "adapter_model.safetensors")) as temporary:
        save_file(named, temporary, {"format": "pt"})
    write(Path(folder, "adapter_config.json"), json.dumps(config, indent=2) + "\n")


def _classifier(network, named):
    """Return the classifier's name; ValueError where PEFT would find others by it."""
    head = models.classifier(network, named)
    ends = [name for name, _ in network.named_modules() if name.endswith(head)]
    if ends != [head]:
        raise ValueError(
            f"PEFT takes {', '.join(ends)} for the classifier {head!r}: give it a name "
            "that no other module ends with"
        )
    return head


def _tensors(ensemble, m, network, head):
    """Return what an adapter holds by name, and the rank at each layer."""
    own = network.get_submodule(head).state_dict()
    tensors = {f"{head}.{name}": t for name, t in own.items()}
    ranks = {}
    for name, part in ensemble.seen.items():
        if isinstance(part.kind, LowRank):
            layer = name.removesuffix(".weight")
            a, b = _factors(network, name, part.kind, m)
            tensors |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            ranks[re.escape(layer)] = len(a)
    return tensors, ranks


def _factors(network, name, kind, m):
    """Return A and B of a weight as layers of PEFT hold them; ValueError for others."""
    place, _, last = name.rpartition(".")
    layer: Any = network.get_submodule(place)
    parent = network.get_submodule(place.rpartition(".")[0])
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = layer.padding_mode == "zeros", layer.groups == max(layer.dilation) == 1
    else:
        # torch's encoder reads the weights of its layers and does not call them.
        read = isinstance(parent, nn.TransformerEncoderLayer)
        plain = type(layer) is nn.Linear, last == "weight", not read
    if not all(plain):
        raise ValueError(
            f"PEFT cannot take {name!r} of {type(layer).__name__}, only linear layers "
            "that are called, and convolutions without groups and dilation: make the "
            "LoRA-Ensemble with another target"
        )
    kernel = layer.weight.shape[2:]
    a, b = kind.lora_A.detach()[m], kind.lora_B.detach()[m]
    return a.view(len(a), -1, *kernel), b.view(*b.shape, *[1] * len(kernel))
