"""Greedy circuits: Algorithm 1 as a plain loop, ties, resuming, and bad input."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from head_networks import EVERY, HEADS, LAYERS, call, inputs, labels, make, strong
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


def data(name, count=30):
    y = labels(count)
    x = inputs(name, count, seed=5)
    return x, y, inputs(name, 15, seed=6)


# The order ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("score", ["acc", "ood", "avg"])
@EVERY
def test_the_order_of_algorithm_1(name, score):
    model, (x, y, ood) = make(name), data(name)
    expected, scores = algorithm_1(model, x, y, ood, score, 4)
    circuit = heads.greedy_circuit(
        model, x, y, ood, score=score, budget=4, progress=False
    )
    assert circuit == expected
    assert circuit.start == pytest.approx(score_of(model, x, y, ood, score))
    for found, step in zip(circuit.scores, scores, strict=True):
        wanted = np.full((LAYERS, HEADS), np.nan)
        for head, value in step.items():
            wanted[head] = value
        np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_batches_and_larger_budgets_change_no_order():
    model, (x, y, ood) = make(), data("vit")
    whole = heads.greedy_circuit(model, x, y, ood, budget=len(ALL), progress=False)
    assert sorted(whole) == ALL
    for batch_size in (4, 100):
        assert (
            heads.greedy_circuit(
                model, x, y, ood, budget=3, batch_size=batch_size, progress=False
            )
            == whole[:3]
        )


def test_ties_go_to_the_lowest_layer_and_head():
    """Accuracy alone, with predictions that no head changes: all scores are equal."""
    model, (x, _, _) = make(), data("vit")
    with torch.no_grad():
        model.classifier.weight.zero_()
    y = torch.zeros(len(x), dtype=torch.int64)
    circuit = heads.greedy_circuit(
        model, x, y, None, score="acc", budget=6, progress=False
    )
    assert circuit == ALL[:6]
    assert circuit.start == (model.classifier.bias.argmax() == 0)


def test_circuits_of_a_pruned_model():
    model, (x, y, ood) = make(), data("vit")
    small = heads.prune(model, [(1, 0), (1, 1), (1, 2), (1, 3), (2, 3)])
    circuit = heads.greedy_circuit(small, x, y, ood, budget=7, progress=False)
    assert sorted(circuit) == [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_circuits_without_heads_in_the_last_layer(name):
    model, (x, y, ood) = make(name), data(name)
    small = heads.prune(model, [head for head in ALL if head[0] == LAYERS - 1])
    circuit = heads.greedy_circuit(small, x, y, ood, budget=3, progress=False)
    assert circuit == algorithm_1(small, x, y, ood, "avg", 3, ALL[:-HEADS])[0]


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_order(threads):
    model, (x, y, ood) = make(), data("vit")
    expected = heads.greedy_circuit(
        model, x, y, ood, budget=3, batch_size=10, progress=False
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = heads.greedy_circuit(
            model, x, y, ood, budget=3, batch_size=10, progress=False
        )
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found == expected
    near(found.scores, expected.scores, equal_nan=True)


def test_the_model_is_left_alone():
    model, (x, y, ood) = make(), data("vit")
    model.train()
    with unchanged(model):
        heads.greedy_circuit(model, x, y, ood, budget=2, progress=False)
    assert all(part.training for part in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_bfloat16_is_offered():
    model, (x, y, ood) = make().float(), data("vit")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this CPU has no bfloat16 matrix units")
        circuit = heads.greedy_circuit(
            model,
            x.float(),
            y,
            ood.float(),
            budget=2,
            precision="bfloat16",
            progress=False,
        )
    assert len(set(circuit)) == 2


# Resuming -------------------------------------------------------------------------------------------------------------
def test_a_stopped_search_goes_on(tmp_path):
    """The search stops in the middle of its third step."""
    model, (x, y, ood) = make(), data("vit")
    calls, path = [], tmp_path / "folder" / "circuit.safetensors"
    settings = {"budget": 3, "progress": False, "checkpoint": path}

    class Stop(Exception):
        pass

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            calls.append(len(x))
            if len(calls) > most[0]:
                raise Stop
            return self.inner(x)

    most = [10**9]
    whole = heads.greedy_circuit(Counted(), x, y, ood, **settings)
    path.unlink()
    total = len(calls)
    calls.clear()
    most[0] = total - 5
    with pytest.raises(Stop):
        heads.greedy_circuit(Counted(), x, y, ood, **settings)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    calls.clear()
    most[0] = 10**9
    resumed = heads.greedy_circuit(Counted(), x, y, ood, **settings)
    assert len(calls) < total / 2  # the finished steps are not computed again
    assert resumed == whole
    assert resumed.start == whole.start
    near(resumed.scores, whole.scores, equal_nan=True)


def test_a_finished_search_goes_on_to_a_larger_budget(tmp_path):
    model, (x, y, ood) = make(), data("vit")
    path = tmp_path / "circuit"
    heads.greedy_circuit(model, x, y, ood, budget=3, checkpoint=path, progress=False)
    longer = heads.greedy_circuit(
        model, x, y, ood, budget=6, checkpoint=path, progress=False
    )
    assert longer == heads.greedy_circuit(model, x, y, ood, budget=6, progress=False)
    shorter = heads.greedy_circuit(
        model, x, y, ood, budget=2, checkpoint=path, progress=False
    )
    assert shorter == longer[:2]
    assert shorter.scores.shape[0] == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda m, x, y, ood, s: (make(seed=1), x, y, ood, s),
        lambda m, x, y, ood, s: (m, x + 0.01, y, ood, s),
        lambda m, x, y, ood, s: (
            m,
            torch.cat([x[:20], x[20:].flip(0)]),
            y,
            ood,
            s,
        ),  # the same sum and first values
        lambda m, x, y, ood, s: (m, x, y.flip(0), ood, s),
        lambda m, x, y, ood, s: (m, x, y, ood[1:], s),
        lambda m, x, y, ood, s: (m, x, y, ood, s | {"score": "ood"}),
    ],
)
def test_checkpoints_of_other_searches(other, tmp_path):
    settings = {
        "score": "avg",
        "budget": 1,
        "checkpoint": tmp_path / "circuit",
        "progress": False,
    }
    given = (make(), *data("vit"), settings)
    heads.greedy_circuit(*given[:4], **settings)
    *changed, settings = other(*given)
    with pytest.raises(
        ValueError, match="is of another search; delete the file or name another"
    ):
        heads.greedy_circuit(*changed, **settings)


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b[:-9],
        lambda b: b"",
        lambda b: b.replace(b"uqlab", b"other"),
        lambda b: flipped(b, len(b) - 1),  # a number
        lambda b: flipped(b, b.index(b"start") + 10),
    ],
)
def test_damaged_checkpoints(spoil, tmp_path):
    path = tmp_path / "circuit"
    heads.greedy_circuit(
        make(), *data("vit"), budget=1, checkpoint=path, progress=False
    )
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match="damaged or none of ours"):
        heads.greedy_circuit(
            make(), *data("vit"), budget=1, checkpoint=path, progress=False
        )


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
    found = heads.greedy_circuit(model, x, y, ood, budget=3, progress=False)
    assert found == expected


# Bad input ------------------------------------------------------------------------------------------------------------
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        return self.inner(x) + self.inner(x.flip(3))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"budget": 13},
            ValueError,
            "budget must be 1 to 12, the number of heads, got 13",
        ),
        ({"score": "nll"}, ValueError, 'score must be "acc", "ood" or "avg"'),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        (
            {"precision": "float16"},
            ValueError,
            'precision="float16" is for GPUs',
        ),
        ({"ood": None}, ValueError, 'score="avg" needs ood_inputs'),
        ({"y": None}, ValueError, 'score="avg" needs id_labels'),
        ({"y": labels(29)}, ValueError, r"labels must be \[samples\] = \[30\]"),
        (
            {"x": torch.full((30, 1, 8, 8), torch.nan)},
            ValueError,
            "inputs must be finite",
        ),
        ({"ood": inputs(count=1)[:0]}, ValueError, "at least one, got"),
        (
            {"model": Twice()},
            ValueError,
            "Twice cannot be searched: a layer runs more than once in a pass",
        ),
    ],
)
def test_bad_input(change, error, message):
    x, y, ood = data("vit")
    given = {
        "model": make(),
        "x": x,
        "y": y,
        "ood": ood,
        "budget": 1,
        "progress": False,
    } | change
    model, x, y, ood = (given.pop(name) for name in ("model", "x", "y", "ood"))
    with pytest.raises(error, match=message):
        heads.greedy_circuit(model, x, y, ood, **given)
