"""Per-sample gradient norms of any classifier: one forward pass, then one backward pass per class for all samples."""

import contextlib
import functools
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from uqlab.core.checks import finite
from uqlab.core.modules import hooked, logits_of
from uqlab.gradients.closed_forms import (
    FORMS,
    Powers,
    cotangents,
    head_powers,
    power,
    rows_form,
    sum_of_rest,
)


class _Call(NamedTuple):
    """One call of a layer: its input, its output's shape, where errors at the output are caught, and the output."""

    input: Tensor
    shape: torch.Size
    edge: GradientEdge | Tensor | None
    output: weakref.ref


class SampleGradients:
    """The layers of a model and, for each, the cheapest exact way to its per-sample gradient norms.

    model: in evaluation mode.
    rows: two different inputs [2, ...], on which every closed form is compared with plain autograd. Layers whose
        weights are tied, or used in another way than the form assumes, are then computed sample by sample.
    layers: "all", "last", a regular expression searched in the names, or a list of names.
    q: the norm, 1 or 2.
    """

    def __init__(
        self, model: nn.Module, rows: Tensor, layers: str | Sequence[str], q: int
    ):
        self.model, self.q = model, q
        self.modules = dict(model.named_modules())
        # New leaves: the model's parameters keep their gradients and flags, and frozen parameters count too.
        weights = {
            name: p.detach()
            for name, p in model.named_parameters()
            if p.is_floating_point()
        }
        self.parameters = {name: p.requires_grad_() for name, p in weights.items()}
        self.owned: dict[str, list[str]] = {}
        for name in self.parameters:
            self.owned.setdefault(name.rpartition(".")[0], []).append(name)
        self.head: str | None = None  # the linear layer that gives the logits
        self.fast: set[str] = set()
        # Among them, those with one row for all samples (a class token, position embeddings, a bare scale). Each sample
        # gets a copy: along the leading axis of length 1 (-1), or along a new axis before this many axes of length 1.
        self.expanded: dict[str, int] = {}

        order: list[str] = []
        with torch.no_grad():
            logits, calls = self._run(rows, self.owned, order)
        sizes = [
            call.input.numel() + call.shape.numel()
            for part in calls.values()
            for call in part
        ]
        self.footprint = (sum(sizes) + logits.numel()) // 2  # activations per row
        target, truth = self._reference(rows, logits)
        self.names = _select(
            sorted(truth, key=lambda name: _place(name, order)), layers
        )

        formed = {
            name: calls[name]
            for name in self.names
            if type(self.modules[name]) in FORMS
        }
        for name, part in formed.items():
            flat = (
                type(self.modules[name]) is nn.Linear
                and len(part) == 1
                and part[0].input.ndim == 2
            )
            if flat and part[0].output() is logits:
                self.head = name
        self.fast = {
            name
            for name, part in formed.items()
            if part and all(call.shape[0] == 2 for call in part)
        }
        self.fast = self._agreeing(sorted(self.fast), rows, target, truth)
        self.head = self.head if self.head in self.fast else None
        for name in [name for name in self.names if name not in self.fast]:
            ways = [-1, 0, 1, 2, 3]
            if name in formed:
                ways = [-1] if formed[name] else []
            for inner in ways:
                self.expanded[name] = inner
                self.fast.add(name)
                with contextlib.suppress(
                    Exception
                ):  # a model may fail with a parameter of another shape
                    if self._agreeing([name], rows, target, truth):
                        break
                del self.expanded[name]
                self.fast.remove(name)
        copied = (
            self.parameters[own]
            for name in self.expanded
            if name not in formed
            for own in self.owned[name]
        )
        self.footprint += sum(p.numel() for p in copied)

    def norms(
        self,
        x: Tensor,
        classes: Tensor | None = None,
        names: Sequence[str] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Norms [layers, n, J] of the gradients of log p_c, averaged over the copies of a sample, and log p [n, C].

        x [n, copies, ...]: the first copy is the sample itself, and log p is its own. classes [n, J]; None for all.
        """
        names = self.names if names is None else names
        n, copies = x.shape[:2]
        fast = [name for name in names if name in self.fast]
        with torch.set_grad_enabled(fast not in ([], [self.head])):
            logits, calls = self._run(x.flatten(0, 1), fast)
        log_p = logits.detach().log_softmax(1)
        clean, p = log_p[::copies], log_p.exp()
        rest = sum_of_rest(p)
        classes = (
            torch.arange(log_p.shape[1], device=log_p.device).expand_as(clean)
            if classes is None
            else classes
        )
        powers = log_p.new_zeros(len(names), n, classes.shape[1])

        ready: list[tuple[int, Powers, list[_Call]]] = []
        slow: list[int] = []
        for i, name in enumerate(names):
            module, part = self.modules[name], calls.get(name, [])
            if not part or any(call.shape[0] != len(logits) for call in part):
                slow.append(i)
            elif name == self.head:
                h = part[0].input.unflatten(0, (n, copies))
                p_head, rest_head = (
                    p.unflatten(0, (n, copies)),
                    rest.unflatten(0, (n, copies)),
                )
                powers[i] = head_powers(
                    h, p_head, rest_head, module.bias is not None, self.q
                ).gather(1, classes)
            else:
                form = FORMS.get(type(module), rows_form)
                ready.append(
                    (
                        i,
                        form(
                            module,
                            [call.input for call in part],
                            n,
                            self.q,
                            classes.shape[1],
                        ),
                        part,
                    )
                )
        edges: Any = [
            call.edge for _, _, part in ready for call in part if call.edge is not None
        ]
        for j in range(classes.shape[1] if edges else 0):
            seed = cotangents(p, rest, classes[:, j].repeat_interleave(copies)) / copies
            last = j + 1 == classes.shape[1]
            found = iter(
                torch.autograd.grad(
                    logits, edges, seed, retain_graph=not last, allow_unused=True
                )
            )
            for i, form, part in ready:
                errors = [None if call.edge is None else next(found) for call in part]
                pairs = zip(errors, part, strict=True)
                powers[i, :, j] = form(
                    [
                        log_p.new_zeros(call.shape) if e is None else e
                        for e, call in pairs
                    ]
                )
        if slow:
            self._sample_by_sample(x, classes, {names[i]: powers[i] for i in slow})
        return powers.pow(1 / self.q), clean

    def head_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [rows, features] of the linear layer that gives the logits, and log p [rows, C]."""
        if self.head is None:
            raise ValueError(
                "gradnorm needs logits that come straight from an nn.Linear on [samples, features]; the last layer, "
                f"{self.names[-1]!r}, is not; exgrad takes any"
            )
        with torch.no_grad():
            logits, calls = self._run(x, [self.head])
        return calls[self.head][0].input, logits.log_softmax(1)

    def _run(
        self, x: Tensor, record: Iterable[str], order: list[str] | None = None
    ) -> tuple[Tensor, dict[str, list[_Call]]]:
        """Logits [rows, C] and the calls of the layers to record; `order` receives the names of all modules called."""
        parameters, handles = dict(self.parameters), []
        calls: dict[str, list[_Call]] = {name: [] for name in record}
        for name, part in calls.items():
            if type(self.modules[name]) in FORMS:
                hook = functools.partial(
                    _record, part, len(x) if name in self.expanded else None
                )
                # The first of its hooks, before hooks that change the output.
                handles.append(
                    self.modules[name].register_forward_hook(
                        hook, prepend=True, with_kwargs=True
                    )
                )
            elif name in self.expanded:
                for own in self.owned[name]:
                    p, inner = self.parameters[own].detach(), self.expanded[name]
                    shape = p.shape[1:] if inner < 0 else (1,) * inner + p.shape
                    copy = (
                        p.reshape(1, *shape)
                        .expand(len(x), *shape)
                        .requires_grad_(torch.is_grad_enabled())
                    )
                    parameters[own] = copy
                    part.append(_Call(p, copy.shape, copy, weakref.ref(copy)))
        if order is not None:
            for name, module in self.modules.items():
                handles.append(
                    module.register_forward_pre_hook(
                        lambda *_, name=name: order.append(name)
                    )
                )
        with hooked(handles):
            return _logits(
                torch.func.functional_call(self.model, parameters, (x,)), len(x)
            ), calls

    def _reference(
        self, rows: Tensor, logits: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A class [1] of the last row and, by plain autograd, the gradient norm of every layer on the path to it."""
        with torch.enable_grad():
            single, _ = self._run(rows[1:], ())
        log_p = single.detach().log_softmax(1)
        if not torch.allclose(logits[1:].log_softmax(1), log_p, rtol=0.01, atol=0.01):
            raise ValueError(
                "the model's output for a sample changes with the rest of its batch, or at random"
            )
        target = log_p.argmin(1)  # far from certain, so that its gradient is large
        seed = cotangents(log_p.exp(), sum_of_rest(log_p.exp()), target)
        truth = self._by_layer(single, seed, self.owned) if single.requires_grad else {}
        truth = {
            name: size.pow(1 / self.q)
            for name, size in truth.items()
            if size is not None
        }
        if not truth:
            raise ValueError(
                "the model's output has no gradient path to any of its parameters: was it detached?"
            )
        return target, truth

    def _agreeing(
        self,
        names: Sequence[str],
        rows: Tensor,
        target: Tensor,
        truth: dict[str, Tensor],
    ) -> set[str]:
        """The layers whose fast norms for the last row equal the true norms."""
        if not names:
            return set()
        found = self.norms(rows.unsqueeze(1), target.expand(2, 1), names)[0][:, 1, 0]
        expected = torch.stack([truth[name] for name in names])
        tolerance = 4 * torch.finfo(expected.dtype).eps ** 0.5
        close = (found - expected).abs() <= tolerance * (
            expected + expected.max() / 100
        )
        return {name for name, good in zip(names, close.tolist(), strict=True) if good}

    def _by_layer(
        self, logits: Tensor, seed: Tensor, names: Iterable[str], retain: bool = False
    ) -> dict[str, Tensor | None]:
        """The power of each layer's gradient of (seed * logits).sum(); None where there is no path."""
        flat = [own for name in names for own in self.owned[name]]
        leaves = [self.parameters[own] for own in flat]
        found = dict(
            zip(
                flat,
                torch.autograd.grad(logits, leaves, seed, retain, allow_unused=True),
                strict=True,
            )
        )
        powers = {
            name: [
                power(found[own], self.q, 0)
                for own in self.owned[name]
                if found[own] is not None
            ]
            for name in names
        }
        return {
            name: torch.stack(parts).sum() if parts else None
            for name, parts in powers.items()
        }

    def _sample_by_sample(
        self, x: Tensor, classes: Tensor, powers: dict[str, Tensor]
    ) -> None:
        """Fill the powers [n, J] of layers without a closed form, by plain autograd."""
        for i, sample in enumerate(x):
            with torch.enable_grad():
                logits, _ = self._run(sample, ())
            p = logits.detach().softmax(1)
            rest = sum_of_rest(p)
            for j, c in enumerate(classes[i]):
                seed = cotangents(p, rest, c.expand(len(sample))) / len(sample)
                for name, size in self._by_layer(
                    logits, seed, powers, retain=True
                ).items():
                    powers[name][i, j] = 0 if size is None else size


def _record(
    calls: list[_Call],
    expand_to: int | None,
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    y: Tensor,
) -> Tensor:
    """Forward hook: append the call, and expand its output to `expand_to` rows, one for each sample."""
    x = (args[0] if args else next(iter(kwargs.values()))).detach()
    if expand_to is not None:
        x, y = x.expand(expand_to, *x.shape[1:]), y.expand(expand_to, *y.shape[1:])
    edge = None
    if y.requires_grad:
        # An edge, because a tensor that an in-place operation changes later means the result of that operation. For
        # tokens the output is a view, which such an operation replaces in the graph; the view's base stays.
        edge = get_gradient_edge(y)
        if y._is_view() and expand_to is None:
            edge = GradientEdge(*cast(Any, edge.node.next_functions[0]))
    calls.append(_Call(x, y.shape, edge, weakref.ref(y)))
    return y


def _logits(output: Any, rows: int) -> Tensor:
    logits = logits_of(output)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model must return logits or an output with .logits, got {type(output).__name__}"
        )
    if (
        logits.ndim != 2
        or logits.shape[0] != rows
        or logits.shape[1] < 2
        or not logits.is_floating_point()
    ):
        hint = "; take one member, ensemble.member(m)" if logits.ndim == 3 else ""
        raise ValueError(
            f"the model must return floating logits [samples, C] with C >= 2, got {logits.dtype} {list(logits.shape)} "
            f"for {rows} inputs{hint}"
        )
    finite("the model's logits", logits)
    return logits


def _place(name: str, order: list[str]) -> int:
    """The position of a module's first call, or of the first call of the closest module around it."""
    while name not in order and name:
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
            chosen = (
                [name for name in names if name in layers]
                if set(layers) <= set(names)
                else []
            )
    if not chosen:
        raise ValueError(
            f"layers must be 'all', 'last', a pattern or names among {', '.join(names)}; got {layers!r}"
        )
    return chosen
