"""Attention heads: which of them matter, networks without some of them, and ensembles of such networks in one pass.

After Hydra Ensembles (Gabetni et al. 2025). Heads are pairs (layer, head), counted from 0. Models are ViT, a half of
CLIP, and BERT and its kin, all of transformers, alone or inside a network that returns logits [batch, classes].
"""

import contextlib
import copy
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from uqlab.core.modules import Inputs
from uqlab.ensembles import member_seed, plain_linear
from uqlab.heads.attention import Head, attentions, check_heads, check_labels, length, linear, run, take, with_heads
from uqlab.heads.circuits import Circuit, greedy_circuit
from uqlab.heads.fusion import FusedEnsemble, fuse

__all__ = [
    "Circuit", "FusedEnsemble", "Head", "Separation", "ablate", "count_heads", "fuse", "greedy_circuit",
    "head_features", "multiply_adds", "prune", "sample_heads", "separation", "shape", "taylor_heads", "taylor_scores",
]  # fmt: skip

Model = TypeVar("Model", bound=nn.Module)


# What there is --------------------------------------------------------------------------------------------------------
def shape(model: nn.Module) -> tuple[int, int]:
    """(layers, heads); of a pruned model, whose layers differ, the heads of the layer that has most.

    Raises TypeError for what is no single network; ValueError for one without attention whose heads are apart, with
    keys or values that heads share, and with two encoders.
    """
    counts = count_heads(model)
    return len(counts), max(counts)


def count_heads(model: nn.Module) -> list[int]:
    """The number of heads of each layer; raises what `shape` raises."""
    return [attention.heads for attention in attentions(model)]


