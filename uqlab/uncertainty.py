"""The predictive uncertainty of an ensemble: what members share, what divides them.

Every function starts from member logits `[members, batch, classes]`; log-probabilities
serve as well, and `decompose` takes other outputs too. Results are per input and in
nats. Epistemic terms are computed as
divergences, sums of non-negative terms, and never as a difference of two entropies: a
mutual information of 1e-6 keeps its digits in float32, and no result is negative by
rounding.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from uqlab.core.checks import (
    ArrayLike,
    as_logits,
    as_tensor,
    at_least,
    finite,
    one_of,
    representable,
)
from uqlab.core.modules import elements_of_temporary

GROUPS = "groups members batch classes"
Correction = Literal["jackknife"] | None
Outputs = Literal["classes", "binary", "multilabel"]


class Decomposition(NamedTuple):
    """Total uncertainty and its two parts, total = aleatoric + epistemic."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class GroupDecomposition(NamedTuple):
    """Uncertainty of an ensemble of ensembles: total = aleatoric + within + between."""

    total: Tensor
    between: Tensor
    within: Tensor
    aleatoric: Tensor

    @property
    def epistemic(self) -> Tensor:
        """I[Y; K, M] = I[Y; K] + I[Y; M | K] = between + within."""
        return self.between + self.within


def entropy(logits: ArrayLike) -> Float[Tensor, "..."]:
    """Return the entropy of softmax(logits) over the last axis, in nats.

    Parameters
    ----------
    logits
        [..., classes].
    """
    logits = as_logits(logits, "...")
    flat = logits.reshape(1, -1, logits.shape[-1])

    def measure(z, _):
        log_p = z.log_softmax(0)
        return (_member_entropy(log_p, log_p.exp())[0],)

    return _over_batch(measure, flat)[0].reshape(logits.shape[:-1])


def decompose(
    logits: ArrayLike,
    weights: ArrayLike | None = None,
    correct: Correction = None,
    *,
    outputs: Outputs = "classes",
    class_axis: int = -1,
    by: Literal["class"] | None = None,
) -> Decomposition:
    """Split the entropy of the mean prediction by the mutual information I[Y; member].

    Total uncertainty is the entropy of the mean prediction, aleatoric the mean entropy
    of the members, epistemic their difference, the mutual information.

    Parameters
    ----------
    logits
        [members, batch, classes], or as `outputs` and `class_axis` say; half precision
        is computed in float32.
    weights
        [members] or [members, batch], not negative; they are normalised to sum to one
        over the members.
    correct
        "jackknife" replaces the plug-in mutual information, whose expectation is about
        (1 - 1/M) of the true one, by M MI - (M - 1) mean_i MI_-i. Use it to compare
        ensembles of different sizes. It may exceed log(classes).
    outputs
        "classes": a softmax. "binary": one logit z of a sigmoid, [members, batch] or
        one on `class_axis`; as the two classes [0, z]. "multilabel": every number is
        such a logit, [members, batch, labels]; labels are taken one by one, and the
        sum over them is that of independent labels.
    class_axis
        Where the classes are, behind members and batch; of more than three axes name
        it: 2 in those of a segmentation, [members, batch, classes, height, width].
        Of more axes it needs copies of some numbers at a time, never of all.
    by
        "class" returns the terms of the entropies, -p log p of each class, which sum
        to the parts: which classes hold them.

    Returns
    -------
    Decomposition
        total, aleatoric and epistemic in nats, [batch] each, and an axis for every
        other of the logits: [batch, labels], [batch, height, width]. By class
        [batch, classes, ...].

    Raises
    ------
    ValueError
        For logits of another shape, that are empty or not finite, and for weights of
        another shape or of sum 0.

    References
    ----------
    Houlsby et al. 2011; Kirsch 2024, eqs 2-3.

    Examples
    --------
    Two members that are sure of different classes know nothing together:

    >>> total, aleatoric, epistemic = decompose([[[50.0, 0.0]], [[0.0, 50.0]]])
    >>> round(epistemic.item(), 4)  # log 2
    0.6931
    """
    one_of("by", by, (None, "class"))
    z = _classes_third(logits, outputs, class_axis)
    if by is None:
        return _split(z, *_RULES["log"], weights=weights, correct=correct)
    terms = _split(z, lambda log_p, p: (p * log_p).abs(), _kl_terms, weights, correct)
    return Decomposition(*(part.movedim(0, 1) for part in terms))


