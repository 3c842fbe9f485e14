"""Implicit ensembles: what each member is as a plain network, where members start, what is trained, what is shared."""

import math

import pytest
import torch
from same import near, unchanged
from small_networks import (
    APART,
    EVERY,
    MAKERS,
    TRAINED,
    bert,
    clip,
    cnn,
    count,
    images,
    moved,
    owned,
    vit,
)
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from uqlab import ensembles, models, training
from uqlab.ensembles import (
    LowRank,
    Scaled,
    SingularValues,
)

# Members --------------------------------------------------------------------------------------------------------------


# Where members start --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (MAKERS["lora"], {}),
        (MAKERS["singular_value"], {"init_std": 0.0}),
        (MAKERS["batch"], {"std": 0.0}),
        (MAKERS["batch++"], {"std": 0.0}),
    ],
)
def test_members_start_as_the_backbone(make, settings):
    backbone, (x, _) = vit(), images()
    equal = make(backbone, classifiers="shared", **settings).eval()
    near(equal(x), backbone(x).logits.expand(3, -1, -1))


@pytest.mark.parametrize("scale", [1.0, -2.5])
def test_lora_is_a_low_rank_update(scale, tmp_path):
    ensemble, (x, _) = moved(ensembles.lora(vit(), 2, 3, scale=scale)), images()
    name, layer = next(iter(owned(ensemble, LowRank).items()))
    frozen = ensemble.network.get_submodule(name).weight
    for m in range(2):
        update = ensemble.member(m).get_submodule(name).weight - frozen
        near(update, scale * layer.lora_B[m] @ layer.lora_A[m])
        assert torch.linalg.matrix_rank(update, rtol=1e-4) == 3
        near(ensemble(x)[m], ensemble.member(m)(x).logits)
    ensemble.save_pretrained(tmp_path / "scaled")
    near(ensembles.from_pretrained(tmp_path / "scaled", vit())(x), ensemble(x))


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_singular_value_layers(shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias).double()
    network = nn.Sequential(linear, nn.Linear(shape[0], 2).double())
    made = ensembles.singular_value(network, 3, init_std=0.3)
    layer = owned(made, SingularValues)["0"]
    for m in range(3):
        weight = made.member(m)[0].weight
        core = layer.u.mT @ weight @ layer.vh.mT  # U^T W_m V
        near(core.float(), torch.diag(layer.s[m].clamp(min=0)).float())
        moved_by = torch.linalg.norm(weight - linear.weight)
        original = torch.linalg.svdvals(linear.weight)
        near(moved_by.float(), torch.linalg.norm(layer.s[m] - original).float())
    assert not layer.u.requires_grad
    assert ("0.bias" in made.seen) == bias


def test_what_a_member_of_lora_adds_is_its_product():
    ensemble = ensembles.lora(vit(), 2, rank=2)
    training.fit(ensemble, *images(), epochs=1, lr=0.1, progress=False)
    low = {n: p.kind for n, p in ensemble.seen.items() if hasattr(p.kind, "lora_A")}
    assert low
    for name, kind in low.items():
        near(ensemble.update(name, 1), kind.lora_B[1] @ kind.lora_A[1])


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_the_largest_singular_values_move_alone(share, tmp_path):
    ensemble, (x, y) = ensembles.singular_value(vit(), 2, share=share), images()
    training.fit(ensemble, x, y, epochs=3, lr=0.1)
    for name, layer in owned(ensemble, SingularValues).items():
        moving = math.ceil(share * len(layer.vh))
        before = torch.linalg.svdvals(ensemble.network.get_submodule(name).weight)
        for m in range(2):
            core = (
                layer.u.mT @ ensemble.member(m).get_submodule(name).weight @ layer.vh.mT
            )
            near(core, torch.diag(core.diagonal()))
            near(core.diagonal()[moving:], before[moving:])
            assert not torch.allclose(core.diagonal()[:moving], before[:moving])
        near(ensemble(x)[0], ensemble.member(0)(x).logits)
    ensemble.save_pretrained(tmp_path / "some")
    near(ensembles.from_pretrained(tmp_path / "some", vit())(x), ensemble.eval()(x))


def test_a_singular_value_below_zero_stays_dead():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    ensemble = ensembles.singular_value(network, 1, init_std=0.0, target="0")
    layer = owned(ensemble, SingularValues)["0"]
    layer.s.data[0, 1] = -0.1
    ensemble(torch.rand(3, 4)).square().sum().backward()
    assert layer.s.grad[0, 1] == 0
    assert layer.s.grad[0, 0] != 0
    assert torch.linalg.svdvals(ensemble.member(0)[0].weight)[-1] < 1e-5


