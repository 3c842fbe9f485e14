"""Masks: identities of the objective, members as plain networks, both training steps, what extraction must recover."""

import copy
import math

import numpy as np
import pytest
import torch
from same import near, unchanged
from torch import nn

from uqlab import ensembles, extraction, models, uncertainty


def network(*widths, classes=3, dropout=0.1):
    torch.manual_seed(0)
    return models.mlp(8, widths or (12, 6), classes, dropout).double()


def batch(samples=20, classes=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(samples, 1, 2, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (samples,), generator=generator)


def set_logits(ensemble, value):
    """All mask logits of member m become value(m, logits)."""
    with torch.no_grad():
        for layer in ensemble.layers().values():
            for p in layer.parameters():
                for m in range(ensemble.members):
                    p[m] = value(m, p[m])
    return ensemble


# --- What a member is ---
def test_open_masks_give_the_network():
    net, (x, _) = network(), batch()
    ensemble = set_logits(extraction.masks(net, 3), lambda m, p: 40.0)
    near(ensemble(x), net.eval()(x).expand(3, -1, -1))


def test_members_see_the_outer_product_of_their_masks():
    net, (x, _) = network(), batch()
    ensemble = extraction.masks(net, 3)
    for m in range(3):
        plain = copy.deepcopy(net).eval()
        for name, (rows, columns) in ensemble.masks().items():
            layer = plain.get_submodule(name)
            layer.weight.data *= torch.outer(
                torch.ones(3).double() if rows is None else rows[m], columns[m]
            )
        near(ensemble(x)[m], plain(x))
        near(ensemble.member(m)(x), plain(x))
        assert [type(part) for part in ensemble.member(m)] == [
            type(part) for part in net
        ]


def test_a_mask_for_every_row_and_column_but_those_of_the_classes():
    ensemble = extraction.masks(network(), 4)
    shapes = {
        name: [None if p is None else tuple(p.shape) for p in masks]
        for name, masks in ensemble.masks().items()
    }
    assert shapes == {
        "1": [(4, 12), (4, 8)],
        "4": [(4, 6), (4, 12)],
        "7": [None, (4, 6)],
    }
    without = extraction.masks(network(), 4, inputs=False)
    assert without.masks()["1"].columns is None
    assert without.masks()["4"].columns is not None


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.Sigmoid]
)  # sigmoid: a masked unit without bias shows 1/2
@pytest.mark.parametrize("bias", [True, False])
def test_a_hard_member_is_a_small_dense_network(inputs, activation, bias):
    torch.manual_seed(0)
    inner = nn.Sequential(
        nn.Linear(12, 6, bias), activation(), nn.Dropout(0.5), nn.Linear(6, 3, bias)
    )
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(8, 12, bias), activation(), inner
    ).double()
    ensemble, (x, _) = extraction.masks(net, 5, inputs=inputs).harden(), batch()
    whole = sum(p.numel() for p in net.parameters())
    for m in range(5):
        small = ensemble.member(m)
        near(small(x), ensemble(x)[m])
        masks = ensemble.masks()
        units = [
            masks["1"].rows[m] * masks["3.0"].columns[m],
            masks["3.0"].rows[m] * masks["3.3"].columns[m],
        ]
        first, second, last = (p for p in small.modules() if isinstance(p, nn.Linear))
        # Smaller still, where all inputs of a unit are gone.
        assert first.out_features <= units[0].sum()
        assert second.out_features <= units[1].sum()
        assert last.out_features == 3
        assert first.in_features == (int(masks["1"].columns[m].sum()) if inputs else 8)
        assert sum(p.numel() for p in small.parameters()) < whole


def test_a_hard_member_of_a_convolutional_network():
    torch.manual_seed(0)
    net, x = (
        models.wide_resnet(10, 1, classes=4).double().eval(),
        torch.rand(3, 3, 16, 16).double(),
    )
    ensemble = extraction.masks(net, 2).harden()
    assert list(ensemble.masks()) == ["8"]
    assert ensemble.member(1)[-1].out_features == 4
    near(ensemble.member(1)(x), ensemble(x)[1])


def test_a_layer_between_which_something_mixes_units_is_not_shrunk():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.Softmax(-1), nn.Linear(6, 3)).double()
    ensemble, x = (
        extraction.masks(net, 2, inputs=False).harden(),
        torch.rand(5, 8).double(),
    )
    small = ensemble.member(0)
    assert small[0].out_features == 6
    near(small(x), ensemble(x)[0])


