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
from uqlab.core.checks import ArrayLike, as_labels, as_tensor
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
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

TOTAL = "#444444"
ALEATORIC = "#E08A1E"
EPISTEMIC = "#1F77B4"
NEUTRAL = "#8A8A8A"
PAPER = "#9A9A9A"
MARK = "#C4417A"
LINES = {"id": "-", "ambiguous": ":", "ood": (0, (4, 2))}
PICTURE: dict[str, Any] = {
    "cmap": "gray_r",
    "vmin": 0,
    "vmax": 1,
    "interpolation": "nearest",
}
WIDE = 6.8  # inches: two columns of a paper
SHARP = 200  # dots an inch of a PNG, as in plots.mplstyle
HATCHED: dict[str, Any] = {"hatch": "///", "edgecolor": "white"}
CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}

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
        Of the files, which appear whole or not at all.
    caption
        One sentence that says what the figure shows.
    paper
        The figure of a paper that it reproduces.
    """
    for kind in ("png", "pdf"):
        with writing(recording.output_dir() / f"{name}.{kind}") as temporary:
            fig.savefig(temporary, format=kind, bbox_inches="tight", dpi=SHARP)
    recording.describe_figure(name, caption, paper)
    if "inline" in mpl.get_backend():  # which would paint it once more
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
    x = _array(x)
    ax.plot(
        x,
        _array(y),
        markersize=3.5,
        label=label,
        color=color,
        marker=marker,
        linestyle=linestyle,
    )
    if low is not None and high is not None:
        ax.fill_between(
            x, _array(low), _array(high), color=color, alpha=0.18, linewidth=0
        )
    return ax


def reference(
    value: float, text: str, *, axis: str = "y", ax: Axes | None = None
) -> Axes:
    """Draw a thin labelled line at the value of chance, of a bound or of a theory."""
    ax = ax or plt.gca()
    line = {"color": NEUTRAL, "linewidth": 0.8, "zorder": 0}
    words = {"fontsize": 7.5, "color": NEUTRAL}
    if axis == "y":
        ax.axhline(value, **line)
        words |= {"xycoords": ax.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        place = (1, value)
        offset = (0, 1)
    else:
        ax.axvline(value, **line)
        words |= {"xycoords": ax.get_xaxis_transform(), "ha": "left", "va": "top"}
        place = (value, 1)
        offset = (3, 0)
    ax.annotate(text, place, offset, textcoords="offset points", **words)
    return ax


def label_lines(ax: Axes) -> Axes:
    """Write the label of each line beside its last point, in its colour.

    Labels are at least 9 points apart; those that had to move are joined by a stroke.
    """
    labelled = [line for line in ax.get_lines() if str(line.get_label())[:1] != "_"]
    lines = [line for line in labelled if np.size(line.get_xydata())]
    canvas: Any = ax.get_figure(root=True)
    canvas.draw_without_rendering()  # limits and layout must be final
    tips = [np.asarray(line.get_xydata())[-1] for line in lines]
    ends = np.array([ax.transData.transform(tip)[1] * 72 / canvas.dpi for tip in tips])
    up = _apart(ends, 9.0)
    right, width = (14, 0.4) if (abs(up) > 3).any() else (4, 0)
    for line, tip, above in zip(lines, tips, up, strict=True):
        color = line.get_color()
        stroke = {"arrowstyle": "-", "color": color, "lw": width, "shrinkB": 0}
        stroke["relpos"] = (0, 0.5)
        ax.annotate(
            str(line.get_label()),
            tip,
            (right, above),
            textcoords="offset points",
            color=color,
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops=stroke,
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


def simplex(
    logits: ArrayLike, *, mean: bool = True, frame: bool = True, ax: Axes | None = None
) -> Axes:
    """Draw members as points of the simplex.

    Parameters
    ----------
    logits
        [members, 3].
    mean
        Draw their mean as a diamond.
    frame
        Draw the triangle and the contours of entropy.
    ax
        Where; the current axes by default.
    """
    ax = ax or plt.gca()
    if frame:
        _simplex_frame(ax)
    p = as_tensor("logits", logits).double().softmax(-1)
    x, y = barycentric(p).T
    ax.scatter(x, y, 26, EPISTEMIC, edgecolor="white", linewidth=0.7, zorder=3)
    if mean and len(p):
        x, y = barycentric(p.mean(0))
        hollow = {"marker": "D", "facecolor": "none", "zorder": 4}  # members lie below
        ax.scatter(x, y, s=58, edgecolor="white", linewidth=2.6, **hollow)
        ax.scatter(x, y, s=58, edgecolor=TOTAL, linewidth=1.3, **hollow)
    return ax


def _simplex_frame(ax: Axes) -> None:
    first, second = np.nonzero(np.tri(61)[::-1])  # where first + second <= 60
    grid = np.column_stack([first, second, 60 - first - second]) / 60
    heights = uncertainty.entropy(np.log(grid.clip(1e-12))).numpy()
    levels = np.linspace(0, np.log(3) + 1e-6, 9)
    x, y = barycentric(grid).T
    ax.tricontourf(x, y, heights, levels=levels, cmap="Greys", alpha=0.45)
    ax.plot(*_CORNERS[[0, 1, 2, 0]].T, color=TOTAL, linewidth=0.9)
    for name, (x, y), (dx, dy) in zip(
        "ABC", _CORNERS, [(-0.04, -0.04), (0.04, -0.04), (0, 0.04)], strict=True
    ):
        side = "bottom" if dy > 0 else "top"
        ax.text(x + dx, y + dy, name, ha="center", va=side, fontsize=8)
    ax.set(aspect="equal", xlim=(-0.1, 1.1), ylim=(-0.14, 1.0))
    ax.axis("off")


def decomposition_bars(
    parts: Mapping[str, tuple[float, float]],
    *,
    limit: float | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Draw horizontal bars aleatoric + epistemic = total (nats).

    Parameters
    ----------
    parts
        Name of a bar -> (aleatoric, epistemic).
    limit
        The end of the axis.
    legend
        Draw one.
    ax
        Where; the current axes by default.
    """
    ax = ax or plt.gca()
    aleatoric, epistemic = np.array(list(parts.values()), dtype=float).T
    total = aleatoric + epistemic
    y = np.arange(len(parts))
    ax.barh(y, aleatoric, color=ALEATORIC, height=0.55, label="aleatoric")
    ax.barh(
        y,
        epistemic,
        left=aleatoric,
        height=0.55,
        color=EPISTEMIC,
        label="epistemic",
        **HATCHED,
    )
    ax.barh(
        y,
        total,
        height=0.72,
        facecolor="none",
        edgecolor=TOTAL,
        linewidth=1,
        label="total",
    )
    ax.set(
        yticks=y,
        yticklabels=list(parts),
        xlim=(0, limit),
        xlabel="uncertainty (nats)",
    )
    ax.yaxis.set_inverted(True)
    ax.tick_params(axis="y", length=0)
    if legend:
        ax.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 1.16),
            ncols=3,
            handlelength=1.2,
            columnspacing=1.2,
        )
    return ax


