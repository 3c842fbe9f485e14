"""How much the members of an ensemble differ: in what they predict, and in weights."""

import re
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
    one_ensemble,
    pattern_of,
)
from uqlab.ensembles import Ensemble, weights_of
from uqlab.models import ATTENTION, FUSED, PROJECTIONS

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
    p = as_logits(logits).double().softmax(-1)
    entropies = entr(p).sum((1, 2))
    mixed = torch.stack([entr((p + mine) / 2).sum((1, 2)) for mine in p])
    pairs = mixed - (entropies[:, None] + entropies) / 2
    return pairs.clamp(min=0) / p.shape[1]


def mean_pair(pairs: ArrayLike) -> float:
    """Return the mean of a matrix [members, members] over different members."""
    pairs = as_tensor("pairs", pairs, "members members")
    members = len(pairs)
    if members < 2:
        raise ValueError("`pairs` must be of two members or more, got one")
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
    their weights, as with MC dropout, it is 1.

    Parameters
    ----------
    ensemble, target
        As in `layer_names`, whose errors and those of `member_weights` are raised.
    """
    matrices = _flat(ensemble, layer_names(ensemble, target))
    products = torch.stack([w @ w.T for w in matrices]).sum(0)
    norms = products.diagonal().sqrt()
    return products / torch.outer(norms, norms)


def diversity_score(ensemble: Ensemble) -> float:
    """Return 1 - mean correlation of two members' value projections, over layers.

    It is Pearson's correlation of whole matrices, for LoRA-Ensemble W + B_m A_m.
    Layers that hold query, key and value in one matrix are compared whole, and
    networks without attention in every linear layer but the last.

    Raises
    ------
    ValueError
        For fewer than two members, and what `member_weights` raises.

    References
    ----------
    Muhlematter et al. 2024, appendix E.
    """
    matrices = _flat(ensemble, layer_names(ensemble, default=VALUES))
    if ensemble.members < 2:
        raise ValueError("diversity needs at least two members, got 1")
    return 1 - mean_pair(torch.stack([w.corrcoef() for w in matrices]).mean(0))


def layer_names(
    ensemble: Ensemble, target: Target | None = None, default: str = ATTENTION
) -> list[str]:
    """Return the names of the layers with a weight matrix, in the network's order.

    Parameters
    ----------
    ensemble
        Any ensemble; of separate networks, the layers of the first one.
    target
        A regular expression on names, or a list of how they end. None stands for
        `default`; where that finds nothing, for every linear layer but the one that was
        defined last, which is mostly the classifier.
    default
        The attention's projections.

    Raises
    ------
    ValueError
        If `target` matches no linear layer.
    """
    known = _weights(ensemble)
    if target is not None:
        chosen = [name for name in known if re.search(pattern_of(target), name)]
        if not chosen:
            raise ValueError(
                f"`target` {target!r} matches no linear layer; choose among "
                f"{', '.join(known)}"
            )
        return chosen
    names = [name for name, w in known.items() if w.ndim == 2]
    chosen = [name for name in names if re.search(default, name)]
    head = ensemble.recipe.get("classifier") or names[-1]
    return chosen or [name for name in names if name != head] or names


def member_weights(ensemble: Ensemble, name: str) -> Float[Tensor, "members out in"]:
    """Return the members' weights in a layer: for LoRA W + B_m A_m.

    Parameters
    ----------
    ensemble
        Any ensemble.
    name
        One of its layers, as `layer_names` names it.

    Raises
    ------
    ValueError
        If there is no such layer, or the members' weights have different shapes.
    """
    known = _weights(ensemble)
    if name not in known:
        raise ValueError(f"`name` must be one of {', '.join(known)}, got {name!r}")
    members = range(ensemble.members)
    if ensemble.seen and not hasattr(ensemble, "heads"):
        full = weights_of(ensemble.network)[name]
        matrices = [ensemble.tensor(full, m) for m in members]
    else:  # separate networks; fused ones have other shapes than their members
        matrices = [_weights(ensemble, m)[name] for m in members]
    shapes = {tuple(w.shape) for w in matrices}
    if len(shapes) > 1:
        raise ValueError(
            f"the members' weights in {name} have different shapes, {sorted(shapes)}: "
            "choose other layers by `target`, or compare predictions by "
            "diversity.disagreement or diversity.js_divergence"
        )
    return torch.stack([w.detach().flatten(1) for w in matrices])


def _flat(ensemble: Ensemble, names: list[str]) -> list[Tensor]:
    """Return the members' weights in each layer as vectors [members, out * in]."""
    return [member_weights(ensemble, name).flatten(1).double() for name in names]


def _weights(ensemble: Ensemble, member: int | None = None) -> dict[str, Tensor]:
    """Return the weight matrices of one member, or None: of the shared network."""
    one_ensemble(ensemble, "diversity")
    network = ensemble.network
    if member is not None or not ensemble.seen:
        network = ensemble.member(member or 0)
    tensors = dict(network.named_parameters(remove_duplicate=False))
    return {name: tensors[full] for name, full in weights_of(network).items()}
