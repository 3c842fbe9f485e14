"""Per-sample gradient norms of any classifier.

One forward pass, then one backward pass a class, for all samples at once.
"""

import contextlib
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from uqlab.core.checks import finite
from uqlab.core.modules import called_with, hooked, logits_of
from uqlab.gradients.closed_forms import (
    FORMS,
    Call,
    Powers,
    by_copies,
    cotangent,
    power,
)

Calls = dict[str, list[Call]]  # of modules, by their names
Norms = dict[str, Tensor]  # by the names of layers, or parameters by theirs
Units = dict[str, list[str]]  # modules in which gradients are found, and the layers


class SampleGradients:
    """The layers of a model and, for each, an exact way to its per-sample norms.

    A layer is a module with parameters of its own. Its norms come from what it takes
    and the errors at its output, by a closed form or with a copy of its parameters for
    each sample. That fails where a weight is used elsewhere too, or where the layer
    does not see the samples in rows. So it is compared with plain autograd on one
    sample; where it is not right, copies go through the next module around, and at last
    through the whole model, which is always right.

    Parameters
    ----------
    model
        A classifier in evaluation mode.
    rows
        Two different inputs [2, ...], for the comparison.
    layers
        "all", "last", a regular expression searched in the names, or a list of names.
    q
        The norm, 1 or 2.
    """

    def __init__(
        self, model: nn.Module, rows: Tensor, layers: str | Sequence[str], q: int
    ):
        self.model = model
        self.q = q
        self.modules = dict(model.named_modules())
        # Detached: no graph reaches below the first layer of interest, and frozen
        # parameters count too.
        self.parameters = {
            name: p.detach()
            for name, p in model.named_parameters()
            if p.is_floating_point()
        }
        self.owned: Units = {}  # parameters of layers
        for name in self.parameters:
            self.owned.setdefault(_around(name), []).append(name)
        self.footprint = 0  # numbers that are held for a sample
        log_p, truth = self._by_autograd(rows[1:])
        self.classes = log_p.shape[1]
        self.names = _select(list(truth), layers)
        self.units = self._right_units(rows, log_p, truth)
        for unit, names in self.units.items():
            if names != [unit] or type(self.modules[unit]) not in FORMS:
                for layer in names:
                    sizes = [self.parameters[p].numel() for p in self.owned[layer]]
                    self.footprint += sum(sizes)

    def norms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return norms [n, layers, C] of the gradients of log p_c, and log p [n, C].

        The gradients are averaged over the copies of a sample, x [n, copies, ...]. The
        first copy is the sample itself, and log p is its own.
        """
        log_p, powers = self._powers(x, self.units, range(self.classes))
        if len(powers) < len(self.names):
            # A module did not see all samples now, as in a mixture of experts.
            self.units = {"": self.names}
            return self.norms(x)
        norms = torch.stack([powers[name] for name in self.names], 1).pow(1 / self.q)
        return norms, log_p[:: x.shape[1]]

    def head_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs [rows, features] of the last linear layer, and log p [rows, C].

        Raises ValueError unless this layer gives the logits.
        """
        name = self.names[-1]
        logits, calls = self._run(x, self.units)
        call = calls[name][0] if name in calls else None
        is_linear = type(self.modules[name]) is nn.Linear
        if not is_linear or call is None or call.output is not logits:
            raise ValueError(
                "gradnorm needs logits that come straight from an nn.Linear on "
                f"[samples, features]; the last layer, {name!r}, is not; "
                "exgrad takes any"
            )
        return call.x, logits.detach().log_softmax(1)

    def _by_autograd(self, row: Tensor) -> tuple[Tensor, Norms]:
        """Return log p of a row, and each layer's gradient norm of the least log p_c.

        The layers are those on the path to the output, in the order of their calls.
        """
        leaves = {k: p.detach().requires_grad_() for k, p in self.parameters.items()}
        logits, order = self._watched(leaves, row)
        log_p = logits.detach().log_softmax(1)
        seed = cotangent(log_p.exp(), int(log_p.argmin()))
        gradients = [None] * len(leaves)
        if logits.requires_grad:
            tensors = list(leaves.values())
            gradients = torch.autograd.grad(logits, tensors, seed, allow_unused=True)
        powers = {}
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                layer = _around(name)
                powers[layer] = powers.get(layer, 0) + power(gradient[None], self.q)[0]
        if not powers:
            raise ValueError(
                "the model's output has no gradient path to any of its parameters: "
                "was it detached?"
            )
        called = sorted(powers, key=lambda layer: _place(layer, order))
        return log_p, {layer: powers[layer].pow(1 / self.q) for layer in called}

    def _watched(self, parameters: Norms, row: Tensor) -> tuple[Tensor, list[str]]:
        """Return the logits of a row, and the modules in the order of their calls."""
        order = []

        def watch(name):
            def note(module, args):
                order.append(name)
                self.footprint += sum(t.numel() for t in args if isinstance(t, Tensor))

            return note

        modules = self.modules.items()
        handles = [m.register_forward_pre_hook(watch(name)) for name, m in modules]
        with torch.enable_grad(), hooked(handles):
            return _logits(called_with(self.model, parameters, (row,)), 1), order

    def _right_units(self, rows: Tensor, log_p: Tensor, truth: Norms) -> Units:
        """Return the innermost modules that give the norms of autograd, and the layers.

        The norms are compared for the last row. Raises ValueError unless log p of the
        row alone is that beside another.
        """
        target = int(log_p.argmin())  # far from certain: its gradient is large
        largest = max(truth.values())
        slack = 4 * torch.finfo(largest.dtype).eps ** 0.5

        def agrees(name, power):
            difference = (power ** (1 / self.q) - truth[name]).abs()
            return difference <= slack * (truth[name] + largest / 100)

        right = {}
        tried = {name: [name] for name in self.names}
        while tried:
            # A module may fail with other parameters, or on its own.
            both, powers = self._powers(rows[:, None], tried, [target], (Exception,))
            if not torch.allclose(both[1:], log_p, rtol=0.01, atol=0.01):
                raise ValueError(
                    "the model's output for a sample changes with the rest of its "
                    "batch, or at random"
                )
            outside = {}
            for unit, names in tried.items():
                for name in names:
                    found = name in powers and agrees(name, powers[name][1, 0])
                    if found or not unit:
                        right.setdefault(unit, []).append(name)
                    else:
                        outside.setdefault(_around(unit), []).append(name)
            tried = outside
        return right

    def _powers(
        self,
        x: Tensor,
        units: Units,
        classes: Sequence[int],
        forgiven: tuple[type[Exception], ...] = (),
    ) -> tuple[Tensor, Norms]:
        """Return log p [rows, C] and, by layer, powers [n, classes] for x [n, copies].

        Layers are left out whose module does not see all rows, or fails as is forgiven.
        """
        n, copies = x.shape[:2]
        logits, calls = self._run(x.flatten(0, 1), units)
        log_p = logits.detach().log_softmax(1)
        p = log_p.exp()
        ways = {}
        sizes = {unit: [] for unit in calls}
        for c in classes:
            errors = _errors(logits, cotangent(p, c) / copies, calls)
            for unit, recorded in calls.items():
                with contextlib.suppress(*forgiven):
                    if unit not in ways:
                        ways[unit] = self._way(unit, units[unit], recorded, n)
                    sizes[unit].append(ways[unit](errors[unit]))
        powers = {}
        for unit, found in sizes.items():
            if found:
                by_layer = torch.stack(found, 2)
                powers |= dict(zip(units[unit], by_layer, strict=True))
        return log_p, powers

    def _run(self, x: Tensor, units: Iterable[str]) -> tuple[Tensor, Calls]:
        """Return logits [rows, C] and, of modules that see all rows, the calls."""
        calls = {unit: [] for unit in units}
        handles = [
            self.modules[unit].register_forward_hook(
                _recorder(recorded, len(x), unit), prepend=True, with_kwargs=True
            )
            for unit, recorded in calls.items()
        ]
        with torch.enable_grad(), hooked(handles):
            logits = _logits(called_with(self.model, self.parameters, (x,)), len(x))
        if not logits.requires_grad:  # modules inside of a derivative of torch.func
            return logits, {}
        return logits, {
            u: recorded for u, recorded in calls.items() if recorded and all(recorded)
        }

    def _way(self, unit: str, layers: list[str], calls: list[Call], n: int) -> Powers:
        """Return the way from errors at a module's outputs to powers [layers, n]."""
        module = self.modules[unit]
        form = FORMS.get(type(module))
        if form and layers == [unit]:
            powers = form(module, calls, n, self.q)
            if powers:
                return lambda errors: powers(errors).unsqueeze(0)
        inside = f"{unit}." if unit else ""
        owned = []
        for layer in layers:
            owned.append([name.removeprefix(inside) for name in self.owned[layer]])
        return by_copies(module, owned, calls, n, self.q)


