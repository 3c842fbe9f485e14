"""How good predictions and uncertainty scores are: accuracy, calibration, OOD detection, selective prediction.

The prediction is the mean of the members' probabilities; `pool="logits"` averages the logits instead, for comparison
with papers that did so. Scores are uncertainties: higher = more uncertain, and out-of-distribution is the positive
class. Everything is computed in float64; losses are in nats.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Integer, Real, Shaped
from sklearn.metrics import f1_score
from torch import Tensor

from uqlab.core import door
from uqlab.core.checks import at_least, class_labels, finite
from uqlab.uncertainty import check_logits, classes_first

Array = Tensor | np.ndarray
Logits = Float[Tensor, "members samples classes"]
Labels = Integer[Tensor, " samples"]
Scores = Real[Array, " samples"]
Pool = Literal["probabilities", "logits"]
Measure = Literal["accuracy", "nll", "brier", "disagreement"]


class OOD(NamedTuple):
    """How well a score separates out-of-distribution inputs, the positive class, from in-distribution inputs."""

    auroc: float
    aupr_out: float
    aupr_in: float
    fpr95: float


class Interval(NamedTuple):
    """A mean over inputs and its interval."""

    mean: float
    low: float
    high: float


def log_prediction(
    logits: Logits, pool: Pool = "probabilities"
) -> Float[Tensor, "samples classes"]:
    """Log-probabilities of the ensemble, float64: log of the mean probability, or log_softmax of the mean logits.

    `log_prediction(logits)[None] / temperature` are again logits: those of a calibrated ensemble of one. Raises
    ValueError as `uncertainty.check_logits` does.
    """
    check_logits(logits)
    return torch.cat(
        [z.log_softmax(0) for z in _predictions(logits, pool)], 1
    ).T.contiguous()


# Prediction quality ---------------------------------------------------------------------------------------------------
def accuracy(logits: Logits, labels: Labels, *, pool: Pool = "probabilities") -> float:
    """Fraction of samples whose most probable class is the label."""
    return _confidence(logits, labels, pool, normalise=False)[1].mean().item()


def nll(logits: Logits, labels: Labels, *, pool: Pool = "probabilities") -> float:
    """Mean negative log-likelihood of the labels, in nats."""
    log_p, labels = _predict(logits, labels, pool)
    return -log_p.gather(1, labels[:, None]).mean().item()


def brier(logits: Logits, labels: Labels, *, pool: Pool = "probabilities") -> float:
    """Brier score: squared error of the probabilities summed over classes, averaged over samples, in [0, 2]."""
    return _residuals(logits, labels, pool)[1].square().sum(1).mean().item()


def macro_f1(logits: Logits, labels: Labels, *, pool: Pool = "probabilities") -> float:
    """F1 averaged over the classes that occur among the labels or the predictions."""
    log_p, labels = _predict(logits, labels, pool)
    return float(f1_score(labels.cpu(), log_p.argmax(1).cpu(), average="macro"))


def quality(runs: Sequence[Tensor], labels: Labels) -> dict[str, float]:
    """Accuracy, F1, ECE, NLL and Brier score, each the mean over several logits [members, samples, classes]."""
    at_least("the number of runs", len(runs))
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


# Calibration ----------------------------------------------------------------------------------------------------------
def ece(
    logits: Logits, labels: Labels, bins: int = 15, *, pool: Pool = "probabilities"
) -> float:
    """Expected calibration error of the top label: weighted |confidence - accuracy| over equal-width bins (lo, hi].

    Biased upwards by about sqrt(bins / samples). Guo et al. 2017.
    """
    confidence, correct = _confidence(logits, labels, pool)
    return _binned_gap(confidence, confidence - correct, bins).sum().item()


def adaptive_ece(
    logits: Logits, labels: Labels, bins: int = 15, *, pool: Pool = "probabilities"
) -> float:
    """Expected calibration error over bins of equal count, cut along the sorted confidences. Nixon et al. 2019."""
    confidence, correct = _confidence(logits, labels, pool)
    gaps = (confidence - correct)[confidence.argsort(stable=True)]
    return sum(part.sum().abs().item() for part in gaps.tensor_split(bins)) / len(gaps)


def classwise_ece(
    logits: Logits, labels: Labels, bins: int = 15, *, pool: Pool = "probabilities"
) -> float:
    """Mean over classes of the binned |p_c - frequency of c|, equal-width bins (lo, hi]. Kull et al. 2019."""
    p, residuals = _residuals(logits, labels, pool)
    columns = zip(p.T.contiguous(), residuals.T, strict=True)  # one class each
    return (
        sum(_binned_gap(column, gaps, bins).sum().item() for column, gaps in columns)
        / p.shape[1]
    )


def calibration_gap(
    logits: Logits, labels: Labels, *, pool: Pool = "probabilities"
) -> float:
    """|Mean confidence - accuracy| over the whole set. Kirsch 2024, E.2."""
    confidence, correct = _confidence(logits, labels, pool)
    return (confidence - correct).mean().abs().item()


def fit_temperature(
    logits: Logits, labels: Labels, pool: Pool = "probabilities"
) -> float:
    """Temperature T that minimises the NLL of softmax(log_prediction / T): pool, then calibrate. Guo et al. 2017.

    Fit it on validation data and apply it as `log_prediction(logits, pool)[None] / T`. The NLL is convex in 1 / T. A
    result of 0.01 or 100 means that the labels set no bound on that side.
    """
    log_p, labels = _predict(logits, labels, pool)
    target = log_p.gather(1, labels[:, None])[:, 0]
    low, high = math.log(0.01), math.log(100)
    for _ in range(40):
        middle = (low + high) / 2
        slope = (
            ((log_p / math.exp(middle)).softmax(1) * log_p).sum(1) - target
        ).mean()  # d NLL / d (1 / T)
        low, high = (low, middle) if slope <= 0 else (middle, high)
    return math.exp((low + high) / 2)


# Out-of-distribution detection ----------------------------------------------------------------------------------------
def ood_detection(
    id_scores: Real[Array, " id"], ood_scores: Real[Array, " ood"]
) -> OOD:
    """AUROC, AUPR with OOD and with ID as positives, and FPR95 of a score where higher = more out-of-distribution.

    AUROC counts ties as one half (midranks). AUPR is average precision, and equal scores enter together. FPR95 is the
    fraction of ID inputs at or above the highest threshold that at least 95 % of OOD inputs reach; with ID as the
    positive class it is that of `ood_detection(-ood_scores, -id_scores)`. Raises ValueError for scores that are empty
    or not finite.
    """
    id_, ood = (
        np.sort(_scores(id_scores, "id_scores")),
        np.sort(_scores(ood_scores, "ood_scores")),
    )
    below, up_to = _ranks(
        id_, ood
    )  # searched for in order, each is found near the one before, in the cache
    return OOD(
        auroc=float((below + up_to).mean() / (2 * len(id_))),
        aupr_out=_average_precision(ood, id_),
        aupr_in=_average_precision(-id_[::-1], -ood[::-1]),
        fpr95=float(
            (id_ >= ood[-95 * len(ood) // 100]).mean()
        ),  # the ceil(0.95 n)-th largest
    )


def auroc_interval(
    id_scores: Real[Array, " id"],
    ood_scores: Real[Array, " ood"],
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    *,
    than: tuple[Real[Array, " id"], Real[Array, " ood"]] | None = None,
) -> tuple[float, float]:
    """The percentile bootstrap interval of the AUROC; ID and OOD scores are resampled separately.

    than: other scores of the same inputs, (ID, OOD). The interval is then that of the first AUROC minus theirs, paired:
        both see the same resamples.
    """
    scores = [[_scores(id_scores, "id_scores"), _scores(ood_scores, "ood_scores")]]
    if than is not None:
        scores.append([_scores(values, "than") for values in than])
    ids, oods = ({len(values) for values in each} for each in zip(*scores, strict=True))
    if len(ids) + len(oods) > 2:
        raise ValueError(
            f"than must be scores of the same inputs, got {sorted(ids)} ID and {sorted(oods)} OOD scores"
        )
    (count,), (others,) = ids, oods
    sorted_once = [
        (order := np.argsort(id_), *_ranks(id_[order], ood)) for id_, ood in scores
    ]
    rng = np.random.default_rng(seed)
    values = np.zeros(repeats)
    for i in range(repeats):  # a resample only changes how often each score counts
        drawn = np.bincount(rng.integers(count, size=count), minlength=count)
        pick = rng.integers(others, size=others)
        for sign, (order, below, up_to) in zip((1, -1), sorted_once, strict=False):
            smaller = np.concatenate([[0], drawn[order].cumsum()])
            values[i] += (
                sign
                * (smaller[below[pick]] + smaller[up_to[pick]]).mean()
                / (2 * count)
            )
    low, high = np.quantile(values, _tails(level))
    return float(low), float(high)


# Selective prediction -------------------------------------------------------------------------------------------------
def risk_coverage(
    logits: Logits, labels: Labels, scores: Scores
) -> tuple[Float[Tensor, " samples"], Float[Tensor, " samples"]]:
    """Coverage i / n and the error rate of the i least uncertain samples; equal scores share their mean error."""
    errors = 1 - _confidence(logits, labels, "probabilities", normalise=False)[1]
    count = torch.arange(1, len(errors) + 1, dtype=torch.float64, device=errors.device)
    return count / len(errors), _in_order(errors, scores).cumsum(0) / count


def aurc(logits: Logits, labels: Labels, scores: Scores) -> float:
    """Mean selective risk over the coverages 1/n..1. Geifman et al. 2019."""
    return risk_coverage(logits, labels, scores)[1].mean().item()


def augrc(logits: Logits, labels: Labels, scores: Scores) -> float:
    """Area under the generalised risk (accepted errors / n) over coverage, by trapezoids from (0, 0).

    A random order has (1 - accuracy) / 2. Traub et al. 2024, arXiv 2407.01032.
    """
    coverage, risk = risk_coverage(logits, labels, scores)
    accepted = coverage * risk
    return ((accepted.sum() - accepted[-1] / 2) / len(accepted)).item()


def risk_at_coverage(
    logits: Logits, labels: Labels, scores: Scores, coverage: float = 0.8
) -> float:
    """Error rate among the ceil(coverage * n) least uncertain samples."""
    risk = risk_coverage(logits, labels, scores)[1]
    return risk[
        math.ceil(coverage * len(risk) - 1e-9) - 1
    ].item()  # 0.07 * 100 is a little more than 7


def coverage_at_risk(
    logits: Logits, labels: Labels, scores: Scores, risk: float = 0.05
) -> float:
    """Largest coverage whose selective risk is at most `risk`; 0 if there is none."""
    coverages, risks = risk_coverage(logits, labels, scores)
    return max(coverages[risks <= risk + 1e-12].tolist(), default=0.0)


def by_quantile(
    values: Shaped[Array, " samples"],
    scores: Scores,
    quantiles: Sequence[float | int] | Float[Array, " quantiles"] = (
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1.0,
    ),
    mode: Literal["bucket", "acceptance"] = "bucket",
) -> Float[Tensor, " quantiles"]:
    """Mean of a per-sample value between successive quantiles of a score ("bucket"), or up to each ("acceptance").

    The values are hits (0 or 1), losses, or confidence - hit, whose |mean| is a calibration error. Samples of equal
    score share their mean value. Raises ValueError for quantiles that are not increasing in (0, 1] or leave a bucket
    empty. Kirsch 2024, E.3.
    """
    values = torch.as_tensor(values).double()
    levels = np.asarray(quantiles, dtype=np.float64)
    ends = torch.as_tensor(
        np.rint(levels * len(values)), dtype=torch.int64, device=values.device
    )
    zero = ends.new_zeros(1)
    if not (
        len(levels)
        and levels[0] > 0
        and levels[-1] <= 1
        and (ends.diff(prepend=zero) > 0).all()
    ):
        raise ValueError(
            f"quantiles must increase in (0, 1] with a sample in every bucket, got {levels.tolist()} "
            f"for {len(values)} samples"
        )
    sums = _in_order(values, scores).cumsum(0)[ends - 1]
    return (
        sums / ends
        if mode == "acceptance"
        else sums.diff(prepend=sums.new_zeros(1)) / ends.diff(prepend=zero)
    )


# Intervals ------------------------------------------------------------------------------------------------------------
def bootstrap(
    statistic: Callable,
    *arrays: Shaped[Array, "..."],
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple:
    """The percentile bootstrap interval (low, high) of `statistic(*arrays)`; all arrays are resampled alike.

    statistic: returns a number, or an array: then low and high are arrays, a band.
    arrays: samples first. Of an array of more than two axes, such as logits [members, samples, classes], it is the only
        axis that is as long as the others' first.

    Raises ValueError for numbers of samples that differ or are 0, and where the lengths do not tell the samples' axis.
    """
    axes = _sample_axes(arrays)
    sizes = [array.shape[axis] for array, axis in zip(arrays, axes, strict=True)]
    if len(set(sizes)) != 1 or sizes[0] == 0:
        raise ValueError(f"arrays must share a positive number of samples, got {sizes}")
    rng, size = np.random.default_rng(seed), sizes[0]
    if (
        statistic is torch.mean and axes == [0] and arrays[0].ndim == 1
    ):  # as most pages ask: 100 resamples at once
        x = torch.as_tensor(arrays[0]).cpu().numpy()
        draws = [min(100, repeats - done) for done in range(0, repeats, 100)]
        means = np.concatenate(
            [x[rng.integers(size, size=(count, size))].mean(1) for count in draws]
        )
        return tuple(np.quantile(means, _tails(level)))
    values = []
    for _ in range(repeats):
        index = rng.integers(size, size=size)
        value = statistic(
            *(
                array[(slice(None),) * axis + (index,)]
                for array, axis in zip(arrays, axes, strict=True)
            )
        )
        values.append(
            value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        )
    return tuple(np.quantile(np.stack(values), _tails(level), axis=0))


def interval(
    runs: Sequence[Tensor], labels: Labels, measure: Measure = "accuracy", *,
    than: Sequence[Tensor] | None = None, repeats: int = 1000, seed: int = 0, level: float = 0.95,
) -> Interval:  # fmt: skip
    """A measure and its percentile bootstrap interval over the inputs.

    measure: "accuracy", "nll", "brier", or "disagreement": the share of pairs of members that predict two classes.
    runs: one or several logits [members, samples, classes], over which each input's value is averaged.
    than: others, for the same inputs. The result is then the first mean minus theirs, and the interval is paired: both
        see the same resamples. It does not know what other seeds of training would change.
    """
    at_least("the number of runs", len(runs))
    by_input = {
        "accuracy": lambda z: _confidence(z, labels, "probabilities", normalise=False)[
            1
        ],
        "nll": lambda z: (
            -log_prediction(z).gather(1, class_labels(labels, *z.shape[1:])[:, None])[
                :, 0
            ]
        ),
        "brier": lambda z: _residuals(z, labels, "probabilities")[1].square().sum(1),
        "disagreement": _disagreement,
    }[measure]
    values, others = (
        torch.stack([by_input(z) for z in each]).mean(0)
        for each in (runs, than or runs)
    )
    values = values if than is None else values - others
    ends = bootstrap(torch.mean, values, repeats=repeats, seed=seed, level=level)
    return Interval(values.mean().item(), *map(float, ends))


def _tails(level: float) -> list[float]:
    return [(1 - level) / 2, (1 + level) / 2]


def _sample_axes(arrays: Sequence[Array]) -> list[int]:
    """The axis of the samples in each array."""
    lengths = {len(array) for array in arrays if array.ndim in (1, 2)}
    axes = []
    for array in arrays:
        fits = (
            [0]
            if array.ndim in (1, 2)
            else [axis for axis, length in enumerate(array.shape) if length in lengths]
        )
        if len(fits) != 1:
            raise ValueError(
                f"the samples' axis of an array {list(array.shape)} is not clear: it should be the only axis of length "
                f"{sorted(lengths) or 'unknown'}, that of the arrays of one or two axes; resample numbers instead, "
                "bootstrap(lambda rows: statistic(x[:, rows]), torch.arange(samples))"
            )
        axes += fits
    return axes


# Shared steps ---------------------------------------------------------------------------------------------------------
def _predictions(logits: Tensor, pool: Pool) -> Iterator[Tensor]:
    """Logits [C, n] of the ensemble's prediction, which a softmax normalises, of one chunk after another."""
    for _, z in classes_first(logits, torch.float64):
        yield (
            z.mean(1)
            if len(logits) == 1 or pool == "logits"
            else z.log_softmax(0).logsumexp(1)
        )


