"""One function per kind of figure: data and keyword-only `ax=None` in, the Axes out. One visual language for all.

total = dark grey, aleatoric = orange, epistemic = blue; in-distribution solid, out-of-distribution dashed, ambiguous
dotted; ordered quantities (width, group size) run from light (small) to dark (large).
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import torch
from fontTools import subset
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from sklearn.isotonic import isotonic_regression
from sklearn.metrics import roc_curve
from torch import Tensor

from uqlab import metrics, uncertainty
from uqlab.core import door, recording
from uqlab.core.files import writing

TOTAL, ALEATORIC, EPISTEMIC = "#444444", "#E08A1E", "#1F77B4"
NEUTRAL, PAPER, MARK = "#8A8A8A", "#9A9A9A", "#C4417A"
LINES = {"id": "-", "ambiguous": ":", "ood": (0, (4, 2))}
PICTURE: dict[str, Any] = {
    "cmap": "gray_r",
    "vmin": 0,
    "vmax": 1,
    "interpolation": "nearest",
}
NARROW, WIDE, SHARP = (
    3.3,
    6.8,
    200,
)  # inches: one and two columns of a paper; dots an inch of a PNG

Values = Sequence[float | int] | np.ndarray | Tensor


def use_style() -> None:
    """Set fonts, sizes and colours; every notebook calls it once."""
    ticks = {
        "labelsize": 8,
        "major.width": 0.8,
        "major.size": 3,
        "minor.width": 0.5,
        "minor.size": 1.8,
    }
    rc = {
        "figure.dpi": 130, "savefig.dpi": SHARP, "figure.constrained_layout.use": True, "pdf.fonttype": 42,
        "font.size": 8.5, "axes.labelsize": 8.5, "axes.titlesize": 9, "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "lines.linewidth": 1.5,
        "legend.fontsize": 8, "legend.title_fontsize": 8, "legend.frameon": False,
        **{f"{axis}.{name}": value for axis in ("xtick", "ytick") for name, value in ticks.items()},
    }  # fmt: skip
    sns.set_theme(style="ticks", rc=rc)
    # Rules for placing glyphs, which matplotlib places itself: to embed them took a fifth of a figure's time.
    subset.Options._drop_tables_default += ["GDEF", "GPOS", "GSUB", "MATH"]


def figure(
    columns: int = 1,
    rows: int = 1,
    *,
    width: float = WIDE,
    height: float = 2.4,
    **kwargs: Any,
):
    """A figure of `width` inches with rows of `height` inches each; returns (figure, axes) as plt.subplots does."""
    return plt.subplots(rows, columns, figsize=(width, height * rows), **kwargs)


def save(fig: Figure, name: str, caption: str = "", paper: str = "") -> None:
    """Write name.png (200 dpi) and name.pdf to the notebook's output folder, whole or not at all, and show the PNG.

    caption: one sentence that says what the figure shows. paper: the figure that it reproduces.
    """
    shown, fig.dpi = (
        fig.dpi,
        SHARP,
    )  # texts are then measured once, for the layout and the PNG
    if engine := fig.get_layout_engine():
        engine.execute(fig)  # once for all: that takes as long as painting
    box = fig.get_tightbbox().padded(mpl.rcParams["savefig.pad_inches"])
    with mpl.rc_context({"figure.constrained_layout.use": False}):
        fig.set_layout_engine()  # none
        for kind in ("png", "pdf"):
            with writing(recording.output_dir() / f"{name}.{kind}") as temporary:
                fig.savefig(temporary, format=kind, bbox_inches=box)
    recording.describe_figure(name, caption, paper)
    if "inline" in mpl.get_backend():  # which would paint it once more
        from IPython.display import Image, display

        display(
            Image(
                filename=str(recording.output_dir() / f"{name}.png"),
                width=round(box.width * shown),
            )
        )
        plt.close(fig)
    fig.dpi = shown


def sequential(count: int) -> list[tuple[float, float, float]]:
    """Colours for an ordered quantity, from light (small) to dark (large), all dark enough on white."""
    return [mpl.colormaps["viridis"](x)[:3] for x in np.linspace(0.82, 0.02, count)]


def curve(
    x: Values, y: Values, low: Values | None = None, high: Values | None = None, *,
    label: str = "", color: Any = EPISTEMIC, marker: str = "o", linestyle: Any = "-", ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """A line with markers and, given low and high, a band for its uncertainty."""
    ax = ax or plt.gca()
    ax.plot(
        _array(x),
        _array(y),
        marker=marker,
        markersize=3.5,
        color=color,
        linestyle=linestyle,
        label=label,
    )
    if low is not None and high is not None:
        ax.fill_between(
            _array(x), _array(low), _array(high), color=color, alpha=0.18, linewidth=0
        )
    return ax


def reference(
    value: float, text: str, *, axis: str = "y", ax: Axes | None = None
) -> Axes:
    """A thin labelled line at the value of chance, of a bound or of a theory's prediction."""
    ax = ax or plt.gca()
    line: dict[str, Any] = {"color": NEUTRAL, "linewidth": 0.8, "zorder": 0}
    words: dict[str, Any] = {
        "textcoords": "offset points",
        "fontsize": 7.5,
        "color": NEUTRAL,
    }
    if axis == "y":
        ax.axhline(value, **line)
        ax.annotate(
            text,
            (1, value),
            (0, 1),
            xycoords=ax.get_yaxis_transform(),
            ha="right",
            va="bottom",
            **words,
        )
    else:
        ax.axvline(value, **line)
        ax.annotate(
            text,
            (value, 1),
            (3, 0),
            xycoords=ax.get_xaxis_transform(),
            ha="left",
            va="top",
            **words,
        )
    return ax


