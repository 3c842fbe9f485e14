"""Fused ensembles: they equal the separate pruned networks, members do not interact, parameters, training, passes."""

import copy

import pytest
import torch
from head_networks import (
    CLASSES,
    EVERY,
    HEADS,
    LAYERS,
    SETS,
    call,
    inputs,
    labels,
    make,
)
from same import near
from torch import nn

from uqlab import ensembles, heads, models, training
from uqlab.models import attentions

EVEN = [
    [(layer, (m + layer) % HEADS) for layer in range(LAYERS)] for m in range(3)
]  # one of each layer
RAGGED = [SETS["several"], SETS["a whole layer"], SETS["but one"]]
SETS_OF_THREE = pytest.mark.parametrize(
    "sets",
    [EVEN, RAGGED, [SETS["several"], [], SETS["all"]]],
    ids=["even", "ragged", "all"],
)


def pruned(name="vit", sets=EVEN):
    model = make(name)
    return [heads.prune(model, pairs) for pairs in sets]


def tuned(members, mlps=False):
    """As after fine-tuning: the weights that members keep in fusion differ, or with `mlps` all other weights."""
    generator = torch.Generator().manual_seed(3)
    for model in members:
        found = attentions(model)
        projections = {each.module for attention in found for each in attention[2:6]}
        norms = {
            name
            for name, part in model.named_modules()
            if isinstance(part, nn.LayerNorm)
        }
        outside = {
            name
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear)
            and not any(name.startswith(f"{each.layer}.") for each in found)
        }
        for name, p in model.named_parameters():
            if (name.rpartition(".")[0] in projections | norms | outside) != mlps:
                p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return members


def apart(members, x):
    return torch.stack([call(model, x) for model in members])


# Identities -----------------------------------------------------------------------------------------------------------
@EVERY
@SETS_OF_THREE
def test_fused_is_separate_where_the_mlps_are_equal(name, sets):
    members, x = tuned(pruned(name, sets)), inputs(name)
    fused = heads.fuse(members)
    assert isinstance(fused, ensembles.Ensemble)
    expected = apart(members, x)
    assert (expected[0] - expected[1]).abs().max() > 0.01
    near(fused(x), expected)


@SETS_OF_THREE
def test_mlps_and_embeddings_are_means(sets):
    """The paper's merge: MLPs and embeddings are the members' mean, everything else stays the member's own."""
    members, x = tuned(tuned(pruned("vit", sets)), mlps=True), inputs()
    merged = copy.deepcopy(members)
    shared = [
        key
        for key, _ in members[0].named_parameters()
        if "mlp" in key or "embeddings" in key
    ]
    assert len(shared) == LAYERS * 4 + 4
    for key in shared:
        mean = sum(model.get_parameter(key).detach() for model in members) / 3
        for model in merged:
            model.get_parameter(key).data.copy_(mean)
    expected = apart(merged, x)
    assert (apart(members, x) - expected).abs().max() > 0.01
    near(heads.fuse(members)(x), expected)


