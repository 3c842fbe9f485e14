"""Decisions from scores: sets of classes, abstention, an alarm for drift."""

import bisect
import math
import zlib
from collections.abc import Mapping
from typing import Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor

from uqlab.core.checks import (
    ArrayLike,
    as_labels,
    as_logits,
    as_scores,
    as_tensor,
    one_of,
    within,
)
from uqlab.core.files import StrPath, existing
from uqlab.metrics import log_prediction

_PENALTY = 0.1  # of RAPS, for every class after the first
_STEPS = 100  # thresholds that `abstain` tests
_MAKE = 'one with numpy.savez("run.npz", logits=..., labels=...)'


class Conformal(NamedTuple):
    """Thresholds of split conformal prediction; `sets` applies them."""

    thresholds: Float[Tensor, " classes"]  # the largest score of a class in a set
    level: float
    method: str
    generator: torch.Generator  # of the random shares of "aps" and "raps"

    def sets(self, logits: ArrayLike) -> Bool[Tensor, "samples classes"]:
        """Return which classes are in each input's set, which may be empty.

        Parameters
        ----------
        logits
            [members, samples, classes].
        """
        p = log_prediction(as_logits(logits)).exp()
        return _scores(p, self.method, self.generator) <= self.thresholds.to(p.device)


def conformal(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    level: float = 0.9,
    method: Literal["lac", "aps", "raps"] = "lac",
    by_class: bool = False,
    seed: int = 0,
) -> Conformal:
    """Find the thresholds of sets of classes that hold the true class.

    The threshold is the k-th smallest score of the n calibration inputs, k = ceil((n +
    1) level). The set of a future input then holds its class with probability `level`
    or more, on average over calibration sets; for one of them the coverage has the law
    Beta(k, n + 1 - k). With fewer than k inputs every set holds all classes.

    Parameters
    ----------
    logits, labels
        [members, samples, classes] and [samples], of inputs that were not trained on
        and are drawn like future ones.
    level
        Coverage, between 0 and 1.
    method
        "lac": 1 - p of the class; the smallest sets on average. "aps": the probability
        of all more probable classes and a random share of the class; sets grow with an
        input's difficulty. "raps": "aps" with a penalty for each class after the first,
        so that few sets are large.
    by_class
        Whether every class has its own threshold and coverage.
    seed
        Seed of the random shares, here and in the sets.

    References
    ----------
    Vovk et al. 2005; Sadinle et al. 2019 (LAC); Romano et al. 2020 (APS); Angelopoulos
    et al. 2021 (RAPS).
    """
    within("level", level, "(0, 1)")
    one_of("method", method, ("lac", "aps", "raps"))
    p = log_prediction(as_logits(logits)).exp()
    labels = as_labels(labels, *p.shape)
    shares = torch.Generator().manual_seed(seed)
    scores = _scores(p, method, shares).gather(1, labels[:, None])[:, 0]
    if by_class:
        ends = [_quantile(scores[labels == c], level) for c in range(p.shape[1])]
    else:
        ends = [_quantile(scores, level)] * p.shape[1]
    further = torch.Generator().manual_seed(seed + 1)
    return Conformal(torch.tensor(ends, dtype=p.dtype), level, method, further)


def _quantile(scores, level):
    # 0.55 * 100 is a little above 55
    place = math.ceil((len(scores) + 1) * level - 1e-9)
    return scores.kthvalue(place).values.item() if place <= len(scores) else math.inf


def _scores(p, method, generator):
    """Return how badly each class fits [samples, classes] by its probability p."""
    if method == "lac":
        return 1 - p
    ordered, order = p.sort(1, descending=True)
    share = torch.rand(len(p), 1, generator=generator, dtype=p.dtype).to(p.device)
    above = ordered.cumsum(1) - ordered + share * ordered
    if method == "raps":
        above = above + _PENALTY * torch.arange(p.shape[1], device=p.device)
    return torch.empty_like(p).scatter_(1, order, above)


