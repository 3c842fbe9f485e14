"""Explorers of the inside of networks: masks, gradients, heads."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import Tensor

from uqlab import metrics, plots
from uqlab.analysis.representations import embed
from uqlab.gradients import ClassWeight, layer_shares, reduce_norms
from uqlab.heads import separation
from uqlab.uncertainty import Decomposition
from uqlab.widgets.frames import Control, explore
from uqlab.widgets.hand import Hand, spread

Kinds = Mapping[str, Decomposition]  # "id" and "ood"
Cut = tuple[float, float | None]  # diversity weight, threshold of masks
Pair = tuple[Tensor, ...]  # of ID and of OOD inputs
Norms = tuple[Float[Tensor, "layers samples classes"], Float[Tensor, "samples classes"]]
Head = tuple[int, int]  # its layer, and its place there
Features = Callable[[int, int, int, str], Float[Tensor, "inputs width"]]
CLASS_WEIGHTS: list[tuple[str, ClassWeight]] = [
    ("square root of p", "sqrt_p"),
    ("p", "p"),
    ("uniform", "uniform"),
    ("the predicted class", "predicted"),
]
DEPTHS = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
BLUE: dict[str, Any] = {"color": plots.EPISTEMIC}


def masks(
    soft: Mapping[float, Mapping[str, Float[Tensor, "members units"]]],
    parts: Mapping[Cut, Kinds],
    accuracy: Mapping[Cut, float],
    trained: Kinds,
    weight: float | None = None,
) -> Hand:
    """Show masks, and the mutual information of the ensemble that they extract.

    Parameters
    ----------
    soft
        Diversity weight -> name of a mask -> soft mask [members, units].
    parts
        (weight, threshold) -> decompositions of "id" and "ood" inputs; threshold None
        means soft masks.
    accuracy
        (weight, threshold) -> share of correct predictions.
    trained
        Decompositions of the trained ensemble.
    weight
        Shown first.
    """
    figure, (left, right) = plots.figure(2, height=2.6)
    left.set_xlabel("unit, sorted")
    right.set_xscale("symlog", linthresh=1e-3)
    right.set_xlim(0, max(map(_largest, (trained, *parts.values()))))

    def rounded(weight, threshold, mask):
        values = soft[weight][mask]
        return values if threshold is None else (values > threshold).float()

    def draw(mask, **view):
        plots.mask_map(rounded(mask=mask, **view), ax=left).set_title(mask)
        _draw_kinds(trained, parts[tuple(view.values())], right)

    def seen(mask, **view):
        at = tuple(view.values())
        means = _means(trained, parts[at])
        return _mask_text(rounded(mask=mask, **view), means, accuracy[at])

    return explore(draw, _mask_controls(soft, parts, weight), seen, figure)


def _mask_controls(
    by_weight: Mapping[float, Any], parts: Iterable[Cut], weight: float | None
) -> dict[str, Control]:
    weights = list(by_weight)
    cuts = {"soft" if c is None else f"{c:g}": c for _, c in parts}
    at = 0 if weight is None else weights.index(weight)
    cut = list(cuts).index("0.5") if "0.5" in cuts else 0
    return {
        "weight": Control("diversity weight", weights, at),
        "threshold": Control("masks rounded at", list(cuts.items()), cut),
        "mask": Control("mask", list(by_weight[weights[at]])),
    }


def _mask_text(mask: Tensor, means: str, accuracy: float) -> str:
    return (
        f"Left: a member keeps {100 * mask.mean():.0f} % of these units. Right, solid "
        "ID, dashed OOD: mutual information of the extracted ensemble (blue) and the "
        f"trained one (grey, in brackets), on average {means} inputs, nats. "
        f"Accuracy of the extracted {100 * accuracy:.1f} %."
    )


def _draw_kinds(trained: Kinds, extracted: Kinds, ax: Axes) -> None:
    for kind, d in extracted.items():
        look: dict[str, Any] = {"linestyle": plots.LINES[kind], "ax": ax}
        plots.ecdf(trained[kind].epistemic, color=plots.NEUTRAL, **look)
        plots.ecdf(d.epistemic, **look)


def _largest(kinds: Kinds) -> float:
    return max(d.epistemic.max().item() for d in kinds.values())


def _means(trained: Kinds, extracted: Kinds) -> str:
    means = []
    for kind, d in extracted.items():
        before = trained[kind].epistemic.mean()
        means.append(f"{d.epistemic.mean():.4f} ({before:.4f}) on {kind.upper()}")
    return " and ".join(means)


def gradients(
    norms: Mapping[float, Norms],
    inside: int,
    reference: Float[Tensor, " samples"],
    *,
    depth: float = 3.0,
) -> Hand:
    """Show a gradient score of any depth weight, class weight and noise.

    Parameters
    ----------
    norms
        Noise sigma -> norms [layers, samples, classes] and log p [samples, classes] of
        `gradients.gradient_norms`.
    inside
        How many samples, the first, are in-distribution; the others are OOD.
    reference
        The scores to compare with, [samples].
    depth
        Shown first.
    """
    layers = len(next(iter(norms.values()))[0])
    plain = reference.cpu().tensor_split([inside])
    level = metrics.ood_detection(*plain).auroc
    figure, axes = _score_axes(layers, plain)

    @functools.lru_cache(1)
    def scored(depth, weight, sigma):
        scores, shares = _scored(norms[sigma], weight, depth)
        return scores.tensor_split([inside]), shares

    def draw(**values):
        _draw_scores(*scored(**values), axes)

    def seen(**values):
        scores, shares = scored(**values)
        return _score_text(metrics.ood_detection(*scores).auroc, level, shares)

    depths = sorted({*DEPTHS, depth})
    controls = {
        "depth": Control("depth weight", depths, depths.index(depth)),
        "weight": Control("class weight", CLASS_WEIGHTS),
        "sigma": Control("noise (input units)", list(norms)),
    }
    return explore(draw, controls, seen, figure)


def _score_text(auroc: float, level: float, shares: Tensor) -> str:
    upside = " Below 0.5: the sign is wrong." if auroc < 0.5 else ""
    return (
        f"One network: OOD inputs rank above ID inputs in {100 * auroc:.1f} % of "
        f"all pairs by its gradients, in {100 * level:.1f} % by its entropy.{upside} "
        f"The last of {len(shares)} layers gives {100 * shares[-1]:.0f} % of the score."
    )


def _scored(norms: Any, weight: ClassWeight, depth: float) -> tuple[Tensor, Tensor]:
    """Return the scores, and each layer's share of them on average over samples."""
    scores = reduce_norms(*norms, class_weight=weight, depth=depth).cpu()
    layers = layer_shares(*norms, class_weight=weight).cpu()
    depths = depth * torch.linspace(0, 1, len(layers), dtype=layers.dtype)
    parts = layers * depths.softmax(0)[:, None]
    return scores, (parts / parts.sum(0).clamp(min=1e-300)).mean(1)


