"""FiLM-Ensemble: every member scales and shifts the normalised features in its own way (Turkoglu et al. 2022)."""

import copy
from typing import Any

import torch
from torch import nn

from uqlab.core.checks import one_network
from uqlab.ensembles.base import FoldedEnsemble
from uqlab.ensembles.implicit import Classifiers, implicit
from uqlab.ensembles.norms import MemberBatchNorm, MemberLayerNorm, has_statistics


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
    """FiLM-Ensemble: gamma_m * norm(x) + beta_m after every normalisation, the rest is shared (Turkoglu et al. 2022).

    std: gamma and beta start as the backbone's plus std * Normal noise. The paper draws them uniformly, with a gain
        that it tunes.
    train_backbone: whether the shared weights, which are then copied, are trained by all members too, as in the paper.
    classifiers: "shared" as in the paper, or "independent" as in `lora`.
    target: a regular expression on the names of BatchNorm and LayerNorm layers; None for all of them.

    A BatchNorm has running statistics of the member's own, in training the statistics of the member's own batch. On
    transformers, whose norms are LayerNorms, the authors found the method weak (Muhlematter et al. 2024, appendix V).
    Raises ValueError for a network without such layers and std < 0, and as `lora`.
    """
    one_network(backbone, "film")
    if not any(_is_norm(part) for part in backbone.modules()):
        raise ValueError(f"film needs BatchNorm or LayerNorm layers; this network has none: {type(backbone).__name__}")

    def make(_: str, norm: Any, generators: list[torch.Generator]) -> MemberBatchNorm | MemberLayerNorm:
        each = [_changed(norm, std, generator) for generator in generators]
        return MemberBatchNorm(each) if has_statistics(norm) else MemberLayerNorm(each)

    return implicit(
        backbone, members, target, classifiers, seed, make,
        {"method": "film", "std": std, "train_backbone": train_backbone}, everywhere=True, fits=_is_norm,
        called="BatchNorm or LayerNorm", train_backbone=train_backbone,
    )  # fmt: skip


def _is_norm(part: nn.Module) -> bool:
    """Whether the layer scales and shifts what it has normalised."""
    return getattr(part, "weight", None) is not None and (has_statistics(part) or isinstance(part, nn.LayerNorm))


def _changed(norm: Any, std: float, generator: torch.Generator) -> Any:
    """A copy of the norm whose weight and bias are a little different, and trained."""
    own = copy.deepcopy(norm).requires_grad_()
    for p in own.parameters():
        p.data += std * torch.randn(p.shape, generator=generator).to(p)
    return own