# What they are worth --------------------------------------------------------------------------------------------------
def taylor_scores(
    model: nn.Module, inputs: Inputs, labels: Int[Tensor, " samples"], *, batch_size: int = 128
) -> Float[Tensor, "layers heads"]:
    """Importance of every head by the first order of the loss: mean of |W * dL/dW| over its queries, keys and values.

    L is the mean cross-entropy on inputs [samples, ...] (or tensors by name) and labels [samples], in evaluation mode;
    the mean is over the head's rows of the three weights, without biases and output projection. NaN where a layer has
    fewer heads than another. Float64, on the CPU. Hydra, D.1.1, after Molchanov et al. 2019.

    Raises what `shape` raises, ValueError for labels out of range or not one for each input, TypeError for other types.
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
    """The heads that Taylor pruning removes, least important first.

    remove: with scope="layer", how many of each layer, one number or one for each; from the first layer to the last,
        the scores recomputed without what earlier layers lost (Hydra, D.1.1). With scope="model", how many of all
        heads, by scores computed once (B.2; whether the paper recomputes them there is open).

    Of equal scores the lowest (layer, head) goes first. Raises ValueError for more heads than there are, and what
    `taylor_scores` raises.
    """
    counts = count_heads(model)
    if scope not in ("layer", "model"):
        raise ValueError(f'scope must be "layer" or "model", got {scope!r}')
    if scope == "model":
        if isinstance(remove, Sequence):
            raise TypeError(f'scope="model" takes one number of heads to remove, got {list(remove)}')
        total = operator.index(remove)
        if not 0 <= total <= sum(counts):
            raise ValueError(f"remove must be 0 to {sum(counts)}, the number of heads, got {total}")
        scores = taylor_scores(model, inputs, labels, batch_size=batch_size)
        every = [(layer, head) for layer, count in enumerate(counts) for head in range(count)]
        return sorted(every, key=lambda pair: scores[pair].item())[:total]
    wanted = list(remove) if isinstance(remove, Sequence) else [operator.index(remove)] * len(counts)
    if len(wanted) != len(counts) or not all(0 <= w <= count for w, count in zip(wanted, counts, strict=True)):
        raise ValueError(f"remove must be one number or {len(counts)}, each from 0 to {counts}, got {wanted}")
    removed: list[Head] = []
    for layer, (count, less) in enumerate(zip(counts, wanted, strict=True)):
        if less:
            with ablate(model, removed):
                scores = _taylor(model, inputs, labels, [layer], batch_size)[layer]
            removed += [(layer, head) for head in sorted(range(count), key=lambda head: scores[head].item())[:less]]
    return removed


def _taylor(model: nn.Module, inputs: Inputs, labels: Tensor, layers: Iterable[int], batch_size: int) -> Tensor:
    found = attentions(model)
    samples = length(inputs)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with _evaluating(model):
        labels = check_labels(model, inputs, labels)
        weights = {layer: [linear(model, name).weight for name in found[layer].inputs] for layer in layers}
        flat = [weight for three in weights.values() for weight in three]
        gradients = [torch.zeros_like(weight) for weight in flat]
        with _requiring_grad(model, flat), torch.enable_grad():
            for low in range(0, samples, batch_size):
                rows = slice(low, low + batch_size)
                loss = F.cross_entropy(run(model, take(model, inputs, rows)), labels[rows], reduction="sum") / samples
                for total, part in zip(gradients, torch.autograd.grad(loss, flat, materialize_grads=True), strict=True):
                    total += part
    scores = torch.full((len(found), max(attention.heads for attention in found)), torch.nan, dtype=torch.float64)
    slopes = iter(gradients)
    for layer, three in weights.items():
        products = torch.stack(
            [(weight.detach() * next(slopes)).abs().double() for weight in three]
        )  # [3, rows, width]
        each = products.unflatten(1, (found[layer].heads, found[layer].size)).mean((0, 2, 3))
        scores[layer, : found[layer].heads] = each.cpu()
    return scores


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _requiring_grad(model: nn.Module, weights: Sequence[Tensor]) -> Iterator[None]:
    """Gradients for these weights alone, frozen or not."""
    before = {p: p.requires_grad for p in model.parameters()}
    try:
        for p in before:
            p.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for p, needed in before.items():
            p.requires_grad_(needed)


def sample_heads(ranking: Sequence[Head], remove: int, members: int, *, seed: int = 0) -> list[list[Head]]:
    """For each member `remove` heads, drawn from one ranking: its pruning seed (Hydra, B.5: 48 of the first 100).

    ranking: heads that may go, such as the start of a circuit; each member's draw is in its order, and member m's
    depends on (seed, m) alone. Raises ValueError for more heads than the ranking holds, and members < 1.
    """
    if not 0 <= operator.index(remove) <= len(ranking):
        raise ValueError(f"remove must be 0 to {len(ranking)}, the length of the ranking, got {remove}")
    if operator.index(members) < 1:
        raise ValueError(f"members must be at least 1, got {members}")
    drawn = []
    for m in range(members):
        generator = torch.Generator().manual_seed(member_seed(seed, m, "pruned heads"))
        chosen = torch.randperm(len(ranking), generator=generator)[:remove].sort().values
        drawn.append([ranking[i] for i in chosen.tolist()])
    return drawn


# Without some of them -------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def ablate(model: Model, heads: Iterable[Head]) -> Iterator[Model]:
    """The model without these heads for the time being: their columns of the output projections are 0.

    Afterwards the weights are what they were, bit for bit; what training changed in these columns is lost. (D.1.2.)
    Raises ValueError for heads that the model does not have or that are given twice, TypeError for what are no pairs.
    """
    found = attentions(model)
    columns = []
    for layer, head in check_heads(found, heads):
        columns.append(linear(model, found[layer].output).weight.detach()[:, found[layer].columns(head)])
    kept = [part.clone() for part in columns]
    try:
        for part in columns:
            part.zero_()
        yield model
    finally:
        for part, values in zip(columns, kept, strict=True):
            part.copy_(values)


def prune(model: Model, heads: Iterable[Head]) -> Model:
    """A smaller copy without these heads: it returns what the ablated model returns.

    Rows of the query, key and value projections with their biases and columns of the output projection are cut out;
    the bias of the output projection and the scale 1 / sqrt(size of a head) stay. What is left is counted anew. All
    heads of a layer may go: the residual connection carries its input past the attention, of which a bias is left.

    Raises ValueError for heads that the model does not have or that are given twice, TypeError for what are no pairs.
    """
    pairs = check_heads(attentions(model), heads)
    small = copy.deepcopy(model)
    for layer, attention in enumerate(attentions(model)):
        gone = {head for at, head in pairs if at == layer}
        if not gone:
            continue
        left = [head not in gone for head in range(attention.heads)]
        kept = torch.tensor(left, device=linear(small, attention.output).weight.device).repeat_interleave(
            attention.size
        )
        for name in attention.inputs:
            part = linear(small, name)
            bias = None if part.bias is None else part.bias.detach()[kept]
            small.set_submodule(name, _like(part, part.weight.detach()[kept], bias))
        part = linear(small, attention.output)
        bias = None if part.bias is None else part.bias.detach()
        small.set_submodule(attention.output, _like(part, part.weight.detach()[:, kept], bias))
        core = small.get_submodule(attention.name)
        small.set_submodule(attention.name, with_heads(core, attention, attention.heads - len(gone)))
    return small


def _like(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer with these tensors that is trained, or not, like `layer`."""
    made = plain_linear(weight, bias).train(layer.training)
    for name, p in made.named_parameters():
        p.requires_grad_(layer.get_parameter(name).requires_grad)
    return made


