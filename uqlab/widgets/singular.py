"""The explorer of singular vectors: which of them are new after training."""

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl
import torch
from jaxtyping import Float
from matplotlib.colors import to_hex
from torch import Tensor

from uqlab.analysis.spectra import random_level
from uqlab.widgets.hand import Hand, packed, short

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
        member: dict[str, Any] = {name: short(each) for name, each in found.items()}
        member["cosines"] = packed((255 * cosines).round().byte())
        members.append(member)
    return members
