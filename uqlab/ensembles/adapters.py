"""Members of a LoRA-Ensemble as adapters that PEFT reads."""

import json
import re
from pathlib import Path

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
        For other ensembles, a trained backbone, and weights of other modules than
        linear layers.
    IndexError
        For a member that is not there.
    """
    recipe = getattr(ensemble, "recipe", {})
    if recipe.get("method") != "lora" or recipe["train_backbone"]:
        raise ValueError(
            "to_peft takes a LoRA-Ensemble whose backbone is frozen, got "
            f"{recipe or type(ensemble)}"
        )
    network = ensemble.member(m)
    head = models.classifier(network, recipe["classifier"])
    ends = [name for name, _ in network.named_modules() if name.endswith(head)]
    if ends != [head]:
        raise ValueError(
            f"PEFT takes {', '.join(ends)} for the classifier {head!r}: give it a name "
            "that no other module ends with"
        )
    tensors, ranks = _adapter(ensemble, m, network)
    for name, t in network.get_submodule(head).state_dict().items():
        tensors[f"{head}.{name}"] = t
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": getattr(network, "name", None),
        "target_modules": "|".join(ranks),
        "modules_to_save": [head],
        "rank_pattern": ranks,
        "alpha_pattern": {name: recipe["scale"] * rank for name, rank in ranks.items()},
    }
    _write(Path(folder), tensors, config)


def _write(folder, tensors, config):
    named = {f"base_model.model.{k}": t.cpu().contiguous() for k, t in tensors.items()}
    with writing(folder / "adapter_model.safetensors") as temporary:
        save_file(named, temporary, {"format": "pt"})
    write(folder / "adapter_config.json", json.dumps(config, indent=2) + "\n")


def _adapter(ensemble, m, network):
    """Return A and B of each layer by name, and the layers' ranks."""
    tensors, ranks = {}, {}
    for name, part in ensemble.seen.items():
        if isinstance(part.kind, LowRank):
            _check_layer(network, name)
            layer, low = name.removesuffix(".weight"), part.one(m)
            tensors[f"{layer}.lora_A.weight"] = low.lora_A.detach()
            tensors[f"{layer}.lora_B.weight"] = low.lora_B.detach()
            ranks[re.escape(layer)] = len(low.lora_A)
    return tensors, ranks


def _check_layer(network, name):
    """Raise ValueError for a weight that PEFT cannot replace."""
    place, _, last = name.rpartition(".")
    layer = network.get_submodule(place)
    # torch's encoder reads the weights of its layers and does not call them.
    parent = network.get_submodule(place.rpartition(".")[0])
    read = isinstance(parent, nn.TransformerEncoderLayer)
    if type(layer) is not nn.Linear or last != "weight" or read:
        raise ValueError(
            f"PEFT cannot take {name!r} of {type(layer).__name__}, only linear layers "
            "that are called: make the LoRA-Ensemble with another target"
        )
