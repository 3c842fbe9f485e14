"""Ensembles on disk: a folder of tensors and a description, which runs no code."""

import functools
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uqlab import __version__, models
from uqlab.core.checks import one_of
from uqlab.core.files import StrPath, existing, fingerprint, read_json, write
from uqlab.core.tensors import load_tensors, save_tensors
from uqlab.ensembles.base import Ensemble, SeparateEnsemble, member_range
from uqlab.ensembles.functional import GENERATOR, tensor_of
from uqlab.ensembles.laplace import copies
from uqlab.ensembles.last_layer import own_classifiers
from uqlab.ensembles.recipes import METHODS

TENSORS, ABOUT = "ensemble.safetensors", "uqlab.json"
VERSION = 1  # of the description
BACKBONES = "embedded", "from_pretrained", "pretrained"  # of `models`
ROOMS = "extraction", "heads"  # which add methods once they are imported


def _linearised(backbone, members, lora):
    one = METHODS["lora"](backbone, **{k: v for k, v in lora.items() if k != "method"})
    return copies(one, members, linearised=True)


METHODS |= {"laplace_lora": _linearised, "laplace": own_classifiers}


def save(ensemble: Ensemble, folder: StrPath) -> None:
    """Write a folder, as `Ensemble.save_pretrained` says."""
    separate = isinstance(ensemble, SeparateEnsemble)
    if separate and len(set(map(_attributes, ensemble.network))) > 1:
        raise ValueError(
            "members hold different tensors as plain attributes, which a folder does "
            "not hold: make them buffers or parameters"
        )
    written, digest = _parts(ensemble)
    about = _about(ensemble, digest)
    tensors = {names[0]: t for t, names in written}
    header = {
        "about": about,
        "names": [names for _, names in written],
        "trained": [n for n, p in ensemble.named_parameters() if p.requires_grad],
        "types": _types(ensemble),
    }
    save_tensors(Path(folder, TENSORS), tensors, header)
    write(Path(folder, ABOUT), json.dumps(about, indent=2) + "\n")


def _about(ensemble, digest):
    """Return what JSON holds of an ensemble."""
    recipe = {"method": "own", **(ensemble.recipe or {})}
    about = {
        "version": VERSION,
        "uqlab": __version__,
        "method": recipe.pop("method"),
        "members": recipe.pop("members", ensemble.members),
        "settings": recipe,
        "backbone": {
            "class": type(ensemble.network).__name__,
            "digest": digest,
            **ensemble.source,
        },
    }
    return json.loads(json.dumps(about, default=lambda number: number.item()))


def _parts(ensemble):
    """Return tensors that are written with all their names, and the others' digest."""
    frozen, unread = set(), set()
    for part in ensemble.modules():
        if isinstance(part, Ensemble):
            of = functools.partial(tensor_of, part.network)
            frozen |= {id(t) for t in map(of, part.borrowed) if not t.requires_grad}
            unread |= set(map(id, map(of, part.replaced)))
    names = {}
    for name, t in ensemble.state_dict(keep_vars=True).items():
        names.setdefault(id(t), (t, []))[1].append(name)
    written = [each for i, each in names.items() if i not in unread | frozen]
    common = {each[0]: t for i, (t, each) in names.items() if i in frozen}
    return written, fingerprint(common) if common else ""


def _types(ensemble):
    """Return the types of an ensemble's numbers but integers."""
    tensors = [*ensemble.parameters(), *ensemble.buffers()]
    floats = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    return sorted({str(t.dtype).removeprefix("torch.") for t in floats})


def _attributes(network):
    """Return the fingerprint of a network's tensors that are plain attributes."""
    values = [value for part in network.modules() for value in vars(part).values()]
    return fingerprint([value for value in values if isinstance(value, Tensor)])


def from_pretrained(folder: StrPath, network: Any = None) -> Any:
    """Return the ensemble that `save_pretrained` wrote.

    Parameters
    ----------
    folder : str or path
        What `Ensemble.save_pretrained` was given.
    network : nn.Module or sequence of nn.Module, optional
        The backbone that the ensemble was made of; its weights are compared with those
        that the folder knows by a digest. Where members have parameters of their own, a
        network of their architecture, which is copied and whose weights play no part,
        or one for each where they differ. None where "uqlab.json" names a backbone that
        `models.pretrained`, `models.from_pretrained` or `models.embedded` makes. Or an
        ensemble of the same making, also of a method of your own, which is filled.

    Returns
    -------
    Ensemble
        In evaluation mode. What was trained can be trained further.

    Raises
    ------
    FileNotFoundError
        If one of the two files is not there.
    ValueError
        For files that are damaged, changed by hand, or of a newer uqlab, for another
        backbone, and for None where a network is needed.
    """
    folder = Path(folder).expanduser()
    hint = "give a folder that save_pretrained wrote"
    about = read_json(existing(folder / ABOUT, hint))
    if about.get("version") != VERSION:
        raise ValueError(
            f"{folder / ABOUT} is damaged, or of a newer uqlab than {__version__}: "
            f"{about.get('uqlab')}; copy it anew, or install the newer one"
        )
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
            f"{json.dumps(about.get('backbone'))}, got {type(network).__name__}"
        ) from error
    return ensemble.eval()


def _backbone(digest, made_by="", **settings):
    """Return the network that a folder names."""
    if made_by not in BACKBONES:
        which = "its backbone, with its weights" if digest else "of that architecture"
        raise ValueError(
            f"give a network, {which}: from_pretrained(folder, network); uqlab.models "
            "does not make it"
        )
    del settings["class"]
    with GENERATOR, torch.random.fork_rng([]):  # a new classifier is drawn from it
        return getattr(models, made_by)(**settings)


def _made(network, method, members, settings, **_):
    """Return an ensemble as the one that was written, but for its tensors."""
    if isinstance(network, Ensemble):
        mine, theirs = _about(network, ""), [method, members, {**settings, "seed": 0}]
        given = [mine["method"], mine["members"], {**mine["settings"], "seed": 0}]
        if given != theirs:  # the seed plays no part
            raise ValueError(f"it was made as {theirs}, what is given as {given}")
        return network
    for room in ROOMS:
        importlib.import_module(f"uqlab.{room}")
    one_of("method", method, METHODS)
    make, ids = METHODS[method], member_range(members)
    if "members" in inspect.signature(make).parameters:
        made = make(network, members=ids, **settings)
    else:
        made = make(network, **settings).shard(slice(ids.start, ids.stop, ids.step))
    return made.with_recipe({"method": method, **settings})


def _fill(ensemble, tensors, digest, names, trained, types):
    """Give an ensemble the tensors of a file, and their types."""
    if len(types) == 1:
        ensemble.to(getattr(torch, types[0]))
    state = dict(ensemble.state_dict(keep_vars=True))
    written, found = _parts(ensemble)
    if found != digest:
        raise ValueError(
            f"other weights, of the digest {found}: was the backbone's checkpoint read?"
        )
    before = {name: state.pop(name) for _, each in written for name in each}
    for each in names:
        old, new = before[each[0]], tensors[each[0]]
        new = new.to(old.device)
        if isinstance(old, nn.Parameter):  # one object, so that tied weights stay tied
            new = nn.Parameter(new, old.requires_grad)
        state |= dict.fromkeys(each, new)
    ensemble.load_state_dict(state, assign=True)
    for name, p in ensemble.named_parameters():
        p.requires_grad_(name in trained)
