"""FiLM-Ensemble: every member scales and shifts the normalised features in its own way (Turkoglu et al. 2022)."""

from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import one_network
from uqlab.ensembles.base import FoldedEnsemble
from uqlab.ensembles.implicit import (
    Classifiers,
    Site,
    has_statistics,
    implicit,
    repeated_statistics,
)
from uqlab.ensembles.members import MemberParameter, Own


class NormSite(Site):
    """A norm whose scale and shift may be the members' own; targets know it by its own name."""

    @property
    def name(self) -> str:
        return self.holder


class Shifted(nn.Module):
    """A normalisation without a bias, such as RMSNorm, and a shift."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm = norm
        self.bias = nn.Parameter(
            torch.zeros_like(norm.weight), norm.weight.requires_grad
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.bias


def film(
    backbone: nn.Module,
    members: int | str | range,
    *,
    target: str | None = None,
    std: float = 0.1,
    train_backbone: bool = True,
    classifiers: Classifiers = "shared",
    seed: int = 0,
) -> FoldedEnsemble:
    """Make a FiLM-Ensemble: gamma_m * norm(x) + beta_m at every normalisation, the rest is shared.

    Parameters
    ----------
    backbone, members, seed
        As in `lora`.
    target : str, optional
        A regular expression on the names of norms; None for all that scale what they normalise: torch's, and others
        with a weight for each feature, such as RMSNorm.
    std : float
        gamma and beta start as the backbone's plus std * Normal noise. The paper draws them uniformly, with a gain
        that it tunes.
    train_backbone : bool
        Whether the shared weights, which are then copied, are trained by all members too, as in the paper.
    classifiers : {"shared", "independent"}
        "shared" as in the paper, or "independent" as in `lora`.

    Returns
    -------
    FoldedEnsemble

    Raises
    ------
    ValueError, TypeError
        For a network without such norms, a negative std, and as `lora`.

    Notes
    -----
    A BatchNorm has running statistics of the member's own, in training the statistics of the member's own batch. On
    transformers the authors found the method weak (Muhlematter et al. 2024, appendix V).

    References
    ----------
    Turkoglu et al., "FiLM-Ensemble: Probabilistic deep learning via feature-wise linear modulation", 2022.
    """
    one_network(backbone, "film")
    if not any(is_norm(part) for part in backbone.modules()):
        kind = type(backbone).__name__
        raise ValueError(
            f"film needs layers that normalise, such as BatchNorm or LayerNorm; {kind} has none"
        )

    def norms(network: nn.Module) -> list[Site]:
        found = []
        for name, part in list(network.named_modules()):
            if name and is_norm(part):
                if getattr(part, "bias", None) is None:
                    network.set_submodule(
                        name, part := Shifted(part).train(part.training)
                    )
                weight = "norm.weight" if isinstance(part, Shifted) else "weight"
                found.append(NormSite(name, weight, part))
        return found

    def make(
        site: Site, generators: list[torch.Generator]
    ) -> dict[str, MemberParameter]:
        norm = site.module.norm if isinstance(site.module, Shifted) else site.module
        starts = {site.parameter: site.weight, "bias": site.module.bias}
        changed: dict[str, list[Tensor]] = {name: [] for name in starts}
        for generator in generators:
            for name, p in starts.items():
                changed[name].append(
                    p.detach() + std * torch.randn(p.shape, generator=generator).to(p)
                )
        own: dict[str, MemberParameter] = {
            name: Own(nn.Parameter(torch.stack(each))) for name, each in changed.items()
        }
        statistics = (
            repeated_statistics(norm, len(generators)) if has_statistics(norm) else {}
        )
        before = site.parameter.removesuffix("weight")
        return own | {f"{before}{name}": value for name, value in statistics.items()}

    recipe = {"method": "film", "std": std, "train_backbone": train_backbone}
    how = {"target": target, "classifiers": classifiers, "seed": seed, "recipe": recipe}
    more = {"find": norms, "called": "normalisation", "train_backbone": train_backbone}
    return implicit(backbone, members, make, **how, **more)


def is_norm(part: Any) -> bool:
    """Whether a module scales what it has normalised: it has a weight for each feature, and something like an eps."""
    weight = getattr(part, "weight", None)
    scales = isinstance(weight, nn.Parameter) and (
        weight.ndim == 1 or isinstance(part, nn.LayerNorm)
    )
    return scales and any(hasattr(part, name) for name in ("eps", "variance_epsilon"))
