"""Masksembles: every member sees its own fixed part of the features."""

import re

import torch
from torch import Tensor, nn

from uqlab.core.checks import Target, at_least, pattern_of, within
from uqlab.ensembles.base import (
    Ensemble,
    Members,
    member_generators,
    member_range,
    recorded,
)
from uqlab.ensembles.batch_ensemble import Scaled
from uqlab.ensembles.implicit import (
    own_statistics,
    plain,
    sites,
)


class _MaskedInputs(Scaled):
    """W diag(z), what one member sees of W: the features of its mask z [in] alone."""

    mask: Tensor

    def __init__(self, mask, groups):
        super().__init__(None, None, groups)
        self.register_buffer("mask", mask)

    def factors(self):
        """Return no factor of the outputs, and the mask of the inputs."""
        return None, self.mask


@recorded
def masksembles(
    backbone: nn.Module,
    members: Members,
    scale: float = 2.0,
    *,
    target: Target | None = None,
    total_members: int | None = None,
    seed: int = 0,
) -> Ensemble:
    """Make Masksembles: member m sees a fixed part of what follows each activation.

    Parameters
    ----------
    backbone : nn.Module
        Any network. All weights, the classifier's too, are trained by all members, so
        they are copied; batch statistics are the members' own.
    members : int or range
        As in `lora`.
    scale : float
        S, at least 1. Any two members share 1 / S of their features on average. Each of
        M members keeps a share 1 / (S (1 - (1 - 1 / S)^M)) of all features: S = 1 is
        one network, and for a large S the masks are disjoint.
    target : str or sequence of str, optional
        A regular expression on the names of layers whose inputs are masked. None for
        all but the first or, in a transformer, for the layers of the MLPs that narrow
        their inputs, because only those follow an activation.
    total_members : int, optional
        M, the members of the whole ensemble, which shards must give; None for as many
        as `members` counts.
    seed : int
        The mask of member m depends on (seed, m, total_members) alone.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError
        For a scale below 1, a network without such layers, fewer members in all than
        there are, and as `lora`.
    TypeError
        If `backbone` is not a network.

    References
    ----------
    Durasov, Bagautdinov, Baque, Fua, "Masksembles for uncertainty estimation", 2021.
    """
    ids = member_range(members)
    within("scale", scale, "[1, inf)")
    whole = at_least("total_members", total_members or max(ids) + 1, max(ids) + 1)
    network = plain(backbone, trained=True)
    sees: dict = own_statistics(network, len(ids))
    masked = _masked(network, target)
    usual = [site.holder for site in sites(network) if site.usual]
    for number, site in enumerate(masked):
        groups = getattr(site.module, "groups", 1)
        drawn = _masks(site.weight.shape[1] * groups, scale, whole, seed, number)
        own = drawn[list(ids)].to(site.weight)
        sees[site.of(site.parameter)] = [_MaskedInputs(mask, groups) for mask in own]
    ensemble = Ensemble(network, ids, sees)
    ensemble.ordered = usual if target is None else []
    return ensemble


def _masked(network, target):
    """Return the layers whose inputs are masked, or raise ValueError."""
    usual = [site for site in sites(network) if site.usual]
    products = [site for site in usual if site.parameter == "weight" and site.holder]
    masked = [site for site in products if site.holder != usual[0].holder]
    if target is not None:
        pattern = pattern_of(target)
        masked = [site for site in products if re.search(pattern, site.name)]
    elif any(site.attention for site in usual):
        inside = [s for s in masked[:-1] if s.weight.ndim == 2 and not s.attention]
        narrowing = [s for s in inside if s.weight.shape[1] > s.weight.shape[0]]
        masked = narrowing or inside or masked
    if not masked:
        raise ValueError(
            "masksembles masks what layers see after an activation, and "
            f"{type(network).__name__} has no such layer, target {target!r}"
        )
    return masked


def _masks(features, scale, members, seed, number):
    """Draw the masks [members, features] of one layer, as Durasov et al. do.

    Each member chooses the same number of `scale` times as many places, and places that
    nobody chose are left out. It is drawn anew until `features` places remain.
    """
    share = 1 / (scale * (1 - (1 - 1 / scale) ** members))
    wanted = max(1, round(features * share))
    for attempt in range(1000):
        # few features may allow no exact share
        ones = min(features, wanted + attempt // 100)
        places = round(ones * scale) if ones < features else features
        generators = member_generators(seed, range(members), "masks", number, attempt)
        orders = [torch.randperm(places, generator=g)[:ones] for g in generators]
        drawn = torch.zeros(members, places).scatter_(1, torch.stack(orders), 1.0)
        used = drawn[:, drawn.any(0)]
        if used.shape[1] == features:
            return used
    return torch.ones(members, features)
