"""Explorers that answer the hand: a JavaScript module each, drawn in the browser.

They work with a kernel or without one. The module of an explorer is `static/<name>.js`
behind `static/shared.js`. Its `data` are JSON and become text and attributes, never
HTML; what the reader has made of them comes back as `state`.
"""

import base64
import functools
import html
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import anywidget
import numpy as np
import pandas as pd
import torch
import traitlets
from jaxtyping import Float
from matplotlib.colors import to_hex
from PIL import Image
from scipy import stats
from torch import Tensor, nn

from uqlab import plots, training
from uqlab.analysis.representations import embed
from uqlab.data import Dataset
from uqlab.heads import separation
from uqlab.study import scoreboard
from uqlab.study.methods import METHODS
from uqlab.widgets.explorer import told

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
    answer
        What the kernel answers to a message of the module, where it asks.
    """

    data = traitlets.Dict().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    _css = (STATIC / "hands.css").read_text()

    def __init__(
        self,
        name: str,
        data: Mapping[str, Any],
        answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ):
        self.name, self.answer = name, answer
        modules = [(STATIC / f"{file}.js").read_text() for file in ("shared", name)]
        self._esm = "\n".join(modules)
        plain = json.dumps({"colors": COLORS, **data}, allow_nan=False)
        super().__init__(data=json.loads(plain))
        self.on_msg(self._reply)

    def _reply(self, _: Any, message: dict[str, Any], __: Any) -> None:
        if self.answer is None:
            return
        try:
            self.send({"ask": message["ask"], **self.answer(message)})
        except BaseException as error:  # a browser shows it nowhere else
            self.send({"ask": message["ask"], "error": f"No answer: {told(error)}"})
            raise

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the live explorer, and its HTML for where there is no kernel."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        still = FRAME.format(name=html.escape(self.name), page=html.escape(self.html()))
        return {**bundle[0], "text/html": still}, bundle[1]

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


def cloud(logits: Float[Tensor, "members 3"], groups: list[int] | None = None) -> Hand:
    """Show members as points of the simplex that can be dragged, copied and removed.

    `state` has members (probabilities), groups, jackknife and parts, as in
    `uncertainty.decompose_groups`.

    Parameters
    ----------
    logits
        [members, 3].
    groups
        The group of each member, 0 to 3. With them the bars show what lies between and
        within the groups.
    """
    if groups is not None and (
        len(groups) != len(logits) or not {*groups} <= {*range(4)}
    ):
        raise ValueError(
            f"groups must be 0 to 3, one for each of the {len(logits)} members, "
            f"got {groups}"
        )
    members = logits.detach().double().softmax(-1).tolist()
    return Hand("cloud", {"members": members, "groups": groups})


def alarm(
    values: Mapping[Any, Mapping[str, Float[Tensor, " inputs"]]],
    images: Mapping[str, Float[Tensor, "samples c h w"]],
    names: Mapping[str, str] | None = None,
    *,
    what: str = "width",
    passing: float = 0.95,
    shown: int = 40,
) -> Hand:
    """Show an alarm whose threshold is set at the first setting, and what it catches.

    `state` has at (place of the setting), s (of the set), threshold, auroc, caught and
    false_alarms.

    Parameters
    ----------
    values
        Setting -> set -> mutual information of its inputs; the in-distribution set is
        "id".
    images
        The inputs of each OOD set, [samples, channels, height, width].
    names
        Set -> its name, where that is another.
    what
        The settings' name.
    passing
        The share of in-distribution inputs that the threshold lets through.
    shown
        How many images of each OOD set are shown.
    """
    names = {**{key: key for key in ("id", *images)}, **(names or {})}

    def listed(key: str) -> dict[str, Any]:
        rows = [
            by_set[key].detach().double().cpu().tolist() for by_set in values.values()
        ]
        short = [[float(f"{value:.7g}") for value in row] for row in rows]
        return {"name": names[key], "values": short}

    strangers = []
    for key, inputs in images.items():
        places = np.linspace(0, len(inputs) - 1, min(shown, len(inputs)))
        rows = places.astype(int).tolist()
        pictures = [_picture(inputs[row]) for row in rows]
        strangers.append({**listed(key), "shown": rows, "images": pictures})
    data = {
        "what": what,
        "settings": [f"{s:g}" if isinstance(s, float) else str(s) for s in values],
        "pass": passing,
        "known": listed("id"),
        "strangers": strangers,
    }
    return Hand("alarm", data)


def _picture(image: Float[Tensor, "c h w"]) -> str:
    """Return an image as the address of a PNG that holds it."""
    pixels = (255 * image.detach().cpu().float().clamp(0, 1)).round().byte()
    memory = io.BytesIO()
    Image.fromarray(pixels.movedim(0, -1).squeeze(-1).numpy()).save(memory, "png")
    return f"data:image/png;base64,{base64.b64encode(memory.getvalue()).decode()}"


def front(
    boards: Mapping[str, pd.DataFrame],
    quality: str,
    cared: Iterable[str],
    limits: Iterable[str],
    words: Mapping[str, str] | None = None,
) -> Hand:
    """Show quality against cost of methods, and what `scoreboard.recommend` says.

    `state` has quality, kind, limits, best, runner_up and reason.

    Parameters
    ----------
    boards
        Kind of network -> board, a table as of `scoreboard.measure`.
    quality
        The column of `cared` that is shown first.
    cared, limits
        Columns: qualities, and what one can pay with.
    words
        Column -> what it is, where its name does not say.
    """
    columns, paid, words = (
        list(dict.fromkeys([quality, *cared])),
        list(limits),
        words or {},
    )
    asked = [*columns, *(column for column in paid if column not in columns)]

    def look(name: str) -> dict[str, Any]:
        method = METHODS.get(name)
        if method is None:
            known = {"color": plots.NEUTRAL, "marker": "o"}
        else:
            known = {"color": method.color, "marker": method.marker}
        return {"name": name, "label": scoreboard.label(name), **known}

    def board_data(board: pd.DataFrame) -> dict[str, Any]:
        wide: Any = board.pivot(index="seed", columns="method", values=asked)
        names = list(board["method"].unique())
        return {
            "methods": [look(name) for name in names],
            "t": float(stats.t.ppf(0.975, len(wide) - 1)),
            "columns": {c: wide[c][names].to_numpy().T.tolist() for c in asked},
        }

    def places(column: str) -> list[float]:
        means: Any = [b.groupby("method")[column].mean() for b in boards.values()]
        ninths = np.linspace(0, 1, 9)
        marks = pd.concat(means).quantile(ninths, interpolation="nearest")
        return sorted({float(mark) for mark in marks})

    data = {
        "boards": {kind: board_data(board) for kind, board in boards.items()},
        "cared": [[column, words.get(column, column)] for column in columns],
        "limits": [[c, words.get(c, c), places(c)] for c in paid],
        "less": [column for column in asked if scoreboard.sign(column) < 0],
    }
    return Hand("front", data)


def head_map(
    values: Float[Tensor, "layers heads"],
    order: Sequence[tuple[int, int]],
    features: Callable[[int, int, int, str], Float[Tensor, "inputs width"]],
    *,
    known: str,
    others: Sequence[str],
    removed: Sequence[int] = (0,),
    path: Mapping[str, Sequence[float]] | None = None,
    alone: Mapping[tuple[int, int], Mapping[str, float]] | None = None,
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
    values = torch.as_tensor(values).double().cpu()
    layers, heads = values.shape
    colors: Any = plots.head_colors(values).to_rgba(values.numpy())

    def table(value: Callable[[int, int], Any]) -> list[list[Any]]:
        return [
            [value(layer, head) for head in range(heads)] for layer in range(layers)
        ]

    def cell(layer: int, head: int) -> dict[str, Any]:
        color = to_hex(colors[layer, head])
        return {"value": values[layer, head].item(), "color": color}

    def seen(gone: int, layer: int, head: int) -> dict[str, Any]:
        sets = [features(gone, layer, head, name).cpu() for name in (known, *others)]
        apart = [separation(sets[0][:, None], other[:, None]) for other in sets[1:]]
        xy = embed(torch.cat(sets), "pca")
        xy = (99 * xy / xy.abs().max()).round().int().split([len(x) for x in sets])
        rows = [
            np.linspace(0, len(x) - 1, min(shown, len(x))).astype(int) for x in sets
        ]
        return {
            "points": [x[i].flatten().tolist() for x, i in zip(xy, rows, strict=True)],
            "apart": [[float(distance) for distance in pair] for pair in apart],
        }

    path = {name: [float(v) for v in along] for name, along in (path or {}).items()}
    single = {}
    if alone:
        of_head = {pair: dict(values) for pair, values in alone.items()}
        single = {n: table(lambda *pair, n=n: of_head[pair][n]) for n in path}
    data = {
        "cells": table(cell),
        "order": [list(pair) for pair in order],
        "removed": list(removed),
        "known": known,
        "others": list(others),
        "path": path,
        "alone": single,
        "clouds": [table(functools.partial(seen, gone)) for gone in removed],
    }
    return Hand("map", data)


def draw(
    models: Mapping[str, nn.Module],
    train: Dataset,
    examples: Mapping[str, Float[Tensor, "c h w"]],
    *,
    what: str = "ensemble",
    nearest: int = 4,
) -> Hand:
    """Show a canvas; what a model's members say of it, and how uncertain they are.

    Parameters
    ----------
    models
        Name -> trained ensemble or network.
    train
        Whose classes they learned, and where the nearest images are looked up, by the
        Euclidean distance of their pixels.
    examples
        Name -> image [channels, height, width], of which two can be blended.
    what
        What the models are.
    nearest
        How many images are looked up.
    """
    inputs: Any = train.inputs
    channels, side = inputs.shape[1], inputs.shape[-1]
    flat = inputs.cpu().float().mean(1).flatten(1)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        pixels = torch.tensor(message["pixels"], dtype=torch.float32) / 255
        x = pixels.view(1, 1, side, side).expand(-1, channels, -1, -1)
        logits = training.predict(models[message["model"]], x)
        distances = (flat - pixels.flatten()).norm(dim=1)
        rows = distances.topk(min(nearest, len(flat)), largest=False).indices.tolist()
        labels = [train.classes[int(train.labels[row])] for row in rows]
        return {
            "members": logits[:, 0].double().softmax(-1).tolist(),
            "near": [
                [c, _picture(inputs[i])] for c, i in zip(labels, rows, strict=True)
            ],
        }

    grey = [image.cpu().float().mean(0).clamp(0, 1) for image in examples.values()]
    data = {
        "side": side,
        "what": what,
        "models": list(models),
        "classes": list(map(str, train.classes)),
        "examples": [(255 * x).round().int().flatten().tolist() for x in grey],
        "called": list(examples),
    }
    return Hand("draw", data, answer)
