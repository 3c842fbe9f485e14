"""Spectra of weights: known matrices, plain NumPy, every kind of ensemble, one layer at a time, bad input."""

import functools
import math
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
    """Independent entries of variance 1 / in: the largest singular value of a square matrix is about 2."""
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        / shape[-1] ** 0.5
    )


def orthonormal(rows, columns, seed=1):
    return torch.linalg.qr(iid(rows, columns, seed=seed, dtype=torch.float64)).Q


def with_values(values, rows, columns, seed=1):
    """U, V and the matrix U diag(values) V^T."""
    u, v = (
        orthonormal(rows, len(values), seed),
        orthonormal(columns, len(values), seed + 1),
    )
    return u, v, (u * values) @ v.mT


def plain_similarity(before, after, k, side):
    (u0, _, v0), (u1, _, v1) = (
        np.linalg.svd(w.double().numpy(), full_matrices=False) for w in (before, after)
    )
    return np.abs(u1[:, :k].T @ u0[:, :k] if side == "left" else v1[:k] @ v0[:k].T)


def plain_max_cosine(before, after, k):
    u0, u1 = (
        np.linalg.svd(w.double().numpy(), full_matrices=False)[0]
        for w in (before, after)
    )
    return np.abs(u1[:, :k].T @ u0).max(1)


# similarity of singular vectors ------------------------------------------------------------------------------------
SHAPES = [
    (20, 20),
    (12, 30),
    (30, 12),
    (150, 140),
    (140, 170),
    (170, 130),
]  # the latter by Gram matrices


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_similarity_equals_numpy(shape, side):
    before = iid(*shape, dtype=torch.float64)
    after = before + 0.3 * iid(*shape, seed=1, dtype=torch.float64)
    found = spectra.singular_vector_similarity(before, after, 10, side)
    near(found, plain_similarity(before, after, 10, side))


@pytest.mark.parametrize("n", [24, 160])
def test_similarity_sees_directions_alone(n):
    u, _, before = with_values(2 ** -torch.arange(n / 8).double(), n, n)
    eye, k = torch.eye(8, dtype=torch.float64)[: n // 8], min(8, n // 8)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    for after in (
        before,
        3.5 * before,
        -before,
        before[:, order],
    ):  # left vectors do not know the columns' order
        near(spectra.singular_vector_similarity(before, after, k), eye[:k, :k])
    turn = orthonormal(n, n, 5)
    turned = spectra.singular_vector_similarity(before, turn @ before, k)
    near(turned, (u.mT @ turn.mT @ u)[:k, :k].abs())  # rows: after
    near(
        spectra.singular_vector_similarity(before, turn @ before, k, "right"),
        eye[:k, :k],
    )


@pytest.mark.parametrize("n", [24, 160])
def test_batches_equal_loops(n):
    before, after = iid(3, n, n), iid(3, n, n, seed=1)
    together = spectra.singular_vector_similarity(before, after, 3)
    found = spectra.intruder_dimensions(before, after, 3)
    against_one = spectra.singular_vector_similarity(before[0], after, 3)
    near(against_one[0], together[0])
    for i in range(3):
        near(together[i], spectra.singular_vector_similarity(before[i], after[i], 3))
        near(against_one[i], spectra.singular_vector_similarity(before[0], after[i], 3))
        for part, alone in zip(
            found, spectra.intruder_dimensions(before[i], after[i], 3), strict=True
        ):
            near(part[i], alone)


def test_float32_is_as_exact_as_it_can_be():
    w = iid(200, 160)
    truth = torch.linalg.svd(w.double()).U[:, :8]
    ours = spectra._leading(w, 8)[1].double()
    assert (ours * truth).sum(0).abs().min() > 1 - 1e-6
    assert (
        spectra.singular_vector_similarity(w.double(), w.double(), 8).dtype
        == torch.float64
    )
    assert (
        spectra.singular_vector_similarity(w.bfloat16(), w.bfloat16(), 8).dtype
        == torch.float32
    )


def test_steep_spectra_are_exact_too():
    """Where squares would lose the small values, they are not squared."""
    values = 10 ** -torch.arange(10).double()
    u, _, w = with_values(values, 160, 170)
    found, vectors = spectra._leading(w, 10)
    near(found, values, rtol=1e-6, atol=1e-8)  # the small ones too
    near((vectors * u).sum(0).abs(), torch.ones(10, dtype=torch.float64))


# intruders ---------------------------------------------------------------------------------------------------------
def spiked(before, strength, rank=1, seed=7):
    u, v = (
        orthonormal(before.shape[0], rank, seed),
        orthonormal(before.shape[1], rank, seed + 1),
    )
    return before + strength * (u @ v.mT).to(before)


