"""Explorers of the inside of networks: masks, singular vectors, gradients."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
import numpy as np
import torch
from jaxtyping import Float
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from torch import Tensor

from uqlab import metrics, plots
from uqlab.analysis.spectra import random_level
from uqlab.gradients import ClassWeight, layer_shares, reduce_norms
from uqlab.uncertainty import Decomposition
from uqlab.widgets.explorer import Explorer

Kinds = Mapping[str, Decomposition]  # "id" and "ood"


def masks(
    found: Mapping[float, Mapping[str, Float[Tensor, "members units"]]],
    parts: Mapping[tuple[float, float | None], Kinds],
    accuracy: Mapping[tuple[float, float | None], float],
    trained: Kinds,
    weight: float | None = None,
) -> Explorer:
    """Show masks, and the mutual information of the ensemble that they extract.

    Parameters
    ----------
    found
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
    kinds = [d for by_kind in (trained, *parts.values()) for d in by_kind.values()]
    right.set_xlim(0, max(d.epistemic.max().item() for d in kinds))

    def kept(weight: float, threshold: float | None, mask: str) -> Tensor:
        values = found[weight][mask]
        return values if threshold is None else (values > threshold).float()

    def draw(weight: float, threshold: float | None, mask: str) -> None:
        plots.mask_map(kept(weight, threshold, mask), ax=left).set_title(mask)
        for kind, d in parts[weight, threshold].items():
            look: dict[str, Any] = {"linestyle": plots.LINES[kind], "ax": right}
            plots.ecdf(trained[kind].epistemic, color=plots.NEUTRAL, **look)
            plots.ecdf(d.epistemic, **look)

    def seen(weight: float, threshold: float | None, mask: str) -> str:
        share = 100 * kept(weight, threshold, mask).mean()
        means = [
            f"{d.epistemic.mean():.4f} ({trained[kind].epistemic.mean():.4f}) on "
            f"{kind.upper()}"
            for kind, d in parts[weight, threshold].items()
        ]
        return (
            f"Left: a member keeps {share:.0f} % of these units. Right, solid ID, "
            "dashed OOD: mutual information of the extracted ensemble (blue) and the "
            f"trained one (grey, in brackets), on average {' and '.join(means)} "
            "inputs, nats. "
            f"Accuracy of the extracted {100 * accuracy[weight, threshold]:.1f} %."
        )

    first = next(iter(found)) if weight is None else weight
    weights = [(f"{w:g}", w) for w in found]
    cuts = {
        "soft" if threshold is None else f"{threshold:g}": threshold
        for _, threshold in parts
    }
    cut = cuts.get("0.5", next(iter(cuts.values())))
    controls = {
        "weight": ipywidgets.SelectionSlider(
            options=weights, value=first, description="diversity weight"
        ),
        "threshold": ipywidgets.ToggleButtons(
            options=list(cuts.items()), value=cut, description="masks rounded at"
        ),
        "mask": ipywidgets.Dropdown(options=list(found[first]), description="mask"),
    }
    return Explorer(draw, controls, seen, figure)


