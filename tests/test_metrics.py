"""Metrics of predictions: identities and bounds, hand-computed cases, scikit-learn as the reference, bad input."""

import numpy as np
import pytest
import torch
from same import near
from sklearn import metrics as sklearn_metrics
from small_tasks import binary, make_task

from uqlab import metrics

CALIBRATION = [
    metrics.ece,
    metrics.adaptive_ece,
    metrics.classwise_ece,
    metrics.calibration_gap,
]
QUALITY = [metrics.accuracy, metrics.nll, metrics.brier, metrics.macro_f1]


# Prediction quality ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pool", ["probabilities", "logits"])
def test_quality_agrees_with_scikit_learn(pool):
    logits, labels = make_task()
    mean = {
        "probabilities": logits.softmax(-1).mean(0),
        "logits": logits.mean(0).softmax(-1),
    }
    p = mean[pool]
    near(metrics.log_prediction(logits, pool), p.log())
    logits = metrics.log_prediction(logits, pool)[None]
    predicted, one_hot = p.argmax(1), torch.nn.functional.one_hot(labels)
    accuracy = sklearn_metrics.accuracy_score(labels, predicted)
    assert metrics.accuracy(logits, labels) == accuracy
    loss = sklearn_metrics.log_loss(labels, p)
    assert metrics.nll(logits, labels) == pytest.approx(loss, rel=1e-12)
    errors = [
        sklearn_metrics.brier_score_loss(one_hot[:, c], p[:, c]) for c in range(5)
    ]
    assert metrics.brier(logits, labels) == pytest.approx(sum(errors), rel=1e-12)
    f1 = sklearn_metrics.f1_score(labels, predicted, average="macro")
    assert metrics.macro_f1(logits, labels) == pytest.approx(f1, rel=1e-12)


def test_loss_of_the_mean_plus_divergence_is_the_mean_loss_for_both_pools():
    logits, labels = make_task()
    member_loss = np.mean([metrics.nll(member[None], labels) for member in logits])
    dual = metrics.log_prediction(
        logits, "logits"
    )  # the Bregman dual mean of the members
    divergence = (dual.exp() * (dual - logits.log_softmax(-1))).sum(-1).mean().item()
    assert metrics.nll(dual[None], labels) + divergence == pytest.approx(
        member_loss, rel=1e-12
    )
    member_brier = np.mean([metrics.brier(member[None], labels) for member in logits])
    variance = logits.softmax(-1).var(0, correction=0).sum(-1).mean().item()
    assert metrics.brier(logits, labels) + variance == pytest.approx(
        member_brier, rel=1e-12
    )


# Calibration ----------------------------------------------------------------------------------------------------------
def test_calibration_by_hand():
    logits, labels = binary([0.6, 0.7, 0.75, 0.9], [1, 0, 1, 1])
    # Ten bins of width .1: .6 | .7 | .75 | .9 alone each; two of equal count: {.6, .7} and {.75, .9}.
    assert metrics.ece(logits, labels, 10) == pytest.approx(
        (0.4 + 0.7 + 0.25 + 0.1) / 4
    )
    assert metrics.adaptive_ece(logits, labels, 2) == pytest.approx(
        (abs(1.3 - 1) + abs(1.65 - 2)) / 4
    )
    assert metrics.calibration_gap(logits, labels) == pytest.approx(abs(2.95 - 3) / 4)
    # One bin per class: both classes miss by the same amount.
    assert metrics.classwise_ece(logits, labels, 1) == pytest.approx(0.05 / 4)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_binned_errors_agree_with_plain_loops(bins):
    logits, labels = make_task(samples=200)
    p = logits.softmax(-1).mean(0).numpy()
    one_hot = np.eye(5)[labels]

    def binned(confidence, hit):
        total = 0.0
        for b in range(bins):
            inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
            total += abs((confidence - hit)[inside].sum()) / len(hit)
        return total

    hit = p.argmax(1) == labels.numpy()
    assert metrics.ece(logits, labels, bins) == pytest.approx(binned(p.max(1), hit))
    expected = np.mean([binned(p[:, c], one_hot[:, c]) for c in range(5)])
    assert metrics.classwise_ece(logits, labels, bins) == pytest.approx(expected)
    order = p.max(1).argsort(kind="stable")
    expected = (
        sum(abs((p.max(1) - hit)[part].sum()) for part in np.array_split(order, bins))
        / 200
    )
    assert metrics.adaptive_ece(logits, labels, bins) == pytest.approx(expected)


