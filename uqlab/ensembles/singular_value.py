"""Singular value ensemble: singular values of each member's own, frozen directions."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.checks import Target, within
from uqlab.ensembles.base import Ensemble, Members, Own, recorded
from uqlab.ensembles.implicit import Classifiers, implicit


class SingularValues(nn.Module):
    """U diag(max(s, 0)) V^T, what one member sees of W; U and V are frozen.

    u [out, k] and vh [k, in] are the singular vectors of W as a matrix, s [k] the
    member's own values.
    """

    shared = "u", "vh"
    u: Tensor
    vh: Tensor

    def __init__(self, u: Tensor, s: Tensor, vh: Tensor):
        super().__init__()
        self.s = nn.Parameter(s)
        self.register_buffer("u", u, persistent=False)
        self.register_buffer("vh", vh, persistent=False)

    def forward(self, w):
        """Return the product, shaped as W."""
        return ((self.u * self.s.clamp(min=0)) @ self.vh).view(w.shape).to(w.dtype)

    def product(self, x, w, bias):
        """Multiply x by V^T, by the values and by U, without building the weight."""
        seen = F.linear(x.to(self.vh.dtype), self.vh) * self.s.clamp(min=0)
        y = F.linear(seen, self.u).to(x.dtype)
        return y if bias is None else y + bias


@recorded
def singular_value(
    backbone: nn.Module,
    members: Members,
    *,
    target: Target | None = None,
    init_std: float = 0.01,
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

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError, TypeError
        For a negative init_std, and as `lora`.

    References
    ----------
    Turkoglu et al., "Making foundation models probabilistic via singular value
    ensembles", 2026.
    """
    within("init_std", init_std, "[0, inf)")

    @functools.cache  # of the network once, whatever the number of members
    def factors(w):
        matrix = w.detach().flatten(1).to(torch.promote_types(w.dtype, torch.float32))
        return torch.linalg.svd(matrix, full_matrices=False)

    def make(site, generator):
        u, s, vh = factors(site.weight)
        start = s * (1 + site.normal(s.shape, init_std, generator))
        own = SingularValues(u, start.clamp(min=0), vh)
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
