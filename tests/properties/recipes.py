"""A valid call of every public name in the rooms that have the door: what each parameter is given, by its name.

Everything is made anew for every call, so that what a call changes is seen and harms no other.
"""

import importlib
import inspect
from typing import Any

import torch
from torch import nn

from uqlab import ensembles, models

ROOMS = (  # those that have the door
    "diversity", "gradients", "metrics", "published", "rivals", "training", "uncertainty",
)  # fmt: skip

# Names that are no calls, or that nobody calls with values of their own, and why.
NO_CALLS = {
    "gradients.ClassWeight": "a type",
    "published.Table": "made of published.yaml", "published.Paper": "made of published.yaml",
    "training.Workers": "made by fit", "training.make_step": "made by fit",
    "uncertainty.mean_divergence": "a step of decompose", "uncertainty.batch_chunks": "a step of decompose",
}  # fmt: skip


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def ensemble() -> ensembles.Ensemble:
    return ensembles.deep(lambda: models.mlp(8, (6,), 4, dropout=0.0), 2)


def labels() -> torch.Tensor:
    return torch.arange(6) % 4


def generators(count: int = 2) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


def mean(x: Any) -> torch.Tensor:
    return torch.as_tensor(x).double().mean()


def network() -> nn.Module:
    return models.mlp(8, (6,), 4, dropout=0.0)


# A value for every parameter of that name, unless the function below says otherwise.
COMMON: dict[str, Any] = {
    "logits": lambda: draw(3, 6, 4), "labels": labels, "scores": lambda: draw(6), "ensemble": ensemble,
    "id_scores": lambda: draw(6), "ood_scores": lambda: draw(5, seed=1) + 1, "inputs": lambda: draw(6, 8),
    "generators": generators, "model": network,
}  # fmt: skip

# What a function is given besides, by "room.name"; it may be called with `None` for what it does not take.
OWN: dict[str, dict[str, Any]] = {
    "uncertainty.entropy": {"logits": lambda: draw(6, 4)},
    "uncertainty.group_members": {"logits": lambda: draw(4, 6, 3), "size": lambda: 2},
    "uncertainty.decompose": {"weights": lambda: positive(3)},
    "uncertainty.decompose_score": {"rule": lambda: "brier", "weights": lambda: positive(3)},
    "uncertainty.decompose_groups": {"logits": lambda: draw(2, 2, 6, 4)},
    "uncertainty.decompose_gaussian": {"means": lambda: draw(3, 6), "variances": lambda: positive(3, 6)},
    "metrics.quality": {"runs": lambda: [draw(3, 6, 4)]},
    "metrics.auroc_interval": {"repeats": lambda: 5, "than": lambda: (draw(6, seed=2), draw(5, seed=3))},
    "metrics.by_quantile": {"values": lambda: positive(6), "quantiles": lambda: (0.5, 1.0)},
    "metrics.bootstrap": {"statistic": lambda: mean, "arrays": lambda: positive(6), "repeats": lambda: 5},
    "metrics.interval": {"runs": lambda: [draw(3, 6, 4)], "repeats": lambda: 5},
    "diversity.mean_pair": {"pairs": lambda: positive(3, 3)},
    "diversity.member_weights": {"name": lambda: "1"},
    "rivals.accuracies": {"train": lambda: draw(12, 3), "labels": lambda: torch.arange(12) % 2,
                          "test": lambda: draw(4, 3), "test_labels": lambda: torch.arange(4) % 2},
    "rivals.ood_scores": {"train": lambda: draw(12, 3), "inputs": lambda: draw(4, 3)},
    "rivals.aurocs": {"train": lambda: draw(12, 3), "test": lambda: draw(4, 3), "others": lambda: {"a": draw(4, 3)}},
    "rivals.shrunk_root": {"values": lambda: draw(6, 3)},
    "rivals.whitened": {"values": lambda: draw(6, 3), "root": lambda: torch.eye(3)},
    "gradients.layer_shares": {"norms": lambda: positive(2, 6, 4), "log_p": lambda: draw(6, 4).log_softmax(1)},
    "gradients.reduce_norms": {"norms": lambda: positive(2, 6, 4), "log_p": lambda: draw(6, 4).log_softmax(1)},
    "gradients.regrad": {"perturbations": lambda: 1},
    "published.differs": {"settings": lambda: {"members": 5}, "parameters": lambda: {"members": 4}},
    "training.arithmetic": {"precision": lambda: "float32", "where": lambda: torch.device("cpu")},
    "training.crop_flip": {"x": lambda: positive(2, 3, 1, 8, 8)},
    "training.cross_entropy": {"logits": lambda: draw(2, 6, 4), "labels": lambda: torch.zeros(2, 6).long()},
    "training.device": {"name": lambda: "cpu"},
    "training.fit": {"epochs": lambda: 1, "lr": lambda: 0.1, "class_weights": lambda: torch.ones(4)},
}  # fmt: skip

# Parameters that a call may change, because that is its purpose.
CHANGED = {"training.fit": {"ensemble"}, "training.crop_flip": {"generators"}}


def public() -> dict[str, Any]:
    """Every public name that can be called, "room.name" -> the thing, found by looking into the rooms."""
    found = {}
    for room in ROOMS:
        module = importlib.import_module(f"uqlab.{room}")
        own = [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", own):
            thing = getattr(module, name)
            result = inspect.isclass(thing) and (issubclass(thing, tuple) or name.endswith("History"))
            if callable(thing) and not result:
                found[f"{room}.{name}"] = thing
    return found


def valid(name: str, thing: Any) -> dict[str, Any]:
    """The arguments of a valid call, made anew."""
    makers = COMMON | (OWN.get(name) or {})
    wanted = inspect.signature(thing).parameters
    named = {
        p: makers[p]()
        for p in wanted
        if p in makers and (wanted[p].default is inspect._empty or p in OWN.get(name, {}))
    }
    lacking = [n for n, p in wanted.items() if p.default is inspect._empty and p.kind < 2 and n not in named]
    assert not lacking, f"{name} needs {lacking}: give them in OWN"
    return named | ({"progress": False} if "progress" in wanted else {})