def test_batch_ensemble_multiplies_and_adds_a_rank_one_matrix():
    torch.manual_seed(0)
    linear = nn.Linear(6, 4)
    net = nn.Sequential(linear, nn.ReLU(), nn.Linear(4, 3))
    times, plus = (
        ensembles.batch(net, 2, std=0.5, additive=additive)
        for additive in (False, True)
    )
    scaled, low = owned(times, Scaled)["0"], owned(plus, LowRank)["0"]
    for m in range(2):
        outer = torch.outer(scaled.r[m], scaled.s[m])
        near(times.member(m)[0].weight, linear.weight * outer)
        outer = torch.outer(low.lora_B[m, :, 0], low.lora_A[m, 0])
        near(plus.member(m)[0].weight, linear.weight + outer)
        near(scaled.r[m] - 1, low.lora_B[m, :, 0])


# What is trained ------------------------------------------------------------------------------------------------------


def vit_base(labels):
    config = ViTConfig(
        num_labels=labels, patch_size=32
    )  # ViT-B/32: 12 layers of width 768
    with torch.device("meta"):
        return ViTForImageClassification(config)


@pytest.mark.parametrize(
    ("members", "rank", "labels", "classifiers", "expected"),
    [  # Muhlematter et al. 2024, Table 7 and text
        (1, 8, 100, "independent", 666_724),
        (16, 8, 100, "independent", 10_667_584),
        (1, 128, 100, "independent", 9_514_084),
        (8, 4, 7, "independent", 2_402_360),
        (8, 4, 7, "shared", 2_364_679),
    ],
)
def test_parameters_of_the_lora_paper(members, rank, labels, classifiers, expected):
    assert (
        count(ensembles.lora(vit_base(labels), members, rank, classifiers=classifiers))
        == expected
    )


def test_parameters_of_singular_value_ensembles():
    ensemble = ensembles.singular_value(vit(), 4)
    block = 4 * 16 + 16 + 16  # singular values of q, k, v, o, fc1 and fc2
    biases = 4 * 16 + 32 + 16
    assert count(ensemble) == 4 * (2 * (block + biases) + 3 * 17)


@EVERY
@pytest.mark.parametrize("classifiers", ["independent", "shared"])
def test_frozen_means_frozen(make, classifiers):
    backbone, (x, y) = vit(), images(12)
    ensemble = make(backbone, classifiers=classifiers)
    start = {name: p.clone() for name, p in ensemble.named_parameters()}
    buffers = {name: b.clone() for name, b in ensemble.named_buffers()}
    settings = {"optimizer": "adamw", "batch_size": 4, "max_grad_norm": 1.0}
    with unchanged(backbone):
        training.fit(ensemble, x, y, epochs=2, lr=0.05, progress=False, **settings)
    for name, p in ensemble.named_parameters():
        assert torch.equal(start[name], p) == (not p.requires_grad), name
    assert all(torch.equal(buffers[name], b) for name, b in ensemble.named_buffers())
    assert all(p.requires_grad for p in backbone.parameters())


@EVERY
def test_the_backbone_lies_in_memory_once(make):
    backbone = vit()
    ensemble = make(backbone)
    mine = {p.data_ptr() for p in backbone.parameters()}
    copied = [
        p
        for p in ensemble.shard(slice(2)).parameters()
        if not p.requires_grad and p.data_ptr() not in mine
    ]
    assert copied == []


def test_classifiers_start_as_published():
    lora, sve = (
        {
            kind: torch.stack([made.tensor(f"classifier.{kind}", m) for m in range(50)])
            for kind in ("weight", "bias")
        }
        for made in (ensembles.lora(vit(), 50), ensembles.singular_value(vit(), 50))
    )
    assert lora["weight"].abs().max() <= 1 / 4  # torch's default for 16 features
    assert lora["weight"].std().item() == pytest.approx(0.25 / math.sqrt(3), rel=0.05)
    assert sve["weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert not sve["bias"].any()


# Where it applies -----------------------------------------------------------------------------------------------------
def replaced(ensemble, kind):
    return list(owned(ensemble, kind))


def test_default_targets():
    assert len(replaced(ensembles.lora(vit(), 2), LowRank)) == 2 * 4
    assert len(replaced(ensembles.lora(clip(), 2), LowRank)) == 2 * 4
    names = replaced(ensembles.lora(bert(), 2), LowRank)
    assert [name.split("attention.")[1] for name in names[:4]] == [
        "self.query",
        "self.key",
        "self.value",
        "output.dense",
    ]
    assert len(names) == 2 * 4
    assert replaced(ensembles.lora(models.mlp(8, (12, 6), 3), 2, 2), LowRank) == [
        "1",
        "4",
    ]
    assert len(replaced(ensembles.singular_value(vit(), 2), SingularValues)) == 2 * 6


def test_targets_by_expression():
    assert replaced(
        ensembles.lora(vit(), 2, target=r"layers\.1.*(q|v)_proj$"), LowRank
    ) == [
        "vit.layers.1.attention.q_proj",
        "vit.layers.1.attention.v_proj",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS | TRAINED | APART)
def test_compiles(name, unchecked):  # what checks shapes cannot be traced
    backbone = vit(layers=1) if name == "lora" else cnn()
    make = (MAKERS | TRAINED | APART)[name]
    ensemble, (x, _) = moved(make(backbone)), images()
    with torch.no_grad():
        near(torch.compile(ensemble, backend="aot_eager")(x), ensemble(x))
