"""How important each head is: Taylor scores, the heads that Taylor pruning removes, and draws from a ranking."""

import operator
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from uqlab.core.checks import at_least, count_samples
from uqlab.core.modules import Inputs, frozen
from uqlab.ensembles import member_seed
from uqlab.heads.attention import Head, Place, addresses, check_labels, run, take
from uqlab.heads.pruning import ablate
from uqlab.models import attentions


def taylor_scores(
    model: nn.Module,
    inputs: Inputs,
    labels: Int[Tensor, " samples"],
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
    return _taylor(model, inputs, labels, range(len(attentions(model))), batch_size)


def taylor_heads(
    model: nn.Module,
    inputs: Inputs,
    labels: Int[Tensor, " samples"],
    remove: int | Sequence[int],
    *,
    scope: Literal["layer", "model"] = "layer",
    batch_size: int = 128,
) -> list[Head]:
    """The heads that Taylor pruning removes, the least important first.

    scope: "layer": `remove` is how many heads each layer loses, one number or one for each layer (of two towers: text
        before vision). The layers are pruned from first to last, and the scores are recomputed without the heads that
        earlier layers lost (Hydra, D.1.1).
        "model": `remove` is how many heads the whole model loses, by scores that are computed once (B.2; the paper does
        not say whether it recomputes them there).

    Of equal scores the lowest (layer, head) goes first. Raises ValueError for more heads than there are.
    """
    found = attentions(model)
    counts = [attention.heads for attention in found]
    if scope == "model":
        if isinstance(remove, Sequence):
            raise TypeError(
                f'scope="model" takes one number of heads to remove, got {list(remove)}'
            )
        total = operator.index(remove)
        if not 0 <= total <= sum(counts):
            raise ValueError(
                f"remove must be 0 to {sum(counts)}, the number of heads, got {total}"
            )
        scores = taylor_scores(model, inputs, labels, batch_size=batch_size)
        every = [
            (layer, head) for layer, count in enumerate(counts) for head in range(count)
        ]
        return addresses(
            found, sorted(every, key=lambda pair: scores[pair].item())[:total]
        )
    wanted = (
        list(remove)
        if isinstance(remove, Sequence)
        else [operator.index(remove)] * len(counts)
    )
    if len(wanted) != len(counts) or not all(
        0 <= w <= count for w, count in zip(wanted, counts, strict=True)
    ):
        raise ValueError(
            f"remove must be one number or {len(counts)}, each from 0 to {counts}, got {wanted}"
        )
    removed: list[Place] = []
    for layer, (count, less) in enumerate(zip(counts, wanted, strict=True)):
        if less:
            with ablate(model, addresses(found, removed)):
                scores = _taylor(model, inputs, labels, [layer], batch_size)[layer]
            removed += [
                (layer, head)
                for head in sorted(range(count), key=lambda head: scores[head].item())[
                    :less
                ]
            ]
    return addresses(found, removed)


def _taylor(
    model: nn.Module,
    inputs: Inputs,
    labels: Tensor,
    layers: Sequence[int],
    batch_size: int,
) -> Tensor:
    found, samples = attentions(model), count_samples(inputs)
    network = frozen(model).eval()
    labels = check_labels(network, inputs, labels)
    weights = {}
    for layer in layers:
        for projection in (found[layer].query, found[layer].key, found[layer].value):
            weight = network.get_parameter(projection.parameter)
            weights[projection.parameter] = weight.requires_grad_()
    with torch.enable_grad():
        for low in range(0, samples, batch_size):
            rows = slice(low, low + batch_size)
            logits = run(network, take(network, inputs, rows))
            loss = F.cross_entropy(logits, labels[rows], reduction="sum") / samples
            loss.backward()
    products = {}
    for name, weight in weights.items():
        slope = torch.zeros_like(weight) if weight.grad is None else weight.grad
        products[name] = (weight.detach() * slope).abs().double().cpu()
    most = max(attention.heads for attention in found)
    scores = torch.full((len(found), most), torch.nan, dtype=torch.float64)
    for layer in layers:
        for head in range(found[layer].heads):
            each = []
            for projection, number in found[layer].inputs(head):
                each.append(projection.part(products[projection.parameter], number))
            scores[layer, head] = torch.stack(each).mean()
    return scores


def sample_heads(
    ranking: Sequence[Head], remove: int, members: int, *, seed: int = 0
) -> list[list[Head]]:
    """For each member `remove` heads, drawn from one ranking: its pruning seed (Hydra, B.5: 48 of the first 100).

    A draw keeps the order of the ranking; the draw of member m depends on (seed, m) alone. Raises ValueError for more
    heads than the ranking holds, TypeError for what is no head.
    """
    for head in ranking:
        if (
            not isinstance(head, tuple | list)
            or not all(isinstance(part, int) for part in head[-2:])
            or len(head) < 2
        ):
            raise TypeError(
                f"a head of the ranking must be (layer, head) or (tower, layer, head), got {head!r}"
            )
    if not 0 <= operator.index(remove) <= len(ranking):
        raise ValueError(
            f"remove must be 0 to {len(ranking)}, the length of the ranking, got {remove}"
        )
    drawn = []
    for m in range(at_least("members", members)):
        generator = torch.Generator().manual_seed(member_seed(seed, m, "pruned heads"))
        chosen = (
            torch.randperm(len(ranking), generator=generator)[:remove].sort().values
        )
        drawn.append([ranking[i] for i in chosen.tolist()])
    return drawn