# What they see --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def head_features(
    model: nn.Module, inputs: Inputs, layer: int = -1, *, batch_size: int = 128
) -> Float[Tensor, "samples heads size"]:
    """What each head of a layer gives the first token, the class token, before the output projection (Hydra, B.2).

    inputs [samples, ...] or tensors by name; layer: negative ones count from the last. Float32 or the model's
    precision, on the CPU, in evaluation mode. Raises ValueError for a layer that there is not, or without heads.
    """
    found = attentions(model)
    if not -len(found) <= operator.index(layer) < len(found):
        raise ValueError(f"layer must be {-len(found)} to {len(found) - 1}, got {layer}")
    attention = found[layer]
    if not attention.heads:
        raise ValueError(f"layer {layer} has no heads left")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    features: list[Tensor] = []

    def keep(_: nn.Module, args: tuple) -> None:
        features.append(args[0][:, 0].unflatten(-1, (attention.heads, attention.size)).cpu())

    samples = length(inputs)
    hook = linear(model, attention.output).register_forward_pre_hook(keep)
    try:
        with _evaluating(model):
            for low in range(0, samples, batch_size):
                some: Any = take(model, inputs, slice(low, low + batch_size))
                model(some) if isinstance(some, Tensor) else model(**some)
    finally:
        hook.remove()
    return torch.cat(features)


class Separation(NamedTuple):
    """Distance between the means of ID and OOD features, for each head."""

    euclidean: Float[Tensor, " heads"]
    mahalanobis: Float[Tensor, " heads"]


def separation(
    id_features: Float[Tensor, "id heads size"], ood_features: Float[Tensor, "ood heads size"]
) -> Separation:
    """How far each head holds ID and OOD inputs apart: the distance of their means (Hydra, B.2).

    The Mahalanobis distance is under the covariance of the ID features (denominator id - 1); in directions in which
    those do not vary nothing is measured (pseudo-inverse). Float64. Raises ValueError for features that are not finite,
    of different heads, or of fewer than two ID inputs.
    """
    a, b = id_features.double(), ood_features.double()
    if a.ndim != 3 or b.ndim != 3 or a.shape[1:] != b.shape[1:]:
        given = f"{list(a.shape)} and {list(b.shape)}"
        raise ValueError(f"features must be [samples, heads, size] of the same heads, got {given}")
    if len(a) < 2 or not len(b):
        raise ValueError(f"needs at least 2 ID inputs and 1 OOD input, got {len(a)} and {len(b)}")
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError("features hold NaN or infinite values")
    centre = a.mean(0)
    deviation = (a - centre).transpose(0, 1)  # [heads, id, size]
    covariance = deviation.mT @ deviation / (len(a) - 1)
    difference = (centre - b.mean(0)).unsqueeze(1)  # [heads, 1, size]
    squared = difference @ torch.linalg.pinv(covariance, hermitian=True) @ difference.mT
    return Separation(difference.norm(dim=(1, 2)), squared.flatten().clamp(min=0).sqrt())


# What they cost -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def multiply_adds(model: nn.Module, inputs: Inputs) -> int:
    """Multiply-adds of one pass over inputs [batch, ...], of a network or of all members of an ensemble.

    Products, convolutions and attention count; biases, normalisation and activations do not.
    """
    cpu = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}  # which torch leaves out
    some: Any = take(model, inputs, slice(None))
    counter = FlopCounterMode(display=False, custom_mapping=cpu)
    with _evaluating(model):
        for context in (contextlib.nullcontext(), counter):  # in its first pass a fused ensemble looks how to split
            with context:
                model(some) if isinstance(some, Tensor) else model(**some)
    return counter.get_total_flops() // 2


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)
