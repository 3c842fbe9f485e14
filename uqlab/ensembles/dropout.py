"""MC dropout as an ensemble: every member drops units of its own (Gal & Ghahramani 2016)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from uqlab.core.modules import frozen
from uqlab.ensembles.base import FoldedEnsemble, member_seed
from uqlab.ensembles.implicit import check_backbone, exactly
from uqlab.ensembles.layers import MemberDropout, MemberLayer, replace_layers


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
        return self.shard(slice(index, index + 1))

    def shard(self, rows: slice) -> "FixedDropout":
        return self._of(self.seeds[rows])

    def join(self, others: Sequence["FixedDropout"]) -> "FixedDropout":
        return self._of([seed for layer in (self, *others) for seed in layer.seeds])

    def _of(self, seeds: Sequence[int]) -> "FixedDropout":
        layer = FixedDropout(len(seeds), self.p)
        layer.reseed(seeds)
        return layer


class DropoutEnsemble(FoldedEnsemble):
    """MC dropout: every member drops the same units for all inputs, until `resample` is called."""

    def resample(self, seed: int) -> "DropoutEnsemble":
        """New units for every member, a function of (seed, member) alone. Returns the ensemble."""
        layers = [part for part in self.network.modules() if isinstance(part, FixedDropout)]
        for number, layer in enumerate(layers):
            layer.reseed([member_seed(seed, m, "mc dropout", number) for m in self.member_ids])
        return self


def dropout(model: nn.Module, members: int | str | range, p: float = 0.2, *, seed: int = 0) -> DropoutEnsemble:
    """MC dropout as an ensemble: member m keeps a fixed part of the units, W diag(z_m) (Gal & Ghahramani 2016).

    model: a trained network, whose weights are shared, not copied, and frozen. Its `nn.Dropout` modules are replaced;
        in a network without, one is put before every linear layer but the first.
    p: the probability that a unit is dropped, in [0, 1), whatever the modules' own. Active in evaluation mode too.

    Raises ValueError for members < 1, p outside [0, 1) and a network with neither dropout nor two linear layers.
    """
    ids = check_backbone(model, members)
    network = frozen(model)
    kinds = (nn.Dropout, MemberDropout)  # members of a deep ensemble may hold the latter
    if any(isinstance(part, kinds) for part in network.modules()):
        replace_layers(network, kinds, lambda *_: FixedDropout(len(ids), p))
    else:
        names = [name for name, part in network.named_modules() if type(part) is nn.Linear][1:]
        if not names:
            raise ValueError(f"{type(model).__name__} has neither nn.Dropout nor a second nn.Linear to put it before")
        put = lambda _, layer: nn.Sequential(FixedDropout(len(ids), p), layer)  # noqa: E731
        replace_layers(network, exactly(names), put)
    return DropoutEnsemble(network, ids).resample(seed).eval()