def _recorder(calls: list[Call | None], rows: int, unit: str) -> Any:
    """Return a forward hook that appends calls, and adds a probe to the output.

    A call is None unless the module takes and gives a row for each sample.
    """

    def is_rows(value):
        return isinstance(value, Tensor) and value.shape[:1] == (rows,)

    def record(module, args, kwargs, output):
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
        batched = [i for i, t in enumerate(leaves) if is_rows(t)]
        # The next layer may want more than the first output of one inside.
        y = getattr(output, "logits", output) if unit else logits_of(output)
        if not batched or not is_rows(y) or not y.is_floating_point():
            calls.append(None)
            return output
        probe = torch.zeros_like(y, requires_grad=True)
        y = y + probe
        calls.append(Call(leaves, spec, batched, y, probe))
        return y

    return record


def _errors(logits: Tensor, seed: Tensor, calls: Calls) -> dict[str, list[Tensor]]:
    """Return the errors at the outputs of all calls, for a seed [rows, C]."""
    if not calls:
        return {}
    probes = [call.probe for call in itertools.chain(*calls.values())]
    errors = iter(
        torch.autograd.grad(
            logits, probes, seed, retain_graph=True, materialize_grads=True
        )
    )
    return {
        unit: list(itertools.islice(errors, len(unit_calls)))
        for unit, unit_calls in calls.items()
    }