def label_lines(ax: Axes) -> Axes:
    """Write the label of each line beside its last point, in its colour and at least 9 points from the next label."""
    lines = [
        line
        for line in ax.get_lines()
        if str(line.get_label())[:1] != "_" and np.size(line.get_xydata())
    ]
    figure: Any = ax.get_figure(root=True)
    figure.draw_without_rendering()  # limits and layout must be final before points are turned into pixels
    tips = [np.asarray(line.get_xydata())[-1] for line in lines]
    ends = np.array([ax.transData.transform(tip)[1] * 72 / figure.dpi for tip in tips])
    order, steps = np.argsort(ends), 9 * np.arange(len(lines))
    up = (
        isotonic_regression(ends[order] - steps) + steps - ends[order]
    )  # least movement
    right, width = (
        (14, 0.4) if (abs(up) > 3).any() else (4, 0)
    )  # with a stroke to each, where labels had to move
    for i, above in zip(order, up, strict=True):
        how: Any = {
            "color": lines[i].get_color(),
            "va": "center",
            "fontsize": 8,
            "annotation_clip": False,
        }
        how["arrowprops"] = {
            "arrowstyle": "-",
            "color": how["color"],
            "lw": width,
            "relpos": (0, 0.5),
            "shrinkB": 0,
        }
        ax.annotate(
            str(lines[i].get_label()),
            tips[i],
            (right, above),
            textcoords="offset points",
            **how,
        )
    return ax


_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(0.75)]])


def barycentric(p: Values) -> np.ndarray:
    """The coordinates x and y, [..., 2], at which `simplex` draws probabilities [..., 3]."""
    return _array(p) @ _CORNERS


def simplex(
    logits: Tensor, *, mean: bool = True, frame: bool = True, ax: Axes | None = None
) -> Axes:
    """Members [members, 3] as points of the simplex, their mean as a diamond and, as `frame`, contours of entropy."""
    ax = ax or plt.gca()
    if frame:
        _simplex_frame(ax)
    p = logits.double().softmax(-1)
    ax.scatter(
        *barycentric(p).T,
        s=26,
        color=EPISTEMIC,
        edgecolor="white",
        linewidth=0.7,
        zorder=3,
    )
    if mean and len(p):
        at = barycentric(p.mean(0))
        for color, width in (
            ("white", 2.6),
            (TOTAL, 1.3),
        ):  # hollow, because members may lie below it
            ax.scatter(
                *at,
                s=58,
                marker="D",
                facecolor="none",
                edgecolor=color,
                linewidth=width,
                zorder=4,
            )
    return ax


def _simplex_frame(ax: Axes) -> None:
    grid = np.array([(a, b, 60 - a - b) for a in range(61) for b in range(61 - a)]) / 60
    heights = uncertainty.entropy(torch.as_tensor(grid).clamp_min(1e-12).log()).numpy()
    x, y = barycentric(grid).T
    ax.tricontourf(
        x,
        y,
        heights,
        levels=np.linspace(0, np.log(3) + 1e-6, 9),
        cmap="Greys",
        alpha=0.45,
    )
    ax.plot(*_CORNERS[[0, 1, 2, 0]].T, color=TOTAL, linewidth=0.9)
    for corner, name, (dx, dy) in zip(
        _CORNERS, "ABC", [(-0.04, -0.04), (0.04, -0.04), (0, 0.04)], strict=True
    ):
        ax.text(
            corner[0] + dx,
            corner[1] + dy,
            name,
            ha="center",
            va="bottom" if dy > 0 else "top",
            fontsize=8,
        )
    ax.set(aspect="equal", xlim=(-0.1, 1.1), ylim=(-0.14, 1.0))
    ax.axis("off")


