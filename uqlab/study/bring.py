"""A model of one's own from where it lies: a function, weights, an ensemble, a folder of transformers.

    found = model("mymodel.py:make", data.load("mine.npz"), weights="best.safetensors")

The function is run, as code that you trust. Weights are safetensors, or checkpoints that torch reads with
`weights_only=True`: nothing is unpickled, and no code of a checkpoint is run.
"""

import contextlib
import glob
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from uqlab import data, ensembles, models
from uqlab.core import door, files
from uqlab.core.modules import evaluating, like_parameters, logits_of
from uqlab.study import methods

Place = str | os.PathLike
WEIGHTS = (".safetensors", ".pt", ".pth", ".th", ".ckpt", ".bin")


class Brought(NamedTuple):
    """What `model` found."""

    model: nn.Module  # a network, or an ensemble, in evaluation mode
    files: dict[str, str]  # the files of weights, and the first digits of their sha256


def model(
    source: Place, task: data.Dataset, *, weights: Place | Sequence[Place] = (),
    settings: Mapping[str, Any] | None = None, mean: Sequence[float] = (), std: Sequence[float] = (),
    new_classifier: bool = False,
) -> Brought:  # fmt: skip
    """The network or the ensemble that a source means, for the inputs and the classes of `task`.

    source: "file.py:function" or "module:function", which returns a network, several, or an ensemble; a folder that
        transformers wrote; empty: the pretrained network of `methods.backbone`.
    weights: files, folders of files, patterns, or names that `data.file` knows. Several are the members of an ensemble,
        each on a network of its own; a file of `ensembles.save` is an ensemble on the network that the source means.
    settings: arguments of the function; where it has a parameter `classes` it is given their number.
    mean, std: per channel, what a network expects subtracted and divided by; empty: nothing, or what a folder says.
    new_classifier: whether a folder may lack a classifier of these classes, because you train one.

    Raises FileNotFoundError; TypeError for a function that returns no network; ValueError for a source that is none of
    these, a function that is not there or refuses its settings, and weights that do not fit or hold Python objects.
    """
    source, found = os.fspath(source), _weight_files(weights)
    if len(mean) != len(std):
        raise ValueError(
            f"mean and std must have one number for each channel, got {len(mean)} and {len(std)}"
        )
    make = _maker(source, task, settings or {}, new_classifier, bool(mean or std))
    if len(found) == 1 and _saved(found[0]):
        if mean or std:
            raise ValueError(
                "mean and std cannot stand before a saved ensemble: put Standardize into its function"
            )
        made = [ensembles.load(found[0], make()[0])]
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "the format of .* holds no checksum"
            )  # `files` tells it
            made = [models.load_weights(make()[0], path) for path in found] or make()
        made = (
            [nn.Sequential(models.Standardize(mean, std), net) for net in made]
            if mean or std
            else made
        )
    whole = made[0] if len(made) == 1 else ensembles.from_members(made)
    return Brought(whole.eval(), {path.name: files.sha256(path)[:16] for path in found})


def check(
    network: nn.Module, inputs: Shaped[Tensor, "samples ..."], task: data.Dataset
) -> None:
    """Raise ValueError unless the network returns finite logits, one for each class of the task, for such inputs."""
    with torch.no_grad(), evaluating(network):
        logits = logits_of(network(like_parameters(network, inputs[:2])))
    kind, shape = type(network).__name__, list(inputs.shape[1:])
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        what = (
            list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        )
        raise ValueError(
            f"{kind} must return logits [batch, classes] for inputs {shape}, got {what}"
        )
    if logits.shape[-1] != len(task.classes):
        raise ValueError(
            f"{kind} returns {logits.shape[-1]} outputs, and {task.name} has labels of {len(task.classes)} classes: "
            "there must be one output for each class; take other labels, or another classifier"
        )
    if not logits.isfinite().all():
        raise ValueError(
            f"{kind} returns logits that are not finite for inputs {shape} of {task.name}"
        )


