"""Spectra of weights: known matrices, plain NumPy, every kind of ensemble."""

import functools
import math
import re
import weakref

import numpy as np
import pytest
import torch
from same import near
from small_networks import MAKERS, bert, clip, moved, vit
from torch import nn

from uqlab import ensembles, extraction, models
from uqlab.analysis import spectra


def iid(*shape, seed=0, dtype=torch.float32):
    """Independent entries of variance 1 / in: a square matrix's largest singular value is about 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype) / shape[-1] ** 0.5


def orthonormal(rows, columns, seed=1):
    return torch.linalg.qr(iid(rows, columns, seed=seed, dtype=torch.float64)).Q


def plain(before, after, k, side="left"):
    """|cos| of the k leading vectors of `after` and all vectors of `before`."""
    if side == "right":
        before, after = before.mT, after.mT
    u0, u1 = (
        np.linalg.svd(w.double().numpy(), full_matrices=False)[0]
        for w in (before, after)
    )
    return np.abs(u1[:, :k].T @ u0)


# two matrices --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(20, 20), (12, 30), (150, 140), (140, 170)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_similarity_equals_numpy(shape, side, dtype):
    before = iid(*shape, dtype=dtype)
    after = before + 0.3 * iid(*shape, seed=1, dtype=dtype)
    found = spectra.singular_vector_similarity(before, after, 10, side)
    assert found.dtype == dtype
    near(found, plain(before, after, 10, side)[:, :10], atol=1e-3)


@pytest.mark.parametrize("n", [24, 160])
def test_batches_equal_loops(n):
    before, after = iid(3, n, n), iid(3, n, n, seed=1)
    together = spectra.singular_vector_similarity(before, after, 3)
    found = spectra.intruder_dimensions(before, after, 3)
    against_one = spectra.singular_vector_similarity(before[0], after, 3)
    for i in range(3):
        near(together[i], spectra.singular_vector_similarity(before[i], after[i], 3))
        near(against_one[i], spectra.singular_vector_similarity(before[0], after[i], 3))
        for part, alone in zip(
            found, spectra.intruder_dimensions(before[i], after[i], 3), strict=True
        ):
            near(part[i], alone)


def test_steep_spectra_are_exact_too():
    """Squares of the small values are lost in float64, not those that float32 holds."""
    u = orthonormal(160, 10)
    values = 10 ** -torch.arange(10).double()
    w = (u * values) @ orthonormal(170, 10, 2).mT
    assert (spectra.singular_vector_similarity(w, w, 10).diagonal() > 1 - 1e-6).all()
    with pytest.raises(ValueError, match="exceeds the rank"):
        spectra.singular_vector_similarity(w.float(), w.float(), 10)


def spiked(before, strength, rank=1):
    u, v = (orthonormal(side, rank, 7 + i) for i, side in enumerate(before.shape))
    return before + strength * (u @ v.mT).to(before)


def test_what_changes_no_direction_makes_no_intruder():
    before = iid(256, 256)
    u, s, vh = torch.linalg.svd(before)
    for after in (before, -2.5 * before, before + 1e-5 * iid(256, 256, seed=3)):
        found = spectra.intruder_dimensions(before, after)
        assert found.count == 0
        assert found.energy == 0
        assert found.max_cosine.min() > 0.999
    louder = (
        u * s.flip(0)
    ) @ vh  # compared with all vectors, not only the leading ones
    assert spectra.intruder_dimensions(before, louder).count == 0
    assert spectra.singular_vector_similarity(before, louder).max() < 0.1


@pytest.mark.parametrize(
    ("strength", "count"), [(0.5, 0), (1.0, 0), (2.0, 1), (4.0, 1)]
)
def test_a_spike_intrudes_above_the_edge_of_the_bulk(strength, count):
    before = iid(256, 256)
    for side in ("left", "right"):
        found = spectra.intruder_dimensions(before, spiked(before, strength), side=side)
        assert found.count == count


@pytest.mark.parametrize("rank", [1, 3, 14])
def test_intruders_are_counted_up_to_k(rank):
    before = iid(256, 256)
    after = spiked(before, 6.0, rank)
    found, most = spectra.intruder_dimensions(before, after), min(rank, 10)
    assert found.count == most
    values = torch.linalg.svdvals(after)[:10] ** 2
    near(found.energy, values[:most].sum() / values.sum(), rtol=1e-4)
    near(found.max_cosine, plain(before, after, 10).max(1), atol=1e-3)


def test_directions_that_were_turned_off_are_new():
    before = torch.diag(
        torch.tensor([5.0, 4, 3, 2, 1, 0, 0, 0])
    )  # its last vectors are arbitrary
    after = before + torch.diag(torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 9]))
    found = spectra.intruder_dimensions(before, after, 2)
    assert found.count == 1
    assert found.max_cosine.tolist() == [0, 1]
    assert found.energy.item() == pytest.approx(81 / (81 + 25))


@pytest.mark.parametrize(
    ("dimension", "vectors"), [(6, 6), (200, 200), (200, 20), (50, 1)]
)
def test_random_level_equals_a_simulation(dimension, vectors):
    g = torch.randn(20000, dimension, generator=torch.Generator().manual_seed(0))
    largest = nn.functional.normalize(g)[:, :vectors].abs().amax(1)
    assert spectra.random_level(dimension, vectors) == pytest.approx(
        largest.mean().item(), rel=0.02
    )
    assert spectra.random_level(2) == pytest.approx(
        2 * math.sqrt(2) / math.pi
    )  # mean of cos over [-pi/4, pi/4]


# ensembles -----------------------------------------------------------------------------------------------------------
KINDS = {
    name: functools.partial(lambda make: make(vit()), make)
    for name, make in MAKERS.items()
}
KINDS["separate"] = lambda: ensembles.from_members([vit() for _ in range(3)])


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_ensemble_equals_its_plain_members(make, side):
    ensemble, backbone, k = moved(make()).double(), vit().double(), 5
    found = spectra.ensemble_spectra(
        ensemble, "attention", k, before=backbone, side=side
    )
    assert [spectra.projection(name) for name in found] == 2 * [
        "query",
        "key",
        "value",
        "output",
    ]
    members = [ensemble.member(m) for m in range(3)]
    for name, layer in found.items():
        before = backbone.get_submodule(name).weight.detach()
        after = [member.get_submodule(name).weight.detach() for member in members]
        near(layer.before_values, torch.linalg.svdvals(before)[:k])
        near(layer.values, [torch.linalg.svdvals(w)[:k].numpy() for w in after])
        u, _, vh = torch.linalg.svd(before)
        for i, w in enumerate(after):
            cosines = plain(before, w, k, side)
            near(layer.initial[i], cosines[:, :k], atol=1e-4)
            near(layer.max_cosine[i], cosines.max(1), atol=1e-4)
            core = u.mT @ w @ vh.mT
            near(
                layer.off_diagonal[i],
                1 - (core.diagonal() ** 2).sum() / (w**2).sum(),
                atol=1e-6,
            )
            for j in range(3):
                near(layer.between[i, j], plain(after[j], w, k, side)[:, :k], atol=1e-4)
        one = spectra.intruder_dimensions(before, after[1], 3, 0.9, side)
        for part, alone in zip(layer.intruders(3, 0.9), one, strict=True):
            near(part[1], alone, atol=1e-6)
        pairs = [layer.between[i, j] for i in range(3) for j in range(3) if i != j]
        near(layer.mean_between(), torch.stack(pairs).mean(0))


def test_members_tell_who_makes_intruders():
    """Singular value ensembles keep every direction; LoRA adds its own, other ones in each member."""
    torch.manual_seed(0)
    backbone = models.vit(8, 4, width=64, layers=1, heads=2)
    lora = ensembles.lora(backbone, 3, 2)
    sve = ensembles.singular_value(backbone, 3, init_std=0.3)
    for layer in lora.modules():
        if isinstance(layer, ensembles.LowRank):
            nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(1))
    for layer in spectra.ensemble_spectra(lora, k=10).values():
        assert layer.intruders().count.tolist() == [2] * 3
        assert (layer.off_diagonal > 0.5).all()
        assert (layer.mean_between()[:2, :2] < 0.5).all()
    for layer in spectra.ensemble_spectra(sve, k=10, before=backbone).values():
        assert layer.intruders().count.tolist() == [0] * 3
        assert (
            (layer.between < 1e-3) | (layer.between > 1 - 1e-3)
        ).all()  # the same vectors, reordered
        assert layer.off_diagonal.max() < 1e-5


def test_vectors_beyond_the_rank_are_nan_and_counted():
    members = []
    for m in range(2):
        network = nn.Sequential(nn.Linear(6, 6))
        network[0].weight.data = iid(6, 2, seed=m) @ iid(2, 6, seed=m + 2)
        members.append(network)
    ensemble = ensembles.from_members([*members, nn.Sequential(nn.Linear(6, 6))])
    with pytest.warns(UserWarning, match=r"6 of 15 singular vectors are NaN.*k=5"):
        layer = spectra.ensemble_spectra(ensemble, k=5, before=ensemble.member(2))["0"]
    assert layer.between[:2, :2, :2, :2].isfinite().all()
    assert layer.between[:2, :, 2:].isnan().all()
    assert (layer.max_cosine[:2].isnan() == (torch.arange(5) > 1)).all()
    assert (layer.intruders(5, 1.0).count[:2] <= 2).all()


def test_masked_members_and_their_hard_masks():
    model = models.mlp(30, (24, 20), 3)
    ensemble = extraction.masks(model, 3)
    for change in (ensemble.soften, ensemble.harden):
        found = spectra.ensemble_spectra(
            change(), k=2
        )  # a hard member's own layers are smaller
        assert list(found) == ["1", "4"]
        for name, layer in found.items():
            rows, columns = ensemble.masks()[name]
            before = model.get_submodule(name).weight.detach()
            after = before * rows[0][:, None] * columns[0]
            near(layer.max_cosine[0], plain(before, after, 2).max(1), atol=1e-4)


def test_what_is_not_known_before_is_none():
    mlps = ensembles.deep(lambda: models.mlp(20, (16, 12), 3), 2)
    for ensemble in (ensembles.batch(vit(), 2), mlps):
        for layer in spectra.ensemble_spectra(ensemble, k=3).values():
            assert layer[2:] == (None,) * 4
            with pytest.raises(ValueError, match="before="):
                layer.intruders(3)


def test_one_layer_at_a_time(monkeypatch):
    """Only the weights of one layer's members are alive at any moment."""
    ensemble, alive, most = moved(ensembles.lora(vit(), 4, 2)), [], 0
    weight_of = ensembles.Ensemble.tensor

    def watched(self, name, index):
        nonlocal most
        weight = weight_of(self, name, index)
        alive.append(weakref.ref(weight))
        most = max(most, sum(ref() is not None for ref in alive))
        return weight

    monkeypatch.setattr(ensembles.Ensemble, "tensor", watched)
    spectra.ensemble_spectra(ensemble, k=3)
    assert len(alive) >= 8 * 4
    assert most == 4


