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


def test_pruned_twice():
    """The remaining heads are numbered from 0 again."""
    model, x = make(), inputs()
    first, second = [(0, 1), (2, 0)], [(0, 1), (2, 0), (2, 1), (2, 2)]
    twice = heads.prune(heads.prune(model, first), second)
    once = heads.prune(model, [(0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)])
    near(call(twice, x), call(once, x))
    assert heads.count_heads(twice) == heads.count_heads(once) == [2, 4, 0]


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


def test_taylor_pruning_layer_by_layer():
    """Scores are recomputed without the heads that earlier layers lost."""
    model, x, y = make(), inputs(count=20), labels(20)
    expected, small = [], model
    for layer in range(LAYERS):  # as the paper does it: prune, compute again
        order = heads.taylor_scores(small, x, y)[layer].argsort()[:2].tolist()
        expected += [(layer, head) for head in order]
        small = heads.prune(small, [(layer, head) for head in order])
    assert heads.taylor_heads(model, x, y, 2) == expected
    uneven = heads.taylor_heads(model, x, y, [2, 0, 1])
    assert [layer for layer, _ in uneven] == [0, 0, 2]


def test_taylor_pruning_over_all_layers():
    model, x, y = make(), inputs(), labels()
    scores = heads.taylor_scores(model, x, y)
    found = heads.taylor_heads(model, x, y, 5, scope="model")
    places = [layer * HEADS + head for layer, head in found]
    assert places == scores.flatten().argsort()[:5].tolist()


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


def test_separation_ignores_units_and_directions_without_variance():
    a = torch.randn(30, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    assert all(part.abs().max() < 1e-12 for part in heads.separation(a, a))
    shifted = a + torch.tensor([1.0, 0, 0, 0])
    expected = heads.separation(a, shifted)
    flat = torch.ones(30, 2, 3)
    found = heads.separation(torch.cat([a, flat], 2), torch.cat([shifted, flat], 2))
    near(tuple(found), tuple(expected))
    scale = torch.diag(torch.tensor([3.0, 0.1, 1, 20])).double()
    near(heads.separation(a @ scale, shifted @ scale).mahalanobis, expected.mahalanobis)


# Cost -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pairs", [[], SETS["several"]])
def test_multiply_adds_by_hand(pairs):
    """Patches; in each layer q, k, v, o, attention and MLP; the classifier."""
    small, x = heads.prune(make(), pairs), inputs(count=2)
    tokens, width, size = 5, 16, 4
    each = 4 * tokens * width * size + 2 * tokens * tokens * size
    attention = (LAYERS * HEADS - len(pairs)) * each
    mlps = LAYERS * 2 * tokens * width * 64
    one = (tokens - 1) * 16 * width + attention + mlps + width * 3
    assert heads.multiply_adds(small, x) == 2 * one
    assert heads.multiply_adds(ensembles.from_members([small, small]), x) == 4 * one


# Bad input ------------------------------------------------------------------------------------------------------------
class Uneven(nn.Module):
    """Heads of 4 features, of which there are three for queries and two for keys."""

    def __init__(self):
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.o_proj = nn.Linear(8, 12), nn.Linear(12, 8)
        self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: nn.Sequential(make(), make()), ValueError, "2 stacks of layers"),
        (lambda: nn.Sequential(Uneven()), ValueError, "heads of 0 cannot be separated"),
        (lambda: ensembles.from_members([make()]), TypeError, "one torch module"),
    ],
)
def test_models_without_separable_heads(model, error, message):
    with pytest.raises(error, match=message):
        heads.shape(model())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(3, 0)], r"got \(3, 0\)"),
        ([(0, 4)], r"\[4, 4, 4\] heads"),
        ([(0, 1), (1, 1), (0, 1)], "more than once"),
        ((0, 1), "must be a list of"),
    ],
)
def test_heads_that_are_not_there(pairs, message):
    model = make()
    for function in (heads.prune, lambda *given: heads.ablate(*given).__enter__()):
        with pytest.raises(ValueError, match=message):
            function(model, pairs)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda m, x, y: heads.taylor_scores(m, x / 0, y), "inputs must be finite"),
        (lambda m, x, y: heads.taylor_scores(m.vit, x, y), "must return logits"),
        (lambda m, x, y: heads.taylor_heads(m, x, y, 5), "remove must be 0 to 4"),
        (lambda m, x, y: heads.taylor_heads(m, x, y, [1]), "shorter"),
        (lambda m, x, y: heads.taylor_heads(m, x, y, 1, scope="all"), "scope must be"),
        (lambda m, x, y: heads.sample_heads([(0, 0)], 2, 1), "remove must be 0 to 1"),
        (lambda m, x, y: heads.separation(torch.ones(3, 2, 4), torch.ones(3, 2, 5)), "same heads"),
        (lambda m, x, y: heads.separation(torch.ones(1, 2, 4), torch.ones(3, 2, 4)), "at least 2 ID"),
    ],
)  # fmt: skip
def test_bad_input(run, message):
    with pytest.raises(ValueError, match=message):
        run(make(), inputs(), labels())
