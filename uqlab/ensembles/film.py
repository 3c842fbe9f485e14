"""FiLM-Ensemble: every member scales and shifts normalised features in its own way."""

from torch import nn

from uqlab.core.checks import Target, within
from uqlab.ensembles.base import Ensemble, Members, Own, recorded
from uqlab.ensembles.implicit import (
    Classifiers,
    implicit,
    own_statistics,
)


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
    A norm without a bias, such as RMSNorm, is scaled and not shifted. A BatchNorm has
    running statistics of the member's own, in training the statistics of the member's
    own batch. On transformers the authors found the method weak (Muhlematter et al.
    2024, appendix V).

    References
    ----------
    Turkoglu et al., "FiLM-Ensemble: Probabilistic deep learning via feature-wise linear
    modulation", 2022.
    """
    within("std", std, "[0, inf)")

    def make(site, generator):
        sees = {}
        for name, p in site.module.named_parameters(recurse=False):
            if name not in ("weight", "bias"):
                continue
            noise = site.normal(p.shape, std, generator).to(p)
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
        kind=_is_norm,
        called="normalisation",
        train_backbone=train_backbone,
    )


def _is_norm(module):
    """Return whether a module scales each feature, and has something like an eps."""
    weight = getattr(module, "weight", None)
    scales = isinstance(weight, nn.Parameter) and (
        weight.ndim == 1 or isinstance(module, nn.LayerNorm)
    )
    return scales and (hasattr(module, "eps") or hasattr(module, "variance_epsilon"))
