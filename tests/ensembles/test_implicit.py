"""Implicit ensembles: what each member is as a plain network, where members start, what is trained, what is shared."""

import math
import re

import pytest
import torch
from same import near, unchanged
from small_networks import (
    ALL,
    APART,
    EVERY,
    FOLDED,
    MAKERS,
    TRAINED,
    bert,
    clip,
    cnn,
    count,
    images,
    moved,
    owned,
    resnet,
    vit,
)
from torch import nn
from torch.testing import assert_close
from transformers import ViTConfig, ViTForImageClassification

from uqlab import ensembles, models, training
from uqlab.core import devices
from uqlab.ensembles import (
    ATTENTION,
    LowRank,
    Scaled,
    SingularValues,
)

# Members --------------------------------------------------------------------------------------------------------------


@FOLDED
def test_shards_and_chunks_are_the_whole(make):
    ensemble, (x, _) = moved(make(vit())), images()
    together = ensemble(x)
    near(
        torch.cat([ensemble.shard(slice(1))(x), ensemble.shard(slice(1, 3))(x)]),
        together,
    )
    for size in (1, 2):
        ensemble.chunk_size = size
        near(ensemble(x), together)


@ALL
def test_members_with_batches_of_their_own(make):
    ensemble, (x, _) = moved(make(vit())), images(6)
    apart = ensemble.forward_each(x.view(3, 2, 1, 8, 8))
    for m in range(3):
        near(apart[m], ensemble(x[2 * m : 2 * m + 2])[m])


@ALL
def test_a_member_depends_on_the_seed_and_its_number_alone(make):
    x, _ = images()
    two, three, other = (
        make(vit(), members, seed=seed).eval()(x)
        for members, seed in ((2, 0), (3, 0), (3, 1))
    )
    near(two, three[:2])
    assert (three - other).abs().max() > 1e-3


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


def test_lora_starts_within_a_xavier_bound():
    layer = next(iter(owned(ensembles.lora(vit(), 3, 2), LowRank).values()))
    assert not layer.lora_B.any()
    bound = 10 * math.sqrt(6 / (16 + 2))  # xavier-uniform with gain 10
    assert 0.8 * bound < layer.lora_A.abs().max() <= bound


@pytest.mark.parametrize("scale", [1.0, -2.5])
def test_lora_is_a_low_rank_update(scale, tmp_path):
    ensemble, (x, _) = moved(ensembles.lora(vit(), 2, 3, scale=scale)), images()
    name, layer = next(iter(owned(ensemble, LowRank).items()))
    frozen = ensemble.network.get_submodule(name).weight
    for m in range(2):
        update = ensemble.member(m).get_submodule(name).weight - frozen
        near(update, scale * layer.lora_B[m] @ layer.lora_A[m])
        near(ensemble.update(f"{name}.weight", m), update)
        assert torch.linalg.matrix_rank(update, rtol=1e-4) == 3
        near(ensemble(x)[m], ensemble.member(m)(x).logits)
    ensemble.save_pretrained(tmp_path / "scaled")
    near(ensembles.from_pretrained(tmp_path / "scaled", vit())(x), ensemble(x))


def test_singular_values_start_apart():
    ensemble = ensembles.singular_value(vit(), 3, init_std=0.1, classifiers="shared")
    assert (ensemble(images()[0]).std(0) > 1e-4).any()


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


def test_a_normal_start_of_rank_one_is_the_additive_form_with_a_frozen_matrix():
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    added = ensembles.batch(net, 3, std=0.5, additive=True, seed=2)
    low = ensembles.lora(net, 3, 1, std=0.5, seed=2)
    for m in range(3):
        near(added.member(m)[0].weight, low.member(m)[0].weight)
    assert added.network[0].weight.requires_grad
    assert not low.network[0].weight.requires_grad


@pytest.mark.parametrize("network", [vit, clip, cnn, resnet])
@pytest.mark.parametrize("make", (MAKERS | TRAINED).values(), ids=MAKERS | TRAINED)
@pytest.mark.parametrize("count", [1, 6])  # few rows are multiplied by factors
def test_every_way_is_equal_up_to_rounding(count, make, network):
    """Together and in turn, by products and by built weights; so are the gradients."""
    ensemble, (x, _) = moved(make(network())), images(count)
    trained = [p for p in ensemble.parameters() if p.requires_grad]
    found = []
    for ensemble.mode in ("auto", "vmap", "loop"):
        logits = ensemble(x)
        loss = logits.square().mean()
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        found.append((logits.detach(), gradients))
    for logits, gradients in found[1:]:
        near(logits, found[0][0])
        for a, b in zip(gradients, found[0][1], strict=True):
            if b is not None:
                assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()) + 1e-6)


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


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make, {"classifiers": kind})
        for make in MAKERS.values()
        for kind in ("independent", "shared")
    ]
    + [(make, {}) for make in TRAINED.values()],
)
@pytest.mark.parametrize("chunk", [None, 1])
def test_gradients_are_those_of_separate_members(make, options, chunk):
    """What is a member's own follows its own loss; what all share follows the mean of theirs."""
    ensemble, (x, y) = moved(make(vit(), **options)), images()
    expected = torch.autograd.grad(
        sum(nn.functional.cross_entropy(z, y) for z in ensemble(x)),
        [p for p in ensemble.parameters() if p.requires_grad],
    )
    start = [p.detach().clone() for p in ensemble.parameters() if p.requires_grad]
    ensemble.chunk_size = chunk
    training.fit(ensemble, x, y, epochs=1, lr=0.1, batch_size=4, progress=False)
    after = [p for p in ensemble.parameters() if p.requires_grad]
    for p, old, gradient in zip(after, start, expected, strict=True):
        near(p.detach(), old - 0.1 * gradient)


