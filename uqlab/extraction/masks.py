"""Sub-models that are hidden in one trained network, found by masks on its weights (Kirsch 2024).

Nothing of the network is trained again: all members use its frozen weights.
"""

import copy
import itertools
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from uqlab.core.checks import at_least, one_network, within
from uqlab.ensembles import (
    ELEMENTWISE,
    FoldedEnsemble,
    MemberModule,
    Scaled,
    member_seed,
    plain,
    plain_linear,
)


class Masks(NamedTuple):
    """The masks of one linear layer, in [0, 1]; None where nothing is masked."""

    rows: Float[Tensor, "members out"] | None
    columns: Float[Tensor, "members in"] | None


class Masked(Scaled):
    """W * row_m col_m^T: one frozen weight, of which every member keeps its own rows and columns.

    row_logits [members, out] and column_logits [members, in] are trained; None masks nothing. A mask is the sigmoid of
    its logits or, with a `threshold`, 1 where the sigmoid exceeds the threshold and 0 elsewhere.
    """

    def __init__(
        self,
        w: nn.Parameter,
        members: int,
        row_logits: Tensor | None,
        column_logits: Tensor | None,
    ):
        super().__init__(w, members, None, None)
        self.threshold: float | None = None
        self.row_logits = None if row_logits is None else nn.Parameter(row_logits)
        self.column_logits = (
            None if column_logits is None else nn.Parameter(column_logits)
        )

    def own_parameters(self) -> list[nn.Parameter]:
        """The mask logits: of the columns first, then of the rows."""
        return [p for p in (self.column_logits, self.row_logits) if p is not None]

    def factors(self, rows: slice) -> tuple[Tensor | None, Tensor | None]:
        return self._mask(self.row_logits, rows), self._mask(self.column_logits, rows)

    def masks(self) -> Masks:
        return Masks(*self.factors(slice(None)))

    def _mask(self, logits: Tensor | None, rows: slice) -> Tensor | None:
        if logits is None:
            return None
        p = logits[rows].sigmoid()
        return p if self.threshold is None else (p > self.threshold).to(p.dtype)


class MaskEnsemble(FoldedEnsemble):
    """Members that keep some rows and columns of one network's linear layers; the masks are soft until `harden`."""

    def train(self, mode: bool = True) -> "MaskEnsemble":
        """The frozen network stays in evaluation mode: no dropout, and no new batch statistics."""
        super().train(mode)
        self.network.eval()
        return self

    def layers(self) -> dict[str, Masked]:
        """The masked weights by the names of their layers."""
        return {
            name.removesuffix(".weight"): p
            for name, p in self.network.named_modules()
            if isinstance(p, Masked)
        }

    @torch.no_grad()
    def masks(self) -> dict[str, Masks]:
        """The masks of every layer, by its name in the network."""
        return {name: layer.masks() for name, layer in self.layers().items()}

    def harden(self, threshold: float | None = 0.5) -> "MaskEnsemble":
        """Masks become 1 where they exceed `threshold` and 0 elsewhere, until `soften`. Returns the ensemble."""
        if threshold is not None:
            within("threshold", threshold, "[0, 1)")
        for layer in self.layers().values():
            layer.threshold = threshold
        return self

    def soften(self) -> "MaskEnsemble":
        """Masks are the sigmoids of their logits again. Returns the ensemble."""
        return self.harden(None)

    def member(self, index: int) -> nn.Module:
        """Member `index` as a plain network; with hard masks in an nn.Sequential without the units that it masks."""
        self._check_index(index)
        hard = all(layer.threshold is not None for layer in self.layers().values())
        parts = _sequence(self.network)
        return (
            _small_member(parts, index)
            if hard and parts is not None
            else super().member(index)
        )


def masks(
    model: nn.Module,
    members: int = 10,
    *,
    inputs: bool = True,
    std: float = 0.5,
    seed: int = 0,
) -> MaskEnsemble:
    """An ensemble of sub-models of one network: row and column masks on every `nn.Linear`, all weights frozen.

    model: the trained network. It is copied, and the copy is always in evaluation mode. Its last linear layer gives the
        classes, so the rows of that layer are never masked.
    inputs: whether the columns of the first linear layer, its input features, are masked too.
    std: of the initial mask logits, which for member m depend on (seed, m) alone.

    Train the masks with `fit_masks`. Raises TypeError unless `model` is one network; ValueError for a model without
    linear layers, members < 1 and std <= 0. Kirsch 2024, section D.4.
    """
    one_network(model, "masks")
    at_least("members", members)
    within("std", std, "(0, inf)")
    network = plain(copy.deepcopy(model))
    network = nn.Sequential(network) if isinstance(network, nn.Linear) else network
    names = [name for name, part in network.named_modules() if type(part) is nn.Linear]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear layer to mask; masks need one, tiles take convolutional networks"
        )
    generators = [
        torch.Generator().manual_seed(member_seed(seed, m, "masks"))
        for m in range(members)
    ]

    def logits(features: int, like: Tensor) -> Tensor:
        return torch.stack(
            [torch.randn(features, generator=g) * std for g in generators]
        ).to(like)

    def make(name: str, layer: nn.Linear) -> MemberModule:
        rows = logits(layer.out_features, layer.weight) if name != names[-1] else None
        columns = (
            logits(layer.in_features, layer.weight)
            if inputs or name != names[0]
            else None
        )
        return MemberModule(
            layer,
            {"weight": Masked(layer.get_parameter("weight"), members, rows, columns)},
        )

    for name in names:
        network.set_submodule(
            name, make(name, cast(nn.Linear, network.get_submodule(name)))
        )
    return MaskEnsemble(network, range(members)).eval()


