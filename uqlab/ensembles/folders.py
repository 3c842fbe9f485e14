"""Ensembles on disk: a folder of tensors and a description, which runs no code."""

import functools
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from uqlab import __version__, models
from uqlab.core.checks import one_of
from uqlab.core.files import StrPath, existing, fingerprint, read_json, write
from uqlab.core.modules import load_tensors, save_tensors
from uqlab.ensembles.base import Ensemble, SeparateEnsemble
from uqlab.ensembles.deep import plain_tensors
from uqlab.ensembles.functional import GENERATOR, tensor_of
from uqlab.ensembles.laplace import copies, own_classifiers
from uqlab.ensembles.recipes import METHODS

TENSORS, ABOUT = "ensemble.safetensors", "uqlab.json"
BACKBONES = "embedded", "from_pretrained", "pretrained"  # of `models`
ROOMS = "extraction", "heads"  # which add methods once they are imported


def _linearised(backbone, members, lora):
    settings = {name: value for name, value in lora.items() if name != "method"}
    one = METHODS["lora"](backbone, 1, **settings)
    return copies(one, members, linearised=True)


METHODS |= {"laplace_lora": _linearised, "laplace": own_classifiers}


def save(ensemble: Ensemble, folder: StrPath) -> None:
    """Write a folder, as `Ensemble.save_pretrained` says."""
    if isinstance(ensemble, SeparateEnsemble) and plain_tensors(ensemble.network):
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
    one_of("method", method, METHODS)
    make, ids = METHODS[method], range(*members)
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
