"""Snapshot ensemble: members collected along the training of one network."""

import copy
from collections.abc import Callable

from torch import nn

from uqlab.core.checks import at_least
from uqlab.ensembles.base import Ensemble, SeparateEnsemble
from uqlab.ensembles.deep import deep


def snapshot(
    make_model: Callable[[], nn.Module],
    members: int,
    train: Callable[[Ensemble, int], object],
    seed: int = 0,
) -> SeparateEnsemble:
    """Make a snapshot ensemble: one network trained in cycles, a member at each end.

    Parameters
    ----------
    make_model : callable
        Returns the network.
    members : int
        How many cycles.
    train : callable
        Trains an ensemble of one through cycle 0, 1, ..., each with a learning rate
        that falls to zero; a longer first cycle is the burn-in of Muhlematter et al.
        2024, U::

            cycle = {"epochs": 5, "lr": 0.1, "scheduler": "cosine"}
            def train(one, number):
                training.fit(one, x, y, seed=number, **cycle)
            ensembles.snapshot(make_model, 4, train)
    seed : int
        Of the network's start.

    References
    ----------
    Huang et al., "Snapshot ensembles: train 1, get M for free", 2017.
    """
    at_least("members", members)
    one = deep(make_model, 1, seed)
    networks = []
    for cycle in range(members):
        train(one, cycle)
        networks.append(copy.deepcopy(one.member(0)))
    ensemble = SeparateEnsemble(networks, range(members))
    return ensemble.with_recipe({"method": "snapshot", "seed": seed})