@pytest.mark.parametrize("make", [vit, bert, clip])
def test_projections_by_name(make):
    names = spectra.ensemble_spectra(ensembles.lora(make(), 2, 2), k=2)
    kinds = [spectra.projection(name) for name in names]
    assert kinds.count("value") == 2
    assert set(kinds) == {"query", "key", "value", "output"}
    assert spectra.projection("encoder.layer.0.output.dense") is None


# bad input -----------------------------------------------------------------------------------------------------------
A, LOW_RANK = iid(20, 20), iid(20, 3) @ iid(3, 20)
similarity, intruders = spectra.singular_vector_similarity, spectra.intruder_dimensions


def of_ensemble(members=2, **settings):
    return spectra.ensemble_spectra(ensembles.lora(vit(), members), **settings)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: similarity(A, iid(20, 21)), "one shape, got [20, 20] and [20"),
        (lambda: intruders(A, A, 0), "k must be 1 to 20"),
        (lambda: intruders(A, LOW_RANK, 4), "k=4 exceeds the rank 3"),
        (lambda: intruders(A, A / 0), "after must be finite"),
        (lambda: intruders(A, A, threshold=0.0), "threshold must be"),
        (lambda: intruders(A, A, side="top"), "side must be"),
        (lambda: spectra.random_level(5, 6), "1 to 5, got"),
        (lambda: spectra.ensemble_spectra(vit()), "takes an ensemble"),
        (lambda: of_ensemble(target="mlp_9"), "matches no linear layer"),
        (lambda: of_ensemble(k=17), "k must be 1 to 16"),
        (lambda: of_ensemble(before=bert()), "has no linear layer vit"),
        (lambda: of_ensemble(before=models.vit(8, 4, width=8, layers=2, heads=2)), "one shape"),
        (lambda: of_ensemble(1).popitem()[1].mean_between(), "two"),
        (lambda: of_ensemble(k=3).popitem()[1].intruders(), "k must be 1 to 3"),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()