def _classes_third(logits: ArrayLike, outputs: Outputs, class_axis: int) -> Tensor:
    """Return checked logits [members, batch, classes, ...]; one class is a sigmoid."""
    one_of("outputs", outputs, ("classes", "binary", "multilabel"))
    if outputs == "classes" and class_axis == -1:
        return as_logits(logits)
    z = as_tensor("logits", logits)
    if outputs == "multilabel" or (outputs == "binary" and z.ndim == 2):
        z, class_axis = z[..., None], -1
    if class_axis not in (*range(2, z.ndim), *range(2 - z.ndim, 0)):
        raise ValueError(
            "logits must be [members, batch, ...], with class_axis behind these, got "
            f"{list(z.shape)} and class_axis={class_axis!r}"
        )
    as_logits(z.movedim(class_axis, -1), "...", sigmoid=outputs != "classes")
    return z.movedim(class_axis, 2)


def temperature_of_total(logits: ArrayLike, total: float) -> float:
    """Return the temperature T at which the mean total uncertainty is as given.

    Ensembles that are more certain altogether have less to disagree about. To compare
    their mutual information at the same total, decompose `logits / T`.

    Parameters
    ----------
    logits
        [members, batch, classes].
    total
        Mean entropy of the mean prediction of softmax(logits / T), in nats, between 0
        and log(classes).

    Returns
    -------
    float
        Between 0.01 and 100; an end means that no temperature there reaches the total.

    Examples
    --------
    >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
    >>> T = temperature_of_total(logits, 0.5)
    >>> round(decompose(logits / T).total.mean().item(), 4)
    0.5
    """
    logits = as_logits(logits)

    def too_low(temperature):
        # The entropy of a mean of softmaxes grows with T in practice.
        return decompose(logits / temperature).total.mean().item() < total

    return bisected(too_low)


def bisected(too_low: Callable[[float], object]) -> float:
    """Return the temperature, 0.01 to 100, below which all are too low."""
    low = math.log(0.01)
    high = math.log(100)
    for _ in range(40):
        middle = (low + high) / 2
        if too_low(math.exp(middle)):
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def decompose_score(
    logits: ArrayLike,
    rule: Literal["log", "brier", "zero-one"] = "log",
    weights: ArrayLike | None = None,
    correct: Correction = None,
) -> Decomposition:
    """Split the expected loss of the mean prediction under a proper scoring rule.

    Let G be the rule's entropy. Then aleatoric = mean_m G(p_m), total = G(mean_m p_m),
    and epistemic = total - aleatoric.

    Parameters
    ----------
    logits, weights, correct
        As in `decompose`, with its errors.
    rule
        "log": G is the entropy, and epistemic the mutual information. "brier": G is 1 -
        sum p^2, and epistemic the variance of p, summed over classes. "zero-one": G is
        1 - max p, and epistemic the expected accuracy that the mean loses against its
        members.

    References
    ----------
    Hofman, Sale and Hüllermeier 2024, arXiv 2404.12215.
    """
    one_of("rule", rule, tuple(_RULES))
    return _split(as_logits(logits), *_RULES[rule], weights=weights, correct=correct)


def _split(logits, member_entropy, divergence, weights, correct) -> Decomposition:
    if _jackknife(correct, len(logits), "members") and weights is not None:
        raise ValueError(
            "the jackknife is defined for equally weighted members: "
            "give weights or correct, not both"
        )
    shares = None if weights is None else _normalise(weights, logits)

    def measure(z, at):
        share = None if shares is None else shares[:, at]
        if len(z) == 1:
            z = torch.cat([torch.zeros_like(z), z])
        log_p = z.log_softmax(0)  # [classes, members, n]
        p = log_p.exp()
        aleatoric = _mean(member_entropy(log_p, p), share)
        return aleatoric, _mean_divergence(p, divergence, share, correct)

    aleatoric, epistemic = _over_batch(measure, logits)
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


