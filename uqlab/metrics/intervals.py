"""How sure a measured number is: intervals over samples, over seeds, and of shares.

Over samples: the percentile bootstrap, of single rows or of groups of rows that belong
together. Over a few seeds: Student's t, because the bootstrap of five numbers covers 83
% and not 95 %. Of a share of few trials: Clopper and Pearson, which holds at 0 and 1
too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from uqlab.core.checks import ArrayLike, as_scores, at_least, one_of, within
from uqlab.metrics.detection import auroc, fpr95, scores_of
from uqlab.metrics.quality import disagreements, hits, losses, squared_errors

Measure = Literal["accuracy", "nll", "brier", "disagreement"]
MEASURES: dict[str, Callable[[ArrayLike, ArrayLike], Tensor]] = {
    "accuracy": hits,
    "nll": losses,
    "brier": squared_errors,
    "disagreement": lambda logits, _: disagreements(logits),
}
SEPARATIONS = {"auroc": auroc, "fpr95": fpr95}


class Interval(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float
    high: float

    def plus_minus(self, digits: int = 3) -> str:
        """Return the mean and half the width of its interval: "0.812 ± 0.010"."""
        half = (self.high - self.low) / 2
        return f"{self.mean:.{digits}f} ± {half:.{digits}f}"


def bootstrap(
    statistic: Callable,
    *arrays: Tensor | np.ndarray,
    groups: ArrayLike | None = None,
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple:
    """Return the percentile bootstrap interval (low, high) of `statistic(*arrays)`.

    Parameters
    ----------
    statistic
        Returns a number, or an array: then low and high are arrays, a band.
    *arrays
        Samples first; all are resampled alike. Of an array of more than two axes, such
        as logits [members, samples, classes], the samples' axis is the only one that is
        as long as the others' first.
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
    at_least("repeats", repeats)
    axes = [_samples_axis(array, arrays) for array in arrays]
    sizes = {array.shape[axis] for array, axis in zip(arrays, axes, strict=True)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"arrays must share a positive number of samples, got {sizes}")
    values = []
    for rows in _resamples(sizes.pop(), groups, repeats, seed):
        drawn = [
            array[(slice(None),) * axis + (rows,)]
            for array, axis in zip(arrays, axes, strict=True)
        ]
        values.append(np.asarray(statistic(*drawn)))
    return tuple(np.quantile(np.stack(values), _tails(level), axis=0))


def interval(
    runs: Sequence[ArrayLike],
    labels: ArrayLike,
    measure: Measure = "accuracy",
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
    one_of("measure", measure, tuple(MEASURES))
    values = _by_sample(runs, labels, measure)
    if than is not None:
        values = values - _by_sample(than, labels, measure)
    draws = _resamples(len(values), groups, repeats, seed)
    means = [values[rows].mean() for rows in draws]
    low, high = np.quantile(means, _tails(level))
    return Interval(float(values.mean()), float(low), float(high))


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
    one_of("measure", measure, tuple(SEPARATIONS))
    pairs = [_pair(id_scores, ood_scores), *([_pair(*than)] if than else [])]
    sizes = {(len(inside), len(outside)) for inside, outside in pairs}
    if len(sizes) > 1:
        raise ValueError(f"`than` must be scores of the same inputs, got {sizes}")
    counts = sizes.pop()
    separation = SEPARATIONS[measure]
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(at_least("repeats", repeats)):
        rows, others = (rng.integers(count, size=count) for count in counts)
        first, *second = [separation(a[rows], b[others]) for a, b in pairs]
        values.append(first - sum(second))
    low, high = np.quantile(values, _tails(level)).tolist()
    return low, high


def _pair(inside, outside):
    return scores_of(inside, "id_scores"), scores_of(outside, "ood_scores")


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
    values = scores_of(differences, "differences")
    at_least("the number of differences", len(values), 2)
    error = values.std(ddof=1) / np.sqrt(len(values))
    half = float(stats.t.ppf(_tails(level)[1], len(values) - 1) * error)
    mean = float(values.mean())
    return Interval(mean, mean - half, mean + half)


def holm(p_values: ArrayLike) -> np.ndarray:
    """Return p-values [n] adjusted for n comparisons by Holm's method.

    The i-th smallest is multiplied by n - i + 1, and none is below one before it.
    If you call significant what is below .05, you err with probability .05 at most
    in any of the comparisons.

    References
    ----------
    Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    values = scores_of(p_values, "p_values")
    within("the largest of p_values", float(values.max()), "[0, 1]")
    within("the least of p_values", float(values.min()), "[0, 1]")
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
    at_least("hits", hits, 0)
    at_least("n - hits", n - hits, 0)
    within("level", level, "(0, 1)")
    ends = stats.binomtest(hits, n).proportion_ci(level, method="exact")
    return Interval(hits / n, float(ends.low), float(ends.high))


def _by_sample(
    runs: Sequence[ArrayLike], labels: ArrayLike, measure: str
) -> np.ndarray:
    """Return a measure of every sample [samples], the mean over runs."""
    at_least("the number of runs", len(runs))
    values = [MEASURES[measure](logits, labels) for logits in runs]
    return torch.stack(values).mean(0).cpu().numpy()


def _resamples(
    size: int, groups: ArrayLike | None, repeats: int, seed: int
) -> Iterator[np.ndarray]:
    """Yield the rows of one resample after another, drawn singly or by groups."""
    at_least("repeats", repeats)
    rng = np.random.default_rng(seed)
    if groups is None:
        for _ in range(repeats):
            yield rng.integers(size, size=size)
        return
    labels = as_scores(groups, size, "groups").cpu().numpy()
    by_group = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(repeats):
        drawn = rng.integers(len(by_group), size=len(by_group))
        yield np.concatenate([by_group[group] for group in drawn])


def _tails(level: float) -> list[float]:
    within("level", level, "(0, 1)")
    return [(1 - level) / 2, (1 + level) / 2]


def _samples_axis(array: Tensor | np.ndarray, arrays: Sequence) -> int:
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
