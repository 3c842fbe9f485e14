"""Norms of the gradients of each sample's log-probabilities, by layer and class.

A linear layer's gradient for one sample is a sum of outer products, errors times
inputs, over tokens and perturbed copies. Its norm follows from these factors ("ghost
norms": Goodfellow 2015, arXiv 1510.01799; for sums, Li et al. 2022, arXiv 2110.05679).
Other layers need the gradients themselves.

Norms ||g||_q are computed as powers ||g||_q^q, which add up over weights and biases.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from uqlab.core.checks import Inputs, count, finite, first_tensor
from uqlab.core.modules import called_with, hooked, logits_of, map_tensors, rows_of

Tensors = dict[str, Tensor]
ELEMENTS = 2**25  # activations and gradients in one pass: more is no faster on a CPU


class SampleGradients:
    """The layers of a classifier, and their gradient norms for each sample.

    A layer is a module that has parameters itself; those off the path to the logits do
    not count. The closed form needs layers that are linear and called once. If it does
    not agree with `torch.func.vjp`, as where a weight is also used outside its layer,
    gradients are computed by `vmap`. Recurrent layers need a loop, and so does code
    that depends on the values of the inputs.

    Parameters
    ----------
    model
        A classifier in evaluation mode.
    rows
        Some samples [samples, copies, ...], for the comparison.
    layers
        "all" or "last".
    q
        The norm, 1 or 2.
    """

    def __init__(self, model: nn.Module, rows: Inputs, layers: str, q: int):
        self.model = model
        self.q = q
        names, self.classes, activations = _traced(model, _flat(rows))
        self.names = names[-1:] if layers == "last" else names
        self.layers: list[Any] = [model.get_submodule(name) for name in self.names]
        self.parameters = {
            name: p.detach()
            for name, p in model.named_parameters()
            if _layer_of(name) in self.names and p.is_floating_point()
        }
        self.way = self._choose(rows)
        held = activations + sum(p.numel() for p in self.parameters.values())
        self.batch_size = ELEMENTS // held or 1

    @torch.no_grad()
    def norms(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return norms [n, layers, C] of the gradients of log p_c, and log p [n, C].

        The gradients are averaged over the copies of a sample, x [n, copies, ...]. The
        first copy is the sample itself, and log p belongs to it.
        """
        classes = range(self.classes)
        try:
            powers, logits = self.way(x, classes)
        except LookupError:  # a layer got other rows, as in a mixture of experts
            powers, logits = self._looped(x, classes)
        finite("the model's logits", logits)
        return powers.pow(1 / self.q), logits[:, 0].log_softmax(1)

    @torch.no_grad()
    def _choose(self, rows: Inputs) -> Callable[..., Any]:
        """Return the fastest way that gives the same as the loop."""
        classes = [0, 1]  # of these, one has a large gradient
        expected, _ = self._looped(rows, classes)
        slack = 8 * torch.finfo(expected.dtype).eps ** 0.5
        small = slack * float(expected.max()) / 100
        for way in (self._closed, self._mapped):
            # Each library has errors of its own for what vmap cannot run.
            with contextlib.suppress(Exception):
                if torch.allclose(way(rows, classes)[0], expected, slack, small):
                    return way
        return self._looped

    @torch.enable_grad()
    def _closed(self, x: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers [n, layers, classes] and logits [n, copies, C]."""
        n, copies = first_tensor(x).shape[:2]
        logits, grams, probes = self._probed(_flat(x), n)
        p = logits.detach().softmax(1)
        powers = []
        for c in classes:
            seed = _cotangent(p, c) / copies
            errors = torch.autograd.grad(logits, probes, seed, retain_graph=True)
            pairs = zip(grams, errors, strict=True)
            sums = [(gram * _gram(d, n, self.q)).sum((1, 2)) for gram, d in pairs]
            powers.append(torch.stack(sums, 1).clamp(min=0))
        return torch.stack(powers, 2), logits.detach().unflatten(0, (n, copies))

    def _probed(self, x: Inputs, n: int) -> tuple[Tensor, Any, Any]:
        """Return logits, and the Gram matrix of the inputs and a probe of each layer.

        A probe of zeros is added to the layer's output: the gradient by the probe is
        the error there. Raises LookupError unless each layer is linear and called once,
        with the rows of x.
        """
        calls = {}

        def probed(layer, args, y):
            if type(layer) is not nn.Linear or layer in calls or len(y) != count(x):
                raise LookupError
            gram = _gram(args[0].detach(), n, self.q) + (layer.bias is not None)
            calls[layer] = gram, torch.zeros_like(y, requires_grad=True)
            return y + calls[layer][1]

        register = nn.Module.register_forward_hook
        with hooked(register(layer, probed, prepend=True) for layer in self.layers):
            logits = _logits(self.model, {}, x)
        grams, probes = zip(*(calls[layer] for layer in self.layers), strict=True)
        return logits, grams, probes

    def _mapped(self, x: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers and logits as `_closed`, for all samples at once."""
        # torch maps attention in this form only, and warns of all that it loops over.
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            return vmap(lambda row: self._sample(row, classes))(x)

    def _looped(self, x: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers and logits as `_closed`, one sample after the other."""
        rows = [self._sample(rows_of(x, i), classes) for i in range(count(x))]
        powers, logits = zip(*rows, strict=True)
        return torch.stack(powers), torch.stack(logits)

    def _sample(self, row: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers [layers, classes] and logits [copies, C] of one sample."""
        result: Any = vjp(lambda p: _logits(self.model, p, row), self.parameters)
        logits, pull = result
        p = logits.detach().softmax(1)
        powers = []
        for c in classes:
            (gradients,) = pull(_cotangent(p, c) / len(p))
            sums: dict[str, Any] = dict.fromkeys(self.names, 0)
            for key, gradient in gradients.items():
                power = torch.linalg.vector_norm(gradient, self.q) ** self.q
                sums[_layer_of(key)] += power
            powers.append(torch.stack([*sums.values()]))
        return torch.stack(powers, 1), logits.detach()


@torch.enable_grad()
def _traced(model: nn.Module, x: Inputs) -> tuple[list[str], int, int]:
    """Return the layers on the path to the logits, the classes, and the activations.

    The layers are in the order of their calls. The activations are the number of
    elements that all modules get.
    """
    order, sizes = [], []

    def note(module, args):
        order.append(module)
        sizes.extend(t.numel() for t in args if isinstance(t, Tensor))

    leaves = {
        name: p.detach().requires_grad_()
        for name, p in model.named_parameters()
        if p.is_floating_point()
    }
    with hooked(part.register_forward_pre_hook(note) for part in model.modules()):
        logits = _logits(model, leaves, x)
    if not logits.requires_grad:
        raise ValueError(
            "the model's logits have no gradient path to its parameters; give a "
            "model with parameters that does not detach its output"
        )
    tensors = [*leaves.values()]
    slopes = torch.autograd.grad(logits.sum(), tensors, allow_unused=True)
    pairs = zip(leaves, slopes, strict=True)
    found = [_layer_of(name) for name, slope in pairs if slope is not None]

    def first_call(name):  # or that of the closest module around it
        module = model.get_submodule(name)
        called = module in order
        return order.index(module) if called else first_call(_layer_of(name))

    return sorted(dict.fromkeys(found), key=first_call), logits.shape[1], sum(sizes)


def _logits(model: nn.Module, parameters: Tensors, x: Inputs) -> Tensor:
    """Return the logits [rows, C] for other values of some parameters."""
    args = (x,) if isinstance(x, Tensor) else x
    logits = logits_of(called_with(model, parameters, args))
    if logits.ndim != 2 or len(logits) != count(x) or logits.shape[1] < 2:
        raise ValueError(
            f"the model must return logits [{count(x)}, C] with C >= 2, got "
            f"{list(logits.shape)}; of an ensemble, give one member: ensemble.member(m)"
        )
    return logits


def _cotangent(p: Tensor, c: int) -> Tensor:
    """Return the gradient e_c - p of log p_c by the logits, [rows, classes].

    1 - p_c is the sum of the other entries, which keeps its digits if p_c is near 1.
    """
    of_class = torch.arange(p.shape[1], device=p.device) == c
    others = p.masked_fill(of_class, 0)
    return torch.where(of_class, others.sum(1, keepdim=True), -others)


def _gram(t: Tensor, n: int, q: int) -> Tensor:
    """Return the inner products of a sample's rows, [n, rows, rows].

    For inputs a and errors d, ||sum_s d_s a_s^T||^2 = sum_st (a_s . a_t) (d_s . d_t).
    For q = 1 a sample must have one row, whose 1-norm is returned.
    """
    t = t.reshape(n, -1, t.shape[-1])
    if t.shape[1] == 1:
        return t.abs().pow(q).sum(2, keepdim=True)
    if q == 1:
        raise LookupError
    return t @ t.mT


def _flat(x: Inputs) -> Any:
    """Return inputs [n, copies, ...] as [n * copies, ...]."""
    return map_tensors(lambda t: t.flatten(0, 1), x)


def _layer_of(name: str) -> str:
    """Return the name of the module that holds a parameter or a module."""
    return name.rpartition(".")[0]
