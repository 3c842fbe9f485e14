"""Greedy circuits: Algorithm 1 as a plain loop, ties, threads, and bad input."""

import functools
import itertools

import numpy as np
import pytest
import torch
from head_networks import HEADS, LAYERS, MAKERS, call, inputs, labels, make, strong
from same import near, unchanged
from sklearn.metrics import roc_auc_score
from torch import nn

from uqlab import heads

ALL = list(itertools.product(range(LAYERS), range(HEADS)))


def score_of(model, x, y, ood, kind):
    """Accuracy, AUROC by scikit-learn, or the mean of both."""
    with torch.no_grad():
        in_, out = call(model, x), call(model, ood)
    accuracy = (in_.argmax(1) == y).double().mean().item()
    confidence = torch.cat([in_, out]).softmax(1).amax(1)
    auroc = roc_auc_score(np.arange(len(confidence)) >= len(in_), -confidence.numpy())
    return {"acc": accuracy, "ood": auroc, "avg": (accuracy + auroc) / 2}[kind]


def algorithm_1(model, x, y, ood, kind, budget, candidates=ALL):
    """Hydra, Algorithm 1, line by line."""
    removed, scores = [], []
    remaining = list(candidates)
    for _ in range(budget):
        best, chosen, step = -np.inf, None, {}
        for head in remaining:
            with heads.ablate(model, [*removed, head]):
                step[head] = score_of(model, x, y, ood, kind)
            if step[head] > best:
                best, chosen = step[head], head
        removed.append(chosen)
        remaining.remove(chosen)
        scores.append(step)
    return removed, scores


search = functools.partial(heads.greedy_circuit, progress=False)


def data(name, count=30):
    y = labels(count)
    x = inputs(name, count, seed=5)
    return x, y, inputs(name, 15, seed=6)


# The order ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "score"),
    [(name, "avg") for name in MAKERS] + [("vit", "acc"), ("vit", "ood")],
)
def test_the_order_of_algorithm_1(name, score):
    model, (x, y, ood) = make(name), data(name)
    expected, scores = algorithm_1(model, x, y, ood, score, 3)
    circuit = search(model, x, y, ood, score=score, budget=3)
    assert circuit == expected
    assert circuit.start == pytest.approx(score_of(model, x, y, ood, score))
    for found, step in zip(circuit.scores, scores, strict=True):
        wanted = np.full((LAYERS, HEADS), np.nan)
        for head, value in step.items():
            wanted[head] = value
        np.testing.assert_allclose(found, wanted, rtol=1e-9)


@pytest.mark.parametrize(("threads", "batch_size"), [(1, 4), (3, 10), (2, 100)])
def test_threads_and_batches_change_no_order(threads, batch_size):
    model, (x, y, ood) = make(), data("vit")
    model.train()
    whole = search(model, x, y, ood, budget=len(ALL))
    assert sorted(whole) == ALL
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with unchanged(model):
            found = search(model, x, y, ood, budget=3, batch_size=batch_size)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found == whole[:3]
    near(found.scores, whole.scores[:3], equal_nan=True)
    assert all(part.training for part in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_ties_go_to_the_lowest_layer_and_head():
    """Accuracy alone, with predictions that no head changes: all scores are equal."""
    model, (x, _, _) = make(), data("vit")
    with torch.no_grad():
        model.classifier.weight.zero_()
    y = torch.zeros(len(x), dtype=torch.int64)
    circuit = search(model, x, y, None, score="acc", budget=6)
    assert circuit == ALL[:6]
    assert circuit.start == (model.classifier.bias.argmax() == 0)


def test_circuits_of_a_pruned_model():
    model, (x, y, ood) = make(), data("vit")
    small = heads.prune(model, [(1, 0), (1, 1), (1, 2), (1, 3), (2, 3)])
    circuit = search(small, x, y, ood, budget=7)
    assert sorted(circuit) == [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_circuits_without_heads_in_the_last_layer(name):
    model, (x, y, ood) = make(name), data(name)
    small = heads.prune(model, [head for head in ALL if head[0] == LAYERS - 1])
    circuit = search(small, x, y, ood, budget=3)
    assert circuit == algorithm_1(small, x, y, ood, "avg", 3, ALL[:-HEADS])[0]


class InPlace(nn.Module):
    """A layer that changes what the layer before it returned."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x):
        x += self.attn(x, x, x)[0]
        return x


def test_layers_that_change_their_input_in_place():
    torch.manual_seed(0)
    layers = nn.Sequential(*[InPlace() for _ in range(3)])
    model = nn.Sequential(nn.Linear(5, 8), layers, nn.Flatten(), nn.Linear(32, 3))
    strong(model)
    x, ood = torch.randn(2, 20, 4, 5, dtype=torch.float64)
    y = labels(20)
    expected, _ = algorithm_1(model, x, y, ood, "avg", 3)
    assert search(model, x, y, ood, budget=3) == expected


# Bad input ------------------------------------------------------------------------------------------------------------
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        return self.inner(x) + self.inner(x.flip(3))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 13}, "budget must be 1 to 12, got 13"),
        ({"score": "nll"}, "score must be one of 'acc', 'ood', 'avg'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"precision": "float16"}, "is for GPUs"),
        ({"id_labels": labels(29)}, r"labels must be \[samples\] = \[30\]"),
        ({"id_inputs": inputs(count=30) / 0}, "inputs must be finite"),
        ({"ood_inputs": inputs(count=1)[:0]}, "at least one, got"),
        ({"model": Twice()}, "a layer runs more than once in a pass"),
    ],
)
def test_bad_input(change, message):
    x, y, ood = data("vit")
    given = {"id_inputs": x, "id_labels": y, "ood_inputs": ood, "budget": 1}
    with pytest.raises(ValueError, match=message):
        search(**{"model": make()} | given | change)
