"""LoRA-Ensemble: every member adds a matrix of low rank to frozen weights (Muhlematter et al. 2024)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core import tuning
from uqlab.core.checks import within
from uqlab.ensembles.base import FoldedEnsemble
from uqlab.ensembles.implicit import Classifiers, implicit, is_product
from uqlab.ensembles.layers import MemberLayer, conv_settings, plain_conv

BUILT = 1.3  # of the multiply-adds of a weight; from 0.6 to 2 at widths 64 to 768 on two kinds of CPU


class LoRALinear(MemberLayer):
    """y = x (W + scale B_m A_m)^T + b, with W and b frozen (Muhlematter et al. 2024, whose scale is 1).

    down A [members, rank, in], xavier-uniform with `gain` at the start; up B [members, out, rank], zero at the start:
    every member begins as the frozen layer.
    """

    def __init__(
        self, layer: nn.Linear, rank: int, gain: float, generators: Sequence[torch.Generator], scale: float = 1.0
    ):
        super().__init__()
        self.members, (out_features, in_features), self.scale = len(generators), layer.weight.shape, scale
        self.weight, self.bias = layer.weight, layer.bias
        start = [nn.init.xavier_uniform_(torch.empty(rank, in_features), gain, g) for g in generators]
        self.down = nn.Parameter(torch.stack(start).to(layer.weight))
        self.up = nn.Parameter(layer.weight.new_zeros(self.members, out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return self._factored(x)
        count, rows, width = self.unfold(x).shape
        ways = {"factored": self._factored, "built": self._built}
        shape = (count, tuning.octave(rows), width, len(self.weight), self.down.shape[1])
        rule = "factored" if self.factored(rows) else "built"
        return ways[tuning.choose("low rank", shape, x, {n: partial(way, x) for n, way in ways.items()}, rule)](x)

    def factored(self, rows: int) -> bool:
        """Whether W x once for all members, and B_m A_m x, take less time than building every member's W + B_m A_m.

        The second way reads and writes a weight a member, and saves a pass over the outputs and the narrow products.
        """
        out_features, in_features = self.weight.shape
        return rows * (in_features + out_features) <= BUILT * in_features * out_features

    def _factored(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)  # once for all members
        low = torch.bmm(self.unfold(x), self.down[self.active].mT)  # [members, rows, rank]
        up = self.up[self.active].mT.to(y.dtype)
        return self.unfold(y).baddbmm_(low.to(y.dtype), up, alpha=self.scale).view(y.shape)

    def _built(self, x: Tensor) -> Tensor:
        rows, up = self.unfold(x), self.up[self.active]
        weight = torch.baddbmm(self.weight.expand(len(up), -1, -1), up, self.down[self.active], alpha=self.scale)
        y = rows @ weight.mT if self.bias is None else torch.baddbmm(self.bias, rows, weight.mT)
        return y.view(*x.shape[:-1], -1)

    def own_parameters(self) -> list[nn.Parameter]:
        return [self.down, self.up]

    def start_weight(self) -> Tensor | None:
        return None if self.weight.requires_grad else self.weight.detach()

    def member_update(self, index: int) -> Tensor:
        return self.scale * self.up.detach()[index] @ self.down.detach()[index]

    def member_weight(self, index: int) -> Tensor:
        up, down = self.up.detach()[index], self.down.detach()[index]
        return torch.addmm(self.weight.detach(), up, down, alpha=self.scale)


class LoRAConv2d(MemberLayer):
    """y = W * x + scale B_m *_1x1 (A_m * x) + b, W and b frozen: a convolution with W plus a kernel of low rank.

    down A [members, rank, in, height, width], xavier-uniform with `gain` at the start; up B [members, out, rank], zero
    at the start (Muhlematter et al. 2024, appendix H).
    """

    def __init__(
        self, layer: nn.Conv2d, rank: int, gain: float, generators: Sequence[torch.Generator], scale: float = 1.0
    ):
        super().__init__()
        self.members, self.settings, self.scale = len(generators), conv_settings(layer), scale
        self.weight, self.bias = layer.weight, layer.bias
        shape = (rank, *layer.weight.shape[1:])
        start = [nn.init.xavier_uniform_(torch.empty(shape), gain, g) for g in generators]
        self.down = nn.Parameter(torch.stack(start).to(layer.weight))
        self.up = nn.Parameter(layer.weight.new_zeros(self.members, len(layer.weight), rank))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return self._grouped(x)
        ways = {"built": self._built, "grouped": self._grouped}
        count, batch = len(self.up[self.active]), tuning.octave(len(x))
        shape = (count, batch, *x.shape[1:], *self.weight.shape, self.down.shape[1], *self.settings.values())
        each = {name: partial(way, x) for name, way in ways.items()}
        return ways[tuning.choose("low-rank convolution", shape, x, each, "built")](x)

    def _built(self, x: Tensor) -> Tensor:
        each = zip(x.chunk(len(self.up[self.active])), self.up[self.active], self.down[self.active], strict=True)
        kernels = ((rows, (up @ down.flatten(1)).view_as(self.weight)) for rows, up, down in each)
        return torch.cat(
            [F.conv2d(rows, self.weight + self.scale * more, self.bias, **self.settings) for rows, more in kernels]
        )

    def _grouped(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.weight, self.bias, **self.settings)  # once for all members
        down, up = self.down[self.active], self.up[self.active, None].to(y.dtype)
        side_by_side = x.unflatten(0, (len(down), -1)).transpose(0, 1).flatten(1, 2)  # [batch, members * in, ...]
        settings: dict[str, Any] = self.settings | {"groups": len(down)}
        low = F.conv2d(side_by_side, down.flatten(0, 1), **settings)
        low = low.unflatten(1, (len(down), -1)).transpose(0, 1).flatten(3)  # [members, batch, rank, places]
        return torch.add(y, (up @ low).flatten(0, 1).view(y.shape), alpha=self.scale)

    def own_parameters(self) -> list[nn.Parameter]:
        return [self.down, self.up]

    def member(self, index: int) -> nn.Conv2d:
        kernel = self.scale * torch.einsum("or,rihw->oihw", self.up.detach()[index], self.down.detach()[index])
        bias = None if self.bias is None else self.bias.detach().clone()
        return plain_conv(self.weight.detach() + kernel, bias, self.settings)


def lora(
    backbone: nn.Module,
    members: int | str | range,
    rank: int = 8,
    *,
    target: str | None = None,
    gain: float = 10.0,
    scale: float = 1.0,
    classifiers: Classifiers = "independent",
    seed: int = 0,
    heads: Classifiers | None = None,
    train_backbone: bool = False,
) -> FoldedEnsemble:
    """LoRA-Ensemble: W + scale B_m A_m in every target layer, W frozen (Muhlematter et al. 2024).

    In a convolution B_m A_m is a kernel: A_m a convolution of the same size to `rank` channels, B_m one of 1 x 1.

    backbone: the pretrained network, a model of transformers or any module whose last linear layer gives the classes.
        Its weights are shared, not copied, and never change.
    members: how many, or the numbers of a shard, "8:16"; see `concatenate`. Member m depends on (seed, m) alone.
    rank, gain, scale: as in `LoRALinear`; other papers write the scale as alpha / rank.
    target: a regular expression on module names; None for the attention's projections, or in a network without
        attention every convolution and every linear layer but the last.
    train_backbone: whether all members together train the rest too, which is then copied, as in the convolutional
        network of appendix H; batch statistics are then each member's own.
    classifiers: "independent", a classifier of its own for each member, freshly initialised; "shared", the backbone's
        classifier, trained by all members. `heads` is an older name of this argument.

    Batch statistics of the backbone are frozen like its weights. Raises ValueError for a target that matches no linear
    layer, members < 1, a rank below 1 or above the size of a layer, unknown `classifiers`, a backbone on several
    devices; TypeError for what is no network.
    """

    def make(name: str, layer: Any, generators: list[torch.Generator]) -> LoRALinear | LoRAConv2d:
        most = min(layer.weight.flatten(1).shape)
        if not 1 <= rank <= most:
            raise ValueError(f"rank must be 1 to {most} for {name} {list(layer.weight.shape)}, got {rank}")
        made: Any = LoRAConv2d if isinstance(layer, nn.Conv2d) else LoRALinear
        return made(layer, rank, gain, generators, scale)

    within("scale", scale, "(-inf, inf)")
    recipe = {"method": "lora", "rank": rank, "gain": gain} | ({"train_backbone": True} if train_backbone else {})
    recipe |= {"scale": scale} if scale != 1 else {}
    return implicit(
        backbone, members, target, heads or classifiers, seed, make, recipe, fits=is_product,
        called="linear layer or convolution", train_backbone=train_backbone,
    )  # fmt: skip
