"""Explorers to drag, click and draw: a JavaScript module each, in the browser.

They work with a kernel or without one. The module of an explorer is `static/<name>.js`
behind `static/shared.js`. Its `data` are JSON and become text and attributes, never
HTML; what the reader has made of them comes back as `state`.
"""

import base64
import copy
import html
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import anywidget
import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
import traitlets
from IPython import get_ipython
from jaxtyping import Float
from matplotlib.colors import to_hex
from PIL import Image
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from uqlab import plots
from uqlab.analysis.spectra import random_level
from uqlab.core.checks import (
    ArrayLike,
    as_image,
    as_tensor,
    at_least,
    by_name,
    one_of,
)
from uqlab.core.modules import hooked, layers_of
from uqlab.core.recording import plain
from uqlab.data import Dataset
from uqlab.study import scoreboard, scores
from uqlab.study.methods import METHODS

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
        super().__init__(data=plain("data", {"colors": COLORS, **data}))

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


def _packed(values: Tensor) -> str:
    """Return the bytes of numbers as text."""
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()


def _short(values: ArrayLike) -> list[float]:
    """Return numbers that are short in JSON."""
    numbers = as_tensor("values", values).detach().double()
    return [float(f"{value:.7g}") for value in numbers.tolist()]


def spread(count: int, most: int) -> list[int]:
    """Return the places of at most `most` of so many things, evenly spread."""
    return np.linspace(0, count - 1, min(most, count)).astype(int).tolist()


Number = int | float | np.number | Tensor


def guess(
    question: str,
    low: Number = 0,
    high: Number = 0,
    unit: str = "",
    *,
    choices: Sequence[str] | np.ndarray = (),
    answer: Number | str | None = None,
    then: str = "",
    step: Number | None = None,
) -> Hand:
    """Ask for a guess, and open what it hides once the guess was made.

    `guess(question, low, high)` asks for a number, `guess(question, choices=[...])` for
    one of some words. `state` has the guess.

    Parameters
    ----------
    question
        Shown alone where nothing can be answered.
    low, high
        The ends of a slider.
    unit
        Of the number.
    choices
        In place of a slider.
    answer
        What was to be guessed, which may lie beyond the slider: how far off the guess
        was is then said.
    then
        What else is opened: paragraphs, with **bold**, *italic* and `code`.
    step
        Of the slider; else a round one.

    Raises
    ------
    ValueError
        If there is neither a range nor choices, or the answer is none of the choices.
    """
    choices = list(choices)
    if not choices and low >= high:
        raise ValueError(
            f"a guess needs choices, or a range from low to high; got {low} to {high}"
        )
    if choices and answer not in (None, *choices):
        raise ValueError(f"the answer {answer!r} is none of the choices {choices}")
    data = {
        "question": question,
        "range": [low, high, step],
        "unit": unit,
        "choices": choices,
        "answer": answer,
        "then": then,
    }
    return Hand("guess", data, text=question)


CARRIED = 3e6  # characters of the networks that a page of drawing carries


def cloud(logits: ArrayLike, groups: ArrayLike | None = None) -> Hand:
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
    groups = plain("groups", groups)
    if groups is not None and (
        len(groups) != len(logits) or not {0, 1, 2, 3}.issuperset(groups)
    ):
        raise ValueError(
            f"groups must be 0 to 3, one for each of the {len(logits)} members, "
            f"got {groups}"
        )
    logits = as_tensor("logits", logits, "members classes")
    one_of("the number of classes", logits.shape[1], (3,))
    members = logits.double().softmax(-1).tolist()
    return Hand("cloud", {"members": members, "groups": groups})


def alarm(
    values: Mapping[Any, Mapping[str, ArrayLike]],
    images: Mapping[str, ArrayLike],
    names: Mapping[str, str] | None = None,
    *,
    what: str = "width",
    shown: int = 40,
    passing: Sequence[float] = (0.95,),
) -> Hand:
    """Show an alarm whose threshold is set at the first setting, and what it catches.

    `state` has at (place of the setting), s (of the set), threshold, auroc, caught and
    false_alarms.

    Parameters
    ----------
    values
        Setting -> set -> mutual information of its inputs, [inputs]; the
        in-distribution set is "id".
    images
        The inputs of each OOD set, [samples, channels, height, width].
    names
        Set -> its name, where that is another.
    what
        The settings' name.
    shown
        How many images of each OOD set are shown.
    passing
        The share of in-distribution inputs that pass at the first setting. If there are
        several, a slider chooses one of them.
    """
    sets = {}
    for key in ("id", *images):
        for by_set in values.values():
            one_of("a set of images", key, by_set)
        rows = [_short(by_set[key]) for by_set in values.values()]
        sets[key] = {"name": (names or {}).get(key, key), "values": rows}
    for key, inputs in images.items():
        rows = spread(len(inputs), shown)
        sets[key] |= {"shown": rows, "images": [_picture(inputs[row]) for row in rows]}
    data = {
        "what": what,
        "settings": [f"{s:g}" if isinstance(s, float) else str(s) for s in values],
        "pass": list(passing),
        "known": sets.pop("id"),
        "outside": list(sets.values()),
    }
    return Hand("alarm", data)


