"""Explorers that answer the hand: a JavaScript module each, drawn in the browser, with a kernel or without one.

The module of an explorer is `static/<name>.js` behind `static/shared.js`. Its `data` are JSON and become text and
attributes, never HTML; what the reader has made of them comes back as `state`.
"""

import base64
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
from torch import Tensor, nn

from uqlab import plots, training
from uqlab.data import Dataset
from uqlab.heads import separation
from uqlab.representations import embed
from uqlab.study import scoreboard
from uqlab.study.methods import METHODS
from uqlab.widgets.explorer import told

STATIC = resources.files("uqlab.widgets") / "static"
COLORS = {
    "aleatoric": plots.ALEATORIC, "epistemic": plots.EPISTEMIC, "neutral": plots.NEUTRAL, "mark": plots.MARK,
    "group_3": "#2A8577", "group_4": "#7A5FA8",
}  # fmt: skip
CALM = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
ALONE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{calm}"><title>{name}</title>
<style>:root {{ color-scheme: light dark; }}
{style}</style></head><body>
<script type="application/json" id="data">{data}</script>
<script type="module">{module}
const kept = {{ data: JSON.parse(document.getElementById("data").textContent), state: {{}} }};
const model = {{ get: name => kept[name], set: (name, value) => (kept[name] = value), save_changes() {{}}, on() {{}} }};
render({{ model, el: document.body }});
const fit = () => window.frameElement?.style.setProperty("height", `${{document.body.offsetHeight + 20}}px`);
new ResizeObserver(fit).observe(document.body);
</script></body></html>
"""
FRAME = (
    '<iframe title="{name}" srcdoc="{page}" style="width: 100%; border: 0"></iframe>'
)


class Hand(anywidget.AnyWidget):
    """The explorer of `static/<name>.js`. `data`: what it shows. `state`: what the reader has made of it.

    answer: what the kernel answers to a message of the module, where it asks.
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
        self._esm = "\n".join(
            (STATIC / f"{each}.js").read_text() for each in ("shared", name)
        )
        super().__init__(
            data=json.loads(json.dumps({"colors": COLORS, **data}, allow_nan=False))
        )
        self.on_msg(self._reply)

    def _reply(self, _: Any, message: dict[str, Any], __: Any) -> None:
        if self.answer is None:
            return
        try:
            self.send({"ask": message["ask"], **self.answer(message)})
        except (
            BaseException
        ) as error:  # a browser shows the error of a callback nowhere else
            self.send({"ask": message["ask"], "error": f"No answer: {told(error)}"})
            raise

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live explorer, and itself as HTML for where there is no kernel, as in an exported page."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        still = FRAME.format(name=html.escape(self.name), page=html.escape(self.html()))
        return {**bundle[0], "text/html": still}, bundle[1]

    def html(self) -> str:
        """A page of this explorer alone: it needs no kernel, and its policy forbids it to load anything."""
        data = json.dumps(self.data).replace("<", "\\u003c")  # no tag can begin
        return ALONE.format(
            calm=CALM,
            name=html.escape(self.name),
            style=self._css,
            data=data,
            module=self._esm,
        )


def cloud(logits: Float[Tensor, "members 3"], groups: list[int] | None = None) -> Hand:
    """Members as points of the simplex that can be dragged, copied, added and removed, and their decomposition.

    groups: the group of each member, 0 to 3. With them the bars show what lies between and within the groups.
    `state` has members (probabilities), groups, jackknife and parts, as in `uncertainty.decompose_groups`.
    """
    if groups is not None and (
        len(groups) != len(logits) or not {*groups} <= {*range(4)}
    ):
        raise ValueError(
            f"groups must be 0 to 3, one for each of the {len(logits)} members, got {groups}"
        )
    return Hand(
        "cloud",
        {"members": logits.detach().double().softmax(-1).tolist(), "groups": groups},
    )


