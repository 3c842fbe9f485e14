"""Losses of all members at once: outputs and labels [members, batch] -> [members]."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from uqlab.core.checks import (
    Inputs,
    as_labels,
    as_tensor,
    finite,
    no_probabilities,
    one_of,
)
from uqlab.core.modules import evaluating, rows_of
from uqlab.ensembles import Ensemble

# (outputs [members, batch, ...], labels [members, batch, ...]) -> losses [members]
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(
    logits: Float[Tensor, "members batch classes"],
    labels: Int[Tensor, "members batch"],
    class_weights: Float[Tensor, " classes"] | None = None,
    smoothing: float = 0.0,
) -> Float[Tensor, " members"]:
    """Return every member's mean cross-entropy on its own labels, in nats.

    Parameters
    ----------
    logits
        [members, batch, classes].
    labels
        [members, batch], 0 to classes - 1.
    class_weights
        [classes]; with them it is the weighted mean, as in torch.
    smoothing
        The share of every label that is spread over all classes alike.
    """
    if class_weights is not None:
        class_weights = class_weights.to(logits.device, torch.float32)
    values = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        class_weights,
        reduction="none",
        label_smoothing=smoothing,
    ).view(labels.shape)
    if class_weights is None:
        return values.mean(1)
    return values.sum(1) / class_weights[labels].sum(1)


def member_mean(logits: Tensor, labels: Int[Tensor, "*members batch"]) -> Tensor:
    """Return what a plain loop minimises: the sum over members of their mean loss.

    `member_mean(ensemble(x), y).backward()` gives each member the gradient of its own
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


def mean_square(outputs, targets):
    """Return every member's mean squared error."""
    return (outputs - targets.reshape(outputs.shape)).square().flatten(1).mean(1)


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
    one_of("loss", loss, ("cross_entropy", "mse"))
    with torch.no_grad(), evaluating(ensemble):
        outputs = ensemble(rows_of(two, slice(1)))[0]  # of one network for one sample
    if loss == "mse":
        return mean_square, functools.partial(_values, outputs)
    classes = outputs.shape[-1]
    no_probabilities(outputs)
    check = functools.partial(as_labels, classes=classes)
    if class_weights is None:
        return cross_entropy, check
    weights = _weights(class_weights, classes).to(outputs)
    return functools.partial(cross_entropy, class_weights=weights), check


def _as_many(labels, samples):
    """Return labels of any kind, checked."""
    y = as_tensor("labels", labels, floating=False).detach()
    if y.shape[:1] != (samples,):
        raise ValueError(
            f"labels must be as many as the inputs, {samples}, got {list(y.shape)}"
        )
    return y


def _of_members(loss, outputs, labels):
    """Return what a user's own loss returns; a mean over members is refused."""
    values = loss(outputs, labels)
    if not isinstance(values, Tensor) or values.shape != outputs.shape[:1]:
        got = list(values.shape) if isinstance(values, Tensor) else type(values)
        raise ValueError(
            f"loss must return one value a member, [{len(outputs)}], got {got}"
        )
    return values


def _values(outputs, labels, samples):
    """Return targets of a regression, checked."""
    y = _as_many(labels, samples)
    if not y.is_floating_point() or y[0].numel() != outputs.numel():
        raise ValueError(
            f'loss="mse" needs floating targets of {outputs.numel()} values a sample, '
            f"like the outputs; got {list(y.shape)} {y.dtype}"
        )
    finite("labels", y)
    return y.to(outputs.dtype)


def _weights(class_weights, classes):
    """Return the classes' weights, checked."""
    weights = as_tensor("class_weights", class_weights, "classes")
    bad = len(weights) != classes or bool((weights < 0).any())
    if bad or not weights.sum() > 0:
        raise ValueError(
            f"class_weights must be [{classes}], not negative and not all zero, "
            f"got {weights.tolist()}"
        )
    return weights