# Where a model lies ---------------------------------------------------------------------------------------------------
def _maker(
    source: str,
    task: data.Dataset,
    settings: Mapping[str, Any],
    new: bool,
    scaled: bool,
) -> Callable[[], list[nn.Module]]:
    if not source:
        return lambda: [methods.backbone("", task)]
    if Path(source).expanduser().is_dir():
        return lambda: [_of_transformers(Path(source).expanduser(), task, new, scaled)]
    function = _function(source)
    parameters = inspect.signature(function).parameters
    given = (
        {"classes": len(task.classes), **settings}
        if "classes" in parameters
        else dict(settings)
    )
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise ValueError(
            f"{source} cannot be called with the settings {given}: {error}"
        ) from error

    def make() -> list[nn.Module]:
        made = function(**given)
        made = list(made) if isinstance(made, list | tuple) else [made]
        if not made or not all(isinstance(each, nn.Module) for each in made):
            kinds = (
                ", ".join(type(each).__name__ for each in made[:3]) or "an empty list"
            )
            raise TypeError(
                f"{source} must return a torch module, or a list of them, got {kinds}"
            )
        return made

    return make


def _function(source: str) -> Callable[..., Any]:
    place, _, name = source.rpartition(":")
    if not place or not name:
        raise ValueError(
            f'there is no folder {source!r}; or give "file.py:function" or "module:function"'
        )
    module = (
        _run(Path(place).expanduser()) if place.endswith(".py") else _imported(place)
    )
    if not callable(function := getattr(module, name, None)):
        own = [
            key
            for key, thing in vars(module).items()
            if key[0] != "_" and inspect.isfunction(thing)
        ]
        raise ValueError(
            f"{place} has no function {name!r}; it has {', '.join(own) or 'none'}"
        )
    return function


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path.absolute()}; relative paths start at the working folder"
        )
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    sys.path.append(
        str(path.parent.absolute())
    )  # it finds its neighbours, and hides no package
    spec.loader.exec_module(module)
    return module


def _imported(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if not f"{place}.".startswith(
            f"{error.name}."
        ):  # an import of the module's own
            raise
        raise ValueError(
            f"there is no module {place}; for a file write {place.replace('.', '/')}.py:function"
        ) from error


def _weight_files(weights: Place | Sequence[Place]) -> list[Path]:
    found: list[Path] = []
    for each in [weights] if isinstance(weights, str | os.PathLike) else weights:
        place = os.path.expanduser(os.fspath(each))
        inside = [
            path for path in sorted(Path(place).glob("*")) if path.suffix in WEIGHTS
        ]
        there = (
            inside
            if os.path.isdir(place)
            else [Path(place)]
            if os.path.isfile(place)
            else []
        )
        there = there or [Path(path) for path in sorted(glob.glob(place))]
        with contextlib.suppress(ValueError):  # a name that is registered nowhere
            there = there or [data.file(place)]
        if not there:
            raise FileNotFoundError(
                f"no weights at {place}: give a file, a pattern, or a folder of {', '.join(WEIGHTS)}"
            )
        found += there
    return found


def _saved(path: Path) -> bool:
    """Whether `ensembles.save` wrote a file."""
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        return "uqlab" in (file.metadata() or {})
    return False


def _of_transformers(
    folder: Path, task: data.Dataset, new: bool, scaled: bool
) -> nn.Module:
    config = files.read_json(folder / "config.json")
    if not config:
        raise ValueError(
            f"{folder} has no config.json: transformers did not write it; weights alone need a function"
        )
    classes, kind = len(task.classes), (config.get("architectures") or ["unnamed"])[0]
    own = (
        len(config.get("id2label") or "01") if kind.endswith("Classification") else 0
    )  # two are left out there
    if not new and own != classes:
        raise ValueError(
            f"{folder} ({kind}) classifies {own} classes, {task.name} has {classes}; train it on them first"
        )
    if isinstance(task.inputs, list):
        return models.from_pretrained(folder, classes, task="text")
    network: Any = models.from_pretrained(folder, classes)
    side, seen, parts = (
        task.inputs.shape[-1],
        files.read_json(folder / "preprocessor_config.json"),
        [],
    )
    if network.config.image_size != side:
        parts.append(nn.Upsample(size=network.config.image_size, mode="bilinear"))
    if not scaled and "image_mean" in seen and "image_std" in seen:
        parts.append(models.Standardize(seen["image_mean"], seen["image_std"]))
    return nn.Sequential(*parts, network) if parts else network


door.room(__name__)
