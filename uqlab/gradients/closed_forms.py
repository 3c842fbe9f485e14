"""Norms of per-sample gradients from what a layer sees: its inputs, and the errors propagated back to its outputs.

The gradient of a linear layer for one sample is a sum of outer products, errors times inputs, over tokens, places and
perturbed copies. Its norm follows from these factors ("ghost norms": Goodfellow 2015, arXiv 1510.01799; for sums, Li et
al. 2022, arXiv 2110.05679). All functions give powers ||g||_q^q, which are summed over weights and biases; the roots
are taken last.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.devices import elements_of_temporary

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
            own[at], other[at] = power(rest[at].mT @ h[at], q, 2), power(p[at].mT @ h[at], q, 2)
    return own + sum_of_rest(other)


def _outer(a: Tensor, out: int, bias: bool, q: int, passes: int) -> Callable[[Tensor], Tensor]:
    """Powers of sum_s d_s a_s^T and, with a bias, of sum_s d_s, from the errors d [n, groups, out, S].

    The inputs a [n, groups, in, S] are used for `passes` classes.
    """
    n, groups, width, positions = a.shape
    if positions == 1:
        size = power(a, q, 2) + bias  # [n, groups]
        return lambda d: (size * power(d, q, 2)).sum(1)
    # |sum_s d_s a_s^T|^2 = sum_st (a_s . a_t)(d_s . d_t). Operations per sample, 8 for a pass over the Gram matrix.
    if q == 2 and positions * (out + 8 + width / passes) < out * width:
        gram = a.mT @ a + bias
        return lambda d: (gram * (d.mT @ d)).sum((1, 2, 3)).clamp(min=0)

    def product(d: Tensor) -> Tensor:
        result = power(d.sum(-1), q) if bias else d.new_zeros(n)
        for at in _chunks(n, groups * out * width, d):
            result[at] += power(d[at] @ a[at].mT, q)
        return result

    return product


def _linear(module: nn.Linear, inputs: list[Tensor], n: int, q: int, passes: int) -> Powers:
    def columns(parts: list[Tensor]) -> Tensor:  # [rows, ..., features] -> [n, 1, features, S], over calls too
        return _join([part.reshape(n, -1, part.shape[-1]) for part in parts], 1).mT.unsqueeze(1)

    powers = _outer(columns(inputs), module.out_features, module.bias is not None, q, passes)
    return lambda errors: powers(columns(errors))


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
        inputs = [F.pad(x, module._reversed_padding_repeated_twice, mode) for x in inputs]
        padding = (0,) * len(kernel)
    bias = module.bias is not None
    width = module.in_channels // groups * math.prod(kernel)

    def places(x: Tensor) -> int:
        sizes = zip(x.shape[2:], padding, module.dilation, kernel, module.stride, strict=True)
        return math.prod((size + 2 * pad - wide * (k - 1) - 1) // step + 1 for size, pad, wide, k, step in sizes)

    positions = sum(len(x) // n * places(x) for x in inputs)
    if q == 2 and len(kernel) < 3 and positions * (out // groups + 8 + width / passes) < out // groups * width:

        def columns(parts: list[Tensor], features: int) -> Tensor:  # [rows, groups * features, L] -> [n, groups, f, S]
            parts = [part.reshape(n, -1, groups, features, part[0, 0].numel()) for part in parts]
            return _join([part.permute(0, 2, 3, 1, 4).flatten(3) for part in parts], 3)

        def unfold(x: Tensor) -> Tensor:
            if x.ndim == 4:
                return F.unfold(x, kernel, module.dilation, padding, module.stride)
            settings = ((1, *kernel), (1, *module.dilation), (0, *padding), (1, *module.stride))
            return F.unfold(x.unsqueeze(2), *settings)

        powers = _outer(columns([unfold(x) for x in inputs], width), out // groups, bias, q, passes)
        return lambda errors: powers(columns([error.flatten(2) for error in errors], out // groups))

    def as_groups(x: Tensor, at: slice) -> Tensor:  # [rows, channels, ...] -> [K, samples * channels, ...]
        return x.unflatten(0, (n, -1))[at].transpose(0, 1).flatten(1, 2)

    def gradients(x: Tensor, error: Tensor, at: slice) -> Tensor:
        m = len(range(n)[at])
        weight = x.new_empty(m * out, *module.weight.shape[1:])  # only its shape is read
        settings = ([*module.stride], [*padding], [*module.dilation], False, [0] * len(kernel), m * groups)
        backward = torch.ops.aten.convolution_backward
        _, gradient, _ = backward(as_groups(error, at), as_groups(x, at), weight, None, *settings, [False, True, False])
        return gradient.view(m, -1)

    def powers_by_gradients(errors: list[Tensor]) -> Tensor:
        result = errors[0].new_zeros(n)
        for at in _chunks(n, out * width, errors[0]):
            result[at] = power(sum(gradients(x, e, at) for x, e in zip(inputs, errors, strict=True)), q)  # type: ignore
        if bias:
            result += power(sum(e.reshape(n, -1, out, e[0, 0].numel()).sum((1, 3)) for e in errors), q)  # type: ignore
        return result

    return powers_by_gradients


def _affine(module: Any, inputs: list[Tensor], n: int, q: int, passes: int) -> Powers:
    """Scale and shift after a normalisation: the gradient is an elementwise product, summed over places."""
    last = isinstance(module, nn.LayerNorm | nn.RMSNorm)
    if last:
        normalise: Any = F.layer_norm if isinstance(module, nn.LayerNorm) else F.rms_norm
        normal = [normalise(x, module.normalized_shape, eps=module.eps) for x in inputs]
    elif isinstance(module, nn.GroupNorm):
        normal = [F.group_norm(x, module.num_groups, eps=module.eps) for x in inputs]
    else:
        normal = [F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps) for x in inputs]
    size = module.weight.numel()

    def total(parts: list[Tensor]) -> Tensor:
        if last:
            return torch.stack([part.reshape(n, -1, size).sum(1) for part in parts]).sum(0)
        return torch.stack([part.reshape(n, -1, size, part[0, 0].numel()).sum((1, 3)) for part in parts]).sum(0)

    def powers(errors: list[Tensor]) -> Tensor:
        result = power(total([error * x for error, x in zip(errors, normal, strict=True)]), q)
        return result if getattr(module, "bias", None) is None else result + power(total(errors), q)

    return powers


def _embedding(module: nn.Embedding, inputs: list[Tensor], n: int, q: int, passes: int) -> Powers:
    """The errors of equal indices are added at the first of them: a sample has at most as many rows as tokens."""
    indices = torch.cat([index.reshape(n, -1) for index in inputs], 1)
    first = (indices.unsqueeze(2) == indices.unsqueeze(1)).int().argmax(2, keepdim=True)  # [n, S, 1]
    padding = -1 if module.padding_idx is None else module.padding_idx
    live = (indices != padding).unsqueeze(2)

    def powers(errors: list[Tensor]) -> Tensor:
        d = torch.cat([error.reshape(n, -1, module.embedding_dim) for error in errors], 1) * live
        return power(torch.zeros_like(d).scatter_add_(1, first.expand_as(d), d), q)

    return powers


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


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


def rows_form(module: nn.Module, inputs: list[Tensor], n: int, q: int, passes: int) -> Powers:
    """Parameters of which every row got its own copy: the error at the copy is the row's gradient."""
    return lambda errors: torch.stack(
        [power(error.reshape(n, -1, error[0].numel()).sum(1), q) for error in errors]
    ).sum(0)
