"""Explorers: sliders above a picture that one of the notebook's own functions draws."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from uqlab import plots


def explore(draw: Callable[..., Figure], controls: Mapping[str, ipywidgets.ValueWidget], hint: str = ""):
    """Show `draw(**values)` and redraw it whenever a control moves; returns the widget.

    draw: the values of the controls by name -> a new figure. controls: name -> ipywidgets control. hint: one line that
    says what is seen. The picture is an image that is exchanged whole, so nothing flickers and headless runs work.
    """
    picture = ipywidgets.Image(format="png", layout=ipywidgets.Layout(max_width="100%"))
    first = {name: control.value for name, control in controls.items()}

    def redraw(_: Any = None) -> None:
        fig = draw(**{name: control.value for name, control in controls.items()})
        picture.layout.width = f"{110 * fig.get_figwidth():.0f}px"
        picture.value = plots.png(fig)

    def reset(_: Any) -> None:
        for name, control in controls.items():
            control.value = first[name]

    control: Any  # the stubs of ipywidgets know too little
    longest = max(len(getattr(control, "description", "")) for control in controls.values())
    for control in controls.values():
        if hasattr(control, "continuous_update"):
            control.continuous_update = False
        control.style.description_width = f"{0.55 * longest:.0f}em"  # one width, so that the sliders line up
        control.layout.width = "min(36em, 100%)"
        control.observe(redraw, "value")
    button = ipywidgets.Button(description="reset", tooltip="back to the first values")
    button.on_click(reset)
    redraw()
    parts = [ipywidgets.HTML(hint)] if hint else []
    return ipywidgets.VBox([*parts, *controls.values(), button, picture])
