"""What a page's parameters may be: a name means the same on every page, so one table says it for all of them."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from uqlab.core.checks import at_least, one_of, within
from uqlab.core.door import MOST

# The least of a count, an interval, what there is to choose from, or a type; in a list: what each item of a list is, as
# many times as there must be different ones.
Rule = int | str | tuple | type | list

RULES: dict[str, Rule] = {
    **dict.fromkeys(("asked", "evaluated", "limit", "limit_ood", "seed", "shifted", "train_limit", "warmup"), 0),
    **dict.fromkeys(
        ("batch_size", "blind_draws", "draws", "ensemble_size", "epochs", "epochs_own", "epochs_tuned",
         "example_epochs", "grid_steps", "held_out", "jobs", "k", "laplace_members", "map_side", "mask_batch",
         "mask_steps", "passes", "patch", "perturbations", "quantiles", "rank", "ranked", "remove", "repeats",
         "resamples", "samples", "shuffles", "top", "tuned_steps"), 1,
    ),
    **dict.fromkeys(("folds", "groups", "mask_members", "members", "points", "splits"), 2),
    **dict.fromkeys(("gain", "lr", "lr_adapters", "lr_batch", "lr_sve", "mask_lr", "width"), "(0, inf)"),
    **dict.fromkeys(("decay_sve", "diversity", "init_std", "noise", "sigma", "weight_decay"), "[0, inf)"),
    **dict.fromkeys(("dropout", "momentum"), "[0, 1)"),
    **dict.fromkeys(("enough", "threshold"), "(0, 1]"),
    "depth": "(-inf, inf)", "level": "(0, 1)",
    "precision": ("float32", "bfloat16"), "schedule": ("constant", "cosine", "step"),
    "dropout_kind": ("features", "attention"), "embedding": ("pca", "umap", "tsne"),
    **dict.fromkeys(("augment", "falls", "mask_inputs", "tune_mlp"), bool),
    **dict.fromkeys(("grid", "own", "settings"), dict),
    **dict.fromkeys(
        ("ablations", "ambiguous", "backbone", "board", "by", "checkpoint", "chosen_on", "cost", "dataset", "device",
         "model", "output_dir", "over", "page", "page_profile", "prompt", "quality", "replicate", "root", "series",
         "shown", "study", "sweep", "trained", "unknown"), str,
    ),
    **{name: [1] for name in ("grid_samples", "milestones", "ranks", "removed", "sizes", "stages", "tile_sizes")},
    "seeds": [0, 0],
    **{name: ["(0, inf)"] for name in ("gains", "grid_widths", "input_std", "other_widths", "prior_variances")},
    "widths": ["(0, inf)"], "input_mean": ["(-inf, inf)"], "weights_swept": ["[0, inf)"],
    **{name: [str] for name in ("gradients", "methods", "ood", "near", "pretrained", "rivals", "scores", "weights")},
}  # fmt: skip
MAY_BE_EMPTY = (
    "gradients", "input_mean", "input_std", "methods", "milestones", "near", "rivals", "scores", "tile_sizes",
    "weights",
)  # fmt: skip
FEWEST: dict[str, int] = dict.fromkeys(
    ("limit", "train_limit"), 10
)  # unless 0 asks for all: fewer show nothing
MAY_REPEAT = ("input_mean", "input_std", "pretrained", "weights", "widths")
CALLED = {bool: "True or False", dict: "a dictionary", str: "text"}


def check(parameters: Mapping[str, Any], **rules: Rule) -> None:
    """Raise ValueError or TypeError, which names the parameter, unless every parameter of a page is legal.

    parameters: the page's `globals()`; names without a rule are none. rules: what holds on this page alone.
    """
    if not isinstance(parameters, Mapping):
        raise TypeError(
            f"parameters must be the page's globals(), got {type(parameters).__name__}"
        )
    for name, rule in (RULES | rules).items():
        if name in parameters and not isinstance(
            given := parameters[name], ModuleType
        ):  # `methods` is also a room
            _check(name, given, rule)


def _check(name: str, given: Any, rule: Rule) -> None:
    if isinstance(rule, list):
        if not isinstance(given, list | tuple | range):
            raise TypeError(f"{name} must be a list, got {given!r}")
        for i, each in enumerate(given):
            _check(f"{name}[{i}]", each, rule[0])
        if len({*given}) < len(given) and name not in MAY_REPEAT:
            raise ValueError(f"{name} must have no value twice, got {given!r}")
        if len({*given}) < len(rule) and (given or name not in MAY_BE_EMPTY):
            raise ValueError(
                f"{name} must have {len(rule)} different values or more, got {given!r}"
            )
    elif isinstance(rule, type):
        if not isinstance(given, rule):
            raise TypeError(f"{name} must be {CALLED[rule]}, got {given!r}")
    elif isinstance(rule, tuple):
        one_of(name, given, rule)
    elif isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"{name} must be a number, got {given!r}")
    elif isinstance(rule, str):
        within(name, given, rule)
    elif at_least(name, given, rule) > MOST and not name.startswith("seed"):
        raise ValueError(f"{name} must be at most {MOST:,}, got {given}")
    elif 0 < given < (fewest := FEWEST.get(name, 0)):
        raise ValueError(
            f"{name} must be at least {fewest}, or 0 where a page takes that for all, got {given}"
        )
