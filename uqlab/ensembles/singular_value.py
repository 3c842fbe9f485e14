"""Singular value ensemble: singular values of every member's own, frozen directions (Turkoglu et al. 2026)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core import tuning
from uqlab.ensembles.base import FoldedEnsemble
from uqlab.ensembles.implicit import Classifiers, implicit
from uqlab.ensembles.layers import MemberLayer


class SVDLinear(MemberLayer):
    """y = x (U diag(max(s_m, 0)) V^T)^T + b_m, with U and V frozen (Turkoglu et al. 2026).

    u [out, k] and v [in, k] are the singular vectors of the layer's weight. At the start the singular values are
    s_m = S (1 + std * noise), at least 0, [members, k], and the biases b_m = b + std * noise [members, out].
    """

    u: Tensor
    v: Tensor

    def __init__(self, layer: nn.Linear, std: float, generators: Sequence[torch.Generator]):
        super().__init__()
        self.members, weight = len(generators), layer.weight.detach()
        u, s, vh = torch.linalg.svd(weight.float(), full_matrices=False)
        self.register_buffer("u", u.to(weight))
        self.register_buffer("v", vh.mT.contiguous().to(weight))
        values = [(s * (1 + std * torch.randn(len(s), generator=g).to(s))).clamp(min=0) for g in generators]
        self.s = nn.Parameter(torch.stack(values).to(weight))
        self.bias = None
        if layer.bias is not None:
            noise = [torch.randn(len(layer.bias), generator=g) for g in generators]
            self.bias = nn.Parameter(layer.bias.detach() + std * torch.stack(noise).to(weight))

    def forward(self, x: Tensor) -> Tensor:
        rows, s = self.unfold(x), self.s[self.active, None].clamp(min=0)
        bias = None if self.bias is None else self.bias[self.active, None]

        def factored() -> Tensor:
            y = F.linear((rows @ self.v) * s, self.u)
            return y if bias is None else y + bias

        def built() -> Tensor:
            weight = (self.u * s) @ self.v.mT  # [members, out, in]
            return rows @ weight.mT if bias is None else torch.baddbmm(bias, rows, weight.mT)

        ways = {"factored": factored, "built": built}
        shape = (len(rows), tuning.octave(rows.shape[1]), *self.v.shape, len(self.u))
        rule = "factored" if self.factored(rows.shape[1]) else "built"
        return ways[tuning.choose("singular values", shape, x, ways, rule)]().view(*x.shape[:-1], -1)

    def factored(self, rows: int) -> bool:
        """Whether two products per row cost less than building every member's weight and one product per row.

        A backward pass costs the former as much again, because it has no weight gradient, and the latter twice as much.
        Building, which writes the weights too, was measured at 1.5 times its arithmetic.
        """
        (out_features, k), in_features = self.u.shape, self.v.shape[0]
        factors, weights = (2, 3) if torch.is_grad_enabled() and self.s.requires_grad else (1, 1)
        product = out_features * in_features
        return factors * rows * k * (in_features + out_features) <= weights * product * (1.5 * k + rows)

    def member_weight(self, index: int) -> Tensor:
        return (self.u * self.s.detach()[index].clamp(min=0)) @ self.v.mT


def singular_value(
    backbone: nn.Module,
    members: int | str | range,
    *,
    target: str | None = None,
    init_std: float = 0.01,
    classifiers: Classifiers = "independent",
    seed: int = 0,
    heads: Classifiers | None = None,
) -> FoldedEnsemble:
    """Singular value ensemble: U diag(s_m) V^T in every target layer, U and V frozen (Turkoglu et al. 2026).

    init_std: the members start from s_m = S (1 + init_std * noise) and biases b + init_std * noise. Their own
        classifiers start from Normal weights of standard deviation 0.01 and zero biases.
    target: a regular expression on module names; None for every linear layer but the classifier.

    The rest is as in `lora`. Raises ValueError for init_std < 0, and the errors of `lora`.
    """
    make = lambda _, layer, generators: SVDLinear(layer, init_std, generators)  # noqa: E731
    recipe = {"method": "singular_value", "init_std": init_std}
    classifiers = heads or classifiers
    return implicit(backbone, members, target, classifiers, seed, make, recipe, everywhere=True, classifier_std=0.01)
