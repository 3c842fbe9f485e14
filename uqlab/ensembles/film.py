"""FiLM-Ensemble: every member scales and shifts normalised features in its own way."""

from typing import Any

import torch
from torch import nn

from uqlab.core.checks import Target, within
from uqlab.ensembles.base import Ensemble, Members
from uqlab.ensembles.functional import Own
from uqlab.ensembles.implicit import (
    STATISTICS,
    Classifiers,
    Site,
    implicit,
    normal,
    put,
)
from uqlab.ensembles.recipes import recorded


class NormSite(Site):
    """A norm whose scale and shift may be the members' own."""

    @property
    def name(self):
        """The norm's own name, by which targets know it."""
        return self.holder

    @property
    def usual(self):
        """Every norm is taken without being named."""
        return True


class Shifted(nn.Module):
    """A normalisation without a bias, such as RMSNorm, and a shift."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm = norm
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
        for name in (site.parameter, "bias"):
            p = site.module.get_parameter(name).detach()
            sees[name] = Own(p + normal(p, p.shape, std, generator).to(p))
        for name, buffer in site.module.named_buffers():
            if name.rpartition(".")[2] in STATISTICS:
                sees[name] = Own(buffer.clone(), trained=False)
        return sees

    return implicit(
        backbone,
        members,
        make,
        target=target,
        classifiers=classifiers,
        classifier=classifier,
        seed=seed,
        find=norms,
        called="normalisation",
        train_backbone=train_backbone,
    )


def norms(network: nn.Module) -> list[Site]:
    """Find a network's norms; one without a bias is given one, in place."""
    places = []
    for name, module in list(network.named_modules()):
        if not name or not is_norm(module):
            continue
        parameter = "weight"
        if getattr(module, "bias", None) is None:
            module, parameter = Shifted(module).train(module.training), "norm.weight"
            put(network, name, module)
        places.append(NormSite(name, parameter, module))
    return places


def is_norm(module: Any) -> bool:
    """Return whether a module scales each feature, and has something like an eps."""
    weight = getattr(module, "weight", None)
    scales = isinstance(weight, nn.Parameter) and (
        weight.ndim == 1 or isinstance(module, nn.LayerNorm)
    )
    return scales and (hasattr(module, "eps") or hasattr(module, "variance_epsilon"))
