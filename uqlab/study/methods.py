"""The methods by name: how each is made, trained, finished and shown in plots."""

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from uqlab import data, ensembles, extraction, heads, models, training
from uqlab.core.checks import ArrayLike, InputsLike, as_one, as_tensor, at_least, one_of
from uqlab.core.modules import trainable
from uqlab.core.reading import held
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

    Member m depends on (seed, m) alone, but for "snapshot", whose members follow each
    other, and for those that train weights together: "batch", "masksembles", "mimo" and
    "film".

    Parameters
    ----------
    name
        One of METHODS.
    inputs, labels
        The training set, as `training.fit` takes it.
    settings
        Of `training.fit`, and the method's own, as its `make` and `finish` take them:
        rank=4.

    Raises
    ------
    ValueError
        For an unknown method, and what its steps raise.
    """
    one_of("method", name, METHODS)
    inputs, labels = held(inputs, labels)
    x = as_one(inputs)
    models.check_classifier(backbone, x)
    method = METHODS[name]
    of_fit = inspect.signature(training.fit).parameters
    how = {key: value for key, value in settings.items() if key in of_fit}
    options = {key: value for key, value in settings.items() if key not in of_fit}
    task = Task(
        x,
        as_tensor("labels", labels, floating=False),
        members,
        seed,
        {**FIT, **method.fit, **how},
    )
    ensemble = method.make(backbone, members, seed=seed, **options)
    task.fit(ensemble.to(next(backbone.parameters()).device))
    return method.finish(ensemble, task, **options)


class Task(NamedTuple):
    """What a method may need once its network is trained."""

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
LITE0 = "efficientnet-lite0"
LEAST = 64  # pixels of a side for it


def fresh(backbone: nn.Module) -> nn.Module:
    """Copy a backbone; its classifier is drawn from torch's global seed."""
    model: Any = copy.deepcopy(backbone)
    model.get_submodule(models.classifier(model)).reset_parameters()
    return model


def untrained(backbone: nn.Module, seed: int = 0) -> nn.Module:
    """Copy a backbone with random weights: what can be done without pretraining."""
    model = copy.deepcopy(backbone)
    drawn = set()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset:
                reset()
                drawn.update(module.parameters())
        for p in model.parameters():
            if p not in drawn:  # class token and positions
                nn.init.normal_(p, std=0.02)
    return model


def backbone(name: str, task: data.Dataset) -> nn.Module:
    """Load the pretrained network for the inputs of a set, with a new classifier.

    Parameters
    ----------
    name
        One of `models.PRETRAINED`, or a checkpoint of transformers, by name or folder;
        of sounds an audio spectrogram transformer. Empty: `models.embedded()`, for grey
        images of 28 x 28, and for texts `models.minilm()`.
    task
        Whose classes the classifier has.
    """
    classes = len(task.classes)
    if name in models.PRETRAINED:
        network = models.pretrained(name, classes)
        if name == LITE0 and np.shape(task.inputs)[-1] < LEAST:
            return nn.Sequential(nn.Upsample(size=LEAST), network)
        return network
    if isinstance(task.inputs, list):
        return models.from_pretrained(name or models.minilm(), classes, task="text")
    if not name:
        return models.embedded(classes)
    if "waves" in task.about:
        network: Any = models.from_pretrained(name, classes, task="sound")
        return nn.Sequential(
            models.LogMel(network.config.max_length, data.LOG_MEL), network
        )
    network = models.from_pretrained(name, classes)
    half = [0.5] * task.inputs.shape[1]  # checkpoints of ViT scale images to -1 ... 1
    return nn.Sequential(
        nn.Upsample(size=network.config.image_size, mode="bilinear"),
        models.Standardize(half, half),
        network,
    )


def suited(name: str, *sets: data.Dataset) -> list[data.Dataset]:
    """Return sets as `backbone(name, sets[0])` takes them.

    Images get the first set's size and channels; for the embedded backbone they become
    grey and 28 x 28, for EfficientNet-Lite0 RGB. Texts stay as they are.

    Raises
    ------
    TypeError
        For texts among images.
    ValueError
        For images of another shape where the first ones are not square.
    """
    at_least("the number of sets", len(sets))
    x = sets[0].inputs
    if isinstance(x, list):
        images = [items.name for items in sets if isinstance(items.inputs, Tensor)]
        if images:
            raise TypeError(
                f"{sets[0].name} holds text, but {', '.join(images)} images; take sets "
                "of one kind"
            )
        return list(sets)
    channels, height, width = x.shape[1:] if name else (1, 28, 28)
    channels = 3 if name == LITE0 else channels
    if height == width:
        return [items.resize(width, channels) for items in sets]
    for items in sets:
        shape = np.shape(items.inputs)[1:]
        first = tuple(x.shape[1:])
        if shape != first:
            raise ValueError(
                f"{items.name} has images {list(shape)} and {sets[0].name} "
                f"{list(first)}: only square ones are resized"
            )
    return list(sets)


