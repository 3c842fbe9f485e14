"""Heads: ablation, pruning, Taylor scores, features, and the cost of networks without them."""

import copy

import numpy as np
import pytest
import torch
from head_networks import (
    EVERY,
    HEADS,
    LAYERS,
    SETS,
    call,
    inputs,
    labels,
    make,
)
from same import near, unchanged
from torch import nn

from uqlab import ensembles, heads
from uqlab.models import attentions

OUTPUTS = {
    "vit": "vit.layers.{}.attention.o_proj",
    "bert": "bert.encoder.layer.{}.attention.output.dense",
}


def without(model, name, pairs):
    """The plain way: a copy with these columns set to zero."""
    model = copy.deepcopy(model)
    size = 16 // HEADS
    for layer, head in pairs:
        model.get_submodule(OUTPUTS[name].format(layer)).weight.data[
            :, head * size : (head + 1) * size
        ] = 0
    return model


@EVERY
@pytest.mark.parametrize("layers", [0, 1, LAYERS])
def test_only_last_layers_learn_from_a_classifier_of_zeros(name, layers):
    model, x = make(name), inputs(name)
    assert heads.only_last(model, layers) is model
    assert not call(model, x).any()
    learn = {name for name, p in model.named_parameters() if p.requires_grad}
    stack = [attention.layer for attention in attentions(model)]
    inside = {
        name for name in learn if name.startswith(tuple(f"{layer}." for layer in stack))
    }
    last = tuple(f"{layer}." for layer in stack[LAYERS - layers :])
    assert inside == {
        name for name, _ in model.named_parameters() if name.startswith(last)
    }
    assert {name.rpartition(".")[2] for name in learn - inside} == {"weight", "bias"}
    assert len(learn - inside) == 2


@pytest.mark.parametrize("layers", [-1, LAYERS + 1])
def test_no_more_layers_learn_than_there_are(layers):
    with pytest.raises(
        ValueError,
        match=f"layers must be 0 to {LAYERS}, the number of layers, got {layers}",
    ):
        heads.only_last(make(), layers)


# Ablation and pruning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("pairs", SETS.values(), ids=SETS)
def test_ablation_is_zero_columns(name, pairs):
    model, x = make(name), inputs(name)
    with heads.ablate(model, pairs) as ablated:
        assert ablated is model
        found = call(model, x)
    near(found, call(without(model, name, pairs), x))
    assert (found - call(model, x)).abs().max() > 0.01


def test_ablation_leaves_no_trace():
    model = make()
    with unchanged(model):
        with heads.ablate(model, SETS["several"]), heads.ablate(model, SETS["but one"]):
            pass
        with pytest.raises(KeyError), heads.ablate(model, SETS["all"]):
            raise KeyError


def test_an_ablated_model_can_be_trained():
    model, x = make(), inputs()
    with heads.ablate(model, [(0, 0)]):
        call(model, x).sum().backward()
    assert model.vit.layers[0].attention.q_proj.weight.grad[4:].abs().min() > 0
    assert model.vit.layers[0].attention.q_proj.weight.grad[:4].abs().max() == 0


@EVERY
@pytest.mark.parametrize("pairs", SETS.values(), ids=SETS)
def test_pruned_is_ablated(name, pairs):
    model, x = make(name), inputs(name)
    small = heads.prune(model, pairs)
    with heads.ablate(model, pairs):
        near(call(small, x), call(model, x))
    counts = [HEADS - sum(layer == at for at, _ in pairs) for layer in range(LAYERS)]
    assert heads.count_heads(small) == counts
    assert heads.shape(small) == (LAYERS, max(counts))
    gone = (
        len(pairs) * 4 * (4 * 16) + len(pairs) * 4 * 3
    )  # size * (rows of q, k, v, columns of o) and biases of q, k, v
    size = {each: sum(p.numel() for p in each.parameters()) for each in (model, small)}
    assert size[model] - size[small] == gone


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_pruned_twice(name):
    """The remaining heads are numbered from 0 again."""
    model, x = make(name), inputs(name)
    twice = heads.prune(
        heads.prune(model, [(0, 1), (2, 0)]), [(0, 1), (2, 0), (2, 1), (2, 2)]
    )
    once = heads.prune(model, [(0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)])
    near(call(twice, x), call(once, x))
    assert heads.count_heads(twice) == heads.count_heads(once) == [2, 4, 0]


def test_pruning_copies():
    model = make()
    model.vit.layers[0].attention.q_proj.weight.requires_grad_(False)
    with unchanged(model), torch.no_grad():
        small = heads.prune(model, SETS["several"])
        for p in small.parameters():
            p += 1
    frozen = [name for name, p in small.named_parameters() if not p.requires_grad]
    assert frozen == ["vit.layers.0.attention.q_proj.weight"]
    assert not small.training


# Taylor scores --------------------------------------------------------------------------------------------------------


def test_taylor_scores_of_frozen_training_models():
    model, x, y = make(), inputs(), labels()
    expected = heads.taylor_scores(model, x, y)
    model.requires_grad_(False).train()
    near(heads.taylor_scores(model, x, y), expected)
    assert not any(p.requires_grad for p in model.parameters())
    assert all(part.training for part in model.modules())


