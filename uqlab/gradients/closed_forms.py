"""Norms of per-sample gradients from what a layer sees: its inputs, and the errors propagated back to its outputs.

The gradient of a linear layer for one sample is a sum of outer products, errors times inputs, over tokens, places and
perturbed copies. Its norm follows from these factors ("ghost norms": Goodfellow 2015, arXiv 1510.01799; for sums, Li et
al. 2022, arXiv 2110.05679). All functions give powers ||g||_q^q, which are summed over weights and biases; the roots
are taken last.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad

from uqlab.core import tuning
from uqlab.core.devices import elements_of_temporary

ROOM = 4  # a Gram matrix of a sample is offered up to so many times the size of its gradient

# The errors [rows, ...] at the outputs of a layer's calls, in their order -> powers of the gradient norms [samples].
Powers = Callable[[list[Tensor]], Tensor]


def power(t: Tensor, q: int, keep: int = 1) -> Tensor:
    """sum |t|^q over all but the first `keep` axes."""
    dims = tuple(range(keep, t.ndim))
    return torch.linalg.vector_norm(t, q, dims).pow(q) if dims else t.abs().pow(q)


def sum_of_rest(t: Tensor) -> Tensor:
    """For each entry, the sum of the other entries along the last axis.

    Added up from both ends, because total minus entry loses all digits where the entry is large.
    """
    before, after = t.cumsum(-1).roll(1, -1), t.flip(-1).cumsum(-1).roll(1, -1)
    before[..., 0] = after[..., 0] = 0
    return before + after.flip(-1)


def cotangents(p: Tensor, rest: Tensor, classes: Tensor) -> Tensor:
    """e_c - p, the gradient of log p_c by the logits [rows, C], for one class c a row; rest = sum_of_rest(p)."""
    own = classes.unsqueeze(1)
    return p.neg().scatter_(1, own, rest.gather(1, own))


def head_powers(h: Tensor, p: Tensor, rest: Tensor, bias: bool, q: int) -> Tensor:
    """Powers [n, C] for the linear layer that gives the logits, from its inputs h [n, K, in] and p, 1 - p [n, K, C].

    Row k of the mean gradient of log p_c is mean_i (1[k = c] - p_ik) h_i. The rows k != c are therefore the same for
    every c, and all classes cost one pass and no backpropagation.
    """
    n, copies, classes = p.shape
    p, rest = p / copies, rest / copies
    if bias:
        h = torch.cat([h, h.new_ones(n, copies, 1)], -1)
    if copies == 1:
        size = power(h, q)[:, None]
        own, other = rest[:, 0].pow(q) * size, p[:, 0].pow(q) * size
    elif q == 2:
        gram = h @ h.mT  # [n, K, K]
        own, other = ((t * (gram @ t)).sum(1).clamp(min=0) for t in (rest, p))
    else:
        own, other = torch.empty_like(p[:, 0]), torch.empty_like(p[:, 0])
        for at in _chunks(n, classes * h.shape[-1], h):
            own[at], other[at] = (
                power(rest[at].mT @ h[at], q, 2),
                power(p[at].mT @ h[at], q, 2),
            )
    return own + sum_of_rest(other)


def _outer(
    a: Tensor, out: int, bias: bool, q: int, passes: int
) -> Callable[[Tensor], Tensor]:
    """Powers of sum_s d_s a_s^T and, with a bias, of sum_s d_s, from the errors d [n, groups, out, S].

    The inputs a [n, groups, in, S] are used for `passes` classes.
    """
    n, groups, width, positions = a.shape
    if positions == 1:
        size = power(a, q, 2) + bias  # [n, groups]
        return lambda d: (size * power(d, q, 2)).sum(1)
    gram: list[Tensor] = []

    def by_gram(d: Tensor) -> Tensor:
        """|sum_s d_s a_s^T|^2 = sum_st (a_s . a_t)(d_s . d_t)."""
        if not gram or passes == 1:
            gram[:] = [a.mT @ a + bias]
        return (gram[0] * (d.mT @ d)).sum((1, 2, 3)).clamp(min=0)

    def direct(d: Tensor) -> Tensor:
        result = power(d.sum(-1), q) if bias else d.new_zeros(n)
        for at in _chunks(n, groups * out * width, d):
            result[at] += power(d[at] @ a[at].mT, q)
        return result

    ways, rule = {"direct": direct}, "direct"
    if _gram_pays(q, positions, out, width, passes):
        rule = "gram"
    if rule == "gram" or _gram_fits(q, positions, out, width):
        ways["gram"] = by_gram
    return _fastest(
        "gradient norms", (n, groups, out, width, positions, passes == 1), ways, rule
    )


def _gram_pays(q: int, positions: int, out: int, width: int, passes: int) -> bool:
    """Whether a Gram matrix over positions takes fewer operations a sample than the gradient: 8 for a pass over it."""
    return q == 2 and positions * (out + 8 + width / passes) < out * width


def _gram_fits(q: int, positions: int, out: int, width: int) -> bool:
    """Whether it is at most so many times as large as the gradient that it may be the faster way."""
    return q == 2 and positions**2 <= ROOM * out * width


def _fastest(
    kind: str, shape: tuple, ways: dict[str, Callable[[Any], Tensor]], rule: str
) -> Callable[[Any], Tensor]:
    """The fastest of the ways to take the errors, chosen at the first errors; shape [n, ...] of the factors."""

    def powers(errors: Any) -> Tensor:
        like = errors if isinstance(errors, Tensor) else errors[0]
        each = {name: partial(way, errors) for name, way in ways.items()}
        with torch.no_grad():
            few = shape[0] < 3  # the rows by which the forms are checked
            return ways[
                rule
                if few
                else tuning.choose(
                    kind, (tuning.octave(shape[0]), *shape[1:]), like, each, rule
                )
            ](errors)

    return powers


def _linear(
    module: nn.Linear, inputs: list[Tensor], n: int, q: int, passes: int
) -> Powers:
    powers = _outer(
        _columns(inputs, n), module.out_features, module.bias is not None, q, passes
    )
    return lambda errors: powers(_columns(errors, n))


def _conv(module: Any, inputs: list[Tensor], n: int, q: int, passes: int) -> Powers:
    """By unfolding where the map is so small that a Gram matrix pays, otherwise by per-sample weight gradients.

    Measured on 2 cores, 3x3, 32 samples, per class: 16 -> 16 channels at 32x32, 21 ms by unfolding (7 ms with the
    unfolded input kept, at 9 times its memory) and 2.7 ms by one grouped convolution in which samples are groups;
    64 -> 64 channels at 8x8, 6.2 (3.0) and 3.4 ms, by the Gram matrix 0.35 ms.
    """
    groups, out, kernel = module.groups, module.out_channels, module.kernel_size
    padding = module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = [
            F.pad(x, module._reversed_padding_repeated_twice, mode) for x in inputs
        ]
        padding = (0,) * len(kernel)
    bias = module.bias is not None
    width = module.in_channels // groups * math.prod(kernel)

    def places(x: Tensor) -> int:
        sizes = zip(
            x.shape[2:], padding, module.dilation, kernel, module.stride, strict=True
        )
        return math.prod(
            (size + 2 * pad - wide * (k - 1) - 1) // step + 1
            for size, pad, wide, k, step in sizes
        )

    positions = sum(len(x) // n * places(x) for x in inputs)

    def unfolded() -> Powers:
        def unfold(x: Tensor) -> Tensor:
            if x.ndim == 4:
                return F.unfold(x, kernel, module.dilation, padding, module.stride)
            settings = (
                (1, *kernel),
                (1, *module.dilation),
                (0, *padding),
                (1, *module.stride),
            )
            return F.unfold(x.unsqueeze(2), *settings)

        powers = _outer(
            _columns([unfold(x) for x in inputs], n, 1, groups),
            out // groups,
            bias,
            q,
            passes,
        )
        return lambda errors: powers(_columns(errors, n, 1, groups))

    def as_groups(
        x: Tensor, at: slice
    ) -> Tensor:  # [rows, channels, ...] -> [K, samples * channels, ...]
        return x.unflatten(0, (n, -1))[at].transpose(0, 1).flatten(1, 2)

    gradient_of = getattr(grad, f"conv{len(kernel)}d_weight")

    def gradients(x: Tensor, error: Tensor, at: slice) -> Tensor:
        m = len(range(n)[at])
        shape, settings = (
            (m * out, *module.weight.shape[1:]),
            (module.stride, padding, module.dilation, m * groups),
        )
        return gradient_of(
            as_groups(x, at), shape, as_groups(error, at), *settings
        ).view(m, -1)

    def by_gradients(errors: list[Tensor]) -> Tensor:
        result = errors[0].new_zeros(n)
        for at in _chunks(n, out * width, errors[0]):
            each = [
                gradients(x, error, at) for x, error in zip(inputs, errors, strict=True)
            ]
            result[at] = power(sum(each[1:], start=each[0]), q)
        return result + power(_total(errors, n, 1), q) if bias else result

    made: list[Powers] = []

    def by_unfolding(errors: list[Tensor]) -> Tensor:
        if not made or passes == 1:
            made[:] = [unfolded()]
        return made[0](errors)

    ways: dict[str, Powers] = {"gradients": by_gradients}
    rule, sizes = "gradients", (q, positions, out // groups, width)
    if len(kernel) < 3 and _gram_pays(*sizes, passes):
        rule = "unfolded"
    if rule == "unfolded" or (len(kernel) < 3 and _gram_fits(*sizes)):
        ways["unfolded"] = by_unfolding
    settings = (n, groups, *sizes, *kernel, *module.stride, passes == 1)
    return _fastest("gradient norms of a convolution", settings, ways, rule)


def _affine(module: Any, inputs: list[Tensor], n: int, q: int, passes: int) -> Powers:
    """Scale and shift after a normalisation: the gradient is an elementwise product, summed over places."""
    last = isinstance(module, nn.LayerNorm | nn.RMSNorm)
    if last:
        normalise: Any = (
            F.layer_norm if isinstance(module, nn.LayerNorm) else F.rms_norm
        )
        normal = [normalise(x, module.normalized_shape, eps=module.eps) for x in inputs]
    elif isinstance(module, nn.GroupNorm):
        normal = [F.group_norm(x, module.num_groups, eps=module.eps) for x in inputs]
    else:
        normal = [
            F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)
            for x in inputs
        ]

    dims, axis = module.weight.ndim, -1 if last else 1

    def powers(errors: list[Tensor]) -> Tensor:
        products = [error * x for error, x in zip(errors, normal, strict=True)]
        result = power(_total(products, n, axis, dims), q)
        return (
            result
            if getattr(module, "bias", None) is None
            else result + power(_total(errors, n, axis, dims), q)
        )

    return powers


def _embedding(
    module: nn.Embedding, inputs: list[Tensor], n: int, q: int, passes: int
) -> Powers:
    """The errors of equal indices are added at the first of them: a sample has at most as many rows as tokens."""
    indices = torch.cat([index.reshape(n, 1, -1) for index in inputs], 2)  # [n, 1, S]
    first = (indices == indices.mT).int().argmax(1, keepdim=True)
    live = indices != (-1 if module.padding_idx is None else module.padding_idx)

    def powers(errors: list[Tensor]) -> Tensor:
        d = _columns(errors, n).squeeze(1) * live  # [n, features, S]
        return power(torch.zeros_like(d).scatter_add_(2, first.expand_as(d), d), q)

    return powers


def _columns(parts: list[Tensor], n: int, axis: int = -1, groups: int = 1) -> Tensor:
    """What a layer's calls were given, or their errors, [n * copies, ...] with features along an axis, as
    [n, groups, features, S]: S counts places, copies and calls.
    """
    moved = [part.movedim(axis, -1).reshape(n, -1, part.shape[axis]) for part in parts]
    joined = moved[0] if len(moved) == 1 else torch.cat(moved, 1)
    return joined.mT.unflatten(1, (groups, -1))


def _total(parts: list[Tensor], n: int, axis: int, dims: int = 1) -> Tensor:
    """The sum [n, features] over places, copies and calls; with `dims`, features are the last axes together."""
    moved = [
        part.flatten(-dims).movedim(axis, 1).unflatten(0, (n, -1)) for part in parts
    ]
    return torch.stack([part.sum((1, *range(3, part.ndim))) for part in moved]).sum(0)


def _chunks(n: int, elements: int, like: Tensor) -> Iterator[slice]:
    """Slices of n samples; each sample needs a temporary of this many elements."""
    step = max(1, elements_of_temporary(like.device) // elements)
    return (slice(start, start + step) for start in range(0, n, step))


# (module, inputs of its calls [rows, ...], samples n, q, passes) -> Powers; rows = n * copies, sample-major. Subclasses
# are not looked up, because they may compute something else.
FORMS: dict[type[nn.Module], Callable[..., Powers]] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.LayerNorm: _affine,
    nn.RMSNorm: _affine,
    nn.GroupNorm: _affine,
    nn.BatchNorm1d: _affine,
    nn.BatchNorm2d: _affine,
    nn.BatchNorm3d: _affine,
    nn.Embedding: _embedding,
}


def rows_form(
    module: nn.Module, inputs: list[Tensor], n: int, q: int, passes: int
) -> Powers:
    """For parameters of which every row got its own copy: the error at the copy is the gradient of the row."""
    return lambda errors: power(
        torch.cat([e.reshape(n, -1, e[0].numel()).sum(1) for e in errors], 1), q
    )