def decomposition_bars(
    parts: Mapping[str, tuple[float, float]], *, limit: float | None = None, legend: bool = True,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Horizontal bars aleatoric + epistemic = total (nats); parts: name of a bar -> (aleatoric, epistemic)."""
    ax = ax or plt.gca()
    aleatoric, epistemic = np.array(list(parts.values()), dtype=float).T
    y = np.arange(len(parts))
    ax.barh(y, aleatoric, color=ALEATORIC, height=0.55, label="aleatoric")
    ax.barh(
        y,
        epistemic,
        left=aleatoric,
        color=EPISTEMIC,
        height=0.55,
        label="epistemic",
        hatch="///",
        edgecolor="white",
    )
    ax.barh(
        y,
        aleatoric + epistemic,
        facecolor="none",
        edgecolor=TOTAL,
        height=0.72,
        linewidth=1,
        label="total",
    )
    ax.set(
        yticks=y, yticklabels=list(parts), xlabel="uncertainty (nats)", xlim=(0, limit)
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
    """Areas aleatoric + epistemic = total (nats) along x, each labelled where it is thickest."""
    ax = ax or plt.gca()
    x, low, total = _array(x), _array(aleatoric), _array(aleatoric) + _array(epistemic)
    ax.fill_between(x, low, color=ALEATORIC, linewidth=0)
    ax.fill_between(
        x, low, total, facecolor=EPISTEMIC, hatch="///", edgecolor="white", linewidth=0
    )
    ax.plot(x, total, color=TOTAL)
    inner = np.linspace(0.3, 0.7, 41) * (
        len(x) - 1
    )  # a label near the edge would be clipped
    places, bottom, top = (
        np.interp(inner, np.arange(len(x)), values) for values in (x, low, total)
    )
    for name, text, back, start, end in [
        ("aleatoric", "black", ALEATORIC, 0 * bottom, bottom),
        ("epistemic", "white", EPISTEMIC, bottom, top),
    ]:
        i = int(np.argmax(end - start))
        ax.text(places[i], (start[i] + end[i]) / 2, name, color=text, ha="center", va="center", fontsize=8,
                bbox={"facecolor": back, "edgecolor": "none", "pad": 1.5})  # fmt: skip
    ax.set(xlim=(x[0], x[-1]), ylim=(0, None), ylabel="uncertainty (nats)")
    return ax


def stacked(
    x: Sequence[Any], between: Values, within: Values, *, ax: Axes | None = None
) -> Axes:
    """Vertical bars between + within = total mutual information (nats), one for each x."""
    ax = ax or plt.gca()
    positions, between, within = np.arange(len(x)), _array(between), _array(within)
    ax.bar(positions, between, color=EPISTEMIC, width=0.7, label="between groups")
    ax.bar(positions, within, bottom=between, color=EPISTEMIC, alpha=0.3, width=0.7, hatch="///", edgecolor="white",
           label="within groups")  # fmt: skip
    ax.set(
        xticks=positions,
        xticklabels=[str(item) for item in x],
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
    """The fraction of inputs whose score is at most x."""
    ax = ax or plt.gca()
    ax.ecdf(
        _array(scores), label=label, color=color, linestyle=linestyle, linewidth=1.2
    )
    ax.set(
        xlabel="mutual information (nats)", ylabel="fraction of inputs", ylim=(0, 1.02)
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
    """True positive rate of OOD inputs against false positive rate of ID inputs; the label holds the AUROC."""
    ax = ax or plt.gca()
    inside, outside = _array(id_scores), _array(ood_scores)
    is_ood = np.repeat([False, True], [len(inside), len(outside)])
    false, true, _ = roc_curve(is_ood, np.concatenate([inside, outside]))
    auroc = metrics.ood_detection(inside, outside).auroc
    ax.plot(
        false, true, color=color, linewidth=1.2, label=f"{label} {auroc:.3f}".strip()
    )
    ax.plot([0, 1], [0, 1], color=NEUTRAL, linewidth=0.6, zorder=0)
    ax.set(
        xlabel="ID flagged (false positives)",
        ylabel="OOD found (true positives)",
        xlim=(0, 1),
        ylim=(0, 1.01),
    )
    return ax


def dots(
    rows: Mapping[str, tuple[float, float, float]], styles: Sequence[tuple[Any, str]], *, hollow: bool = False,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Each row, from top to bottom, shows a mean and its interval; rows: name -> (mean, low, high).

    styles: the colour and the marker of each row. hollow: draw open markers, for a second value of the same rows.
    """
    ax = ax or plt.gca()
    for y, ((value, low, high), (color, marker)) in enumerate(
        zip(rows.values(), styles, strict=True)
    ):
        ax.plot([low, high], [y, y], color=color, linewidth=1.2)
        ax.plot(
            value,
            y,
            marker=marker,
            color=color,
            markersize=6,
            markerfacecolor="white" if hollow else color,
        )
    ax.set(
        yticks=range(len(rows)), yticklabels=list(rows), ylim=(len(rows) - 0.5, -0.5)
    )
    ax.tick_params(axis="y", length=0)
    return ax


def reliability(
    logits: Tensor,
    labels: Tensor,
    *,
    bins: int = 15,
    color: Any = EPISTEMIC,
    ax: Axes | None = None,
) -> Axes:
    """Accuracy in the bins of `metrics.ece`, the gap to the confidence hatched; logits [members, samples, classes]."""
    ax = ax or plt.gca()
    confidence, answer = metrics.log_prediction(logits).exp().max(1)
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    at = torch.bucketize(confidence, edges[1:-1])
    count = at.bincount(minlength=bins).clamp(min=1)
    right, sure = (
        _array(at.bincount(v.double(), bins) / count)
        for v in (answer == labels, confidence)
    )
    ax.stairs(
        right, _array(edges), fill=True, color=color, alpha=0.75, label="accuracy"
    )
    ax.stairs(sure, _array(edges), baseline=right, fill=True, facecolor="none", edgecolor=TOTAL, hatch="////",
              linewidth=0.5, label="gap to confidence")  # fmt: skip
    ax.plot([0, 1], [0, 1], color=NEUTRAL, linewidth=0.8)
    ax.set(
        xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), aspect="equal"
    )
    return ax