@pytest.mark.parametrize("name", ["vit", "bert"])
@pytest.mark.parametrize("sets", [EVEN, RAGGED], ids=["even", "ragged"])
def test_members_never_touch(name, sets):
    """The Jacobian of member i's logits with respect to member j's input is exactly 0."""
    fused = heads.fuse(tuned(pruned(name, sets)))
    shape = (3, 2, 1, 8, 8) if name == "vit" else (3, 2, 5, 16)
    x = torch.randn(
        shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    logits = fused.forward_each(x if name == "vit" else {"inputs_embeds": x})
    for i in range(3):
        for c in range(CLASSES):
            (jacobian,) = torch.autograd.grad(
                logits[i, :, c].sum(), x, retain_graph=True
            )
            assert jacobian[i].abs().max() > 1e-3
            assert all((jacobian[j] == 0).all() for j in range(3) if j != i)


@pytest.mark.parametrize("name", ["vit", "bert"])
@SETS_OF_THREE
def test_a_member_is_a_plain_network(name, sets):
    members, x = tuned(pruned(name, sets)), inputs(name)
    fused = heads.fuse(members)
    for m, model in enumerate(members):
        plain = fused.member(m)
        assert {key: p.shape for key, p in plain.named_parameters()} == {
            k: p.shape for k, p in model.named_parameters()
        }
        assert heads.count_heads(plain) == heads.count_heads(model)
        near(call(plain, x), call(model, x))
    again = heads.fuse(fused)
    near(again(x), fused(x))


# Parameters -----------------------------------------------------------------------------------------------------------
def count(fused, within=""):
    """Numbers of a part of the network: once where members share them, else of every member."""
    numbers, members = 0, [fused.member(m) for m in range(fused.members)]
    for name, p in fused.network.named_parameters():
        if name.startswith(within):
            own = [member.get_parameter(name) for member in members]
            numbers += sum(t.numel() for t in own) if name in fused.seen else p.numel()
    return numbers


@SETS_OF_THREE
def test_parameters_of_a_layer(sets):
    """4 M H_l / H d^2 + 8 d^2 weights (Hydra, B.4), and biases and LayerNorms."""
    members = pruned("vit", sets)
    fused = heads.fuse(members)
    kept = torch.tensor(
        [heads.count_heads(model) for model in members]
    ).T.tolist()  # [layers, members]
    for layer, counts in enumerate(kept):
        weights = 4 * sum(counts) * 16**2 // HEADS + 8 * 16**2
        biases = sum(3 * count * 4 + 16 for count in counts) + 4 * 16 + 16 + 3 * 4 * 16
        assert count(fused, f"vit.layers.{layer}.") == weights + biases


def test_merged_norms_are_one_for_all():
    members, x = pruned("vit"), inputs()
    near(heads.fuse(members, norms="merged")(x), apart(members, x))
    own, merged = (
        heads.fuse(tuned(members), norms=norms) for norms in ("independent", "merged")
    )
    saved = count(own) - count(merged)
    assert (
        saved == 2 * (2 * LAYERS + 1) * 2 * 16
    )  # two of three members, weights and biases of 16
    assert (own(x) - merged(x)).abs().max() > 0.01


def test_multiply_adds_are_those_of_the_members():
    members, x = pruned(), inputs(count=2)
    fused = heads.fuse(members)
    apart = sum(heads.multiply_adds(model, x) for model in members)
    fused.mode = "loop"
    assert heads.multiply_adds(fused, x) == apart
    fused.mode = "vmap"  # of equal inputs, the shared patches are embedded once
    assert heads.multiply_adds(fused, x) == apart - 2 * 2 * 4 * 16 * 16


# Passes ---------------------------------------------------------------------------------------------------------------


# Training -------------------------------------------------------------------------------------------------------------
def test_zero_heads_stay_zero_in_training():
    x, y = inputs("vit", 12).float(), labels(12)
    sets = [SETS["several"], [], SETS["all"]]
    fused = heads.fuse([model.float() for model in pruned("vit", sets)])
    how = {"epochs": 20, "lr": 0.01, "optimizer": "adam", "progress": False}
    history = training.fit(fused, x, y, batch_size=4, **how)
    assert (history.loss[-1] < 0.8 * history.loss[0]).all()
    near(training.predict(fused, x)[1], call(fused.member(1), x).detach())
    near(training.predict(fused, x)[2], call(fused.member(2), x).detach())


def test_fine_tuned_apart_then_fused():
    """The paper fine-tunes the members first; a trained ensemble can be fused directly."""
    x, y = inputs(count=12).float(), labels(12)
    ensemble = ensembles.from_members(
        [model.float() for model in pruned("vit", RAGGED)]
    )
    training.fit(ensemble, x, y, epochs=3, lr=0.01, optimizer="adam", progress=False)
    fused, alike = (
        heads.fuse(ensemble),
        heads.fuse([ensemble.member(m) for m in range(ensemble.members)]),
    )
    assert torch.equal(fused(x), alike(x))
    assert (fused(x) - ensemble(x)).abs().max() > 1e-4  # the MLPs are no longer equal


# Bad input ------------------------------------------------------------------------------------------------------------
def other(patch=4, width=16, layers=LAYERS, count=HEADS):
    return models.vit(
        8, patch, width=width, layers=layers, heads=count, classes=CLASSES
    ).double()


def scaled(deviation):
    return nn.Sequential(models.Standardize([0.4], [deviation]), make())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        (lambda: [], ValueError, "at least one model"),
        (
            lambda: [make(), other(layers=2)],
            ValueError,
            "the number of layers: 3 and 2",
        ),
        (lambda: [make(), other(count=2)], ValueError, "the size of a head: 4 and 8"),
        (lambda: [make(), other(width=32, count=8)], ValueError, "differ in vit"),
        (lambda: [make(), make("clip")], ValueError, "None"),
        (lambda: [scaled(0.2), scaled(0.3)], ValueError, "buffers"),
        (lambda: [make(), "vit"], TypeError, "one torch module, got"),
    ],
)
def test_members_that_do_not_fuse(members, error, message):
    with pytest.raises(error, match=message):
        heads.fuse(members())
