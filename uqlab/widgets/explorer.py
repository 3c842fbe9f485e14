"""The box that explorers are: controls, a line that says what is seen, a picture."""

import base64
import functools
import gc
import html
import io
import time
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, NullLocator
from PIL import Image

REMEMBERED = 100  # pictures, some 40 kB each
SOON = 0.1  # seconds: sliders whose redraw is slower wait until they are let go
STILL = """{seen}<div style="overflow-x: auto"><img alt="What the line above says."
src="data:image/png;base64,{source}"
style="width: {width}; min-width: {least}; max-width: 100%"></div>
<p><em>The first picture: its controls need a running kernel.</em></p>"""
SCALE, SHARPNESS = 110, 1.25  # CSS pixels an inch; pixels a CSS pixel
LEAST = 70  # CSS pixels an inch: letters can be read, a narrow page scrolls


class Explorer(ipywidgets.VBox):
    """A box of controls, a line of text and a picture that is drawn anew at every move.

    Sliders follow the hand until a redraw takes longer than SOON; then they wait until
    they are let go. An image that was drawn before is shown again without drawing. An
    error is shown in place of the line, and raised.

    Parameters
    ----------
    draw
        Takes the values of the controls by name and adds to the axes of `figure`. What
        it added is removed before the next call, and the axes keep their places.
    controls
        Name -> ipywidgets control, with the unit in its description.
    seen
        A line (HTML) that says what is seen, or a function of the same values.
    figure
        With its axes, labels and all that stays.
    """

    def __init__(
        self,
        draw: Callable[..., Any],
        controls: Mapping[str, ipywidgets.ValueWidget],
        seen: str | Callable[..., str],
        figure: Figure,
    ):
        self.controls = dict(controls)
        stage = _Stage(figure)

        @functools.lru_cache(REMEMBERED)
        def shown(**values: Any) -> tuple[bytes, str]:
            started, first = time.perf_counter(), stage.background is None
            picture = stage.paint(draw, values)
            if not first and time.perf_counter() - started > SOON:
                for control in self.controls.values():
                    if hasattr(control, "continuous_update"):
                        control.continuous_update = False  # type: ignore[attr-defined]
            return picture, seen(**values) if callable(seen) else seen

        self._shown, self._paused = shown, False
        self._first = {name: control.value for name, control in self.controls.items()}
        names = [getattr(c, "description", "") for c in self.controls.values()]
        for control in self.controls.values():
            _arrange(control, max(map(len, names)))
            control.observe(self._redraw, "value")
        self.seen = ipywidgets.HTML()
        self.seen.add_class("uqlab-seen")
        self.picture = ipywidgets.Image(format="png")
        self.picture.add_class("uqlab-picture")
        self.picture.layout.width = f"{SCALE * figure.get_figwidth():.0f}px"
        self.picture.layout.min_width = f"{LEAST * figure.get_figwidth():.0f}px"
        self.picture.layout.max_width = "100%"
        button = ipywidgets.Button(description="reset", icon="undo")
        button.tooltip = "back to the first values"
        button.on_click(self.reset)
        self._redraw()
        frame = ipywidgets.Box([self.picture])
        frame.layout.overflow = "auto hidden"
        frame.add_class("uqlab-frame")
        super().__init__([*self.controls.values(), button, self.seen, frame])
        self.add_class("uqlab-explorer")

    def reset(self, _: Any = None) -> None:
        """Set every control to its first value, and draw once."""
        self._paused = True
        try:
            for name, control in self.controls.items():
                control.value = self._first[name]
        finally:
            self._paused = False
        self._redraw()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the live explorer, and its picture for where there is no kernel."""
        source = base64.b64encode(self.picture.value).decode()
        layout = self.picture.layout
        still = STILL.format(
            source=source,
            width=layout.width,
            least=layout.min_width,
            seen=self.seen.value,
        )
        return {**(super()._repr_mimebundle_(**kwargs) or {}), "text/html": still}

    def _redraw(self, _: Any = None) -> None:
        if self._paused:
            return
        collecting = gc.isenabled()
        gc.disable()  # so many new objects trigger a collection: 100 ms beside torch
        try:
            values = {name: control.value for name, control in self.controls.items()}
            picture, text = self._shown(**values)
            self.seen.value = _line(text)
            self.picture.value = picture
        except BaseException as error:  # a browser shows it nowhere else
            self.seen.value = _line(f"This could not be drawn: {told(error)}")
            raise
        finally:
            if collecting:
                gc.enable()


class _Stage:
    """A figure whose axes, slow to paint, are painted anew only when they change."""

    def __init__(self, figure: Figure):
        plt.close(figure)  # pyplot forgets it
        self.figure, self.canvas = figure, FigureCanvasAgg(figure)
        figure.set_dpi(SCALE * SHARPNESS)
        for ax in figure.axes:
            for axis in (ax.xaxis, ax.yaxis):
                if isinstance(axis.get_major_formatter(), LogFormatter):  # slow
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_locator(NullLocator())
        self.kept = {ax: {*ax.get_children()} for ax in figure.axes}
        self.bars = {ax: len(ax.containers) for ax in figure.axes}
        self.titles = [
            artist
            for ax, kept in self.kept.items()
            for artist in kept
            if isinstance(artist, Text) and artist not in ax.texts
        ]
        self.look: Any = None
        self.background: Any = None
        self.places: list[tuple[float, float]] = []

    def paint(self, draw: Callable[..., Any], values: Mapping[str, Any]) -> bytes:
        for artist in self._added():
            artist.remove()
        for ax, count in self.bars.items():
            del ax.containers[count:]
        draw(**values)
        added = [*sorted(self._added(), key=Artist.get_zorder), *self.titles]
        if self.look != self._look():
            self._paint_background(added)
        self.canvas.restore_region(self.background)
        for artist in added:
            self.figure.draw_artist(artist)
        memory = io.BytesIO()
        pixels = np.asarray(self.canvas.buffer_rgba())[..., :3]
        Image.fromarray(pixels).save(memory, "png", compress_level=1)
        return memory.getvalue()

    def _added(self) -> list[Artist]:
        return [
            artist
            for ax, kept in self.kept.items()
            for artist in ax.get_children()
            if artist not in kept
        ]

    def _look(self) -> list[tuple]:
        """Return what of the axes can be seen: scale, limits, label, ticks."""
        axes = [axis for ax in self.kept for axis in (ax.xaxis, ax.yaxis)]
        return [
            (
                axis.get_scale(),
                *axis.get_view_interval(),
                axis.get_label_text(),
                *axis.get_majorticklocs(),
                *getattr(axis.get_major_formatter(), "seq", ()),
            )
            for axis in axes
        ]

    def _paint_background(self, added: list[Artist]) -> None:
        if self.background is None:  # laid out once; from then on the axes stay
            for _ in range(3):  # until the layout changes no more
                self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")
            for ax in self.kept:
                ax.set_autoscale_on(False)
            self.places = [title.get_position() for title in self.titles]
        for artist in added:
            artist.set_visible(False)
        self.canvas.draw()
        for artist in added:
            artist.set_visible(True)
        for title, place in zip(self.titles, self.places, strict=True):
            title.set_position(place)  # drawn invisible, a title moves
        self.background = self.canvas.copy_from_bbox(self.figure.bbox)
        self.look = self._look()


def told(error: BaseException) -> str:
    """Return what went wrong, for the reader of an explorer."""
    if isinstance(error, KeyboardInterrupt):
        return "the kernel was interrupted. The next move asks it again."
    return f"{type(error).__name__}: {error}".rstrip(": ") + "."


def _arrange(control: Any, longest: int) -> None:
    """Give controls names of one width, so that the sliders line up."""
    control.style.description_width = f"{0.6 * longest + 1:.0f}em"
    if isinstance(control, ipywidgets.ToggleButtons):
        control.style.button_width = "auto"  # all in one line
    control.layout.width = "min(40em, calc(100% - 4px))"
    if hasattr(control, "continuous_update"):  # on a narrow page the name is above
        control.layout.flex_flow, control.layout.height = "row wrap", "auto"


def _line(text: str) -> str:
    """Return the text as HTML that a screen reader reads aloud when it changes."""
    style = "line-height: 1.4; max-width: 50em"
    words = html.escape(text, quote=False)
    return f'<div aria-live="polite" style="{style}">{words}</div>'
