"""Linear layers of which all members share one weight, each adding a little of its own: implicit ensembles.

    method                    the weight that member m sees     of member m's own
    LoRA-Ensemble             W + B_m A_m                       A_m [rank, in], B_m [out, rank]
    singular value ensemble   U diag(max(s_m, 0)) V^T           s_m [k], bias [out]
    BatchEnsemble             W * (r_m s_m^T)                   r_m [out], s_m [in], bias [out]
    BatchEnsemble++           W + r_m s_m^T                     the same

Inputs are folded, member-major: [members * batch, ..., in]. W is the backbone's own tensor, never copied.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.ensembles.layers import MemberLayer, plain_linear


class LoRALinear(MemberLayer):
    """y = x (W + B_m A_m)^T + b, with W and b frozen (Muhlematter et al. 2024; without a scale alpha / rank).

    down A [members, rank, in], up B [members, out, rank].
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        down: Float[Tensor, "members rank in"],
        up: Float[Tensor, "members out rank"],
    ):
        super().__init__()
        self.members = down.shape[0]
        self.weight, self.bias = weight, bias
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    @classmethod
    def start(cls, layer: nn.Linear, rank: int, gain: float, generators: Sequence[torch.Generator]) -> "LoRALinear":
        """A xavier-uniform with `gain`, B = 0: every member begins as the frozen layer."""
        out_features, in_features = layer.weight.shape
        down = layer.weight.new_empty(len(generators), rank, in_features)
        for each, generator in zip(down, generators, strict=True):
            each.copy_(nn.init.xavier_uniform_(torch.empty(rank, in_features), gain, generator))
        up = layer.weight.new_zeros(len(generators), out_features, rank)
        return cls(cast(nn.Parameter, layer.weight), layer.bias, down, up)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)  # once for all members
        low = torch.bmm(self.unfold(x), self.down[self.active].mT)  # [members, rows, rank]
        return self.unfold(y).baddbmm_(low.to(y.dtype), self.up[self.active].mT.to(y.dtype)).view(y.shape)

    def own_parameters(self) -> list[nn.Parameter]:
        return [self.down, self.up]

    def member(self, index: int) -> nn.Linear:
        weight = torch.addmm(self.weight.detach(), self.up.detach()[index], self.down.detach()[index])
        return plain_linear(weight, None if self.bias is None else self.bias.detach().clone())

    def shard(self, rows: slice) -> "LoRALinear":
        return LoRALinear(self.weight, self.bias, self.down.data[rows], self.up.data[rows])

    def extra_repr(self) -> str:
        members, rank, in_features = self.down.shape
        return f"members={members}, in_features={in_features}, out_features={self.up.shape[1]}, rank={rank}"