def test_a_member_that_keeps_nothing_still_answers():
    net, (x, _) = network(), batch()
    ensemble = set_logits(extraction.masks(net, 1), lambda m, p: -1.0).harden()
    near(ensemble.member(0)(x), net[7].bias.expand(20, 3).detach())
    near(ensemble(x)[0], net[7].bias.expand(20, 3).detach())


def test_hardening_can_be_undone_and_moved():
    ensemble, (x, _) = extraction.masks(network(), 3), batch()
    soft = ensemble(x)
    kept = [
        ensemble.harden(threshold).masks()["1"].rows.mean().item()
        for threshold in (0.3, 0.5, 0.7)
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[2]
    assert set(ensemble.masks()["1"].rows.unique().tolist()) == {0.0, 1.0}
    near(ensemble.soften()(x), soft)


def test_the_network_is_copied_and_frozen():
    net, (x, y) = network(), batch()
    with unchanged(net):
        ensemble = extraction.masks(net, 3)
        extraction.fit_masks(ensemble, x, y, steps=5, progress=False)
    assert all(p.requires_grad for p in net.parameters())
    assert not any(p.requires_grad for p in ensemble.network.parameters())
    with unchanged(ensemble.network):
        ensemble.network.load_state_dict(net.state_dict())


def test_dropout_and_batch_statistics_stay_as_at_prediction():
    ensemble, (x, _) = extraction.masks(network(dropout=0.9), 2), batch()
    assert torch.equal(ensemble.train()(x), ensemble.eval()(x))
    assert ensemble.can_shard()  # it draws nothing, so threads may share the members


def test_shards_share_the_logits():
    ensemble, (x, _) = extraction.masks(network(), 4).harden(), batch()
    shard = ensemble.shard(slice(1, 3))
    near(shard(x), ensemble(x)[1:3])
    shard.layers()["1"].row_logits.data.fill_(3.0)
    assert (ensemble.layers()["1"].row_logits[1:3] == 3).all()
    assert not (ensemble.layers()["1"].row_logits[0] == 3).any()


def test_a_member_depends_on_the_seed_and_its_number_alone():
    three, five, other = (
        extraction.masks(network(), m, seed=s).masks()["4"]
        for m, s in ((3, 0), (5, 0), (3, 1))
    )
    assert torch.equal(three.rows, five.rows[:3])
    assert torch.equal(three.columns, five.columns[:3])
    assert not torch.equal(three.rows, other.rows)
    assert not torch.equal(three.rows[0], three.rows[1])


# --- Diversity ---
def test_diversity_of_known_masks():
    ensemble = extraction.masks(network(), 2)
    assert extraction.mask_diversity(
        set_logits(ensemble, lambda m, p: 0.7)
    ) == pytest.approx(0, abs=1e-12)
    opposite = set_logits(ensemble, lambda m, p: 40.0 if m else -40.0)
    assert extraction.mask_diversity(opposite) == pytest.approx(math.log(2), rel=1e-9)
    assert extraction.mask_diversity(opposite.harden()) == pytest.approx(
        math.log(2), rel=1e-9
    )
    one_in_four = set_logits(
        extraction.masks(network(), 4), lambda m, p: 40.0 if m == 1 else -40.0
    )
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert extraction.mask_diversity(one_in_four) == pytest.approx(expected, rel=1e-9)


def test_diversity_is_the_mutual_information_of_each_element():
    """I[b; m] of one mask element b, a coin of member m, is the BALD score of a two-class ensemble."""
    ensemble = extraction.masks(network(), 5, std=2.0)
    logits = torch.cat(
        [
            p.detach()
            for layer in ensemble.layers().values()
            for p in layer.parameters()
        ],
        1,
    )
    coins = torch.stack(
        [logits, torch.zeros_like(logits)], -1
    )  # [members, elements, 2]
    expected = uncertainty.decompose(coins).epistemic.mean()
    assert extraction.mask_diversity(ensemble) == pytest.approx(
        expected.item(), rel=1e-9
    )


# --- Training ---
@pytest.mark.parametrize("diversity", [0.0, 2.0])
def test_training_follows_the_objective(diversity):
    """Against a plain loop: torch.optim.Adam on mean cross-entropy - diversity * mask_diversity, by autograd."""
    x, y = batch(32)
    ensemble, reference = extraction.masks(network(), 3), extraction.masks(network(), 3)
    settings = {
        "diversity": diversity,
        "steps": 6,
        "lr": 0.1,
        "batch_size": 32,
        "progress": False,
    }
    history = extraction.fit_masks(ensemble, x, y, **settings)

    parameters = [
        p for layer in reference.layers().values() for p in layer.parameters()
    ]
    optimizer = torch.optim.Adam(parameters, 0.1)
    for step in range(6):
        p = torch.cat([logits.sigmoid() for logits in parameters], 1)
        coin = lambda q: -q * q.log() - (1 - q) * (1 - q).log()  # noqa: E731
        information = (coin(p.mean(0)) - coin(p).mean(0)).mean()
        losses = torch.stack([nn.functional.cross_entropy(z, y) for z in reference(x)])
        assert history.diversity[step] == pytest.approx(information.item(), rel=1e-4)
        near(history.loss[step], losses.detach().float())
        optimizer.zero_grad()
        (losses.mean() - diversity * information).backward()
        optimizer.step()
    for name, (rows, columns) in reference.masks().items():
        near(ensemble.masks()[name].columns, columns, atol=1e-6)
        if rows is not None:
            near(ensemble.masks()[name].rows, rows, atol=1e-6)


def test_training_repeats_exactly_and_softens_first():
    x, y = batch(40)
    found = []
    for hard in (True, False):
        ensemble = extraction.masks(network(), 3)
        if hard:
            ensemble.harden()
        extraction.fit_masks(ensemble, x, y, steps=8, batch_size=16, progress=False)
        found.append(ensemble.masks()["1"].columns)
    assert torch.equal(*found)


def test_a_network_with_convolutions_and_float32_trains():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 6), nn.ReLU(),
                        nn.Linear(6, 3))  # fmt: skip
    statistics = net[1].running_mean.clone()
    x, y = batch()
    ensemble = extraction.masks(net, 3)
    history = extraction.fit_masks(
        ensemble, x, y, steps=60, diversity=0.0, progress=False
    )
    assert history.loss[-1].mean() < history.loss[0].mean()
    assert torch.equal(ensemble.network[1].running_mean, statistics)


