"""How much the members of an ensemble differ: in what they predict, and in their weights."""

import itertools
import re
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.ensembles import (
    ATTENTION,
    BatchLinear,
    Ensemble,
    FoldedEnsemble,
    LoRALinear,
    MemberLayer,
    MemberLinear,
    SVDLinear,
)
from uqlab.extraction import MaskedLinear
from uqlab.uncertainty import batch_chunks, check_logits

Logits = Float[Tensor, "members batch classes"]
Pairs = Float[Tensor, "members members"]  # one value for members i and j

_LINEAR = (nn.Linear, MemberLinear, LoRALinear, SVDLinear, BatchLinear, MaskedLinear)

# The value projections of the attention in transformers; timm keeps query, key and value in one matrix [3 d, d].
VALUES = r"(^|\.)(v_proj|value|attn\.qkv)$"


def disagreement(logits: Logits) -> Pairs:
    """Fraction of inputs on which members i and j predict different classes (Fort et al. 2019).

    Raises ValueError or TypeError for what are no logits.
    """
    check_logits(logits)
    votes = logits.argmax(-1)
    return torch.stack([(votes != mine).double().mean(1) for mine in votes])


def js_divergence(logits: Logits) -> Pairs:
    """Jensen-Shannon divergence between the predictions of members i and j, averaged over inputs: nats, 0 to log 2.

    H((p + q) / 2) - (H(p) + H(q)) / 2 of every input, then the mean. Muhlematter et al. 2024, section 4, average the
    predictions first, which never gives more: members that differ on inputs but find each class equally often look
    equal then. Raises ValueError or TypeError for what are no logits.
    """
    check_logits(logits)
    members, batch, _ = logits.shape
    total = torch.zeros(members, members, dtype=torch.float64, device=logits.device)
    for at in batch_chunks(logits):
        p = logits[:, at].double().softmax(-1)  # [members, inputs, classes]
        own = torch.special.entr(p).sum((1, 2))
        for i, j in itertools.combinations(range(members), 2):
            total[i, j] += torch.special.entr((p[i] + p[j]) / 2).sum() - (own[i] + own[j]) / 2
    return (total + total.T).clamp(min=0) / batch


def variation_ratio(logits: Logits) -> Float[Tensor, " batch"]:
    """Share of the members that do not predict the most frequent class, for each input: 0 if all agree (Freeman 1965).

    Raises ValueError or TypeError for what are no logits.
    """
    check_logits(logits)
    votes = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).sum(0)  # [batch, classes]
    return 1 - votes.amax(-1).double() / len(logits)


def weight_cosine(ensemble: Ensemble, target: str | None = None) -> Pairs:
    """Cosine between the weights of members i and j: whole matrices (for LoRA W + B_m A_m), flattened and joined.

    target: a regular expression on the names of a member's linear layers (`ensemble.member(0).named_modules()`); None
        for the attention's projections, or in a network without attention every linear layer but the last.

    MC dropout's members share their weights: 1. Raises ValueError for a target that matches no linear layer; TypeError
    for what is no ensemble.
    """
    products = torch.stack([w @ w.T for w in _weights(ensemble, target, ATTENTION)]).sum(0)
    norms = products.diagonal().sqrt()
    return products / torch.outer(norms, norms)


def diversity_score(ensemble: Ensemble) -> float:
    """1 - mean correlation of two members' value projections W_m, averaged over layers (Muhlematter et al. 2024, E).

    Pearson's correlation of the whole matrices: for LoRA-Ensemble W + B_m A_m, of which the paper's values near 0 at
    small gains leave no doubt; for every other ensemble likewise what `member(m)` multiplies by. A network without
    attention is compared in every linear layer but the last.

    Raises ValueError for fewer than two members; TypeError for what is no ensemble.
    """
    if isinstance(ensemble, Ensemble) and ensemble.members < 2:
        raise ValueError("diversity needs at least two members, got 1")
    correlations = []
    for w in _weights(ensemble, None, VALUES):
        centred = nn.functional.normalize(w - w.mean(1, keepdim=True), dim=1)
        pairs = centred @ centred.T
        correlations.append((pairs.sum() - pairs.trace()) / (len(w) * (len(w) - 1)))
    return 1 - torch.stack(correlations).mean().item()


def layer_names(ensemble: Ensemble, target: str | None = None, default: str = ATTENTION) -> list[str]:
    """The names of the linear layers that `target` finds in a member, in the network's order.

    target: a regular expression; None for `default`, by default the attention's projections, or in a network where that
        finds nothing every linear layer but the last.

    Raises ValueError for a target that matches no linear layer; TypeError for what is no ensemble.
    """
    _check_ensemble(ensemble)
    network = ensemble.network if isinstance(ensemble, FoldedEnsemble) else ensemble.member(0)
    names = [name for name, part in network.named_modules() if isinstance(part, _LINEAR)]
    chosen = [name for name in names if re.search(default if target is None else target, name)]
    if not chosen and target is None:
        chosen = names[:-1] or names
    if not chosen:
        raise ValueError(f"target {target!r} matches no linear layer; there are {', '.join(names) or 'none'}")
    return chosen


def member_weights(
    ensemble: Ensemble, name: str, members: Sequence[int] | None = None
) -> Float[Tensor, "members out in"]:
    """What the members multiply by in the linear layer `name`: for LoRA W + B_m A_m, for masks W * (row_m col_m^T).

    members: whose; None for all. MC dropout's share their weights.

    Only this layer is computed, so that large ensembles can be gone through layer by layer. Raises ValueError where the
    members' shapes differ; TypeError for what is no ensemble.
    """
    _check_ensemble(ensemble)
    members = range(ensemble.members) if members is None else members
    if isinstance(ensemble, FoldedEnsemble):
        layer = ensemble.network.get_submodule(name)
        layers = [layer.member(m) for m in members] if isinstance(layer, MemberLayer) else [layer]
    else:
        layers = [ensemble.member(m).get_submodule(name) for m in members]
    weights = [layer.get_parameter("weight").detach() for layer in layers]
    shapes = {tuple(w.shape) for w in weights}
    if len(shapes) > 1:
        raise ValueError(f"members can be compared only where their weights have one shape; {name} has {shapes}")
    return torch.stack(weights) if len(weights) > 1 else weights[0].expand(len(members), -1, -1)


def _check_ensemble(ensemble: Ensemble) -> None:
    if not isinstance(ensemble, Ensemble):
        raise TypeError(f"needs an ensemble, got {type(ensemble).__name__}; wrap models by ensembles.from_members")


def _weights(ensemble: Ensemble, target: str | None, default: str) -> Iterator[Tensor]:
    """The members' flattened weights [members, numbers] of each chosen layer, float64."""
    for name in layer_names(ensemble, target, default):
        yield member_weights(ensemble, name).flatten(1).double()
