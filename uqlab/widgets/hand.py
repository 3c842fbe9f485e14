"""What explorers are: a JavaScript module each, drawn in the browser.

They work with a kernel or without one. The module of an explorer is `static/<name>.js`
behind `static/shared.js`. Its `data` are JSON and become text and attributes, never
HTML; what the reader has made of them comes back as `state`.
"""

import base64
import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import anywidget
import numpy as np
import traitlets
from IPython import get_ipython
from torch import Tensor

from uqlab import plots
from uqlab.core.checks import ArrayLike, as_tensor

STATIC = resources.files("uqlab.widgets") / "static"
COLORS = {
    "aleatoric": plots.ALEATORIC,
    "epistemic": plots.EPISTEMIC,
    "neutral": plots.NEUTRAL,
    "mark": plots.MARK,
    "group_3": "#2A8577",
    "group_4": "#7A5FA8",
}
CALM = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:"
)
ALONE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{calm}">
<title>{name}</title>
<style>:root {{ color-scheme: light dark; }}
{style}</style></head><body>
<script type="application/json" id="data">{data}</script>
<script type="module">{module}
const data = JSON.parse(document.getElementById("data").textContent);
const kept = {{ data, state: {{}} }};
const model = {{
  get: name => kept[name], set: (name, value) => (kept[name] = value),
  save_changes() {{}}, on() {{}},
}};
render({{ model, el: document.body }});
const tall = () => `${{document.body.offsetHeight + 20}}px`;
const fit = () => window.frameElement?.style.setProperty("height", tall());
new ResizeObserver(fit).observe(document.body);
</script></body></html>
"""
FRAME = (
    '<iframe title="{name}" srcdoc="{page}" style="width: 100%; border: 0"></iframe>'
)


class Hand(anywidget.AnyWidget):
    """The explorer of `static/<name>.js`.

    Parameters
    ----------
    name
        Of the module.
    data
        What it shows.
    text
        What stands in its place where nothing but text is shown; else its name.
    """

    data = traitlets.Dict().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    _css = (STATIC / "hands.css").read_text()

    def __init__(
        self,
        name: str,
        data: Mapping[str, Any],
        text: str = "",
    ):
        self.name = name
        self.text = text or name
        modules = [(STATIC / f"{file}.js").read_text() for file in ("shared", name)]
        self._esm = "\n".join(modules)
        plain = json.dumps({"colors": COLORS, **data}, allow_nan=False)
        super().__init__(data=json.loads(plain))

    def open(self) -> None:
        """Connect to the front end, unless a program runs the page."""
        if not _headless():
            super().open()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the live explorer, and its HTML for where there is no kernel."""
        bundle: Any = super()._repr_mimebundle_(**kwargs) if self.comm else ({}, {})
        still = FRAME.format(name=html.escape(self.name), page=html.escape(self.html()))
        plain = {"text/plain": self.text, "text/html": still}
        return {**bundle[0], **plain}, bundle[1]

    def html(self) -> str:
        """Return a page of this explorer alone, which is forbidden to load anything."""
        data = json.dumps(self.data).replace("<", "\\u003c")  # no tag can begin
        return ALONE.format(
            calm=CALM,
            name=html.escape(self.name),
            style=self._css,
            data=data,
            module=self._esm,
        )


def _headless() -> bool:
    """Return whether a program runs the page: its requests name no cell.

    papermill and nbclient store the state of what is live, and an exported page would
    then fetch what shows it from a network, in place of the HTML that it has.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    return bool(kernel) and "cellId" not in kernel.get_parent().get("metadata", {})


def address(image: bytes, kind: str) -> str:
    """Return the address of an image file that holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def packed(values: Tensor) -> str:
    """Return the bytes of numbers as text."""
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()


def short(values: ArrayLike) -> list[float]:
    """Return numbers that are short in JSON."""
    numbers = as_tensor("values", values).detach().double()
    return [float(f"{value:.7g}") for value in numbers.tolist()]


def spread(count: int, most: int) -> list[int]:
    """Return the places of at most `most` of so many things, evenly spread."""
    return np.linspace(0, count - 1, min(most, count)).astype(int).tolist()
