"""Losses of all members at once: outputs and labels [members, batch] -> [members]."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from uqlab.core.checks import (
    IGNORED,
    Inputs,
    as_labels,
    as_logits,
    as_tensor,
    finite,
    one_of,
)
from uqlab.core.modules import evaluating
from uqlab.ensembles import Ensemble

# (outputs [members, batch, ...], labels [members, batch, ...]) -> losses [members]
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(
    logits: Float[Tensor, "members batch classes *places"],
    labels: Int[Tensor, "members batch *places"],
    class_weights: Float[Tensor, " classes"] | None = None,
    smoothing: float = 0.0,
) -> Float[Tensor, " members"]:
    """Return every member's mean cross-entropy on its own labels, in nats.

    Parameters
    ----------
    logits
        [members, batch, classes], or with places behind them, [members, batch, classes,
        height, width].
    labels
        [members, batch], 0 to classes - 1; of places [members, batch, height, width],
        where -100 does not count.
    class_weights
        [classes]; with them it is the weighted mean, as in torch.
    smoothing
        The share of every label that is spread over all classes alike.
    """
    if class_weights is not None:
        class_weights = class_weights.to(logits.device, torch.float32)
    values = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(0, 1),
        class_weights,
        reduction="none",
        label_smoothing=smoothing,
    ).view(len(labels), -1)
    if class_weights is None and labels.ndim == 2:
        return values.mean(1)
    counted = labels != IGNORED
    if class_weights is not None:
        counted = class_weights[labels * counted] * counted
    shares = counted.flatten(1).sum(1)
    return values.sum(1) / shares.masked_fill(shares == 0, 1)


def gaussian_nll(outputs: Tensor, targets: Tensor, beta: float = 0.0) -> Tensor:
    """Return every member's mean negative log-likelihood under its normal laws.

    In nats, without the constant log(2 pi) / 2, as in torch.

    Parameters
    ----------
    outputs
        [members, batch, ..., 2 k]: on the last axis k means, then the logarithms of
        their k variances.
    targets
        [members, batch, ..., k], or of k = 1 without the last axis.
    beta
        The power of the variance, held fixed, that weights each term: 0 is the
        likelihood, 1 gives means the gradient of a squared error. Seitzer et al. 2022
        recommend 0.5.

    References
    ----------
    Seitzer et al., "On the pitfalls of heteroscedastic uncertainty estimation with
    probabilistic neural networks", 2022.
    """
    mean, log_variance = _halves(outputs)
    error = mean - _like(mean, targets)
    values = (log_variance + error.square() * (-log_variance).exp()) / 2
    if beta:
        values = values * (beta * log_variance.detach()).exp()
    return values.flatten(1).mean(1)


def member_mean(logits: Tensor, labels: Int[Tensor, "*members batch"]) -> Tensor:
    """Return what a plain loop minimises: the sum over members of their mean loss.

    `member_mean(ensemble(x), y).backward()` gives each member the gradient of its
    loss, and what members share the gradient of their mean loss, as `fit` does.
    Clipping by one norm over all parameters couples the members; `fit` clips each for
    itself.

    Parameters
    ----------
    logits
        [members, batch, classes], what an ensemble returns.
    labels
        [batch], of all members, or [members, batch].
    """
    return cross_entropy(logits, labels.expand(logits.shape[:2])).sum()


def _halves(outputs):
    """Return means and log-variances; ValueError where one is without the other."""
    if outputs.shape[-1] % 2:
        raise ValueError(
            "gaussian_nll needs k means and k log-variances on the last axis, "
            f"got outputs {list(outputs.shape)}"
        )
    return outputs.chunk(2, -1)


def _like(outputs, labels):
    """Return labels in the outputs' shape, where at most axes of 1 are missing."""
    if _long(labels) != _long(outputs):
        raise ValueError(
            f"labels must be {list(outputs.shape)}, like the outputs (of gaussian_nll "
            f"like the means), got {list(labels.shape)}; use labels.permute"
        )
    return labels.reshape(outputs.shape)


def _long(t):
    """Return the lengths of axes that are not 1."""
    return [n for n in t.shape if n != 1]


def _binary_cross_entropy(logits, labels):
    labels = _like(logits, labels)
    values = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return values.flatten(1).mean(1)


def _mean_square(outputs, targets):
    return (outputs - _like(outputs, targets)).square().flatten(1).mean(1)


# What is learned from values like the outputs, by name.
OF_VALUES: dict[Any, Loss] = {
    "mse": _mean_square,
    "binary_cross_entropy": _binary_cross_entropy,
    "gaussian_nll": gaussian_nll,
}


def targets(
    ensemble: Ensemble, two: Inputs, loss: str | Loss, class_weights: Any
) -> tuple[Loss, Callable]:
    """Return the loss's function, and what checks labels (labels, samples) -> labels.

    `two` are inputs of up to two samples, by whose outputs labels are checked. The
    other parameters and the errors are those of `fit`.
    """
    if class_weights is not None and loss != "cross_entropy":
        raise ValueError(f'class_weights need loss="cross_entropy", got loss={loss!r}')
    if callable(loss):
        return functools.partial(_of_members, loss), _as_many
    one_of("loss", loss, ("cross_entropy", *OF_VALUES))
    with torch.no_grad(), evaluating(ensemble):
        # Of one network for one sample; batch norm without statistics wants two.
        outputs = ensemble(two)[0, :1]
    if loss in OF_VALUES:
        if loss == "gaussian_nll":
            outputs, _ = _halves(outputs)
        return OF_VALUES[loss], functools.partial(_values, loss, outputs)
    as_logits(outputs.movedim(1, -1) if outputs.ndim > 1 else outputs, "...")
    classes, *places = outputs.shape[1:]
    check = functools.partial(as_labels, classes=classes, places=places)
    if class_weights is None:
        return cross_entropy, check
    weights = as_tensor("class_weights", class_weights, "classes").to(outputs)
    if not (weights.min() >= 0 and weights.sum() > 0):
        raise ValueError("class_weights must be finite, not negative, not all zero")
    return functools.partial(cross_entropy, class_weights=weights), check


def _of_members(loss, outputs, labels):
    """Return what a user's own loss returns; a mean over members is refused."""
    todo = (
        f"loss must return one value a member, [{len(outputs)}]; of a loss of torch, "
        "for one network, take lambda outputs, labels: "
        "torch.stack([*map(loss, outputs, labels)])"
    )
    try:
        values = loss(outputs, labels)
    except (RuntimeError, ValueError) as error:
        error.add_note(todo)
        raise
    if values.shape != outputs.shape[:1]:
        raise ValueError(f"{todo}; got {list(values.shape)}")
    return values


def _as_many(labels, samples):
    """Return labels of any kind, checked."""
    y = as_tensor("labels", labels, floating=False).detach()
    if y.shape[:1] != (samples,):
        raise ValueError(f"labels must be {samples}, as inputs, got {list(y.shape)}")
    return y


def _values(loss, outputs, labels, samples):
    """Return targets that are no classes, checked."""
    y = _as_many(labels, samples)
    finite("labels", y)
    binary = loss == "binary_cross_entropy"
    if _long(y[0]) != _long(outputs) or (binary and (y.min() < 0 or y.max() > 1)):
        raise ValueError(
            f'loss="{loss}" needs labels {list(outputs.shape[1:])} a sample, of '
            f"binary_cross_entropy from 0 to 1; got {list(y.shape)}"
        )
    return y.to(outputs.dtype)
