"""FiLM-Ensemble: every member scales and shifts normalised features in its own way."""

from typing import Any

import torch
from torch import nn

from uqlab.core.checks import Target, within
from uqlab.ensembles.base import Ensemble, Members
from uqlab.ensembles.functional import Own
from uqlab.ensembles.implicit import (
    Classifiers,
    Site,
    implicit,
    normal,
    own_statistics,
    put,
)
from uqlab.ensembles.recipes import recorded


class _Shifted(nn.Module):
    """A normalisation without a bias, such as RMSNorm, and a shift."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm, self.weight = norm, norm.weight
        zeros = torch.zeros_like(norm.weight)
        self.bias = nn.Parameter(zeros, norm.weight.requires_grad)

    def forward(self, x):
        """Normalise and shift."""
        return self.norm(x) + self.bias


@recorded
def film(
    backbone: nn.Module,
    members: Members,
    *,
    target: Target | None = None,
    std: float = 0.1,
    train_backbone: bool = True,
    classifiers: Classifiers = "shared",
    classifier: str | None = None,
    seed: int = 0,
) -> Ensemble:
    """Make a FiLM-Ensemble: gamma_m * norm(x) + beta_m at every norm, the rest shared.

    Parameters
    ----------
    backbone, members, classifier, seed
        As in `lora`.
    target : str or sequence of str, optional
        A regular expression on the names of norms; None for all that scale what they
        normalise: torch's, and others with a weight for each feature, such as RMSNorm.
    std : float
        gamma and beta start as the backbone's plus std * Normal noise. The paper draws
        them uniformly, with a gain that it tunes.
    train_backbone : bool
        Whether the shared weights, which are then copied, are trained by all members
        too, as in the paper.
    classifiers : {"shared", "independent"}
        "shared" as in the paper, or "independent" as in `lora`.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError, TypeError
        For a network without such norms, a negative std, and as `lora`.

    Notes
    -----
    A BatchNorm has running statistics of the member's own, in training the statistics
    of the member's own batch. On transformers the authors found the method weak
    (Muhlematter et al. 2024, appendix V).

    References
    ----------
    Turkoglu et al., "FiLM-Ensemble: Probabilistic deep learning via feature-wise linear
    modulation", 2022.
    """
    within("std", std, "[0, inf)")

    def make(site, generator):
        sees = {}
        for name, p in (("weight", site.weight), ("bias", site.bias)):
            noise = normal(p, p.shape, std, generator).to(p)
            sees[name] = Own(p.detach() + noise)
        statistics = own_statistics(site.module, 1)
        return sees | {name: own for name, [own] in statistics.items()}

    return implicit(
        backbone,
        members,
        make,
        target=target,
        classifiers=classifiers,
        classifier=classifier,
        seed=seed,
        find=_norms,
        called="normalisation",
        train_backbone=train_backbone,
    )


def _norms(network):
    """Find a network's norms; one without a bias is given one, in place."""
    places = []
    for name, module in list(network.named_modules()):
        if not name or not _is_norm(module):
            continue
        if getattr(module, "bias", None) is None:
            module = _Shifted(module).train(module.training)
            put(network, name, module)
        places.append(Site(name, "weight", module))
    return places


def _is_norm(module):
    """Return whether a module scales each feature, and has something like an eps."""
    weight = getattr(module, "weight", None)
    scales = isinstance(weight, nn.Parameter) and (
        weight.ndim == 1 or isinstance(module, nn.LayerNorm)
    )
    return scales and (hasattr(module, "eps") or hasattr(module, "variance_epsilon"))
