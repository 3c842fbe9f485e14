"""Layers whose weights depend on the ensemble member.

Members are folded into the batch, member-major: an input `[members * batch, ..., features]` holds the batch of member
0, then that of member 1, and so on. Everything between two member layers is an ordinary module that never notices.
"""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class MemberLayer(nn.Module):
    """A layer with one set of weights, or one noise stream, per member.

    `active` are the members folded into the batch at present: all of them, or a chunk.
    """

    members: int
    active: slice = slice(None)

    def unfold(self, x: Tensor) -> Tensor:
        """[members * batch, ..., features] -> [members, rows, features]."""
        count = len(range(self.members)[self.active])
        if x.shape[0] % count:
            raise ValueError(
                f"{type(self).__name__} holds {count} members and needs a batch that is a multiple of it, "
                f"got {tuple(x.shape)}; call the ensemble, which folds the members into the batch, not its network"
            )
        return x.reshape(count, -1, x.shape[-1])

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters whose first axis is the members."""
        return list(self.parameters())

    def member(self, index: int) -> nn.Module:
        """The plain layer that member `index` amounts to."""
        raise NotImplementedError

    def shard(self, rows: slice) -> "MemberLayer":
        """The layer of some of the members, sharing their weights' memory."""
        raise NotImplementedError


class MemberLinear(MemberLayer):
    """y = x W_m^T + b_m: a linear layer of its own for every member, all of them one batched product.

    weight [members, out, in], bias [members, out].
    """

    def __init__(self, weight: Float[Tensor, "members out in"], bias: Float[Tensor, "members out"] | None):
        super().__init__()
        self.members = weight.shape[0]
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def stack(cls, layers: Sequence[nn.Linear]) -> "MemberLinear":
        """Member m is `layers[m]`; the weights are copied."""
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        return cls(torch.stack([layer.weight.detach() for layer in layers]), torch.stack(biases) if biases else None)

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = self.unfold(x), self.weight[self.active]  # [members, rows, in]
        if self.bias is None:
            y = torch.bmm(rows, weight.mT)
        else:
            y = torch.baddbmm(self.bias[self.active].unsqueeze(1), rows, weight.mT)
        return y.view(*x.shape[:-1], -1)

    def member(self, index: int) -> nn.Linear:
        bias = None if self.bias is None else self.bias.data[index].clone()
        layer = plain_linear(self.weight.data[index].clone(), bias)
        for name, plain in layer.named_parameters():
            plain.requires_grad_(getattr(self, name).requires_grad)
        return layer

    def shard(self, rows: slice) -> "MemberLinear":
        layer = MemberLinear(self.weight.data[rows], None if self.bias is None else self.bias.data[rows])
        for name, part in layer.named_parameters():
            part.requires_grad_(getattr(self, name).requires_grad)
        return layer

    def extra_repr(self) -> str:
        members, out_features, in_features = self.weight.shape
        return (
            f"members={members}, in_features={in_features}, out_features={out_features}, bias={self.bias is not None}"
        )


def plain_linear(weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None) -> nn.Linear:
    """The nn.Linear that holds these tensors."""
    layer = nn.Linear(1, 1, bias is not None, device="meta")  # nothing to initialise, nor to warn of without features
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


