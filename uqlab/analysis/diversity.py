"""How much the members of an ensemble differ: in what they predict, and in weights."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot
from torch.special import entr

from uqlab.core.checks import (
    ArrayLike,
    Target,
    as_logits,
    as_tensor,
    finite,
    one_ensemble,
    pattern_of,
)
from uqlab.ensembles import Ensemble, weights_of
from uqlab.models import ATTENTION, FUSED, PROJECTIONS
from uqlab.uncertainty import classes_first

Pairs = Float[Tensor, "members members"]  # one value for members i and j

# The value projections; some networks keep query, key and value in one matrix [3 d, d].
VALUES = "|".join([PROJECTIONS["value"], PROJECTIONS[FUSED]])


def disagreement(logits: ArrayLike) -> Pairs:
    """Return the fraction of inputs on which members i and j predict different classes.

    Parameters
    ----------
    logits
        [members, batch, classes].

    References
    ----------
    Fort et al. 2019.
    """
    votes = as_logits(logits).argmax(-1)
    return torch.stack([(votes != mine).double().mean(1) for mine in votes])


def js_divergence(logits: ArrayLike) -> Pairs:
    """Return the Jensen-Shannon divergence between the predictions of members i and j.

    Averaged over inputs: nats, 0 to log 2. Muhlematter et al. 2024, section 4, average
    the predictions over inputs first, which never gives more: members that differ on
    single inputs but predict each class equally often then look equal.

    Parameters
    ----------
    logits
        [members, batch, classes].
    """
    logits = as_logits(logits)
    members, batch, _ = logits.shape
    total = torch.zeros(members, members, dtype=torch.float64, device=logits.device)
    for _, z in classes_first(logits, torch.float64):
        p = z.softmax(0)  # [classes, members, n]
        entropies = entr(p).sum((0, 2))
        for i, j in itertools.combinations(range(members), 2):
            mixed = entr((p[:, i] + p[:, j]) / 2).sum()
            total[i, j] += mixed - (entropies[i] + entropies[j]) / 2
    return (total + total.T).clamp(min=0) / batch


def mean_pair(pairs: ArrayLike) -> float:
    """Return the mean of a matrix [members, members] over different members."""
    pairs = as_tensor("pairs", pairs, "members members")
    finite("pairs", pairs)
    members = len(pairs)
    if pairs.shape != (members, members) or members < 2:
        raise ValueError(
            "pairs must be [members, members] of two members or more, "
            f"got {list(pairs.shape)}"
        )
    return ((pairs.sum() - pairs.trace()) / (members * (members - 1))).item()


class LogitSpread(NamedTuple):
    """Variance between members and squared mean of centred logits."""

    variance: float
    square: float


def logit_spread(logits: ArrayLike) -> LogitSpread:
    """Return how far members' logits lie apart, and how far their mean is from zero.

    Each member's logits are centred over the classes, because a constant added to them
    changes no prediction. Both numbers are means over inputs and classes. The mean of n
    independent members has a variance 1/n of theirs and the same squared mean, so the
    ratio of two variances says how many members of one ensemble are worth a member of
    the other.

    Parameters
    ----------
    logits
        [members, batch, classes], of two members or more.

    Returns
    -------
    LogitSpread
        The unbiased variance between members, and the squared mean less the part of it
        that the variance explains.

    References
    ----------
    Kirsch 2024, appendix A.

    Examples
    --------
    >>> logit_spread([[[1.0, -1.0]], [[3.0, -3.0]]])
    LogitSpread(variance=2.0, square=3.0)
    """
    z = as_logits(logits).double()
    if len(z) < 2:
        raise ValueError("one member has no variance: give the logits of two or more")
    z = z - z.mean(-1, keepdim=True)
    variance = z.var(0).mean().item()
    return LogitSpread(variance, z.mean(0).square().mean().item() - variance / len(z))


def variation_ratio(logits: ArrayLike) -> Float[Tensor, " batch"]:
    """Return the share of members that do not predict an input's most frequent class.

    References
    ----------
    Freeman 1965, "Elementary applied statistics".
    """
    logits = as_logits(logits)
    votes = one_hot(logits.argmax(-1), logits.shape[-1]).sum(0)
    return 1 - votes.amax(-1).double() / len(logits)


def weight_cosine(ensemble: Ensemble, target: Target | None = None) -> Pairs:
    """Return the cosine between the weights of members i and j.

    Whole matrices (for LoRA W + B_m A_m), flattened and joined. Where members share
    their weights, as with MC dropout, it is 1. Errors as in `layer_names` and
    `member_weights`.
    """
    names = layer_names(ensemble, target)
    matrices = [member_weights(ensemble, name).flatten(1).double() for name in names]
    products = torch.stack([w @ w.T for w in matrices]).sum(0)
    norms = products.diagonal().sqrt()
    return products / torch.outer(norms, norms)


def diversity_score(ensemble: Ensemble) -> float:
    """Return 1 - mean correlation of two members' value projections, over layers.

    It is Pearson's correlation of whole matrices, for LoRA-Ensemble W + B_m A_m. Fused
    layers of `heads.fuse` are compared in all their projections, and networks without
    attention in every linear layer but the last.

    Raises
    ------
    ValueError
        For fewer than two members, and what `member_weights` raises.

    References
    ----------
    Muhlematter et al. 2024, appendix E.
    """
    names = layer_names(ensemble, default=VALUES)
    if ensemble.members < 2:
        raise ValueError("diversity needs at least two members, got 1")
    matrices = [member_weights(ensemble, name).flatten(1).double() for name in names]
    return 1 - mean_pair(torch.stack([w.corrcoef() for w in matrices]).mean(0))


def layer_names(
    ensemble: Ensemble, target: Target | None = None, default: str = ATTENTION
) -> list[str]:
    """Return the names of the layers with a weight matrix, in the network's order.

    Parameters
    ----------
    ensemble
        Whose layers: those of the network that members share, else of member 0.
    target
        A regular expression on names, or a list of how they end. None stands for
        `default`; where that finds nothing, for every linear layer but the last.
    default
        The attention's projections.

    Raises
    ------
    ValueError
        For a target that matches no linear layer.
    """
    known = weights(ensemble)
    names = [n for n, w in known.items() if target is not None or len(w.shape) == 2]
    pattern = pattern_of(default if target is None else target)
    chosen = [name for name in names if re.search(pattern, name)]
    if not chosen and target is None:
        head = (ensemble.recipe or {}).get("classifier") or names[-1]
        chosen = [name for name in names if name != head] or names
    if not chosen:
        raise ValueError(
            f"target {target!r} matches no linear layer; "
            f"there are {', '.join(names) or 'none'}"
        )
    return chosen


def member_weights(
    ensemble: Ensemble, name: str, members: Sequence[int] | None = None
) -> Float[Tensor, "members out in"]:
    """Return the members' weights in a layer: for LoRA W + B_m A_m.

    Parameters
    ----------
    ensemble, name
        An ensemble and the name of one of its layers.
    members
        Whose weights; None for all.

    Raises
    ------
    ValueError
        For an unknown layer or member, and where the weights' shapes differ.
    """
    members = range(ensemble.members) if members is None else members
    known = weights(ensemble)
    if name not in known or not all(0 <= m < ensemble.members for m in members):
        raise ValueError(
            f"there are layers {', '.join(known)} and {ensemble.members} members, "
            f"got {name!r}, {members}"
        )
    if ensemble.seen:
        full = weights_of(ensemble.network)[name]
        of = ensemble.tensor
        if hasattr(ensemble, "heads"):  # fused: without the zeros that pad a member
            of = lambda name, m: ensemble.member(m).get_parameter(name)  # noqa: E731
        matrices = [of(full, m) for m in members]
    else:
        matrices = [weights(ensemble, m)[name] for m in members]
    shapes = {tuple(w.shape) for w in matrices}
    if len(shapes) > 1:
        raise ValueError(
            "the members' weights must have one shape to be compared, but in "
            f"{name} they are {sorted(shapes)}: choose other layers by target, or "
            "compare predictions by diversity.disagreement or diversity.js_divergence"
        )
    return torch.stack([w.detach().flatten(1) for w in matrices])


def weights(ensemble: Ensemble, member: int = 0) -> dict[str, Tensor]:
    """Return the weights of one member in the network's order: all that are matrices.

    Of an ensemble of one network it is what the members share.
    """
    one_ensemble(ensemble, "diversity")
    network = ensemble.network if ensemble.seen else ensemble.member(member)
    tensors = dict(network.named_parameters(remove_duplicate=False))
    return {name: tensors[full] for name, full in weights_of(network).items()}