def _logits(output: Any, rows: int) -> Tensor:
    """Return a model's logits [rows, C], which are checked."""
    logits = logits_of(output)
    right = logits.ndim == 2 and len(logits) == rows and logits.shape[1] >= 2
    if not right or not logits.is_floating_point():
        raise ValueError(
            "the model must return floating logits [samples, C] with C >= 2, got "
            f"{logits.dtype} {list(logits.shape)} for {rows} inputs; of an ensemble "
            "take one member, ensemble.member(m)"
        )
    finite("the model's logits", logits)
    return logits


def _around(name: str) -> str:
    """Return the name of the module around a module or a parameter."""
    return name.rpartition(".")[0]


def _place(name: str, order: list[str]) -> int:
    """Return when a module, or the closest one around it that is called, is called."""
    while name not in order:
        name = _around(name)
    return order.index(name)


def _select(names: list[str], layers: str | Sequence[str]) -> list[str]:
    """Return the names that are asked for, in their order."""
    match layers:
        case "all":
            chosen = names
        case "last":
            chosen = names[-1:]
        case str():
            chosen = [name for name in names if re.search(layers, name)]
        case _:
            chosen = [name for name in names if name in layers]
            chosen = chosen if set(layers) <= set(names) else []
    if not chosen:
        raise ValueError(
            "layers must be 'all', 'last', a pattern or names among "
            f"{', '.join(names)}; got {layers!r}"
        )
    return chosen