def test_what_changes_no_direction_makes_no_intruder():
    before = iid(256, 256)
    u, s, vh = torch.linalg.svd(before)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    for after in (
        before,
        -2.5 * before,
        before + 1e-5 * iid(256, 256, seed=3),
        before[:, order],
    ):
        found = spectra.intruder_dimensions(before, after)
        assert found.count == 0
        assert found.energy == 0
        assert found.max_cosine.min() > 0.999
    louder = (
        u * s.flip(0)
    ) @ vh  # all vectors are compared with, not the leading ones alone
    assert spectra.intruder_dimensions(before, louder).count == 0
    assert spectra.singular_vector_similarity(before, louder).max() < 0.1


@pytest.mark.parametrize(
    ("strength", "count"), [(0.5, 0), (1.0, 0), (2.0, 1), (4.0, 1)]
)
def test_a_spike_intrudes_above_the_edge_of_the_bulk(strength, count):
    before = iid(256, 256)
    for side in ("left", "right"):
        assert (
            spectra.intruder_dimensions(
                before, spiked(before, strength), side=side
            ).count
            == count
        )


@pytest.mark.parametrize("rank", [1, 3, 10, 14])
def test_intruders_are_counted_up_to_k(rank):
    before = iid(256, 256)
    found = spectra.intruder_dimensions(before, spiked(before, 6.0, rank))
    assert found.count == min(rank, 10)
    values = torch.linalg.svdvals(spiked(before, 6.0, rank))[:10] ** 2
    assert found.energy.item() == pytest.approx(
        (values[: min(rank, 10)].sum() / values.sum()).item(), rel=1e-4
    )
    plain = plain_max_cosine(before, spiked(before, 6.0, rank), 10)
    near(found.max_cosine, plain, atol=1e-3)


def test_directions_that_were_turned_off_are_new():
    before = torch.diag(
        torch.tensor([5.0, 4, 3, 2, 1, 0, 0, 0])
    )  # its last singular vectors are arbitrary
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


def test_known_random_levels():
    assert spectra.random_level(1) == pytest.approx(1)
    assert spectra.random_level(2) == pytest.approx(
        2 * math.sqrt(2) / math.pi
    )  # mean of cos over [-pi/4, pi/4]
    assert spectra.random_level(768) == pytest.approx(0.12, abs=0.005)


def plain_off_diagonal(before, after):
    u, _, vh = np.linalg.svd(before.double().numpy(), full_matrices=False)
    core = u.T @ after.double().numpy() @ vh.T
    return 1 - np.square(np.diagonal(core)).sum() / after.double().square().sum().item()


def test_off_diagonal():
    u, v, before = with_values(torch.linspace(3, 1, 6).double(), 10, 8)
    louder = (u * torch.linspace(1, 2, 6)) @ v.mT
    assert spectra.off_diagonal(before, louder).item() == pytest.approx(0, abs=1e-12)
    mixed = before + 2 * torch.outer(u[:, 0], v[:, 1])
    share = 4 / (4 + torch.linspace(3, 1, 6).square().sum().item())
    assert spectra.off_diagonal(before, mixed).item() == pytest.approx(share)


def test_weights_of_any_size():
    before, after = torch.randn(2, 6, 6)
    start, *members = (nn.Sequential(nn.Linear(6, 6)) for _ in range(4))
    for network, weight in zip(
        (start, *members), (before, after, 1e30 * after, 0 * after), strict=True
    ):
        network[0].weight.data = weight
    with pytest.warns(UserWarning, match="2 of 6 singular vectors are NaN"):
        found = spectra.ensemble_spectra(
            ensembles.from_members(members), k=2, before=start, progress=False
        )["0"]
    share = plain_off_diagonal(before, after)
    assert found.off_diagonal.tolist() == [
        pytest.approx(share, rel=1e-4),
        pytest.approx(share, rel=1e-4),
        0,
    ]
    expected = spectra.intruder_dimensions(before, after, k=3, threshold=1.0)
    large = spectra.intruder_dimensions(before, 1e30 * after, k=3, threshold=1.0)
    assert large.energy > 0
    near(large.energy, expected.energy)


# ensembles ---------------------------------------------------------------------------------------------------------
def separate():
    """Networks fine-tuned from one backbone."""
    return moved(ensembles.from_members([vit() for _ in range(3)]))