def heatmap(
    values: Values, rows: Sequence[Any], columns: Sequence[Any], *, label: str = "", digits: int = 3,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """A matrix as colours, with its numbers written in the cells."""
    ax = ax or plt.gca()
    sns.heatmap(_array(values), ax=ax, cmap="viridis_r", annot=True, fmt=f".{digits}f", annot_kws={"fontsize": 7.5},
                xticklabels=list(columns), yticklabels=list(rows), cbar_kws={"label": label})  # fmt: skip
    ax.tick_params(length=0)
    ax.tick_params(axis="y", labelrotation=0)
    return ax


def images(
    inputs: Tensor | list[str],
    *,
    count: int = 10,
    title: str = "",
    axes: Sequence[Axes] | np.ndarray,
) -> list[Axes]:
    """Draw the first `count` images [samples, channels, height, width] in the given axes, and return these.

    Of texts the first three are written over all the axes; where there is one only, the first text, in lines.
    """
    panels: list[Axes] = list(np.asarray(axes, dtype=object).ravel())
    if isinstance(inputs, list):
        some = [textwrap.shorten(each, 130) for each in inputs[: min(3, count)]]
        lines = (
            "\n".join(some)
            if len(panels) > 1
            else textwrap.fill(inputs[0], 24, max_lines=9)
        )
        panels[0].text(
            0, 0.5, lines, fontsize=7, va="center", parse_math=False, in_layout=False
        )
    else:
        for ax, image in zip(panels[:count], inputs, strict=False):
            ax.imshow(_array(image.movedim(0, -1).squeeze(-1)), **PICTURE)
    for ax in panels:
        ax.axis("off")
    panels[0].set_title(
        " "
    )  # reserves the height of a line; the width of the text must not push the images aside
    place: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "in_layout": False,
    }
    panels[0].annotate(title, (0, 1), (0, 5), fontsize=9, **place)
    return panels


