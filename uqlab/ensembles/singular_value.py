"""Singular value ensemble: singular values of each member's own, frozen directions."""

import math

import torch
from torch import Tensor, nn

from uqlab.core.checks import within
from uqlab.ensembles.base import FoldedEnsemble, Members
from uqlab.ensembles.implicit import Classifiers, implicit, normal
from uqlab.ensembles.members import MemberParameter, Own


class SingularValues(MemberParameter):
    """U diag(max(s_m, 0)) V^T, with U and V frozen.

    u [out, k] and v [width, k] are the singular vectors of the weight W as a matrix,
    s [members, moving] the largest values, those that members have of their own, and
    rest [k - moving] the others.
    """

    low_rank = True
    u: Tensor
    v: Tensor
    rest: Tensor

    def __init__(
        self,
        w: nn.Parameter,
        std: float,
        generators: list[torch.Generator],
        share: float = 1.0,
    ):
        super().__init__(w, len(generators))
        u, s, vh = torch.linalg.svd(self.matrix().detach().float(), full_matrices=False)
        self.register_buffer("u", u.to(w))
        self.register_buffer("v", vh.mT.contiguous().to(w))
        moving = math.ceil(share * len(s))
        start = s * (1 + normal(s, s.shape, std, generators))
        self.s = nn.Parameter(start[:, :moving].clamp(min=0).to(w))
        self.register_buffer("rest", s[moving:].to(w))
        self.depth = len(s)
        self.frozen_work = self.depth * (len(u) + len(self.v))

    def values(self, rows=slice(None)) -> Tensor:
        """Return the singular values of some members [members, k]."""
        s = self.s[rows].clamp(min=0)
        return torch.cat([s, self.rest.expand(len(s), -1)], 1) if len(self.rest) else s

    def weights(self, rows=slice(None)):
        """Return the products of some members [members, ...]."""
        s = self.values(rows)[:, None]
        return ((self.u * s) @ self.v.mT).view(len(s), *self.w.shape)

    def product(self, x, form, rows):
        """Multiply by V^T once for all members, scale, and multiply by U."""
        seen = form.shared(x, self.v.mT)
        return form.mixed(form.scaled(seen, self.values(rows)), self.u[None])


def singular_value(
    backbone: nn.Module,
    members: Members,
    *,
    target: str | None = None,
    init_std: float = 0.01,
    share: float = 1.0,
    classifiers: Classifiers = "independent",
    classifier: str | None = None,
    seed: int = 0,
) -> FoldedEnsemble:
    """Make a singular value ensemble: U diag(s_m) V^T for every target weight.

    Parameters
    ----------
    backbone, members, classifiers, classifier, seed
        As in `lora`.
    target : str, optional
        A regular expression as in `lora`. None for every matrix before the classifier
        and, in a network without attention, the convolutions too, whose kernels are
        matrices of patches.
    init_std : float
        The members start from s_m = max(S (1 + init_std * noise), 0) and biases
        b + init_std * noise. Their own classifiers start from Normal weights of
        deviation 0.01 and zero biases.
    share : float
        Of every matrix's singular values this share, the largest ones, are the
        members' own, rounded up; the others stay those of the backbone. The paper
        has 1.

    Returns
    -------
    FoldedEnsemble

    Raises
    ------
    ValueError, TypeError
        For a negative init_std, a share outside (0, 1], and as `lora`.

    References
    ----------
    Turkoglu et al., "Making foundation models probabilistic via singular value
    ensembles", 2026.
    """
    within("init_std", init_std, "[0, inf)")
    within("share", share, "(0, 1]")

    def make(site, generators):
        parameters: dict[str, MemberParameter] = {
            site.parameter: SingularValues(site.weight, init_std, generators, share)
        }
        if site.bias is not None:
            bias = site.bias.detach()
            noise = normal(bias, bias.shape, init_std, generators)
            parameters[site.bias_name] = Own(nn.Parameter(bias + noise))
        return parameters

    return implicit(
        backbone,
        members,
        make,
        target=target,
        classifiers=classifiers,
        classifier=classifier,
        seed=seed,
        recipe={"method": "singular_value", "init_std": init_std, "share": share},
        everywhere=True,
        classifier_std=0.01,
    )
