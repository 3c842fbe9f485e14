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
    """A layer with one set of weights, or one noise stream, per member."""

    members: int

    def unfold(self, x: Tensor) -> Tensor:
        """[members * batch, ..., features] -> [members, rows, features]."""
        if x.shape[0] % self.members:
            raise ValueError(
                f"{type(self).__name__} holds {self.members} members and needs a batch that is a multiple of it, "
                f"got {tuple(x.shape)}; call the ensemble, which folds the members into the batch, not its network"
            )
        return x.reshape(self.members, -1, x.shape[-1])

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
        rows = self.unfold(x)  # [members, rows, in]
        if self.bias is None:
            y = torch.bmm(rows, self.weight.mT)
        else:
            y = torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight.mT)
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


class MaskedLinear(MemberLayer):
    """y = x (W * row_m col_m^T)^T + b: one frozen linear layer of which every member keeps its own rows and columns.

    weight [out, in] and bias [out] are shared and frozen; row_logits [members, out] and column_logits [members, in]
    (None where all are kept) are trained. The masks are their sigmoids or, with a `threshold`, 1 where these exceed it,
    else 0.
    """

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, " out"] | None,
        row_logits: Float[Tensor, "members out"] | None,
        column_logits: Float[Tensor, "members in"] | None,
        *,
        members: int,
        threshold: float | None = None,
    ):
        super().__init__()
        self.members, self.threshold = members, threshold
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.row_logits = None if row_logits is None else nn.Parameter(row_logits)
        self.column_logits = None if column_logits is None else nn.Parameter(column_logits)

    def logits(self) -> list[nn.Parameter]:
        """What is trained: the logits of columns and rows, where these are masked."""
        return [p for p in (self.column_logits, self.row_logits) if p is not None]

    def masks(self) -> tuple[Tensor | None, Tensor | None]:
        """Row mask [members, out] and column mask [members, in], None where there is none."""
        return self._mask(self.row_logits), self._mask(self.column_logits)

    def _mask(self, logits: Tensor | None) -> Tensor | None:
        if logits is None:
            return None
        p = logits.sigmoid()
        return p if self.threshold is None else (p > self.threshold).to(p.dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.masks()
        h = self.unfold(x)  # [members, rows, in]
        if columns is not None:
            h = h * columns[:, None]
        y = nn.functional.linear(h, self.weight)  # the frozen weight is multiplied once for all members
        if rows is not None:
            y = y * rows[:, None]
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], -1)

    def member(self, index: int) -> nn.Linear:
        weight = self.weight.detach()
        rows, columns = (None if mask is None else mask[index].detach() for mask in self.masks())
        weight = weight if rows is None else weight * rows[:, None]
        weight = weight.clone() if columns is None else weight * columns
        return plain_linear(weight, None if self.bias is None else self.bias.detach().clone())

    def shard(self, rows: slice) -> "MaskedLinear":
        parts = (None if p is None else p.data[rows] for p in (self.row_logits, self.column_logits))
        bias = None if self.bias is None else self.bias.data
        count = len(range(self.members)[rows])
        return MaskedLinear(self.weight.data, bias, *parts, members=count, threshold=self.threshold)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        kinds = [name for name in ("row", "column") if getattr(self, f"{name}_logits") is not None]
        masked = f"masks={'+'.join(kinds) or 'none'}, threshold={self.threshold}"
        return f"members={self.members}, in_features={in_features}, out_features={out_features}, {masked}"


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
        self.words = torch.empty(0)
        self.reseed(range(members))

    def reseed(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Start the noise of member m anew from `seeds[m]`."""
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.words = torch.empty(self.members, 0, dtype=torch.int64, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.keep_mask(x).mul_(1 / (1 - self.p)) if self.training and self.p else x

    def keep_mask(self, x: Tensor) -> Tensor:
        """0 where dropped and 1 where kept, shaped and typed like x.

        Sixteen random bits an element (p to 1/65536) are 5 times as fast as bernoulli_ on a CPU, and a comparison
        written as float 4 times as fast as a boolean mask.
        """
        if self.generators[0].device != x.device:
            self.reseed([generator.initial_seed() for generator in self.generators], x.device)
        count = x.numel() // self.members
        bits = self._draw(-(-count // 4)).view(torch.int16)[:, :count].reshape(x.shape)
        return torch.ge(bits, round(self.p * 65536) - 32768, out=torch.empty_like(x))

    def _draw(self, count: int) -> Tensor:
        """The next `count` 64-bit words of every member's stream [members, count], some drawn ahead to save calls."""
        if self.words.shape[1] < count:
            fresh = torch.empty(self.members, max(count, 2**14), dtype=torch.int64, device=self.words.device)
            for row, generator in zip(fresh, self.generators, strict=True):
                row.random_(-(2**63), None, generator=generator)
            self.words = torch.cat([self.words, fresh], 1)
        drawn, self.words = self.words[:, :count].contiguous(), self.words[:, count:]
        return drawn

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
    """A copy of `network` in which `make` has replaced every member layer."""
    # deepcopy takes what `memo` already holds, so the stacked weights of all members are never copied.
    layers = [layer for layer in network.modules() if isinstance(layer, MemberLayer)]
    memo = {id(layer): make(layer).train(layer.training) for layer in layers}
    return copy.deepcopy(network, memo)
