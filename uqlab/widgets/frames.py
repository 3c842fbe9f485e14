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
    options: Sequence[Any]
    first: int = 0


def explore(
    draw: Callable[..., Any],
    controls: Mapping[str, Control | Sequence[Any]],
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
    stage = Stage(figure, draw)
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


def _control(name: str, control: Control | Sequence[Any]) -> Control:
    """Return a control whose options are all (name, value)."""
    if not isinstance(control, Control):
        control = Control(name, control)
    if not control.options:
        raise ValueError(f"`controls` gives no value for {name}")
    options = []
    for option in control.options:
        if not isinstance(option, tuple):
            text = f"{option:g}" if isinstance(option, float) else str(option)
            option = text, option
        options.append(option)
    return control._replace(options=options)


def _described(name: str, control: Control) -> dict[str, Any]:
    names = [option for option, _ in control.options]
    label, first = control.label, control.first
    return {"name": name, "names": names, "label": label, "first": first}