# --- Bad input ---
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: extraction.masks(nn.Conv2d(1, 2, 3)), "has no nn"),
        (lambda: extraction.masks(ensembles.deep(network, 2)), r"member\(0\)"),
        (lambda: extraction.masks(network(), 0), "needs at least one member"),
        (lambda: extraction.masks(network(), std=0.0), r"std must be in .0, inf\)"),
        (lambda: extraction.masks(network()).harden(1.0), r"must be in \[0, 1\)"),
        (lambda: extraction.masks(network(), 2).harden().member(2), "out of bounds"),
    ],
)
def test_masks_refuses_what_it_cannot_mask(call, message):
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        call()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "lists of numbers .*, got NoneType"),
        ({"labels": np.zeros(20, int)}, "all labels are 0"),
        ({"labels": torch.zeros(19).long()}, r"labels must be \[samples\] = \[20\]"),
        ({"inputs": torch.full((20, 8), math.nan)}, "NaN"),
        ({"steps": 0}, "steps"),
        ({"lr": 0.0}, r"lr must be in \(0, inf\)"),
        ({"diversity": -1.0}, r"diversity must be in \[0, inf\)"),
    ],
)
def test_fit_masks_refuses(change, message):
    x, y = batch()
    given = {"inputs": x, "labels": y, **change}
    with pytest.raises((TypeError, ValueError), match=message):
        extraction.fit_masks(extraction.masks(network(), 2), progress=False, **given)


def test_a_loss_that_is_not_finite_is_reported():
    net, (x, y) = network(), batch()
    net[7].weight.data[:] = 1e308
    with pytest.raises(FloatingPointError, match="step 0"):
        extraction.fit_masks(
            extraction.masks(net, 2), x * 1e10, y, steps=2, progress=False
        )
    with pytest.raises(
        FloatingPointError, match="a mask is not finite"
    ):  # after the only step
        extraction.fit_masks(
            extraction.masks(network().float(), 2),
            x,
            y,
            steps=2,
            lr=1e39,
            progress=False,
        )
