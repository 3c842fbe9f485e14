"""How much the members of an ensemble differ: in what they predict, and in their weights."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core import door
from uqlab.core.checks import finite
from uqlab.ensembles import Ensemble, FoldedEnsemble, weights_of
from uqlab.models import ATTENTION, FUSED
from uqlab.models import PROJECTIONS as KINDS
from uqlab.uncertainty import check_logits, classes_first

Logits = Float[Tensor, "members batch classes"]
Pairs = Float[Tensor, "members members"]  # one value for members i and j

# `heads.fuse` keeps query, key, value and output of all members in one layer, which stands where the attention stood.
_FUSED = r"(^|\.)(attention|attention\.self|self_attn|attn)$"
PROJECTIONS = f"{ATTENTION}|{_FUSED}"
# The value projections; some networks keep query, key and value in one matrix [3 d, d].
VALUES = "|".join([KINDS["value"], KINDS[FUSED], _FUSED])


def disagreement(logits: Logits) -> Pairs:
    """Fraction of inputs on which members i and j predict different classes (Fort et al. 2019)."""
    check_logits(logits)
    votes = logits.argmax(-1)
    return torch.stack([(votes != mine).double().mean(1) for mine in votes])


def js_divergence(logits: Logits) -> Pairs:
    """Jensen-Shannon divergence between the predictions of members i and j, averaged over inputs: nats, 0 to log 2.

    Muhlematter et al. 2024, section 4, average the predictions over inputs first, which never gives more: members that
    differ on single inputs but predict each class equally often then look equal.
    """
    check_logits(logits)
    members, batch, _ = logits.shape
    total = torch.zeros(members, members, dtype=torch.float64, device=logits.device)
    for _, z in classes_first(logits, torch.float64):
        p = z.softmax(0).unbind(1)  # of each member: [classes, inputs]
        own = [torch.special.entr(each).sum() for each in p]
        for i, j in itertools.combinations(range(members), 2):
            total[i, j] += (
                torch.special.entr((p[i] + p[j]) / 2).sum() - (own[i] + own[j]) / 2
            )
    return (total + total.T).clamp(min=0) / batch


def mean_pair(pairs: Pairs) -> float:
    """The mean over pairs of different members."""
    finite("pairs", pairs)
    if pairs.shape[0] != pairs.shape[1] or len(pairs) < 2:
        raise ValueError(
            f"pairs must be [members, members] of two members or more, got {list(pairs.shape)}"
        )
    return ((pairs.sum() - pairs.trace()) / (pairs.numel() - len(pairs))).item()


def variation_ratio(logits: Logits) -> Float[Tensor, " batch"]:
    """For each input, the share of members that do not predict the most frequent class (Freeman 1965)."""
    check_logits(logits)
    votes = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).sum(
        0
    )  # [batch, classes]
    return 1 - votes.amax(-1).double() / len(logits)


def weight_cosine(ensemble: Ensemble, target: str | None = None) -> Pairs:
    """Cosine between the weights of members i and j: whole matrices (for LoRA W + B_m A_m), flattened and joined.

    Where members share their weights, as with MC dropout, it is 1. Errors as in `layer_names` and `member_weights`.
    """
    weights = (
        member_weights(ensemble, name).flatten(1).double()
        for name in layer_names(ensemble, target)
    )
    products = torch.stack([w @ w.T for w in weights]).sum(0)
    norms = products.diagonal().sqrt()
    return products / torch.outer(norms, norms)


def diversity_score(ensemble: Ensemble) -> float:
    """1 - mean correlation of two members' value projections W_m, averaged over layers (Muhlematter et al. 2024, E).

    It is Pearson's correlation of whole matrices, for LoRA-Ensemble W + B_m A_m. Fused layers of `heads.fuse` are
    compared in all their projections, and networks without attention in every linear layer but the last. Raises
    ValueError for fewer than two members, and the errors of `member_weights`.
    """
    names = layer_names(ensemble, default=VALUES)
    if ensemble.members < 2:
        raise ValueError("diversity needs at least two members, got 1")
    pairs = torch.stack(
        [
            member_weights(ensemble, name).flatten(1).double().corrcoef()
            for name in names
        ]
    ).mean(0)
    return 1 - mean_pair(pairs)


def layer_names(
    ensemble: Ensemble, target: str | None = None, default: str = PROJECTIONS
) -> list[str]:
    """The names of the layers with a weight matrix that `target` finds, in the network's order.

    target: a regular expression on the names of a folded ensemble's layers, else of member 0's layers. None stands for
        `default`, the attention's projections; where that finds nothing, every linear layer but the last is taken.

    Raises ValueError for a target that matches no linear layer; TypeError unless it is an ensemble.
    """
    found = weights(ensemble)
    names = [
        name
        for name, seen in found.items()
        if len(seen.shape) == 2 or target is not None
    ]
    chosen = [
        name for name in names if re.search(default if target is None else target, name)
    ]
    if not chosen and target is None:
        chosen = names[:-1] or names
    if not chosen:
        raise ValueError(
            f"target {target!r} matches no linear layer; there are {', '.join(names) or 'none'}"
        )
    return chosen


def member_weights(
    ensemble: Ensemble, name: str, members: Sequence[int] | None = None
) -> Float[Tensor, "members out in"]:
    """The members' weights in the layer `name`: for LoRA W + B_m A_m, for masks W * (row_m col_m^T).

    members: whose weights; None for all. Raises ValueError where the shapes differ; TypeError unless it is an ensemble.
    """
    members = range(ensemble.members) if members is None else members
    known = weights(ensemble)
    if name not in known or not all(0 <= m < ensemble.members for m in members):
        raise ValueError(
            f"there are layers {', '.join(known)} and {ensemble.members} members, got {name!r}, {members}"
        )
    if not isinstance(ensemble, FoldedEnsemble):
        found = [weights(ensemble, m)[name] for m in members]
    elif isinstance(seen := known[name], Tensor):
        found = [seen]  # all members share it
    else:
        found = [seen.weight(m) for m in members]
    found = [w.detach().flatten(1) for w in found]
    shapes = sorted({tuple(w.shape) for w in found})
    if len(shapes) > 1:
        raise ValueError(
            f"the members' weights must have one shape to be compared, but in {name} they are {shapes}: choose other "
            "layers by target, or compare predictions by diversity.disagreement or diversity.js_divergence"
        )
    return (
        torch.stack(found) if len(found) > 1 else found[0].expand(len(members), -1, -1)
    )


def weights(ensemble: Ensemble, member: int = 0) -> dict[str, Any]:
    """The weights of linear layers, convolutions, attention and recurrent layers, in the network's order.

    Of a folded ensemble what all members share is a tensor, and what they own says what each sees by `weight(m)`; of
    others it is the tensor of one member.
    """
    network = (
        ensemble.network
        if isinstance(ensemble, FoldedEnsemble)
        else ensemble.member(member)
    )
    return weights_of(network)


door.room(__name__)
