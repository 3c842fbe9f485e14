"""Shards of an ensemble, made and trained apart, and put together."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from uqlab.core.files import fingerprint
from uqlab.ensembles.base import Ensemble, OneNetwork, SeparateEnsemble


def concatenate(shards: Sequence[Ensemble]) -> Any:
    """Make one ensemble of shards that were made and perhaps trained apart.

    What is the members' own is copied.
    `concatenate([deep(make, range(4), seed), deep(make, range(4, 9), seed)])` is
    `deep(make, 9, seed)`, before and after `fit`.

    Parameters
    ----------
    shards : sequence of Ensemble
        Of one method, settings and seed.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError
        For no shards, numbers that overlap or leave a gap, shards of different kinds,
        architectures or recipes, and shared weights that differ because they were
        trained apart.
    TypeError
        If the members cannot be separated.
    """
    if not shards:
        raise ValueError("concatenate needs at least one shard, got an empty list")
    ordered, members = _in_order(shards)
    first = ordered[0]
    if any(_described(shard) != _described(first) for shard in ordered):
        raise ValueError(
            "shards must be of one ensemble: equal architecture, method, settings and "
            "seed, and equal weights which all members share: train the ensemble as a "
            "whole"
        )
    if isinstance(first, SeparateEnsemble):
        models = [model for shard in ordered for model in shard.network]
        whole: Any = type(first)(copy.deepcopy(models), members)
    else:
        whole = copy.deepcopy(first)
        whole.member_ids = members
        for name, part in whole.seen.items():
            parts = [each.seen[name].stacked() for each in ordered]
            for key, t in part.stacked().items():
                t.data = torch.cat([each[key].detach() for each in parts])
    return whole.with_recipe(first.recipe).train(first.training)


def _in_order(shards):
    """Return the shards and their members in order, or raise."""
    for shard in shards:
        if not isinstance(shard, Ensemble) or isinstance(shard, OneNetwork):
            raise TypeError(
                "concatenate takes shards of one ensemble whose members are apart, got "
                f"{type(shard).__name__}"
            )
    ordered = sorted(shards, key=lambda shard: shard.member_ids.start)
    ids = list(itertools.chain(*(shard.member_ids for shard in ordered)))
    members = range(ids[0], ids[-1] + 1)
    if ids != list(members):
        raise ValueError(
            f"shards must follow each other without gap or overlap, got members {ids}"
        )
    return ordered, members


def _described(shard):
    """Return what is equal for all shards of an ensemble."""
    own = {name: p.shape for name, p in shard.member(0).named_parameters()}
    common = dict(shard.network.named_parameters())
    if isinstance(shard, SeparateEnsemble):
        common = {}
    read = {name: p for name, p in common.items() if name not in shard.replaced}
    return type(shard), shard.recipe, own, fingerprint(read)
