"""BatchEnsemble: one weight times, or plus, an outer product of every member's own (Wen et al. 2020)."""

import math

import torch
from torch import Tensor, nn

from uqlab.ensembles.base import FoldedEnsemble
from uqlab.ensembles.forms import Product
from uqlab.ensembles.implicit import Classifiers, Site, implicit
from uqlab.ensembles.lora import LowRank
from uqlab.ensembles.members import MemberParameter, Own


class Scaled(MemberParameter):
    """W * (r_m s_m^T): outputs of a weight times r_m, its inputs times s_m.

    left r [members, out] and right s [members, in]; None for no factor. A kernel's inputs are its channels.
    """

    def __init__(
        self,
        w: nn.Parameter,
        members: int,
        left: Tensor | None,
        right: Tensor | None,
        groups: int = 1,
    ):
        super().__init__(w, members)
        self.left, self.right, self.groups = left, right, groups
        self.frozen_work = w.numel()

    def factors(self, rows: slice) -> tuple[Tensor | None, Tensor | None]:
        """The factors of some members, [members, out] and [members, in]."""
        left, right = self.left, self.right
        return left if left is None else left[rows], right if right is None else right[
            rows
        ]

    def weight(self, m: int) -> Tensor:
        left, right = self.factors(slice(m, m + 1))
        places = [1] * (self.w.ndim - 2)
        weight = self.w if left is None else self.w * left.view(-1, 1, *places)
        if right is None:
            return weight
        inputs = right.view(
            self.groups, 1, -1, *places
        )  # each group of outputs sees inputs of its own
        return (weight.unflatten(0, (self.groups, -1)) * inputs).flatten(0, 1)

    def product(self, x: Tensor, form: Product, rows: slice) -> Tensor:
        left, right = self.factors(rows)
        x = x if right is None else form.scaled(x, right)
        if left is None:
            return form.shared(x, self.w, biased=True)
        return form.scaled(form.shared(x, self.w), left)


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
    """Make a BatchEnsemble: W * (r_m s_m^T) for every target weight; all members also train W together.

    Parameters
    ----------
    backbone, members, target, classifiers, seed, heads
        As in `lora`. The target weights are trained, so they are copied.
    std : float
        Deviation of r and s, which are Normal around 1 (Muhlematter et al. 2024, I.1).
    additive : bool
        BatchEnsemble++: W + r_m s_m^T, with r and s Normal around 0 (I.2, eq. 12). With W frozen this is LoRA of
        rank 1 that starts from Normal numbers, `lora(backbone, members, 1, std=std)`.

    Returns
    -------
    FoldedEnsemble

    Raises
    ------
    ValueError, TypeError
        As `lora`.

    Notes
    -----
    In a convolution r scales the output channels and s the input channels; with `additive` s is a patch. The members'
    biases are their own. `batch_ensemble` is another name of this function.

    References
    ----------
    Wen, Tran, Ba, "BatchEnsemble", 2020. Muhlematter et al., "LoRA-Ensemble", 2024, appendix I.
    """

    def make(
        site: Site, generators: list[torch.Generator]
    ) -> dict[str, MemberParameter]:
        w = nn.Parameter(site.weight.detach().clone())
        groups = getattr(site.module, "groups", 1)
        inputs = w[0].numel() if additive else w.shape[1] * groups
        left = torch.stack([torch.randn(len(w), generator=g) for g in generators]).to(w)
        right = torch.stack([torch.randn(inputs, generator=g) for g in generators]).to(
            w
        )
        if additive:
            weight = LowRank(w, (std * right)[:, None], (std * left)[:, :, None])
        else:
            factors = nn.Parameter(1 + std * left), nn.Parameter(1 + std * right)
            weight = Scaled(w, len(generators), *factors, groups)
        own: dict[str, MemberParameter] = {site.parameter: weight}
        if site.bias is not None:
            own[site.bias_name] = Own(
                nn.Parameter(torch.stack([site.bias.detach()] * len(generators)))
            )
        return own

    recipe = {"method": "batch", "std": std, "additive": additive}
    kind = heads or classifiers
    return implicit(
        backbone,
        members,
        make,
        target=target,
        classifiers=kind,
        seed=seed,
        recipe=recipe,
    )


batch_ensemble = batch
