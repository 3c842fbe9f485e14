"""Singular value ensemble: singular values of each member's own, frozen directions."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.checks import Target, within
from uqlab.ensembles.base import Ensemble, Members, Own, recorded
from uqlab.ensembles.implicit import Classifiers, implicit


class SingularValues(nn.Module):
    """U diag(max(s, 0)) V^T, what one member sees of W; U and V are frozen.

    u [out, k] and vh [k, in] are the singular vectors of W as a matrix, s [moving] the
    largest values, those of the member's own, and rest [k - moving] the others.
    """

    shared = "u", "vh", "rest"
    u: Tensor
    vh: Tensor
    rest: Tensor

    def __init__(self, u: Tensor, s: Tensor, vh: Tensor, rest: Tensor):
        super().__init__()
        self.s = nn.Parameter(s)
        for name, t in zip(self.shared, (u, vh, rest), strict=True):
            self.register_buffer(name, t)

    def values(self):
        """Return all singular values [k]."""
        return torch.cat([self.s.clamp(min=0), self.rest])

    def forward(self, w):
        """Return the product, shaped as W."""
        return ((self.u * self.values()) @ self.vh).view(w.shape).to(w.dtype)

    def product(self, x, w, bias):
        """Multiply x by V^T, by the values and by U, without building the weight."""
        seen = F.linear(x.to(self.vh.dtype), self.vh) * self.values()
        y = F.linear(seen, self.u).to(x.dtype)
        return y if bias is None else y + bias


@recorded
def singular_value(
    backbone: nn.Module,
    members: Members,
    *,
    target: Target | None = None,
    init_std: float = 0.01,
    share: float = 1.0,
    classifiers: Classifiers = "independent",
    classifier: str | None = None,
    seed: int = 0,
) -> Ensemble:
    """Make a singular value ensemble: U diag(s_m) V^T for every target weight.

    Parameters
    ----------
    backbone, members, classifiers, classifier, seed
        As in `lora`.
    target : str or sequence of str, optional
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
    Ensemble

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

    @functools.cache  # of the network once, whatever the number of members
    def factors(w):
        matrix = w.detach().flatten(1).to(torch.promote_types(w.dtype, torch.float32))
        return torch.linalg.svd(matrix, full_matrices=False)

    def make(site, generator):
        u, s, vh = factors(site.weight)
        start = s * (1 + site.normal(s.shape, init_std, generator))
        moving = math.ceil(share * len(s))
        own = SingularValues(u, start[:moving].clamp(min=0), vh, s[moving:])
        if site.bias is None:
            return own
        bias = site.bias.detach()
        noise = site.normal(bias.shape, init_std, generator).to(bias)
        return {site.parameter: own, site.bias_name: Own(bias + noise)}

    return implicit(
        backbone,
        members,
        make,
        target=target,
        classifiers=classifiers,
        classifier=classifier,
        seed=seed,
        everywhere=True,
        classifier_std=0.01,
    )