def alarm(
    values: Mapping[Any, Mapping[str, Float[Tensor, " inputs"]]],
    images: Mapping[str, Float[Tensor, "samples c h w"]],
    names: Mapping[str, str] | None = None,
    *,
    what: str = "width",
    passing: float = 0.95,
    shown: int = 40,
) -> Hand:
    """An alarm whose threshold is set at the first setting, and what it catches at the others, beside the AUROC.

    values: setting -> set -> mutual information of its inputs; the in-distribution set is "id". images: the inputs of
    each OOD set, of which some are shown. names: set -> its name, where that is another. what: the settings' name.
    passing: the share of in-distribution inputs that the threshold lets through.
    `state` has at (place of the setting), s (of the set), threshold, auroc, caught and false_alarms.
    """
    names = {**{key: key for key in ("id", *images)}, **(names or {})}

    def listed(key: str) -> dict[str, Any]:
        rows = [by[key].detach().double().cpu().tolist() for by in values.values()]
        return {
            "name": names[key],
            "values": [[float(f"{value:.7g}") for value in row] for row in rows],
        }

    strangers = []
    for key, inputs in images.items():
        some = [
            int(i) for i in np.linspace(0, len(inputs) - 1, min(shown, len(inputs)))
        ]
        strangers.append(
            {
                **listed(key),
                "shown": some,
                "images": [_picture(inputs[i]) for i in some],
            }
        )
    settings = [
        f"{each:g}" if isinstance(each, float) else str(each) for each in values
    ]
    data = {
        "what": what,
        "settings": settings,
        "pass": passing,
        "known": listed("id"),
        "strangers": strangers,
    }
    return Hand("alarm", data)


def _picture(image: Float[Tensor, "c h w"]) -> str:
    """An image as the address of a PNG that holds it."""
    pixels = (
        (255 * image.detach().cpu().float().clamp(0, 1))
        .round()
        .byte()
        .movedim(0, -1)
        .squeeze(-1)
        .numpy()
    )
    memory = io.BytesIO()
    Image.fromarray(pixels).save(memory, "png")
    return f"data:image/png;base64,{base64.b64encode(memory.getvalue()).decode()}"