@pytest.mark.parametrize("pool", ["probabilities", "logits"])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_temperature_is_recovered_and_optimal(pool, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 20_000, 4, generator=generator, dtype=torch.float64) * 2
    labels = torch.multinomial(
        (logits[0] / temperature).softmax(-1), 1, generator=generator
    )[:, 0]
    fitted = metrics.fit_temperature(logits, labels, pool)
    assert fitted == pytest.approx(temperature, rel=0.05)
    log_p = metrics.log_prediction(logits, pool)[None]
    best = metrics.nll(log_p / fitted, labels)
    assert all(
        best <= metrics.nll(log_p / (fitted * factor), labels)
        for factor in (0.98, 1.02)
    )


def test_the_floor_of_the_ece_is_that_of_labels_drawn_from_the_prediction():
    """Of 200 such sets 95 % are below the quantile in the mean: 180 to 198, ten standard deviations of its draws apart."""
    logits, _ = make_task(300)
    p = metrics.log_prediction(logits).exp()
    floor, quantile = metrics.ece_floor(logits)
    generator = torch.Generator().manual_seed(1)
    drawn = [
        metrics.ece(logits, torch.multinomial(p, 1, generator=generator)[:, 0])
        for _ in range(200)
    ]
    assert floor == pytest.approx(np.mean(drawn), rel=0.05)
    assert quantile == pytest.approx(np.quantile(drawn, 0.95), rel=0.1)
    assert 180 <= sum(value <= quantile for value in drawn) <= 198


def test_the_floor_of_fewer_inputs_is_over_inputs_too():
    """One of two inputs, whose ECE is 0 or, however it is labelled, 1/2."""
    logits = torch.tensor([[[60.0, 0.0], [0.1, 0.1]]])
    floor, quantile = metrics.ece_floor(logits, n=1, draws=2000)
    assert floor == pytest.approx(0.25, abs=0.03)
    assert quantile == 0.5
    many, _ = metrics.ece_floor(logits, n=800)
    assert many == pytest.approx(0.5 * (400 * 2 / np.pi) ** 0.5 / 800, rel=0.1)


def test_the_floor_with_labels_is_that_at_their_best_temperature():
    logits, labels = make_task(2000, members=1)
    sure = 3 * metrics.log_prediction(logits)[None]
    best = sure / metrics.fit_temperature(sure, labels)
    assert metrics.ece_floor(sure, labels=labels) == metrics.ece_floor(best)
    assert metrics.ece_floor(sure, labels=labels) != metrics.ece_floor(sure)


# Bad input ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("metric", [*QUALITY, *CALIBRATION, metrics.fit_temperature])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda z, y: (z[0], y), ValueError, r"logits\[None\]"),
        (lambda z, y: (z, y[:-1]), ValueError, r"\[samples\] = \[500\]"),
        (lambda z, y: (z, y + 1), ValueError, "labels must be 0 to 4"),
        (lambda z, y: (z, y.float()), TypeError, "integers"),
        (lambda z, y: (z / 0, y), ValueError, "logits must be finite"),
        (lambda z, y: (z[..., :1], 0 * y), ValueError, "two classes or more"),
    ],
)
def test_bad_predictions_are_refused(unchecked, metric, change, error, message):
    with pytest.raises(error, match=message):
        metric(*change(*make_task()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda z, y: metrics.log_prediction(z, "median"),
            "pool must be one of .*, 'logits'; got .median",
        ),
        (lambda z, y: metrics.ece(z, y, 0), "bins must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(unchecked, call, message):
    with pytest.raises(ValueError, match=message):
        call(*make_task())


@pytest.mark.parametrize("measure", ["accuracy", "nll", "brier"])
def test_interval_of_a_measure_and_of_a_paired_difference(measure):
    labels = torch.arange(400) % 4
    runs = [torch.randn(2, 400, 4) for _ in range(2)]
    others = [z + 0.3 * torch.nn.functional.one_hot(labels) for z in runs]
    value, better = (
        sum(getattr(metrics, measure)(z, labels) for z in each) / 2
        for each in (runs, others)
    )
    found = metrics.interval(runs, labels, measure, repeats=200)
    assert found.mean == pytest.approx(value)
    assert found.low < value < found.high
    apart = metrics.interval(others, labels, measure, than=runs, repeats=200)
    assert apart.mean == pytest.approx(better - value)
    assert (
        apart.high - apart.low < found.high - found.low
    )  # the inputs' own differences cancel
    assert metrics.interval(runs, labels, measure, than=runs, repeats=20) == (0, 0, 0)
    with pytest.raises(ValueError, match="number of runs must be at least 1"):
        metrics.interval(runs, labels, measure, than=[])
    grown = [z.requires_grad_() for z in runs]  # outside of no_grad
    assert metrics.interval(grown, labels, measure, repeats=200) == found
    low, high = metrics.bootstrap(torch.mean, grown[0].flatten(), repeats=20)
    assert low < high
