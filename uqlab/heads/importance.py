"""How important each head is: Taylor scores, Taylor pruning, draws from a ranking."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import ArrayLike, as_inputs, at_least, count, one_of
from uqlab.core.modules import frozen
from uqlab.ensembles import member_seed
from uqlab.heads.attention import (
    Head,
    Place,
    addresses,
    batches,
    check_labels,
    run,
    score_table,
)
from uqlab.heads.pruning import ablate
from uqlab.models import attentions


def taylor_scores(
    model: nn.Module,
    inputs: Any,
    labels: ArrayLike,
    *,
    batch_size: int = 128,
) -> Float[Tensor, "layers heads"]:
    """Compute the importance of every head by a first-order Taylor expansion.

    It is the mean of |W * dL/dW| over the head's rows of the query, key and value
    weights, where L is the mean cross-entropy in evaluation mode (nats). Biases and the
    output projection do not count. Where heads share a key and value, each counts their
    rows.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts and that returns logits [batch, classes].
    inputs
        A tensor [samples, ...], or tensors by name.
    labels : Tensor
        Classes [samples].
    batch_size : int
        Samples in one pass.

    Returns
    -------
    Tensor
        Float64 [layers, heads], on the CPU; NaN where a layer has fewer heads.

    References
    ----------
    Gabetni et al. 2025, D.1.1; Molchanov et al. 2019.
    """
    every = range(len(attentions(model)))
    return _taylor(model, inputs, labels, every, batch_size)


def taylor_heads(
    model: nn.Module,
    inputs: Any,
    labels: ArrayLike,
    remove: int | Sequence[int],
    *,
    scope: Literal["layer", "model"] = "layer",
    batch_size: int = 128,
) -> list[Head]:
    """Find the heads that Taylor pruning removes, the least important first.

    Of equal scores the lowest (layer, head) goes first.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts and that returns logits [batch, classes].
    inputs
        A tensor [samples, ...], or tensors by name.
    labels
        Classes [samples].
    remove : int or sequence of int
        How many heads each layer loses, one number or one for each layer, text before
        vision; with `scope="model"` how many the whole model loses.
    scope : str
        "layer": layers are pruned from first to last, and the scores are recomputed
        without the heads that earlier layers lost (D.1.1). "model": the scores are
        computed once (B.2; the paper does not say whether it recomputes them there).
    batch_size : int
        Samples in one pass.

    Returns
    -------
    list
        Pairs (layer, head); of two towers (tower, layer, head).

    Raises
    ------
    ValueError
        For more heads than there are.

    References
    ----------
    Gabetni et al. 2025, B.2 and D.1.1.
    """
    one_of("scope", scope, ("layer", "model"))
    found = attentions(model)
    counts = [attention.heads for attention in found]
    if scope == "model":
        if isinstance(remove, Sequence):
            raise TypeError(
                f'scope="model" takes one number of heads to remove, got {[*remove]}'
            )
        if not 0 <= at_least("remove", remove, 0) <= sum(counts):
            raise ValueError(
                f"remove must be 0 to {sum(counts)}, the number of heads, got {remove}"
            )
        scores = taylor_scores(model, inputs, labels, batch_size=batch_size)
        lowest = scores.flatten().argsort(stable=True)[:remove]  # NaN comes last
        return addresses(found, [divmod(i, max(counts)) for i in lowest.tolist()])
    each = [*remove] if isinstance(remove, Sequence) else [remove] * len(counts)
    few = len(each) == len(counts)
    if not few or any(not 0 <= n <= h for n, h in zip(each, counts, strict=True)):
        raise ValueError(
            f"remove must be one number or {len(counts)}, each from 0 to {counts}, "
            f"got {each}"
        )
    removed: list[Place] = []
    for layer, number in enumerate(each):
        if number:
            with ablate(model, addresses(found, removed)):
                scores = _taylor(model, inputs, labels, [layer], batch_size)[layer]
            lowest = scores.argsort(stable=True)[:number]
            removed += [(layer, head) for head in lowest.tolist()]
    return addresses(found, removed)


def _taylor(
    model: nn.Module,
    inputs: Any,
    labels: Any,
    layers: Sequence[int],
    batch_size: int,
) -> Tensor:
    """Return the Taylor scores of some layers; NaN for the others."""
    inputs = as_inputs(inputs)
    found = attentions(model)
    network = frozen(model).eval()
    labels = check_labels(network, inputs, labels)
    names = []
    for layer in layers:
        names += [projection.parameter for projection in found[layer].projections[:3]]
    weights = {name: network.get_parameter(name).requires_grad_() for name in names}
    with torch.enable_grad():
        for rows, batch in batches(network, inputs, batch_size):
            loss = F.cross_entropy(run(network, batch), labels[rows], reduction="sum")
            (loss / count(inputs)).backward()
    products = {}
    for name, weight in weights.items():
        slope = torch.zeros_like(weight) if weight.grad is None else weight.grad
        products[name] = (weight.detach() * slope).abs().double().cpu()
    scores = {}
    for layer in layers:
        for head in range(found[layer].heads):
            rows_of_head = []
            for projection, number in found[layer].inputs(head):
                product = products[projection.parameter]
                rows_of_head.append(projection.part(product, number))
            scores[layer, head] = torch.stack(rows_of_head).mean().item()
    return score_table(found, scores)


def sample_heads(
    ranking: Sequence[Head], remove: int, members: int, *, seed: int = 0
) -> list[list[Head]]:
    """Draw for each member some heads of one ranking, its pruning seed.

    A draw keeps the order of the ranking; that of member m depends on (seed, m) alone.

    Parameters
    ----------
    ranking : sequence
        Heads, such as the first of a circuit search.
    remove : int
        How many heads each member loses.
    members : int
        How many draws there are.
    seed : int
        Of all draws.

    Returns
    -------
    list of list
        The heads of each member.

    Raises
    ------
    ValueError
        For more heads than the ranking holds.

    References
    ----------
    Gabetni et al. 2025, B.5: 48 of the first 100.
    """
    if not 0 <= remove <= len(ranking):
        raise ValueError(
            f"remove must be 0 to {len(ranking)}, the length of the ranking, "
            f"got {remove}"
        )
    drawn = []
    for m in range(at_least("members", members)):
        generator = torch.Generator().manual_seed(member_seed(seed, m, "pruned heads"))
        chosen = torch.randperm(len(ranking), generator=generator)[:remove]
        drawn.append([ranking[i] for i in sorted(chosen.tolist())])
    return drawn
