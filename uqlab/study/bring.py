"""A model of one's own from where it lies: a function, weights, an ensemble, a folder.

    task = data.load("mine.npz")
    brought = model("mymodel.py:make", task, weights="best.safetensors")

The function is run, as code that you trust. Weights are safetensors, or checkpoints
that torch reads with `weights_only=True`: nothing is unpickled, and no code of a
checkpoint is run.
"""

import contextlib
import copy
import glob
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from uqlab import data, ensembles, models
from uqlab.core import files
from uqlab.core.checks import InputsLike, as_inputs, first_tensor
from uqlab.core.files import StrPath
from uqlab.core.modules import call, evaluating, logits_of, take
from uqlab.study import methods

WEIGHTS = (".safetensors", ".pt", ".pth", ".th", ".ckpt", ".bin")


class Brought(NamedTuple):
    """What `model` found."""

    model: nn.Module  # a network, or an ensemble, in evaluation mode
    files: dict[str, str]  # the files of weights, and the first digits of their sha256


def model(
    source: StrPath,
    task: data.Dataset,
    *,
    weights: StrPath | Sequence[StrPath] = (),
    settings: Mapping[str, Any] | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    new_classifier: bool = False,
) -> Brought:
    """Load the network or the ensemble that a source means, for the inputs of a set.

    Parameters
    ----------
    source
        "file.py:function" or "module:function", which returns a network, several, or an
        ensemble; a folder that transformers wrote; empty: the pretrained network of
        `methods.backbone`.
    task
        A set with the inputs and the classes.
    weights
        Files, folders of files, patterns, or names that `data.file` knows. Several are
        the members of an ensemble, each on a network of its own; a folder of
        `save_pretrained` is an ensemble on the network that the source means.
    settings
        Arguments of the function; where it has a parameter `classes` it is given their
        number.
    mean, std
        Per channel, what a network expects subtracted and divided by; empty: nothing,
        or what a folder says.
    new_classifier
        Whether a folder may lack a classifier of these classes, because you train one.

    Raises
    ------
    FileNotFoundError
        For files that are not there.
    TypeError
        For a function that returns no network, or refuses its settings.
    ValueError
        For a source that is none of these, a function that is not there, and weights
        that do not fit or hold Python objects.
    """
    source = os.fspath(source)
    paths = _weight_files(weights)
    scaled = len(mean) + len(std) > 0
    networks = _networks(source, task, settings or {}, new_classifier, scaled)
    networks = _with_weights(networks, paths, scaled)
    if scaled:
        scale = models.Standardize(mean, std)
        networks = [nn.Sequential(scale, network) for network in networks]
    whole = networks[0] if len(networks) == 1 else ensembles.from_members(networks)
    return Brought(whole.eval(), _checksums(paths))


def _checksums(paths):
    names = [path.name for path in paths]
    called = [path.name if names.count(path.name) == 1 else str(path) for path in paths]
    return {name: files.sha256(p)[:16] for name, p in zip(called, paths, strict=True)}


def _with_weights(networks, paths, scaled):
    """Return a network for each file of weights, or the ensemble that was saved."""
    if len(paths) == 1 and paths[0].with_name("uqlab.json").is_file():
        if scaled:
            raise ValueError(
                "mean and std cannot stand before a saved ensemble: put Standardize "
                "into its function"
            )
        return [ensembles.from_pretrained(paths[0].parent, networks[0])]
    copies = [copy.deepcopy(networks[0]) for _ in paths]
    return list(map(models.load_weights, copies, paths)) or networks


def check(network: nn.Module, inputs: InputsLike, task: data.Dataset) -> None:
    """Raise ValueError unless a network returns finite logits [batch, classes].

    Parameters
    ----------
    inputs
        As the network takes them; two are tried.
    task
        The set that they come from: there must be one output for each of its classes.
    """
    two = take(network, as_inputs(inputs), slice(2))
    with torch.no_grad(), evaluating(network):
        logits = logits_of(call(network, two))
    shape = list(first_tensor(two).shape[1:])
    classes = len(task.classes)
    said = list(logits.shape)
    if len(said) < 2 or said[-1] != classes:
        raise ValueError(
            f"{type(network).__name__} must return logits [batch, {classes}] for "
            f"inputs {shape}, one for each class of {task.name}, got {said}; take "
            "other labels, or another classifier"
        )
    if not logits.isfinite().all():
        raise ValueError(
            f"{type(network).__name__} returns logits that are not finite for inputs "
            f"{shape} of {task.name}"
        )


