"""What is gained by leaving out the inputs that a score calls uncertain."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from uqlab.core.checks import ArrayLike, as_scores, as_tensor, one_of, within
from uqlab.metrics.quality import hits

TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


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
    errors = 1 - hits(logits, labels)
    count = torch.arange(1, len(errors) + 1, dtype=torch.float64, device=errors.device)
    return count / len(errors), in_order(errors, scores).cumsum(0) / count


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
    return ((accepted.sum() - accepted[-1] / 2) / len(accepted)).item()


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
    levels = torch.as_tensor(np.asarray(quantiles, dtype=np.float64))
    ends = (levels * len(values)).round().long().to(values.device)
    counts = ends.diff(prepend=ends.new_zeros(1))
    if not (len(levels) and levels[-1] <= 1 and (counts > 0).all()):
        raise ValueError(
            "quantiles must increase in (0, 1] with a sample in every bucket, "
            f"got {levels.tolist()} for {len(values)} samples"
        )
    sums = in_order(values, scores).cumsum(0)[ends - 1]
    if mode == "acceptance":
        return sums / ends
    return sums.diff(prepend=sums.new_zeros(1)) / counts


def in_order(values: Tensor, scores: ArrayLike) -> Tensor:
    """Return values in the order of their scores, the mean where scores are equal."""
    ranked = as_scores(scores, len(values)).to(values.device).double()
    _, group, count = ranked.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(count, dtype=values.dtype).index_add_(0, group, values)
    return (sums / count).repeat_interleave(count)