def mask_diversity(ensemble: MaskEnsemble) -> Float[Tensor, ""]:
    """I[mask; member] of each mask element, averaged over the elements of all layers: nats, in [0, log 2].

    A mask element p is read as a coin that shows 1 with probability p, with entropy H(p): the information is H(mean
    over members of p) - mean over members of H(p). Kirsch 2024, section D.4, sums over the elements; our mean makes the
    term independent of the width. Raises TypeError for another kind of ensemble.
    """
    found = [
        mask
        for layer in ensemble.masks().values()
        for mask in layer
        if mask is not None
    ]
    p = torch.cat(found, 1)  # [members, elements]
    return (coin_entropy(p.mean(0)) - coin_entropy(p).mean(0)).mean().clamp(min=0)


def coin_entropy(p: Tensor) -> Tensor:
    """The entropy of a coin that shows 1 with probability p, in nats."""
    return torch.special.entr(p) + torch.special.entr(1 - p)


def _sequence(network: nn.Module) -> list[nn.Module] | None:
    """The modules of a (nested) Sequential in the order of their calls, else None."""
    if type(network) is not nn.Sequential:
        return None
    return [leaf for part in network for leaf in _sequence(part) or [part]]


def _bias(layer: MemberModule) -> Float[Tensor, " out"]:
    """The bias of a layer, 0 where it has none."""
    bias, weight = (
        layer.inner.get_parameter("bias") if layer.inner.bias is not None else None,
        layer.weight.w,
    )
    return weight.new_zeros(len(weight)) if bias is None else bias.detach()


class _SelectFeatures(nn.Module):
    """The input features that a small member keeps."""

    index: Tensor

    def __init__(self, index: Int[Tensor, " kept"]):
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self.index)


def _small_member(parts: list[nn.Module], index: int) -> nn.Sequential:
    """The hard member `index` of a sequence of modules, without the units that it does not use.

    Take a unit between two linear layers that have only elementwise modules between them. It is needed if the first
    layer keeps its row and the second its column. If only the column is kept, the unit's value is constant, namely what
    the elementwise modules make of its bias, and this constant is added to the second layer's bias.
    """
    linear = {i: part for i, part in enumerate(parts) if isinstance(part, MemberModule)}
    rows, columns = {}, {}  # which features layer i keeps: [out], [in]
    for i, layer in linear.items():
        masked: Any = layer.weight
        ones = [masked.w.new_ones(features) for features in masked.shape]
        kept = [
            one if mask is None else mask[index]
            for mask, one in zip(masked.masks(), ones, strict=True)
        ]
        rows[i], columns[i] = (mask.bool() for mask in kept)
    after = {
        a: b
        for a, b in itertools.pairwise(linear)
        if all(type(p) in ELEMENTWISE for p in parts[a + 1 : b])
    }
    before = {b: a for a, b in after.items()}
    small: list[nn.Module] = []
    for i, part in enumerate(parts):
        if i not in linear:
            small.append(copy.deepcopy(part))
            continue
        weight = linear[i].weight.w.detach() * rows[i][:, None]
        bias = _bias(linear[i]).clone()
        inside = columns[i]
        if i in before:
            constant = _bias(linear[before[i]])
            for between in parts[before[i] + 1 : i]:
                constant = between(constant)
            bias += weight @ (constant * (columns[i] & ~rows[before[i]]))
            inside = columns[i] & rows[before[i]]
        elif not inside.all():
            small.append(_SelectFeatures(inside.nonzero().flatten()))
        needed = rows[i] & columns[after[i]] if i in after else slice(None)
        weight, bias = weight[needed][:, inside], bias[needed]
        small.append(
            plain_linear(
                weight, bias if linear[i].inner.bias is not None or bias.any() else None
            )
        )
    return nn.Sequential(*small).eval()
