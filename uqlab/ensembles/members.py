"""One mechanism for members: what they see in place of a module's parameters.

A method says in one class what member m sees in place of a parameter
(`MemberParameter.weight`). `MemberModule` holds any module and such parameters. It runs
in one of three ways, which are equal up to rounding:

    in turn   the module itself, member by member, with its weights put into it:
              right for every module
    built     the weights of the members that are in the pass, and one batched product
              or a convolution a member
    factored  `MemberParameter.product`, without building weights, where that saves
              arithmetic (`saves`)

The last two need a form, `uqlab.ensembles.forms`, which says how members lie in the
inputs of such a module.
"""

import contextlib
import contextvars
import copy
import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from uqlab.core import devices
from uqlab.core.checks import one_network
from uqlab.ensembles.forms import FORMS, Form
from uqlab.ensembles.layers import MemberLayer, PerMember, active_members, with_layers

# The weights that were built in the block of `built_once`, by parameter and members.
_BUILT: contextvars.ContextVar[dict | None] = contextvars.ContextVar(
    "built weights", default=None
)
# A module that runs in turn holds a member's weights meanwhile; threads may share it.
_LOCKS: Any = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """Keep the weights of members that are built in the block, up to KEPT bytes.

    No parameter may change meanwhile.
    """
    token = _BUILT.set({})
    try:
        yield
    finally:
        _BUILT.reset(token)


class MemberParameter(PerMember):
    """What every member sees in place of one parameter of a module.

    A subclass defines `weight` or, of several at once, `weights`; where members can be
    computed at once without building their weights it also defines `product` and what
    that costs.

    Parameters
    ----------
    w : Tensor
        The parameter that all members share: frozen, or trained by all of them.
    members : int
        How many members there are.
    """

    low_rank = False  # whether `product` takes the weight for one matrix
    frozen_work = 0  # multiply-adds of `product` a row, with what all members share
    own_work = 0  # those with the members' own tensors
    depth = 0  # products that are added to build one number of a weight
    product: Any = None  # (x, form, the members in the pass) -> their outputs

    def __init__(self, w: Tensor, members: int):
        super().__init__()
        self.w, self.members = w, members

    def weight(self, m: int) -> Tensor:
        """Return what member `m` sees, shaped as the parameter."""
        return self.weights(slice(m, m + 1))[0]

    def weights(self, rows: slice = slice(None)) -> Tensor:
        """Return what some of the members see [members, ...]."""
        return torch.stack([self.weight(m) for m in range(self.members)[rows]])

    def built(self, rows: slice) -> Tensor:
        """Return `weights`, kept from before inside a block of `built_once`."""
        cache = _BUILT.get()
        if cache is None:
            return self.weights(rows)
        key = self, rows.start, rows.stop
        if key in cache:
            return cache[key]
        weights = self.weights(rows)
        if sum(w.nbytes for w in cache.values()) + weights.nbytes <= devices.KEPT:
            cache[key] = weights
        return weights

    def start(self) -> Tensor | None:
        """Return the parameter before training, None where training has changed it."""
        return None if self.w.requires_grad else self.w.detach()

    def update(self, m: int) -> Tensor | None:
        """Return what training added for member `m`, None without a known start."""
        start = self.start()
        return None if start is None else self.weight(m).detach() - start

    def matrix(self) -> Tensor:
        """Return the shared parameter as a matrix [out, width], a kernel by patches."""
        return self.w.reshape(len(self.w), -1)

    def own_parameters(self):
        """Return the parameters whose first axis is the members."""
        return [p for p in self.parameters() if p is not self.w]

    def alone(self) -> Tensor:
        """Return what the one member that is in the pass sees.

        A module that reads a weight of another layer itself, past `MemberModule`, is
        given this. With several members in the pass it cannot be right.
        """
        members = range(self.members)[self.active]
        if len(members) > 1:
            raise TypeError(
                "a module reads a weight of another layer, where every member has "
                "its own"
            )
        return self.weight(members[0])

    def __getattr__(self, name: str) -> Any:
        """Stand for the tensor: its kind is that of `w`, the rest that of a member."""
        parameters = self.__dict__.get("_parameters", ())
        if name in parameters:
            return parameters[name]
        if name in ("shape", "dtype", "device"):
            return getattr(self.w, name)
        of_tensors = not name.startswith("_") and hasattr(Tensor, name)
        return getattr(self.alone(), name) if of_tensors else super().__getattr__(name)

    @classmethod
    def __torch_function__(cls, function, _, args=(), kwargs=None):
        """Let torch's functions take the one member's tensor."""

        def seen(value):
            return value.alone() if isinstance(value, MemberParameter) else value

        return function(*map(seen, args), **tree_map(seen, kwargs or {}))


