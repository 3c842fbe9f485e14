"""Explorers of pictures: one for every combination of the controls, drawn at once.

The browser then only shows another one, so that they need no kernel.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from uqlab.widgets.hand import Hand, address
from uqlab.widgets.stage import Stage

MOST = 300  # pictures, some 15 kB each
SOME = 80  # pictures, up to which ranges may have more values
FEW = (16, 8, 5)  # values of a range
STRIDES = (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 2000, 5000)


class Control(NamedTuple):
    """A control of an explorer: a slider of numbers, else buttons or a menu.

    Parameters
    ----------
    label
        What is chosen, with its unit.
    options
        The values, each alone or as (name, value).
    first
        The place of the one that is shown first.
    """

    label: str
    options: Sequence[Any]
    first: int = 0


def explore(
    draw: Callable[..., Any],
    controls: Mapping[str, Any],
    seen: str | Callable[..., str],
    figure: Figure,
) -> Hand:
    """Show a picture and a line of text for every combination of the controls.

    All are drawn now, equal ones are kept once. A range of many values is thinned to
    some, its ends and its first value among them.

    Parameters
    ----------
    draw
        Takes the values of the controls by name and adds to the axes of `figure`. What
        it added is removed before the next call, and the axes keep their places.
    controls
        Name -> `Control`, list of values or control of ipywidgets.
    seen
        A line that says what is seen, or a function of the same values.
    figure
        With its axes, labels and all that stays.

    Raises
    ------
    ValueError
        If there were more than 300 pictures.
    """
    stage = Stage(figure, draw)
    places = {}  # picture -> its place
    chosen = _chosen(controls)
    shown = []
    lines = []
    for values in _combinations(chosen):
        picture = stage.paint(values)
        shown.append(places.setdefault(picture, len(places)))
        lines.append(seen(**values) if callable(seen) else seen)
    data = {
        "controls": list(map(_described, chosen, chosen.values())),
        "pictures": [address(picture, "webp") for picture in places],
        "shown": shown[1:],
        "lines": lines[1:],
        "inches": figure.get_size_inches().tolist(),
    }
    return Hand("frames", data, text=lines[0])


def _chosen(controls: Mapping[str, Any]) -> dict[str, Control]:
    """Return controls, ranges with as many values as some pictures allow."""
    chosen = {}
    count = 0
    for few in FEW:
        chosen = {
            name: _control(name, control, few) for name, control in controls.items()
        }
        count = math.prod(len(each.options) for each in chosen.values())
        if count <= SOME:
            break
    if count > MOST:
        raise ValueError(
            f"an explorer has at most {MOST} pictures, these controls ask for {count}: "
            "give them fewer values"
        )
    return chosen


def _control(name: str, control: Any, few: int) -> Control:
    """Return a control whose options are all (name, value)."""
    label = name
    options = control
    first = 0
    if isinstance(control, Control):
        label, options, first = control
    elif hasattr(control, "max"):  # of ipywidgets, as the next
        label = control.description
        options = _thinned(control, few)
        first = options.index(control.value)
    elif hasattr(control, "options"):
        label = control.description
        options = control.options
        first = control.index
    return Control(label or name, [_named(option) for option in options], first)


def _named(option: Any) -> tuple[str, Any]:
    if isinstance(option, tuple) and len(option) == 2:
        return option
    return (f"{option:g}" if isinstance(option, float) else str(option)), option


def _described(name: str, control: Control) -> dict[str, Any]:
    names = [option for option, _ in control.options]
    return {
        "name": name,
        "names": names,
        "label": control.label,
        "first": control.first,
    }


def _thinned(slider: Any, few: int) -> list[Any]:
    """Return some round values of a range, with its ends and its value."""
    ends = {slider.min, slider.max, slider.value}
    count = round((slider.max - slider.min) / slider.step) + 1
    grid = [round(slider.min + i * slider.step, 10) for i in range(count)]
    values = every = sorted(ends.union(grid))
    for stride in STRIDES:
        if len(values) <= few:
            break
        round_ones = [v for v in every if round(v / slider.step) % stride == 0]
        values = sorted(ends.union(round_ones))
    return values


def _combinations(controls: Mapping[str, Control]) -> Iterator[dict[str, Any]]:
    """Yield the first values, by which the figure is laid out, then all in order."""
    first = [each.options[each.first] for each in controls.values()]
    every = itertools.product(*(each.options for each in controls.values()))
    for options in itertools.chain([first], every):
        pairs = zip(controls, options, strict=True)
        yield {name: value for name, (_, value) in pairs}
