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
    joined = ensembles.concatenate([make("2:5"), make(range(2))])
    same(whole, joined)
    near(joined.eval()(x), whole.eval()(x))
    near(make("2:5").eval()(x), whole(x)[2:])
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
    whole, shards = make(5), [make("0:2"), make("2:5")]
    before = whole(x[:1]).detach()
    for ensemble in (whole, *shards):
        training.fit(ensemble, x, y, **settings)
    joined = ensembles.concatenate(shards)
    assert (whole(x[:1]) - before).abs().max() > 1e-3
    near(joined(x), whole(x))


def test_shards_are_saved_and_joined_later(tmp_path):
    whole = ensembles.lora(vit(), 3, 2, seed=3)
    shards = [ensembles.lora(vit(), part, 2, seed=3) for part in ("0:1", "1:3")]
    for number, shard in enumerate(shards):
        shard.save_pretrained(tmp_path / str(number))
    same(
        ensembles.concatenate(
            [ensembles.from_pretrained(tmp_path / str(n), vit()) for n in (0, 1)]
        ),
        whole,
    )


def test_what_the_whole_owns_is_a_copy():
    shards = [PLAIN["folded"](2), PLAIN["folded"]("2:3")]
    joined = ensembles.concatenate(shards)
    before = shards[0].eval()(INPUTS[:1]).detach()
    training.fit(joined, INPUTS, LABELS, epochs=1, lr=0.1, progress=False)
    assert torch.equal(shards[0](INPUTS[:1]), before)


@pytest.mark.parametrize("name", ["batch", "batch++", "lora", *TRAINED])
def test_weights_that_all_members_train_cannot_be_joined(name):
    make = IMPLICIT[name]
    options = {"classifiers": "shared"} if name == "lora" else {}
    shards = [make("0:2", **options), make("2:4", **options)]
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
        (lambda: [], ValueError, "at least one shard"),
        (
            lambda: [PLAIN["folded"](2), PLAIN["folded"]("3:5")],
            ValueError,
            r"gap or overlap, got members \[0, 1, 3, 4",
        ),
        (
            lambda: [PLAIN["folded"](2), PLAIN["separate"]("2:5")],
            ValueError,
            "equal architecture",
        ),
        (lambda: [nn.Linear(2, 2)], TypeError, "got Linear"),
        (
            lambda: [
                PLAIN["folded"](2),
                ensembles.deep(lambda: models.mlp(12, (9,), 3), "2:4"),
            ],
            ValueError,
            "equal architecture",
        ),
        (
            lambda: [
                IMPLICIT["lora"](2),
                ensembles.lora(vit(), "2:4", 2, gain=1.0, seed=3),
            ],
            ValueError,
            "method, settings and seed",
        ),
    ],
)
def test_what_does_not_fit_is_refused(unchecked, shards, error, message):
    with pytest.raises(error, match=message):
        ensembles.concatenate(shards())


@pytest.mark.parametrize(
    "members", ["", "3", "0:", "0:-2", "a:b", "0:2:0", "5:5", "0:3 ", range(0), 0, -1]
)
@pytest.mark.parametrize(
    "make", [PLAIN["folded"], IMPLICIT["lora"]], ids=["deep", "lora"]
)
def test_bad_numbers(unchecked, make, members):
    with pytest.raises(ValueError, match=r'its text such as "0:8"|at least one member'):
        make(members)


@pytest.mark.parametrize("members", [2.5, None, [0, 1]])
def test_numbers_of_another_kind(unchecked, members):
    with pytest.raises(TypeError):
        PLAIN["folded"](members)
