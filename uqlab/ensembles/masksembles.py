"""Masksembles: every member sees its own fixed part of the features (Durasov et al. 2021)."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from uqlab.core.checks import within
from uqlab.ensembles.base import FoldedEnsemble, member_seed
from uqlab.ensembles.batch_ensemble import Scaled
from uqlab.ensembles.implicit import (
    Site,
    check_backbone,
    chosen,
    is_usual,
    place,
    plain,
    sites,
    trained_together,
)
from uqlab.models import ATTENTION


class MaskedInputs(Scaled):
    """W diag(z_m): a weight that sees the features of a member's mask alone.

    mask [members, features] is 1 or 0 and never changes; W is all members'.
    """

    mask: Tensor
    member_buffers = ("mask",)

    def __init__(self, w: nn.Parameter, mask: Tensor, groups: int = 1):
        super().__init__(w, len(mask), None, None, groups)
        self.register_buffer("mask", mask.to(w))

    def factors(self, rows: slice) -> tuple[None, Tensor]:
        return None, self.mask[rows]

    def start(self) -> None:
        """No member starts from the whole weight."""
        return None


def masksembles(
    backbone: nn.Module,
    members: int | str | range,
    scale: float = 2.0,
    *,
    target: str | None = None,
    of: int | None = None,
    seed: int = 0,
) -> FoldedEnsemble:
    """Make Masksembles: member m sees a fixed part of the features after each activation (Durasov et al. 2021).

    Parameters
    ----------
    backbone : nn.Module
        Any network. All weights, the classifier's too, are trained by all members, so they are copied; batch
        statistics are the members' own.
    members : int, str or range
        As in `lora`.
    scale : float
        S, at least 1. Any two members share 1 / S of their features on average. Each of M members keeps a share
        1 / (S (1 - (1 - 1 / S)^M)) of all features: S = 1 is one network, and for a large S the masks are disjoint.
    target : str, optional
        A regular expression on the names of layers whose inputs are masked. None for all but the first or, in a
        transformer, for the layers of the MLPs that narrow their inputs, because only those follow an activation.
    of : int, optional
        M, the members of the whole ensemble, which shards must give; None for as many as `members` counts.
    seed : int
        The mask of member m depends on (seed, m, of) alone.

    Returns
    -------
    FoldedEnsemble

    Raises
    ------
    ValueError
        For a scale below 1, a network without such layers, fewer members in all than there are, and as `lora`.
    TypeError
        For what is no network.

    References
    ----------
    Durasov, Bagautdinov, Baque, Fua, "Masksembles for uncertainty estimation", 2021.
    """
    ids = check_backbone(backbone, members)
    within("scale", scale, "[1, inf)")
    whole = max(ids) + 1 if of is None else of
    if max(ids) >= whole:
        raise ValueError(
            f"of counts the members of the whole ensemble, so it must be above {max(ids)}, got {of}"
        )
    network = plain(backbone, trained=True)
    found = [site for site in sites(network) if is_usual(site)]
    products = [site for site in found if site.parameter == "weight" and site.holder]
    where = (
        _after_activations(found)
        if target is None
        else chosen(products, target, is_usual, "layer")
    )
    if not where:
        kind = type(backbone).__name__
        raise ValueError(
            f"masksembles masks what layers see after an activation, and {kind} has no such layer"
        )
    own = {}
    for number, site in enumerate(where):
        groups = getattr(site.module, "groups", 1)
        drawn = masks(site.weight.shape[1] * groups, scale, whole, seed, number)
        own[site.holder] = {
            site.parameter: MaskedInputs(site.weight, drawn[list(ids)], groups)
        }
    place(network, own)
    recipe = {
        "method": "masksembles",
        "scale": scale,
        "target": target,
        "of": whole,
        "seed": seed,
    }
    return trained_together(network, ids, recipe)


def _after_activations(found: Sequence[Site]) -> list[Site]:
    """The layers whose inputs are masked: all but the first; in a transformer those that narrow the MLP's features."""
    later = [
        site
        for site in found
        if site.holder and site.holder != found[0].holder and site.parameter == "weight"
    ]
    if not any(re.search(ATTENTION, site.name) for site in found):
        return later
    inside = [
        site
        for site in later[:-1]
        if site.weight.ndim == 2 and not re.search(ATTENTION, site.name)
    ]
    return (
        [site for site in inside if site.weight.shape[1] > site.weight.shape[0]]
        or inside
        or later
    )


def masks(
    features: int, scale: float, members: int, seed: int = 0, number: int = 0
) -> Tensor:
    """Draw the masks [members, features] of one layer, as Durasov et al. do.

    Each member chooses the same number of `scale` times as many places, and places that nobody chose are left out. It
    is drawn anew until `features` places remain.

    Examples
    --------
    >>> drawn = masks(64, 2.0, 3)
    >>> int(drawn[0].sum()), bool((drawn.sum(0) > 0).all())
    (37, True)
    """
    share = 1 / (scale * (1 - (1 - 1 / scale) ** members)) if scale > 1 else 1.0
    wanted = max(1, round(features * share))
    for attempt in range(1000):
        kept = min(
            features, wanted + attempt // 100
        )  # few features may allow no exact share
        places = max(kept, round(kept * scale)) if kept < features else features
        drawn = torch.zeros(members, places)
        for m, mask in enumerate(drawn):
            generator = torch.Generator().manual_seed(
                member_seed(seed, m, "masks", number, attempt)
            )
            mask[torch.randperm(places, generator=generator)[:kept]] = 1
        used = drawn[:, drawn.any(0)]
        if used.shape[1] == features:
            return used
    return torch.ones(members, features)
