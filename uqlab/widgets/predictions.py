"""The explorer of predictions: sub-ensembles of a regression."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from uqlab import plots
from uqlab.widgets.frames import Control, explore
from uqlab.widgets.hand import Hand


def collapse(
    x: Float[Tensor, " points"],
    predictions: Mapping[int, Float[Tensor, "groups points"]],
    background: Callable[[Axes], Any] | None = None,
) -> Hand:
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
    figure, (left, right) = _axes(x, predictions, variance)
    if background:
        background(left)
    for size in sizes:
        _draw_lines(right, x, variance[size], colors[size], 0.2)

    def draw(size):
        _draw_lines(left, x, predictions[size].T, colors[size])
        left.set_title(f"{len(predictions[size])} sub-ensembles of {size}")
        _draw_lines(right, x, variance[size], colors[size])

    def seen(size):
        return _text(size, sizes[0], variance[size].mean(), variance[sizes[0]].mean())

    return explore(draw, {"size": Control("networks each", sizes)}, seen, figure)


def _draw_lines(ax: Axes, x: Tensor, y: Tensor, color: Any, alpha: float = 1) -> None:
    ax.plot(x, y, color=color, linewidth=1.1, alpha=alpha)


def _text(size: int, first: int, mean: Tensor, start: Tensor) -> str:
    return (
        f"Left: what each sub-ensemble of {size} predicts. Right: the variance "
        f"between them, mean {mean:.2g}, {100 * mean / start:.0f} % of that "
        f"between sub-ensembles of {first} (pale lines: other sizes)."
    )


def _axes(
    x: Tensor, predictions: Mapping[int, Tensor], variance: Mapping[int, Tensor]
) -> tuple[Figure, Any]:
    """Return a figure whose axes hold all predictions and variances."""
    figure, axes = plots.figure(2, height=2.6)
    for ax in axes:
        ax.set(xlabel="$x$", xlim=(x.min().item(), x.max().item()))
    reach = 1.1 * max(values.abs().max().item() for values in predictions.values())
    axes[0].set(ylabel="prediction", ylim=(-reach, reach))
    low, high = torch.cat(list(variance.values())).clamp_min(1e-12).aminmax()
    axes[1].set(yscale="log", ylim=(low.item() / 2, 2 * high.item()))
    axes[1].set(ylabel="variance between them", title="epistemic uncertainty")
    return figure, axes