class SVDLinear(MemberLayer):
    """y = x (U diag(max(s_m, 0)) V^T)^T + b_m, with U and V frozen (Turkoglu et al. 2026).

    u [out, k] and v [in, k] are the singular vectors of the backbone's weight; s [members, k], bias [members, out].
    """

    u: Tensor
    v: Tensor

    def __init__(
        self,
        u: Float[Tensor, "out k"],
        v: Float[Tensor, "in k"],
        s: Float[Tensor, "members k"],
        bias: Float[Tensor, "members out"] | None,
    ):
        super().__init__()
        self.members = s.shape[0]
        self.register_buffer("u", u)
        self.register_buffer("v", v)
        self.s = nn.Parameter(s)
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def start(cls, layer: nn.Linear, std: float, generators: Sequence[torch.Generator]) -> "SVDLinear":
        """s_m = S (1 + std * noise) at least 0, b_m = b + std * noise."""
        weight = layer.weight.detach()
        u, s, vh = torch.linalg.svd(weight.float(), full_matrices=False)
        noise = [torch.randn(len(s), generator=g) for g in generators]
        values = torch.stack([(s * (1 + std * n.to(s))).clamp(min=0) for n in noise]).to(weight)
        bias = None
        if layer.bias is not None:
            noise = [torch.randn(len(layer.bias), generator=g) for g in generators]
            bias = torch.stack([layer.bias.detach() + std * n.to(weight) for n in noise])
        return cls(u.to(weight), vh.mT.contiguous().to(weight), values, bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, s = self.unfold(x), self.s[self.active, None].clamp(min=0)
        bias = None if self.bias is None else self.bias[self.active, None]
        if self.factored(rows.shape[1]):
            y = F.linear((rows @ self.v) * s, self.u)
            y = y if bias is None else y + bias
        else:
            weight = (self.u * s) @ self.v.mT  # [members, out, in]
            y = rows @ weight.mT if bias is None else torch.baddbmm(bias, rows, weight.mT)
        return y.view(*x.shape[:-1], -1)

    def factored(self, rows: int) -> bool:
        """Whether two products per row cost less than building every member's weight and one product per row.

        A backward pass takes as much again of the former, which has no weight gradient, and twice as much of the
        latter. Building, which writes the weights too, was measured at 1.5 times its arithmetic.
        """
        (out_features, k), in_features = self.u.shape, self.v.shape[0]
        factors, weights = (2, 3) if torch.is_grad_enabled() and self.s.requires_grad else (1, 1)
        build = 1.5 * out_features * in_features * k
        return factors * rows * k * (in_features + out_features) <= weights * (
            build + rows * out_features * in_features
        )

    def member(self, index: int) -> nn.Linear:
        weight = (self.u * self.s.detach()[index].clamp(min=0)) @ self.v.mT
        return plain_linear(weight, None if self.bias is None else self.bias.detach()[index].clone())

    def shard(self, rows: slice) -> "SVDLinear":
        return SVDLinear(self.u, self.v, self.s.data[rows], None if self.bias is None else self.bias.data[rows])

    def extra_repr(self) -> str:
        (out_features, k), members = self.u.shape, self.members
        return f"members={members}, in_features={self.v.shape[0]}, out_features={out_features}, singular_values={k}"


class BatchLinear(MemberLayer):
    """y = x (W * r_m s_m^T)^T + b_m, or with `additive` y = x (W + r_m s_m^T)^T + b_m and W frozen.

    left r [members, out], right s [members, in], bias [members, out]. BatchEnsemble: Wen et al. 2020, eq. 5; the
    additive form: Muhlematter et al. 2024, eq. 12.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        left: Float[Tensor, "members out"],
        right: Float[Tensor, "members in"],
        bias: Float[Tensor, "members out"] | None,
        additive: bool,
    ):
        super().__init__()
        self.members, self.additive = left.shape[0], additive
        self.weight = weight
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def start(
        cls, layer: nn.Linear, std: float, additive: bool, generators: Sequence[torch.Generator]
    ) -> "BatchLinear":
        """r and s Normal with standard deviation `std` around 1, or around 0 in the additive form."""
        centre = 0.0 if additive else 1.0

        def draw(features: int) -> Tensor:
            noise = [centre + std * torch.randn(features, generator=g) for g in generators]
            return torch.stack(noise).to(layer.weight)

        out_features, in_features = layer.weight.shape
        bias = None if layer.bias is None else layer.bias.detach().expand(len(generators), -1).clone()
        return cls(cast(nn.Parameter, layer.weight), draw(out_features), draw(in_features), bias, additive)

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

    def member(self, index: int) -> nn.Linear:
        outer = torch.outer(self.left.detach()[index], self.right.detach()[index])
        weight = self.weight.detach() + outer if self.additive else self.weight.detach() * outer
        return plain_linear(weight, None if self.bias is None else self.bias.detach()[index].clone())

    def shard(self, rows: slice) -> "BatchLinear":
        bias = None if self.bias is None else self.bias.data[rows]
        return BatchLinear(self.weight, self.left.data[rows], self.right.data[rows], bias, self.additive)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        shape = f"in_features={in_features}, out_features={out_features}"
        return f"members={self.members}, {shape}, additive={self.additive}"
