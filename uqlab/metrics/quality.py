"""How good predictions are: likelihood, calibration, and what refusing some gains.

The prediction is the mean of the members' probabilities. For the mean of the logits, as
in some papers, give `log_prediction(logits, "logits")[None]` as logits. Everything is
computed in float64; losses are in nats. One logit z of a sigmoid is the two classes
`torch.stack([torch.zeros_like(z), z], -1)`; of several labels each is such a pair.
Pixels are samples: `logits.movedim(2, -1).flatten(1, -2)`, `labels.flatten()`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from sklearn.metrics import f1_score
from torch import Tensor
from torch.nn.functional import one_hot

from uqlab.core.checks import (
    ArrayLike,
    as_labels,
    as_logits,
    as_scores,
    as_tensor,
    at_least,
    finite,
    one_of,
    within,
)
from uqlab.uncertainty import bisected, classes_first

Pool = Literal["probabilities", "logits"]
TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def log_prediction(
    logits: ArrayLike, pool: Pool = "probabilities"
) -> Float[Tensor, "samples classes"]:
    """Return the logarithm of the ensemble's predicted probabilities.

    Parameters
    ----------
    logits
        Of the members, [members, samples, classes].
    pool
        "probabilities": the mean of the members' probabilities; "logits": softmax of
        the mean logits.

    Returns
    -------
    Tensor
        [samples, classes], float64. `log_prediction(logits)[None] / temperature` are
        again logits: those of a calibrated ensemble of one.

    Raises
    ------
    ValueError
        For logits of another shape, that are empty or not finite, and for another pool.
    """
    logits = as_logits(logits)
    one_of("pool", pool, ("probabilities", "logits"))
    chunks = []
    for _, z in classes_first(logits, torch.float64):  # z [classes, members, n]
        mean = z.mean(1) if pool == "logits" else z.log_softmax(0).logsumexp(1)
        chunks.append(mean.log_softmax(0))
    return torch.cat(chunks, 1).T.contiguous()


# By sample ----------------------------------------------------------------------------
def _predicted(logits, labels):
    """Return log-probabilities [samples, classes] and labels on their device."""
    log_p = log_prediction(logits)
    return log_p, as_labels(labels, *log_p.shape).to(log_p.device)


def _hits(logits, labels):
    """Return 1 where the most probable class is the label, else 0."""
    log_p, labels = _predicted(logits, labels)
    return (log_p.argmax(1) == labels).double()


def _losses(logits, labels):
    log_p, labels = _predicted(logits, labels)
    return -log_p.gather(1, labels[:, None])[:, 0]


def _residuals(logits, labels):
    """Return probabilities [samples, classes], and those minus one-hot labels."""
    log_p, labels = _predicted(logits, labels)
    p = log_p.exp()
    return p, p - one_hot(labels, p.shape[1])


def _squared_errors(logits, labels):
    return _residuals(logits, labels)[1].square().sum(1)


def _disagreements(logits, _):
    """Return the share of pairs of members that predict different classes."""
    logits = as_logits(logits)
    members = len(logits)
    votes = one_hot(logits.argmax(-1), logits.shape[-1]).sum(0).double()
    return (votes * (members - votes)).sum(1) / max(1, members * (members - 1))


# name -> a function (logits, labels) that returns [samples], float64
BY_SAMPLE: dict[str, Callable[[ArrayLike, ArrayLike], Tensor]] = {
    "accuracy": _hits,
    "nll": _losses,
    "brier": _squared_errors,
    "disagreement": _disagreements,
}


# Predictions --------------------------------------------------------------------------
def accuracy(logits: ArrayLike, labels: ArrayLike) -> float:
    """Return the fraction of samples whose most probable class is the label."""
    return _hits(logits, labels).mean().item()


def nll(logits: ArrayLike, labels: ArrayLike) -> float:
    """Return the mean negative log-likelihood of the labels, in nats."""
    return _losses(logits, labels).mean().item()


def brier(logits: ArrayLike, labels: ArrayLike) -> float:
    """Return the Brier score in [0, 2], the mean sum of squared errors."""
    return _squared_errors(logits, labels).mean().item()


def macro_f1(logits: ArrayLike, labels: ArrayLike) -> float:
    """Return F1 averaged over the classes among labels or predictions."""
    log_p, labels = _predicted(logits, labels)
    return float(f1_score(labels.cpu(), log_p.argmax(1).cpu(), average="macro"))


def quality(runs: Sequence[ArrayLike], labels: ArrayLike) -> dict[str, float]:
    """Return accuracy, F1, ECE, its floor, NLL and Brier score; means over runs."""
    measures = [accuracy, macro_f1, ece, _mean_floor, nll, brier]
    names = ["accuracy", "F1", "ECE", "ECE floor", "NLL", "Brier"]
    found = [[measure(logits, labels) for measure in measures] for logits in runs]
    return dict(zip(names, np.mean(found, 0).tolist(), strict=True))


# Calibration: whether confidence is what accuracy is ----------------------------------
def ece(logits: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Return the expected calibration error of the most probable class.

    The weighted |confidence - accuracy| over bins (lo, hi] of equal width. It is biased
    upwards by about sqrt(bins / samples): compare it with `ece_floor`. A confidence of
    half precision may be rounded across an edge of the bins.

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
        Number of inputs, drawn anew each time from those given; None: each once.
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
    at, size = bins_of(confidence, bins), len(confidence)
    count = size if n is None else at_least("n", n)
    rows = torch.arange(size)
    values = []
    for _ in range(at_least("draws", draws)):
        if n is not None:
            rows = torch.randint(size, (count,), generator=generator)
        hit = torch.rand(count, generator=generator) < confidence[rows]
        values.append(_binned_gap(at[rows], confidence[rows] - hit.double(), bins))
    return float(np.mean(values)), float(np.quantile(values, 0.95))


def _mean_floor(logits, labels):
    """Return the ECE that chance gives the prediction at its best temperature."""
    return ece_floor(logits, labels=labels)[0]


def adaptive_ece(logits: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Return the calibration error over bins of equal count (Nixon et al. 2019).

    Samples of equal confidence share their mean gap.
    """
    at_least("bins", bins)
    confidence, hit = _confidence(logits, labels)
    gaps = _in_order(confidence - hit, confidence.round(decimals=6))
    sums = torch.stack([of_bin.sum() for of_bin in gaps.tensor_split(bins)])
    return (sums.abs().sum() / len(gaps)).item()


