"""The explorer of predictions: sub-ensembles of a regression."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from uqlab import plots
from uqlab.widgets.explorer import Explorer


def collapse(
    x: Float[Tensor, " points"],
    predictions: Mapping[int, Float[Tensor, "groups points"]],
    background: Callable[[Axes], Any] | None = None,
) -> Explorer:
    """Show sub-ensembles of a regression: their predictions, and the variance between.

    Parameters
    ----------
    x
        The one input, [points].
    predictions
        Size of a sub-ensemble -> the mean prediction of each, [groups, points].
    background
        Draws the data into the left axes.
    """
    sizes = list(predictions)
    colors = dict(zip(sizes, plots.sequential(len(sizes)), strict=True))
    variance = {size: values.var(0) for size, values in predictions.items()}
    start = variance[sizes[0]].mean()
    every = torch.stack(list(variance.values())).clamp_min(1e-12)
    low, high = every.min().item(), every.max().item()

    reach = 1.1 * max(values.abs().max().item() for values in predictions.values())
    figure, (left, right) = plots.figure(2, height=2.6)
    for ax in (left, right):
        ax.set(xlabel="$x$", xlim=(x.min().item(), x.max().item()))
    left.set(ylabel="prediction", ylim=(-reach, reach))
    if background:
        background(left)
    for size in sizes:
        right.plot(x, variance[size], color=colors[size], alpha=0.2, linewidth=1.1)
    right.set(yscale="log", ylim=(low / 2, 2 * high))
    right.set(ylabel="variance between them", title="epistemic uncertainty")

    def draw(size: int) -> None:
        left.plot(x, predictions[size].T, color=colors[size], linewidth=0.9, alpha=0.9)
        left.set_title(f"{len(predictions[size])} sub-ensembles of {size}")
        right.plot(x, variance[size], color=colors[size], linewidth=1.4)

    def seen(size: int) -> str:
        mean = variance[size].mean()
        return (
            f"Left: what each sub-ensemble of {size} predicts. Right: the variance "
            f"between them, mean {mean:.2g}, {100 * mean / start:.0f} % of that "
            f"between sub-ensembles of {sizes[0]} (pale lines: other sizes)."
        )

    slider = ipywidgets.SelectionSlider(
        options=sizes, value=sizes[0], description="networks each"
    )
    return Explorer(draw, {"size": slider}, seen, figure)
