"""The figure of an explorer: what stays is painted once, the rest for each picture."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, NullLocator
from PIL import Image

SHARPNESS = 137.5  # pixels an inch, 1.25 for each pixel of CSS


class Stage:
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
