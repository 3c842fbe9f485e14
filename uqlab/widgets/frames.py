"""Explorers of pictures: one for every combination of the controls, drawn at once.

The browser then only shows another one, so that they need no kernel. What stays in a
figure is painted once.
"""

import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from jaxtyping import Float
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, NullLocator
from PIL import Image
from torch import Tensor

from uqlab import plots
from uqlab.analysis.representations import embed
from uqlab.heads import separation
from uqlab.uncertainty import Decomposition
from uqlab.widgets.hands import Hand, address, spread

SHARPNESS = 137.5  # pixels an inch, 1.25 for each pixel of CSS


class _Stage:
    """A figure whose axes, slow to paint, are painted anew only when they change.

    Parameters
    ----------
    figure
        With its axes, labels and all that stays.
    draw
        Takes values by name and adds to the axes of `figure`. What it added is removed
        before the next call, and the axes keep their places.
    """

    def __init__(self, figure: Figure, draw: Callable[..., Any]):
        plt.close(figure)  # pyplot forgets it
        self.figure = figure
        self.draw = draw
        self.canvas = FigureCanvasAgg(figure)
        figure.set_dpi(SHARPNESS)
        self.axes = []
        for ax in figure.axes:
            self.axes += [ax.xaxis, ax.yaxis]
        for axis in self.axes:
            if isinstance(axis.get_major_formatter(), LogFormatter):  # slow
                axis.set_major_formatter("{x:g}")
                axis.set_minor_locator(NullLocator())
        self.fixed = {ax: {*ax.get_children()} for ax in figure.axes}
        self.bars = {ax: len(ax.containers) for ax in figure.axes}
        self.titles = self._titles()
        self.look: Any = None
        self.background: Any = None
        self.places = []

    def paint(self, values: Mapping[str, Any]) -> bytes:
        """Return the picture of these values, a WebP without loss."""
        for artist in self._added():
            artist.remove()
        for ax, count in self.bars.items():
            del ax.containers[count:]
        self.draw(**values)
        added = [*sorted(self._added(), key=Artist.get_zorder), *self.titles]
        if self.look != self._look():
            self._paint_background(added)
        self.canvas.restore_region(self.background)
        for artist in added:
            self.figure.draw_artist(artist)
        memory = io.BytesIO()
        image = Image.fromarray(np.asarray(self.canvas.buffer_rgba())[..., :3])
        image.save(memory, "webp", lossless=True, method=1, quality=0)  # the quickest
        return memory.getvalue()

    def _titles(self) -> list[Text]:
        titles = []
        for ax, artists in self.fixed.items():
            titles += [
                artist
                for artist in artists
                if isinstance(artist, Text) and artist not in ax.texts
            ]
        return titles

    def _added(self) -> list[Artist]:
        added = []
        for ax, artists in self.fixed.items():
            added += [artist for artist in ax.get_children() if artist not in artists]
        return added

    def _look(self) -> list[tuple]:
        return [_seen_of(axis) for axis in self.axes]

    def _paint_background(self, added: list[Artist]) -> None:
        if self.background is None:
            self._lay_out()
        for artist in added:
            artist.set_visible(False)
        self.canvas.draw()
        for artist in added:
            artist.set_visible(True)
        for title, place in zip(self.titles, self.places, strict=True):
            title.set_position(place)  # drawn invisible, a title moves
        self.background = self.canvas.copy_from_bbox(self.figure.bbox)
        self.look = self._look()

    def _lay_out(self) -> None:
        """Find the places of the axes, which stay from then on."""
        for _ in range(3):  # until the layout changes no more
            self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")
        for ax in self.fixed:
            ax.set_autoscale_on(False)
        self.places = [title.get_position() for title in self.titles]


def _seen_of(axis: Axis) -> tuple:
    """Return what can be seen of an axis: scale, limits, label, ticks."""
    return (
        axis.get_scale(),
        *axis.get_view_interval(),
        axis.get_label_text(),
        *axis.get_majorticklocs(),
        *getattr(axis.get_major_formatter(), "seq", ()),
    )


MOST = 300  # pictures, some 15 kB each


Options = Sequence[Any] | np.ndarray | Tensor


class Control(NamedTuple):
    """A control of an explorer: a slider of numbers, else buttons or a menu.

    Parameters
    ----------
    label
        What is chosen, with its unit.
    options
        The values, each alone or as (name, value).
    first
        The place of the value that is shown first.
    """

    label: str
    options: Options
    first: int = 0


