"""Metrics of uncertainty scores: detection, selective prediction, intervals; by hand and against scikit-learn."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from small_tasks import binary, make_task

from uqlab import metrics
from uqlab.uncertainty import decompose

SELECTIVE = [
    metrics.aurc,
    metrics.augrc,
    metrics.risk_at_coverage,
    metrics.coverage_at_risk,
]


def plain_auroc(inside, outside):
    """Pairs in the right order, ties by half."""
    gaps = outside - inside[:, None]
    return (gaps > 0).mean() + (gaps == 0).mean() / 2


# Out-of-distribution detection ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("ties", [False, True])
def test_detection_agrees_with_scikit_learn(ties):
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(0, 1, 300), rng.normal(1, 1, 200)
    if ties:
        id_scores, ood_scores = id_scores.round(), ood_scores.round()
    truth, scores = (
        np.repeat([0, 1], [300, 200]),
        np.concatenate([id_scores, ood_scores]),
    )
    result = metrics.ood_detection(torch.from_numpy(id_scores), ood_scores)
    assert result.auroc == pytest.approx(
        sklearn_metrics.roc_auc_score(truth, scores), abs=1e-14
    )
    assert result.aupr_out == pytest.approx(
        sklearn_metrics.average_precision_score(truth, scores), abs=1e-14
    )
    assert result.aupr_in == pytest.approx(
        sklearn_metrics.average_precision_score(1 - truth, -scores), abs=1e-14
    )
    fpr, tpr, _ = sklearn_metrics.roc_curve(truth, scores, drop_intermediate=False)
    assert result.fpr95 == fpr[(tpr >= 0.95).argmax()]


def test_auroc_interval_of_a_difference_is_paired():
    rng = np.random.default_rng(0)
    noise = [rng.normal(0, 1, 400), rng.normal(0, 1, 300)]
    first = noise[0], noise[1] + 1
    other = [
        values + rng.normal(0, 0.1, len(values))
        for values in (noise[0], noise[1] + 0.8)
    ]
    low, high = metrics.auroc_interval(*first, repeats=1000, than=tuple(other))
    resampled = []
    for _ in range(1000):
        rows, others = rng.integers(400, size=400), rng.integers(300, size=300)
        one, two = (plain_auroc(x[rows], y[others]) for x, y in (first, other))
        resampled.append(one - two)
    assert (low, high) == pytest.approx(
        np.quantile(resampled, [0.025, 0.975]), abs=0.004
    )
    alone = metrics.auroc_interval(*first, repeats=1000)
    assert 0 < high - low < (alone[1] - alone[0]) / 2
    assert metrics.auroc_interval(*first, repeats=20, than=first) == (0, 0)


def test_the_interval_of_fpr95_is_its_bootstrap():
    rng = np.random.default_rng(0)
    first = rng.normal(0, 1, 400), rng.normal(2, 1, 300)
    other = first[0], first[1] - 0.3
    found = metrics.auroc_interval(*first, measure="fpr95")
    less = metrics.auroc_interval(*first, than=other, measure="fpr95")
    alone, apart = [], []
    for _ in range(1000):
        rows, others = rng.integers(400, size=400), rng.integers(300, size=300)
        one, two = (
            metrics.ood_detection(x[rows], y[others]).fpr95 for x, y in (first, other)
        )
        alone.append(one)
        apart.append(one - two)
    assert found == pytest.approx(np.quantile(alone, [0.025, 0.975]), abs=0.01)
    assert less == pytest.approx(np.quantile(apart, [0.025, 0.975]), abs=0.01)
    assert less[1] < 0


# Selective prediction -------------------------------------------------------------------------------------------------
def test_selective_prediction_by_hand():
    logits, labels = binary([0.9, 0.8, 0.7, 0.6], [1, 0, 1, 0])
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4])
    coverage, risk = metrics.risk_coverage(logits, labels, scores)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert metrics.aurc(logits, labels, scores) == pytest.approx(
        (1 / 2 + 1 / 3 + 1 / 2) / 4
    )
    assert metrics.augrc(logits, labels, scores) == pytest.approx(
        ((0 + 1) / 2 + 1 + (1 + 2) / 2) / 4 / 4
    )
    assert metrics.risk_at_coverage(logits, labels, scores, 0.75) == pytest.approx(
        1 / 3
    )
    assert metrics.risk_at_coverage(logits, labels, scores, 0.6) == pytest.approx(
        1 / 3
    )  # at least 60 %
    hundred = binary([0.9] * 100, [1] * 7 + [0] + [1] * 92)
    assert (
        metrics.risk_at_coverage(*hundred, torch.arange(100), 0.07) == 0
    )  # 7 samples, though 0.07 * 100 > 7
    assert metrics.coverage_at_risk(logits, labels, scores, 0.34) == 0.75
    assert metrics.coverage_at_risk(logits, labels, scores, 0.5) == 1.0
    assert metrics.coverage_at_risk(logits, labels, -scores, 0.1) == 0.0


@pytest.mark.parametrize("digits", [8, 1])  # without and with ties
def test_augrc_has_its_closed_form(digits):
    logits, labels = make_task()
    scores = torch.round(decompose(logits).total, decimals=digits)
    accuracy = metrics.accuracy(logits, labels)
    hit = logits.softmax(-1).mean(0).argmax(1) == labels
    auroc = metrics.ood_detection(scores[hit], scores[~hit]).auroc
    expected = (1 - auroc) * accuracy * (1 - accuracy) + (1 - accuracy) ** 2 / 2
    assert metrics.augrc(logits, labels, scores) == pytest.approx(expected, abs=1e-12)


def test_quantiles_of_a_score_by_hand():
    values, scores = (
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        torch.tensor([0.4, 0.1, 0.2, 0.3]),
    )  # in order: 2, 3, 4, 1
    halves = (0.5, 1.0)
    assert metrics.by_quantile(values, scores, halves).tolist() == [2.5, 2.5]
    assert metrics.by_quantile(values, scores, (0.25, 0.75, 1.0)).tolist() == [
        2.0,
        3.5,
        1.0,
    ]
    assert metrics.by_quantile(
        values, scores, (0.25, 0.75, 1.0), "acceptance"
    ).tolist() == [2.0, 3.0, 2.5]
    hits = np.array([True, False, False, True])
    assert metrics.by_quantile(hits, scores.numpy(), np.array(halves)).tolist() == [
        0.0,
        1.0,
    ]


# Intervals ------------------------------------------------------------------------------------------------------------


def test_bootstrap_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(0, 1, 400)
    low, high = metrics.bootstrap(np.mean, values, repeats=2000)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert (low, high) == metrics.bootstrap(np.mean, values, repeats=2000)
    of_tensor = metrics.bootstrap(torch.mean, torch.from_numpy(values), repeats=2000)
    assert of_tensor == pytest.approx((low, high), rel=1e-12)  # the same resamples


def test_rows_that_belong_together_are_drawn_together():
    """Five copies of every row: one by one, the interval would be sqrt(5) times too narrow."""
    rng = np.random.default_rng(0)
    images = rng.normal(0, 1, 200)
    rows, groups = np.repeat(images, 5), np.repeat(np.arange(200), 5)

    def width(interval):
        return interval[1] - interval[0]

    alone = width(metrics.bootstrap(np.mean, images, repeats=2000))
    by_group = metrics.bootstrap(np.mean, rows, groups=groups, repeats=2000)
    one_by_one = metrics.bootstrap(np.mean, rows, repeats=2000)
    assert width(by_group) == pytest.approx(alone, rel=0.05)
    assert width(one_by_one) == pytest.approx(alone / math.sqrt(5), rel=0.1)
    shuffled = rng.permutation(1000)
    mixed = metrics.bootstrap(
        np.mean, rows[shuffled], groups=groups[shuffled], repeats=2000
    )
    assert mixed == pytest.approx(by_group)


@pytest.mark.parametrize("n", [5, 10, 30])
def test_students_interval_covers_and_the_bootstrap_of_five_does_not(n):
    rng = np.random.default_rng(n)
    drawn = rng.normal(0.3, 1, (2000, n))
    covers = [low <= 0.3 <= high for _, low, high in map(metrics.paired_t, drawn)]
    assert np.mean(covers) == pytest.approx(0.95, abs=0.02)
    if n == 5:
        means = drawn[:, rng.integers(n, size=(400, n))].mean(2)  # [2000, resamples]
        low, high = np.quantile(means, [0.025, 0.975], axis=1)
        assert np.mean((low <= 0.3) & (high >= 0.3)) == pytest.approx(0.83, abs=0.03)


@pytest.mark.parametrize("n", [5, 10, 30])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.5])
def test_the_interval_of_a_share_covers_at_the_edges_too(n, share):
    hits = np.arange(n + 1)
    ends = [metrics.proportion(int(k), n) for k in hits]
    chance = [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in hits]
    covered = sum(
        p
        for p, (_, low, high) in zip(chance, ends, strict=True)
        if low <= share <= high
    )
    assert covered >= 0.95
    assert metrics.proportion(57, 57).low == pytest.approx(0.025 ** (1 / 57))


def test_holm_keeps_the_familywise_error():
    assert metrics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    rng = np.random.default_rng(0)
    errs = [(metrics.holm(p) < 0.05).any() for p in rng.random((4000, 6))]
    assert np.mean(errs) == pytest.approx(0.05, abs=0.015)


def test_bootstrap_resamples_the_axis_that_holds_the_samples():
    labels = torch.arange(50.0)
    rows = labels[:, None, None].expand(
        50, 7, 3
    )  # [samples, 7, 3], one number a sample
    plain = metrics.bootstrap(np.mean, labels.numpy(), repeats=40)
    for x in (rows[..., 0], rows, rows.transpose(0, 1)):
        assert metrics.bootstrap(
            lambda a, _: a.mean(), x, labels, repeats=40
        ) == pytest.approx(plain)
    columns = rows.transpose(0, 1)
    numbers = metrics.bootstrap(
        lambda i: columns[:, i].mean(), torch.arange(50), repeats=40
    )
    assert numbers == pytest.approx(plain)


def test_bootstrap_never_guesses_an_axis():
    x, square = torch.rand(50, 7, 3), torch.rand(4, 9, 9)
    for arrays in (
        (x,),
        (square, torch.rand(9)),
        (x, torch.rand(20)),
        (torch.rand(()), torch.rand(9)),
    ):
        with pytest.raises(
            ValueError,
            match=r"samples' axis of an array .* is not clear",
        ):
            metrics.bootstrap(lambda *given: given[0].mean(), *arrays, repeats=2)


def test_intervals_have_the_level_asked_for():
    scores = (
        torch.rand(200, generator=torch.Generator().manual_seed(0)),
        torch.rand(200) + 0.2,
    )
    for interval in (
        lambda level: metrics.auroc_interval(*scores, repeats=200, level=level),
        lambda level: metrics.bootstrap(
            lambda x: x.mean(), scores[0], repeats=200, level=level
        ),
    ):
        (low, high), (lower, higher) = interval(0.5), interval(0.99)
        assert lower < low < high < higher
        for level in (-1.0, 0.0, 1.0, 1.5):
            with pytest.raises(ValueError, match="level must be in"):
                interval(level)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z, y: metrics.ood_detection(y[:0], y), "id_scores must be"),
        (lambda z, y: metrics.auroc_interval(y, y, repeats=0), "repeats must be"),
        (lambda z, y: metrics.auroc_interval(y, y, than=(y, y[1:])), "`than` must be"),
        (lambda z, y: metrics.risk_at_coverage(z, y, y, 0.0), "coverage must be"),
        (lambda z, y: metrics.coverage_at_risk(z, y, y, 5), "risk must be"),
        (lambda z, y: metrics.by_quantile(y, y, (0.5, 0.2)), "must increase"),
        (lambda z, y: metrics.by_quantile(y[:4], y[:4]), "a sample in every bucket"),
        (lambda z, y: metrics.by_quantile(y, y[:-1]), "scores must be"),
        (lambda z, y: metrics.bootstrap(np.mean, y, y[:-1]), "samples, got .*499"),
    ],
)
def test_bad_arguments_are_refused(unchecked, call, message):
    with pytest.raises(ValueError, match=message):
        call(*make_task())


@pytest.mark.parametrize(
    "kind", [list, tuple, torch.tensor, lambda x: pd.Series(x, range(9, 9 + len(x)))]
)
def test_a_bootstrap_of_whatever_holds_numbers(unchecked, kind):
    values = np.random.default_rng(0).normal(size=30).tolist()
    expected = metrics.bootstrap(np.mean, np.array(values), repeats=50)
    found = metrics.bootstrap(lambda x: float(x.mean()), kind(values), repeats=50)
    assert found == pytest.approx(expected)
    labels = ["a", "b", "b"] * 10
    shares = metrics.bootstrap(lambda x: (x == "b").mean(), labels, repeats=50)
    assert 0.4 < shares[0] < 2 / 3 < shares[1] < 0.9
