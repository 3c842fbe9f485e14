"""One mechanism for members: what they see in place of a module's parameters, and three ways to compute with it.

A method says in one class what member m sees in place of a parameter (`MemberParameter.weight`). `MemberModule` holds
any module and such parameters. It runs in one of three ways, which are equal up to rounding:

    in turn   the module itself, member by member, by `torch.func.functional_call`: right for every module
    built     the weights of the members that are in the pass, and one batched product or a convolution a member
    factored  `MemberParameter.product`, without building weights, where that saves arithmetic (`saves`)

The last two need a form, `uqlab.ensembles.forms`, which says how members lie in the inputs of such a module.
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
from torch.func import functional_call

from uqlab.core import devices
from uqlab.ensembles.forms import FORMS, Form
from uqlab.ensembles.layers import MemberLayer, PerMember, active_members, with_layers

# The weights that were built in the block of `built_once`, by parameter and members.
_BUILT: contextvars.ContextVar[dict | None] = contextvars.ContextVar(
    "built weights", default=None
)


_IN_TURN: weakref.WeakKeyDictionary[nn.Module, Any] = (
    weakref.WeakKeyDictionary()
)  # threads may share an ensemble


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """Inside the block no parameter changes: weights of members are built once and kept, up to KEPT bytes of them."""
    token = _BUILT.set({})
    try:
        yield
    finally:
        _BUILT.reset(token)


class MemberParameter(PerMember):
    """What every member sees in place of one parameter of a module.

    A subclass defines `weight`; where members can be computed at once without building their weights it also defines
    `product` and what that costs, `work`.

    Parameters
    ----------
    w : Tensor
        The parameter that all members share: frozen, or trained by all of them together.
    members : int
        How many members there are.
    """

    low_rank = False  # whether `product` takes the weight for one matrix, which a convolution in groups is not
    frozen_work = 0  # multiply-adds of `product` for a row of inputs, with tensors that all members share
    own_work = 0  # those with the members' own tensors
    depth = 0  # products that are added to build one number of a weight

    def __init__(self, w: Tensor, members: int):
        super().__init__()
        self.w, self.members = w, members

    def weight(self, m: int) -> Tensor:
        """Return what member `m` sees, shaped as the parameter."""
        raise NotImplementedError

    def weights(self, rows: slice = slice(None)) -> Tensor:
        """Return what some of the members see [members, ...]."""
        return torch.stack([self.weight(m) for m in range(self.members)[rows]])

    def built(self, rows: slice) -> Tensor:
        """Return `weights`, kept from before inside a block of `built_once`."""
        kept, key = _BUILT.get(), (self, rows.start, rows.stop)
        if kept is not None and key in kept:
            return kept[key]
        weights = self.weights(rows)
        if (
            kept is not None
            and sum(each.nbytes for each in kept.values()) + weights.nbytes
            <= devices.KEPT
        ):
            kept[key] = weights
        return weights

    product: Any = None  # (x, form, the members in the pass) -> their outputs

    def start(self) -> Tensor | None:
        """Return the parameter before training, or None where training has changed it."""
        return None if self.w.requires_grad else self.w.detach()

    def update(self, m: int) -> Tensor | None:
        """Return what training added for member `m`, or None where the start is not known."""
        start = self.start()
        return None if start is None else self.weight(m).detach() - start

    def matrix(self) -> Tensor:
        """Return the shared parameter as a matrix [out, width]; a kernel is a matrix of patches."""
        return self.w.reshape(len(self.w), -1)

    def own_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p is not self.w]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers: networks ask their layers' weights for it."""
        return self.w.dtype

    @property
    def device(self) -> torch.device:
        return self.w.device

    def alone(self) -> Tensor:
        """Return what the one member that is in the pass sees.

        A module that reads a weight of another layer itself, past `MemberModule`, is given this. With several members
        in the pass it cannot be right, and is refused.
        """
        members = range(self.members)[self.active]
        if len(members) > 1:
            raise TypeError(
                "a module reads a weight of another layer, where every member has its own"
            )
        return self.weight(members[0])

    def __getattr__(self, name: str) -> Any:
        of_tensors = not name.startswith("_") and hasattr(Tensor, name)
        return getattr(self.alone(), name) if of_tensors else super().__getattr__(name)

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        def seen(given: Any) -> Any:
            return given.alone() if isinstance(given, MemberParameter) else given

        return function(
            *map(seen, args),
            **{name: seen(given) for name, given in (kwargs or {}).items()},
        )

    @property
    def shape(self) -> torch.Size:
        return self.w.shape


