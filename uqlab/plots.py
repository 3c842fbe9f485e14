"""One function per kind of figure, in one visual language.

Every function takes data and a keyword-only `ax=None`, and returns the Axes. Total =
dark grey, aleatoric = orange, epistemic = blue; in-distribution solid,
out-of-distribution dashed, ambiguous dotted; ordered quantities (width, group size) run
from light (small) to dark (large).
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.isotonic import isotonic_regression
from sklearn.metrics import roc_curve
from torch import Tensor

from uqlab import metrics, uncertainty
from uqlab.core import recording
from uqlab.core.checks import (
    ArrayLike,
    as_image,
    as_labels,
    as_scores,
    as_tensor,
    one_of,
)
from uqlab.core.extras import extra
from uqlab.core.files import writing

with extra("notebooks"):
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    import pandas as pd
    import seaborn as sns
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

TOTAL = "#444444"
ALEATORIC = "#E08A1E"
EPISTEMIC = "#1F77B4"
NEUTRAL = "#8A8A8A"
PAPER = "#9A9A9A"
MARK = "#C4417A"
LINES = {"id": "-", "ambiguous": ":", "ood": (0, (4, 2))}
PICTURE: dict[str, Any] = {"cmap": "gray_r", "vmin": 0, "vmax": 1}
WIDE = 6.8  # inches: two columns of a paper
SHARP = 200  # dots an inch of a PNG, as in plots.mplstyle
HATCHED: dict[str, Any] = {"hatch": "///", "edgecolor": "white"}

Values = Sequence[float | int] | np.ndarray | Tensor


def use_style() -> None:
    """Set fonts, sizes and colours, plots.mplstyle; every notebook calls it once."""
    sns.set_theme(style="ticks")
    plt.style.use(Path(__file__).with_suffix(".mplstyle"))


def figure(
    columns: int = 1,
    rows: int = 1,
    *,
    width: float = WIDE,
    height: float = 2.4,
    **kwargs: Any,
):
    """Make a figure of `width` inches with rows of `height` inches each.

    Returns (figure, axes) as plt.subplots does, which also gets other arguments.
    """
    return plt.subplots(rows, columns, figsize=(width, height * rows), **kwargs)


def save(fig: Figure, name: str, caption: str = "", paper: str = "") -> None:
    """Write a figure as PNG and PDF to the notebook's output folder, and show it.

    Parameters
    ----------
    fig
        The figure.
    name
        The files' name without its ending.
    caption
        One sentence that says what the figure shows.
    paper
        The figure of a paper that it reproduces.
    """
    for kind in ("png", "pdf"):
        with writing(recording.output_dir() / f"{name}.{kind}") as temporary:
            fig.savefig(temporary, format=kind, bbox_inches="tight", dpi=SHARP)
    recording.describe_figure(name, caption, paper)
    if "inline" in mpl.get_backend():  # it would paint the figure once more
        from IPython.display import Image, display

        path = recording.output_dir() / f"{name}.png"
        across = plt.imread(path).shape[1] * fig.dpi / SHARP
        display(Image(filename=str(path), width=round(across)))
        plt.close(fig)


def sequential(count: int) -> list[tuple[float, float, float]]:
    """Return colours of an ordered quantity, from light (small) to dark (large)."""
    return [mpl.colormaps["viridis"](x)[:3] for x in np.linspace(0.82, 0.02, count)]


def curve(
    x: Values,
    y: Values,
    low: Values | None = None,
    high: Values | None = None,
    *,
    label: str = "",
    color: Any = EPISTEMIC,
    marker: str = "o",
    linestyle: Any = "-",
    ax: Axes | None = None,
) -> Axes:
    """Draw a line with markers and, given low and high, a band for its uncertainty."""
    ax = ax or plt.gca()
    x, y = _array(x), _array(y)
    ax.plot(
        x,
        y,
        markersize=3.5,
        label=label,
        color=color,
        marker=marker,
        linestyle=linestyle,
    )
    if low is not None and high is not None:
        low, high = _array(low), _array(high)
        ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    return ax


def reference(
    value: float, text: str, *, axis: str = "y", ax: Axes | None = None
) -> Axes:
    """Draw a thin labelled line at the value of chance, of a bound or of a theory."""
    ax = ax or plt.gca()
    vertical = axis == "x"
    line = ax.axvline if vertical else ax.axhline
    line(value, color=NEUTRAL, linewidth=0.8, zorder=0)
    ax.annotate(
        text,
        (value, 1) if vertical else (1, value),
        (3, 0) if vertical else (0, 1),
        ax.get_xaxis_transform() if vertical else ax.get_yaxis_transform(),
        textcoords="offset points",
        ha="left" if vertical else "right",
        va="top" if vertical else "bottom",
        fontsize=7.5,
        color=NEUTRAL,
    )
    return ax


def label_lines(ax: Axes) -> Axes:
    """Write the label of each line beside its last point, in its colour.

    Labels are at least 9 points apart; a stroke joins each one to its line.
    """
    tips = {}
    for line in ax.get_lines():
        drawn = np.asarray(line.get_xydata())
        drawn = drawn[np.isfinite(drawn).all(1)]
        if len(drawn) and str(line.get_label())[:1] != "_":
            tips[line] = drawn[-1]
    if not tips:
        return ax
    canvas: Any = ax.get_figure(root=True)
    canvas.draw_without_rendering()  # limits and layout must be final
    places = ax.transData.transform([*tips.values()])
    up = _apart(places[:, 1] * 72 / canvas.dpi, 9.0)
    for (line, tip), above in zip(tips.items(), up, strict=True):
        color = line.get_color()
        ax.annotate(
            str(line.get_label()),
            tuple(tip),
            (9, above),
            textcoords="offset points",
            color=color,
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.4, "shrinkB": 0},
        )
    return ax


def _apart(heights: np.ndarray, distance: float) -> np.ndarray:
    """Return the least movements that put heights at least a distance apart."""
    order = np.argsort(heights)
    steps = distance * np.arange(len(heights))
    moved = np.empty_like(heights)
    moved[order] = isotonic_regression(heights[order] - steps) + steps
    return moved - heights


_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(0.75)]])


def barycentric(p: Values) -> np.ndarray:
    """Return coordinates [..., 2] at which `simplex` draws probabilities [..., 3]."""
    return _array(p) @ _CORNERS


def simplex(logits: ArrayLike, *, mean: bool = True, ax: Axes | None = None) -> Axes:
    """Draw members as points of the simplex, above contours of the entropy.

    Parameters
    ----------
    logits
        [members, 3].
    mean
        Draw their mean as a diamond.
    ax
        The axes; the current ones by default.
    """
    ax = ax or plt.gca()
    _simplex_frame(ax)
    p = as_tensor("logits", logits, "members classes").double().softmax(-1)
    one_of("the number of classes", p.shape[1], (3,))
    x, y = barycentric(p).T
    ax.scatter(x, y, 26, EPISTEMIC, edgecolor="white", linewidth=0.7)
    if mean:  # hollow, because members lie below
        ax.plot(*barycentric(p.mean(0)), "D", color=TOTAL, fillstyle="none")
    return ax


def _simplex_frame(ax: Axes) -> None:
    grid = np.argwhere(np.tri(61)[::-1])  # first + second <= 60
    p = np.column_stack([grid, 60 - grid.sum(1)]) / 60
    heights = uncertainty.entropy(np.log(p.clip(1e-12))).numpy()
    levels = np.linspace(0, np.log(3) + 1e-6, 9)
    x, y = barycentric(p).T
    ax.tricontourf(x, y, heights, levels=levels, cmap="Greys", alpha=0.45)
    ax.plot(*_CORNERS[[0, 1, 2, 0]].T, color=TOTAL, linewidth=0.9)
    for name, corner in zip("ABC", _CORNERS, strict=True):
        x, y = corner + 0.12 * (corner - _CORNERS.mean(0))
        ax.text(x, y, name, ha="center", va="center", fontsize=8)
    ax.set(aspect="equal", xlim=(-0.1, 1.1), ylim=(-0.14, 1.0))
    ax.axis("off")


def decomposition_bars(
    parts: Mapping[str, tuple[Any, Any]],
    *,
    limit: float | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Draw horizontal bars aleatoric + epistemic = total (nats).

    Parameters
    ----------
    parts
        Name of a bar -> (aleatoric, epistemic), numbers or tensors of one.
    limit
        The end of the axis.
    legend
        Draw one.
    ax
        The axes; the current ones by default.
    """
    ax = ax or plt.gca()
    frame: Any = pd.DataFrame(parts, index=["aleatoric", "epistemic"], dtype=float).T
    frame.plot.barh(
        stacked=True,
        width=0.55,
        color=[ALEATORIC, EPISTEMIC],
        xlim=(0, limit),
        xlabel="uncertainty (nats)",
        legend=False,
        ax=ax,
    )
    for bar in ax.containers[1]:
        bar.set(**HATCHED)
    ax.barh(frame.index, frame.sum(axis=1), 0.72, fill=False, ec=TOTAL, label="total")
    ax.yaxis.set_inverted(True)
    ax.tick_params(axis="y", length=0)
    if legend:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=3)
    return ax


