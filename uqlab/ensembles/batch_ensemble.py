"""BatchEnsemble: one weight times, or plus, an outer product of every member's own (Wen et al. 2020)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.ensembles.base import FoldedEnsemble
from uqlab.ensembles.implicit import Classifiers, implicit, is_product
from uqlab.ensembles.layers import MemberLayer, conv_settings, plain_conv


class BatchLinear(MemberLayer):
    """y = x (W * r_m s_m^T)^T + b_m, or with `additive` y = x (W + r_m s_m^T)^T + b_m and W frozen.

    left r [members, out], right s [members, in], bias [members, out]. BatchEnsemble: Wen et al. 2020, eq. 5; the
    additive form: Muhlematter et al. 2024, eq. 12.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, std: float, additive: bool, generators: Sequence[torch.Generator]):
        super().__init__()
        self.members, self.additive, self.weight = len(generators), additive, layer.weight

        def noise(features: int) -> Tensor:
            each = [torch.randn(features, generator=g) for g in generators]
            return (0.0 if additive else 1.0) + std * torch.stack(each).to(layer.weight)

        out_features, in_features = layer.weight.shape[:2]
        self.left, self.right = nn.Parameter(noise(out_features)), nn.Parameter(noise(in_features))
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().repeat(self.members, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows, left, right = self.unfold(x), self.left[self.active, None], self.right[self.active, None]
        if self.additive:
            y = torch.addcmul(F.linear(rows, self.weight), (rows * right).sum(-1, keepdim=True), left)
        else:
            y = F.linear(rows * right, self.weight) * left
        y = y if self.bias is None else y + self.bias[self.active, None]
        return y.view(*x.shape[:-1], -1)

    def own_parameters(self) -> list[nn.Parameter]:
        return [p for p in (self.left, self.right, self.bias) if p is not None]

    def start_weight(self) -> Tensor | None:
        return self.weight.detach() if self.additive else None

    def member_update(self, index: int) -> Tensor | None:
        return torch.outer(self.left.detach()[index], self.right.detach()[index]) if self.additive else None

    def member_weight(self, index: int) -> Tensor | None:
        outer = torch.outer(self.left.detach()[index], self.right.detach()[index])
        return self.weight.detach() + outer if self.additive else self.weight.detach() * outer


class BatchConv2d(BatchLinear):
    """y = r_m (W * (s_m x)) + b_m: the kernel W times r_m s_m^T, which is alike at all places (Wen et al. 2020).

    left r [members, out], right s [members, in], bias [members, out].
    """

    def __init__(self, layer: nn.Conv2d, std: float, generators: Sequence[torch.Generator]):
        super().__init__(layer, std, False, generators)
        self.settings = conv_settings(layer)

    def forward(self, x: Tensor) -> Tensor:
        left, right = (p[self.active, None, :, None, None] for p in (self.left, self.right))
        ready = (x.unflatten(0, (len(right), -1)) * right).flatten(0, 1)
        y = F.conv2d(ready, self.weight, **self.settings).unflatten(0, (len(left), -1)) * left
        y = y if self.bias is None else y + self.bias[self.active, None, :, None, None]
        return y.flatten(0, 1)

    def member_weight(self, index: int) -> None:
        return None

    def member(self, index: int) -> nn.Conv2d:
        outer = torch.outer(self.left.detach()[index], self.right.detach()[index])
        bias = self.member_bias(index)
        weight = self.weight.detach() * outer[..., None, None]
        return plain_conv(weight, None if bias is None else bias.clone(), self.settings)


def batch(
    backbone: nn.Module,
    members: int | str | range,
    *,
    target: str | None = None,
    std: float = math.sqrt(0.02),
    additive: bool = False,
    classifiers: Classifiers = "independent",
    seed: int = 0,
    heads: Classifiers | None = None,
) -> FoldedEnsemble:
    """BatchEnsemble: W * (r_m s_m^T) in every target layer; all members also train W together (Wen et al. 2020).

    In a convolution r_m scales the output channels and s_m the input channels.

    std: of r and s, which are Normal around 1 (Muhlematter et al. 2024, I.1).
    additive: W + r_m s_m^T instead, with W frozen and r and s Normal around 0: BatchEnsemble++ (I.2, eq. 12), which is
        for linear layers alone.

    W is trained, so it is copied. `batch_ensemble` is another name of this function. The rest is as in `lora`.
    """

    def make(_: str, layer: Any, generators: list[torch.Generator]) -> BatchLinear:
        if not additive:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
        if isinstance(layer, nn.Conv2d):
            return BatchConv2d(layer, std, generators)
        return BatchLinear(layer, std, additive, generators)

    recipe = {"method": "batch", "std": std, "additive": additive}
    fits: dict[str, Any] = {} if additive else {"fits": is_product, "called": "linear layer or convolution"}
    return implicit(backbone, members, target, heads or classifiers, seed, make, recipe, **fits)


batch_ensemble = batch
