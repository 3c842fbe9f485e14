"""Load a user's model: a function, weights, a saved ensemble, a folder of transformers.

    task = data.load("mine.npz")
    brought = model("mymodel.py:make", task, weights="best.safetensors")

The function is run, as code that you trust. Weights are safetensors, or checkpoints
that torch reads with `weights_only=True`: no code of a checkpoint is run.
"""

import copy
import glob
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from uqlab import data, ensembles, models, training
from uqlab.core import files
from uqlab.core.checks import InputsLike, as_inputs, first_tensor
from uqlab.core.files import StrPath
from uqlab.core.modules import rows_of
from uqlab.study import methods

_ABOUT = "uqlab.json"  # in a folder of `save_pretrained`
# What transformers, accelerate and `training.fit` keep beside weights
_NO_WEIGHTS = re.compile(
    r"(training|training_args|(optimizer|scheduler|scaler|rng_state)(_\d+)?)\."
)


class _Brought(NamedTuple):
    """A loaded model."""

    model: nn.Module  # a network or an ensemble, in evaluation mode
    files: dict[str, str]  # weights files, and the first digits of their sha256


def model(
    source: StrPath,
    task: data.Dataset,
    *,
    weights: StrPath | Sequence[StrPath] = (),
    settings: Mapping[str, Any] | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    new_classifier: bool = False,
) -> _Brought:
    """Load a network or an ensemble for the inputs of a data set.

    Parameters
    ----------
    source
        "file.py:function" or "module:function", which returns a network, several, or an
        ensemble; a folder that transformers wrote; empty: the pretrained network of
        `methods.backbone`.
    task
        A set with the inputs and the classes.
    weights
        Files, folders or patterns; what else a training keeps in a folder, such as
        optimizer.pt, is left out. Several files are the members of an ensemble, each on
        a copy of the network, or each on its own of as many; a folder of
        `save_pretrained` is an ensemble on it.
    settings
        Arguments of the function; a parameter `classes` gets the number of classes.
    mean, std
        Subtracted and divided by, per channel; empty: nothing. A folder has its own.
    new_classifier
        Whether a folder may lack a classifier of these classes, because you train one.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        If a file or the function is missing, it returns no network, the source is none
        of these, or the weights do not fit or hold Python objects.
    """
    paths = _weight_files(weights)
    scale = [models.Standardize(mean, std)] if len(mean) + len(std) else []
    folder = Path(source).expanduser()
    if not os.fspath(source):
        networks = [methods.backbone("", task)]
    elif folder.is_dir():
        _refuse(scale, "a folder of transformers")
        if not new_classifier:
            _check_classes(folder, task)
        networks = [methods.backbone(str(folder), task)]
    else:
        networks = _made(os.fspath(source), len(task.classes), settings or {})
    networks = _loaded(networks, paths, scale)
    whole = networks[0] if len(networks) == 1 else ensembles.from_members(networks)
    return _Brought(whole.eval(), _sums(paths))


def _loaded(networks, paths, scale):
    """Return a network for each file of weights, or the ensemble that was saved."""
    if any(isinstance(net, ensembles.Ensemble) for net in networks):
        _refuse(scale, "an ensemble")
    one = len(networks) == 1
    if len(paths) == 1 and paths[0].with_name(_ABOUT).is_file():
        _refuse(scale, "a saved ensemble")
        network = networks[0] if one else networks
        return [ensembles.from_pretrained(paths[0].parent, network)]
    if paths:
        networks = networks * len(paths) if one else networks
        if len(paths) != len(networks):
            raise ValueError(
                f"weights must be {len(networks)} files, one for each network of the "
                f"function in their order, got {len(paths)}"
            )
        copies = map(copy.deepcopy, networks)
        networks = list(map(models.load_weights, copies, paths))
    return [nn.Sequential(*scale, net) if scale else net for net in networks]


def _refuse(scale, what):
    if scale:
        raise ValueError(
            f"mean and std do not apply to {what}, which has its own scale: put "
            "Standardize into a function"
        )