class Own(MemberParameter):
    """A tensor of its own for every member: `value` [members, ...], a parameter or a buffer."""

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
        return self.value[0]

    def weight(self, m: int) -> Tensor:
        return self.value[m]

    def weights(self, rows: slice = slice(None)) -> Tensor:
        return self.value if rows == slice(None) else self.value[rows]

    def start(self) -> None:
        return None

    def own_parameters(self) -> list[nn.Parameter]:
        return list(self.parameters())


class MemberModule(MemberLayer):
    """A module some of whose parameters or buffers depend on the member.

    Parameters
    ----------
    inner : nn.Module
        The module. What depends on the member is taken out of it; it is changed in place.
    own : mapping of str to MemberParameter
        By the name of the parameter in `inner`, such as "weight" or "out_proj.weight".
    """

    def __init__(self, inner: nn.Module, own: Mapping[str, MemberParameter]):
        super().__init__()
        self.inner = inner
        self.names = {name: name.replace(".", "_") for name in own}
        self.members = next(iter(own.values())).members
        for name, parameter in own.items():
            holder, _, last = name.rpartition(".")
            setattr(inner.get_submodule(holder), last, None)
            setattr(
                self, self.names[name], parameter
            )  # add_module would find the inner one
        self.train(inner.training)

    def __getattr__(self, name: str) -> Any:
        """Look in the inner module too: networks ask their layers for sizes and settings."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def own(self) -> dict[str, MemberParameter]:
        """The members' parameters by their names in the inner module."""
        return {
            name: getattr(self, attribute) for name, attribute in self.names.items()
        }

    @property
    def form(self) -> type[Form] | None:
        """How members are folded into the inputs of such a module; None if it runs in turn."""
        form = FORMS.get(type(self.inner))
        return form if form is not None and form.takes(self.inner, self.names) else None

    def way(self) -> str:
        """How the module runs, in words."""
        return "in turn" if self.form is None else "folded"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        form = self.form
        if form is None:
            return self._in_turn(args, kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        return form(self, x).output(x)

    def _in_turn(self, args: tuple, kwargs: dict) -> Any:
        members = range(self.members)[self.active]
        if len(members) == 1:
            return self._one(members[0], args, kwargs)
        given = inspect.signature(self.inner.forward).bind(*args, **kwargs).arguments
        first = next(iter(given.values()))
        count, batch = self.count(first), len(first)
        outputs = []
        for place, m in enumerate(members):
            own = {
                name: _part(self.inner, name, t, batch, place, count)
                for name, t in given.items()
            }
            positional, named = tuple(own.pop("args", ())), own.pop("kwargs", {})
            with active_members(slice(m, m + 1)):  # for member layers inside
                outputs.append(self._one(m, positional, own | named))
        return _joined(self.inner, outputs)

    def _one(self, m: int, args: tuple, kwargs: dict) -> Any:
        seen = {
            name: parameter.built(slice(m, m + 1))[0]
            for name, parameter in self.own().items()
        }
        with _IN_TURN.setdefault(
            self.inner, threading.RLock()
        ):  # the module holds these weights while it runs
            output = functional_call(self.inner, seen, args, kwargs)
            if isinstance(
                self.inner, nn.RNNBase
            ):  # it keeps a list of what it has seen
                for name in self.names:
                    setattr(self.inner, name, None)
        return output

    def member(self, index: int) -> nn.Module:
        plain = with_layers(self.inner, lambda layer: layer.member(index))
        for name, parameter in self.own().items():
            holder, _, last = name.rpartition(".")
            module: Any = plain.get_submodule(holder)
            value = parameter.weight(index).detach().clone()
            if "value" in parameter.member_buffers:
                module.register_buffer(last, value)
            else:
                setattr(
                    module,
                    last,
                    nn.Parameter(
                        value, any(p.requires_grad for p in parameter.parameters())
                    ),
                )
        return plain.train(self.training)

    def own_parameters(self) -> list[nn.Parameter]:
        return [
            p for parameter in self.own().values() for p in parameter.own_parameters()
        ]

    def shard(self, rows: slice) -> "MemberModule":
        own = {name: p.shard(rows) for name, p in self.own().items()}
        return MemberModule(
            with_layers(self.inner, lambda layer: layer.shard(rows)), own
        )

    def join(self, others: Sequence["MemberModule"]) -> "MemberModule":
        each = [other.own() for other in others]
        own = {
            name: p.join([other[name] for other in each])
            for name, p in self.own().items()
        }
        return MemberModule(joined(self.inner, [other.inner for other in others]), own)

    def _get_name(self) -> str:
        """The name that torch prints."""
        return f"Member{type(self.inner).__name__}"

    def extra_repr(self) -> str:
        return f"members={self.members}, {self.way()}"


def weight_name(holder: str, parameter: str) -> str:
    """Return how targets name a weight: as its module, or as the parameter in a module with several."""
    return ".".join(filter(None, (holder, parameter))).removesuffix(".weight")


def stack_layers(layers: Sequence[nn.Module]) -> MemberModule:
    """Fold modules of one architecture, such as linear layers, convolutions or norms: member m is `layers[m]`.

    The tensors are copied; what the first one trains is trained.
    """
    inner = copy.deepcopy(layers[0])
    own = {}
    for name, p in [*layers[0].named_parameters()]:
        value = torch.stack([layer.get_parameter(name).detach() for layer in layers])
        own[name] = Own(nn.Parameter(value, p.requires_grad))
    for name, _ in [*layers[0].named_buffers()]:
        own[name] = Own(torch.stack([layer.get_buffer(name) for layer in layers]))
    return MemberModule(inner, own)


def _part(
    inner: nn.Module, name: str, given: Any, batch: int, place: int, count: int
) -> Any:
    """One member's part of an argument whose batch axis holds the members."""
    if isinstance(given, tuple | list):
        return type(given)(
            _part(inner, name, each, batch, place, count) for each in given
        )
    if isinstance(given, dict):
        return {
            key: _part(inner, key, each, batch, place, count)
            for key, each in given.items()
        }
    axis = _batch_axis(inner, name, given, batch) if isinstance(given, Tensor) else None
    return given if axis is None else given.chunk(count, axis)[place]


def _batch_axis(inner: nn.Module, name: str, given: Tensor, batch: int) -> int | None:
    """Where the batch lies in an argument; None if all members share it."""
    if isinstance(inner, nn.RNNBase) and name == "hx":
        return 1  # [layers, batch, features]
    if isinstance(inner, nn.MultiheadAttention) and name == "attn_mask":
        return (
            0 if given.ndim == 3 else None
        )  # [batch * heads, targets, sources], or one for all
    return 0 if given.ndim and len(given) == batch else None


def _joined(inner: nn.Module, outputs: Sequence[Any], axis: int = 0) -> Any:
    """The members' outputs along the batch axis again."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs), axis)
    if not isinstance(first, tuple | list):
        return first
    states = (
        1 if isinstance(inner, nn.RNNBase) else 0
    )  # of what follows the first output of a recurrent layer
    axes = [
        axis if i == 0 and axis == 0 else max(axis, states) for i in range(len(first))
    ]
    return tuple(
        _joined(inner, parts, a)
        for parts, a in zip(zip(*outputs, strict=True), axes, strict=True)
    )


def joined(network: nn.Module, others: Sequence[nn.Module]) -> nn.Module:
    """Return a network like these whose member layers hold the members of all."""
    names = {
        id(part): name
        for name, part in network.named_modules()
        if isinstance(part, MemberLayer)
    }

    def join(layer: MemberLayer) -> MemberLayer:
        return layer.join([other.get_submodule(names[id(layer)]) for other in others])

    return with_layers(network, join)