def areas(
    x: Values, aleatoric: Values, epistemic: Values, *, ax: Axes | None = None
) -> Axes:
    """Draw areas aleatoric + epistemic = total (nats), with a legend."""
    ax = ax or plt.gca()
    x, low, high = map(_array, (x, aleatoric, epistemic))
    ax.stackplot(
        x,
        low,
        high,
        labels=["aleatoric", "epistemic"],
        colors=[ALEATORIC, EPISTEMIC],
        hatch=["", "///"],
        edgecolor="white",
        linewidth=0,
    )
    ax.plot(x, low + high, color=TOTAL)
    ax.set(xlim=(x[0], x[-1]), ylim=(0, None), ylabel="uncertainty (nats)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return ax


def ecdf(
    scores: Values,
    *,
    label: str = "",
    color: Any = EPISTEMIC,
    linestyle: Any = "-",
    ax: Axes | None = None,
) -> Axes:
    """Draw the fraction of inputs whose score is at most x."""
    ax = ax or plt.gca()
    scores = _array(as_scores(scores))
    ax.ecdf(scores, label=label, color=color, linestyle=linestyle, linewidth=1.2)
    ax.set(
        xlabel="mutual information (nats)",
        ylabel="fraction of inputs",
        ylim=(0, 1.02),
    )
    return ax


def roc(
    id_scores: Values,
    ood_scores: Values,
    *,
    label: str = "",
    color: Any = EPISTEMIC,
    ax: Axes | None = None,
) -> Axes:
    """Draw the share of OOD inputs found against that of ID inputs flagged.

    The label holds the AUROC.
    """
    ax = ax or plt.gca()
    inside, outside = _array(id_scores), _array(ood_scores)
    is_ood = np.repeat([False, True], [len(inside), len(outside)])
    false, true, _ = roc_curve(is_ood, np.concatenate([inside, outside]))
    auroc = metrics.ood_detection(inside, outside).auroc
    named = f"{label} {auroc:.3f}".strip()
    ax.plot(false, true, color=color, linewidth=1.2, label=named)
    ax.axline((0, 0), slope=1, color=NEUTRAL, linewidth=0.6, zorder=0)
    ax.set(xlabel="ID flagged (false positives)", xlim=(0, 1), ylim=(0, 1.01))
    ax.set_ylabel("OOD found (true positives)")
    return ax


def dots(
    rows: Mapping[str, tuple[float, float, float]],
    styles: Sequence[tuple[Any, str]],
    *,
    hollow: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw a mean and its interval in each row, from top to bottom.

    Parameters
    ----------
    rows
        Name -> (mean, low, high).
    styles
        The colour and the marker of each row.
    hollow
        Draw open markers, for a second value of the same rows.
    ax
        The axes; the current ones by default.
    """
    ax = ax or plt.gca()
    pairs = zip(rows.values(), styles, strict=True)
    for y, ((value, low, high), (color, marker)) in enumerate(pairs):
        ax.plot([low, high], [y, y], color=color, linewidth=1.2)
        face = "white" if hollow else color
        ax.plot(value, y, marker, color=color, markersize=6, markerfacecolor=face)
    ax.set(
        yticks=range(len(rows)), yticklabels=list(rows), ylim=(len(rows) - 0.5, -0.5)
    )
    ax.tick_params(axis="y", length=0)
    return ax


def reliability(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = 15,
    color: Any = EPISTEMIC,
    ax: Axes | None = None,
) -> Axes:
    """Draw accuracy in the bins of `metrics.ece`, the gap to the confidence hatched.

    A bar's width is the root of its bin's count, over that of the fullest bin: bins of
    a few samples, whose accuracy is chance, are thin.

    Parameters
    ----------
    logits, labels
        [members, samples, classes] and [samples].
    bins, color
        Of the diagram.
    ax
        The axes; the current ones by default.
    """
    ax = ax or plt.gca()
    log_p = metrics.log_prediction(logits)
    confidence, answer = log_p.exp().max(1)
    right = answer == as_labels(labels, *log_p.shape).to(answer.device)
    at = _array(metrics.bins_of(confidence, bins))
    frame = pd.DataFrame({"right": _array(right), "sure": _array(confidence)})
    means: Any = frame.groupby(at).mean()
    count: Any = frame.groupby(at).size()
    middle = (means.index + 0.5) / bins
    width = np.sqrt(count / count.max()) / bins
    ax.bar(middle, means.right, width, color=color, alpha=0.75, lw=0, label="accuracy")
    ax.bar(
        middle,
        means.sure - means.right,
        width,
        means.right,
        fill=False,
        edgecolor=TOTAL,
        hatch="////",
        linewidth=0.5,
        label="gap to confidence",
    )
    ax.axline((0, 0), slope=1, color=NEUTRAL, linewidth=0.8)
    ax.set(
        xlabel="confidence",
        ylabel="accuracy",
        aspect="equal",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    return ax


def heatmap(
    values: Values,
    rows: Sequence[Any],
    columns: Sequence[Any],
    *,
    label: str = "",
    digits: int = 3,
    ax: Axes | None = None,
) -> Axes:
    """Draw a matrix as colours, with its numbers written in the cells."""
    ax = ax or plt.gca()
    sns.heatmap(
        _array(values),
        ax=ax,
        cmap="viridis_r",
        annot=True,
        fmt=f".{digits}f",
        annot_kws={"fontsize": 7.5},
        xticklabels=list(columns),
        yticklabels=list(rows),
        cbar_kws={"label": label},
    )
    ax.tick_params(axis="y", labelrotation=0)
    return ax


def images(
    inputs: ArrayLike | list[str],
    *,
    count: int = 10,
    title: str = "",
    axes: Sequence[Axes] | np.ndarray,
) -> list[Axes]:
    """Draw the first images in the given axes, and return these.

    Parameters
    ----------
    inputs
        [samples, channels, height, width], in [0, 1] or bytes; or texts. The first
        three texts are written over all the axes; if there is only one, the first text
        is written in lines.
    count
        The largest number of images.
    title
        The title above the first image.
    axes
        One for each image.
    """
    panels = list(np.asarray(axes, dtype=object).ravel())
    texts: Any = inputs
    if isinstance(next(iter(inputs), None), str):
        some = [textwrap.shorten(text, 130) for text in texts[: min(3, count)]]
        if len(panels) == 1:
            some = [textwrap.fill(texts[0], 24, max_lines=9)]
        words = panels[0].text(0, 0.5, "\n".join(some), fontsize=7, va="center")
        words.set(parse_math=False, in_layout=False)
    else:
        for ax, image in zip(panels[:count], inputs, strict=False):
            _picture(image, ax)
    for ax in panels:
        ax.axis("off")
    panels[0].set_title(" ")  # the height of a line; the title's width must not push
    place = panels[0].transAxes
    panels[0].text(0, 1.05, title, fontsize=9, transform=place, in_layout=False)
    return panels


def _picture(image, ax, extent=None):
    """Draw an image [channels, height, width]."""
    rows = _array(as_image(image).movedim(0, -1).squeeze(-1))
    ax.imshow(rows, extent=extent, interpolation="nearest", **PICTURE)


# White between votes for the mean prediction and votes against it.
_VOTES = LinearSegmentedColormap.from_list("votes", [NEUTRAL, "white", EPISTEMIC])


def votes(
    image: ArrayLike,
    logits: ArrayLike,
    classes: Sequence[str] | np.ndarray = (),
    *,
    ax: Axes | None = None,
) -> Axes:
    """Write the predicted class of each of s x s tiles on an image.

    Tiles that agree with the mean prediction are grey, the others blue; the more
    probable the class, the darker the tile.

    Parameters
    ----------
    image
        [channels, height, width].
    logits
        [s * s, classes], row by row.
    classes
        Their names.
    ax
        The axes; the current ones by default.
    """
    ax = ax or plt.gca()
    p = as_tensor("logits", logits, "tiles classes").softmax(-1)
    side = math.isqrt(len(p))
    if side**2 != len(p):
        raise ValueError(f"`logits` must be of s x s tiles, got {list(p.shape)}")
    _picture(image, ax, (0, side, side, 0))
    sure, vote = map(_array, p.max(1))
    signed = np.where(vote == p.mean(0).argmax().item(), -sure, sure)
    names = _short_names(classes, p.shape[1])
    sns.heatmap(
        signed.reshape(side, side),
        annot=names[vote].reshape(side, side),
        fmt="",
        annot_kws={"fontsize": min(14, 56 / side / len(names[0]))},
        cmap=_VOTES,
        vmin=-1,
        vmax=1,
        alpha=0.6,
        cbar=False,
        xticklabels=False,
        yticklabels=False,
        ax=ax,
    )
    return ax


def _short_names(classes, count):
    """Return the names of classes, or their numbers, in five letters."""
    called = [*classes] or range(count)
    one_of("the number of names", len(called), (count,))
    return np.array([str(name)[:5] for name in called])


def mask_map(mask: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """Draw masks [members, units] with values in [0, 1] as blue cells.

    Units are sorted by their mean over members.
    """
    mask = as_tensor("mask", mask, "members units")
    ax = ax or plt.gca()
    order = mask.mean(0).argsort(descending=True, stable=True)
    blues = LinearSegmentedColormap.from_list("mask", ["white", EPISTEMIC])
    ax.imshow(_array(mask[:, order]), blues, vmin=0, vmax=1, aspect="auto")
    ax.set(yticks=[0, len(mask) - 1], ylabel="member")
    return ax


def head_colors(values: Tensor) -> ScalarMappable:
    """Return the colours of values of attention heads; negative ones are purple."""
    low = values.min().item()
    top = values.abs().max().item()
    if low < 0:
        return ScalarMappable(Normalize(-top, top), "PuOr_r")
    return ScalarMappable(Normalize(0, top), "viridis_r")


def head_map(
    values: Tensor, order: Sequence[tuple[int, int]] = (), *, ax: Axes | None = None
) -> Axes:
    """Draw a value of each attention head as colour.

    Parameters
    ----------
    values
        [layers, heads].
    order
        (layer, head) pairs; each head's place among them is written on it, from 1.
    ax
        The axes; the current ones by default.
    """
    ax = ax or plt.gca()
    values = torch.as_tensor(values).double()
    colors: Any = head_colors(values)
    ax.imshow(_array(values), cmap=colors.cmap, norm=colors.norm)
    strong = values.abs() > 0.6 * values.abs().max()
    for place, (layer, head) in enumerate(order, 1):
        ax.text(
            head,
            layer,
            str(place),
            color="white" if strong[layer, head] else "black",
            fontsize=7,
            ha="center",
            va="center",
        )
    layers, heads = values.shape
    ax.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
    return ax


def plane(
    id_points: ArrayLike, ood_points: ArrayLike, *, ax: Axes | None = None
) -> Axes:
    """Draw ID and OOD inputs, [samples, 2] each, as points of a plane without units.

    ID inputs are grey dots, OOD inputs pink crosses; the labels are "ID" and "OOD".
    """
    ax = ax or plt.gca()
    of_id = (id_points, "ID", "o", NEUTRAL)
    for points, label, marker, color in (of_id, (ood_points, "OOD", "x", MARK)):
        look: dict[str, Any] = {"ms": 2.4, "mew": 0.6, "alpha": 0.7, "color": color}
        points = as_tensor(f"{label} points", points, "samples 2")
        ax.plot(*_array(points).T, marker, label=label, **look)
    ax.set(xticks=[], yticks=[])
    ax.set_aspect("equal", "datalim")
    ax.spines[:].set(visible=True, linewidth=0.4)
    return ax


def table(
    frame: pd.DataFrame,
    *,
    best: Mapping[Any, str] | None = None,
    paper: Sequence[Any] = (),
    digits: int = 3,
):
    """Return a pandas Styler of a DataFrame.

    Parameters
    ----------
    frame
        The table.
    best
        Column -> "max" or "min": its best value is bold, the second underlined.
    paper
        Columns with a paper's numbers: grey, with a dash where it has none.
    digits
        Digits after the point.
    """

    def number(value):
        if not isinstance(value, float):
            return str(value)
        small = 0 < abs(value) < 0.5 * 10**-digits
        return f"{value:.1e}" if small else f"{value:.{digits}f}"

    def marked(column, direction):
        marks = {1: "font-weight: bold", 2: "text-decoration: underline"}
        ranks = column.rank(ascending=direction == "min", method="min")
        return [marks.get(rank, "") for rank in ranks]

    styler: Any = frame.style.format(number, na_rep="not run")
    if theirs := list(paper):
        styler = styler.format(number, na_rep="–", subset=theirs)
        styler = styler.set_properties(subset=theirs, color=PAPER)
    for column, direction in (best or {}).items():
        styler = styler.apply(marked, subset=[column], direction=direction)
    return styler


def _array(values: Values) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)
