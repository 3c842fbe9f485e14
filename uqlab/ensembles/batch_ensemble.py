"""BatchEnsemble: one weight times, or plus, an outer product of every member's own."""

import math

import torch
from torch import Tensor, nn

from uqlab.core.checks import within
from uqlab.ensembles.base import FoldedEnsemble, Members
from uqlab.ensembles.implicit import Classifiers, implicit, normal
from uqlab.ensembles.lora import LowRank, start_normal
from uqlab.ensembles.members import MemberParameter, Own


class Scaled(MemberParameter):
    """W * (r_m s_m^T): outputs of a weight times r_m, its inputs times s_m.

    left r [members, out] and right s [members, in]; None for no factor. A kernel's
    inputs are its channels.
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
        """Return the factors of some members, [members, out] and [members, in]."""
        left = None if self.left is None else self.left[rows]
        right = None if self.right is None else self.right[rows]
        return left, right

    def weight(self, m):
        """Return the scaled weight, shaped as the parameter."""
        left, right = self.factors(slice(m, m + 1))
        places = [1] * (self.w.ndim - 2)
        weight = self.w if left is None else self.w * left.view(-1, 1, *places)
        if right is None:
            return weight
        # each group of outputs sees inputs of its own
        inputs = right.view(self.groups, 1, -1, *places)
        return (weight.unflatten(0, (self.groups, -1)) * inputs).flatten(0, 1)

    def product(self, x, form, rows):
        """Scale the inputs, multiply by W once for all members, scale the outputs."""
        left, right = self.factors(rows)
        x = x if right is None else form.scaled(x, right)
        if left is None:
            return form.shared(x, self.w, biased=True)
        return form.scaled(form.shared(x, self.w), left)


def batch(
    backbone: nn.Module,
    members: Members,
    *,
    target: str | None = None,
    std: float = math.sqrt(0.02),
    additive: bool = False,
    classifiers: Classifiers = "independent",
    classifier: str | None = None,
    seed: int = 0,
) -> FoldedEnsemble:
    """Make a BatchEnsemble: W * (r_m s_m^T) for every target weight.

    Parameters
    ----------
    backbone, members, target, classifiers, classifier, seed
        As in `lora`. All members also train the target weights, so they are copied.
    std : float
        Deviation of r and s, which are Normal around 1 (Muhlematter et al. 2024, I.1).
    additive : bool
        BatchEnsemble++: W + r_m s_m^T, with r and s Normal around 0 (I.2, eq. 12). With
        W frozen this is LoRA of rank 1 that starts from Normal numbers,
        `lora(backbone, members, 1, std=std)`.

    Returns
    -------
    FoldedEnsemble

    Raises
    ------
    ValueError, TypeError
        As `lora`.

    Notes
    -----
    In a convolution r scales the output channels and s the input channels; with
    `additive` s is a patch. The members' biases are their own. `batch_ensemble` is
    another name of this function.

    References
    ----------
    Wen, Tran, Ba, "BatchEnsemble", 2020. Muhlematter et al., "LoRA-Ensemble", 2024,
    appendix I.
    """
    within("std", std, "[0, inf)")

    def make(site, generators):
        w = nn.Parameter(site.weight.detach().clone())
        if additive:
            weight = LowRank(w, *start_normal(w, 1, std, generators))
        else:
            groups = getattr(site.module, "groups", 1)
            weight = _around_one(w, groups, std, generators)
        parameters: dict[str, MemberParameter] = {site.parameter: weight}
        if site.bias is not None:
            biases = torch.stack([site.bias.detach()] * len(generators))
            parameters[site.bias_name] = Own(nn.Parameter(biases))
        return parameters

    return implicit(
        backbone,
        members,
        make,
        target=target,
        classifiers=classifiers,
        classifier=classifier,
        seed=seed,
        recipe={"method": "batch", "std": std, "additive": additive},
    )


def _around_one(w: nn.Parameter, groups: int, std: float, generators) -> Scaled:
    """Return W * (r_m s_m^T) with r and s Normal around 1."""
    left = 1 + normal(w, (len(w),), std, generators)
    right = 1 + normal(w, (w.shape[1] * groups,), std, generators)
    factors = nn.Parameter(left), nn.Parameter(right)
    return Scaled(w, len(generators), *factors, groups)


batch_ensemble = batch
