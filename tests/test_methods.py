"""A method by its name is what its parts are: made by `ensembles`, trained by `training.fit`, finished."""

import functools

import pytest
import torch
from same import near, unchanged
from small_networks import images, vit

from uqlab import data, ensembles, extraction, heads, models, training
from uqlab.study import methods

SETTINGS = {
    "epochs": 2,
    "lr": 0.01,
    "batch_size": 2,
    "optimizer": "adamw",
    "scheduler": "cosine",
    "warmup": 1,
    "max_grad_norm": 1.0,
}


def single(net):
    """The network that "single" starts from: its classifier is new."""
    return ensembles.deep(lambda: methods.fresh(net), 1, 7).member(0)


PLAIN = {
    "single": lambda net: ensembles.deep(lambda: methods.fresh(net), 1, 7),
    "deep": lambda net: ensembles.deep(lambda: methods.fresh(net), 3, 7),
    "batch": lambda net: ensembles.batch(net, 3, seed=7),
    "batch_additive": lambda net: ensembles.batch(net, 3, additive=True, seed=7),
    "masksembles": lambda net: ensembles.masksembles(single(net), 3, seed=7),
    "film": lambda net: ensembles.film(single(net), 3, seed=7),
    "mimo": lambda net: ensembles.mimo(net, 3, seed=7),
    "packed": lambda net: ensembles.packed(net, 3, seed=7),
    "lora": lambda net: ensembles.lora(net, 3, gain=4.0, seed=7),
    "lora_single": lambda net: ensembles.lora(net, 1, 12, gain=4.0, seed=7),
    "singular_value": lambda net: ensembles.singular_value(net, 3, seed=7),
}
OPTIONS = {"lora": {"rank": 8}, "lora_single": {"rank": 4}}


