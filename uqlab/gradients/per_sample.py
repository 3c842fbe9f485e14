"""Norms of the gradients of each sample's log-probabilities, by layer and class.

Linear layers have a closed form. The gradient for one sample is a sum of outer
products, errors times inputs, over tokens and perturbed copies, and its norm follows
from these factors ("ghost norms": Goodfellow 2015, arXiv 1510.01799; for sums, Li et
al. 2022, arXiv 2110.05679). Other layers need the gradients themselves.

Norms ||g||_q are computed as powers ||g||_q^q, which add up over weights and biases.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from uqlab.core.checks import Inputs, count, finite, first_tensor
from uqlab.core.devices import ACTIVATIONS, elements_of_temporary
from uqlab.core.modules import called_with, hooked, logits_of, map_tensors, rows_of

Tensors = dict[str, Tensor]
PASS = 8  # multiply-adds that cost as much as one pass over an entry of a Gram matrix


class SampleGradients:
    """The layers of a classifier, and their gradient norms for each sample.

    A layer is a module that has parameters itself. There are three ways to compute
    the norms:

    - The closed form, if all layers are linear and called once.
    - Gradients by `torch.func.vmap`, for many samples at once.
    - Gradients by autograd, one sample after the other. Recurrent layers need it, and
      so does code that depends on the values of the inputs.

    The first way that agrees with autograd on one sample is used. The closed form
    disagrees if a weight is also used outside its layer.

    Parameters
    ----------
    model
        A classifier in evaluation mode.
    rows
        Two samples [2, copies, ...], or one. The first is used for the comparison.
    layers
        "all", "last", a regular expression searched in the names, or a list of names.
    q
        The norm, 1 or 2.
    """

    @torch.enable_grad()
    def __init__(
        self, model: nn.Module, rows: Inputs, layers: str | Sequence[str], q: int
    ):
        self.model = model
        self.q = q
        # Detached: no graph reaches below the first layer of interest, and frozen
        # parameters count too.
        self.parameters = {
            name: p.detach()
            for name, p in model.named_parameters()
            if p.is_floating_point()
        }
        both, order, activations = self._traced(rows)
        log_p, c, gradients = self._reference(rows_of(rows, 0), both)
        self.classes = log_p.shape[1]
        found = {_layer_of(key) for key in gradients}
        found = sorted(found, key=lambda name: _place(model, name, order))
        self.names = _select(found, layers)
        self.layers: list[Any] = [model.get_submodule(name) for name in self.names]
        self.chosen = {
            key: p for key, p in self.parameters.items() if _layer_of(key) in self.names
        }
        self.way = self._choose(rows, c, self._by_layer(gradients))
        held = activations + sum(p.numel() for p in self.chosen.values())
        self.batch_size = elements_of_temporary(log_p.device, ACTIVATIONS) // held or 1

    @torch.enable_grad()
    def norms(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return norms [n, layers, C] of the gradients of log p_c, and log p [n, C].

        The gradients are averaged over the copies of a sample, x [n, copies, ...]. The
        first copy is the sample itself, and log p belongs to it.
        """
        try:
            powers, logits = self.way(x, range(self.classes))
        except LookupError:  # a layer got other rows, as in a mixture of experts
            powers, logits = self._looped(x, range(self.classes))
        finite("the model's logits", logits)
        return powers.pow(1 / self.q), logits[:, 0].log_softmax(1)

    def _traced(self, rows: Inputs) -> tuple[Tensor, list[nn.Module], int]:
        """Return logits, the modules in the order of their calls, and a sample's size.

        The size is the number of elements that all modules get for a sample.
        """
        order, sizes = [], []

        def note(module, args):
            order.append(module)
            sizes.extend(t.numel() for t in args if isinstance(t, Tensor))

        modules = self.model.modules()
        with hooked(module.register_forward_pre_hook(note) for module in modules):
            logits = self._logits({}, _flat(rows))
        return logits, order, sum(sizes) // count(rows)

    def _reference(self, row: Inputs, both: Tensor) -> tuple[Tensor, int, Tensors]:
        """Return log p, the least likely class, and the gradients of its log p.

        These gradients are large. Parameters off the path to the logits have none.
        """
        logits, pull = _autograd(lambda p: self._logits(p, row), self.parameters)
        finite("the model's logits", logits)
        log_p = logits.detach().log_softmax(1)
        if not torch.allclose(both.log_softmax(1)[: len(log_p)], log_p, 0.01, 0.01):
            raise ValueError(
                "the model's output for a sample must not depend on the rest of its "
                "batch or on chance; switch off what mixes samples or draws numbers"
            )
        if not logits.requires_grad:
            raise ValueError(
                "the model's logits have no gradient path to its parameters; give a "
                "model with parameters that does not detach its output"
            )
        c = int(log_p[0].argmin())
        return log_p, c, *pull(cotangent(log_p.exp(), c) / len(log_p))

    def _choose(self, rows: Inputs, c: int, powers: Tensor) -> Callable[..., Any]:
        """Return the first way to the first row's powers [layers] for class c."""
        expected = powers.pow(1 / self.q)
        slack = 4 * torch.finfo(expected.dtype).eps ** 0.5
        small = slack * float(expected.max()) / 100
        linear = all(type(layer) is nn.Linear for layer in self.layers)
        for way in (self._closed, self._mapped)[not linear :]:
            # Each library has errors of its own for what vmap cannot run.
            with contextlib.suppress(Exception):
                found = way(rows, [c])[0][0, :, 0].pow(1 / self.q)
                if torch.allclose(found, expected, slack, small):
                    return way
        return self._looped

    def _closed(self, x: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers [n, layers, classes] and logits [n, copies, C]."""
        n, copies = first_tensor(x).shape[:2]
        logits, inputs, probes = self._probed(_flat(x))
        p = logits.detach().softmax(1)
        pairs = zip(self.layers, inputs, strict=True)
        forms = [_outer(layer, a, n, self.q) for layer, a in pairs]
        powers = []
        for c in classes:
            seed = cotangent(p, c) / copies
            errors = torch.autograd.grad(logits, probes, seed, retain_graph=True)
            sizes = [form(error) for form, error in zip(forms, errors, strict=True)]
            powers.append(torch.stack(sizes, 1))
        return torch.stack(powers, 2), logits.detach().unflatten(0, (n, copies))

    def _probed(self, x: Inputs) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Return logits, and for each layer its inputs and a probe.

        A probe of zeros is added to the layer's output: the gradient by the probe is
        the error at the output. Raises LookupError unless each layer is called once,
        with as many rows as x has.
        """
        calls = {}

        def probed(layer, args, y):
            if layer in calls or len(y) != count(x):
                raise LookupError
            probe = torch.zeros_like(y, requires_grad=True)
            calls[layer] = args[0].detach(), probe
            return y + probe

        register = nn.Module.register_forward_hook
        with hooked(register(layer, probed, prepend=True) for layer in self.layers):
            logits = self._logits({}, x)
        inputs, probes = zip(*(calls[layer] for layer in self.layers), strict=True)
        return logits, inputs, probes

    def _mapped(self, x: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers and logits as `_closed`, for all samples at once."""
        # torch maps attention in this form only, and warns of all that it loops over.
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            return vmap(lambda row: self._sample(row, classes, vjp))(x)

    def _looped(self, x: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers and logits as `_closed`, one sample after the other."""
        rows = [rows_of(x, i) for i in range(count(x))]
        results = [self._sample(row, classes, _autograd) for row in rows]
        powers, logits = zip(*results, strict=True)
        return torch.stack(powers), torch.stack(logits)

    def _sample(
        self, row: Inputs, classes: Sequence[int], differentiate: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Return powers [layers, classes] and logits [copies, C] of one sample."""
        logits, pull = differentiate(lambda p: self._logits(p, row), self.chosen)
        p = logits.detach().softmax(1)
        seeds = [cotangent(p, c) / len(p) for c in classes]
        powers = [self._by_layer(*pull(seed)) for seed in seeds]
        return torch.stack(powers, 1), logits.detach()

    def _by_layer(self, gradients: Tensors) -> Tensor:
        """Return the powers [layers] of one sample's gradients."""
        zero = next(iter(self.chosen.values())).new_zeros(())
        powers = dict.fromkeys(self.names, zero)
        for key, gradient in gradients.items():
            layer = _layer_of(key)
            if layer in powers:
                powers[layer] = powers[layer] + power(gradient[None], self.q)[0]
        return torch.stack([*powers.values()])

    def _logits(self, parameters: Tensors, x: Inputs) -> Tensor:
        """Return the logits [rows, C] for other values of some parameters."""
        args = (x,) if isinstance(x, Tensor) else x
        logits = logits_of(called_with(self.model, self.parameters | parameters, args))
        right = logits.ndim == 2 and len(logits) == count(x) and logits.shape[1] >= 2
        if not right or not logits.is_floating_point():
            raise ValueError(
                "the model must return floating logits [samples, C] with C >= 2, got "
                f"{logits.dtype} {list(logits.shape)} for {count(x)} inputs; of an "
                "ensemble, give one member: ensemble.member(m)"
            )
        return logits


def power(t: Tensor, q: int) -> Tensor:
    """Return sum |t|^q over all axes but the first."""
    return torch.linalg.vector_norm(t.reshape(len(t), -1), q, 1).pow(q)


def cotangent(p: Tensor, c: int) -> Tensor:
    """Return the gradient e_c - p of log p_c by the logits, [rows, classes].

    1 - p_c is the sum of the other entries, which keeps its digits if p_c is near 1.
    """
    of_class = torch.arange(p.shape[1], device=p.device) == c
    others = p.masked_fill(of_class, 0)
    return torch.where(of_class, others.sum(1, keepdim=True), -others)


def _autograd(run: Callable[[Tensors], Tensor], parameters: Tensors) -> tuple[Any, Any]:
    """Return what `torch.func.vjp` returns, without gradients of unused parameters."""
    leaves = {key: p.detach().requires_grad_() for key, p in parameters.items()}
    y = run(leaves)

    def pull(seed):
        tensors = [*leaves.values()]
        found = torch.autograd.grad(
            y, tensors, seed, retain_graph=True, allow_unused=True
        )
        pairs = zip(leaves, found, strict=True)
        return ({key: gradient for key, gradient in pairs if gradient is not None},)

    return y, pull


def _outer(layer: nn.Linear, a: Tensor, n: int, q: int) -> Callable[[Tensor], Tensor]:
    """Return the powers of sum_s d_s a_s^T and, with a bias, of sum_s d_s.

    The inputs are a [rows, ..., in_features], and the errors d at the outputs
    [rows, ..., out_features], for n samples with S positions each.
    """
    bias = layer.bias is not None
    out, width = layer.weight.shape
    a = a.reshape(n, -1, width)
    positions = a.shape[1]
    # A Gram matrix has |sum_s d_s a_s^T|^2 = sum_st (a_s . a_t) (d_s . d_t).
    by_gram = q == 2 and positions > 1 and positions * (out + PASS) < out * width
    size = a @ a.mT + bias if by_gram else power(a, q) + bias

    def powers(errors):
        d = errors.reshape(n, -1, out)
        if positions == 1:
            return size * power(d, q)
        if by_gram:
            return (size * (d @ d.mT)).sum((1, 2)).clamp(min=0)
        weight = power(d.mT @ a, q)
        return weight + power(d.sum(1), q) if bias else weight

    return powers


def _flat(x: Inputs) -> Any:
    """Return inputs [n, copies, ...] as [n * copies, ...]."""
    return map_tensors(lambda t: t.flatten(0, 1), x)


def _layer_of(name: str) -> str:
    """Return the name of the module that holds a parameter or a module."""
    return name.rpartition(".")[0]


def _place(model: nn.Module, name: str, order: Sequence[nn.Module]) -> int:
    """Return when a module, or the closest one around it that is called, is called."""
    module = model.get_submodule(name)
    called = module in order
    return order.index(module) if called else _place(model, _layer_of(name), order)


def _select(names: Sequence[str], layers: str | Sequence[str]) -> list[str]:
    """Return the chosen names, in their order."""
    if isinstance(layers, str):
        pattern = "" if layers == "all" else layers
        chosen = [name for name in names if re.search(pattern, name)]
        chosen = [names[-1]] if layers == "last" else chosen
    else:
        chosen = [name for name in names if name in layers]
        chosen = chosen if set(layers) <= set(names) else []
    if not chosen:
        raise ValueError(
            "`layers` must be 'all', 'last', a pattern or a list of names among "
            f"{[*names]}, got {layers!r}"
        )
    return chosen
