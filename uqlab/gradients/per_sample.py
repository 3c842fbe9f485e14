"""Per-sample gradient norms of any classifier.

One forward pass, then one backward pass a class, for all samples at once.
"""

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten

from uqlab.core.checks import finite
from uqlab.core.modules import hooked, logits_of
from uqlab.gradients.closed_forms import (
    FORMS,
    Call,
    Powers,
    by_copies,
    cotangent,
    power,
)

Calls = dict[str, list[Call | None]]  # None: a call that does not take and give rows


class SampleGradients:
    """The layers of a model and, for each, an exact way to its per-sample norms.

    A layer is a module with parameters of its own. Its norms come from what it takes and
    the errors at its output, by a closed form or with a copy of its parameters for each
    sample. That fails where a weight is used elsewhere too, or where the layer does not
    see the samples in rows. It is compared with plain autograd on one sample; where it is
    not right, copies of the parameters go through the next module around, and at last
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
        self.model, self.q = model, q
        self.modules = dict(model.named_modules())
        self.owned: dict[str, list[str]] = {}  # frozen parameters count too
        for name, p in model.named_parameters():
            if p.is_floating_point():
                self.owned.setdefault(name.rpartition(".")[0], []).append(name)
        order: list[str] = []
        sizes: list[int] = []

        def note(name: str, args: tuple) -> None:
            order.append(name)
            sizes.extend(t.numel() for t in args if isinstance(t, Tensor))

        with torch.no_grad(), hooked(
            module.register_forward_pre_hook(lambda _, args, name=name: note(name, args))
            for name, module in self.modules.items()
        ):
            logits = _logits(model(rows), 2)
        target, truth = self._by_autograd(rows, logits)
        names = sorted(truth, key=lambda name: _place(name, order))
        self.names = _select(names, layers)
        self.units = self._units(rows, target, truth)
        copied = [
            name
            for name, unit in self.units.items()
            if unit != name or type(self.modules[name]) not in FORMS
        ]
        numbers = [p.numel() for name in copied for p in self._parameters(name)]
        self.footprint = sum(sizes) // 2 + sum(numbers)  # elements a sample

    def norms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return norms [layers, n, C] of the gradients of log p_c, and log p [n, C].

        The gradients are averaged over the copies of a sample, x [n, copies, ...]. The
        first copy is the sample itself, and log p is its own.
        """
        n, copies = x.shape[:2]
        with torch.enable_grad():
            logits, calls = self._run(x.flatten(0, 1), self.units.values())
        if failed := [unit for unit, made in calls.items() if not _usable(made)]:
            # A module that was not called, or not with all samples, as in a mixture.
            for name, unit in self.units.items():
                self.units[name] = "" if unit in failed else unit
            return self.norms(x)
        log_p = logits.detach().log_softmax(1)
        p = log_p.exp()
        layers = self._layers(self.units)
        ready = {unit: self._way(unit, layers[unit], calls[unit], n) for unit in calls}
        powers = {name: torch.empty_like(log_p[::copies]) for name in self.names}
        for c in range(p.shape[1]):
            errors = _errors(logits, cotangent(p, c) / copies, calls)
            for unit, way in ready.items():
                for name, values in zip(layers[unit], way(errors[unit]), strict=True):
                    powers[name][:, c] = values
        norms = torch.stack(list(powers.values())).pow(1 / self.q)
        return norms, log_p[::copies]

    def head_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs [rows, features] of the last linear layer, and log p [rows, C].

        Raises ValueError unless this layer gives the logits.
        """
        name = self.names[-1]
        with torch.enable_grad():
            logits, calls = self._run(x, [name])
        call = calls[name][0] if self.units[name] == name else None
        is_linear = type(self.modules[name]) is nn.Linear
        if not is_linear or call is None or call.output is not logits:
            raise ValueError(
                "gradnorm needs logits that come straight from an nn.Linear on "
                f"[samples, features]; the last layer, {name!r}, is not; "
                "exgrad takes any"
            )
        return call.x, logits.detach().log_softmax(1)

    def _run(self, x: Tensor, units: Iterable[str]) -> tuple[Tensor, Calls]:
        """Logits [rows, C] and the calls of some modules."""
        calls: Calls = {unit: [] for unit in units}
        handles = [
            self.modules[unit].register_forward_hook(
                _recorder(made, len(x)), prepend=True, with_kwargs=True
            )
            for unit, made in calls.items()
        ]
        with hooked(handles):
            return _logits(self.model(x), len(x)), calls

    def _way(self, unit: str, layers: Sequence[str], calls: Any, n: int) -> Powers:
        """The way from the errors at a module's outputs to powers [layers, n]."""
        module = self.modules[unit]
        form = FORMS.get(type(module)) if layers == [unit] else None
        powers = form(module, calls, n, self.q) if form else None
        if powers:
            return lambda errors: powers(errors).unsqueeze(0)
        inside = f"{unit}." if unit else ""
        owned = {
            name: [own.removeprefix(inside) for own in self.owned[name]]
            for name in layers
        }
        return by_copies(module, owned, calls, n, self.q)

    def _by_autograd(
        self, rows: Tensor, logits: Tensor
    ) -> tuple[int, dict[str, Tensor]]:
        """A class and, for the last row, the power of each layer's gradient of log p_c.

        Raises ValueError for a model whose output depends on the rest of the batch, and
        for one without a path to any parameter.
        """
        flat = [own for names in self.owned.values() for own in names]
        leaves = {name: self.model.get_parameter(name).detach() for name in flat}
        with torch.enable_grad():
            for leaf in leaves.values():
                leaf.requires_grad_()
            single = _logits(functional_call(self.model, leaves, (rows[1:],)), 1)
        log_p = single.detach().log_softmax(1)
        if not torch.allclose(logits[1:].log_softmax(1), log_p, rtol=0.01, atol=0.01):
            raise ValueError(
                "the model's output for a sample changes with the rest of its batch, "
                "or at random"
            )
        target = int(log_p.argmin())  # far from certain: its gradient is large
        found = [None] * len(flat)
        if single.requires_grad:
            seed = cotangent(log_p.exp(), target)
            tensors = list(leaves.values())
            found = torch.autograd.grad(single, tensors, seed, allow_unused=True)
        size = {
            name: power(g[None], self.q)
            for name, g in zip(flat, found, strict=True)
            if g is not None
        }
        on_path = {
            layer: [size[own] for own in names if own in size]
            for layer, names in self.owned.items()
        }
        truth = {layer: sum(s) for layer, s in on_path.items() if s}
        if not truth:
            raise ValueError(
                "the model's output has no gradient path to any of its parameters: "
                "was it detached?"
            )
        return target, truth

    def _units(
        self, rows: Tensor, target: int, truth: dict[str, Tensor]
    ) -> dict[str, str]:
        """For each layer the module in which its gradient can be found.

        It is the innermost one that gives the norm which autograd gives for the last row.
        """
        units: dict[str, str] = {}
        tried = {name: name for name in self.names}
        while tried:
            with torch.enable_grad():
                logits, calls = self._run(rows, tried.values())
            seed = cotangent(logits.detach().softmax(1), target)
            errors = _errors(logits, seed, calls)
            found = {}
            for unit, layers in self._layers(tried).items():
                # A module may fail with other parameters, or on its own.
                with contextlib.suppress(Exception):
                    powers = self._way(unit, layers, calls[unit], 2)(errors[unit])
                    found |= dict(zip(layers, powers[:, 1], strict=True))
            agreed = self._agreeing(found, truth)
            units |= {n: u for n, u in tried.items() if n in agreed or not u}
            tried = {
                name: unit.rpartition(".")[0]
                for name, unit in tried.items()
                if name not in units
            }
        return {name: units[name] for name in self.names}

    def _agreeing(
        self, found: dict[str, Tensor], truth: dict[str, Tensor]
    ) -> set[str]:
        """The layers whose powers for one row are those of plain autograd."""
        largest = max(truth.values()).pow(1 / self.q)
        agreed = set()
        for name, value in found.items():
            norm, expected = value.pow(1 / self.q), truth[name].pow(1 / self.q)
            tolerance = 4 * torch.finfo(norm.dtype).eps ** 0.5
            if (norm - expected).abs() <= tolerance * (expected + largest / 100):
                agreed.add(name)
        return agreed

    def _layers(self, units: dict[str, str]) -> dict[str, list[str]]:
        """The layers that are found in each module."""
        layers: dict[str, list[str]] = {}
        for name, unit in units.items():
            layers.setdefault(unit, []).append(name)
        return layers

    def _parameters(self, layer: str) -> list[nn.Parameter]:
        return [self.model.get_parameter(name) for name in self.owned[layer]]


