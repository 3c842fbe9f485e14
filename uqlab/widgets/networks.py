"""Explorers of the inside of networks: masks and heads."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.colors import to_hex
from torch import Tensor

from uqlab import plots
from uqlab.analysis.representations import embed
from uqlab.heads import separation
from uqlab.uncertainty import Decomposition
from uqlab.widgets.frames import Control, explore
from uqlab.widgets.hand import Hand, spread

Kinds = Mapping[str, Decomposition]  # "id" and "ood"
Cut = tuple[float, float | None]  # diversity weight, threshold of masks


def masks(
    soft: Mapping[float, Mapping[str, Float[Tensor, "members units"]]],
    parts: Mapping[Cut, Kinds],
    accuracy: Mapping[Cut, float],
    trained: Kinds,
    weight: float,
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
        The weight that is shown first; masks are rounded at 0.5 at first.
    """
    figure, (left, right) = plots.figure(2, height=2.6)
    left.set_xlabel("unit, sorted")
    right.set_xscale("symlog", linthresh=1e-3)
    right.set_xlim(0, _largest([trained, *parts.values()]))

    def draw(weight, threshold, mask):
        plots.mask_map(_rounded(soft[weight][mask], threshold), ax=left).set_title(mask)
        for kind, d in parts[weight, threshold].items():
            look: dict[str, Any] = {"linestyle": plots.LINES[kind], "ax": right}
            plots.ecdf(trained[kind].epistemic, color=plots.NEUTRAL, **look)
            plots.ecdf(d.epistemic, **look)

    def seen(weight, threshold, mask):
        kept = _rounded(soft[weight][mask], threshold).mean()
        cut = weight, threshold
        return _mask_text(kept, trained, parts[cut], accuracy[cut])

    return explore(draw, _mask_controls(soft, parts, weight), seen, figure)


def _mask_controls(soft: Mapping, parts: Mapping, weight: float) -> dict[str, Control]:
    cuts = {"soft" if cut is None else f"{cut:g}": cut for _, cut in parts}
    weights = list(soft)
    return {
        "weight": Control("diversity weight", weights, weights.index(weight)),
        "threshold": Control("masks rounded at", [*cuts.items()], [*cuts].index("0.5")),
        "mask": Control("mask", list(soft[weight])),
    }


def _rounded(mask: Tensor, threshold: float | None) -> Tensor:
    return mask if threshold is None else (mask > threshold).float()


def _largest(every: list[Kinds]) -> float:
    return max(d.epistemic.max().item() for kinds in every for d in kinds.values())


def _mask_text(kept: Tensor, trained: Kinds, extracted: Kinds, right: float) -> str:
    means = []
    for kind, d in extracted.items():
        before = trained[kind].epistemic.mean()
        means.append(f"{d.epistemic.mean():.4f} ({before:.4f}) on {kind.upper()}")
    return (
        f"Left: a member keeps {100 * kept:.0f} % of these units. Right, solid ID, "
        "dashed OOD: mutual information of the extracted ensemble (blue) and the "
        f"trained one (grey, in brackets), on average {' and '.join(means)} inputs, "
        "nats. "
        f"Accuracy of the extracted {100 * right:.1f} %."
    )


def head_map(
    values: Float[Tensor, "layers heads"],
    order: Sequence[Sequence[int]],
    features: Callable[..., Tensor],
    *,
    known: str,
    others: Sequence[str],
    removed: Sequence[int] = (0,),
    path: Mapping[str, Sequence[float]],
    alone: Mapping[Any, Any],
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
    values = values.double().cpu()
    colors: Any = plots.head_colors(values).to_rgba(values.numpy())

    sets = [known, *others]

    def cell(*head):
        return {"value": values[head].item(), "color": to_hex(colors[head])}

    def cloud(gone, *head):
        return _cloud([features(gone, *head, name) for name in sets], shown)

    data = {
        "cells": _table(values, cell),
        "order": list(order),
        "removed": list(removed),
        "known": known,
        "others": sets[1:],
        "path": {name: list(along) for name, along in path.items()},
        "alone": {name: _table(values, partial(_single, alone, name)) for name in path},
        "clouds": [_table(values, partial(cloud, gone)) for gone in removed],
    }
    return Hand("map", data)


def _single(alone: Mapping[Any, Any], name: str, *head: int) -> float:
    return alone[head][name]


def _table(values: Tensor, of: Callable[..., Any]) -> list[list[Any]]:
    """Return something of each head, [layers][heads]."""
    layers, heads = values.shape
    rows = []
    for layer in range(layers):
        rows.append([of(layer, head) for head in range(heads)])
    return rows


def _cloud(sets: list[Tensor], shown: int) -> dict[str, list[Any]]:
    """Return points of sets in their principal plane, and how far apart they are."""
    sets = [x.cpu() for x in sets]
    apart = [separation(sets[0][:, None], other[:, None]) for other in sets[1:]]
    xy = embed(torch.cat(sets), "pca")
    xy = (99 * xy / xy.abs().max()).round().int().split([len(x) for x in sets])
    return {
        "points": [x[spread(len(x), shown)].flatten().tolist() for x in xy],
        "apart": [list(map(float, distances)) for distances in apart],
    }