def spectra(
    before: Mapping[str, Float[Tensor, "out in"]],
    after: Mapping[str, Callable[[str], Float[Tensor, "members out in"]]],
    *,
    k: int = 10,
    threshold: float = 0.5,
    layer: str | None = None,
) -> Explorer:
    """Show singular vectors of a member against those before; intruders in red.

    Parameters
    ----------
    before
        Name of a layer -> its pretrained weight.
    after
        Name of a method -> its members' weights of a layer, as by
        `functools.partial(diversity.member_weights, ensemble)`.
    k, threshold
        As in `spectra.intruder_dimensions`.
    layer
        Shown first.
    """
    first = layer or next(iter(before))
    members = len(after[next(iter(after))](first))
    smallest = min(min(w.shape) for w in before.values())

    @functools.cache
    def old(name: str) -> tuple[Tensor, Tensor]:
        w = before[name].detach().cpu().double()
        return torch.linalg.svd(w, full_matrices=False)[:2]

    trained = functools.lru_cache(4)(lambda method, name: after[method](name))

    @functools.lru_cache(64)
    def compared(method: str, name: str, member: int) -> tuple[Tensor, Tensor]:
        w = trained(method, name)[member].detach().cpu().double()
        u, s, _ = torch.linalg.svd(w, full_matrices=False)
        return (u.T @ old(name)[0]).abs(), s  # |cos| [after, before], values

    def strange(values: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        cosines, s = compared(values["method"], values["name"], values["member"])
        cosines = cosines[: values["k"]]
        return cosines, s, cosines.amax(1) < values["threshold"]

    figure, (left, right) = plots.figure(2, height=3.0, width_ratios=[3.2, 1])
    shades = ScalarMappable(Normalize(0, 1), "viridis_r")
    bar = figure.colorbar(shades, ax=left, label="|cos|", pad=0.02)
    left.set(xlabel="rank of the direction before", ylim=(1, 0), yticks=[])
    left.set_ylabel("rank after training", labelpad=18)  # room for marks of intruders
    right.set(xlabel="singular value", ylim=(1, 0), yticks=[])
    right.plot([], [], color=plots.TOTAL, linestyle="--", label="before")
    right.plot([], [], color=plots.EPISTEMIC, label="after")
    right.legend(fontsize=7.5, loc="lower left", handlelength=1.2)

    def draw(**values: Any) -> None:
        cosines, s, intruder = strange(values)
        count, base = len(cosines), old(values["name"])[1]
        y = (np.arange(count) + 0.5) / count  # no ranks: the same axis for every k
        extent = (0.5, len(base) + 0.5, 1, 0)
        look: dict[str, Any] = {"cmap": "viridis_r", "vmin": 0, "vmax": 1}
        look |= {"aspect": "auto", "interpolation": "nearest"}
        left.imshow(cosines.numpy(), extent=extent, **look)
        outside: dict[str, Any] = {"transform": left.get_yaxis_transform()}
        outside["clip_on"] = False
        marks = [-0.015] * int(intruder.sum()), y[intruder.numpy()]
        left.plot(*marks, ">", color="#D62728", markersize=4, **outside)
        bar.ax.axhline(values["threshold"], color="#D62728", linewidth=2)
        outside |= {"ha": "right", "va": "center", "fontsize": 8}
        for rank in {1, count}:
            left.text(-0.03, y[rank - 1], str(rank), **outside)
        right.plot(base[:count].numpy(), y, color=plots.TOTAL, linestyle="--")
        right.plot(s[:count].numpy(), y, color=plots.EPISTEMIC)
        right.set_xlim(0, math.ceil(1.05 * max(base[0], s[0]).item()))

    def seen(**values: Any) -> str:
        cosines, s, intruder = strange(values)
        squared = s[: len(cosines)].square()
        level = random_level(len(old(values["name"])[0]), cosines.shape[1])
        return (
            f"{int(intruder.sum())} of {len(cosines)} leading directions are intruders "
            f"(red), with {100 * (squared * intruder).sum() / squared.sum():.0f} % of "
            "the energy: no old direction is like them. A random direction would have "
            f"a largest |cos| of {level:.2f} on average."
        )

    controls = {
        "method": ipywidgets.Dropdown(options=list(after), description="method"),
        "name": ipywidgets.Dropdown(
            options=list(before), value=first, description="layer"
        ),
        "member": ipywidgets.IntSlider(0, 0, members - 1, description="member"),
        "k": ipywidgets.IntSlider(k, 1, smallest, description="directions k"),
        "threshold": ipywidgets.FloatSlider(
            threshold, min=0.05, max=1, step=0.05, description="threshold |cos|"
        ),
    }
    return Explorer(draw, controls, seen, figure)


def gradients(
    norms: Mapping[
        float,
        tuple[
            Float[Tensor, "layers samples classes"], Float[Tensor, "samples classes"]
        ],
    ],
    inside: int,
    reference: Float[Tensor, " samples"],
    *,
    depth: float = 3.0,
) -> Explorer:
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

    def score(depth: float, weight: ClassWeight, sigma: float) -> tuple[Tensor, Tensor]:
        values = reduce_norms(*norms[sigma], class_weight=weight, depth=depth).cpu()
        return values[:inside], values[inside:]

    plain = reference[:inside].cpu(), reference[inside:].cpu()
    level = metrics.ood_detection(*plain).auroc

    def shares(depth: float, weight: ClassWeight, sigma: float) -> Tensor:
        layers = layer_shares(*norms[sigma], class_weight=weight).cpu()
        depths = depth * torch.linspace(0, 1, len(layers), dtype=layers.dtype)
        parts = layers * depths.softmax(0)[:, None]
        return (parts / parts.sum(0).clamp(min=1e-300)).mean(1)  # of the layers

    shape: dict[str, Any] = {"width_ratios": [1.1, 1, 0.7]}
    figure, (left, right, third) = plots.figure(3, height=2.7, width=7.6, **shape)
    count = len(next(iter(norms.values()))[0])
    ticks = range(1, count + 1)
    third.set(xlabel="layer", xticks=ticks, xlim=(0.4, count + 0.6))
    third.set(ylabel="share of the score", ylim=(0, 1), title="where it comes from")
    blue: dict[str, Any] = {"color": plots.EPISTEMIC}
    for kind in ("id", "ood"):
        look = {"linestyle": plots.LINES[kind], "linewidth": 1.2, **blue}
        left.plot([], [], label=kind.upper(), **look)
    left.legend(loc="upper left")
    left.set(xscale="log", xlim=(1e-2, 1e2))
    plots.roc(*plain, color=plots.TOTAL, ax=right)
    handles = [*right.plot([], [], color=plots.TOTAL), *right.plot([], [], **blue)]
    right.legend(handles, ["entropy", "gradients"], loc="lower right")

    def draw(**values: Any) -> None:
        both = score(**values)
        middle = torch.cat(both).median()  # a unit for scores of any scale
        for scores, kind in zip(both, ("id", "ood"), strict=True):
            plots.ecdf(scores / middle, linestyle=plots.LINES[kind], ax=left)
        left.set_xlabel("score / its median")
        plots.roc(*both, ax=right)
        third.bar(ticks, shares(**values).numpy(), **blue)

    def seen(**values: Any) -> str:
        last = 100 * shares(**values)[-1]
        auroc = metrics.ood_detection(*score(**values)).auroc
        upside = " Below 0.5: the sign is wrong." if auroc < 0.5 else ""
        return (
            f"One network: OOD inputs rank above ID inputs in {100 * auroc:.1f} % of "
            f"all pairs by its gradients, in {100 * level:.1f} % by its entropy."
            f"{upside} The last of {count} layers gives {last:.0f} % of the score."
        )

    names = {
        "square root of p": "sqrt_p",
        "p": "p",
        "uniform": "uniform",
        "the predicted class": "predicted",
    }
    controls = {
        "depth": ipywidgets.FloatSlider(
            value=depth, min=0, max=5, step=0.5, description="depth weight"
        ),
        "weight": ipywidgets.Dropdown(
            options=list(names.items()), description="class weight"
        ),
        "sigma": ipywidgets.SelectionSlider(
            options=list(norms), description="noise (input units)"
        ),
    }
    return Explorer(draw, controls, seen, figure)
