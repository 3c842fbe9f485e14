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
    """Sub-models by masks: the masks, and the mutual information of the extracted beside the trained ensemble.

    found: diversity weight -> name of a mask -> soft mask. parts: (weight, threshold) -> decompositions of "id" and
    "ood" inputs; threshold None means soft masks. accuracy: (weight, threshold) -> share of correct predictions.
    trained: decompositions of the trained ensemble. weight: shown first.
    """
    figure, (left, right) = plots.figure(2, height=2.6)
    left.set_xlabel("unit, sorted")
    right.set_xscale("symlog", linthresh=1e-3)
    right.set_xlim(
        0,
        max(
            d.epistemic.max().item()
            for by in (trained, *parts.values())
            for d in by.values()
        ),
    )

    def kept(weight: float, threshold: float | None, mask: str) -> Tensor:
        values = found[weight][mask]
        return values if threshold is None else (values > threshold).float()

    def draw(weight: float, threshold: float | None, mask: str) -> None:
        plots.mask_map(kept(weight, threshold, mask), ax=left).set_title(mask)
        for kind, d in parts[weight, threshold].items():
            plots.ecdf(
                trained[kind].epistemic,
                color=plots.NEUTRAL,
                linestyle=plots.LINES[kind],
                ax=right,
            )
            plots.ecdf(d.epistemic, linestyle=plots.LINES[kind], ax=right)

    def seen(weight: float, threshold: float | None, mask: str) -> str:
        share = 100 * kept(weight, threshold, mask).mean()
        means = " and ".join(
            f"{d.epistemic.mean():.4f} ({trained[kind].epistemic.mean():.4f}) on {kind.upper()}"
            for kind, d in parts[weight, threshold].items()
        )
        return (
            f"Left: a member keeps {share:.0f} % of these units. Right, solid ID, dashed OOD: mutual "
            f"information of the extracted ensemble (blue) and the trained one (grey, in brackets), on average {means} "
            f"inputs, nats. Accuracy of the extracted {100 * accuracy[weight, threshold]:.1f} %."
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
    """Singular vectors of one matrix of one member against all those of the pretrained matrix; intruders in red.

    before: name of a layer -> its pretrained weight. after: name of a method -> its members' weights of a layer, as by
    `functools.partial(diversity.member_weights, ensemble)`. k, threshold: as in `spectra.intruder_dimensions`.
    """
    first = layer or next(iter(before))
    members = len(after[next(iter(after))](first))
    smallest = min(min(w.shape) for w in before.values())

    @functools.cache
    def old(name: str) -> tuple[Tensor, Tensor]:
        u, s, _ = torch.linalg.svd(
            before[name].detach().cpu().double(), full_matrices=False
        )
        return u, s

    trained = functools.lru_cache(4)(lambda method, name: after[method](name))

    @functools.lru_cache(64)
    def compared(
        method: str, name: str, member: int
    ) -> tuple[Tensor, Tensor]:  # |cos| [after, before], values
        u, s, _ = torch.linalg.svd(
            trained(method, name)[member].detach().cpu().double(), full_matrices=False
        )
        return (u.T @ old(name)[0]).abs(), s

    def strange(values: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        cosines, s = compared(values["method"], values["name"], values["member"])
        cosines = cosines[: values["k"]]
        return cosines, s, cosines.amax(1) < values["threshold"]

    figure, (left, right) = plots.figure(2, height=3.0, width_ratios=[3.2, 1])
    shades = ScalarMappable(Normalize(0, 1), "viridis_r")
    bar = figure.colorbar(shades, ax=left, label="|cos|", pad=0.02)
    left.set(xlabel="rank of the direction before", ylim=(1, 0), yticks=[])
    left.set_ylabel(
        "rank after training", labelpad=18
    )  # leaves room for the marks of intruders
    right.set(xlabel="singular value", ylim=(1, 0), yticks=[])
    right.plot([], [], color=plots.TOTAL, linestyle="--", label="before")
    right.plot([], [], color=plots.EPISTEMIC, label="after")
    right.legend(fontsize=7.5, loc="lower left", handlelength=1.2)

    def draw(**values: Any) -> None:
        cosines, s, intruder = strange(values)
        count, base = len(cosines), old(values["name"])[1]
        y = (
            np.arange(count) + 0.5
        ) / count  # not the ranks: then the axis stays the same for every k
        left.imshow(cosines.numpy(), aspect="auto", cmap="viridis_r", vmin=0, vmax=1, interpolation="nearest",
                    extent=(0.5, len(base) + 0.5, 1, 0))  # fmt: skip
        outside = {"clip_on": False, "transform": left.get_yaxis_transform()}
        left.plot(
            [-0.015] * int(intruder.sum()),
            y[intruder.numpy()],
            ">",
            color="#D62728",
            markersize=4,
            **outside,
        )
        bar.ax.axhline(values["threshold"], color="#D62728", linewidth=2)
        for rank in {1, count}:
            left.text(
                -0.03,
                y[rank - 1],
                str(rank),
                ha="right",
                va="center",
                fontsize=8,
                **outside,
            )
        right.plot(base[:count].numpy(), y, color=plots.TOTAL, linestyle="--")
        right.plot(s[:count].numpy(), y, color=plots.EPISTEMIC)
        right.set_xlim(0, math.ceil(1.05 * max(base[0], s[0]).item()))

    def seen(**values: Any) -> str:
        cosines, s, intruder = strange(values)
        squared = s[: len(cosines)].square()
        level = random_level(len(old(values["name"])[0]), cosines.shape[1])
        return (
            f"{int(intruder.sum())} of {len(cosines)} leading directions are intruders (red), with "
            f"{100 * (squared * intruder).sum() / squared.sum():.0f} % of the energy: no old direction is like them. "
            f"A random direction would have a largest |cos| of {level:.2f} on average."
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
    """The ingredients of a gradient score, depth weight, class weight and noise: its layers, and it beside the entropy.

    norms: noise sigma -> norms and log p of `gradients.gradient_norms`; the first `inside` samples are
    in-distribution, the others OOD. reference: the scores to compare with. depth: shown first.
    """

    def score(depth: float, weight: ClassWeight, sigma: float) -> tuple[Tensor, Tensor]:
        values = reduce_norms(*norms[sigma], class_weight=weight, depth=depth).cpu()
        return values[:inside], values[inside:]

    plain = reference[:inside].cpu(), reference[inside:].cpu()
    level = metrics.ood_detection(*plain).auroc

    def shares(
        depth: float, weight: ClassWeight, sigma: float
    ) -> Tensor:  # of the layers, in the score of an input
        layers = layer_shares(*norms[sigma], class_weight=weight).cpu()
        parts = (
            layers
            * (depth * torch.linspace(0, 1, len(layers), dtype=layers.dtype)).softmax(
                0
            )[:, None]
        )
        return (parts / parts.sum(0).clamp(min=1e-300)).mean(1)

    figure, (left, right, third) = plots.figure(
        3, height=2.7, width=7.6, width_ratios=[1.1, 1, 0.7]
    )
    count = len(next(iter(norms.values()))[0])
    third.set(
        title="where it comes from",
        xlabel="layer",
        ylabel="share of the score",
        ylim=(0, 1),
        xticks=range(1, count + 1),
    )
    third.set_xlim(0.4, count + 0.6)
    for kind, name in (("id", "ID"), ("ood", "OOD")):
        left.plot(
            [],
            [],
            color=plots.EPISTEMIC,
            linestyle=plots.LINES[kind],
            linewidth=1.2,
            label=name,
        )
    left.legend(loc="upper left")
    left.set(xscale="log", xlim=(1e-2, 1e2))
    plots.roc(*plain, color=plots.TOTAL, ax=right)
    handles = [
        *right.plot([], [], color=plots.TOTAL),
        *right.plot([], [], color=plots.EPISTEMIC),
    ]
    right.legend(handles, ["entropy", "gradients"], loc="lower right")

    def draw(**values: Any) -> None:
        both = score(**values)
        middle = torch.cat(
            both
        ).median()  # scores of any scale can be compared in units of their median
        for part, kind in zip(both, ("id", "ood"), strict=True):
            plots.ecdf(part / middle, linestyle=plots.LINES[kind], ax=left).set_xlabel(
                "score / its median"
            )
        plots.roc(*both, ax=right)
        third.bar(range(1, count + 1), shares(**values).numpy(), color=plots.EPISTEMIC)

    def seen(**values: Any) -> str:
        last = 100 * shares(**values)[-1]
        auroc = metrics.ood_detection(*score(**values)).auroc
        upside = " Below 0.5: the sign is wrong." if auroc < 0.5 else ""
        return (
            f"One network: OOD inputs rank above ID inputs in {100 * auroc:.1f} % of all pairs by its gradients, in "
            f"{100 * level:.1f} % by its entropy.{upside} The last of {count} layers gives {last:.0f} % of the score."
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
