"""Importance of heads: Taylor scores, Taylor pruning, and draws from a ranking."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import (
    ArrayLike,
    as_inputs,
    at_least,
    between,
    count,
    held,
    one_of,
    representable,
)
from uqlab.core.modules import batches, frozen
from uqlab.ensembles import member_generators
from uqlab.heads.attention import (
    Head,
    addresses,
    check_labels,
    classify,
    score_table,
)
from uqlab.heads.pruning import ablate
from uqlab.models import Attention, attentions


def taylor_scores(
    model: nn.Module,
    inputs: Any,
    labels: ArrayLike | None = None,
    *,
    batch_size: int = 128,
) -> Float[Tensor, "layers heads"]:
    """Compute the importance of every head by a first-order Taylor expansion.

    The score is the mean of |W * dL/dW| over the head's rows of the query, key and
    value weights. L is the mean cross-entropy in evaluation mode (nats). Biases and the
    output projection do not count. Heads that share a key and value all count its rows.

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
    inputs, labels = held(inputs, labels)
    inputs = as_inputs(inputs)
    network = frozen(model).eval()
    labels = check_labels(network, inputs, labels)
    layers = attentions(network)
    names = {part.parameter for layer in layers for part in layer.projections[:3]}
    weights = {name: network.get_parameter(name).requires_grad_() for name in names}
    with torch.enable_grad():
        for rows, batch in batches(network, inputs, batch_size):
            logits = classify(network, batch)
            loss = F.cross_entropy(logits, labels[rows], reduction="sum")
            (loss / count(inputs)).backward()
    return _by_head(layers, weights)


def _by_head(layers: list[Attention], weights: dict[str, Tensor]) -> Tensor:
    """Return the mean of |W * dL/dW| over each head's rows, [layers, heads]."""
    scores = {}
    for row, head in addresses(layers).values():
        parts = []
        for projection, index in layers[row].inputs(head):
            weight: Any = weights[projection.parameter]
            product = (weight.detach() * weight.grad).abs().double()
            parts.append(projection.of_head(product, index))
        scores[row, head] = torch.stack(parts).mean().item()
    representable("gradients", torch.tensor([*scores.values()]))
    return score_table(layers, scores)


def taylor_heads(
    model: nn.Module,
    inputs: Any,
    labels: ArrayLike | None,
    remove: Any,
    *,
    scope: Literal["layer", "model"] = "layer",
    batch_size: int = 128,
) -> list[Head]:
    """Find the heads that Taylor pruning removes, the least important head first.

    Of heads with equal scores, the lowest (layer, head) goes first.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts and that returns logits [batch, classes].
    inputs
        A tensor [samples, ...], or tensors by name.
    labels
        Classes [samples].
    remove : int or sequence of int
        Number of heads that each layer loses: one number, or one for each layer, text
        before vision. With `scope="model"`, the number for the whole model.
    scope : str
        "layer" prunes the layers from first to last, and recomputes the scores without
        the heads that earlier layers lost (D.1.1). "model" computes the scores once
        (B.2; the paper does not say whether it recomputes them there).
    batch_size : int
        Samples in one pass.

    Returns
    -------
    list
        Pairs (layer, head); for two towers (tower, layer, head).

    Raises
    ------
    ValueError
        If `remove` is negative or larger than the number of heads.

    References
    ----------
    Gabetni et al. 2025, B.2 and D.1.1.
    """
    one_of("scope", scope, ("layer", "model"))
    layers = attentions(model)
    table = addresses(layers)
    inputs, labels = held(inputs, labels)
    score = partial(taylor_scores, model, inputs, labels, batch_size=batch_size)
    if scope == "model":
        between("remove", remove, 0, len(table))
        scores = score()
        return sorted(table, key=lambda head: scores[table[head]])[:remove]
    numbers = remove if isinstance(remove, Sequence) else [remove] * len(layers)
    removed = []
    for row, number in zip(range(len(layers)), numbers, strict=True):
        own = [head for head, place in table.items() if place[0] == row]
        between("remove", number, 0, len(own))
        if number:
            with ablate(model, removed):
                scores = score()
            removed += sorted(own, key=lambda head: scores[table[head]])[:number]
    return removed


def sample_heads(
    ranking: Sequence[Head], remove: int, members: int, *, seed: int = 0
) -> list[list[Head]]:
    """Draw the heads that each member loses from one ranking.

    A draw keeps the order of the ranking. Member m's draw depends only on (seed, m).

    Parameters
    ----------
    ranking : sequence
        Heads, such as the first heads of a circuit.
    remove : int
        Number of heads that each member loses.
    members : int
        Number of draws.
    seed : int
        Seed of all draws.

    Returns
    -------
    list of list
        The heads of each member.

    Raises
    ------
    ValueError
        If `remove` is larger than the length of the ranking.

    References
    ----------
    Gabetni et al. 2025, B.5: 48 of the first 100.
    """
    between("remove", remove, 0, len(ranking))
    drawn = []
    ids = range(at_least("members", members))
    for generator in member_generators(seed, ids, "pruned heads"):
        chosen = torch.randperm(len(ranking), generator=generator)[:remove]
        drawn.append([ranking[i] for i in sorted(chosen.tolist())])
    return drawn