def _predict(logits: Tensor, labels: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
    """Checked log-probabilities [N, C] and labels [N] on the same device."""
    log_p = log_prediction(logits, pool)
    return log_p, class_labels(labels, *log_p.shape).to(log_p.device)


def _confidence(
    logits: Tensor, labels: Tensor, pool: Pool, normalise: bool = True
) -> tuple[Tensor, Tensor]:
    """Probability of the most probable class [N], or its logit, and whether that class is the label, 0 or 1 [N]."""
    check_logits(logits)
    parts = []
    for z in _predictions(logits, pool):
        top, predicted = z.max(0)
        parts.append(
            (z.sub_(top).exp_().sum(0).reciprocal_() if normalise else top, predicted)
        )
    top, predicted = (torch.cat(each) for each in zip(*parts, strict=True))
    return top, (
        predicted == class_labels(labels, *logits.shape[1:]).to(logits.device)
    ).double()


def _residuals(logits: Tensor, labels: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
    """Probabilities [N, C] and their difference from the one-hot labels."""
    log_p, labels = _predict(logits, labels, pool)
    p = log_p.exp()
    return p, p - torch.nn.functional.one_hot(labels, p.shape[1])


def _disagreement(logits: Tensor) -> Tensor:
    """The share of ordered pairs of members that predict different classes, [N]."""
    check_logits(logits)
    votes = (
        torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).sum(0).double()
    )  # [N, C]
    return (votes * (len(logits) - votes)).sum(1) / max(
        1, len(logits) * (len(logits) - 1)
    )


def _binned_gap(confidence: Tensor, gaps: Tensor, bins: int) -> Tensor:
    """|Sum of the gaps| / n in each equal-width bin (lo, hi] of [0, 1]."""
    edges = torch.arange(1, bins, dtype=torch.float64, device=gaps.device) / bins
    return torch.bincount(
        torch.bucketize(confidence, edges), weights=gaps, minlength=bins
    ).abs() / len(gaps)


def _in_order(values: Tensor, scores: Array) -> Tensor:
    """Values [N] in the order of increasing scores; values of equal score are replaced by their mean."""
    ranked = torch.as_tensor(_scores(scores, "scores"), device=values.device)
    if ranked.shape != values.shape:
        raise ValueError(
            f"scores must be [samples] = {list(values.shape)}, got {list(ranked.shape)}"
        )
    ranked, order = ranked.sort()
    if not (ranked[1:] == ranked[:-1]).any():
        return values[order]
    _, group, count = ranked.unique_consecutive(return_inverse=True, return_counts=True)
    return (
        torch.zeros_like(count, dtype=values.dtype).index_add_(0, group, values[order])
        / count
    )[group]


def _scores(scores: Array, name: str) -> np.ndarray:
    """Scores as float64 NumPy [N], checked."""
    array = np.array(
        scores.detach().cpu().double().numpy()
        if isinstance(scores, Tensor)
        else scores,
        np.float64,
    )
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"{name} must be [samples] and not empty, got {list(array.shape)}"
        )
    finite(name, torch.from_numpy(array))
    return array


def _ranks(
    id_in_order: np.ndarray, ood_scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each OOD score: how many ID scores are below it, and how many are not above it."""
    return np.searchsorted(id_in_order, ood_scores), np.searchsorted(
        id_in_order, ood_scores, side="right"
    )


def _average_precision(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Sum over thresholds of precision times the step in recall. Both are in increasing order."""
    first = np.flatnonzero(
        np.append(True, positives[1:] != positives[:-1])
    )  # recall only moves at scores of positives
    true = len(positives) - first  # positives at or above each threshold
    false = len(negatives) - np.searchsorted(negatives, positives[first])
    return float(
        (np.diff(first, append=len(positives)) * true / (true + false)).sum()
        / len(positives)
    )


door.room(__name__)