def group_members(
    logits: ArrayLike, size: int
) -> Float[Tensor, "groups {size} batch classes"]:
    """View an ensemble as groups of `size` consecutive members.

    Raises ValueError if `size` does not divide the members.
    """
    logits = as_logits(logits)
    members = len(logits)
    if members % at_least("size", size):
        divisors = [str(d) for d in range(1, members + 1) if members % d == 0]
        raise ValueError(
            f"groups of {size} do not divide {members} members; "
            f"sizes that do: {', '.join(divisors)}"
        )
    return logits.unflatten(0, (members // size, size))


def decompose_groups(
    logits: ArrayLike, correct: Correction = None
) -> GroupDecomposition:
    """Split the uncertainty of an ensemble of ensembles by the chain rule.

    I[Y; K, M] = I[Y; K] + I[Y; M | K]: `between` is the disagreement of the groups'
    mean predictions, and `within` that of the members of one group. Their sum is the
    mutual information of all members, whatever the grouping.

    Parameters
    ----------
    logits
        [groups, members, batch, classes].
    correct
        "jackknife" corrects `between`, which few groups make too small, by a factor of
        about (1 - 1/K).

    Returns
    -------
    GroupDecomposition
        [batch] each, in nats. Errors as in `decompose`.

    References
    ----------
    Kirsch 2024, eqs 4-10.
    """
    logits = as_logits(
        logits, GROUPS, "; from one ensemble use group_members(logits, size)"
    )
    groups, members = logits.shape[:2]
    _jackknife(correct, groups, "groups")

    def measure(z, _):
        log_p = z.log_softmax(0)
        p = log_p.exp()
        aleatoric = _member_entropy(log_p, p).mean(0)
        p = p.unflatten(1, (groups, members))  # [classes, groups, members, n]
        within = _mean_divergence(p, _kl).mean(0)
        return aleatoric, within, _mean_divergence(p.mean(2), _kl, correct=correct)

    aleatoric, within, between = _over_batch(measure, logits.flatten(0, 1))
    return GroupDecomposition(aleatoric + within + between, between, within, aleatoric)


def logit_sum_weights(logits: ArrayLike) -> Float[Tensor, " members"]:
    """Return weights of the members by their logit sums over a data set.

    w_j = sum_i exp(l_ij) / sum_ik exp(l_ik), where l_ij is the sum of the logits of
    member j on input i; so give raw logits, not log-probabilities. Kirsch 2024, E.1.
    """
    logits = as_logits(logits)
    sums = logits.sum(-1, dtype=torch.float64)  # [members, batch]
    representable("logits", sums)
    return sums.logsumexp(1).softmax(0).to(_working_dtype(logits))


def expected_pairwise_kl(logits: ArrayLike) -> Float[Tensor, " batch"]:
    """Return the mean KL(p_m || p_n) over the pairs of different members, in nats.

    M/(M - 1) (MI + reverse MI), without bias. It equals the sample covariance over
    members of p and log p, summed over classes, so no pair is ever formed.

    Raises
    ------
    ValueError
        As in `decompose`, and for one member.

    References
    ----------
    Schweighofer et al. 2025, measure C3 (which averages over all M^2 pairs).
    """
    logits = as_logits(logits)
    members = at_least("members", len(logits), 2)

    def measure(z, _):
        log_p = z.log_softmax(0)
        p = log_p.exp()
        centred_p = p - p.mean(1, keepdim=True)
        covariance = centred_p * (log_p - log_p.mean(1, keepdim=True))
        return (covariance.sum((0, 1)).div(members - 1).clamp(min=0),)

    return _over_batch(measure, logits)[0]


def decompose_gaussian(
    means: ArrayLike, variances: ArrayLike, correct: Correction = None
) -> Decomposition:
    """Split the variance of a mixture of Gaussian members by the law of total variance.

    Total = mean of the variances + variance of the means.

    Parameters
    ----------
    means, variances
        [members, batch, ...] each, in the target's units and their square. Of outputs
        z [members, batch, 2], a mean and a log-variance, they are z[..., 0] and
        z[..., 1].exp().
    correct
        "jackknife" divides the variance of the means by M - 1 instead of M (unbiased).

    Raises
    ------
    ValueError
        For other shapes, an empty batch, values that are not finite, negative
        variances.
    """
    means, variances = as_tensor("means", means), as_tensor("variances", variances)
    if means.shape != variances.shape or means.ndim < 2 or 0 in means.shape:
        raise ValueError(
            "means and variances must both be [members, batch, ...] and not empty, "
            f"got {list(means.shape)} and {list(variances.shape)}"
        )
    finite("means", means)
    finite("variances", variances)
    if (variances < 0).any():
        raise ValueError("variances must not be negative")
    unbiased = _jackknife(correct, len(means), "members")
    dtype = torch.promote_types(_working_dtype(means), variances.dtype)
    aleatoric = variances.to(dtype).mean(0)
    epistemic = means.to(dtype).var(0, correction=int(unbiased))
    total = aleatoric + epistemic
    representable("means or variances", total)
    return Decomposition(total, aleatoric, epistemic)


def classes_first(logits: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the batch and copies [classes, members, n] of their logits.

    Of logits [members, batch, classes, ...] the slices count the places of the first
    input, then those of the second.

    Each is of the size that a temporary should have. With classes first, reductions
    over classes and members run along contiguous memory (over a last axis of 10 classes
    they are several times slower).
    """
    logits = logits.reshape(*logits.shape[:3], -1)
    members, _, classes, places = logits.shape
    step = max(1, elements_of_temporary(logits.device) // (members * classes))
    start = 0
    for rows in logits.split(max(1, step // places), 1):
        for some in rows.split(step, 3):
            some = some.permute(2, 0, 1, 3)
            z = torch.empty(some.shape, dtype=dtype, device=some.device)
            stop = start + z[0, 0].numel()
            yield slice(start, stop), z.copy_(some).flatten(2)
            start = stop


def _over_batch(
    measure: Callable[[Tensor, slice], tuple[Tensor, ...]], logits: Tensor
) -> tuple[Tensor, ...]:
    """Run `measure(z [classes, members, n], slice) -> [n], ...` over the batch."""
    parts = [
        torch.stack(measure(z, at))
        for at, z in classes_first(logits, _working_dtype(logits))
    ]
    results = torch.cat(parts, -1)
    representable("logits", results)
    return tuple(results.unflatten(-1, (logits.shape[1], *logits.shape[3:])))


def _working_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _jackknife(correct: Correction, count: int, axis: str) -> bool:
    one_of("correct", correct, (None, "jackknife"))
    if correct and count < 2:
        raise ValueError(
            f"the jackknife leaves one out, so it needs at least 2 {axis}, got {count}"
        )
    return correct is not None


def _normalise(weights: ArrayLike, logits: Tensor) -> Tensor:
    """Return weights [members, places] that sum to one over the members."""
    members, batch, _, *places = logits.shape
    weights = as_tensor("weights", weights)
    if weights.shape not in ((members,), (members, batch)):
        raise ValueError(
            f"weights must be [members] = [{members}] or "
            f"[members, batch] = [{members}, {batch}], got {list(weights.shape)}"
        )
    weights = weights.to(logits.device, _working_dtype(logits)).reshape(members, -1)
    largest = weights.amax(0)
    if not (weights.isfinite().all() and (weights >= 0).all() and (largest > 0).all()):
        raise ValueError(
            "weights must be finite, not negative and have a positive sum "
            "over the members of every input"
        )
    weights = weights / largest  # their sum is finite
    weights = (weights / weights.sum(0)).expand(members, batch)
    return weights.repeat_interleave(math.prod(places), 1)


def _mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over the members, the last axis but one."""
    return values.mean(-2) if weights is None else (values * weights).sum(-2)


def _mean_divergence(
    p: Tensor,
    divergence: Callable,
    weights: Tensor | None = None,
    correct: Correction = None,
) -> Tensor:
    """Return the mean divergence of members p [C, ..., M, n] from their mean q.

    It equals G(q) - mean_m G(p_m). The jackknife of this difference adds (M - 1) (G(q)
    - mean_i G(q_-i)), with q_-i = q - (p_i - q) / (M - 1) the mean without member i.
    The mean of the q_-i is q too, so the added term is M - 1 times the mean divergence
    of the q_-i from q, and not negative either.
    """
    q = _mean(p, weights).unsqueeze(-2)
    deviation = p - q
    mean = _mean(divergence(p, q, deviation), weights)
    if correct:
        others = p.shape[-2] - 1
        deviation = deviation / -others
        mean = mean + others * _mean(divergence(q + deviation, q, deviation))
    return mean.clamp(min=0)


def _kl(p: Tensor, q: Tensor, deviation: Tensor) -> Tensor:
    """Return KL(p || q) over axis 0, as the sum of p log(p/q) - p + q."""
    return _kl_terms(p, q, deviation).sum(0)


def _kl_terms(p: Tensor, q: Tensor, deviation: Tensor) -> Tensor:
    """Return p log(p/q) - p + q, which vanishes quadratically as p -> q."""
    limits = torch.finfo(p.dtype)
    ratio = deviation / q.clamp(min=limits.tiny)
    ratio.clamp_(min=limits.eps / 2 - 1)  # p = 0: a finite logarithm
    return ratio.log1p_().mul_(p).sub_(deviation)


def _accuracy_gap(p: Tensor, q: Tensor, deviation: Tensor) -> Tensor:
    """Return p(most probable class of p) - p(most probable class of q)."""
    return p.amax(0) - p.gather(0, q.argmax(0, keepdim=True).expand(1, *p.shape[1:]))[0]


def _member_entropy(log_p: Tensor, p: Tensor) -> Tensor:
    return (p * log_p).sum(0).abs()  # no term is positive


# Each rule's entropy as a function of log p and p, without cancellation where p is
# nearly one-hot, and its divergence.
_RULES = {
    "log": (_member_entropy, _kl),
    "brier": (
        lambda log_p, p: (p * log_p.expm1()).sum(0).abs(),
        lambda _p, _q, deviation: deviation.square().sum(0),
    ),
    "zero-one": (lambda log_p, _: log_p.amax(0).expm1().abs(), _accuracy_gap),
}
