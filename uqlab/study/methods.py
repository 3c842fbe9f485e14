"""The methods by name: how each is made, trained, finished and shown in plots."""

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from uqlab import data, ensembles, extraction, heads, models, training
from uqlab.core.checks import ArrayLike, InputsLike, as_inputs, as_tensor, held, one_of
from uqlab.core.modules import trainable
from uqlab.ensembles import Ensemble

# Settings of training.fit for 300 images of MNIST and `models.embedded()`; the learning
# rates, here and in METHODS, had the least NLL of five on 1,000 other images. Of three,
# for "masksembles", "film" and "mimo"; of two, for "packed"; "masks", "tiles",
# "hydra" and "laplace" train the single network, and "laplace_lora" LoRA, as
# these do; what they do then is the papers' and was not tuned: a diversity of 2, a
# third of the heads, a prior variance of 0.001.
FIT = {
    "epochs": 6, "lr": 0.001, "batch_size": 16, "optimizer": "adamw",
    "scheduler": "cosine", "warmup": 10, "max_grad_norm": 1.0, "progress": False,
}  # fmt: skip

# How Hydra trains pruned networks on for CIFAR-100 (D.2), for small images in which
# left and right differ: the paper also mirrors, and crops at other scales. It takes a
# rate of 0.001 to 0.03, and 500 of 10,000 steps to reach it.
HYDRA_D2 = {
    "epochs": 6, "lr": 0.03, "warmup": 8, "optimizer": "sgd", "momentum": 0.9,
    "scheduler": "cosine", "max_grad_norm": None,
    "loss": functools.partial(training.cross_entropy, smoothing=0.1),
    "augment": functools.partial(training.crop_flip, padding=2, flip=False),
}  # fmt: skip


def train(
    name: str,
    backbone: nn.Module,
    inputs: InputsLike,
    labels: ArrayLike | None = None,
    *,
    members: int,
    seed: int = 0,
    **settings: Any,
) -> Ensemble:
    """Make, fit and finish the ensemble of a method.

    Member m depends on (seed, m) alone, except for "snapshot", whose members follow
    each other, and for methods that train weights together: "batch", "masksembles",
    "mimo" and "film".

    Parameters
    ----------
    name
        One of METHODS.
    backbone
        The network, usually pretrained.
    inputs, labels
        The training set, as `training.fit` takes it.
    members, seed
        Number of members, and the seed.
    settings
        Settings of `training.fit`, and of the method's `make` and `finish`: rank=4.

    Raises
    ------
    ValueError
        If the method is unknown, or one of its steps refuses its input.
    """
    one_of("method", name, METHODS)
    inputs, labels = held(inputs, labels)
    x = as_inputs(inputs, by_name=False)
    models.check_classifier(backbone, x)
    method = METHODS[name]
    of_fit = inspect.signature(training.fit).parameters
    options = {key: settings.pop(key) for key in settings.keys() - of_fit.keys()}
    y = as_tensor("labels", labels, floating=False)
    task = _Task(x, y, members, seed, {**FIT, **method.fit, **settings})
    inspect.signature(method.finish).bind(None, task, **options)  # not after hours
    ensemble = method.make(backbone, members, seed=seed, **options)
    task.fit(ensemble.to(next(backbone.parameters()).device))
    return method.finish(ensemble, task, **options)