class MemberDropout(MemberLayer):
    """Dropout whose noise comes from one generator per member, so that member m never depends on its neighbours.

    `reseed` gives the member seeds; before it is called the layer draws from seeds 0, 1, ....
    """

    def __init__(self, members: int, p: float = 0.5):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability must be in [0, 1), got {p}")
        self.members, self.p = members, p
        self.generators: list[torch.Generator] = []
        self.words: dict[tuple[int, int], Tensor] = {}  # drawn ahead, of the members first to last
        self.reseed(range(members))

    def reseed(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Start the noise of member m anew from `seeds[m]`."""
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.words = {}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.keep_mask(x).mul_(1 / (1 - self.p)) if self.training and self.p else x

    def keep_mask(self, x: Tensor) -> Tensor:
        """0 where dropped and 1 where kept, shaped and typed like x.

        Sixteen random bits an element (p to 1/65536) are 5 times as fast as bernoulli_ on a CPU, and a comparison
        written as float 4 times as fast as a boolean mask.
        """
        if self.generators[0].device != x.device:
            self.reseed([generator.initial_seed() for generator in self.generators], x.device)
        members = range(self.members)[self.active]
        count = x.numel() // len(members)
        bits = self._draw(-(-count // 4), members).view(torch.int16)[:, :count].reshape(x.shape)
        return torch.ge(bits, round(self.p * 65536) - 32768, out=torch.empty_like(x))

    def _draw(self, count: int, members: range) -> Tensor:
        """The next `count` 64-bit words of each member's stream [members, count], some drawn ahead to save calls."""
        key = members[0], members[-1]
        words = self.words.get(key)
        if words is None or words.shape[1] < count:
            device = self.generators[0].device
            fresh = torch.empty(len(members), max(count, 2**14), dtype=torch.int64, device=device)
            for row, m in zip(fresh, members, strict=True):
                row.random_(-(2**63), None, generator=self.generators[m])
            words = fresh if words is None else torch.cat([words, fresh], 1)
        self.words[key] = words[:, count:]
        return words[:, :count].contiguous()

    def member(self, index: int) -> nn.Dropout:
        return nn.Dropout(self.p)

    def shard(self, rows: slice) -> "MemberDropout":
        return MemberDropout(len(range(self.members)[rows]), self.p)

    def __deepcopy__(self, memo):  # generators cannot be copied: the copy's noise starts anew from the same seeds
        layer = MemberDropout(self.members, self.p).train(self.training)
        layer.reseed([generator.initial_seed() for generator in self.generators], self.generators[0].device)
        return layer

    def extra_repr(self) -> str:
        return f"members={self.members}, p={self.p}"


class FixedDropout(MemberLayer):
    """Dropout of the same features for all inputs of a member: x diag(z_m), in training and evaluation mode.

    What is dropped follows from the member's seed and the features [batch, features] or [batch, tokens, features], or
    the whole map [batch, channels, height, width], alone.
    """

    def __init__(self, members: int, p: float):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability must be in [0, 1), got {p}")
        self.members, self.p = members, p
        self.reseed(range(members))

    def reseed(self, seeds: Sequence[int]) -> None:
        """Other features, from one seed a member."""
        self.seeds, self.mask = list(seeds), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[-1:] if x.ndim == 3 else x.shape[1:]
        if self.mask.shape[1:] != shape or self.mask.device != x.device:
            kept = [torch.rand(shape, generator=torch.Generator().manual_seed(seed)) >= self.p for seed in self.seeds]
            self.mask = torch.stack(kept).to(x.device)
        factor = self.mask[self.active].to(x.dtype) / (1 - self.p)
        folded = x.unflatten(0, (len(factor), -1))
        return (folded * factor.view(len(factor), *[1] * (folded.ndim - factor.ndim), *shape)).flatten(0, 1)

    def member(self, index: int) -> "FixedDropout":
        layer = FixedDropout(1, self.p)
        layer.reseed(self.seeds[index : index + 1])
        return layer

    def shard(self, rows: slice) -> "FixedDropout":
        layer = FixedDropout(len(self.seeds[rows]), self.p)
        layer.reseed(self.seeds[rows])
        return layer

    def extra_repr(self) -> str:
        return f"members={self.members}, p={self.p}"


def replace_layers(
    model: nn.Module,
    target: str | type[nn.Module] | tuple[type[nn.Module], ...],
    make: Callable[[str, Any], nn.Module],
) -> list[str]:
    """Replace, in place, every submodule that `target` names by `make(name, module)`; return their names.

    `target` is a regular expression searched in the module names, or the module types to replace. Raises ValueError if
    nothing matches and names what could.
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    if isinstance(target, str):
        chosen = {name: module for name, module in modules.items() if re.search(target, name)}
    else:
        chosen = {name: module for name, module in modules.items() if isinstance(module, target)}
    if not chosen:
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        raise ValueError(f"target {target!r} matches no layer; the linear layers are {', '.join(linear) or 'none'}")
    made: dict[nn.Module, nn.Module] = {}  # a layer used twice is replaced by one layer used twice
    replaced: list[str] = []
    for name, module in chosen.items():
        if any(name.startswith(f"{above}.") for above in replaced):
            continue  # it went with the layer that held it
        if module not in made:
            made[module] = make(name, module)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[module])
        replaced.append(name)
    return replaced


def with_layers(network: nn.Module, make: Callable[[MemberLayer], nn.Module]) -> nn.Module:
    """A copy of `network` in which `make` has replaced every member layer; frozen weights are shared, others copied."""
    # deepcopy takes what `memo` already holds, so the stacked weights of all members are never copied.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.data, requires_grad=False) for p in network.parameters() if not p.requires_grad
    }
    for layer in [part for part in network.modules() if isinstance(part, MemberLayer)]:
        memo[id(layer)] = make(layer).train(layer.training)
    return copy.deepcopy(network, memo)
