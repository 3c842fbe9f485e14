"""How well a score finds OOD inputs, and how sure a measured number is.

Scores are uncertainties: higher = more uncertain, and OOD is the positive class.

Intervals over samples: the percentile bootstrap, of single rows or of groups of rows
that belong together. Over a few seeds: Student's t, because the bootstrap of five
numbers covers 83 % and not 95 %. Of a share of few trials: Clopper and Pearson, which
holds at 0 and 1 too.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy import stats
from sklearn.metrics import average_precision_score
from torch import Tensor

from uqlab.core.checks import ArrayLike, as_scores, at_least, one_of, within
from uqlab.metrics.quality import BY_SAMPLE


class OOD(NamedTuple):
    """How well a score separates OOD inputs, the positive class, from ID inputs."""

    auroc: float
    aupr_out: float
    aupr_in: float
    fpr95: float


class Interval(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float
    high: float

    def plus_minus(self, digits: int = 3) -> str:
        """Return the mean and half the width of its interval: "0.812 ± 0.010"."""
        half = (self.high - self.low) / 2
        return f"{self.mean:.{digits}f} ± {half:.{digits}f}"


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
    inside, outside = _pair(id_scores, ood_scores)
    truth = np.repeat([0, 1], [len(inside), len(outside)])
    scores = np.concatenate([inside, outside])
    return OOD(
        auroc=_auroc(inside, outside),
        aupr_out=float(average_precision_score(truth, scores)),
        aupr_in=float(average_precision_score(1 - truth, -scores)),
        fpr95=_fpr95(inside, outside),
    )


def _auroc(inside, outside):
    """Return the probability that an OOD score is above an ID score, ties one half."""
    inside = np.sort(inside)
    outside = np.sort(outside)  # not needed, but to search in order is faster
    below = np.searchsorted(inside, outside)
    up_to = np.searchsorted(inside, outside, side="right")
    return float((below + up_to).mean() / (2 * len(inside)))


def _fpr95(inside, outside):
    """Return the share of ID scores that reach what 95 % of OOD scores reach."""
    reached = np.sort(outside)[-95 * len(outside) // 100]  # by the ceil(0.95 n) largest
    return float((inside >= reached).mean())


def _pair(inside, outside):
    return _numbers("id_scores", inside), _numbers("ood_scores", outside)


def _numbers(name, scores):
    """Return checked scores [samples] as float64 of NumPy."""
    return as_scores(scores, name=name).cpu().double().numpy()


_SEPARATIONS = {"auroc": _auroc, "fpr95": _fpr95}


# Over samples -------------------------------------------------------------------------
def bootstrap(
    statistic: Callable,
    *arrays: ArrayLike,
    groups: ArrayLike | None = None,
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple:
    """Return the percentile bootstrap interval (low, high) of `statistic(*arrays)`.

    Parameters
    ----------
    statistic
        Returns a number, or an array: then low and high are arrays, a band. A tensor
        among the arrays stays one, which `torch.mean` takes and `np.mean` does not.
    *arrays
        Samples first; all are resampled alike. Lists and columns become arrays. Of
        more than two axes, such as logits [members, samples, classes], the samples'
        axis is the only one that is as long as the others' first.
    groups
        Integers [samples]: rows of one group belong together (corruptions of one image,
        folds with the same clip), and groups are drawn instead of rows. With dependent
        rows drawn one by one an interval is too narrow, up to the root of the group's
        size.
    repeats, seed, level
        Resamples, their random numbers, and the probability that the interval is to
        cover.

    Raises
    ------
    ValueError
        For numbers of samples that differ or are 0, and where lengths do not tell the
        samples' axis.
    """
    read = [x.detach() if isinstance(x, Tensor) else np.asarray(x) for x in arrays]
    pairs = [(x, _samples_axis(x, read)) for x in read]
    sizes = {x.shape[axis] for x, axis in pairs}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"arrays must share a positive number of samples, got {sizes}")
    size = sizes.pop()
    units = None
    if groups is not None:
        labels = as_scores(groups, size, "groups").cpu().numpy()
        units = [np.flatnonzero(labels == label) for label in np.unique(labels)]

    def drawn(rows):
        if units:
            rows = np.concatenate([units[unit] for unit in rows])
        return statistic(*(x[(*[slice(None)] * axis, rows)] for x, axis in pairs))

    return _resampled(drawn, [len(units or range(size))], repeats, seed, level)


def interval(
    runs: Sequence[ArrayLike],
    labels: ArrayLike,
    measure: Literal["accuracy", "nll", "brier", "disagreement"] = "accuracy",
    *,
    than: Sequence[ArrayLike] | None = None,
    groups: ArrayLike | None = None,
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Return a measure and its percentile bootstrap interval over the inputs.

    Parameters
    ----------
    runs
        One or several logits [members, samples, classes], over which each input's value
        is averaged.
    labels
        [samples].
    measure
        "accuracy", "nll", "brier", or "disagreement": the share of pairs of members
        that predict two classes.
    than
        Other runs on the same inputs. The result is then the first mean minus theirs,
        and the interval is paired. It does not know what other seeds of training would
        change.
    groups, repeats, seed, level
        As in `bootstrap`.
    """
    one_of("measure", measure, tuple(BY_SAMPLE))
    values: Any = 0.0
    for sign, each in ((1, runs), (-1, than)):
        if each is not None:
            at_least("the number of runs", len(each))
            by_run = [BY_SAMPLE[measure](logits, labels) for logits in each]
            values = values + sign * torch.stack(by_run).mean(0).detach().cpu().numpy()
    ends = bootstrap(
        np.mean, values, groups=groups, repeats=repeats, seed=seed, level=level
    )
    return Interval(*map(float, (values.mean(), *ends)))