def _draw_scores(both: Pair, shares: Tensor, axes: Sequence[Axes]) -> None:
    left, right, third = axes
    middle = torch.cat(both).median()  # a unit for scores of any scale
    for scores, kind in zip(both, ("id", "ood"), strict=True):
        plots.ecdf(scores / middle, linestyle=plots.LINES[kind], ax=left)
    left.set_xlabel("score / its median")
    plots.roc(*both, ax=right)
    third.bar(range(1, len(shares) + 1), shares.numpy(), **BLUE)


def _score_axes(layers: int, plain: Pair) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure for scores, ROC and layers, in which the reference's ROC is."""
    shape: dict[str, Any] = {"width_ratios": [1.1, 1, 0.7]}
    figure, (left, right, third) = plots.figure(3, height=2.7, width=7.6, **shape)
    third.set(xlabel="layer", xticks=range(1, layers + 1), xlim=(0.4, layers + 0.6))
    third.set(ylabel="share of the score", ylim=(0, 1), title="where it comes from")
    left.set(xscale="log", xlim=(1e-2, 1e2))
    for kind in ("id", "ood"):
        left.plot([], [], linestyle=plots.LINES[kind], label=kind.upper(), **BLUE)
    left.legend(loc="upper left")
    plots.roc(*plain, color=plots.TOTAL, label="entropy", ax=right)
    right.plot([], [], label="gradients", **BLUE)
    right.legend(loc="lower right")
    return figure, (left, right, third)


def head_map(
    values: Float[Tensor, "layers heads"],
    order: Sequence[Head],
    features: Features,
    *,
    known: str,
    others: Sequence[str],
    removed: Sequence[int] = (0,),
    path: Mapping[str, Sequence[float]] | None = None,
    alone: Mapping[Head, Mapping[str, float]] | None = None,
    shown: int = 60,
) -> Hand:
    """Show attention heads, the network without some of them, and a head's features.

    `state` has gone (the number of removed heads), layer, head, other and apart, as of
    `heads.separation`.

    Parameters
    ----------
    values
        Shown as colour, [layers, heads].
    order
        (layer, head) in the order of removal.
    features
        (number of removed heads, layer, head, set: `known` or one of `others`) -> that
        head's features of the set, [inputs, width].
    known, others
        The in-distribution set and the OOD sets.
    removed
        The numbers of removed heads to choose from.
    path
        Measure -> its value after the removal of 0, 1, ... heads.
    alone
        Head -> measure -> its value when only that head is removed.
    shown
        Points of each set, in the principal plane of all sets.
    """
    values = torch.as_tensor(values).double().cpu()
    path = path or {}
    sets = [known, *others]
    colors: Any = plots.head_colors(values).to_rgba(values.numpy())
    table = functools.partial(_table, *values.shape)
    data = {
        "cells": table(_cell, values, colors),
        "order": list(order),
        "removed": list(removed),
        "known": known,
        "others": list(others),
        "path": {name: list(map(float, along)) for name, along in path.items()},
        "alone": {name: table(_single, alone, name) for name in path if alone},
        "clouds": [table(_cloud, features, sets, shown, gone) for gone in removed],
    }
    return Hand("map", data)


def _table(layers: int, heads: int, value: Callable[..., Any], *of: Any) -> list[Any]:
    """Return the value of each head, [layers][heads]."""
    rows = []
    for layer in range(layers):
        rows.append([value(*of, layer, head) for head in range(heads)])
    return rows


def _cell(values: Tensor, colors: Any, *head: int) -> dict[str, Any]:
    return {"value": values[head].item(), "color": to_hex(colors[head])}


def _single(alone: Mapping[Any, Any], name: str, *head: int) -> float:
    return alone[head][name]


def _cloud(
    features: Callable[..., Tensor], names: list[str], shown: int, *place: int
) -> dict[str, list[Any]]:
    """Return points of all sets in their principal plane, and how far apart they are.

    `place` is (number of removed heads, layer, head).
    """
    sets = [features(*place, name).cpu() for name in names]
    apart = [separation(sets[0][:, None], other[:, None]) for other in sets[1:]]
    xy = embed(torch.cat(sets), "pca")
    xy = (99 * xy / xy.abs().max()).round().int().split([len(x) for x in sets])
    return {
        "points": [x[spread(len(x), shown)].flatten().tolist() for x in xy],
        "apart": [list(map(float, distances)) for distances in apart],
    }
