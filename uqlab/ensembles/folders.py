"""Ensembles on disk: a folder of tensors and a description, which runs no code.

Members of a LoRA-Ensemble can also be written as adapters that PEFT reads.
"""

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from uqlab import __version__, models
from uqlab.core.checks import one_of
from uqlab.core.files import StrPath, existing, fingerprint, read_json, write, writing
from uqlab.core.modules import load_tensors, save_tensors
from uqlab.ensembles.base import (
    GENERATOR,
    LOADERS,
    Ensemble,
    SeparateEnsemble,
)
from uqlab.ensembles.lora import LowRank
from uqlab.ensembles.singular_value import SingularValues

TENSORS, ABOUT = "ensemble.safetensors", "uqlab.json"
BACKBONES = "embedded", "from_pretrained", "pretrained"  # of `models`
ROOMS = "extraction", "heads"  # which add methods once they are imported


def save(ensemble: Ensemble, folder: StrPath) -> None:
    """Write a folder, as `Ensemble.save_pretrained` says."""
    if isinstance(ensemble, SeparateEnsemble) and ensemble.plain_tensors(
        ensemble.network
    ):
        raise ValueError(
            "members hold tensors as plain attributes, which a folder does not hold: "
            "make them buffers or parameters"
        )
    written, digest = _parts(ensemble)
    settings = dict(ensemble.recipe)
    ids = ensemble.member_ids
    about = {
        "uqlab": __version__,
        "method": settings.pop("method"),
        "members": [ids.start, ids.stop, ids.step],
        "settings": settings,
        "backbone": {"digest": digest, **ensemble.source},
    }
    about = json.loads(json.dumps(about, default=lambda number: number.item()))
    header = {
        "about": about,
        "names": [names for _, names in written],
        "trained": [n for n, p in ensemble.named_parameters() if p.requires_grad],
        "types": _types(ensemble),
    }
    tensors = {names[0]: t for t, names in written}
    save_tensors(Path(folder, TENSORS), tensors, header)
    write(Path(folder, ABOUT), json.dumps(about, indent=2) + "\n")


def _parts(ensemble):
    """Return tensors that are written with all their names, and the others' digest."""
    frozen, unread = set(), set()
    for part in ensemble.modules():
        if isinstance(part, Ensemble):
            state = part.network.state_dict(keep_vars=True)
            borrowed = [state[name] for name in part.borrowed]
            frozen |= {id(t) for t in borrowed if not t.requires_grad}
            unread |= {id(state.get(name)) for name in part.replaced}
        elif isinstance(part, SingularValues):  # of the backbone, computed again
            unread |= {id(part.get_buffer(key)) for key in part.shared}
    names = {}
    for name, t in ensemble.state_dict(keep_vars=True).items():
        if id(t) not in unread:
            names.setdefault(id(t), (t, []))[1].append(name)
    written = [each for i, each in names.items() if i not in frozen]
    common = {each[0]: t for i, (t, each) in names.items() if i in frozen}
    return written, fingerprint(common) if common else ""


def _types(ensemble):
    """Return the types of an ensemble's floating tensors."""
    tensors = [*ensemble.parameters(), *ensemble.buffers()]
    types = {str(t.dtype) for t in tensors if t.is_floating_point() or t.is_complex()}
    return sorted(kind.removeprefix("torch.") for kind in types)


def from_pretrained(folder: StrPath, network: Any = None) -> Any:
    """Return the ensemble that `save_pretrained` wrote.

    Parameters
    ----------
    folder : str or path
        What `Ensemble.save_pretrained` was given.
    network : nn.Module or sequence of nn.Module, optional
        The backbone that the ensemble was made of; its weights are compared with those
        that the folder knows by a digest. If members hold all their parameters, a
        network of their architecture, which is copied and whose weights play no part,
        or one for each where they differ. None where "uqlab.json" names a backbone that
        `models.pretrained`, `models.from_pretrained` or `models.embedded` makes.

    Returns
    -------
    Ensemble
        In evaluation mode. What was trained can be trained further.

    Raises
    ------
    FileNotFoundError
        If one of the two files is not there.
    ValueError
        If a file is damaged or was changed, for another backbone, an unknown method,
        and for None where a network is needed.
    """
    folder = Path(folder).expanduser()
    hint = "give a folder that save_pretrained wrote"
    about = read_json(existing(folder / ABOUT, hint))
    tensors, header = load_tensors(existing(folder / TENSORS, hint))
    if header.pop("about", None) != about:
        raise ValueError(
            f"{folder / ABOUT} was changed, or belongs to another {TENSORS}: copy both "
            "files anew"
        )
    try:
        network = _backbone(**about["backbone"]) if network is None else network
        ensemble: Any = _made(network, **about)
        _fill(ensemble, tensors, about["backbone"]["digest"], **header)
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{folder} cannot be loaded: {error}; it is of the backbone "
            f"{about.get('backbone')}, got {type(network).__name__}"
        ) from error
    return ensemble.eval()