def areas(
    x: Values, aleatoric: Values, epistemic: Values, *, ax: Axes | None = None
) -> Axes:
    """Draw areas aleatoric + epistemic = total (nats), labelled where thick."""
    ax = ax or plt.gca()
    x = _array(x)
    low = _array(aleatoric)
    total = low + _array(epistemic)
    ax.fill_between(x, low, color=ALEATORIC, linewidth=0)
    ax.fill_between(x, low, total, facecolor=EPISTEMIC, linewidth=0, **HATCHED)
    ax.plot(x, total, color=TOTAL)
    _name_area(ax, "aleatoric", x, 0 * low, low, ("black", ALEATORIC))
    _name_area(ax, "epistemic", x, low, total, ("white", EPISTEMIC))
    ax.set(xlim=(x[0], x[-1]), ylim=(0, None), ylabel="uncertainty (nats)")
    return ax


def _name_area(
    ax: Axes,
    name: str,
    x: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    colors: tuple[str, str],
) -> None:
    """Write a name where its area is thick, away from the ends of the axis."""
    inner = np.linspace(0.3, 0.7, 41) * (len(x) - 1)
    at, bottom, top = (np.interp(inner, range(len(x)), v) for v in (x, low, high))
    i = int(np.argmax(top - bottom))
    color, back = colors
    ax.text(
        at[i],
        (bottom[i] + top[i]) / 2,
        name,
        color=color,
        bbox={"facecolor": back, "edgecolor": "none", "pad": 1.5},
        fontsize=8,
        **CENTRED,
    )


