"""Importance of heads: Taylor scores, Taylor pruning, and draws from a ranking."""

from collections.abc import Iterable, Sequence
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
    one_of,
    representable,
)
from uqlab.core.modules import batches, frozen
from uqlab.core.reading import held
from uqlab.ensembles import member_generators
from uqlab.heads.attention import (
    Head,
    Place,
    addresses,
    check_labels,
    run,
    score_table,
)
from uqlab.heads.pruning import ablate
from uqlab.models import attentions


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
    every = range(len(attentions(model)))
    return _taylor(model, inputs, labels, every, batch_size)


def taylor_heads(
    model: nn.Module,
    inputs: Any,
    labels: ArrayLike | None,
    remove: int | Sequence[int],
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
    counts = [layer.heads for layer in layers]
    inputs, labels = held(inputs, labels)
    if scope == "model":
        if isinstance(remove, Sequence):
            raise TypeError(
                f'scope="model" takes one number for `remove`, got {[*remove]}'
            )
        between("remove", remove, 0, sum(counts), ", the number of heads")
        scores = taylor_scores(model, inputs, labels, batch_size=batch_size)
        return addresses(layers, _lowest(scores, remove))
    removed = []
    for layer, number in enumerate(_of_layers(remove, counts)):
        if number:
            with ablate(model, addresses(layers, removed)):
                scores = _taylor(model, inputs, labels, [layer], batch_size)
            removed += _lowest(scores, number)
    return addresses(layers, removed)


def _of_layers(remove: int | Sequence[int], counts: list[int]) -> list[int]:
    """Return the number of heads that each layer loses."""
    numbers = [*remove] if isinstance(remove, Sequence) else [remove] * len(counts)
    possible = [0 <= n <= most for n, most in zip(numbers, counts, strict=False)]
    if len(numbers) != len(counts) or not all(possible):
        raise ValueError(
            f"remove must be one number or {len(counts)}, at most the {counts} heads "
            f"of the layers, got {numbers}"
        )
    return numbers


def _lowest(scores: Tensor, number: int) -> list[Place]:
    """Return the heads with the lowest scores [layers, heads], NaN last."""
    lowest = scores.flatten().argsort(stable=True)[:number]
    return [divmod(i, scores.shape[1]) for i in lowest.tolist()]


def _taylor(
    model: nn.Module,
    inputs: Any,
    labels: Any,
    numbers: Iterable[int],
    batch_size: int,
) -> Tensor:
    """Return the Taylor scores of the layers of these numbers; NaN for the others."""
    layers = attentions(model)
    names = set()
    for number in numbers:
        names.update(p.parameter for p in layers[number].projections[:3])
    products = _products(model, names, as_inputs(inputs), labels, batch_size)
    scores = {}
    for number in numbers:
        for head in range(layers[number].heads):
            rows = []
            for projection, place in layers[number].inputs(head):
                product = products[projection.parameter]
                rows.append(projection.of_head(product, place))
            scores[number, head] = torch.stack(rows).mean().item()
    return score_table(layers, scores)


def _products(
    model: nn.Module, names: Iterable[str], inputs: Any, labels: Any, batch_size: int
) -> dict[str, Tensor]:
    """Return |W * dL/dW| of weights by name, float64."""
    network = frozen(model).eval()
    labels = check_labels(network, inputs, labels)
    weights = {name: network.get_parameter(name).requires_grad_() for name in names}
    with torch.enable_grad():
        for rows, batch in batches(network, inputs, batch_size):
            loss = F.cross_entropy(run(network, batch), labels[rows], reduction="sum")
            (loss / count(inputs)).backward()
    products = {}
    for name, weight in weights.items():
        slope = torch.zeros_like(weight) if weight.grad is None else weight.grad
        representable("gradients", slope)
        products[name] = (weight.detach() * slope).abs().double().cpu()
    return products


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
    between("remove", remove, 0, len(ranking), ", the length of the ranking")
    drawn = []
    ids = range(at_least("members", members))
    for generator in member_generators(seed, ids, "pruned heads"):
        chosen = torch.randperm(len(ranking), generator=generator)[:remove]
        drawn.append([ranking[i] for i in sorted(chosen.tolist())])
    return drawn