def test_what_is_shared_is_known():
    assert not ensembles.lora(vit(), 2).shared_parameters()
    assert ensembles.lora(vit(), 2).can_shard()
    assert len(ensembles.lora(vit(), 2, classifiers="shared").shared_parameters()) == 2
    for additive in (True, False):
        assert (
            len(ensembles.batch(vit(), 2, additive=additive).shared_parameters())
            == 2 * 4
        )
    assert not ensembles.batch(vit(), 2).can_shard()


def test_threads_train_the_same_members(monkeypatch):
    found = []
    for small in (1e18, 0):
        monkeypatch.setattr(devices, "ONE_THREAD", small)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        ensemble, (x, y) = ensembles.lora(vit(), 3, 2), images(12)
        training.fit(
            ensemble,
            x,
            y,
            epochs=2,
            lr=0.05,
            batch_size=4,
            optimizer="adamw",
            progress=False,
        )
        found.append(ensemble.eval()(x).detach())
    near(*found)


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


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (["q_lin", "k_lin", "v_lin", "out_lin"], ["ffn.lin1"]),  # DistilBERT
        (["attn.Wqkv", "attn.Wo"], ["mlp.Wo"]),  # ModernBERT
        (
            ["attention.self.query_proj", "attention.output.dense"],
            ["output.dense"],
        ),  # DeBERTa
        (["attn.qkv", "attn.proj"], ["patch_embed.proj", "mlp.fc1"]),  # timm
    ],
)
def test_the_attention_has_many_names(names, others):
    assert all(re.search(ATTENTION, f"layer.0.{name}") for name in names)
    assert not any(re.search(ATTENTION, f"layer.0.{name}") for name in others)


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


@ALL
def test_autocast(make):
    ensemble, (x, _) = moved(make(vit())), images()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = ensemble(x)
    assert_close(half.float(), ensemble(x).detach(), rtol=0.1, atol=0.1)


class Routed(nn.Module):
    """Two experts, each for the tokens that are sent to it: as many as the input says."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h, first = torch.empty_like(x), x[..., 0] > 0
        h[first], h[~first] = self.one(x[first]), self.other(x[~first])
        return self.head(h.mean(1))


@pytest.mark.parametrize("seed", range(8))
def test_tokens_that_are_routed_by_the_input(seed):
    torch.manual_seed(seed)
    ensemble = ensembles.lora(Routed(), 2, seed=seed, rank=2).eval()
    with torch.no_grad():
        x = torch.randn(2, 1, 8, 6)  # an input of eight tokens for each member
        x[0, 0, :, 0].abs_(), x[1, 0, :, 0].abs_()  # a first call that divides nothing
        ensemble.forward_each(x)
        for p in ensemble.parameters():
            p.add_(0.1 * torch.randn_like(p))
        x = torch.randn(2, 1, 8, 6)
        alone = torch.stack([ensemble.member(m)(x[m]) for m in range(2)])
        near(ensemble.forward_each(x), alone)


class CutText(nn.Module):
    """Token ids up to the longest text of the batch, as classifiers of texts read them."""

    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(20, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        ids = ids[:, : int((ids > 0).sum(1).max())]
        return self.head(self.mix(self.words(ids)).relu().sum(1))


def test_members_share_a_pass_though_the_first_texts_differ_in_length():
    ensemble = ensembles.lora(CutText(), 3, seed=0, rank=2).eval()
    ids = torch.randint(1, 20, (4, 8), generator=torch.Generator().manual_seed(0))
    ids[0, 5:] = ids[3, 2:] = 0
    with torch.no_grad():
        for p in ensemble.parameters():
            p.add_(0.1 * torch.randn_like(p))
        logits = ensemble(ids)
        alone = torch.stack([ensemble.member(m)(ids) for m in range(3)])
    near(logits, alone)
    assert "members in a pass" not in ensemble.about()
