"""Layers whose weights depend on the ensemble member.

Members are folded into the batch, member-major: an input `[members * batch, ..., features]` holds the batch of member
0, then that of member 1, and so on. Everything between two member layers is an ordinary module that never notices.
"""

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import within
from uqlab.core.modules import sharing_copy

# Which members are in the pass that runs now. It belongs to the call, not to the layers: threads may share an ensemble.
_ACTIVE: contextvars.ContextVar[slice] = contextvars.ContextVar(
    "active members", default=slice(None)
)


@contextlib.contextmanager
def active_members(rows: slice) -> Iterator[None]:
    """Inside the block, only these members are folded into the batch that goes through member layers."""
    token = _ACTIVE.set(rows)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class PerMember(nn.Module):
    """Tensors of which every member has its own: what can be taken apart by members, and joined."""

    members: int
    member_buffers: tuple[
        str, ...
    ] = ()  # the names of buffers whose first axis is the members

    @property
    def active(self) -> slice:
        """The members that are folded into the batch at present: all of them, or a chunk."""
        return slice(None) if torch.compiler.is_compiling() else _ACTIVE.get()

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters whose first axis is the members."""
        return list(self.parameters())

    def shard(self, rows: slice) -> Any:
        """The same for some of the members, sharing their tensors' memory."""
        return self._changed(
            len(range(self.members)[rows]), lambda name, p: p.data[rows]
        )

    def join(self, others: Sequence[Any]) -> Any:
        """The same for all members, first its own, then those of the others; what the members own is copied."""
        layers = (self, *others)
        joined = self._changed(
            sum(layer.members for layer in layers),
            lambda name, _: torch.cat([getattr(layer, name).data for layer in layers]),
        )
        for name, p in list(joined.named_parameters(recurse=False)):
            if (
                p is getattr(self, name) and p.requires_grad
            ):  # trained by all members: copied too
                setattr(joined, name, nn.Parameter(p.data.clone()))
        return joined

    def _changed(self, members: int, change: Callable[[str, Any], Tensor]) -> Any:
        """A copy that shares everything but the members' own parameters and buffers, which `change(name, p)` gives."""
        own, layer = set(self.own_parameters()), sharing_copy(self)
        layer.members = members
        for name, p in self.named_parameters(recurse=False):
            if p in own:
                setattr(
                    layer,
                    name,
                    nn.Parameter(change(name, p), requires_grad=p.requires_grad),
                )
        for name in self.member_buffers:
            setattr(layer, name, change(name, getattr(self, name)))
        return layer

    def extra_repr(self) -> str:
        sizes = [
            f"{name}={list(p.shape)}"
            for name, p in self.named_parameters(recurse=False)
        ]
        settings = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if name in ("p", "scale", "threshold")
        ]
        return ", ".join([f"members={self.members}", *sizes, *settings])


class MemberLayer(PerMember):
    """A layer with one set of weights, or one noise stream, per member. The layer itself says what its members are."""

    def count(self, x: Tensor) -> int:
        """How many members are folded into x, whose first axis must be a multiple of it."""
        count = len(range(self.members)[self.active])
        if x.shape[0] % count:
            raise ValueError(
                f"{type(self).__name__} holds {count} members and needs a batch that is a multiple of it, "
                f"got {tuple(x.shape)}; call the ensemble, which folds the members into the batch, not its network"
            )
        return count

    def own(self) -> dict[str, Any]:
        """What the members see of their own, by name: `MemberParameter`s."""
        return {}

    def member(self, index: int) -> nn.Module:
        """A plain layer that computes what member `index` computes."""
        raise NotImplementedError


def plain_linear(
    weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> nn.Linear:
    """The nn.Linear that holds these tensors."""
    layer = nn.Linear(
        1, 1, bias is not None, device="meta"
    )  # nothing to initialise, nor to warn of without features
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


class MemberDropout(MemberLayer):
    """Dropout for training: the noise comes from one generator per member, so that no member depends on another.

    `reseed` gives the member seeds; before it is called the layer draws from seeds 0, 1, ....
    """

    def __init__(self, members: int, p: float = 0.5):
        super().__init__()
        within("dropout probability", p, "[0, 1)")
        self.members, self.p = members, p
        self.reseed(range(members))

    def reseed(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Start the noise of member m anew from `seeds[m]`."""
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def forward(self, x: Tensor) -> Tensor:
        return (
            x * self.keep_mask(x).mul_(1 / (1 - self.p))
            if self.training and self.p
            else x
        )

    def keep_mask(self, x: Tensor) -> Tensor:
        """0 where dropped and 1 where kept, shaped and typed like x.

        Sixteen random bits an element (p to 1/65536) are 5 times as fast as bernoulli_ on a CPU, and a comparison
        written as float 4 times as fast as a boolean mask.
        """
        if self.generators[0].device != x.device:
            self.reseed(
                [generator.initial_seed() for generator in self.generators], x.device
            )
        members = range(self.members)[self.active]
        count = x.numel() // len(members)
        words = torch.empty(
            len(members), -(-count // 4), dtype=torch.int64, device=x.device
        )
        for row, m in zip(
            words, members, strict=True
        ):  # every member goes on in its own stream
            row.random_(-(2**63), None, generator=self.generators[m])
        bits = words.view(torch.int16)[:, :count].reshape(x.shape)
        return torch.ge(bits, round(self.p * 65536) - 32768, out=torch.empty_like(x))

    def member(self, index: int) -> nn.Dropout:
        return nn.Dropout(self.p)

    def shard(self, rows: slice) -> "MemberDropout":
        return MemberDropout(len(range(self.members)[rows]), self.p)

    def join(self, others: Sequence["MemberDropout"]) -> "MemberDropout":
        return MemberDropout(
            self.members + sum(other.members for other in others), self.p
        )

    def __deepcopy__(
        self, memo
    ):  # generators cannot be copied: the copy's noise starts anew from the same seeds
        layer = MemberDropout(self.members, self.p).train(self.training)
        layer.reseed(
            [generator.initial_seed() for generator in self.generators],
            self.generators[0].device,
        )
        return layer


def replace_layers(
    model: nn.Module,
    kinds: type[nn.Module] | tuple[type[nn.Module], ...],
    make: Callable[[str, Any], nn.Module],
) -> list[str]:
    """Replace, in place, every submodule of these types by `make(name, module)`; return their names.

    A layer that is used twice is replaced by one layer used twice.
    """
    made: dict[nn.Module, nn.Module] = {}
    replaced: list[str] = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        inside = any(
            name.startswith(f"{above}.") for above in replaced
        )  # it went with the layer that held it
        if name and isinstance(module, kinds) and not inside:
            if module not in made:
                made[module] = make(name, module)
            model.set_submodule(name, made[module])
            replaced.append(name)
    return replaced


def own_dropout(network: nn.Module, members: int) -> None:
    """Replace, in place, every nn.Dropout by one whose noise is the members' own."""
    replace_layers(
        network, nn.Dropout, lambda _, layer: MemberDropout(members, layer.p)
    )


def with_layers(
    network: nn.Module, make: Callable[[MemberLayer], nn.Module]
) -> nn.Module:
    """A copy of `network` in which `make` has replaced every member layer; frozen weights are shared, others copied."""
    # deepcopy takes what `memo` already holds, so the stacked weights of all members are never copied.
    frozen = (p for p in network.parameters() if not p.requires_grad)
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.data, requires_grad=False) for p in frozen
    }
    for layer in [part for part in network.modules() if isinstance(part, MemberLayer)]:
        memo[id(layer)] = make(layer).train(layer.training)
    return copy.deepcopy(network, memo)
