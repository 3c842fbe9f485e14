"""A small task and ensembles trained on it, for the tests of training."""

import torch

from uqlab import ensembles, models, training

INPUTS = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, :4]).argmax(1)


def small_mlp(dropout=0.2):
    return models.mlp(16, (12, 8), classes=4, dropout=dropout)


def trained(members, apart=False, dropout=0.2, **settings):
    ensemble = ensembles.deep(lambda: small_mlp(dropout), members, seed=5)
    if apart:
        each = [ensemble.member(m) for m in range(ensemble.members)]
        ensemble = ensembles.from_members(each)
    settings = {
        "epochs": 3,
        "lr": 0.1,
        "batch_size": 64,
        "seed": 5,
        "progress": False,
    } | settings
    return ensemble, training.fit(ensemble, INPUTS, LABELS, **settings)


def weights(ensemble):
    return [
        torch.cat([p.flatten() for p in ensemble.member(m).parameters()])
        for m in range(ensemble.members)
    ]
