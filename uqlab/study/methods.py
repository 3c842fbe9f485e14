"""The methods by name: how each is made, trained and finished, and how plots show it."""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from uqlab import data, ensembles, extraction, heads, models, training
from uqlab.core import door
from uqlab.core.checks import one_of
from uqlab.ensembles import Ensemble

# Settings of training.fit for 300 images of MNIST and `models.embedded()`; the learning rates, here and in METHODS, had
# the least NLL of five on 1,000 other images. Of three, for "masksembles", "film" and "mimo"; of two, for "packed";
# "dropkey", "masks", "tiles" and "hydra" train the single network, and "laplace_lora" LoRA, as these do; what they do
# then is the papers' and was not tuned: a diversity of 2, a third of the heads, a prior variance of 0.001.
FIT = {
    "epochs": 6, "lr": 0.001, "batch_size": 16, "optimizer": "adamw", "schedule": "cosine", "warmup": 10, "clip": 1.0,
    "progress": False,
}  # fmt: skip

# How Hydra trains pruned networks on for CIFAR-100 (D.2), for small images in which left and right differ: the paper
# also mirrors, and crops at other scales. It takes a rate of 0.001 to 0.03, and 500 of 10,000 steps to reach it.
HYDRA_D2 = {
    "epochs": 6, "lr": 0.03, "warmup": 8, "optimizer": "sgd", "momentum": 0.9, "schedule": "cosine", "clip": None,
    "loss": functools.partial(training.cross_entropy, smoothing=0.1),
    "augment": functools.partial(training.crop_flip, padding=2, flip=False),
}  # fmt: skip