# Where a model lies
def _networks(source, task, settings, new, scaled):
    folder = Path(source).expanduser()
    if not source:
        return [methods.backbone("", task)]
    if folder.is_dir():
        return [_of_transformers(folder, task, new, scaled)]
    function = _function(source)
    if "classes" in inspect.signature(function).parameters:
        settings = {"classes": len(task.classes), **settings}
    is_network = isinstance(function, nn.Module)
    returned = function if is_network else function(**settings)
    networks = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not networks or not all(isinstance(net, nn.Module) for net in networks):
        raise TypeError(
            f"{source} must return a torch module, or a list of them, got "
            f"{type(returned).__name__} of "
            f"{[type(net).__name__ for net in networks[:3]]}"
        )
    return networks


def _function(source):
    place, _, name = source.rpartition(":")
    if not place or not name:
        file = Path(source).expanduser().is_file()
        weights = f", and weights={source!r} beside it, if it holds weights" * file
        raise ValueError(
            f'there is no folder {source!r}; or give "file.py:function" or '
            f'"module:function"{weights}'
        )
    run = _run if place.endswith(".py") else _imported
    module = vars(run(place))
    if not callable(module.get(name)):
        others = [key for key, value in module.items() if inspect.isfunction(value)]
        raise ValueError(
            f"{place} has no function {name!r}; it has {', '.join(others) or 'none'}"
        )
    return module[name]


def _run(place):
    path = files.existing(Path(place).expanduser().absolute())
    name = f"brought_{path.stem}"  # json.py hides no package
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))  # it finds its neighbours
    spec.loader.exec_module(module)
    return module


def _imported(place):
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if not f"{place}.".startswith(
            f"{error.name}."
        ):  # an import of the module's own
            raise
        raise ValueError(
            f"there is no module {place}; for a file write "
            f"{place.replace('.', '/')}.py:function"
        ) from error


def _weight_files(weights):
    paths = []
    for place in [weights] if isinstance(weights, StrPath) else weights:
        path = Path(place).expanduser()
        if path.is_dir():
            there = [p for p in sorted(path.iterdir()) if p.suffix in WEIGHTS]
        elif path.is_file():
            there = [path]
        else:
            there = [Path(name) for name in sorted(glob.glob(str(path)))]
        if not there:
            with contextlib.suppress(ValueError):  # a name that is registered nowhere
                there = [data.file(str(place))]
        if not there:
            raise FileNotFoundError(
                f"no weights at {path}: give a file, a pattern, or a folder of "
                f"{', '.join(WEIGHTS)}"
            )
        paths += there
    return paths


def _of_transformers(folder, task, new, scaled):
    config = files.read_json(folder / "config.json")
    if not config:
        raise ValueError(
            f"{folder} has no config.json: transformers did not write it; weights "
            "alone need a function"
        )
    classes = len(task.classes)
    kind = (config.get("architectures") or ["unnamed"])[0]
    outputs = len(config.get("id2label", "01"))  # two are left out there
    outputs = outputs if kind.endswith("Classification") else 0
    if not new and outputs != classes:
        raise ValueError(
            f"{folder} ({kind}) classifies {outputs} classes, {task.name} has "
            f"{classes}; train it on them first"
        )
    if isinstance(task.inputs, list):
        return models.from_pretrained(folder, classes, task="text")
    return _of_images(folder, task, scaled)


def _of_images(folder, task, scaled):
    """Load a network for images, and put before it what it expects of them."""
    network = models.from_pretrained(folder, len(task.classes))
    seen = files.read_json(folder / "preprocessor_config.json")
    size = task.inputs.shape[-1]
    steps = []
    expected = getattr(network.config, "image_size", size)
    if expected != size:
        steps.append(nn.Upsample(size=expected, mode="bilinear"))
    if not scaled and "image_mean" in seen and "image_std" in seen:
        steps.append(models.Standardize(seen["image_mean"], seen["image_std"]))
    return nn.Sequential(*steps, network) if steps else network
