"""The predictive uncertainty of an ensemble: what its members share, and what they disagree about.

Every function starts from member logits `[members, batch, classes]`; log-probabilities serve as well. Results are per
input and in nats. Epistemic terms are computed as divergences, sums of non-negative terms, and never as a difference of
two entropies: a mutual information of 1e-6 keeps its digits in float32, and no result is negative by rounding.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from uqlab.core import door
from uqlab.core.checks import finite, floating, representable
from uqlab.core.devices import elements_of_temporary

Logits = Float[Tensor, "members batch classes"]
Weights = Float[Tensor, " members"] | Float[Tensor, "members batch"] | None
Correction = Literal["jackknife"] | None


class Decomposition(NamedTuple):
    """Total uncertainty and its two parts, total = aleatoric + epistemic."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class GroupDecomposition(NamedTuple):
    """Total predictive entropy of an ensemble of ensembles, total = aleatoric + within + between."""

    total: Tensor
    between: Tensor
    within: Tensor
    aleatoric: Tensor

    @property
    def epistemic(self) -> Tensor:
        """I[Y; K, M] = I[Y; K] + I[Y; M | K] = between + within."""
        return self.between + self.within


def entropy(logits: Float[Tensor, "*batch classes"]) -> Float[Tensor, "*batch"]:
    """Entropy of softmax(logits) over the last axis, in nats."""
    if logits.ndim == 0:
        raise ValueError("logits must be [..., classes], got a scalar")
    leading, classes = logits.shape[:-1], logits.shape[-1]
    flat = logits.reshape(1, math.prod(leading), classes)
    check_logits(flat)

    def measure(z: Tensor, _: slice) -> tuple[Tensor]:
        log_p = z.log_softmax(0)
        return (_member_entropy(log_p, log_p.exp())[0],)

    return _over_batch(measure, flat)[0].reshape(leading)


def decompose(
    logits: Logits, weights: Weights = None, correct: Correction = None
) -> Decomposition:
    """Split the entropy of the mean prediction into the mean member entropy and the mutual information I[Y; member].

    logits: half precision is computed in float32.
    weights: not negative; they are normalised to sum to one over the members.
    correct: "jackknife" replaces the plug-in mutual information, whose expectation is about (1 - 1/M) of the true one,
        by M MI - (M - 1) mean_i MI_-i. Use it to compare ensembles of different sizes. It may exceed log(classes).

    The results are [batch]. Raises ValueError for a wrong rank, an empty batch, logits that are not finite, and weights
    of a wrong shape or of sum 0. Houlsby et al. 2011; Kirsch 2024, eqs 2-3.
    """
    return decompose_score(logits, "log", weights, correct)