def front(
    boards: Mapping[str, pd.DataFrame],
    quality: str,
    cared: Iterable[str],
    limits: Iterable[str],
    words: Mapping[str, str] | None = None,
    *,
    repeats: int = 200,
    seed: int = 0,
) -> Hand:
    """Quality against cost of the methods of boards, tables as of `scoreboard.measure`, and what `recommend` says.

    boards: kind of network -> board. quality: the column of `cared` that is shown first. limits: columns, what one can
    pay with. words: column -> what it is, where its name does not say. repeats, seed: as of `scoreboard.recommend`.
    `state` has quality, kind, limits, best, runner_up and reason.
    """
    columns, paid, words = (
        list(dict.fromkeys([quality, *cared])),
        list(limits),
        words or {},
    )
    asked = [*columns, *(column for column in paid if column not in columns)]

    def one(board: pd.DataFrame) -> dict[str, Any]:
        wide: Any = board.pivot(index="seed", columns="method", values=asked)
        names = list(board["method"].unique())
        picks = np.random.default_rng(seed).integers(
            len(wide), size=(repeats, len(wide))
        )
        looks = [METHODS.get(name) for name in names]
        methods = [
            {"name": name, "label": getattr(look, "label", name), "color": getattr(look, "color", plots.NEUTRAL),
             "marker": getattr(look, "marker", "o")}
            for name, look in zip(names, looks, strict=True)
        ]  # fmt: skip
        values = {column: wide[column][names].to_numpy().T.tolist() for column in asked}
        return {"methods": methods, "picks": picks.tolist(), "columns": values}

    def places(column: str) -> list[float]:
        means: Any = [
            board.groupby("method")[column].mean() for board in boards.values()
        ]
        return sorted(
            {
                float(value)
                for value in pd.concat(means).quantile(
                    np.linspace(0, 1, 9), interpolation="nearest"
                )
            }
        )

    data = {
        "boards": {kind: one(board) for kind, board in boards.items()},
        "cared": [[column, words.get(column, column)] for column in columns],
        "limits": [
            [column, words.get(column, column), places(column)] for column in paid
        ],
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
    """A map of attention heads that is clicked, the network without the first of `order`, and one head's features.

    values: shown as colour. features: (number of removed heads, layer, head, set: `known` or one of `others`) -> that
    head's features of the set. removed: the numbers of removed heads to choose from. path: measure -> its value after
    the removal of 0, 1, ... heads. alone: head -> measure -> its value when only that head is removed. shown: points of
    each set, in the principal plane of all sets.
    `state` has gone (the number of removed heads), layer, head, other and apart, as of `heads.separation`.
    """
    values = torch.as_tensor(values).double().cpu()
    colors: Any = plots.head_colors(values).to_rgba(values.numpy())
    pairs = [
        [(layer, head) for head in range(values.shape[1])]
        for layer in range(len(values))
    ]

    def one(gone: int, layer: int, head: int) -> dict[str, Any]:
        sets = [features(gone, layer, head, name).cpu() for name in (known, *others)]
        found = [
            [float(part) for part in separation(sets[0][:, None], each[:, None])]
            for each in sets[1:]
        ]
        xy = embed(torch.cat(sets), "pca")
        parts = (
            (99 * xy / xy.abs().max()).round().int().split([len(each) for each in sets])
        )
        some = [
            np.linspace(0, len(part) - 1, min(shown, len(part))).astype(int)
            for part in parts
        ]
        points = [
            part[rows].flatten().tolist()
            for part, rows in zip(parts, some, strict=True)
        ]
        return {"points": points, "apart": found}

    data = {
        "cells": [[{"value": values[pair].item(), "color": to_hex(colors[pair])} for pair in row] for row in pairs],
        "order": [list(pair) for pair in order], "removed": list(removed), "known": known, "others": list(others),
        "path": {name: [float(value) for value in along] for name, along in (path or {}).items()},
        "alone": {name: [[alone[pair][name] for pair in row] for row in pairs] for name in path or {}} if alone else {},
        "clouds": [[[one(gone, *pair) for pair in row] for row in pairs] for gone in removed],
    }  # fmt: skip
    return Hand("map", data)


def draw(
    models: Mapping[str, nn.Module],
    train: Dataset,
    examples: Mapping[str, Float[Tensor, "c h w"]],
    *,
    what: str = "ensemble",
    nearest: int = 4,
) -> Hand:
    """A canvas, or a blend of two examples; what the members of a model say of it, and how their uncertainty splits.

    models: name -> trained ensemble or network; what: what they are. train: whose classes they learned, and where the
    nearest images are looked up, by the Euclidean distance of their pixels.
    """
    inputs: Any = train.inputs
    channels, side = inputs.shape[1], inputs.shape[-1]
    flat = inputs.cpu().float().mean(1).flatten(1)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        x = (
            torch.tensor(message["pixels"], dtype=torch.float32)
            .div(255)
            .view(1, 1, side, side)
        )
        logits = training.predict(
            models[message["model"]], x.expand(-1, channels, -1, -1)
        )
        rows = (
            torch.cdist(x.flatten(1), flat)[0]
            .topk(min(nearest, len(flat)), largest=False)
            .indices.tolist()
        )
        near = [
            [train.classes[int(train.labels[row])], _picture(inputs[row])]
            for row in rows
        ]
        return {"members": logits[:, 0].double().softmax(-1).tolist(), "near": near}

    pictures = [image.cpu().float().mean(0).clamp(0, 1).mul(255).round().int().flatten().tolist()
                for image in examples.values()]  # fmt: skip
    data = {"side": side, "what": what, "models": list(models), "classes": list(map(str, train.classes)),
            "examples": pictures, "called": list(examples)}  # fmt: skip
    return Hand("draw", data, answer)