def classwise_ece(logits: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Return the binned |p_c - frequency of c|, mean over c (Kull et al. 2019)."""
    p, errors = _residuals(logits, labels)
    return _binned_gap(bins_of(p, bins), errors, bins)


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
    log_p, labels = _predicted(log_prediction(logits, pool)[None], labels)
    of_label = log_p.gather(1, labels[:, None])[:, 0]

    def too_low(temperature):
        p = (log_p / temperature).softmax(1)
        return ((p * log_p).sum(1) - of_label).mean() > 0

    return bisected(too_low)  # the NLL is convex in 1 / T: this is its slope


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


def _confidence(logits, labels):
    """Return the probability of the most probable class, and its hits, 0 or 1."""
    log_p, labels = _predicted(logits, labels)
    top, predicted = log_p.max(1)
    return top.exp(), (predicted == labels).double()


def _binned_gap(at, gaps, bins):
    """Return the sum over bins of |sum of the gaps| / samples; of columns the mean."""
    sums = gaps.new_zeros(bins, *gaps.shape[1:]).scatter_add_(0, at, gaps)
    return (sums.abs().sum() / gaps.numel()).item()


# Selective prediction: without the inputs that a score calls uncertain ----------------
def risk_coverage(
    logits: ArrayLike, labels: ArrayLike, scores: ArrayLike
) -> tuple[Float[Tensor, " samples"], Float[Tensor, " samples"]]:
    """Return coverages i / n and the error rates of the i least uncertain samples.

    Parameters
    ----------
    logits, labels
        [members, samples, classes] and [samples].
    scores
        [samples], higher = more uncertain; samples of equal score share their mean
        error.
    """
    errors = _in_order(1 - _hits(logits, labels), scores)
    count = torch.ones_like(errors).cumsum(0)
    return count / len(errors), errors.cumsum(0) / count


def aurc(logits: ArrayLike, labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the mean selective risk over coverages 1/n..1 (Geifman et al. 2019)."""
    return risk_coverage(logits, labels, scores)[1].mean().item()


def augrc(logits: ArrayLike, labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the area under the generalised risk (accepted errors / n).

    By trapezoids from (0, 0). A random order has (1 - accuracy) / 2.

    References
    ----------
    Traub et al. 2024, arXiv 2407.01032.
    """
    coverage, risk = risk_coverage(logits, labels, scores)
    accepted = coverage * risk
    return (accepted.mean() - accepted[-1] / (2 * len(accepted))).item()


def risk_at_coverage(
    logits: ArrayLike, labels: ArrayLike, scores: ArrayLike, coverage: float = 0.8
) -> float:
    """Return the error rate among the ceil(coverage * n) least uncertain samples."""
    within("coverage", coverage, "(0, 1]")
    risk = risk_coverage(logits, labels, scores)[1]
    covered = math.ceil(coverage * len(risk) - 1e-9)  # 0.07 * 100 is a little above 7
    return risk[covered - 1].item()


def coverage_at_risk(
    logits: ArrayLike, labels: ArrayLike, scores: ArrayLike, risk: float = 0.05
) -> float:
    """Return the largest coverage whose selective risk is at most `risk`, or 0."""
    within("risk", risk, "[0, 1]")
    coverages, risks = risk_coverage(logits, labels, scores)
    return max(coverages[risks <= risk + 1e-12].tolist(), default=0.0)


def by_quantile(
    values: ArrayLike,
    scores: ArrayLike,
    quantiles: Sequence[float] | np.ndarray | Tensor = TENTHS,
    mode: Literal["bucket", "acceptance"] = "bucket",
) -> Float[Tensor, " quantiles"]:
    """Return the mean of a value between successive quantiles of a score.

    Parameters
    ----------
    values
        [samples]: hits (0 or 1), losses, or confidence - hit, whose |mean| is a
        calibration error.
    scores
        [samples]; samples of equal score share their mean value.
    quantiles
        Increasing in (0, 1].
    mode
        "bucket": between a quantile and the one before; "acceptance": up to each
        quantile.

    Raises
    ------
    ValueError
        For quantiles that do not increase in (0, 1] or leave a bucket empty.

    References
    ----------
    Kirsch 2024, E.3.
    """
    one_of("mode", mode, ("bucket", "acceptance"))
    values = as_tensor("values", values, "samples", floating=False).double()
    levels = np.asarray(quantiles, dtype=np.float64)
    ends = np.rint(levels * len(values)).astype(int)
    parts = np.diff(ends, prepend=0)
    if not (len(levels) and levels[-1] <= 1 and (parts > 0).all()):
        raise ValueError(
            "quantiles must increase in (0, 1] with a sample in every bucket, "
            f"got {levels.tolist()} for {len(values)} samples"
        )
    ordered = _in_order(values, scores)
    if mode == "acceptance":
        means = [ordered[:end].mean() for end in ends]
    else:
        means = [part.mean() for part in ordered[: ends[-1]].split(parts.tolist())]
    return torch.stack(means)


def _in_order(values, scores):
    """Return values in the order of their scores, the mean where scores are equal."""
    ranked = as_scores(scores, len(values)).to(values.device).double()
    _, group, count = ranked.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(count, dtype=values.dtype).index_add_(0, group, values)
    return (sums / count).repeat_interleave(count)