def stacked(
    x: Sequence[Any], between: Values, within: Values, *, ax: Axes | None = None
) -> Axes:
    """Draw bars between + within = total mutual information (nats), one for each x."""
    ax = ax or plt.gca()
    positions = np.arange(len(x))
    between = _array(between)
    within = _array(within)
    ax.bar(positions, between, 0.7, color=EPISTEMIC, label="between groups")
    ax.bar(
        positions,
        within,
        0.7,
        between,
        color=EPISTEMIC,
        alpha=0.3,
        label="within groups",
        **HATCHED,
    )
    ax.set(
        xticks=positions,
        xticklabels=list(map(str, x)),
        ylabel="mutual information (nats)",
    )
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
    ax.ecdf(
        _array(scores), label=label, color=color, linestyle=linestyle, linewidth=1.2
    )
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
    inside = _array(id_scores)
    outside = _array(ood_scores)
    is_ood = np.repeat([False, True], [len(inside), len(outside)])
    false, true, _ = roc_curve(is_ood, np.concatenate([inside, outside]))
    auroc = metrics.ood_detection(inside, outside).auroc
    named = f"{label} {auroc:.3f}".strip()
    ax.plot(false, true, color=color, linewidth=1.2, label=named)
    ax.plot([0, 1], [0, 1], color=NEUTRAL, linewidth=0.6, zorder=0)
    ax.set(
        xlabel="ID flagged (false positives)",
        ylabel="OOD found (true positives)",
        xlim=(0, 1),
        ylim=(0, 1.01),
    )
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
        Where; the current axes by default.
    """
    ax = ax or plt.gca()
    pairs = zip(rows.values(), styles, strict=True)
    for y, ((value, low, high), (color, marker)) in enumerate(pairs):
        ax.plot([low, high], [y, y], color=color, linewidth=1.2)
        face = "white" if hollow else color
        ax.plot(
            value, y, color=color, marker=marker, markersize=6, markerfacecolor=face
        )
    ax.set(
        yticks=range(len(rows)),
        yticklabels=list(rows),
        ylim=(len(rows) - 0.5, -0.5),
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
        Where; the current axes by default.
    """
    ax = ax or plt.gca()
    count, right, sure = _by_confidence(logits, labels, bins)
    middle = (np.arange(bins) + 0.5) / bins
    width = np.sqrt(count / count.max()) / bins
    ax.bar(middle, right, width, color=color, alpha=0.75, lw=0, label="accuracy")
    gap = {"facecolor": "none", "edgecolor": TOTAL, "hatch": "////", "linewidth": 0.5}
    ax.bar(middle, sure - right, width, right, label="gap to confidence", **gap)
    ax.plot([0, 1], [0, 1], color=NEUTRAL, linewidth=0.8)
    ax.set(
        xlabel="confidence",
        ylabel="accuracy",
        aspect="equal",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    return ax


def _by_confidence(
    logits: ArrayLike, labels: ArrayLike, bins: int
) -> tuple[np.ndarray, ...]:
    """Return count, accuracy and mean confidence of each bin, 0 where it is empty."""
    confidence, answer = metrics.log_prediction(logits).exp().max(1)
    at = metrics.bins_of(confidence, bins)
    hits = (answer == as_labels(labels, len(answer)).to(answer.device)).double()
    sums = [at.bincount(weights, bins) for weights in (None, hits, confidence)]
    count, right, sure = map(_array, sums)
    full = count.clip(min=1)
    return count, right / full, sure / full


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
    ax.tick_params(length=0)
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
        [samples, channels, height, width]; or texts, of which the first three are
        written over all the axes, or, where there is one only, the first text in lines.
    count
        How many, at most.
    title
        Above the first.
    axes
        One for each image.
    """
    panels = list(np.asarray(axes, dtype=object).ravel())
    if isinstance(inputs, list):
        words = textwrap.fill(inputs[0], 24, max_lines=9)
        if len(panels) > 1:
            shown = [textwrap.shorten(text, 130) for text in inputs[: min(3, count)]]
            words = "\n".join(shown)
        panels[0].text(
            0,
            0.5,
            words,
            fontsize=7,
            va="center",
            parse_math=False,
            in_layout=False,
        )
    else:
        for ax, image in zip(panels[:count], inputs, strict=False):
            _picture(image, ax)
    for ax in panels:
        ax.axis("off")
    panels[0].set_title(" ")  # the height of a line; the title's width must not push
    panels[0].annotate(
        title,
        (0, 1),
        (0, 5),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        in_layout=False,
    )
    return panels


def _picture(image: ArrayLike, ax: Axes, extent: Any = None) -> None:
    """Draw an image [channels, height, width]."""
    rows = np.moveaxis(_array(image), 0, -1)
    ax.imshow(rows[..., 0] if rows.shape[-1] == 1 else rows, extent=extent, **PICTURE)


def votes(
    image: ArrayLike,
    logits: ArrayLike,
    classes: Sequence[str] = (),
    *,
    ax: Axes | None = None,
) -> Axes:
    """Write the predicted class of each of s x s tiles on an image.

    Tiles that agree with the mean prediction are grey, the others blue; the more
    probable the class, the more opaque the tile.

    Parameters
    ----------
    image
        [channels, height, width].
    logits
        [s * s, classes], row by row.
    classes
        Their names.
    ax
        Where; the current axes by default.
    """
    ax = ax or plt.gca()
    p = as_tensor("logits", logits, "tiles classes").softmax(-1)
    side = math.isqrt(len(p))
    if side**2 != len(p):
        raise ValueError(
            "votes needs the logits of s x s tiles, [s * s, classes], "
            f"got {list(p.shape)}"
        )
    _picture(image, ax, (0, side, side, 0))
    together = p.mean(0).argmax()
    names = classes if len(classes) else range(p.shape[1])
    for i, (sure, vote) in enumerate(zip(*p.max(1), strict=True)):
        color = NEUTRAL if vote == together else EPISTEMIC
        face = (color, 0.75 * float(sure))
        _tile(ax, divmod(i, side), face, str(names[int(vote)])[:5], 56 / side)
    ax.set(xticks=[], yticks=[], xlim=(0, side), ylim=(side, 0))
    ax.spines[:].set_visible(False)
    return ax


def _tile(
    ax: Axes, place: tuple[int, int], face: Any, label: str, fontsize: float
) -> None:
    """Draw a square of side 1 at (row, column) with a text in its middle."""
    row, column = place
    short = 1 if len(label) < 3 else 0.5
    square = Rectangle(
        (column, row), 1, 1, facecolor=face, edgecolor="white", linewidth=1
    )
    ax.add_patch(square)
    ax.text(
        column + 0.5,
        row + 0.5,
        label,
        fontsize=short * min(14, fontsize),
        path_effects=[withStroke(linewidth=2, foreground="white")],
        **CENTRED,
    )


def mask_map(mask: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """Draw masks [members, units] with values in [0, 1] as blue cells.

    Units are sorted by their mean over members.
    """
    mask = as_tensor("mask", mask, "members units")
    if not mask.numel():
        raise ValueError(f"masks must be [members, units], got {list(mask.shape)}")
    ax = ax or plt.gca()
    order = mask.mean(0).argsort(descending=True, stable=True)
    crisp = "nearest" if mask.shape[1] < 1000 else "antialiased"
    blues = LinearSegmentedColormap.from_list("mask", ["white", EPISTEMIC])
    ax.imshow(
        _array(mask[:, order]),
        blues,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation=crisp,
    )
    ax.set(yticks=[0, len(mask) - 1], ylabel="member", xlim=(-0.5, mask.shape[1] - 0.5))
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
        Where; the current axes by default.
    """
    ax = ax or plt.gca()
    values = torch.as_tensor(values).double()
    colors: Any = head_colors(values)
    ax.imshow(_array(values), cmap=colors.cmap, norm=colors.norm)
    strong = 0.6 * values.abs().max()
    for place, (layer, head) in enumerate(order, 1):
        color = "white" if values[layer, head].abs() > strong else "black"
        ax.text(head, layer, str(place), color=color, fontsize=7, **CENTRED)
    ax.set(
        xlabel="head",
        ylabel="layer",
        xticks=range(values.shape[1]),
        yticks=range(len(values)),
    )
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
        After the point.
    """

    def number(value):
        if not isinstance(value, float):
            return str(value)
        small = 0 < abs(value) < 0.5 * 10**-digits
        return f"{value:.1e}" if small else f"{value:.{digits}f}"

    def rank(column):
        ascending = (best or {})[column.name] == "min"
        marks = {1: "font-weight: bold", 2: "text-decoration: underline"}
        ranks = column.rank(ascending=ascending, method="min")
        return [marks.get(r, "") for r in ranks]

    styler: Any = frame.style.format(number, na_rep="not run")
    if theirs := list(paper):
        styler = styler.format(number, na_rep="–", subset=theirs)
        styler = styler.set_properties(subset=theirs, color=PAPER)
    for column in best or {}:
        styler = styler.apply(rank, subset=[column])
    return styler


def _array(values: Values) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values)