def abstain(
    logits: ArrayLike,
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    risk: float = 0.02,
    confidence: float = 0.95,
) -> float:
    """Find the largest score up to which inputs are answered.

    Among future inputs whose score is at most this, the share of errors is at most
    `risk`, with probability `confidence` over the inputs given here. Thresholds at
    equal steps of coverage are tested from the strictest on, each by the upper end of
    its Clopper-Pearson interval, until one fails (fixed-sequence testing). So that one
    early error does not end it, there is a start for every 1,000 inputs, ten at most,
    and each has its part of the allowed failures.

    Parameters
    ----------
    logits, labels
        [members, samples, classes] and [samples], of inputs that were not trained on.
    scores
        [samples], higher = more uncertain.
    risk, confidence
        Between 0 and 1.

    Returns
    -------
    float
        The threshold; -inf where none holds.

    References
    ----------
    Angelopoulos et al. 2021, Learn then Test, arXiv 2110.01052.
    """
    within("risk", risk, "(0, 1)")
    within("confidence", confidence, "(0, 1)")
    p = log_prediction(as_logits(logits))
    labels = as_labels(labels, *p.shape)
    scores = as_scores(scores, len(labels)).double()
    order = scores.argsort()
    ordered = scores[order].cpu().numpy()
    wrong = (p.argmax(1) != labels)[order].cumsum(0).cpu().numpy()
    counts = _counts(ordered)
    starts = min(max(1, len(ordered) // 1000), 10)
    sure = 1 - (1 - confidence) / starts
    counts = counts[_bound(0, counts, sure) <= risk]  # others cannot pass
    passed = _bound(wrong[counts - 1], counts, sure) <= risk
    best = _last_passed(passed, starts)
    return -math.inf if best < 0 else float(ordered[counts[best] - 1])


def _counts(ordered):
    """Return how many inputs each threshold answers; equal scores stay together."""
    shares = np.arange(1, _STEPS + 1) / _STEPS
    ends = ordered[np.ceil(len(ordered) * shares).astype(int) - 1]
    return np.unique(ordered.searchsorted(ends, side="right"))


def _last_passed(passed, starts):
    """Return the last place that a search from one of the starts reaches, or -1."""
    best = -1
    for part in np.array_split(np.arange(len(passed)), starts):
        for place in range(part[0], len(passed)) if len(part) else ():
            if not passed[place]:
                break
            best = max(best, place)
    return best


def _bound(errors, counts, sure):
    """Return the upper end of Clopper and Pearson for a share of errors."""
    errors = np.minimum(errors, counts - 0.5)
    return stats.beta.ppf(sure, errors + 1, counts - errors)


class Martingale:
    """A bet against the hypothesis that scores keep coming from one distribution.

    `drift` makes it.
    """

    def __init__(self, scores: ArrayLike, seed: int = 0):
        self.seen = sorted(as_scores(scores).double().tolist())
        self.generator = np.random.default_rng(seed)
        self.capital = np.full(4, 1 / 4)
        self.log_wealth = 0.0

    def update(self, scores: ArrayLike) -> Float[Tensor, " samples"]:
        """Return the wealth after each of some new scores, in their order.

        Parameters
        ----------
        scores
            [samples], higher = more uncertain.
        """
        logs = []
        for score in as_scores(scores).double().tolist():
            # the score's rank among all before it, at random among equal ones
            less = bisect.bisect_left(self.seen, score)
            upto = bisect.bisect_right(self.seen, score)
            self.seen.insert(upto, score)
            place = less + self.generator.random() * (upto - less + 1)
            self._bet(place / len(self.seen))
            logs.append(self.log_wealth)
        return torch.tensor(logs, dtype=torch.float64).exp()

    def _bet(self, p: float) -> None:
        # Bets on small p-values, on none, on large ones, and a fifth of the capital on
        # the upper tenth. Each factor has the mean 1 over p in [0, 1].
        tail = 9 if p > 0.9 else -1
        factors = 1 + np.array([0.5 - p, 0, p - 0.5, 0.2 * tail])
        capital = (0.99 * self.capital + 0.01 / 4) * factors  # 1 % changes its bet
        self.log_wealth += math.log(capital.sum())
        self.capital = capital / capital.sum()


def drift(scores: ArrayLike, seed: int = 0) -> Martingale:
    """Make an alarm for scores that no longer come from the distribution of `scores`.

    Its `update` returns the wealth after each new score. While nothing changes, the
    wealth ever exceeds 1 / d with probability at most d: that is the alarm. Every
    score's rank among all before it is a p-value; the bets are those of the "simple
    jumper", which changes between large and small p-values, and one on the upper tenth,
    which finds a change of a few inputs, such as one class.

    Parameters
    ----------
    scores
        [samples], the usual scores.
    seed
        Seed of the ranks of equal scores.

    References
    ----------
    Vovk et al. 2021, Retrain or not retrain, arXiv 2102.10439.

    Examples
    --------
    >>> alarm = drift(torch.arange(1000.0))
    >>> bool((alarm.update(torch.full((200,), 2000.0)) > 100).any())
    True
    """
    return Martingale(scores, seed)


class Saved(NamedTuple):
    """Saved predictions.

    Attributes
    ----------
    logits
        [members, samples, classes]; one member for one model.
    labels
        [samples], or None.
    ood
        Logits of OOD inputs by name.
    """

    logits: Tensor
    labels: Tensor | None
    ood: Mapping[str, Tensor]


def saved(path: StrPath) -> Saved:
    """Read logits or probabilities from an .npz of arrays.

    Parameters
    ----------
    path
        A file with "logits" or "probabilities", [members, samples, classes] or
        [samples, classes]; perhaps "labels" [samples]; and OOD sets of the same kind,
        whose names begin with "ood": "ood", "ood_letters".

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is damaged or has none of these, or arrays do not fit.
    """
    arrays = _arrays(path)
    kinds = [kind for kind in ("logits", "probabilities") if kind in arrays]
    if len(kinds) != 1:
        raise ValueError(
            f"{path} must hold logits or probabilities, got {[*arrays][:9]}; make "
            f"{_MAKE}, of tensors by tensor.numpy()"
        )
    names = [*kinds, *(name for name in arrays if name.startswith("ood"))]
    sets = {name: _logits(kinds[0], name, arrays[name]) for name in names}
    logits = sets.pop(kinds[0])
    labels = arrays.get("labels")
    if labels is not None:
        labels = as_labels(labels, *logits.shape[1:])
    ood = {}
    for name, z in sets.items():
        short = name.removeprefix("ood_")
        ood[name if short in arrays else short] = z  # there may be both
        if z.shape[::2] != logits.shape[::2]:
            raise ValueError(
                f"{name!r} must have the members and classes of the test set"
            )
    return Saved(logits, labels, ood)


def _arrays(path):
    path = existing(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (ValueError, OSError, EOFError, TypeError, zlib.error, BadZipFile) as error:
        raise ValueError(
            f"{path} is not a complete .npz of numbers; make {_MAKE}"
        ) from error


def _logits(kind, name, values):
    z = as_tensor(name, values)
    if kind == "probabilities":
        if not ((z.double().sum(-1) - 1).abs() < 1e-3).all() or not (z >= 0).all():
            raise ValueError(
                f"{name} must be at least 0 and sum to 1 over the classes, the last "
                "axis; divide percentages or rounded ones by p.sum(-1, keepdims=True), "
                "of one probability a row make numpy.stack([1 - p, p], -1)"
            )
        z = z.float().clamp(min=torch.finfo(torch.float32).tiny).log()
    return as_logits(z[None] if z.ndim == 2 else z)