def _recorder(calls: list[Call | None], rows: int) -> Any:
    """A forward hook that appends calls, and adds a probe to the output."""

    def is_rows(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape[:1] == (rows,)

    def record(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
        batched = [i for i, t in enumerate(leaves) if is_rows(t)]
        y = logits_of(output)
        if not batched or not is_rows(y) or not y.is_floating_point():
            calls.append(None)
            return output
        probe = torch.zeros_like(y, requires_grad=True)
        y = y + probe
        calls.append(Call(leaves, spec, batched, y, probe))
        return y

    return record


def _usable(calls: list[Call | None]) -> bool:
    return bool(calls) and None not in calls


def _errors(
    logits: Tensor, seed: Tensor, calls: Calls
) -> dict[str, list[Tensor]]:
    """The errors at the outputs of all calls, for a seed [rows, C] at the logits."""
    probes = [c.probe for made in calls.values() for c in made if c is not None]
    if not probes:
        return {}
    found = iter(
        torch.autograd.grad(
            logits, probes, seed, retain_graph=True, materialize_grads=True
        )
    )
    return {
        unit: [next(found) for _ in made]
        for unit, made in calls.items()
        if _usable(made)
    }


def _logits(output: Any, rows: int) -> Tensor:
    logits = logits_of(output)
    if not isinstance(logits, Tensor):
        raise TypeError(
            "the model must return logits or an output with .logits, "
            f"got {type(output).__name__}"
        )
    right = logits.ndim == 2 and len(logits) == rows and logits.shape[1] >= 2
    if not right or not logits.is_floating_point():
        hint = "; take one member, ensemble.member(m)" if logits.ndim == 3 else ""
        raise ValueError(
            "the model must return floating logits [samples, C] with C >= 2, "
            f"got {logits.dtype} {list(logits.shape)} for {rows} inputs{hint}"
        )
    finite("the model's logits", logits)
    return logits


def _place(name: str, order: list[str]) -> int:
    """The first call of a module, or of the closest one around it that is called."""
    while name not in order:
        name = name.rpartition(".")[0]
    return order.index(name)


def _select(names: list[str], layers: str | Sequence[str]) -> list[str]:
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