KINDS = {
    name: functools.partial(lambda make: moved(make(vit())), make)
    for name, make in MAKERS.items()
}
KINDS |= {"separate": separate}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_ensemble_equals_its_plain_members(make, side):
    ensemble, backbone, k = make().double(), vit().double(), 5
    found = spectra.ensemble_spectra(
        ensemble, "attention", k, before=backbone, side=side, progress=False
    )
    assert len(found) == 2 * 4
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
        turned = (
            (before, *after) if side == "left" else (before.mT, *(w.mT for w in after))
        )
        near(layer.before_values, torch.linalg.svdvals(before)[:k])
        near(layer.values, [torch.linalg.svdvals(w)[:k].numpy() for w in after])
        for i in range(3):
            near(
                layer.initial[i], plain_similarity(before, after[i], k, side), atol=1e-4
            )
            near(
                layer.max_cosine[i],
                plain_max_cosine(turned[0], turned[1 + i], k),
                atol=1e-4,
            )
            near(
                layer.off_diagonal[i],
                spectra.off_diagonal(before, after[i]),
                atol=1e-6,
            )
            for j in range(3):
                near(
                    layer.between[i, j],
                    plain_similarity(after[j], after[i], k, side),
                    atol=1e-4,
                )
        one = spectra.intruder_dimensions(before, after[1], 3, 0.9, side)
        for part, alone in zip(layer.intruders(3, 0.9), one, strict=True):
            near(part[1], alone, atol=1e-6)
        pairs = [layer.between[i, j] for i in range(3) for j in range(3) if i != j]
        near(layer.mean_between(), torch.stack(pairs).mean(0))


def test_members_tell_who_makes_intruders():
    """Singular value ensembles keep every direction; LoRA adds its own, other ones in each member."""
    torch.manual_seed(0)
    backbone = models.vit(8, 4, width=64, layers=1, heads=2)
    lora, sve = (
        ensembles.lora(backbone, 3, 2),
        ensembles.singular_value(backbone, 3, init_std=0.3),
    )
    for layer in lora.modules():
        if isinstance(layer, ensembles.LowRank):
            nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(1))
    for ensemble, count in ((lora, 2), (sve, 0)):
        found = spectra.ensemble_spectra(
            ensemble, k=10, before=backbone, progress=False
        )
        for layer in found.values():
            assert layer.intruders().count.tolist() == [count] * 3
            assert (layer.off_diagonal > 0.5).all() == bool(count)
            if count:
                assert (layer.mean_between()[:2, :2] < 0.5).all()
            else:  # the same vectors, in another order
                assert ((layer.between < 1e-3) | (layer.between > 1 - 1e-3)).all()
    assert layer.off_diagonal.max() < 1e-5


def test_updates_are_what_was_added():
    ensemble = moved(ensembles.lora(vit(), 3, 4))
    full = next(
        n for n, p in ensemble.seen.items() if isinstance(p.kind, ensembles.LowRank)
    )
    name, layer = full.removesuffix(".weight"), ensemble.seen[full].kind
    found = spectra.ensemble_spectra(
        ensemble, f"^{name}$", 4, update=True, progress=False
    )[name]
    products = (layer.lora_B @ layer.lora_A).detach()
    near(found.values, torch.linalg.svdvals(products)[:, :4])
    near(
        found.between[0, 1],
        plain_similarity(products[1], products[0], 4, "left"),
        atol=1e-3,
    )
    near(
        found.initial[2],
        plain_similarity(vit().get_parameter(full).detach(), products[2], 4, "left"),
        atol=1e-3,
    )
    merged = ensembles.from_members(
        [ensemble.member(m) for m in range(3)]
    )  # the same as a plain difference
    plain = spectra.ensemble_spectra(
        merged, f"^{name}$", 4, update=True, before=vit(), progress=False
    )[name]
    near(plain.between, found.between, atol=1e-3)
    additive = moved(ensembles.lora(vit(), 2, 1, std=0.5))
    found = spectra.ensemble_spectra(
        additive, f"^{name}$", 1, update=True, progress=False
    )[name]
    layer = additive.seen[full].kind
    sizes = layer.lora_B.norm(dim=(1, 2)) * layer.lora_A.norm(dim=(1, 2))
    near(found.values[:, 0], sizes.detach())
    trained = moved(
        ensembles.batch(vit(), 2, additive=True)
    )  # the shared matrix moves too
    found = spectra.ensemble_spectra(
        trained, f"^{name}$", 2, update=True, before=vit(), progress=False
    )[name]
    before = vit().get_submodule(name).weight.detach()
    after = trained.member(1).get_submodule(name).weight.detach()
    near(found.values[1], torch.linalg.svdvals(after - before)[:2], rtol=1e-3)


def test_vectors_beyond_the_rank_are_nan_and_counted():
    ensemble = moved(ensembles.lora(vit(), 3, 2))
    with pytest.warns(UserWarning, match=r"72 of 120 singular vectors are NaN.*k=5"):
        found = spectra.ensemble_spectra(ensemble, None, 5, update=True, progress=False)
    for layer in found.values():
        assert layer.between[:, :, :2, :2].isfinite().all()
        assert layer.between[:, :, 2:].isnan().all()
        assert layer.mean_between()[2:].isnan().all()
        assert (layer.max_cosine.isnan() == (torch.arange(5) > 1)).all()
        assert (layer.intruders(5, 1.0).count <= 2).all()
        near(layer.intruders(5, 1.0).energy, torch.ones(3))


