"""One call for the answer: every row is what the metrics and plain loops say, one pass reads a set, the file is read again."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from same import near
from scipy import integrate, stats
from sklearn.metrics import roc_auc_score
from small_tasks import make_task
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from uqlab import ensembles, metrics, study, training, uncertainty
from uqlab.study import decide

FEW = {"repeats": 20}
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(120, 6, generator=GENERATOR)
Y = torch.randint(3, (120,), generator=GENERATOR)
FAR = 2 * torch.randn(70, 6, generator=GENERATOR)


def ensemble(members=3, outputs=3):
    return ensembles.deep(lambda: nn.Linear(6, outputs), members, seed=1)


def same(one, other, left_out=("seconds",)):
    rows = [row for row in one if not row.startswith(left_out)]
    assert rows == [row for row in other if not row.startswith(left_out)]
    for row in rows:
        near(list(one[row]), list(other[row]), equal_nan=True)


def test_every_row_is_what_the_metrics_say():
    logits, labels = make_task()
    far = make_task(200, seed=1)[0] / 3
    found = study.evaluate(logits, labels, {"far": far}, **FEW)
    doubt = -metrics.log_prediction(logits).amax(1)
    expected = {
        "accuracy": metrics.accuracy(logits, labels),
        "nll": metrics.nll(logits, labels),
        "ece": metrics.ece(logits, labels),
        "ece_floor": metrics.ece_floor(logits, labels=labels)[0],
        "brier": metrics.brier(logits, labels),
        "aurc": metrics.aurc(logits, labels, doubt),
    }
    parts, outside = uncertainty.decompose(logits), uncertainty.decompose(far)
    truth = np.repeat([0, 1], [500, 200])
    scores = {"mi": "epistemic", "entropy": "total"}
    for score, part in scores.items():
        both = torch.cat([getattr(parts, part), getattr(outside, part)])
        expected[f"auroc_{score}_far"] = roc_auc_score(truth, both)
    for score, part in scores.items():
        separation = metrics.ood_detection(getattr(parts, part), getattr(outside, part))
        expected[f"fpr95_{score}_far"] = separation.fpr95
    assert set(found) == set(expected)
    for row, value in expected.items():
        assert found[row].value == pytest.approx(value, abs=1e-9), row
    for row in ("accuracy", "nll", "brier"):
        mean, low, high = metrics.interval([logits], labels, row, **FEW)
        near(list(found[row][:3]), [mean, low, high])
    rows = torch.arange(500)
    ends = metrics.bootstrap(
        lambda at: metrics.ece(logits[:, at], labels[at]), rows, **FEW
    )
    near(list(found["ece"][1:3]), list(ends))
    ends = metrics.bootstrap(
        lambda at: metrics.aurc(logits[:, at], labels[at], doubt[at]), rows, **FEW
    )
    near(list(found["aurc"][1:3]), list(ends))
    ends = metrics.auroc_interval(parts.epistemic, outside.epistemic, **FEW)
    near(list(found["auroc_mi_far"][1:3]), list(ends))


def test_baselines_are_those_of_a_constant_prediction():
    logits, labels = make_task()
    shares = torch.bincount(labels).double() / len(labels)
    constant = shares.log().expand(1, len(labels), 5)
    found = study.evaluate(logits, labels, {"far": logits[:, :9]}, **FEW)
    for row in ("accuracy", "nll", "brier"):
        near(found[row].baseline, getattr(metrics, row)(constant, labels))
    near(found["aurc"].baseline, 1 - found["accuracy"].value)
    floor, quantile = metrics.ece_floor(logits, labels=labels)
    near([found["ece"].baseline, found["ece_floor"].high], [floor, quantile])
    assert found["auroc_mi_far"].baseline == 0.5
    assert found["fpr95_mi_far"].baseline == 0.95


class Once(IterableDataset):
    """Batches that can be read one time."""

    def __init__(self, *tensors):
        self.batches = iter(zip(*(t.split(16) for t in tensors), strict=True))

    def __iter__(self):
        yield from self.batches


def test_whatever_predict_takes_gives_the_same_table():
    one = ensemble()
    expected = study.evaluate(one, (X, Y), {"far": FAR}, **FEW)
    pairs, outside = TensorDataset(X, Y), TensorDataset(FAR, FAR[:, 0])
    for test, far in (
        (pairs, outside),
        (DataLoader(pairs, 16), DataLoader(outside, 16)),
        ({"input": X, "labels": Y}, {"input": FAR}),
        (DataLoader(Once(X, Y), None), FAR.numpy()),
    ):
        same(study.evaluate(one, test, {"far": far}, batch_size=50, **FEW), expected)
    logits = training.predict(one, X)
    given = study.evaluate(logits, Y, {"far": training.predict(one, FAR)}, **FEW)
    same(expected, given, ("seconds", "parameters"))
    assert expected["parameters"].value == 3 * (6 * 3 + 3)
    assert 0 < expected["seconds"].value < 1


def test_labels_come_from_the_pass_that_predicts():
    """A loader that shuffles gives other orders each time; the models of one call see the same inputs."""
    mixed = DataLoader(TensorDataset(X, Y), 16, shuffle=True)
    two = {"one": ensemble(), "same": ensemble()}
    found = study.evaluate(
        two, mixed, {"far": DataLoader(FAR, 16, shuffle=True)}, **FEW
    )
    expected = study.evaluate(ensemble(), (X, Y), {"far": FAR}, **FEW)
    for row in expected.keys() - {"seconds", "parameters", "ece_floor"}:
        assert found[f"{row} one"].value == pytest.approx(expected[row].value, abs=1e-6)
        near(list(found[f"{row} same - one"][:3]), [0.0, 0.0, 0.0])


def test_differences_of_models_are_paired():
    logits, labels = make_task(members=6)
    far = make_task(200, members=6, seed=1)[0] / 3
    halves = {"a": logits[:3], "b": logits[3:]}
    found = study.evaluate(halves, labels, {"far": {"a": far[:3], "b": far[3:]}}, **FEW)
    mean, low, high = metrics.interval(
        [logits[3:]], labels, "nll", than=[logits[:3]], **FEW
    )
    near(list(found["nll b - a"][:3]), [mean, low, high])
    parts = [
        uncertainty.decompose(z).epistemic for z in (*halves.values(), far[:3], far[3:])
    ]
    ends = metrics.auroc_interval(parts[1], parts[3], than=(parts[0], parts[2]), **FEW)
    near(list(found["auroc_mi_far b - a"][1:3]), list(ends))
    gap = found["auroc_mi_far b"].value - found["auroc_mi_far a"].value
    assert found["auroc_mi_far b - a"].value == pytest.approx(gap)
    assert "ece_floor b - a" not in found


def test_one_network_has_no_mutual_information_and_one_logit_is_two_classes():
    single = ensemble(outputs=1).member(0)
    found = study.evaluate(single, (X, Y % 2), {"far": FAR}, **FEW)
    assert "auroc_entropy_far" in found
    assert "auroc_mi_far" not in found
    z = training.predict(single, X)
    both = torch.cat([torch.zeros_like(z), z], -1)
    near(found["nll"].value, metrics.nll(both, Y % 2))


def test_shifted_sets_have_rows_of_their_own():
    logits, labels = make_task()
    worse = {f"noise {s}": (logits / s, labels) for s in (2, 4)}
    found = study.evaluate(logits, labels, shifted=worse, **FEW)
    for severity in (2, 4):
        for row in ("accuracy", "nll", "ece"):
            value = getattr(metrics, row)(logits / severity, labels)
            assert found[f"{row}_noise {severity}"].value == pytest.approx(value)
        assert f"ece_floor_noise {severity}" in found


def test_a_regression_is_scored_by_its_mixture():
    means = torch.tensor([[0.0, 1.0, 5.0], [1.0, 1.5, 4.0]], dtype=torch.float64)
    variances = torch.tensor([[1.0, 0.25, 4.0], [0.5, 1.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([0.3, -1.0, 9.5], dtype=torch.float64)
    z = torch.stack([means, variances.log()], -1)
    found = study.evaluate(z, y, {"far": 2 * z}, outputs="gaussian", **FEW)
    rows = []
    for i in range(3):
        members = [stats.norm(means[m, i], variances[m, i].sqrt()) for m in range(2)]
        cdf = lambda t: np.mean([member.cdf(t) for member in members])  # noqa: B023, E731
        loss = -np.log(np.mean([member.pdf(y[i]) for member in members]))
        below, _ = integrate.quad(lambda t: cdf(t) ** 2, -30, y[i])  # noqa: B023
        above, _ = integrate.quad(lambda t: (1 - cdf(t)) ** 2, y[i], 40)  # noqa: B023
        rows.append([loss, below + above, 0.05 <= cdf(y[i]) <= 0.95])
    expected = np.mean(rows, 0)
    near([found[row].value for row in ("nll", "crps", "coverage")], expected.tolist())
    assert 0 < expected[2] < 1
    assert found["nll"].low < found["nll"].value < found["nll"].high
    one = stats.norm(y.mean(), y.std(correction=0))
    near(found["nll"].baseline, -one.logpdf(y).mean())
    inside = uncertainty.decompose_gaussian(means, variances)
    outside = uncertainty.decompose_gaussian(2 * means, variances**2)
    separation = metrics.ood_detection(inside.epistemic, outside.epistemic)
    assert found["auroc_epistemic_far"].value == separation.auroc
    assert "auroc_total_far" in found
    same_again = study.evaluate({"a": z, "b": z}, y, outputs="gaussian", **FEW)
    near(list(same_again["crps b - a"][:3]), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("shape", [(2, 120), (2, 120, 1), (2, 120, 4), (2, 120, 1, 2)])
def test_what_is_no_mean_and_variance_is_refused(shape):
    with pytest.raises(ValueError, match=r"\[members, samples, 2\].*gaussian_nll"):
        study.evaluate(torch.randn(shape), X[:, 0], outputs="gaussian")
    if len(shape) == 3:
        network = ensemble(outputs=shape[2])
        with pytest.raises(ValueError, match=r"\[members, samples, 2\]"):
            study.evaluate(network, (X, X[:, 0]), outputs="gaussian")


def test_targets_that_are_all_the_same():
    """The simple baseline is sure then, and right."""
    z = torch.zeros(1, 30, 2)
    result = study.evaluate(z, torch.zeros(30), outputs="gaussian", **FEW)
    near(result["nll"].value, math.log(2 * math.pi) / 2)
    assert result["nll"].baseline < -300
    assert result["crps"].baseline == pytest.approx(0)


@pytest.mark.parametrize("outputs", [1, 3])
def test_what_is_saved_is_what_a_report_reads(tmp_path, outputs):
    one, y = ensemble(outputs=outputs), Y.clamp(max=max(1, outputs - 1))
    path = tmp_path / "run.npz"
    data = DataLoader(TensorDataset(X, y), 16)
    found = study.evaluate(one, data, {"far": FAR}, save=path, **FEW)
    run = decide.saved(path)
    near(run.logits[..., -1:], training.predict(one, X)[..., -1:])
    near(run.ood["far"][..., -1:], training.predict(one, FAR)[..., -1:])
    assert torch.equal(run.labels, y)
    again = study.evaluate(run.logits, run.labels, run.ood, **FEW)
    same(found, again, ("seconds", "parameters"))


def test_it_prints_and_becomes_a_frame():
    found = study.evaluate(ensemble(), (X, Y), **FEW)
    lines = str(found).splitlines()
    assert lines[0].split() == ["value", "low", "high", "baseline"]
    assert {line.split()[0] for line in lines[1 : 1 + len(found)]} == {*found}
    assert "nan" not in str(found)
    frame = found.frame()
    assert isinstance(frame, pd.DataFrame)
    assert [*frame.columns] == ["value", "low", "high", "baseline"]
    assert frame.loc["nll", "low"] == found["nll"].low
    assert math.isnan(frame.loc["parameters", "low"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: study.evaluate(ensemble(), X), "labels are missing"),
        (lambda: study.evaluate(ensemble(), (X, Y + 3)), "labels must be 0 to 2"),
        (lambda: study.evaluate(ensemble(), (X, Y), {"far": FAR[:0]}), "at least one"),
        (lambda: study.evaluate(ensemble(), (X, Y), outputs="counts"), "outputs must be"),
        (
            lambda: study.evaluate({"a": ensemble(), "b": ensemble()}, (X, Y), save="x"),
            "save is a file for the logits of one classifier",
        ),
        (lambda: study.evaluate(None, (X, Y), save="."), "name a file"),  # before all
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_logits_of_several_models_come_by_name(unchecked):
    z = training.predict(ensemble(), X)
    with pytest.raises(TypeError, match="logits b must be"):
        study.evaluate({"a": z, "b": z}, Y, {"far": {"a": z}})
    with pytest.raises(ValueError, match="labels are missing"):
        study.evaluate(z, Y, shifted={"noise": z})
    with pytest.raises(TypeError, match="ood must be by name"):
        study.evaluate(ensemble(), (X, Y), FAR)
    with pytest.raises(TypeError, match="shifted must be by name"):
        study.evaluate(ensemble(), (X, Y), shifted=[1])


def test_differences_are_to_the_first_model_or_are_left_out():
    three = {"one": ensemble().member(0), "a": ensemble(), "b": ensemble()}
    found = study.evaluate(three, (X, Y), {"far": FAR}, **FEW)
    assert {"accuracy b - one", "auroc_entropy_far b - one", "auroc_mi_far b"} <= {
        *found
    }
    assert not any("b - a" in row or "auroc_mi_far one" in row for row in found)
