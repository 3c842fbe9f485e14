"""Shards of an ensemble, made and trained apart, and joined: the same members as in the whole."""

import pytest
import torch
from same import near
from small_networks import APART, MAKERS, TRAINED, images, vit
from torch import nn
from torch.testing import assert_close

from uqlab import ensembles, models, training

INPUTS = torch.rand(60, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 3


def perceptron():
    return models.mlp(12, (16, 8), classes=3, dropout=0.2)


def conv():
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


PLAIN = {
    "folded": lambda members: ensembles.deep(perceptron, members, seed=3),
    "separate": lambda members: ensembles.deep(conv, members, seed=3),
    "dropout": lambda members: ensembles.dropout(perceptron(), members, seed=3),
}
IMPLICIT = {
    name: lambda members, make=make, **kw: make(vit(), members, seed=3, **kw)
    for name, make in (MAKERS | TRAINED | APART).items()
}


def same(a, b):
    assert a.member_ids == b.member_ids
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert_close(tensor, other[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", [*PLAIN, *IMPLICIT])
def test_shards_are_the_members_of_the_whole(name):
    torch.manual_seed(0)
    model = perceptron()
    make = {"dropout": lambda members: ensembles.dropout(model, members, seed=3)}.get(
        name, (PLAIN | IMPLICIT)[name]
    )
    whole, x = make(5), INPUTS[:4] if name in PLAIN else images()[0]
    joined = ensembles.concatenate([make(range(2, 5)), make(range(2))])
    same(whole, joined)
    near(joined.eval()(x), whole.eval()(x))
    near(make(range(2, 5)).eval()(x), whole(x)[2:])
    assert type(joined) is type(whole)
    assert getattr(joined, "recipe", None) == getattr(whole, "recipe", None)


@pytest.mark.parametrize(
    "name", ["folded", "separate", "lora", "singular_value", "packed"]
)
def test_shards_train_as_the_whole_does(name):
    make = (PLAIN | IMPLICIT)[name]
    x, y = (INPUTS, LABELS) if name in PLAIN else images(12)
    settings = {
        "epochs": 2,
        "lr": 0.05,
        "batch_size": 8,
        "seed": 4,
        "momentum": 0.9,
        "progress": False,
    }
    whole, shards = make(5), [make(range(0, 2)), make(range(2, 5))]
    before = whole(x[:1]).detach()
    for ensemble in (whole, *shards):
        training.fit(ensemble, x, y, **settings)
    joined = ensembles.concatenate(shards)
    assert (whole(x[:1]) - before).abs().max() > 1e-3
    near(joined(x), whole(x))


@pytest.mark.parametrize("name", ["batch", "batch++", "lora", *TRAINED])
def test_weights_that_all_members_train_cannot_be_joined(name):
    make = IMPLICIT[name]
    options = {"classifiers": "shared"} if name == "lora" else {}
    shards = [make(range(0, 2), **options), make(range(2, 4), **options)]
    same(ensembles.concatenate(shards), make(4, **options))
    for shard in shards:
        training.fit(shard, *images(6), epochs=3, lr=0.1, progress=False)
    with pytest.raises(
        ValueError, match="which all members share: train the ensemble as a whole"
    ):
        ensembles.concatenate(shards)


@pytest.mark.parametrize(
    ("shards", "error", "message"),
    [
        (lambda: [], ValueError, r"got members \[\]"),
        (
            lambda: [PLAIN["folded"](2), PLAIN["folded"](range(3, 5))],
            ValueError,
            r"gap or overlap, got members \[0, 1, 3, 4",
        ),
        (
            lambda: [PLAIN["folded"](2), PLAIN["separate"](range(2, 5))],
            ValueError,
            "equal architecture",
        ),
        (lambda: [nn.Linear(2, 2)], TypeError, "got Linear"),
        (
            lambda: [
                PLAIN["folded"](2),
                ensembles.deep(lambda: models.mlp(12, (9,), 3), range(2, 4)),
            ],
            ValueError,
            "equal architecture",
        ),
        (
            lambda: [
                IMPLICIT["lora"](2),
                ensembles.lora(vit(), range(2, 4), 2, gain=1.0, seed=3),
            ],
            ValueError,
            "method, settings and seed",
        ),
    ],
)
def test_what_does_not_fit_is_refused(unchecked, shards, error, message):
    with pytest.raises(error, match=message):
        ensembles.concatenate(shards())