def train(
    name: str, backbone: nn.Module, inputs: Tensor, labels: Tensor, *, members: int, seed: int = 0,
    histories: list[training.History] | None = None, **settings: Any,
) -> Ensemble:  # fmt: skip
    """The trained ensemble of a method: made, fitted and finished.

    settings: of `training.fit`, and the method's own, as `make` and `finish` of METHODS take them: rank=4. Member m
    depends on (seed, m) alone, but for "snapshot", whose members follow each other, and for those that train weights
    together: "batch", "masksembles", "mimo" and "film". histories: receives that of every fit.

    Raises ValueError for an unknown method, and what its parts raise.
    """
    one_of("method", name, METHODS)
    method, known = METHODS[name], inspect.signature(training.fit).parameters
    fitted: dict[str, Any] = {
        **FIT,
        **method.fit,
        **{key: value for key, value in settings.items() if key in known},
    }
    options = {key: value for key, value in settings.items() if key not in known}

    def fit(ensemble: Ensemble, cycle: int = 0, **other: Any) -> Ensemble:
        later: dict[str, Any] = (
            {"epochs": max(1, fitted["epochs"] // members), "warmup": 0}
            if cycle
            else {}
        )
        history = training.fit(
            ensemble,
            inputs,
            labels,
            seed=seed + 1000 * cycle,
            **(fitted | later | other),
        )
        if histories is not None:
            histories.append(history)
        return ensemble

    made = method.make(backbone, members, seed, **options).to(
        next(backbone.parameters()).device
    )
    return method.finish(fit(made), Task(inputs, labels, members, seed, fit), **options)


class Task(NamedTuple):
    """What a method may need once its network is trained."""

    inputs: Tensor
    labels: Tensor
    members: int
    seed: int
    fit: Callable[
        ..., Ensemble
    ]  # trains on; from cycle 1 on it is shorter; further settings replace those of the run


def fresh(backbone: nn.Module) -> nn.Module:
    """A copy of the backbone whose classifier, its last linear layer, is drawn from torch's global seed."""
    model: Any = copy.deepcopy(backbone)
    model.get_submodule(models.classifier(model)).reset_parameters()
    return model


def untrained(backbone: nn.Module, seed: int = 0) -> nn.Module:
    """The same architecture with random weights: what a method can do without pretraining."""
    model, drawn = copy.deepcopy(backbone), set()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for part in model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()  # type: ignore[operator]
                drawn.update(part.parameters())
        for p in (
            p for p in model.parameters() if p not in drawn
        ):  # class token and positions
            nn.init.normal_(p, std=0.02)
    return model


def backbone(name: str, task: data.Dataset) -> nn.Module:
    """The pretrained network for the inputs and classes of `task`; its classifier is new.

    name: a checkpoint of transformers, by name or folder; empty: `models.embedded()`, for grey images of 28 x 28, and
        for texts `models.minilm()`. For sounds it is an audio spectrogram transformer.
    """
    classes = len(task.classes)
    if isinstance(task.inputs, list):
        return models.from_pretrained(name or models.minilm(), classes, task="text")
    if not name:
        return models.embedded(classes)
    if "waves" in task.about:
        network = models.from_pretrained(name, classes, task="sound")
        return nn.Sequential(
            models.LogMel(network.config.max_length, data.LOG_MEL), network
        )  # type: ignore
    network, half = models.from_pretrained(name, classes), [0.5] * task.inputs.shape[1]
    config: Any = network.config
    size = config.image_size  # checkpoints of ViT scale images to -1 ... 1
    return nn.Sequential(
        nn.Upsample(size=size, mode="bilinear"), models.Standardize(half, half), network
    )


def suited(name: str, *sets: data.Dataset) -> list[data.Dataset]:
    """The sets as `backbone(name, sets[0])` takes them: images of the first one's size and channels; texts as they are.

    Images for the embedded backbone become grey and 28 x 28. Raises TypeError for texts among images, ValueError for
    images of another shape where the first ones are not square.
    """
    x = sets[0].inputs
    if isinstance(x, list):
        if images := [
            items.name for items in sets if not isinstance(items.inputs, list)
        ]:
            raise TypeError(
                f"{sets[0].name} holds text, but {', '.join(images)} images; take sets of one kind"
            )
        return list(sets)
    channels, height, width = x.shape[1:] if name else (1, 28, 28)
    if height == width:
        return [items.resize(width, channels) for items in sets]
    for items in sets:
        shape = [] if isinstance(items.inputs, list) else list(items.inputs.shape[1:])
        if shape != list(x.shape[1:]):
            raise ValueError(
                f"{items.name} has images {shape} and {sets[0].name} {list(x.shape[1:])}: only square ones are resized"
            )
    return list(sets)


def encode(network: Any, *sets: data.Dataset, longest: int = 64) -> list[Tensor]:
    """What the network is given: images as they are, of texts the ids of the first `longest` tokens, all as wide."""
    if not isinstance(sets[0].inputs, list):
        return [items.inputs for items in sets if isinstance(items.inputs, Tensor)]
    ids = network.encode(
        [text for items in sets for text in items.inputs], min(longest, network.longest)
    )
    return list(ids.split([len(items) for items in sets]))


def reader(name: str, task: data.Dataset) -> Callable[[data.Dataset], data.Dataset]:
    """How small networks read sets like `task`: images as they are, of texts what a frozen `backbone` says of them."""
    if not isinstance(task.inputs, list):
        return lambda items: items
    encoder: Any = backbone(name, task)
    encoder.classifier = nn.Identity()
    return lambda items: replace(
        items, inputs=training.predict(encoder, encode(encoder, items)[0])[0]
    )


def numbers(ensemble: Ensemble) -> int:
    """How many numbers were trained and must be stored; of MC dropout, which freezes its network, all."""
    own = [p.numel() for p in ensemble.parameters() if p.requires_grad]
    return sum(own) or sum(p.numel() for p in ensemble.parameters())


def _deep(backbone: nn.Module, members: int, seed: int) -> Ensemble:
    return ensembles.deep(lambda: fresh(backbone), members, seed)


def _single(backbone: nn.Module, members: int, seed: int) -> Ensemble:
    return _deep(backbone, 1, seed)


def _one(
    check: Callable[[nn.Module, int], object] = lambda *_: None,
) -> Callable[..., Ensemble]:
    """One network to be trained; `check` raises at once for a backbone that `finish` could not take."""

    def make(
        backbone: nn.Module, members: int, seed: int, **of_finish: Any
    ) -> Ensemble:
        check(backbone, members)
        return _deep(backbone, 1, seed)

    return make


def _implicit(make: Callable[..., Ensemble], **default: Any) -> Callable[..., Ensemble]:
    return lambda backbone, members, seed, **options: make(
        backbone, members, seed=seed, **(default | options)
    )


def _trained(make: Callable[..., Ensemble], **default: Any) -> Callable[..., Ensemble]:
    """Of methods that train the whole network: its classifier is new, drawn as that of the single network."""

    def made(backbone: nn.Module, members: int, seed: int, **options: Any) -> Ensemble:
        with torch.random.fork_rng():
            torch.manual_seed(ensembles.member_seed(seed, 0, "weights"))
            return make(fresh(backbone), members, seed=seed, **(default | options))

    return made


def _lora_single(
    backbone: nn.Module, members: int, seed: int, rank: int = 8, gain: float = 4.0
) -> Ensemble:
    return ensembles.lora(backbone, 1, rank * members, gain=gain, seed=seed)


Kind = Literal["features", "attention"]


def _dropping(
    backbone: nn.Module,
    members: int,
    seed: int,
    p: float = 0.2,
    kind: Kind = "features",
) -> Ensemble:
    """One network that drops in training what its members will drop."""
    return ensembles.deep(
        lambda: ensembles.place_dropout(fresh(backbone), lambda: nn.Dropout(p), kind),
        1,
        seed,
    )


def _dropped(
    trained: Ensemble, task: Task, p: float = 0.2, kind: Kind = "features"
) -> Ensemble:
    return ensembles.dropout(
        trained.member(0), task.members, p, kind=kind, seed=task.seed
    )


_dropping_keys, _dropped_keys = (
    functools.partial(part, kind="attention") for part in (_dropping, _dropped)
)


def _snapshots(trained: Ensemble, task: Task) -> Ensemble:
    """The trained network, and its states after further, shorter cycles."""
    cycle = lambda one, number: task.fit(one, number) if number else None  # noqa: E731
    return ensembles.snapshot(lambda: trained.member(0), task.members, cycle, task.seed)


def _one_lora(
    backbone: nn.Module,
    members: int,
    seed: int,
    rank: int = 8,
    gain: float = 4.0,
    prior_variance: float = 0.0,
) -> Ensemble:
    return ensembles.lora(backbone, 1, rank, gain=gain, seed=seed)


def _laplace(
    trained: Ensemble, task: Task, prior_variance: float = 1e-3, **of_make: Any
) -> Ensemble:
    settings: dict[str, Any] = {"prior_variance": prior_variance, "seed": task.seed}
    return ensembles.laplace_lora(trained, task.inputs, task.members, **settings)


def _masks(
    trained: Ensemble,
    task: Task,
    steps: int = 120,
    diversity: float = 2.0,
    std: float = 0.5,
) -> Ensemble:
    """Members within the trained network, by masks that are found on the same data and hardened."""
    found = extraction.masks(trained.member(0), task.members, std=std, seed=task.seed)
    how: dict[str, Any] = {
        "steps": steps,
        "diversity": diversity,
        "batch_size": 16,
        "seed": task.seed,
    }
    extraction.fit_masks(found, task.inputs, task.labels, progress=False, **how)
    return found.harden()


def _tiles(trained: Ensemble, task: Task) -> Ensemble:
    return _tiled(trained.member(0), task.members)


def _tiled(network: nn.Module, members: int) -> Ensemble:
    if (size := math.isqrt(members)) ** 2 != members:
        raise ValueError(
            f"tiles lie in a square: members must be 1, 4, 9, ..., got {members}"
        )
    return extraction.tiles(network, size)


def _hydra(
    trained: Ensemble, task: Task, share: float = 1 / 3, last: int | None = None
) -> Ensemble:
    """A `share` of the heads removed, drawn for each member from the lower 70 % by Taylor scores; trained on and fused.

    Members of one ranking are the paper's pruning seeds (B.5), which removes 48 heads of 144 among the first 100.
    last: how many layers train on by the paper's recipe (HYDRA_D2); None: all, as the network was trained.
    """
    network = trained.member(0)
    total = sum(heads.count_heads(network))
    ranking = heads.taylor_heads(
        network, task.inputs, task.labels, round(0.7 * total), scope="model"
    )
    drawn = heads.sample_heads(
        ranking, round(share * total), task.members, seed=task.seed
    )
    pruned, how = (
        [heads.prune(network, gone) for gone in drawn],
        {} if last is None else HYDRA_D2,
    )
    members = pruned if last is None else [heads.only_last(net, last) for net in pruned]
    return heads.fuse(task.fit(ensembles.from_members(members), 1, **how)).eval()


def _as_is(trained: Ensemble, task: Task, **of_make: Any) -> Ensemble:
    return trained


class Method(NamedTuple):
    """One way to turn a pretrained network, the backbone, into an ensemble."""

    label: str  # in tables and legends
    color: str
    marker: str
    make: Callable[..., Ensemble]  # (backbone, members, seed, **options) -> untrained
    needs: frozenset[str]  # of the backbone: as the names below say
    fit: Mapping[str, Any] = {}  # settings of training.fit, where they are not FIT's
    finish: Callable[..., Ensemble] = _as_is  # (trained, task, **options)

    @property
    def look(self) -> dict[str, str]:
        """How its line is drawn: `plots.curve(x, y, **METHODS["lora"].look)`."""
        return {"label": self.label, "color": self.color, "marker": self.marker}


_ANY, _LINEAR, _LEARNED = (
    frozenset(),
    frozenset({"linear layers"}),
    frozenset({"linear layers", "pretraining"}),
)
_LORA, _PLUS = (
    _implicit(ensembles.lora, gain=4.0),
    _implicit(ensembles.batch, additive=True),
)
_ATTENTION = frozenset({"attention"})
_LONG = {"epochs": 30}  # its members begin at random
_SVE = _implicit(ensembles.singular_value)
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
    "dropkey": Method(
        "DropKey", "#8C564B", "v", _dropping_keys, _ATTENTION, {}, _dropped_keys
    ),
    "snapshot": Method(
        "snapshot ensemble", "#949494", "D", _one(), _ANY, {}, _snapshots
    ),
    "batch": Method(
        "BatchEnsemble",
        "#CC78BC",
        "P",
        _implicit(ensembles.batch),
        _LINEAR,
        {"lr": 0.002},
    ),
    "batch_additive": Method(
        "BatchEnsemble++", "#FBAFE4", "p", _PLUS, _LEARNED, {"lr": 0.016}
    ),
    "masksembles": Method(
        "Masksembles", "#ECE133", "d", _trained(ensembles.masksembles), _LINEAR
    ),
    "film": Method(
        "FiLM-Ensemble",
        "#DE8F05",
        "H",
        _trained(ensembles.film),
        frozenset({"normalisation"}),
    ),
    "mimo": Method(
        "MIMO", "#F0A3FF", "*", _implicit(ensembles.mimo), _LINEAR, {"lr": 0.002}
    ),
    "packed": Method(
        "Packed-Ensemble", "#7B3294", "<", _implicit(ensembles.packed), _LINEAR, _LONG
    ),
    "deep": Method("explicit ensemble", "#D55E00", "s", _deep, _ANY),
    "lora": Method("LoRA-Ensemble", "#029E73", "X", _LORA, _LEARNED, {"lr": 0.004}),
    "laplace_lora": Method(
        "Laplace-LoRA", "#66C2A5", "X", _one_lora, _LEARNED, {"lr": 0.004}, _laplace
    ),
    "singular_value": Method(
        "singular value ensemble", "#0173B2", "h", _SVE, _LEARNED, {"lr": 0.03}
    ),
    "masks": Method(
        "mask extraction", "#B2DF8A", ">", _one(extraction.masks), _LINEAR, {}, _masks
    ),
    "tiles": Method(
        "tiles",
        "#A6761D",
        "8",
        _one(_tiled),
        frozenset({"a map or patches"}),
        {},
        _tiles,
    ),
    "hydra": Method(
        "Hydra (Taylor)",
        "#E7298A",
        "h",
        _one(lambda net, _: heads.count_heads(net)),
        _ATTENTION,
        {},
        _hydra,
    ),
}


door.room(__name__)
