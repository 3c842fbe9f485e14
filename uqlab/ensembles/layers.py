"""Layers whose weights depend on the ensemble member.

Members are folded into the batch, member-major: an input [members * batch, ...] holds
the batch of member 0, then that of member 1, and so on. Everything between two member
layers is an ordinary module that never notices.
"""

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import within
from uqlab.core.modules import layers_of

# Which members are in the pass that runs now. It belongs to the call, not to the
# layers: threads may share an ensemble.
_ACTIVE = contextvars.ContextVar("active members", default=slice(None))


@contextlib.contextmanager
def active_members(rows: slice) -> Iterator[None]:
    """Let only these members be folded into the batch, inside the block."""
    token = _ACTIVE.set(rows)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class PerMember(nn.Module):
    """Tensors of which every member has its own; they can be taken apart and joined.

    `member_buffers` are the names of buffers whose first axis is the members.
    """

    members: int
    member_buffers: tuple[str, ...] = ()

    @property
    def active(self) -> slice:
        """The members that are folded into the batch now: all of them, or a chunk."""
        return slice(None) if torch.compiler.is_compiling() else _ACTIVE.get()

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose first axis is the members."""
        return list(self.parameters())

    def own_tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers whose first axis is the members, by name."""
        own = set(self.own_parameters())
        parameters = self.named_parameters(recurse=False)
        tensors: dict[str, Tensor] = {name: p for name, p in parameters if p in own}
        return tensors | {name: getattr(self, name) for name in self.member_buffers}

    def keep(self, rows: slice) -> None:
        """Keep some of the members, in place; their tensors' memory stays."""
        self.members = len(range(self.members)[rows])
        for tensor in self.own_tensors().values():
            tensor.data = tensor.data[rows]

    def merge(self, parts: Sequence[Any]) -> None:
        """Hold copies of the members of all parts, which are such modules, in place."""
        self.members = sum(part.members for part in parts)
        for name, tensor in self.own_tensors().items():
            tensor.data = torch.cat([getattr(part, name).data for part in parts])

    def extra_repr(self) -> str:
        """Return what torch prints."""
        return f"members={self.members}"