def votes(
    image: Tensor,
    logits: Tensor,
    classes: Sequence[str] = (),
    *,
    ax: Axes | None = None,
) -> Axes:
    """The predicted class and its probability of each of s x s tiles, row by row, written over the image.

    image: [channels, height, width]. logits: [s * s, classes]. Tiles that agree with the mean prediction are grey, the
    others blue; the more probable the class, the more opaque the tile.
    """
    ax = ax or plt.gca()
    side = math.isqrt(len(logits))
    if side * side != len(logits):
        raise ValueError(
            f"votes needs the logits of s x s tiles, [s * s, classes], got {list(logits.shape)}"
        )
    p = logits.double().softmax(-1)
    together = int(p.mean(0).argmax())
    ax.imshow(
        _array(image.movedim(0, -1).squeeze(-1)), extent=(0, side, side, 0), **PICTURE
    )
    for i, (sure, vote) in enumerate(
        zip(*(values.tolist() for values in p.max(1)), strict=True)
    ):
        row, column = divmod(i, side)
        color = NEUTRAL if vote == together else EPISTEMIC
        tile = Rectangle(
            (column, row),
            1,
            1,
            facecolor=(color, 0.7 * sure),
            edgecolor="white",
            linewidth=0.7,
        )
        ax.add_patch(tile)
        name = str(classes[vote])[:5] if len(classes) else str(vote)
        ax.text(column + 0.5, row + 0.5, f"{name}\n{sure:.2f}", ha="center", va="center", linespacing=0.95,
                fontsize=min(8, 30 / side), path_effects=[withStroke(linewidth=1.5, foreground="white")])  # fmt: skip
    ax.set(xticks=[], yticks=[], xlim=(0, side), ylim=(side, 0))
    ax.spines[:].set_visible(False)
    return ax


def mask_map(mask: Tensor, *, ax: Axes | None = None) -> Axes:
    """Masks [members, units] with values in [0, 1] as blue cells; units are sorted by their mean over members."""
    ax = ax or plt.gca()
    order = mask.mean(0).argsort(descending=True, stable=True)
    crisp = "nearest" if mask.shape[1] < 1000 else "antialiased"
    blues = LinearSegmentedColormap.from_list("mask", ["white", EPISTEMIC])
    ax.imshow(
        _array(mask[:, order]),
        cmap=blues,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation=crisp,
    )
    ax.set(yticks=[0, len(mask) - 1], ylabel="member", xlim=(-0.5, mask.shape[1] - 0.5))
    return ax


def head_colors(values: Tensor) -> ScalarMappable:
    """Colours of the values of attention heads; negative values are purple, if there are any."""
    low, top = values.min().item(), values.abs().max().item()
    return ScalarMappable(
        Normalize(-top if low < 0 else 0, top), "PuOr_r" if low < 0 else "viridis_r"
    )


def head_map(
    values: Tensor, order: Sequence[tuple[int, int]] = (), *, ax: Axes | None = None
) -> Axes:
    """A value of each attention head, [layers, heads], as colour, with the head's place in `order`, from 1."""
    ax = ax or plt.gca()
    values = torch.as_tensor(values).double()
    colors: Any = head_colors(values)
    ax.imshow(_array(values), cmap=colors.cmap, norm=colors.norm)
    for place, (layer, head) in enumerate(order, 1):
        color = (
            "white" if values[layer, head].abs() > 0.6 * values.abs().max() else "black"
        )
        ax.text(
            head, layer, str(place), ha="center", va="center", fontsize=7, color=color
        )
    ax.set(
        xlabel="head",
        ylabel="layer",
        xticks=range(values.shape[1]),
        yticks=range(len(values)),
    )
    return ax


def table(
    frame: Any,
    *,
    best: Mapping[Any, str] | None = None,
    paper: Sequence[Any] = (),
    digits: int = 3,
):
    """A pandas Styler of a DataFrame: in each column of `best` the best value is bold, the second underlined.

    best: column -> "max" or "min". paper: columns with the paper's numbers, in grey, with a dash where it has none.
    """

    def number(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return (
            f"{value:.1e}"
            if 0 < abs(value) < 0.5 * 10**-digits
            else f"{value:.{digits}f}"
        )

    styler = frame.style.format(number, na_rep="not run")
    if len(paper):
        styler = styler.format(number, na_rep="–", subset=list(paper)).set_properties(
            subset=list(paper), color=PAPER
        )

    def rank(column: Any) -> list[str]:
        ascending = (best or {})[column.name] == "min"
        ranks = column.rank(ascending=ascending, method="min")
        return [
            "font-weight: bold"
            if r == 1
            else "text-decoration: underline"
            if r == 2
            else ""
            for r in ranks
        ]

    for column in best or {}:
        styler = styler.apply(rank, subset=[column])
    return styler


def _array(values: Values) -> np.ndarray:
    return (
        values.detach().cpu().numpy()
        if isinstance(values, Tensor)
        else np.asarray(values)
    )


door.room(__name__, reads=False)