def test_masked_members_and_their_hard_masks():
    model = models.mlp(30, (24, 20), 3)
    ensemble = extraction.masks(model, 3)
    for change in (ensemble.soften, ensemble.harden):
        found = spectra.ensemble_spectra(
            change(), k=2, progress=False
        )  # a hard member's own layers are smaller
        assert list(found) == ["1", "4"]
        for name, layer in found.items():
            rows, columns = ensemble.masks()[name]
            before = model.get_submodule(name).weight.detach()
            after = before * rows[0][:, None] * columns[0]
            near(
                layer.max_cosine[0],
                plain_max_cosine(before, after, 2),
                atol=1e-4,
            )


def test_what_is_not_known_before_is_none():
    for ensemble in (
        ensembles.batch(vit(), 2),
        ensembles.deep(lambda: models.mlp(20, (16, 12), 3), 2),
    ):
        for layer in spectra.ensemble_spectra(ensemble, k=3, progress=False).values():
            known = (
                layer.initial,
                layer.before_values,
                layer.max_cosine,
                layer.off_diagonal,
            )
            assert known == (None,) * 4
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
    spectra.ensemble_spectra(ensemble, k=3, progress=False)
    assert len(alive) >= 8 * 4
    assert most == 4


@pytest.mark.parametrize("make", [vit, bert, clip])
def test_projections_by_name(make):
    names = list(
        spectra.ensemble_spectra(ensembles.lora(make(), 2, 2), k=2, progress=False)
    )
    assert [spectra.projection(name) for name in names].count("value") == 2
    assert {spectra.projection(name) for name in names} == {
        "query",
        "key",
        "value",
        "output",
    }
    assert spectra.projection("encoder.layer.0.output.dense") is None


# bad input ---------------------------------------------------------------------------------------------------------
def low_rank(rank=3):
    return iid(20, rank) @ iid(rank, 20)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: spectra.singular_vector_similarity(iid(20, 20), iid(20, 21)),
            r"one shape, got \[20, 20\] and \[20",
        ),
        (
            lambda: spectra.intruder_dimensions(iid(20), iid(20)),
            r"matrices \[\.\.\., out, in\]",
        ),
        (
            lambda: spectra.intruder_dimensions(iid(20, 20), iid(20, 20), 0),
            "k must be 1 to 20",
        ),
        (
            lambda: spectra.intruder_dimensions(iid(20, 20), low_rank(), 4),
            "k=4 exceeds the rank 3 of a matrix after",
        ),
        (
            lambda: spectra.intruder_dimensions(iid(20, 20), iid(20, 20) / 0),
            "after must be finite",
        ),
        (
            lambda: spectra.intruder_dimensions(
                iid(20, 20), iid(20, 20), threshold=0.0
            ),
            "threshold must be",
        ),
        (
            lambda: spectra.intruder_dimensions(iid(20, 20), iid(20, 20), side="top"),
            "side must be",
        ),
        (
            lambda: spectra.intruder_dimensions(iid(20, 20), "W"),
            "a tensor, an array or lists",
        ),
        (lambda: spectra.random_level(5, 6), "1 to 5, the dimension"),
        (
            lambda: spectra.ensemble_spectra(vit()),
            "takes an ensemble, got ViTForImageClassification",
        ),
        (
            lambda: spectra.ensemble_spectra(ensembles.lora(vit(), 2), "mlp_9"),
            "matches no linear layer",
        ),
        (
            lambda: spectra.ensemble_spectra(ensembles.lora(vit(), 2), k=17),
            r"k must be 1 to 16 for vit.*\[16, 16\]",
        ),
        (
            lambda: spectra.ensemble_spectra(ensembles.lora(vit(), 2), before=bert()),
            "before has no linear layer vit",
        ),
        (
            lambda: spectra.ensemble_spectra(
                ensembles.lora(vit(), 2), before=separate()
            ),
            "one torch module",
        ),
        (
            lambda: spectra.ensemble_spectra(separate(), update=True),
            "give before=the backbone",
        ),
        (
            lambda: spectra.ensemble_spectra(
                ensembles.deep(lambda: models.mlp(20, (16,), 3), 2),
                k=2,
                before=models.mlp(20, (12,), 3),
            ),
            r"\[16, 20\] in the ensemble, but \[12, 20\] before",
        ),
        (
            lambda: (
                spectra.ensemble_spectra(ensembles.lora(vit(), 1), progress=False)
                .popitem()[1]
                .mean_between()
            ),
            "two",
        ),
        (
            lambda: (
                spectra.ensemble_spectra(ensembles.lora(vit(), 2), k=3)
                .popitem()[1]
                .intruders()
            ),
            "k must be 1 to 3",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
