"""Explorers of predictions: members on the simplex, sub-ensembles, groups of members, ensembles by width."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from uqlab import plots, uncertainty
from uqlab.uncertainty import Decomposition, GroupDecomposition
from uqlab.widgets.explorer import Explorer, information_axis


def simplex(cloud: Callable[..., Tensor], controls: Mapping[str, ipywidgets.ValueWidget]) -> Explorer:
    """Members as points of the simplex; cloud: the values of the controls by name -> logits [members, 3]."""

    def split(values: Mapping[str, Any]) -> tuple[Tensor, Decomposition]:
        logits = cloud(**values)
        return logits, uncertainty.decompose(logits[:, None])

    figure, (left, right) = plots.figure(2, height=2.3, width_ratios=[1, 1.6])
    plots.simplex(torch.zeros(0, 3), ax=left)
    plots.decomposition_bars({"": (0.0, 0.0)}, limit=1.2, ax=right)
    plots.reference(np.log(3), "log 3", axis="x", ax=right)

    def draw(**values: Any) -> None:
        logits, part = split(values)
        plots.simplex(logits, frame=False, ax=left)
        bar = {"": (part.aleatoric.item(), part.epistemic.item())}
        plots.decomposition_bars(bar, limit=1.2, legend=False, ax=right).set_ylim(1.3, -1)

    def seen(**values: Any) -> str:
        total, aleatoric, epistemic = (part.item() for part in split(values)[1])
        share = f", {100 * epistemic / total:.0f} % of it disagreement" if total > 0 else ""
        return (
            f"{len(cloud(**values))} members (blue) and their mean (diamond): {total:.3f} nats in total = "
            f"{aleatoric:.3f} aleatoric + {epistemic:.3f} epistemic{share}."
        )

    return Explorer(draw, controls, seen, figure)


def collapse(
    x: Float[Tensor, " points"],
    predictions: Mapping[int, Float[Tensor, "groups points"]],
    background: Callable[[Axes], Any] | None = None,
) -> Explorer:
    """Sub-ensembles of a regression with one input: the prediction of each, and the variance between them.

    predictions: size of a sub-ensemble -> the mean prediction of each. background: draws the data into the left axes.
    """
    sizes = list(predictions)
    colors = dict(zip(sizes, plots.sequential(len(sizes)), strict=True))
    variance = {size: values.var(0, correction=1) for size, values in predictions.items()}
    start = variance[sizes[0]].mean()
    low, high = (f(torch.stack(list(variance.values())).clamp_min(1e-12)).item() for f in (torch.min, torch.max))

    reach = 1.1 * max(values.abs().max().item() for values in predictions.values())
    figure, (left, right) = plots.figure(2, height=2.6)
    left.set(xlabel="$x$", ylabel="prediction", xlim=(x.min().item(), x.max().item()), ylim=(-reach, reach))
    if background:
        background(left)
    for size in sizes:
        right.plot(x, variance[size], color=colors[size], alpha=0.2, linewidth=1.1)
    right.set(yscale="log", ylim=(low / 2, 2 * high), xlim=(x.min().item(), x.max().item()))
    right.set(xlabel="$x$", ylabel="variance between them", title="epistemic uncertainty")

    def draw(size: int) -> None:
        left.plot(x, predictions[size].T, color=colors[size], linewidth=0.9, alpha=0.9)
        left.set_title(f"{len(predictions[size])} sub-ensembles of {size}")
        right.plot(x, variance[size], color=colors[size], linewidth=1.4)

    def seen(size: int) -> str:
        mean = variance[size].mean()
        return (
            f"Left: what each sub-ensemble of {size} predicts. Right: the variance between them, mean {mean:.2g}, "
            f"{100 * mean / start:.0f} % of that between sub-ensembles of {sizes[0]} (pale lines: other sizes)."
        )

    slider = ipywidgets.SelectionSlider(options=sizes, value=sizes[0], description="networks each")
    return Explorer(draw, {"size": slider}, seen, figure)


def groups(parts: Mapping[str, Mapping[int, GroupDecomposition]], members: int) -> Explorer:
    """The mutual information between groups of members, which the outer ensemble sees, and that within the groups.

    parts: name of a set, the in-distribution set first -> size of a group -> `uncertainty.decompose_groups` of its
    inputs. members: of the whole ensemble.
    """
    sizes = list(next(iter(parts.values())))
    lines = dict(zip(parts, (plots.LINES["id"], plots.LINES["ood"], plots.LINES["ambiguous"]), strict=False))
    means = {name: {size: d.epistemic.mean().item() for size, d in by.items()} for name, by in parts.items()}
    top = 1.1 * max(mean for by in means.values() for mean in by.values())

    figure, (left, right) = plots.figure(2, height=2.9)
    for name in parts:
        for what, color in (("all members", plots.NEUTRAL), ("between", plots.EPISTEMIC)):
            left.plot([], [], color=color, linestyle=lines[name], linewidth=1.2, label=f"{name}, {what}")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(parts), fontsize=7.5)
    information_axis(left, parts.values())
    plots.stacked(list(parts), *[[0.0] * len(parts)] * 2, ax=right).set_ylim(0, top)
    right.legend(loc="upper left")

    def draw(size: int) -> None:
        for name, by in parts.items():
            plots.ecdf(by[size].epistemic, color=plots.NEUTRAL, linestyle=lines[name], ax=left)
            plots.ecdf(by[size].between, linestyle=lines[name], ax=left)
        means = [[getattr(by[size], kind).mean().item() for by in parts.values()] for kind in ("between", "within")]
        plots.stacked(list(parts), *means, ax=right).set_title(f"{members // size} groups of {size}")

    def seen(size: int) -> str:
        shares = (
            f"{by[size].between.mean():.3f} of {means[name][size]:.3f} nats on {name}" for name, by in parts.items()
        )
        return (
            f"The outer ensemble of {members // size} sees the mutual information between groups (blue): "
            f"{' and '.join(shares)}. What lies within groups (hatched) is hidden from it."
        )

    slider = ipywidgets.SelectionSlider(options=sizes, value=sizes[len(sizes) // 2], description="members per group")
    return Explorer(draw, {"size": slider}, seen, figure)


def widths(
    parts: Mapping[float, Mapping[str, Decomposition]],
    names: Mapping[str, str],
    images: Mapping[str, Float[Tensor, "samples c h w"]],
) -> Explorer:
    """Ensembles of several widths: mutual information of each kind of input, and the OOD inputs with most and least.

    parts: width -> kind -> decomposition of its inputs; the kinds are "id", "ambiguous" and those of `images`.
    names: kind -> name of the set. images: kind -> inputs of an OOD set; of several, one at a time is shown.
    """
    known = [kind for kind in next(iter(parts.values())) if kind not in images]
    first = next(iter(images))

    figure, (left, right) = plots.figure(2, height=2.8)
    labels = {kind: names[kind] for kind in known} | {"ood": "OOD set" if len(images) > 1 else names[first]}
    for kind, label in labels.items():
        left.plot([], [], color=plots.EPISTEMIC, linestyle=plots.LINES[kind], linewidth=1.2, label=label)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7.5)
    information_axis(left, parts.values())

    def draw(width: float, ood: str = first) -> None:
        for kind in (*known, ood):
            style = plots.LINES[kind if kind in known else "ood"]
            plots.ecdf(parts[width][kind].epistemic, linestyle=style, ax=left)
        ranked = parts[width][ood].epistemic.argsort().cpu()
        shown = torch.cat([ranked.flip(0)[:8], ranked[:8]])
        plots.images(_sheet(images[ood][shown].cpu(), columns=8)[None], axes=[right])
        right.set_title(f"{names[ood]}: most (above) and least MI")

    def seen(width: float, ood: str = first) -> str:
        means = ", ".join(f"{names[kind]} {parts[width][kind].epistemic.mean():.4f}" for kind in (*known, ood))
        return f"Width x{width:g}, mean mutual information in nats: {means}. The axes are the same for all widths."

    options = [(f"x{width:g}", width) for width in parts]
    controls: dict[str, ipywidgets.ValueWidget] = {
        "width": ipywidgets.SelectionSlider(options=options, value=next(iter(parts)), description="width")
    }
    if len(images) > 1:
        controls["ood"] = ipywidgets.Dropdown(options=[(names[kind], kind) for kind in images], description="OOD set")
    return Explorer(draw, controls, seen, figure)


def _sheet(images: Float[Tensor, "n c h w"], columns: int) -> Float[Tensor, "c y x"]:
    """One image of all `images`, in rows of `columns` and one pixel apart."""
    rows = [torch.cat(list(row), -1) for row in torch.nn.functional.pad(images, (0, 1, 0, 1)).split(columns)]
    return torch.cat(rows, -2)