class MemberLayer(PerMember):
    """A layer with one set of weights, or one noise stream, per member."""

    def count(self, x: Tensor) -> int:
        """Return how many members are folded into the first axis of x."""
        count = len(range(self.members)[self.active])
        if x.shape[0] % count:
            raise ValueError(
                f"{type(self).__name__} holds {count} members and needs a batch that "
                f"is a multiple of it, got {tuple(x.shape)}; call the ensemble, which "
                "folds the members into the batch, not its network"
            )
        return count

    def of_members(self) -> dict[str, Any]:
        """Return what the members see of their own, by name: `MemberParameter`s."""
        return {}

    def member(self, index: int) -> nn.Module:
        """Return a plain layer that computes what member `index` computes."""
        raise NotImplementedError


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return the nn.Linear that holds a weight [out, in] and a bias [out]."""
    # On "meta" nothing is initialised; a layer without features would be warned of.
    layer = nn.Linear(1, 1, bias is not None, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


class SeededDropout(MemberLayer):
    """Dropout with probability `p` whose noise follows from a seed for each member."""

    def __init__(self, seeds: Sequence[int], p: float):
        super().__init__()
        within("dropout probability", p, "[0, 1)")
        self.members, self.p = len(seeds), p
        self.reseed(seeds)

    def reseed(self, seeds: Sequence[int]) -> None:
        """Start the noise of member m anew from `seeds[m]`."""
        self.seeds = list(seeds)

    def keep(self, rows):
        """Keep the dropout of some members, in place."""
        super().keep(rows)
        self.reseed(self.seeds[rows])

    def merge(self, parts):
        """Drop for the members of all parts, in place."""
        super().merge(parts)
        seeds = []
        for layer in parts:
            seeds += layer.seeds
        self.reseed(seeds)


class MemberDropout(SeededDropout):
    """Dropout for training, with one generator of noise for each member.

    `reseed` gives the member seeds; before it is called the layer draws from seeds
    0, 1, ....
    """

    def __init__(self, members: int, p: float = 0.5):
        super().__init__(range(members), p)

    def reseed(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Start the noise of member m anew from `seeds[m]`."""
        super().reseed(seeds)
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def forward(self, x: Tensor) -> Tensor:
        """Drop numbers of x [members * batch, ...], in training alone."""
        if not (self.training and self.p):
            return x
        return x * self.keep_mask(x).mul_(1 / (1 - self.p))

    def keep_mask(self, x: Tensor) -> Tensor:
        """Return 0 where dropped and 1 where kept, shaped and typed like x.

        Sixteen random bits an element (p to 1/65536) are 5 times as fast as bernoulli_
        on a CPU, and a comparison written as float 4 times as fast as a boolean mask.
        """
        if self.generators[0].device != x.device:
            self.reseed(self.seeds, x.device)
        generators = self.generators[self.active]
        count = x.numel() // len(generators)
        shape = len(generators), -(-count // 4)
        words = torch.empty(shape, dtype=torch.int64, device=x.device)
        for row, generator in zip(words, generators, strict=True):
            row.random_(-(2**63), None, generator=generator)
        bits = words.view(torch.int16)[:, :count].reshape(x.shape)
        return torch.ge(bits, round(self.p * 65536) - 32768, out=torch.empty_like(x))

    def member(self, index):
        """Return dropout of one network."""
        return nn.Dropout(self.p)

    def __deepcopy__(self, memo):
        """Copy all but the generators, which start anew from the same seeds."""
        layer = MemberDropout(self.members, self.p).train(self.training)
        layer.reseed(self.seeds, self.generators[0].device)
        return layer


DROPOUT = (nn.Dropout, MemberDropout)  # members of deep ensembles hold the latter


def put(network: Any, name: str, module: nn.Module) -> None:
    """Replace a module, in place, under every name that it has in the network."""
    before = network.get_submodule(name)
    for other, part in list(network.named_modules(remove_duplicate=False)):
        if part is before:
            network.set_submodule(other, module)


def replace_layers(
    model: nn.Module,
    kinds: type[nn.Module] | tuple[type[nn.Module], ...],
    make: Callable[[str, Any], nn.Module],
) -> list[str]:
    """Replace, in place, modules of these types by `make(name, module)`.

    A layer that is used twice is replaced by one layer used twice, and what lies inside
    a replaced module goes with it.

    Returns
    -------
    list of str
        The names of the modules that were replaced.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    replaced: list[str] = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        inside = name.startswith(tuple(f"{above}." for above in replaced))
        if name and isinstance(module, kinds) and not inside:
            if module not in replacements:
                replacements[module] = make(name, module)
            model.set_submodule(name, replacements[module])
            replaced.append(name)
    return replaced


def own_dropout(network: nn.Module, members: int) -> None:
    """Replace, in place, every module of dropout by one whose noise is the members'."""
    replace_layers(network, DROPOUT, lambda _, layer: MemberDropout(members, layer.p))


def with_layers(network: nn.Module, make: Callable[[Any], nn.Module]) -> Any:
    """Copy a network with `make(layer)` in the place of every member layer.

    Frozen weights are shared, others copied.
    """
    # deepcopy takes what `memo` already holds, so no weight of all members is copied.
    memo = _sharing(_frozen(network))
    for layer in layers_of(network, MemberLayer):
        memo[id(layer)] = make(layer).train(layer.training)
    return copy.deepcopy(network, memo)


def sharded(network: nn.Module, rows: slice) -> Any:
    """Copy a network, or a layer, for some of its members.

    Frozen weights and what members own share memory, others are copied.
    """
    shard = _with_the_same_members(network)
    for layer in layers_of(shard, PerMember):
        layer.keep(rows)
    return shard


def joined(networks: Sequence[nn.Module]) -> Any:
    """Copy networks, or layers, of one architecture as one for the members of all."""
    whole = _with_the_same_members(networks[0])
    parts = [layers_of(network, PerMember) for network in networks]
    for layer, *of_all in zip(layers_of(whole, PerMember), *parts, strict=True):
        layer.merge(of_all)
    return whole


def shapes_of(tensors):
    """Return the shapes of (name, tensor) pairs, as of `named_parameters`, by name."""
    return {name: tensor.shape for name, tensor in tensors}


def _with_the_same_members(network):
    """Copy a network; frozen weights and what members own share memory."""
    shared = _frozen(network)
    for layer in layers_of(network, PerMember):
        shared += layer.own_tensors().values()
    return copy.deepcopy(network, _sharing(shared))


def _frozen(network):
    return [p for p in network.parameters() if not p.requires_grad]


def _sharing(tensors) -> dict[int, Any]:
    """Return what makes `copy.deepcopy` share the memory of tensors."""
    memo = {}
    for t in tensors:
        parameter = isinstance(t, nn.Parameter)
        memo[id(t)] = nn.Parameter(t.data, t.requires_grad) if parameter else t.data
    return memo