def explore(
    draw: Callable[..., Any],
    controls: Mapping[str, Control | Options],
    seen: str | Callable[..., str],
    figure: Figure,
) -> Hand:
    """Show a picture and a line of text for every combination of the controls.

    All pictures are drawn now; equal ones are kept once.

    Parameters
    ----------
    draw
        Takes the values of the controls by name and adds to the axes of `figure`. What
        it added is removed before the next call, and the axes keep their places.
    controls
        Name -> `Control`, or a list of values.
    seen
        A line that describes the picture, or a function of the same values.
    figure
        The figure with its axes, labels and all that stays.

    Raises
    ------
    ValueError
        If there were more than 300 pictures.
    """
    stage = _Stage(figure, draw)
    chosen = {name: _control(name, control) for name, control in controls.items()}
    count = math.prod(len(each.options) for each in chosen.values())
    if count > MOST:
        raise ValueError(
            f"an explorer has at most {MOST} pictures, `controls` ask for {count}: "
            "give them fewer values"
        )
    shown, pictures, lines = [], {}, []
    for values in _combinations(chosen):
        shown.append(pictures.setdefault(stage.paint(values), len(pictures)))
        lines.append(seen(**values) if callable(seen) else seen)
    data = {
        "controls": [_described(name, each) for name, each in chosen.items()],
        "pictures": [address(picture, "webp") for picture in pictures],
        "shown": shown[1:],
        "lines": lines[1:],
        "inches": figure.get_size_inches().tolist(),
    }
    return Hand("frames", data, text=lines[0])


def _combinations(controls: Mapping[str, Control]) -> Iterator[dict[str, Any]]:
    """Yield the first values, by which the figure is laid out, then all in order."""
    first = [each.options[each.first] for each in controls.values()]
    for options in [first, *itertools.product(*(c.options for c in controls.values()))]:
        pairs = zip(controls, options, strict=True)
        yield {name: value for name, (_, value) in pairs}


def _control(name: str, control: Control | Options) -> Control:
    """Return a control whose options are all (name, value)."""
    if not isinstance(control, Control):
        control = Control(name, control)
    given = getattr(control.options, "tolist", lambda: list(control.options))()
    if not given:
        raise ValueError(f"`controls` gives no value for {name}")
    options = []
    for option in given:
        if not isinstance(option, tuple):
            text = f"{option:g}" if isinstance(option, float) else str(option)
            option = text, option
        options.append(option)
    return control._replace(options=options)


def _described(name: str, control: Control) -> dict[str, Any]:
    names = [option for option, _ in control.options]
    label, first = control.label, control.first
    return {"name": name, "names": names, "label": label, "first": first}


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


def collapse(
    x: Float[Tensor, " points"],
    predictions: Mapping[int, Float[Tensor, "groups points"]],
    background: Callable[[Axes], Any],
) -> Hand:
    """Show sub-ensembles of a regression: their predictions, and the variance between.

    Parameters
    ----------
    x
        The one input, [points], in ascending order.
    predictions
        Size of a sub-ensemble -> the mean prediction of each, [groups, points].
    background
        A function that draws the data into the left axes.
    """
    sizes = list(predictions)
    variance = {size: values.var(0) for size, values in predictions.items()}
    figure, (left, right) = plots.figure(2, height=2.6)
    background(left)
    left.set(xlabel="$x$", xmargin=0, ylabel="prediction")
    right.set(xlabel="$x$", xmargin=0, ylabel="variance between them", yscale="log")
    right.set_title("epistemic uncertainty")
    for size, values in predictions.items():
        left.plot(x, values.T, alpha=0)  # the limits are those of all sizes
        right.plot(x, variance[size], color=plots.EPISTEMIC, alpha=0.2)

    def draw(size):
        left.plot(x, predictions[size].T, color=plots.EPISTEMIC)
        left.set_title(f"{len(predictions[size])} sub-ensembles of {size}")
        right.plot(x, variance[size], color=plots.EPISTEMIC)

    seen = partial(_text, first=sizes[0], variance=variance)
    return explore(draw, {"size": Control("networks each", sizes)}, seen, figure)


def _text(size: int, first: int, variance: Mapping[int, Tensor]) -> str:
    mean, start = variance[size].mean(), variance[first].mean()
    return (
        f"Left: predictions of each sub-ensemble of {size}. Right: the variance "
        f"between them, mean {mean:.2g}, {100 * mean / start:.0f} % of that "
        f"between sub-ensembles of {first} (pale lines: other sizes)."
    )