def test_inputs_whose_gradients_overflow_are_refused():
    model, x, y = make().float(), inputs().float(), labels()
    with pytest.raises(ValueError, match="too large"):
        heads.taylor_scores(model, x * 1e30, y)


def test_taylor_scores_of_a_pruned_model():
    model, x, y = make(), inputs(), labels()
    with heads.ablate(model, [(0, 1), (2, 0)]):
        ablated = heads.taylor_scores(model, x, y)
    pruned = heads.taylor_scores(heads.prune(model, [(0, 1), (2, 0)]), x, y)
    near(pruned[0, :3], ablated[0, [0, 2, 3]])
    near(pruned[2, :3], ablated[2, 1:])
    assert pruned[[0, 2], 3].isnan().all()
    assert (ablated[[0, 2], [1, 0]] == 0).all()


def test_taylor_pruning_layer_by_layer():
    """Scores are recomputed without the heads that earlier layers lost."""
    model, x, y = make(), inputs(count=20), labels(20)
    expected, small = [], model
    for layer in range(LAYERS):  # as the paper does it: prune, compute again
        order = heads.taylor_scores(small, x, y)[layer].argsort()[:2].tolist()
        expected += [(layer, head) for head in order]
        small = heads.prune(small, [(layer, head) for head in order])
    assert heads.taylor_heads(model, x, y, 2) == expected
    assert [layer for layer, _ in heads.taylor_heads(model, x, y, [2, 0, 1])] == [
        0,
        0,
        2,
    ]
    assert heads.taylor_heads(model, x, y, 0) == []


def test_taylor_pruning_over_all_layers():
    model, x, y = make(), inputs(), labels()
    scores = heads.taylor_scores(model, x, y)
    found = heads.taylor_heads(model, x, y, 5, scope="model")
    assert [
        layer * HEADS + head for layer, head in found
    ] == scores.flatten().argsort()[:5].tolist()


# Pruning seeds --------------------------------------------------------------------------------------------------------
def test_members_drawn_from_one_ranking():
    ranking = [(layer, head) for layer in range(6) for head in range(8)]
    drawn = heads.sample_heads(ranking, 10, 4, seed=1)
    assert [len(set(one)) for one in drawn] == [10] * 4
    assert all(one == sorted(one) for one in drawn)
    assert len({tuple(one) for one in drawn}) == 4
    assert heads.sample_heads(ranking, 10, 2, seed=1) == drawn[:2]
    assert heads.sample_heads(ranking, 10, 1, seed=2)[0] != drawn[0]
    assert heads.sample_heads(ranking, 48, 1) == [ranking]
    often = heads.sample_heads([(0, head) for head in range(10)], 5, 2000)
    assert np.bincount([head for one in often for _, head in one]) == pytest.approx(
        1000, abs=100
    )


# Features -------------------------------------------------------------------------------------------------------------
@EVERY
def test_features_make_the_attention(name):
    """The heads' features of the first token, times the output projection, are the attention's output for it."""
    model, x = make(name), inputs(name)
    for attention, features in zip(
        attentions(model), heads.head_features(model, x, batch_size=2), strict=True
    ):
        found = []
        projection = model.get_submodule(attention.output.module)
        hook = projection.register_forward_hook(
            lambda _, args, output, found=found: found.append(output[:, 0])
        )
        call(model, x)
        hook.remove()
        near(features.flatten(1) @ projection.weight.mT + projection.bias, found[0])
    left = heads.head_features(
        heads.prune(model, [(0, head) for head in range(HEADS)]), x
    )
    assert [features.shape[:2] for features in left] == [
        (5, 0),
        *[(5, HEADS)] * (len(left) - 1),
    ]


def test_separation_by_the_definition():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(40, 3, 5)), rng.normal(1, 2, size=(25, 3, 5))
    found = heads.separation(torch.tensor(a), torch.tensor(b))
    for head in range(3):
        difference = a[:, head].mean(0) - b[:, head].mean(0)
        inverse = np.linalg.inv(np.cov(a[:, head].T))
        assert found.euclidean[head].item() == pytest.approx(np.linalg.norm(difference))
        assert found.mahalanobis[head].item() == pytest.approx(
            np.sqrt(difference @ inverse @ difference)
        )