class Own(MemberParameter):
    """A tensor of its own for every member: `value` [members, ...], or a buffer."""

    def __init__(self, value: nn.Parameter | Tensor):
        nn.Module.__init__(self)
        self.members = len(value)
        if isinstance(value, nn.Parameter):
            self.value = value
        else:
            self.register_buffer("value", value)
            self.member_buffers = ("value",)

    @property
    def w(self) -> Tensor:
        """A tensor of the kind that members see."""
        return self.value[0]

    def weight(self, m):
        """Return the member's own tensor."""
        return self.value[m]

    def weights(self, rows=slice(None)):
        """Return some members' tensors [members, ...]."""
        return self.value if rows == slice(None) else self.value[rows]

    def start(self):
        """Return None: the members start apart."""


class MemberModule(MemberLayer):
    """A module some of whose parameters or buffers depend on the member.

    Parameters
    ----------
    inner : nn.Module
        The module. What depends on the member is taken out of it, in place.
    of_members : mapping of str to MemberParameter
        By the name of the parameter in `inner`, such as "weight" or "out_proj.weight".
    """

    def __init__(self, inner: nn.Module, of_members: Mapping[str, MemberParameter]):
        super().__init__()
        self.inner = inner
        self.names = {name: name.replace(".", "_") for name in of_members}
        self.members = next(iter(of_members.values())).members
        for name, parameter in of_members.items():
            holder, last = _holder(inner, name)
            delattr(holder, last)  # then a tensor may be assigned, and no Parameter
            setattr(holder, last, None)
            setattr(self, self.names[name], parameter)
        self.train(inner.training)

    def __getattr__(self, name: str) -> Any:
        """Look in the inner module too: networks ask their layers for settings."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def of_members(self) -> dict[str, Any]:
        """Return the members' parameters by their names in the inner module."""
        modules = self._modules  # `__getattr__` of each took a tenth of a small pass
        return {name: modules[own] for name, own in self.names.items()}

    @property
    def form(self) -> type[Form] | None:
        """How members are folded into such inputs; None if the module runs in turn."""
        inner = self.inner
        form = FORMS.get(type(inner))
        return form if form is not None and form.takes(inner, self.names) else None

    def way(self) -> str:
        """Return how the module runs, in words."""
        return "in turn" if self.form is None else "folded"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for the members that are in the pass."""
        form = self.form
        if form is None:
            return self._in_turn(args, kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        return form(self, x).output(x)

    def _in_turn(self, args, kwargs):
        members = range(self.members)[self.active]
        if len(members) == 1:
            return self._one(members[0], args, kwargs)
        signature = inspect.signature(self.inner.forward)
        arguments = signature.bind(*args, **kwargs).arguments
        self.count(next(iter(arguments.values())))
        outputs = []
        for place, m in enumerate(members):
            rows = _of_one_member(self.inner, arguments, place, len(members))
            bound = inspect.BoundArguments(signature, rows)
            with active_members(slice(m, m + 1)):  # for member layers inside
                outputs.append(self._one(m, bound.args, bound.kwargs))
        return _joined(self.inner, outputs)

    def _one(self, m: int, args, kwargs):
        """Run the inner module with the weights of one member."""
        rows = slice(m, m + 1)
        seen = {name: p.built(rows)[0] for name, p in self.of_members().items()}
        with _LOCKS.setdefault(self.inner, threading.RLock()):
            try:
                for name, value in seen.items():
                    _put(self.inner, name, value)
                with devices.without_cudnn(self.inner):
                    return self.inner(*args, **kwargs)
            finally:
                for name in seen:
                    _put(self.inner, name, None)

    def member(self, index):
        """Return the module with the weights of one member, copied."""
        plain = with_layers(self.inner, lambda layer: layer.member(index))
        for name, parameter in self.of_members().items():
            holder, last = _holder(plain, name)
            value = parameter.weight(index).detach().clone()
            if "value" in parameter.member_buffers:
                delattr(holder, last)  # what holds its place
                holder.register_buffer(last, value)
            else:
                trained = any(p.requires_grad for p in parameter.parameters())
                setattr(holder, last, nn.Parameter(value, trained))
        return plain.train(self.training)

    def own_parameters(self):
        """Return the parameters whose first axis is the members."""
        parameters = []
        for own in self.of_members().values():
            parameters += own.own_parameters()
        return parameters

    def _get_name(self) -> str:
        return f"Member{type(self.inner).__name__}"

    def extra_repr(self):
        """Return what torch prints."""
        return f"members={self.members}, {self.way()}"


def weight_name(holder: str, parameter: str) -> str:
    """Return how targets name a weight: its module, or the parameter among several."""
    return ".".join(filter(None, (holder, parameter))).removesuffix(".weight")


def stack_layers(layers: Sequence[nn.Module]) -> MemberModule:
    """Fold modules of one architecture: member m is `layers[m]`.

    The tensors are copied; what the first one trains is trained.
    """
    for layer in layers:
        one_network(layer, "stack_layers")
    if not layers:
        raise ValueError("stack_layers needs at least one layer, got none")
    inner = copy.deepcopy(layers[0])
    parameters = {}
    for name, p in layers[0].named_parameters():
        value = torch.stack([layer.get_parameter(name).detach() for layer in layers])
        parameters[name] = Own(nn.Parameter(value, p.requires_grad))
    for name, _ in layers[0].named_buffers():
        parameters[name] = Own(
            torch.stack([layer.get_buffer(name) for layer in layers])
        )
    return MemberModule(inner, parameters)


def _put(module, name: str, value) -> None:
    """Assign what a module reads in place of a parameter."""
    holder, last = _holder(module, name)
    setattr(holder, last, value)


def _holder(module, name: str):
    """Return the module that holds a parameter, and the parameter's name there."""
    holder, _, last = name.rpartition(".")
    return module.get_submodule(holder), last


