"""The explorer of predictions: sub-ensembles of a regression."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from uqlab import plots
from uqlab.widgets.frames import Control, explore
from uqlab.widgets.hand import Hand


def collapse(
    x: Float[Tensor, " points"],
    predictions: Mapping[int, Float[Tensor, "groups points"]],
    background: Callable[[Axes], Any],
) -> Hand:
    """Show sub-ensembles of a regression: their predictions, and the variance between.

    Parameters
    ----------
    x
        The one input, [points], in ascending order.
    predictions
        Size of a sub-ensemble -> the mean prediction of each, [groups, points].
    background
        A function that draws the data into the left axes.
    """
    sizes = list(predictions)
    variance = {size: values.var(0) for size, values in predictions.items()}
    figure, (left, right) = plots.figure(2, height=2.6)
    background(left)
    left.set(xlabel="$x$", xmargin=0, ylabel="prediction")
    right.set(xlabel="$x$", xmargin=0, ylabel="variance between them", yscale="log")
    right.set_title("epistemic uncertainty")
    for size, values in predictions.items():
        left.plot(x, values.T, alpha=0)  # the limits are those of all sizes
        right.plot(x, variance[size], color=plots.EPISTEMIC, alpha=0.2)

    def draw(size):
        left.plot(x, predictions[size].T, color=plots.EPISTEMIC)
        left.set_title(f"{len(predictions[size])} sub-ensembles of {size}")
        right.plot(x, variance[size], color=plots.EPISTEMIC)

    seen = partial(_text, first=sizes[0], variance=variance)
    return explore(draw, {"size": Control("networks each", sizes)}, seen, figure)


def _text(size: int, first: int, variance: Mapping[int, Tensor]) -> str:
    mean, start = variance[size].mean(), variance[first].mean()
    return (
        f"Left: predictions of each sub-ensemble of {size}. Right: the variance "
        f"between them, mean {mean:.2g}, {100 * mean / start:.0f} % of that "
        f"between sub-ensembles of {first} (pale lines: other sizes)."
    )
