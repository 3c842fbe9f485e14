"""Singular value ensemble: singular values of every member's own, frozen directions (Turkoglu et al. 2026)."""

import torch
from torch import Tensor, nn

from uqlab.ensembles.base import FoldedEnsemble
from uqlab.ensembles.forms import Product
from uqlab.ensembles.implicit import Classifiers, Site, implicit
from uqlab.ensembles.members import MemberParameter, Own


class SingularValues(MemberParameter):
    """U diag(max(s_m, 0)) V^T, with U and V frozen.

    u [out, k] and v [width, k] are the singular vectors of the weight W as a matrix, s [members, k].
    """

    low_rank = True
    u: Tensor
    v: Tensor

    def __init__(self, w: nn.Parameter, std: float, generators: list[torch.Generator]):
        super().__init__(w, len(generators))
        u, s, vh = torch.linalg.svd(self.matrix().detach().float(), full_matrices=False)
        self.register_buffer("u", u.to(w))
        self.register_buffer("v", vh.mT.contiguous().to(w))
        values = [
            (s * (1 + std * torch.randn(len(s), generator=g).to(s))).clamp(min=0)
            for g in generators
        ]
        self.s = nn.Parameter(torch.stack(values).to(w))
        self.depth = len(s)
        self.frozen_work = self.depth * (len(u) + len(self.v))

    def weight(self, m: int) -> Tensor:
        return ((self.u * self.s[m].clamp(min=0)) @ self.v.mT).view(self.w.shape)

    def weights(self, rows: slice = slice(None)) -> Tensor:
        s = self.s[rows, None].clamp(min=0)
        return ((self.u * s) @ self.v.mT).view(len(s), *self.w.shape)

    def product(self, x: Tensor, form: Product, rows: slice) -> Tensor:
        seen = form.shared(x, self.v.mT)  # once for all members
        return form.mixed(form.scaled(seen, self.s[rows].clamp(min=0)), self.u[None])


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
    """Make a singular value ensemble: U diag(s_m) V^T for every target weight, U and V frozen.

    Parameters
    ----------
    backbone, members, classifiers, seed, heads
        As in `lora`.
    target : str, optional
        A regular expression as in `lora`. None for every matrix before the classifier and, in a network without
        attention, the convolutions too, whose kernels are matrices of patches.
    init_std : float
        The members start from s_m = max(S (1 + init_std * noise), 0) and biases b + init_std * noise. Their own
        classifiers start from Normal weights of deviation 0.01 and zero biases.

    Returns
    -------
    FoldedEnsemble

    Raises
    ------
    ValueError, TypeError
        For a negative init_std, and as `lora`.

    References
    ----------
    Turkoglu et al., "Making foundation models probabilistic via singular value ensembles", 2026.
    """

    def make(
        site: Site, generators: list[torch.Generator]
    ) -> dict[str, MemberParameter]:
        own: dict[str, MemberParameter] = {
            site.parameter: SingularValues(site.weight, init_std, generators)
        }
        if site.bias is not None:
            bias = site.bias.detach()
            noise = torch.stack(
                [torch.randn(len(bias), generator=g) for g in generators]
            ).to(bias)
            own[site.bias_name] = Own(nn.Parameter(bias + init_std * noise))
        return own

    recipe = {"method": "singular_value", "init_std": init_std}
    how = {
        "target": target,
        "classifiers": heads or classifiers,
        "seed": seed,
        "recipe": recipe,
    }
    return implicit(
        backbone, members, make, **how, everywhere=True, classifier_std=0.01
    )