def auroc_interval(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    *,
    than: tuple[ArrayLike, ArrayLike] | None = None,
    measure: Literal["auroc", "fpr95"] = "auroc",
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the AUROC, or of FPR95.

    ID and OOD scores are resampled apart.

    Parameters
    ----------
    id_scores, ood_scores
        [samples] each.
    than
        Other scores of the same inputs, (ID, OOD). The interval is then that of the
        first value minus theirs, paired: both see the same resamples.
    repeats, seed, level
        As in `bootstrap`.
    measure
        "auroc" or "fpr95".
    """
    one_of("measure", measure, tuple(_SEPARATIONS))
    pairs = [_pair(id_scores, ood_scores), *([_pair(*than)] if than else [])]
    sizes = {(len(inside), len(outside)) for inside, outside in pairs}
    if len(sizes) > 1:
        raise ValueError(f"`than` must be scores of the same inputs, got {sizes}")
    separation = _SEPARATIONS[measure]

    def drawn(rows, others):
        first, *second = [separation(a[rows], b[others]) for a, b in pairs]
        return first - sum(second)

    low, high = _resampled(drawn, sizes.pop(), repeats, seed, level)
    return float(low), float(high)


def _resampled(statistic, sizes, repeats, seed, level):
    """Return the quantiles of `statistic(*rows)`, of rows for each of the sizes."""
    within("level", level, "(0, 1)")
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(at_least("repeats", repeats)):
        rows = [rng.integers(size, size=size) for size in sizes]
        values.append(np.asarray(statistic(*rows)))
    tails = [(1 - level) / 2, (1 + level) / 2]
    return tuple(np.quantile(np.stack(values), tails, axis=0))


def _samples_axis(array, arrays):
    """Return the samples' axis: 0 of small arrays, else the one as long as theirs."""
    if array.ndim in (1, 2):
        return 0
    lengths = {len(other) for other in arrays if other.ndim in (1, 2)}
    axes = [axis for axis, length in enumerate(array.shape) if length in lengths]
    if len(axes) != 1:
        raise ValueError(
            f"the samples' axis of an array {list(array.shape)} is not clear; resample "
            "rows: bootstrap(lambda rows: statistic(x[:, rows]), torch.arange(samples))"
        )
    return axes[0]


# Over seeds, of shares ----------------------------------------------------------------
def paired_t(differences: ArrayLike, level: float = 0.95) -> Interval:
    """Return the mean of paired differences and its interval by Student's t.

    If the differences, one a seed, are independent and normal, (mean - truth) /
    (s / sqrt(n)) has Student's distribution with n - 1 degrees of freedom, s their
    standard deviation; the interval turns that round.

    Examples
    --------
    >>> interval = paired_t([1.0, 2.0, 3.0])
    >>> round(interval.low, 3), round(interval.high, 3)
    (-0.484, 4.484)
    """
    values = _numbers("differences", differences)
    at_least("the number of differences", len(values), 2)
    within("level", level, "(0, 1)")
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * stats.sem(values)
    mean = float(values.mean())
    return Interval(mean, float(mean - half), float(mean + half))


def holm(p_values: ArrayLike) -> np.ndarray:
    """Return p-values [n] adjusted for n comparisons by Holm's method.

    The i-th smallest is multiplied by n - i + 1, and none is below one before it.
    If you call significant what is below .05, you err with probability .05 at most
    in any of the comparisons.

    References
    ----------
    Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    values = _numbers("p_values", p_values)
    for value in (values.min(), values.max()):
        within("p_values", value, "[0, 1]")
    order = np.argsort(values)
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted


def proportion(hits: int, n: int, level: float = 0.95) -> Interval:
    """Return the share hits / n and its interval by Clopper and Pearson (1934).

    The ends are the shares at which as many hits, or as few, have probability (1 -
    level) / 2. It covers with `level` at least, at the edges too: 57 of 57 has (.937,
    1), where a bootstrap says (1, 1).
    """
    at_least("n", n)
    ends = stats.binomtest(hits, n).proportion_ci(level, method="exact")
    return Interval(hits / n, float(ends.low), float(ends.high))