def check(network: nn.Module, inputs: InputsLike, task: data.Dataset) -> None:
    """Raise ValueError unless a network returns one logit for each class of a set.

    Parameters
    ----------
    network
        A network or an ensemble.
    inputs
        Inputs as the network takes them; two are tried.
    task
        The set with the classes.
    """
    two = rows_of(as_inputs(inputs), slice(2))
    try:
        z = training.predict(network, two)
    except RuntimeError as error:
        raise ValueError(
            f"{type(network).__name__} does not take inputs "
            f"{list(first_tensor(two).shape[1:])} of {task.name} ({error}): give data "
            "of the size and channels that it was trained on, or resize them in the "
            "network"
        ) from error
    if z.ndim != 3 or z.shape[2] != len(task.classes):
        raise ValueError(
            f"{type(network).__name__} must return logits [batch, "
            f"{len(task.classes)}], one for each class of {task.name}, got "
            f"{list(z.shape[1:])}"
        )


def _made(source, classes, settings):
    """Return the networks of "file.py:function" or "module:function"."""
    place, _, name = source.rpartition(":")
    if not place:
        raise ValueError(
            f'model must be "file.py:function", "module:function" or a folder, got '
            f"{source!r}; files of weights go into `weights`"
        )
    module = _run(place) if place.endswith(".py") else importlib.import_module(place)
    made = getattr(module, name, None)
    if not callable(made):
        found = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
        raise ValueError(f"{place} has no function {name!r}, only {', '.join(found)}")
    if not isinstance(made, nn.Module):
        if "classes" in inspect.signature(made).parameters:
            settings = {"classes": classes, **settings}
        made = made(**settings)
    networks = list(made) if isinstance(made, list | tuple) else [made]
    if not networks or not all(isinstance(net, nn.Module) for net in networks):
        raise TypeError(f"{source} must return torch modules, got {made!r}")
    return networks


def _run(place):
    """Import a file under a name that hides no package."""
    path = files.existing(Path(place).absolute())
    spec: Any = importlib.util.spec_from_file_location(f"brought_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))  # it finds its neighbours
    spec.loader.exec_module(module)
    return module


def _weight_files(weights):
    kinds = (".safetensors", ".pt", ".pth", ".th", ".ckpt", ".bin")
    paths = []
    for place in [weights] if isinstance(weights, StrPath) else weights:
        path = Path(place).expanduser()
        pattern = glob.escape(str(path)) if path.exists() else str(path)
        if path.is_dir():
            pattern += "/ensemble.*" if (path / _ABOUT).is_file() else "/*"
        found = [p for p in map(Path, glob.glob(pattern)) if p.suffix in kinds]
        if path.is_dir():
            found = [p for p in found if not _NO_WEIGHTS.match(p.name)]
        if not found:
            raise FileNotFoundError(f"no weights ({', '.join(kinds)}) at {path}")
        paths += sorted(found, key=_numbered)
    return paths


def _sums(paths, depth=2):
    """Return checksums by so much of the files' places as tells them apart."""
    sums = {"/".join(p.parts[-depth:]): files.sha256(p)[:16] for p in paths}
    return sums if len(sums) == len({*paths}) else _sums(paths, depth + 1)


def _numbered(path):
    """Return a key of the order of names in which 2 is before 10."""
    parts = re.split(r"(\d+)", str(path))
    return [*parts[::2]], [*map(int, parts[1::2])]


def _check_classes(folder, task):
    """Raise ValueError for a network of transformers that has other classes."""
    config = files.read_json(Path(folder, "config.json"))
    kind = (config.get("architectures") or ["no config.json"])[0]
    outputs = len(config.get("id2label", "01"))  # two are left out there
    if not kind.endswith("Classification") or outputs != len(task.classes):
        raise ValueError(
            f"{folder} ({kind}) must classify the {len(task.classes)} classes of "
            f"{task.name}; train it on them first"
        )
