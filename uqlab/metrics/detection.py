"""How well a score tells inputs out of distribution (OOD) from those in it (ID).

Scores are uncertainties: higher = more uncertain, and OOD is the positive class.
"""

from typing import NamedTuple

import numpy as np
from sklearn.metrics import average_precision_score

from uqlab.core.checks import ArrayLike, as_scores


class OOD(NamedTuple):
    """How well a score separates OOD inputs, the positive class, from ID inputs."""

    auroc: float
    aupr_out: float
    aupr_in: float
    fpr95: float


def ood_detection(id_scores: ArrayLike, ood_scores: ArrayLike) -> OOD:
    """Return AUROC, AUPR with OOD and with ID as positives, and FPR95 of a score.

    AUROC counts ties as one half. AUPR is average precision, and equal scores enter
    together. FPR95 is the fraction of ID inputs at or above the highest threshold that
    at least 95 % of OOD inputs reach; with ID as the positive class it is that of
    `ood_detection(-ood_scores, -id_scores)`.

    Parameters
    ----------
    id_scores, ood_scores
        [samples] each; higher = more uncertain.

    Raises
    ------
    ValueError
        For scores that are empty or not finite.

    Examples
    --------
    >>> ood_detection([0.1, 0.3], [0.2, 0.4]).auroc
    0.75
    """
    inside = scores_of(id_scores, "id_scores")
    outside = scores_of(ood_scores, "ood_scores")
    truth = np.repeat([0, 1], [len(inside), len(outside)])
    scores = np.concatenate([inside, outside])
    return OOD(
        auroc=auroc(inside, outside),
        aupr_out=float(average_precision_score(truth, scores)),
        aupr_in=float(average_precision_score(1 - truth, -scores)),
        fpr95=fpr95(inside, outside),
    )


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the probability that an OOD score is above an ID score, ties one half."""
    inside = np.sort(inside)
    outside = np.sort(outside)  # not needed, but to search in order is faster
    below = np.searchsorted(inside, outside)
    up_to = np.searchsorted(inside, outside, side="right")
    return float((below + up_to).mean() / (2 * len(inside)))


def fpr95(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the share of ID scores that reach what 95 % of OOD scores reach."""
    reached = np.sort(outside)[-95 * len(outside) // 100]  # by the ceil(0.95 n) largest
    return float((inside >= reached).mean())


def scores_of(scores: ArrayLike, name: str) -> np.ndarray:
    """Return checked scores [samples] as float64 of NumPy."""
    return as_scores(scores, name=name).detach().cpu().double().numpy()