def test_separation_of_equal_and_of_flat_features():
    a = torch.randn(30, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    assert all(part.abs().max() < 1e-12 for part in heads.separation(a, a))
    wide = torch.cat([a, torch.ones(30, 2, 3)], 2)  # directions in which nothing varies
    shifted = a + torch.tensor([1.0, 0, 0, 0])
    expected = heads.separation(a, shifted)
    found = heads.separation(wide, torch.cat([shifted, torch.ones(30, 2, 3)], 2))
    near(tuple(found), tuple(expected))
    scale = torch.diag(
        torch.tensor([3.0, 0.1, 1, 20])
    ).double()  # Mahalanobis distance does not depend on the units
    near(heads.separation(a @ scale, shifted @ scale).mahalanobis, expected.mahalanobis)


# Cost -----------------------------------------------------------------------------------------------------------------
def multiply_adds(batch, tokens, width, layers, size, hidden, counts, classes, patch):
    """Counted by hand: patches; in each layer q, k, v, o, attention and MLP; the classifier."""
    each = sum(
        4 * tokens * width * h * size + 2 * tokens * tokens * h * size for h in counts
    )
    mlp = layers * 2 * tokens * width * hidden
    return batch * ((tokens - 1) * patch * width + each + mlp + width * classes)


def test_multiply_adds_by_hand():
    model, x = make(), inputs(count=2)
    rest = {
        "tokens": 5,
        "width": 16,
        "layers": 3,
        "size": 4,
        "hidden": 64,
        "classes": 3,
        "patch": 16,
    }
    assert heads.multiply_adds(model, x) == multiply_adds(2, counts=[4, 4, 4], **rest)
    small = heads.prune(model, SETS["several"])
    assert heads.multiply_adds(small, x) == multiply_adds(2, counts=[3, 2, 3], **rest)
    ensemble = ensembles.from_members([model, small])
    assert heads.multiply_adds(ensemble, x) == multiply_adds(
        2, counts=[7, 6, 7], **rest | {"layers": 6}
    ) + 2 * (4 * 16 * 16 + 16 * 3)


# Bad input ------------------------------------------------------------------------------------------------------------
def two_encoders():
    return nn.Sequential(make(), make())


class Uneven(nn.Module):
    """Heads of 4 features, of which there are three for queries and two for keys."""

    def __init__(self):
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(8, 12),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.o_proj = nn.Linear(12, 8)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            two_encoders,
            ValueError,
            "Sequential holds 2 stacks of layers .*0.vit.layers, 1.*two towers",
        ),
        (
            lambda: nn.Sequential(Uneven()),
            ValueError,
            r"heads of 0 cannot be separated.*\[12, 8, 8, 12\]",
        ),
        (
            lambda: ensembles.from_members([make()]),
            TypeError,
            "one torch module.*ensemble.member",
        ),
    ],
)
def test_models_without_separable_heads(model, error, message):
    with pytest.raises(error, match=message):
        heads.shape(model())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "function",
    [heads.prune, lambda model, pairs: heads.ablate(model, pairs).__enter__()],
)
@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([(3, 0)], ValueError, r"no head \(3, 0\)"),
        ([(0, 4)], ValueError, r"no head \(0, 4\).*\[4, 4, 4\] heads"),
        (
            [(0, 1), (1, 1), (0, 1)],
            ValueError,
            r"head \(0, 1\) is given more than once",
        ),
        ((0, 1), TypeError, r"pairs of integers \(layer, head\)"),
    ],
)
def test_heads_that_are_not_there(function, pairs, error, message):
    with pytest.raises(error, match=message):
        function(make(), pairs)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (
            lambda m, x, y: heads.taylor_scores(m, x, y.double()),
            TypeError,
            "labels must be integers, got torch.float64",
        ),
        (
            lambda m, x, y: heads.taylor_scores(m, x / 0, y),
            ValueError,
            "inputs must be finite",
        ),
        (
            lambda m, x, y: heads.taylor_scores(m, x, y, batch_size=0),
            ValueError,
            "batch_size must be at least 1",
        ),
        (
            lambda m, x, y: heads.taylor_scores(m.vit, x, y),
            ValueError,
            "ViTModel must return logits",
        ),
        (
            lambda m, x, y: heads.taylor_heads(m, x, y, 5),
            ValueError,
            "remove must be one number or 3",
        ),
        (
            lambda m, x, y: heads.taylor_heads(m, x, y, 13, scope="model"),
            ValueError,
            "0 to 12, the number of heads",
        ),
        (
            lambda m, x, y: heads.taylor_heads(m, x, y, [1], scope="model"),
            TypeError,
            "takes one number",
        ),
        (
            lambda m, x, y: heads.taylor_heads(m, x, y, 1, scope="all"),
            ValueError,
            'scope must be "layer" or "model"',
        ),
        (
            lambda m, x, y: heads.sample_heads([(0, 0)], 2, 1),
            ValueError,
            "remove must be 0 to 1",
        ),
        (
            lambda m, x, y: heads.sample_heads([(0, 0)], 1, 0),
            ValueError,
            "members must be at least 1",
        ),
        (
            lambda m, x, y: heads.separation(torch.ones(3, 2, 4), torch.ones(3, 2, 5)),
            ValueError,
            "same heads",
        ),
        (
            lambda m, x, y: heads.separation(torch.ones(1, 2, 4), torch.ones(3, 2, 4)),
            ValueError,
            "at least 2 ID",
        ),
        (
            lambda m, x, y: heads.separation(
                torch.ones(3, 2, 4) / 0, torch.ones(3, 2, 4)
            ),
            ValueError,
            "must be finite",
        ),
    ],
)
def test_bad_input(run, error, message):
    with pytest.raises(error, match=message):
        run(make(), inputs(), labels())