def _of_one_member(inner, arguments: Any, place: int, count: int):
    """Return one member's part of arguments whose batch axis holds `count` members."""
    batch = len(next(iter(arguments.values())))

    def of(name, value):
        if isinstance(value, dict):
            return {key: of(key, inside) for key, inside in value.items()}
        return tree_map(lambda t: rows(name, t), value)

    def rows(name, t):
        if not isinstance(t, Tensor) or not t.ndim:
            return t
        if isinstance(inner, nn.RNNBase) and name == "hx":
            return t.chunk(count, 1)[place]  # [layers, batch, features]
        folded = len(t) == batch
        if isinstance(inner, nn.MultiheadAttention) and name == "attn_mask":
            folded = t.ndim == 3  # [batch * heads, targets, sources], or one for all
        return t.chunk(count)[place] if folded else t

    return of("", dict(arguments))


def _joined(inner, outputs):
    """Return the members' outputs along the batch axis again."""
    if isinstance(inner, nn.RNNBase) and isinstance(outputs[0], tuple):
        y, states = zip(*outputs, strict=True)  # states [layers, batch, features]
        return torch.cat(y), tree_map(lambda *of_all: torch.cat(of_all, 1), *states)

    def join(*values):
        return torch.cat(values) if isinstance(values[0], Tensor) else values[0]

    return tree_map(join, *outputs)