class _Task(NamedTuple):
    """The training set and the settings, for `finish`."""

    inputs: Tensor
    labels: Tensor
    members: int
    seed: int
    settings: dict[str, Any]  # of training.fit

    def fit(self, ensemble: Ensemble, cycle: int = 0) -> Ensemble:
        """Train an ensemble; from cycle 1 on for a member's share of the epochs."""
        how = dict(self.settings)
        if cycle:
            how |= {"epochs": max(1, how["epochs"] // self.members), "warmup": 0}
        seed = self.seed + 1000 * cycle
        training.fit(ensemble, self.inputs, self.labels, seed=seed, **how)
        return ensemble


# Networks and their inputs
_LITE0 = "efficientnet-lite0"
_LITE0_SIDE = 64  # the least pixels of a side for it


def fresh(backbone: nn.Module) -> nn.Module:
    """Copy a backbone; its classifier is drawn from torch's global seed."""
    model: Any = copy.deepcopy(backbone)
    model.get_submodule(models.classifier(model)).reset_parameters()
    return model


def untrained(backbone: nn.Module, seed: int = 0) -> nn.Module:
    """Copy a backbone with random weights."""
    model = copy.deepcopy(backbone)
    drawn = set()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset:
                reset()
                drawn.update(module.parameters())
        for p in model.parameters():
            if p not in drawn:  # class token and positions
                nn.init.normal_(p, std=0.02)
    return model


def backbone(name: str, task: data.Dataset) -> nn.Module:
    """Load the pretrained network for the inputs of a set, with its classes.

    Parameters
    ----------
    name
        One of `models.PRETRAINED`, or a checkpoint of transformers, by name or folder,
        which scales images as its preprocessor says; for sounds an audio spectrogram
        transformer. Empty: `models.embedded()`, for grey images of 28 x 28, and for
        texts `models.minilm()`.
    task
        The set with the classes.
    """
    classes = len(task.classes)
    if name in models.PRETRAINED:
        network = models.pretrained(name, classes)
        if name == _LITE0 and np.shape(task.inputs)[-1] < _LITE0_SIDE:
            return nn.Sequential(nn.Upsample(size=_LITE0_SIDE), network)
        return network
    if isinstance(task.inputs, list):
        return models.from_pretrained(name or models.minilm(), classes, task="text")
    if not name:
        return models.embedded(classes)
    kind = "sound" if "waves" in task.about else "image"
    network: Any = models.from_pretrained(name, classes, task=kind)
    if kind == "sound":
        frames = models.LogMel(network.config.max_length, data.LOG_MEL)
        return nn.Sequential(frames, network)
    given = task.inputs.shape[-1]
    side = getattr(network.config, "image_size", given)
    return nn.Sequential(*_prepared(name, given, side), network)


def _prepared(name, given, side):
    """Return layers that prepare images as a checkpoint's preprocessor does."""
    how = _preprocessor(name)
    steps: list[nn.Module] = []
    if side != given:
        mode = "bicubic" if how.get("resample") == 3 else "bilinear"
        steps.append(_Resize(size=side, mode=mode))
    if how.get("do_normalize", "image_mean" in how):
        steps.append(models.Standardize(how["image_mean"], how["image_std"]))
    return steps


class _Resize(nn.Upsample):
    """Resizes as preprocessors do, which smooth images that they make smaller."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.interpolate(x, self.size, mode=self.mode, antialias=True)
        return x.clamp(0, 1)  # bicubic overshoots


def _preprocessor(name):
    """Return what a checkpoint says of its images; a folder may say nothing."""
    from transformers.image_processing_base import ImageProcessingMixin

    folder = Path(name).expanduser()
    if folder.is_dir() and not any(folder.glob("*processor_config.json")):
        return {}
    try:
        source = folder if folder.is_dir() else name
        how, _ = ImageProcessingMixin.get_image_processor_dict(source)
        shifted = how.get("rescale_offset") or how.get("do_flip_channel_order")
        factor = how.get("rescale_factor", 1 / 255) if how.get("do_rescale", 1) else 1
        lacking = how.get("do_normalize") and not how.get("image_mean")
        if shifted or lacking or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
            raise ValueError("it does other than (x - image_mean) / image_std")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the preprocessor of {name!r} cannot be used: {error}; save the network "
            "in a folder without one, which takes images in [0, 1] as they are"
        ) from error
    return how


def suited(name: str, *sets: data.Dataset) -> list[data.Dataset]:
    """Return sets as `backbone(name, sets[0])` takes them.

    Square images get the first set's size and channels; for the embedded backbone they
    become grey and 28 x 28, for EfficientNet-Lite0 RGB. Others stay as they are.
    """
    if not sets or isinstance(sets[0].inputs, list):
        return list(sets)
    channels, height, width = sets[0].inputs.shape[1:] if name else (1, 28, 28)
    if height != width:
        return list(sets)
    channels = 3 if name == _LITE0 else channels
    return [items.resize(width, channels) for items in sets]


def encode(network: Any, *sets: data.Dataset, longest: int = 64) -> list[Tensor]:
    """Return the inputs of a network, a tensor a set.

    Images stay as they are; texts become the ids of their first `longest` tokens, all
    of one width; sounds become waves in [-1, 1] where the network takes these.
    """
    if isinstance(network, models.SpeechClassifier):
        return [items.about["waves"] / 2**15 for items in sets]
    inputs: list[Any] = [items.inputs for items in sets]
    if not inputs or isinstance(inputs[0], Tensor):
        return inputs
    texts = list(itertools.chain(*inputs))
    ids = network.encode(texts, min(longest, network.longest))
    return list(ids.split(list(map(len, sets))))


def reader(name: str, task: data.Dataset) -> Callable[[data.Dataset], data.Dataset]:
    """Return a function that makes sets like `task` readable by small networks.

    Images stay as they are; texts become the features of a frozen `backbone`.
    """
    if isinstance(task.inputs, Tensor):
        return lambda items: items
    encoder = backbone(name, task)
    encoder.classifier = nn.Identity()

    def read(items):
        [ids] = encode(encoder, items)
        return replace(items, inputs=training.predict(encoder, ids)[0])

    return read


def numbers(ensemble: Ensemble) -> int:
    """Count the trained parameters; all of them for MC dropout, which freezes all."""
    every = list(ensemble.parameters())
    return sum(p.numel() for p in trainable(ensemble) or every)


# How methods are made: (backbone, members, seed, **options) -> an untrained ensemble
def _deep(backbone, members, seed):
    return ensembles.deep(lambda: fresh(backbone), members, seed)


def _single(backbone, members, seed):
    return _deep(backbone, 1, seed)


def _one(check=lambda *_: None):
    """Make one network; `check` raises for a backbone that `finish` could not take."""

    def make(backbone, members, seed, **of_finish):
        check(backbone, members)
        return _deep(backbone, 1, seed)

    return make


def _whole(make):
    """Make what trains the whole network, which begins as the single network does."""

    def whole(backbone, members, seed, **options):
        network = _deep(backbone, 1, seed).member(0)
        return make(network, members, seed=seed, **options)

    return whole


def _lora_single(backbone, members, seed, rank=8, gain=4.0, **options):
    return ensembles.lora(backbone, 1, rank * members, gain=gain, seed=seed, **options)


def _one_lora(backbone, members, seed, rank=8, gain=4.0, prior_variance=0.0):
    return ensembles.lora(backbone, 1, rank, gain=gain, seed=seed)


def _dropping(backbone, members, seed, p=0.2):
    """Make one network that drops in training what its members will drop."""

    def make():
        return ensembles.place_dropout(fresh(backbone), lambda: nn.Dropout(p))

    return ensembles.deep(make, 1, seed)


def _tiled(network, members):
    size = math.isqrt(members)
    if size**2 != members:
        raise ValueError(
            f"tiles lie in a square: members must be 1, 4, 9, ..., got {members}"
        )
    return extraction.tiles(network, size)


# How they are finished: (trained ensemble, task, **options) -> the ensemble
def _as_is(trained, task, **of_make):
    return trained


def _dropped(trained, task, p=0.2):
    return ensembles.dropout(trained.member(0), task.members, p, seed=task.seed)


def _snapshots(trained, task):
    """Take the trained network, and its states after further, shorter cycles."""

    def cycle(one, number):
        if number:
            task.fit(one, number)

    return ensembles.snapshot(lambda: trained.member(0), task.members, cycle, task.seed)


def _laplace(trained, task, prior_variance=1e-3, **of_make):
    return ensembles.laplace_lora(
        trained,
        task.inputs,
        task.members,
        prior_variance=prior_variance,
        seed=task.seed,
    )


def _last_layer(trained, task, **how):
    network, x = trained.member(0), task.inputs
    return ensembles.laplace(network, x, task.members, seed=task.seed, **how)


def _masks(trained, task, steps=120, diversity=2.0, std=0.5):
    """Find members within the trained network, by masks fitted on the same data."""
    masked = extraction.masks(trained.member(0), task.members, std=std, seed=task.seed)
    extraction.fit_masks(
        masked,
        task.inputs,
        task.labels,
        steps=steps,
        diversity=diversity,
        batch_size=16,
        seed=task.seed,
        progress=False,
    )
    return masked.harden()


def _tiles(trained, task):
    return _tiled(trained.member(0), task.members)


def _hydra(trained, task, share=1 / 3):
    """Remove a share of the heads, train on and fuse.

    Each member's are drawn from the lower 70 % by Taylor scores. Members of one ranking
    are the paper's pruning seeds (B.5), which removes 48 heads of 144 among the first
    100.
    """
    network = trained.member(0)
    total = sum(heads.count_heads(network))
    ranking = heads.taylor_heads(
        network, task.inputs, task.labels, round(0.7 * total), scope="model"
    )
    removed = round(share * total)
    drawn = heads.sample_heads(ranking, removed, task.members, seed=task.seed)
    pruned = [heads.prune(network, gone) for gone in drawn]
    return heads.fuse(task.fit(ensembles.from_members(pruned), 1)).eval()


class Method(NamedTuple):
    """A method that turns a backbone into an ensemble."""

    label: str  # in tables and legends
    color: str
    marker: str
    make: Callable[..., Ensemble]  # (backbone, members, seed=, **options) -> untrained
    fit: Mapping[str, Any] = {}  # settings of training.fit that differ from FIT
    finish: Callable[..., Ensemble] = _as_is  # (trained, task, **options)

    @property
    def look(self) -> dict[str, str]:
        """Return its line style: `plots.curve(x, y, **METHODS["lora"].look)`."""
        return {"label": self.label, "color": self.color, "marker": self.marker}


_LORA = functools.partial(ensembles.lora, gain=4.0)
_PLUS = functools.partial(ensembles.batch, additive=True)
_FILM = _whole(ensembles.film)
_MASKSEMBLES = _whole(ensembles.masksembles)
_WITH_HEADS = _one(lambda network, _: heads.count_heads(network))
_LONG = {"epochs": 30}  # its members begin at random
METHODS: dict[str, Method] = {
    "single": Method("single network", "#444444", "o", _single),
    "lora_single": Method(
        "one LoRA network of the same size",
        "#56B4E9",
        "^",
        _lora_single,
        {"lr": 0.002},
    ),
    "dropout": Method("MC dropout", "#CA9161", "v", _dropping, {}, _dropped),
    "snapshot": Method("snapshot ensemble", "#949494", "D", _one(), {}, _snapshots),
    "batch": Method("BatchEnsemble", "#CC78BC", "P", ensembles.batch, {"lr": 0.002}),
    "batch_additive": Method("BatchEnsemble++", "#FBAFE4", "p", _PLUS, {"lr": 0.016}),
    "masksembles": Method("Masksembles", "#ECE133", "d", _MASKSEMBLES),
    "film": Method("FiLM-Ensemble", "#DE8F05", "H", _FILM),
    "mimo": Method("MIMO", "#F0A3FF", "*", ensembles.mimo, {"lr": 0.002}),
    "packed": Method("Packed-Ensemble", "#7B3294", "<", ensembles.packed, _LONG),
    "deep": Method("deep ensemble", "#D55E00", "s", _deep),
    "lora": Method("LoRA-Ensemble", "#029E73", "X", _LORA, {"lr": 0.004}),
    "laplace": Method("last-layer Laplace", "#332288", "^", _one(), {}, _last_layer),
    "laplace_lora": Method(
        "Laplace-LoRA", "#66C2A5", "X", _one_lora, {"lr": 0.004}, _laplace
    ),
    "singular_value": Method(
        "singular value ensemble",
        "#0173B2",
        "h",
        ensembles.singular_value,
        {"lr": 0.03},
    ),
    "masks": Method("mask extraction", "#B2DF8A", ">", _one(), {}, _masks),
    "tiles": Method("tiles", "#A6761D", "8", _one(_tiled), {}, _tiles),
    "hydra": Method("fused Taylor prunings", "#E7298A", "h", _WITH_HEADS, {}, _hydra),
}
