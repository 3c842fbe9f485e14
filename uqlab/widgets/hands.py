"""Explorers to drag and click: members, alarms, boards, drawings, guesses."""

import copy
import io
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from PIL import Image
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from uqlab import plots
from uqlab.core.checks import ArrayLike, as_tensor, one_of
from uqlab.core.modules import hooked, layers_of
from uqlab.data import Dataset
from uqlab.study import scoreboard, scores
from uqlab.study.methods import METHODS
from uqlab.widgets.hand import Hand, address, packed, short, spread

CARRIED = 3e6  # characters of the networks that a page of drawing carries


def cloud(logits: ArrayLike, groups: list[int] | None = None) -> Hand:
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
        len(groups) != len(logits) or not {0, 1, 2, 3}.issuperset(groups)
    ):
        raise ValueError(
            f"groups must be 0 to 3, one for each of the {len(logits)} members, "
            f"got {groups}"
        )
    logits = as_tensor("logits", logits, "members classes").detach()
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
) -> Hand:
    """Show an alarm whose threshold is set at the first setting, and what it catches.

    95 % of the in-distribution inputs pass at the first setting.

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
    """
    sets = {}
    for key in ("id", *images):
        for by_set in values.values():
            one_of("a set of images", key, by_set)
        rows = [short(by_set[key]) for by_set in values.values()]
        sets[key] = {"name": (names or {}).get(key, key), "values": rows}
    for key, inputs in images.items():
        rows = spread(len(inputs), shown)
        sets[key] |= {"shown": rows, "images": [_picture(inputs[row]) for row in rows]}
    data = {
        "what": what,
        "settings": [f"{s:g}" if isinstance(s, float) else str(s) for s in values],
        "pass": 0.95,
        "known": sets.pop("id"),
        "outside": list(sets.values()),
    }
    return Hand("alarm", data)


def _picture(image: ArrayLike) -> str:
    """Return an image as the address of a PNG that holds it."""
    memory = io.BytesIO()
    pixels = _bytes(torch.as_tensor(image)).movedim(0, -1).squeeze(-1)
    Image.fromarray(pixels.numpy()).save(memory, "png")
    return address(memory.getvalue(), "png")


def _bytes(image: Tensor) -> Tensor:
    """Return pixels from 0 to 255 of an image of bytes, or of numbers in [0, 1]."""
    image = image.detach().cpu()
    if image.dtype == torch.uint8:
        return image
    return (255 * image.float().clamp(0, 1)).round().byte()


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
    """Return the values of each method and seed, and Student's quantile for them."""
    wide: Any = board.pivot(index="seed", columns="method", values=columns)
    names = list(board["method"].unique())
    return {
        "methods": [_look(name) for name in names],
        "t": float(stats.t.ppf(0.975, len(wide) - 1)),
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
    members = {name: scores.members(model) for name, model in models.items()}
    size = sum(p.numel() for few in members.values() for p in few[0].parameters())
    fitting = max(1, int(CARRIED / (4 / 3 * size + 1)))
    carried = {}
    images = train[:nearest]
    inputs = cast(Tensor, train.inputs)
    for name, networks in members.items():
        carried[name] = [_in_page(network, inputs) for network in networks[:fitting]]
    data = {
        "side": inputs.shape[-1],
        "what": what,
        "models": carried,
        "classes": list(map(str, train.classes)),
        "examples": list(map(_grey, examples.values())),
        "called": list(examples),
        "images": list(map(_grey, images.inputs)),
        "labels": images.labels.tolist(),
    }
    return Hand("draw", data)


@torch.no_grad()
def _in_page(network: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
    """Return the layers of a perceptron in 8 bits, after a comparison with it."""
    network = copy.deepcopy(network).cpu().eval()
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
        layer = {"scale": short(scale), "bias": short(bias)}
        carried.append({"weights": packed(whole.to(torch.int8)), **layer})
    return carried, h


def _grey(image: Tensor) -> str:
    """Return the pixels from 0 to 255 as text."""
    return packed(_bytes(image).float().mean(0).round().byte())
