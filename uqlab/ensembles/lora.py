"""LoRA-Ensemble: every member adds a matrix of low rank to frozen weights (Muhlematter et al. 2024)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.ensembles.base import FoldedEnsemble
from uqlab.ensembles.implicit import Classifiers, implicit
from uqlab.ensembles.layers import MemberLayer


class LoRALinear(MemberLayer):
    """y = x (W + B_m A_m)^T + b, with W and b frozen (Muhlematter et al. 2024; without a scale alpha / rank).

    down A [members, rank, in], xavier-uniform with `gain` at the start; up B [members, out, rank], zero at the start:
    every member begins as the frozen layer.
    """

    def __init__(self, layer: nn.Linear, rank: int, gain: float, generators: Sequence[torch.Generator]):
        super().__init__()
        self.members, (out_features, in_features) = len(generators), layer.weight.shape
        self.weight, self.bias = layer.weight, layer.bias
        start = [nn.init.xavier_uniform_(torch.empty(rank, in_features), gain, g) for g in generators]
        self.down = nn.Parameter(torch.stack(start).to(layer.weight))
        self.up = nn.Parameter(layer.weight.new_zeros(self.members, out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)  # once for all members
        low = torch.bmm(self.unfold(x), self.down[self.active].mT)  # [members, rows, rank]
        return self.unfold(y).baddbmm_(low.to(y.dtype), self.up[self.active].mT.to(y.dtype)).view(y.shape)

    def own_parameters(self) -> list[nn.Parameter]:
        return [self.down, self.up]

    def start_weight(self) -> Tensor:
        return self.weight.detach()

    def member_update(self, index: int) -> Tensor:
        return self.up.detach()[index] @ self.down.detach()[index]

    def member_weight(self, index: int) -> Tensor:
        return torch.addmm(self.weight.detach(), self.up.detach()[index], self.down.detach()[index])


def lora(
    backbone: nn.Module,
    members: int | str | range,
    rank: int = 8,
    *,
    target: str | None = None,
    gain: float = 10.0,
    classifiers: Classifiers = "independent",
    seed: int = 0,
    heads: Classifiers | None = None,
) -> FoldedEnsemble:
    """LoRA-Ensemble: W + B_m A_m in every target layer, W frozen (Muhlematter et al. 2024).

    backbone: the pretrained network, a model of transformers or any module whose last linear layer gives the classes.
        Its weights are shared, not copied, and never change.
    members: how many, or the numbers of a shard, "8:16"; see `concatenate`. Member m depends on (seed, m) alone.
    rank, gain: as in `LoRALinear`.
    target: a regular expression on module names; None for the attention's projections, or in a network without
        attention every linear layer but the last.
    classifiers: "independent", a classifier of its own for each member, freshly initialised; "shared", the backbone's
        classifier, trained by all members. `heads` is an older name of this argument.

    Batch statistics of the backbone are frozen like its weights. Raises ValueError for a target that matches no linear
    layer, members < 1, a rank below 1 or above the size of a layer, unknown `classifiers`, a backbone on several
    devices; TypeError for what is no network.
    """

    def make(name: str, layer: nn.Linear, generators: list[torch.Generator]) -> LoRALinear:
        if not 1 <= rank <= min(layer.weight.shape):
            out_features, in_features = layer.weight.shape
            raise ValueError(
                f"rank must be 1 to {min(layer.weight.shape)} for {name} [{out_features}, {in_features}], got {rank}"
            )
        return LoRALinear(layer, rank, gain, generators)

    recipe = {"method": "lora", "rank": rank, "gain": gain}
    return implicit(backbone, members, target, heads or classifiers, seed, make, recipe)