def decompose_score(
    logits: Logits,
    rule: Literal["log", "brier", "zero-one"] = "log",
    weights: Weights = None,
    correct: Correction = None,
) -> Decomposition:
    """Split the expected loss of the mean prediction, under a proper scoring rule, into aleatoric and epistemic parts.

    Let G be the rule's entropy. Then aleatoric = mean_m G(p_m), total = G(mean_m p_m), epistemic = total - aleatoric.
        "log": G is the entropy, and epistemic the mutual information.
        "brier": G is 1 - sum p^2, and epistemic the variance of p, summed over classes.
        "zero-one": G is 1 - max p, and epistemic the expected accuracy that the mean loses against its members.

    Other arguments and errors as in `decompose`. Hofman, Sale and Hüllermeier 2024, arXiv 2404.12215.
    """
    member_entropy, divergence = _RULES[rule]
    check_logits(logits)
    members = logits.shape[0]
    if _jackknife(correct, members, "members") and weights is not None:
        raise ValueError(
            "the jackknife is defined for equally weighted members: give weights or correct, not both"
        )
    weights = None if weights is None else _normalise(weights, logits)

    def measure(z: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        weight = None if weights is None else weights[:, at]
        log_p = z.log_softmax(0)  # [C, M, n]
        p = log_p.exp()
        return _mean(member_entropy(log_p, p), weight), mean_divergence(
            p, divergence, weight, correct
        )

    aleatoric, epistemic = _over_batch(measure, logits)
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


def group_members(
    logits: Logits, size: int
) -> Float[Tensor, "groups {size} batch classes"]:
    """View an ensemble as groups of `size` consecutive members; raises ValueError if `size` does not divide them."""
    check_logits(logits)
    members = logits.shape[0]
    if members % size:
        divisors = ", ".join(str(d) for d in range(1, members + 1) if members % d == 0)
        raise ValueError(
            f"groups of {size} do not divide {members} members; sizes that do: {divisors}"
        )
    return logits.unflatten(0, (members // size, size))


def decompose_groups(
    logits: Float[Tensor, "groups members batch classes"], correct: Correction = None
) -> GroupDecomposition:
    """Split the uncertainty of an ensemble of ensembles by the chain rule I[Y; K, M] = I[Y; K] + I[Y; M | K].

    `between` = I[Y; K] is the disagreement of the groups' mean predictions, and `within` = I[Y; M | K] that of the
    members of one group. Their sum is the mutual information of all members, whatever the grouping. `correct`:
    "jackknife" corrects `between`, which few groups make too small, by a factor of about (1 - 1/K).

    The results are [batch]. Errors as in `decompose`. Kirsch 2024, eqs 4-10.
    """
    if logits.ndim != 4:
        raise ValueError(
            f"logits must be [groups, members, batch, classes], got {list(logits.shape)}; "
            "from one ensemble use group_members(logits, size)"
        )
    groups, members = logits.shape[:2]
    _jackknife(correct, groups, "groups")
    flat = logits.flatten(0, 1)
    check_logits(flat)

    def measure(z: Tensor, _: slice) -> tuple[Tensor, Tensor, Tensor]:
        log_p = z.log_softmax(0)
        p = log_p.exp()
        aleatoric = _member_entropy(log_p, p).mean(0)
        p = p.unflatten(1, (groups, members))  # [C, K, M, n]
        return (
            aleatoric,
            mean_divergence(p, _kl).mean(0),
            mean_divergence(p.mean(2), _kl, correct=correct),
        )

    aleatoric, within, between = _over_batch(measure, flat)
    return GroupDecomposition(aleatoric + within + between, between, within, aleatoric)


def logit_sum_weights(logits: Logits) -> Float[Tensor, " members"]:
    """Weights of the members by their logit sums over a data set, w_j = sum_i exp(l_ij) / sum_ik exp(l_ik).

    l_ij is the sum of the logits of member j on input i, so give raw logits, not log-probabilities. Kirsch 2024, E.1.
    """
    check_logits(logits)
    sums = logits.sum(-1, dtype=torch.float64)  # [M, N]
    representable("logits", sums)
    return sums.logsumexp(1).softmax(0).to(_working_dtype(logits))


def expected_pairwise_kl(logits: Logits) -> Float[Tensor, " batch"]:
    """Mean KL(p_m || p_n) over the pairs of different members, in nats: M/(M - 1) (MI + reverse MI), without bias.

    It equals the sample covariance over members of p and log p, summed over classes, so no pair is ever formed. Errors
    as in `decompose`, and for one member. Schweighofer et al. 2025, measure C3 (which averages over all M^2 pairs).
    """
    check_logits(logits)
    members = logits.shape[0]
    if members < 2:
        raise ValueError("pairs of members need at least 2 members, got 1")

    def measure(z: Tensor, _: slice) -> tuple[Tensor]:
        log_p = z.log_softmax(0)
        p = log_p.exp()
        covariance = (p - p.mean(1, keepdim=True)) * (
            log_p - log_p.mean(1, keepdim=True)
        )
        return (covariance.sum((0, 1)).div(members - 1).clamp(min=0),)

    return _over_batch(measure, logits)[0]


def decompose_gaussian(
    means: Float[Tensor, "members batch"],
    variances: Float[Tensor, "members batch"],
    correct: Correction = None,
) -> Decomposition:
    """Law of total variance over Gaussian members: total = mean of the variances + variance of the means.

    means and variances are in the target's units and their square. correct: "jackknife" divides the variance of the
    means by M - 1 instead of M (ddof=1, unbiased). Raises ValueError for a wrong rank, shapes that differ, an empty
    batch, values that are not finite and negative variances.
    """
    if means.ndim != 2 or means.shape != variances.shape or 0 in means.shape:
        raise ValueError(
            "means and variances must both be [members, batch] and not empty, "
            f"got {list(means.shape)} and {list(variances.shape)}"
        )
    pair = torch.stack([means, variances])
    means, variances = pair.to(_working_dtype(pair))
    if not (
        means.isfinite().all() and variances.isfinite().all() and (variances >= 0).all()
    ):
        raise ValueError(
            "means and variances must be finite and variances not negative"
        )
    aleatoric = variances.mean(0)
    epistemic = means.var(
        0, correction=int(_jackknife(correct, means.shape[0], "members"))
    )
    total = aleatoric + epistemic
    representable("means or variances", total)
    return Decomposition(total, aleatoric, epistemic)


def check_logits(logits: Tensor) -> None:
    """Raise unless logits are floating and finite [members, batch, classes], not empty, of two classes or more."""
    floating("logits", logits)
    if logits.ndim != 3:
        hint = {
            2: "; for a single model use logits[None]",
            4: "; for groups use decompose_groups",
        }.get(logits.ndim, "")
        raise ValueError(
            f"logits must be [members, batch, classes], got {list(logits.shape)}{hint}"
        )
    if 0 in logits.shape:
        raise ValueError(
            f"logits must not be empty, got {list(logits.shape)} [members, batch, classes]"
        )
    if logits.shape[-1] < 2:
        raise ValueError(
            f"logits need two classes or more, got {list(logits.shape)}; from a sigmoid's z use cat([0 * z, z], -1)"
        )
    finite("logits", logits)


def classes_first(logits: Logits, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the batch and copies [classes, members, n] of their logits, each of the size a temporary should have.

    With classes first, reductions over classes and members run along contiguous memory (over a last axis of 10 classes
    they are several times slower).
    """
    members, batch, classes = logits.shape
    step = max(1, elements_of_temporary(logits.device) // (members * classes))
    for start in range(0, batch, step):
        at = slice(start, min(start + step, batch))
        z = torch.empty(
            classes, members, at.stop - start, dtype=dtype, device=logits.device
        )
        yield at, z.copy_(logits[:, at].permute(2, 0, 1))


def _over_batch(
    measure: Callable[[Tensor, slice], tuple[Tensor, ...]], logits: Tensor
) -> tuple[Tensor, ...]:
    """Run `measure(z [C, M, n], slice of the batch) -> tuple of [n]` over chunks of the batch that stay in cache."""
    parts = [
        torch.stack(measure(z, at))
        for at, z in classes_first(logits, _working_dtype(logits))
    ]
    results = torch.cat(parts, 1)
    representable("logits", results)
    return tuple(results)


def _working_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _jackknife(correct: Correction, count: int, axis: str) -> bool:
    if correct and count < 2:
        raise ValueError(
            f"the jackknife leaves one out, so it needs at least 2 {axis}, got {count}"
        )
    return correct is not None


def _normalise(weights: Tensor, logits: Tensor) -> Tensor:
    """Weights [M] or [M, N] as [M, N] that sum to one over the members."""
    members, batch, _ = logits.shape
    if weights.shape not in ((members,), (members, batch)):
        raise ValueError(
            f"weights must be [members] = [{members}] or [members, batch] = [{members}, {batch}], "
            f"got {list(weights.shape)}"
        )
    weights = weights.to(logits.device, _working_dtype(logits)).reshape(members, -1)
    largest = weights.amax(0)
    if not (weights.isfinite().all() and (weights >= 0).all() and (largest > 0).all()):
        raise ValueError(
            "weights must be finite, not negative and have a positive sum over the members of every input"
        )
    weights = weights / largest  # their sum is finite
    return (weights / weights.sum(0)).expand(members, batch)


def _mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean over the members, the last axis but one."""
    return values.mean(-2) if weights is None else (values * weights).sum(-2)


def mean_divergence(
    p: Tensor,
    divergence: Callable,
    weights: Tensor | None = None,
    correct: Correction = None,
) -> Tensor:
    """Mean divergence of the members p [C, ..., M, n] from their mean q, which equals G(q) - mean_m G(p_m).

    The jackknife of this difference adds (M - 1) (G(q) - mean_i G(q_-i)), with q_-i = q - (p_i - q) / (M - 1) the mean
    without member i. The mean of the q_-i is q too, so the added term is M - 1 times the mean divergence of the q_-i
    from q, and not negative either.
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
    """KL(p || q) over axis 0, as the sum of p log(p/q) - p + q, whose terms vanish quadratically as p -> q."""
    limits = torch.finfo(p.dtype)
    ratio = (deviation / q.clamp(min=limits.tiny)).clamp_(
        min=limits.eps / 2 - 1
    )  # p = 0: a finite logarithm
    return ratio.log1p_().mul_(p).sub_(deviation).sum(0)


def _accuracy_gap(p: Tensor, q: Tensor, deviation: Tensor) -> Tensor:
    """How much more probable, under p, the most probable class of p is than that of q."""
    return p.amax(0) - p.gather(0, q.argmax(0, keepdim=True).expand(1, *p.shape[1:]))[0]


def _member_entropy(log_p: Tensor, p: Tensor) -> Tensor:
    return (p * log_p).sum(0).abs()  # no term is positive


# Each rule's entropy as a function of log p and p, without cancellation where p is nearly one-hot, and its divergence.
_RULES = {
    "log": (_member_entropy, _kl),
    "brier": (
        lambda log_p, p: (p * log_p.expm1()).sum(0).abs(),
        lambda _p, _q, deviation: deviation.square().sum(0),
    ),
    "zero-one": (lambda log_p, _: log_p.amax(0).expm1().abs(), _accuracy_gap),
}


door.room(__name__)