def _picture(image: ArrayLike) -> str:
    """Return an image as the address of a PNG that holds it."""
    memory = io.BytesIO()
    pixels = _bytes(image).movedim(0, -1).squeeze(-1)
    Image.fromarray(pixels.numpy()).save(memory, "png")
    return address(memory.getvalue(), "png")


def _bytes(image: ArrayLike) -> Tensor:
    """Return pixels from 0 to 255 of an image of bytes, or of numbers in [0, 1]."""
    return (255 * as_image(image).cpu().clamp(0, 1)).round().byte()


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
    words = words or {}
    columns = list(dict.fromkeys([quality, *cared]))
    paid = list(limits)
    asked = list(dict.fromkeys([*columns, *paid]))
    means: Any = [board.groupby("method")[paid].mean() for board in boards.values()]
    marks = pd.concat(means).quantile(np.linspace(0, 1, 9), interpolation="nearest")
    data = {
        "boards": {k: _board(b, asked) for k, b in boards.items()},
        "cared": [[c, words.get(c, c)] for c in columns],
        "limits": [[c, words.get(c, c), sorted({*marks[c].tolist()})] for c in paid],
        "less": [column for column in asked if scoreboard.sign(column) < 0],
    }
    return Hand("front", data)


def _board(board: pd.DataFrame, columns: list[str]) -> dict[str, Any]:
    """Return the values of each method and seed, and Student's quantiles for them."""
    wide: Any = board.pivot(index="seed", columns="method", values=columns)
    at_least("the number of seeds of a board", len(wide), 2)
    names = list(board["method"].unique())
    return {
        "methods": [_look(name) for name in names],
        "t": float(stats.t.ppf(0.975, len(wide) - 1)),
        "t_judged": float(stats.t.ppf(0.975, max(1, len(wide) - len(wide) // 2 - 1))),
        "columns": {c: wide[c][names].to_numpy().T.tolist() for c in columns},
    }


def _look(name: str) -> dict[str, Any]:
    """Return how a method is drawn."""
    look = {"color": plots.NEUTRAL, "marker": "o"}
    if name in METHODS:
        look = METHODS[name].look
    return look | {"name": name, "label": scoreboard.label(name)}


def draw(
    models: Mapping[str, nn.Module],
    train: Dataset,
    examples: Mapping[str, Float[Tensor, "c h w"]],
    *,
    what: str = "ensemble",
    nearest: int = 300,
) -> Hand:
    """Show a canvas; what members predict for a drawing, and how uncertain they are.

    The page carries the networks, with weights of 8 bits, so no kernel is needed. Of
    every model it has the first members, equally many of each, as long as all of them
    fit in 3 MB.

    `state` has members (probabilities) and parts, as in `uncertainty.decompose`.

    Parameters
    ----------
    models
        Name -> trained ensemble or network, of linear layers with ReLU between them.
    train
        Whose classes they learned, and which images are nearest to a drawing, by the
        Euclidean distance of their pixels.
    examples
        Name -> image [channels, height, width], of which two can be blended.
    what
        What the models are.
    nearest
        How many images of `train` the page carries to look for the nearest ones.

    Raises
    ------
    ValueError
        If a member is another kind of network.
    """
    by_name("models", models, '{"ensemble": ensemble}')
    inputs = as_tensor("train.inputs", train.inputs, "samples channels height width")
    for image in examples.values():
        one_of("the shape of an example", np.shape(image)[1:], [inputs.shape[2:]])
    images = train[:nearest]
    data = {
        "side": inputs.shape[-1],
        "what": what,
        "models": _carried(models, inputs),
        "classes": list(map(str, train.classes)),
        "examples": list(map(_grey, examples.values())),
        "called": list(examples),
        "images": list(map(_grey, images.inputs)),
        "labels": images.labels.tolist(),
    }
    return Hand("draw", data)


def _carried(models: Mapping[str, nn.Module], inputs: Tensor) -> dict[str, Any]:
    """Return as many members of each model as fit in a page."""
    members = {name: scores.members(model) for name, model in models.items()}
    size = sum(p.numel() for few in members.values() for p in few[0].parameters())
    fitting = max(1, int(CARRIED / (4 / 3 * size + 1)))
    return {
        name: [_in_page(network, inputs) for network in networks[:fitting]]
        for name, networks in members.items()
    }


@torch.no_grad()
def _in_page(network: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
    """Return the layers of a perceptron in 8 bits, after a comparison with it."""
    network = copy.deepcopy(network).cpu().float().eval()
    shape = inputs.shape[1:]
    grey = inputs[:50].cpu().float().mean(1, keepdim=True)
    logits = network(grey.expand(-1, *shape))
    try:
        carried, h = _quantised(_layers(network, shape), grey.flatten(1))
    except RuntimeError:  # shapes that do not fit are no chain
        h = torch.zeros_like(logits)
    if torch.dist(h, logits) > 0.1 * logits.norm():
        raise ValueError(
            "draw takes networks of linear layers with ReLU between them, not this "
            f"{type(network).__name__}"
        )
    return carried


def _layers(network, shape):
    """Return weights and biases of linear layers.

    The first weight is what the layer makes of each grey pixel, because a network may
    flatten or select its inputs.
    """
    linear = layers_of(network, nn.Linear)
    seen = []
    count = shape[1:].numel()
    pixels = torch.cat([torch.zeros(1, count), torch.eye(count)]).view(
        -1, 1, *shape[1:]
    )
    hooks = (
        m.register_forward_hook(lambda *call: seen.append(call[-1])) for m in linear
    )
    with hooked(hooks):
        network(pixels.expand(-1, *shape))
    first = [((h[1:] - h[0]).mT, h[0]) for h in seen[:1]]
    return first + [(m.weight, m.bias) for m in linear[1:]]


def _quantised(layers, h):
    """Return layers in 8 bits, and what they make of h [batch, pixels]."""
    carried = []
    for weight, bias in layers:
        scale = weight.abs().amax(1).clamp_min(1e-30) / 127
        whole = (weight / scale[:, None]).round()
        bias = torch.zeros_like(scale) if bias is None else bias
        h = F.linear(h.relu(), whole * scale[:, None], bias)
        layer = {"scale": _short(scale), "bias": _short(bias)}
        carried.append({"weights": _packed(whole.to(torch.int8)), **layer})
    return carried, h


def _grey(image: ArrayLike) -> str:
    """Return the pixels from 0 to 255 as text."""
    return _packed(_bytes(image).float().mean(0).round().byte())


ROWS = 24  # leading directions that are shown
MEMBERS = 4  # of each method


def spectra(
    before: Mapping[str, Float[Tensor, "out in"]],
    after: Mapping[str, Callable[[str], Float[Tensor, "members out in"]]],
    *,
    k: int = 10,
    threshold: float = 0.5,
    layer: str | None = None,
) -> Hand:
    """Show singular vectors of a member against those before; intruders in red.

    Of each method the first four members are shown, of each the leading 24 vectors.

    Parameters
    ----------
    before
        Name of a layer -> its pretrained weight.
    after
        Name of a method -> its members' weights of a layer, as by
        `functools.partial(diversity.member_weights, ensemble)`.
    k, threshold
        As in `spectra.intruder_dimensions`.
    layer
        Shown first.
    """
    old = {name: _directions(weight) for name, weight in before.items()}
    rows = min(max(ROWS, k), *(len(values) for _, values in old.values()))
    compared = []  # [methods][layers][members]
    for weights in after.values():
        compared.append([_compared(weights(name), *old[name], rows) for name in before])
    data = {
        "methods": list(after),
        "layers": list(before),
        "first": list(before).index(layer) if layer else 0,
        "k": min(k, rows),
        "threshold": threshold,
        "shades": [to_hex(color) for color in mpl.colormaps["viridis_r"](range(256))],
        "level": [random_level(*u.shape) for u, _ in old.values()],
        "after": compared,
    }
    return Hand("spectra", data)


def _directions(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.detach().cpu().double()
    return torch.linalg.svd(weight, full_matrices=False)[:2]


def _compared(
    weights: Tensor, old: Tensor, before: Tensor, rows: int
) -> list[dict[str, Any]]:
    """Return each member's directions: their values and |cos| to the old ones."""
    members = []
    for u, values in zip(*_directions(weights[:MEMBERS]), strict=True):
        cosines = (u.T @ old).abs()[:rows]
        found = {"before": before[:rows], "values": values[:rows]}
        found["largest"] = cosines.amax(1)
        member: dict[str, Any] = {name: _short(each) for name, each in found.items()}
        member["cosines"] = _packed((255 * cosines).round().byte())
        members.append(member)
    return members