def train(name, net, members=3, **changes):
    return methods.train(
        name,
        net,
        *images(),
        members=members,
        seed=7,
        **(OPTIONS.get(name, {}) | SETTINGS | changes),
    )


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_trains_on_a_backbone_and_leaves_it_as_it_was(name):
    net, (x, _) = vit(), images()
    members = 4 if name == "tiles" else 3  # they lie in a square
    with unchanged(net):
        ensemble = train(name, net, members)
    assert training.predict(ensemble, x).shape == (
        1 if "single" in name else members,
        4,
        3,
    )
    near(train(name, net, members)(x), ensemble(x))
    for m in range(ensemble.members):  # plain modules, for people who leave
        near(
            training.predict(ensemble.member(m), x)[0], training.predict(ensemble, x)[m]
        )
    assert f"members: {ensemble.members}" in str(ensemble)
    assert name in PLAIN or (ensemble(x)[0] - ensemble(x)[1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", PLAIN)
def test_it_is_what_its_parts_are(name):
    net, (x, y) = vit(), images()
    plain = PLAIN[name](net)
    training.fit(plain, x, y, seed=7, progress=False, **SETTINGS)
    near(train(name, net)(x), plain(x))


def test_snapshots_begin_with_the_single_network_and_mc_dropout_drops_in_training_too():
    net, (x, _) = vit(), images()
    near(train("snapshot", net)(x)[0], train("single", net)(x)[0])
    dropped, kept = (train("dropout", net, p=p)(x) for p in (0.3, 0.0))
    assert (dropped - kept).abs().max() > 1e-3
    near(kept, train("single", net)(x).expand(3, -1, -1))


def test_settings_reach_the_part_that_knows_them():
    net = vit()
    assert methods.numbers(train("lora", net, rank=2)) < methods.numbers(
        train("lora", net)
    )
    assert methods.numbers(train("dropout", net)) == methods.numbers(
        train("single", net)
    )
    assert methods.numbers(train("lora", net, rank=4)) == pytest.approx(
        methods.numbers(train("lora_single", net)), rel=0.2
    )
    with pytest.raises(TypeError, match="rang"):
        train("lora", net, rang=2)
    with pytest.raises(ValueError, match="method must be one of 'single'"):
        train("lorra", net)


def test_without_training_nothing_of_the_backbone_is_left():
    net = models.vit(8, 4, width=16, layers=1)
    first, again, other = (methods.untrained(net, seed) for seed in (0, 0, 1))
    weights = {name: p for name, p in net.named_parameters() if p.std() > 0}
    assert len(weights) > 5
    for name, p in weights.items():
        assert torch.equal(first.get_parameter(name), again.get_parameter(name))
        assert (
            "layernorm" in name
            or "bias" in name
            or not torch.equal(first.get_parameter(name), p)
        )
    assert not torch.equal(first(images()[0]), other(images()[0]))


def test_what_is_found_in_a_trained_network(monkeypatch):
    """Masks, tiles, heads and a posterior: of the single network, or of one LoRA network, and what their parts are."""
    net, (x, _) = vit(), images()
    single, one = (
        train("single", net).member(0),
        train("laplace_lora", net, 1, prior_variance=1e-12),
    )
    near(train("tiles", net, 4)(x), extraction.tiles(single, 2)(x))
    near(one(x), train("lora", net, 1)(x), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(
        train("laplace_lora", net, 1, prior_variance=1.0)(x), one(x), atol=1e-2
    )
    hydra = train("hydra", net, share=0.5)
    assert hydra.members == 3
    assert all(sum(heads.count_heads(hydra.member(m))) == 2 for m in range(3))
    masked = train("masks", net, steps=5)
    assert all(
        mask.rows is None or ((mask.rows == 0) | (mask.rows == 1)).all()
        for mask in masked.masks().values()
    )
    with pytest.raises(ValueError, match="tiles lie in a square"):
        train("tiles", net, 3)
    never = functools.wraps(training.fit)(lambda *a, **k: 1 / 0)
    monkeypatch.setattr(training, "fit", never)  # refused before anything is trained
    for name in ("single", "masks", "hydra", "laplace_lora"):
        with pytest.raises(TypeError, match="rang"):
            train(name, net, rang=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("film", "no normalisation before"),
        ("hydra", "attention"),
        ("tiles", "no module that averages a map"),
    ],
)
def test_a_network_that_lacks_what_a_method_needs_is_refused_before_training(
    name, message, monkeypatch
):
    monkeypatch.setattr(
        training,
        "fit",
        functools.wraps(training.fit)(lambda *_, **__: pytest.fail("trained")),
    )
    with pytest.raises(ValueError, match=message):
        train(name, models.mlp(64, (12, 6), 3), 4)


def test_sets_are_suited_to_a_backbone():
    digits, letters, textures = (
        data.load(name, limit=3) for name in ("digits", "letters", "textures")
    )
    assert [
        tuple(items.inputs.shape) for items in methods.suited("", digits, textures)
    ] == [(3, 1, 28, 28)] * 2
    own, other = methods.suited("any/checkpoint", digits, letters.resize(28))
    assert tuple(other.inputs.shape) == tuple(own.inputs.shape) == (3, 1, 8, 8)
    assert all(
        a is b.inputs
        for a, b in zip(methods.encode(vit(), own, other), (own, other), strict=True)
    )
    texts = data.Dataset(
        ["a"] * 3, torch.zeros(3).long(), "films", "test", ("bad", "good")
    )
    assert methods.suited("", texts, texts) == [texts, texts]


def test_backbones_of_wheels_by_their_names():
    few = {"labels": torch.zeros(2).long(), "split": "test", "classes": ("a", "b", "c")}
    small = data.Dataset(torch.rand(2, 3, 32, 32), name="small", **few)
    networks = []
    for items in (small, small.resize(64)):
        torch.manual_seed(0)
        networks.append(methods.backbone("efficientnet-lite0", items).eval())
    enlarged = torch.nn.functional.interpolate(small.inputs, size=64)
    near(networks[0](small.inputs), networks[1](enlarged))
    grey = data.load("digits", limit=2)
    (colour,) = methods.suited("efficientnet-lite0", grey)
    assert colour.inputs.shape == (2, 3, 8, 8)
    heard = data.load("spoken-digits", limit=2)
    speech = methods.backbone("whisper-tiny-encoder", heard)
    (waves,) = methods.encode(speech, heard)
    assert speech(waves).shape == (2, 10)
    assert waves.abs().max() <= 1
