"""Explorers that answer the hand: members, alarms, boards, drawings, guesses."""

import functools
import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from PIL import Image
from scipy import stats
from torch import Tensor, nn

from uqlab import plots, training
from uqlab.data import Dataset
from uqlab.study import scoreboard
from uqlab.study.methods import METHODS
from uqlab.widgets.hand import Hand, address, short, spread


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
    sets: dict[str, dict[str, Any]] = {}
    for key in ("id", *images):
        rows = [short(by_set[key]) for by_set in values.values()]
        sets[key] = {"name": (names or {}).get(key, key), "values": rows}
    for key, inputs in images.items():
        rows = spread(len(inputs), shown)
        sets[key] |= {"shown": rows, "images": [_picture(inputs[row]) for row in rows]}
    data = {
        "what": what,
        "settings": [f"{s:g}" if isinstance(s, float) else str(s) for s in values],
        "pass": passing,
        "known": sets.pop("id"),
        "outside": list(sets.values()),
    }
    return Hand("alarm", data)


def _picture(image: Tensor) -> str:
    """Return an image as the address of a PNG that holds it."""
    pixels = (255 * image.detach().cpu().float().clamp(0, 1)).round().byte()
    memory = io.BytesIO()
    Image.fromarray(pixels.movedim(0, -1).squeeze(-1).numpy()).save(memory, "png")
    return address(memory.getvalue(), "png")


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
    method = METHODS.get(name)
    color, marker = (method.color, method.marker) if method else (plots.NEUTRAL, "o")
    label = scoreboard.label(name)
    return {"name": name, "label": label, "color": color, "marker": marker}


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
    side = inputs.shape[-1]
    similar = functools.partial(_similar, train, inputs.cpu().float().mean(1), nearest)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        pixels = torch.tensor(message["pixels"]).float() / 255
        x = pixels.view(side, side).expand_as(inputs[:1])
        members = training.predict(models[message["model"]], x)[:, 0].double()
        return {"members": members.softmax(-1).tolist(), "near": similar(pixels)}

    data = {
        "side": side,
        "what": what,
        "models": list(models),
        "classes": list(map(str, train.classes)),
        "examples": list(map(_grey, examples.values())),
        "called": list(examples),
    }
    return Hand("draw", data, answer)


def _grey(image: Tensor) -> list[int]:
    """Return the pixels from 0 to 255."""
    grey = image.cpu().float().mean(0).clamp(0, 1)
    return (255 * grey).round().int().flatten().tolist()


def _similar(
    train: Dataset, grey: Tensor, count: int, pixels: Tensor
) -> list[tuple[str, str]]:
    """Return the class and the picture of the images nearest to the pixels."""
    inputs: Any = train.inputs
    distances = (grey.flatten(1) - pixels).norm(dim=1)
    rows = distances.topk(min(count, len(grey)), largest=False).indices.tolist()
    return [(train.classes[int(train.labels[i])], _picture(inputs[i])) for i in rows]
