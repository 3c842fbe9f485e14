"""Whether confidence is what accuracy is: calibration errors, and a temperature."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from uqlab.core.checks import ArrayLike, as_tensor, at_least, finite
from uqlab.metrics.quality import (
    Pool,
    accuracy,
    brier,
    log_prediction,
    macro_f1,
    nll,
    predict,
    residuals,
)
from uqlab.metrics.selective import in_order
from uqlab.uncertainty import bisected


def ece(
    logits: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
) -> float:
    """Return the expected calibration error of the most probable class.

    The weighted |confidence - accuracy| over bins (lo, hi] of equal width. It is biased
    upwards by about sqrt(bins / samples): compare it with `ece_floor`.

    References
    ----------
    Guo et al. 2017, "On calibration of modern neural networks".
    """
    confidence, hit = _confidence(logits, labels)
    return _binned_gap(bins_of(confidence, bins), confidence - hit, bins)


def ece_floor(
    logits: ArrayLike,
    n: int | None = None,
    draws: int = 200,
    bins: int = 15,
    seed: int = 0,
    labels: ArrayLike | None = None,
) -> tuple[float, float]:
    """Return the ECE that a perfectly calibrated predictor has on as many inputs.

    Labels are drawn from the mean prediction, which is then calibrated by definition.
    What `ece` finds of them is chance.

    Parameters
    ----------
    logits
        [members, samples, classes].
    n
        Number of inputs, drawn from those given; None: each of them once.
    draws
        How often labels are drawn.
    bins
        As in `ece`.
    seed
        Of the draws.
    labels
        [samples]; the prediction first gets the temperature that fits them best.

    Returns
    -------
    tuple of float
        The mean over draws, and their 95 % quantile: an ECE above the quantile is
        significant.
    """
    log_p = log_prediction(logits)
    if labels is not None:
        log_p = (log_p / fit_temperature(log_p[None], labels)).log_softmax(1)
    confidence = log_p.amax(1).exp().cpu()
    generator = torch.Generator().manual_seed(seed)
    if n is not None:
        rows = torch.randint(len(confidence), (at_least("n", n),), generator=generator)
        confidence = confidence[rows]
    at = bins_of(confidence, bins)
    values = []
    for _ in range(at_least("draws", draws)):
        hit = torch.rand(at.shape, generator=generator) < confidence
        values.append(_binned_gap(at, confidence - hit.double(), bins))
    return float(np.mean(values)), float(np.quantile(values, 0.95))


def adaptive_ece(
    logits: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
) -> float:
    """Return the calibration error over bins of equal count (Nixon et al. 2019).

    Samples of equal confidence share their mean gap.
    """
    at_least("bins", bins)
    confidence, hit = _confidence(logits, labels)
    gaps = in_order(confidence - hit, confidence.round(decimals=6))
    sums = torch.stack([of_bin.sum() for of_bin in gaps.tensor_split(bins)])
    return (sums.abs().sum() / len(gaps)).item()


def classwise_ece(
    logits: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
) -> float:
    """Return the binned |p_c - frequency of c|, mean over c (Kull et al. 2019)."""
    p, errors = residuals(logits, labels)
    at = bins_of(p, bins)
    gaps = [_binned_gap(at[:, c], errors[:, c], bins) for c in range(p.shape[1])]
    return sum(gaps) / p.shape[1]


def calibration_gap(logits: ArrayLike, labels: ArrayLike) -> float:
    """Return |mean confidence - accuracy| over the whole set (Kirsch 2024, E.2)."""
    confidence, hit = _confidence(logits, labels)
    return (confidence - hit).mean().abs().item()


def fit_temperature(
    logits: ArrayLike, labels: ArrayLike, pool: Pool = "probabilities"
) -> float:
    """Return the temperature T that minimises the NLL of softmax(log_prediction / T).

    Members are pooled first, then calibrated. Fit it on validation data and apply it as
    `log_prediction(logits, pool)[None] / T`.

    Returns
    -------
    float
        Between 0.01 and 100; one of these ends means that the labels set no bound on
        that side.

    References
    ----------
    Guo et al. 2017, "On calibration of modern neural networks".
    """
    log_p, labels = predict(log_prediction(logits, pool)[None], labels)
    of_label = log_p.gather(1, labels[:, None])[:, 0]

    def too_low(temperature):
        p = (log_p / temperature).softmax(1)
        return ((p * log_p).sum(1) - of_label).mean() > 0

    return bisected(too_low)  # the NLL is convex in 1 / T: this is its slope


def _confidence(logits: ArrayLike, labels: ArrayLike) -> tuple[Tensor, Tensor]:
    """Return the probability of the most probable class, and its hits, 0 or 1."""
    log_p, labels = predict(logits, labels)
    top, predicted = log_p.max(1)
    return top.exp(), (predicted == labels).double()


def bins_of(confidence: ArrayLike, bins: int) -> Tensor:
    """Return the number of each confidence's bin (lo, hi], of equal ones of [0, 1].

    What is above an edge by a millionth at most is on it, whatever the type: 0.8 in
    float32 is above 0.8.
    """
    at_least("bins", bins)
    confidence = as_tensor("confidence", confidence).double()
    finite("confidence", confidence)
    edges = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    return torch.bucketize(confidence.contiguous(), edges + 1e-6)


def _binned_gap(at: Tensor, gaps: Tensor, bins: int) -> float:
    """Return the sum over bins of |sum of the gaps| / samples, whose bins are `at`."""
    sums = torch.bincount(at, weights=gaps, minlength=bins)
    return (sums.abs().sum() / len(gaps)).item()


def quality(runs: Sequence[ArrayLike], labels: ArrayLike) -> dict[str, float]:
    """Return accuracy, F1, ECE, NLL and Brier score, means over several runs."""
    measures = {
        "accuracy": accuracy,
        "F1": macro_f1,
        "ECE": ece,
        "NLL": nll,
        "Brier": brier,
    }
    return {
        name: sum(measure(logits, labels) for logits in runs) / len(runs)
        for name, measure in measures.items()
    }
