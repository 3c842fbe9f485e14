"""BatchEnsemble: one weight times, or plus, an outer product of every member's own."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.checks import Target, within
from uqlab.ensembles.base import Ensemble, Members, Own, recorded
from uqlab.ensembles.implicit import Classifiers, implicit
from uqlab.ensembles.lora import LowRank


class Scaled(nn.Module):
    """W * (r s^T), what one member sees of W: its outputs times r, its inputs times s.

    r [out] and s [in]; a kernel's inputs are its channels. A subclass may compute them
    from other tensors; None for no factor.
    """

    def __init__(self, r: Tensor | None, s: Tensor | None, groups: int = 1):
        super().__init__()
        self.r, self.s = (None if t is None else nn.Parameter(t) for t in (r, s))
        self.groups = groups

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Return r [out] and s [in]."""
        return self.r, self.s

    def forward(self, w):
        """Return the scaled weight, computed in the precision of r and s."""
        r, s = self.factors()
        places, kind = [1] * (w.ndim - 2), w.dtype
        if r is not None:
            w = w * r.view(-1, 1, *places)
        if s is not None:
            # Each group of outputs sees inputs of its own.
            inputs = s.view(self.groups, 1, -1, *places)
            w = (w.unflatten(0, (self.groups, -1)) * inputs).flatten(0, 1)
        return w.to(kind)

    def product(self, x, w, bias):
        """Scale the inputs, multiply by W, scale the outputs."""
        r, s = self.factors()
        y = F.linear(x if s is None else (x * s).to(x.dtype), w)
        y = (y if r is None else y * r).to(y.dtype)
        return y if bias is None else y + bias


@recorded
def batch(
    backbone: nn.Module,
    members: Members,
    *,
    target: Target | None = None,
    std: float = math.sqrt(0.02),
    additive: bool = False,
    classifiers: Classifiers = "independent",
    classifier: str | None = None,
    seed: int = 0,
) -> Ensemble:
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
    Ensemble

    Raises
    ------
    ValueError, TypeError
        As `lora`.

    Notes
    -----
    In a convolution r scales the output channels and s the input channels; with
    `additive` s is a patch. The members' biases are their own.

    References
    ----------
    Wen, Tran, Ba, "BatchEnsemble", 2020. Muhlematter et al., "LoRA-Ensemble", 2024,
    appendix I.
    """
    within("std", std, "[0, inf)")

    def make(site, generator):
        if not site.weight.requires_grad:  # a copy, which all members train
            site.weight.data = site.weight.detach().clone()
            site.weight.requires_grad_()
        w = site.weight.detach()
        if additive:
            up = site.normal((len(w), 1), std, generator)
            own = LowRank(site.normal((1, w[0].numel()), std, generator), up)
        else:
            groups = getattr(site.module, "groups", 1)
            r = 1 + site.normal((len(w),), std, generator)
            s = 1 + site.normal((w.shape[1] * groups,), std, generator)
            own = Scaled(r, s, groups)
        if site.bias is None:
            return own
        return {site.parameter: own, site.bias_name: Own(site.bias.detach().clone())}

    return implicit(
        backbone,
        members,
        make,
        target=target,
        classifiers=classifiers,
        classifier=classifier,
        seed=seed,
    )