def encode(network: Any, *sets: data.Dataset, longest: int = 64) -> list[Tensor]:
    """Return what a network is given, a tensor a set.

    Images are given as they are; of texts the ids of the first `longest` tokens, all as
    wide; of sounds their waves in [-1, 1], where the network takes these.
    """
    at_least("the number of sets", len(sets))
    if isinstance(network, models.SpeechClassifier):
        return [items.about["waves"] / 2**15 for items in sets]
    inputs: list[Any] = [items.inputs for items in sets]
    if isinstance(inputs[0], Tensor):
        return inputs
    texts = list(itertools.chain(*inputs))
    ids = network.encode(texts, min(longest, network.longest))
    return list(ids.split([len(items) for items in inputs]))


def reader(name: str, task: data.Dataset) -> Callable[[data.Dataset], data.Dataset]:
    """Return how small networks read sets like `task`.

    Images are read as they are; of texts what a frozen `backbone` says of them.
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
    """Count the numbers that were trained; of MC dropout, which freezes all, all."""
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
    """One way to turn a pretrained network, the backbone, into an ensemble."""

    label: str  # in tables and legends
    color: str
    marker: str
    make: Callable[..., Ensemble]  # (backbone, members, seed=, **options) -> untrained
    needs: set[str]  # of the backbone: as the names below say
    fit: Mapping[str, Any] = {}  # settings of training.fit, where they are not FIT's
    finish: Callable[..., Ensemble] = _as_is  # (trained, task, **options)

    @property
    def look(self) -> dict[str, str]:
        """How its line is drawn: `plots.curve(x, y, **METHODS["lora"].look)`."""
        return {"label": self.label, "color": self.color, "marker": self.marker}


_ANY = set()
_LINEAR = {"linear layers"}
_LEARNED = {"linear layers", "pretraining"}
_ATTENTION = {"attention"}
_NORMS = {"normalisation"}
_MAP = {"a map or patches"}
_LORA = functools.partial(ensembles.lora, gain=4.0)
_PLUS = functools.partial(ensembles.batch, additive=True)
_FILM = _whole(ensembles.film)
_MASKSEMBLES = _whole(ensembles.masksembles)
_WITH_MASKS = _one(extraction.masks)
_WITH_TILES = _one(_tiled)
_WITH_HEADS = _one(lambda network, _: heads.count_heads(network))
_LONG = {"epochs": 30}  # its members begin at random
METHODS: dict[str, Method] = {
    "single": Method("single network", "#444444", "o", _single, _ANY),
    "lora_single": Method(
        "one LoRA network of the same size",
        "#56B4E9",
        "^",
        _lora_single,
        _LEARNED,
        {"lr": 0.002},
    ),
    "dropout": Method("MC dropout", "#CA9161", "v", _dropping, _LINEAR, {}, _dropped),
    "snapshot": Method(
        "snapshot ensemble", "#949494", "D", _one(), _ANY, {}, _snapshots
    ),
    "batch": Method(
        "BatchEnsemble", "#CC78BC", "P", ensembles.batch, _LINEAR, {"lr": 0.002}
    ),
    "batch_additive": Method(
        "BatchEnsemble++", "#FBAFE4", "p", _PLUS, _LEARNED, {"lr": 0.016}
    ),
    "masksembles": Method("Masksembles", "#ECE133", "d", _MASKSEMBLES, _LINEAR),
    "film": Method("FiLM-Ensemble", "#DE8F05", "H", _FILM, _NORMS),
    "mimo": Method("MIMO", "#F0A3FF", "*", ensembles.mimo, _LINEAR, {"lr": 0.002}),
    "packed": Method(
        "Packed-Ensemble", "#7B3294", "<", ensembles.packed, _LINEAR, _LONG
    ),
    "deep": Method("deep ensemble", "#D55E00", "s", _deep, _ANY),
    "lora": Method("LoRA-Ensemble", "#029E73", "X", _LORA, _LEARNED, {"lr": 0.004}),
    "laplace": Method(
        "last-layer Laplace", "#332288", "^", _one(), _LINEAR, {}, _last_layer
    ),
    "laplace_lora": Method(
        "Laplace-LoRA", "#66C2A5", "X", _one_lora, _LEARNED, {"lr": 0.004}, _laplace
    ),
    "singular_value": Method(
        "singular value ensemble",
        "#0173B2",
        "h",
        ensembles.singular_value,
        _LEARNED,
        {"lr": 0.03},
    ),
    "masks": Method(
        "mask extraction", "#B2DF8A", ">", _WITH_MASKS, _LINEAR, {}, _masks
    ),
    "tiles": Method("tiles", "#A6761D", "8", _WITH_TILES, _MAP, {}, _tiles),
    "hydra": Method(
        "fused Taylor prunings", "#E7298A", "h", _WITH_HEADS, _ATTENTION, {}, _hydra
    ),
}