def _backbone(digest, made_by="", **settings):
    """Return the network that a folder names."""
    if made_by not in BACKBONES:
        which = "its backbone, with its weights" if digest else "of that architecture"
        raise ValueError(f"give a network, {which}: from_pretrained(folder, network)")
    with GENERATOR, torch.random.fork_rng([]):  # a new classifier is drawn from it
        return getattr(models, made_by)(**settings)


def _made(network, method, members, settings, **_):
    """Return an ensemble as the one that was written, but for its tensors."""
    for room in ROOMS:
        importlib.import_module(f"uqlab.{room}")
    one_of("method", method, LOADERS)
    make, ids = LOADERS[method], range(*members)
    if "members" in inspect.signature(make).parameters:
        made = make(network, members=ids, **settings)
    else:
        made = make(network, **settings).shard(slice(*members))
    return made.with_recipe({"method": method, **settings})


def _fill(ensemble, tensors, digest, names, trained, types):
    """Give an ensemble the tensors of a file, and their types."""
    if len(types) == 1:
        ensemble.to(getattr(torch, types[0]))
    state = ensemble.state_dict(keep_vars=True)
    written, found = _parts(ensemble)
    if found != digest:
        raise ValueError(
            f"other weights, of the digest {found}: was the backbone's checkpoint read?"
        )
    before = {name: state.pop(name) for _, each in written for name in each}
    for each in names:
        old = before[each[0]]
        new = tensors[each[0]].to(old.device)
        if isinstance(old, nn.Parameter):  # one object, so that tied weights stay tied
            new = nn.Parameter(new, old.requires_grad)
        state.update(dict.fromkeys(each, new))
    ensemble.load_state_dict(state, assign=True)
    for name, p in ensemble.named_parameters():
        p.requires_grad_(name in trained)


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
    tensors, ranks = _adapter(ensemble, m, network, head)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": getattr(network, "name", None),
        "target_modules": "|".join(ranks),
        "modules_to_save": [head],
        "rank_pattern": ranks,
        "alpha_pattern": {name: recipe["scale"] * rank for name, rank in ranks.items()},
    }
    with writing(Path(folder, "adapter_model.safetensors")) as temporary:
        save_file(tensors, temporary, {"format": "pt"})
    write(Path(folder, "adapter_config.json"), json.dumps(config, indent=2) + "\n")


def _adapter(ensemble, m, network, head):
    """Return what PEFT's file holds, and the layers' ranks."""
    classifier = network.get_submodule(head).state_dict()
    tensors, ranks = {f"{head}.{name}": t for name, t in classifier.items()}, {}
    for name, part in ensemble.seen.items():
        if not isinstance(part.kind, LowRank):
            continue
        _check_layer(network, name)
        place = name.removesuffix(".weight")
        for key, t in part.stacked().items():
            tensors[f"{place}.{key}.weight"] = t[m].detach()
        ranks[re.escape(place)] = part.kind.lora_A.shape[1]
    whole = {f"base_model.model.{k}": t.cpu() for k, t in tensors.items()}
    return {name: t.contiguous() for name, t in whole.items()}, ranks


def _check_layer(network, name):
    """Raise ValueError for a weight that PEFT cannot replace."""
    place, _, last = name.rpartition(".")
    layer = network.get_submodule(place)
    # torch's encoder reads the weights of its layers and does not call them.
    parent = network.get_submodule(place.rpartition(".")[0])
    read = isinstance(parent, nn.TransformerEncoderLayer)
    if type(layer) is not nn.Linear or last != "weight" or read:
        raise ValueError(
            f"PEFT cannot take {name!r} of {type(layer).__name__}, only linear "
            "layers that are called: make the LoRA-Ensemble with another target"
        )
