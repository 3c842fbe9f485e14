"""Norms of per-sample gradients from what a layer takes and the errors at its output.

The gradient of a linear layer for one sample is a sum of outer products, errors times
inputs, over tokens, places and perturbed copies. Its norm follows from these factors
("ghost norms": Goodfellow 2015, arXiv 1510.01799; for sums, Li et al. 2022, arXiv
2110.05679). All functions give powers ||g||_q^q, which are summed over weights and
biases; the roots are taken last.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import TreeSpec, tree_unflatten

from uqlab.core.devices import elements_of_temporary
from uqlab.core.modules import called_with, logits_of

PASS = (
    8  # multiply-adds that one pass over a Gram matrix costs, for each of its numbers
)


class Call(NamedTuple):
    """One call of a module.

    `leaves` are its arguments, `spec` says how they were nested, and `batched` which of
    them are tensors with a row for each sample. `output` is the module's own plus
    `probe`, zeros: the gradient by the probe is the error at the output.
    """

    leaves: list[Any]
    spec: TreeSpec
    batched: list[int]
    output: Tensor
    probe: Tensor

    @property
    def x(self) -> Tensor:
        """What the module takes, [rows, ...]."""
        return self.leaves[self.batched[0]]

    def again(
        self, module: nn.Module, parameters: Mapping[str, Tensor], *samples: Tensor
    ) -> Tensor:
        """Return the output for other parameters and the arguments of one sample."""
        leaves = list(self.leaves)
        for i, sample in zip(self.batched, samples, strict=True):
            leaves[i] = sample
        args, kwargs = tree_unflatten(leaves, self.spec)
        output = called_with(module, parameters, args, kwargs)
        return logits_of(output)


# The errors [rows, ...] at the outputs of a module's calls -> powers [samples]; rows
# are sample-major, each sample with all its copies.
Powers = Callable[[Sequence[Tensor]], Tensor]


def power(t: Tensor, q: int) -> Tensor:
    """Return sum |t|^q over all but the first axis."""
    return torch.linalg.vector_norm(t.reshape(len(t), -1), q, 1).pow(q)


def cotangent(p: Tensor, c: int | Tensor) -> Tensor:
    """Return the gradient e_c - p of log p_c by the logits, [rows, classes].

    1 - p_c is the sum of the other entries: it keeps its digits where p_c is near 1.
    """
    seed = -p
    seed[:, c] = 0
    seed[:, c] = -seed.sum(1)
    return seed


def linear(module: nn.Linear, calls: Sequence[Call], n: int, q: int) -> Powers:
    """Return the powers of a linear layer on any number of tokens."""
    bias = module.bias is not None
    powers = _outer(_tokens([c.x for c in calls], n), module.out_features, bias, q)
    return lambda errors: powers(_tokens(errors, n))


def convolution(
    module: nn.Conv2d, calls: Sequence[Call], n: int, q: int
) -> Powers | None:
    """Return the powers by unfolding, where a Gram matrix of the small map then pays.

    Measured on 2 cores, 3 x 3, 32 samples, for each class: 64 -> 64 channels at 8 x 8,
    0.35 ms, and 3.4 ms by gradients; 16 -> 16 channels at 32 x 32, 7 and 2.7 ms.
    """
    out = len(module.weight)
    width = module.weight[0].numel()
    places = sum(call.probe[:, 0].numel() for call in calls) // n
    as_they_are = module.padding_mode == "zeros" and module.groups == 1
    if isinstance(module.padding, str) or not as_they_are:
        return None
    if q == 1 or not _gram_pays(places, out, width):
        return None
    how = (module.kernel_size, module.dilation, module.padding, module.stride)
    patches = [F.unfold(call.x, *how).mT for call in calls]
    powers = _outer(_tokens(patches, n), out, module.bias is not None, q)
    return lambda errors: powers(_tokens([e.flatten(2).mT for e in errors], n))


def embedding(module: nn.Embedding, calls: Sequence[Call], n: int, q: int) -> Powers:
    """Return the powers of an embedding: errors of equal tokens are added up."""
    tokens = torch.cat([call.x.reshape(n, -1) for call in calls], 1)[:, :, None]
    first = (tokens == tokens.mT).int().argmax(1)  # [samples, tokens]
    live = tokens != (-1 if module.padding_idx is None else module.padding_idx)

    def powers(errors):
        d = _tokens(errors, n) * live
        rows = torch.zeros_like(d)
        return power(rows.scatter_add_(1, first[:, :, None].expand_as(d), d), q)

    return powers


# Subclasses are not looked up, because they may compute something else.
FORMS: dict[type[nn.Module], Callable[..., Powers | None]] = {
    nn.Linear: linear,
    nn.Conv2d: convolution,
    nn.Embedding: embedding,
}


def by_copies(
    module: nn.Module,
    owned: Sequence[Sequence[str]],
    calls: Sequence[Call],
    n: int,
    q: int,
) -> Powers:
    """Return the powers [layers, samples] by gradients of each sample's own parameters.

    The module is called once more, with a copy of the parameters for each sample, by
    `torch.func.vmap`; where that fails, sample after sample.

    Parameters
    ----------
    module
        The module whose calls these are.
    owned
        The names in the module of each layer's parameters.
    """
    copies = {}
    for name in itertools.chain(*owned):
        p = module.get_parameter(name).detach()
        copies[name] = p.expand(n, *p.shape).requires_grad_()
    with torch.enable_grad():
        outputs = [_each_sample(call, module, copies, n) for call in calls]

    def powers(errors):
        seeds = [e.view_as(y) for e, y in zip(errors, outputs, strict=True)]
        gradients = torch.autograd.grad(
            outputs,
            list(copies.values()),
            seeds,
            retain_graph=True,
            materialize_grads=True,
        )
        size = {name: power(g, q) for name, g in zip(copies, gradients, strict=True)}
        layers = []
        for layer in owned:
            sizes = torch.stack([size[name] for name in layer])
            layers.append(sizes.sum(0))
        return torch.stack(layers)

    return powers


def _each_sample(
    call: Call, module: nn.Module, copies: Mapping[str, Tensor], n: int
) -> Tensor:
    """Return the outputs [samples, copies, ...] for parameters [samples, ...]."""
    x = [call.leaves[i].unflatten(0, (n, -1)) for i in call.batched]
    run = functools.partial(call.again, module)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an operation that vmap takes one by one
            return vmap(run)(copies, *x)
    except Exception:  # each library has errors of its own for what vmap cannot do
        outputs = []
        for i, *sample in zip(range(n), *x, strict=True):
            own = {name: p[i] for name, p in copies.items()}
            outputs.append(run(own, *sample))
        return torch.stack(outputs)


def _outer(a: Tensor, out: int, bias: bool, q: int) -> Callable[[Tensor], Tensor]:
    """Powers of sum_s d_s a_s^T and, with a bias, of sum_s d_s.

    The inputs a are [samples, S, width], the errors d [samples, S, out].
    """
    _, positions, width = a.shape
    if positions == 1:
        size = power(a, q) + bias
        return lambda d: size * power(d, q)
    if q == 2 and _gram_pays(positions, out, width):
        gram = a @ a.mT + bias  # |sum_s d_s a_s^T|^2 = sum_st (a_s . a_t)(d_s . d_t)
        return lambda d: (gram * (d @ d.mT)).sum((1, 2)).clamp(min=0)
    some = max(1, elements_of_temporary(a.device) // (out * width))

    def direct(d):
        pairs = zip(a.split(some), d.split(some), strict=True)
        result = torch.cat([power(errors.mT @ x, q) for x, errors in pairs])
        return result + power(d.sum(1), q) if bias else result

    return direct


def _gram_pays(positions: int, out: int, width: int) -> bool:
    """Whether a Gram matrix over positions takes fewer operations than the gradient."""
    return positions * (out + PASS) < out * width


def _tokens(tensors: Sequence[Tensor], n: int) -> Tensor:
    """Return what calls took or gave, [rows, ..., F], as [samples, S, F]."""
    joined = [t.reshape(n, -1, t.shape[-1]) for t in tensors]
    return torch.cat(joined, 1) if len(joined) > 1 else joined[0]
