"""Metrics: identities and bounds, hand-computed cases, scikit-learn as the reference, bad input."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from uqlab import metrics
from uqlab.core import devices
from uqlab.uncertainty import decompose, entropy

CALIBRATION = [metrics.ece, metrics.adaptive_ece, metrics.classwise_ece, metrics.calibration_gap]
QUALITY = [metrics.accuracy, metrics.nll, metrics.brier, metrics.macro_f1]
SELECTIVE = [metrics.aurc, metrics.augrc, metrics.risk_at_coverage, metrics.coverage_at_risk]


def make_task(samples: int = 500, classes: int = 5, members: int = 4, seed: int = 0) -> tuple:
    """Logits of a fair ensemble and labels that it often gets right."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    logits = 2 * torch.randn(members, samples, classes, generator=generator, dtype=torch.float64)
    logits[:, torch.arange(samples), labels] += 2
    return logits, labels


def from_probabilities(*rows: list[float]) -> torch.Tensor:
    """A single model [1, N, C] that predicts these probabilities; zeros become 1e-300."""
    return torch.tensor(rows, dtype=torch.float64).clamp(min=1e-300).log()[None]


def binary(confidences: list[float], hits: list[int]) -> tuple:
    """A model that predicts class 0 with these confidences (above 1/2), right where `hits` says so."""
    return from_probabilities(*([c, 1 - c] for c in confidences)), 1 - torch.tensor(hits)


# Prediction quality ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pool", ["probabilities", "logits"])
def test_quality_agrees_with_scikit_learn(pool):
    logits, labels = make_task()
    p = logits.softmax(-1).mean(0) if pool == "probabilities" else logits.mean(0).softmax(-1)
    predicted, one_hot = p.argmax(1), torch.nn.functional.one_hot(labels)
    assert metrics.accuracy(logits, labels, pool=pool) == sklearn_metrics.accuracy_score(labels, predicted)
    assert metrics.nll(logits, labels, pool=pool) == pytest.approx(sklearn_metrics.log_loss(labels, p), rel=1e-12)
    assert metrics.brier(logits, labels, pool=pool) == pytest.approx(
        sum(sklearn_metrics.brier_score_loss(one_hot[:, c], p[:, c]) for c in range(5)), rel=1e-12
    )
    f1 = sklearn_metrics.f1_score(labels, predicted, average="macro")
    assert metrics.macro_f1(logits, labels, pool=pool) == pytest.approx(f1, rel=1e-12)
    torch.testing.assert_close(metrics.log_prediction(logits, pool), p.log())


def test_macro_f1_counts_the_classes_that_occur():
    logits = from_probabilities([0.9, 0.1, 0], [0.1, 0.9, 0], [0.9, 0.1, 0])
    labels = torch.tensor([0, 1, 1])  # nobody is or is called 2
    assert metrics.macro_f1(logits, labels) == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_loss_of_the_mean_plus_divergence_is_the_mean_loss_for_both_pools():
    logits, labels = make_task()
    member_loss = np.mean([metrics.nll(member[None], labels) for member in logits])
    dual = metrics.log_prediction(logits, "logits")  # the Bregman dual mean of the members
    divergence = (dual.exp() * (dual - logits.log_softmax(-1))).sum(-1).mean().item()
    assert metrics.nll(logits, labels, pool="logits") + divergence == pytest.approx(member_loss, rel=1e-12)
    member_brier = np.mean([metrics.brier(member[None], labels) for member in logits])
    variance = logits.softmax(-1).var(0, correction=0).sum(-1).mean().item()
    assert metrics.brier(logits, labels) + variance == pytest.approx(member_brier, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_scores_respect_their_bounds(seed):
    logits, labels = make_task(seed=seed)
    wrong, brier, classes = 1 - metrics.accuracy(logits, labels), metrics.brier(logits, labels), logits.shape[-1]
    assert brier >= 0.5 * wrong
    assert brier <= (1 - wrong) * (1 - 1 / classes) + 2 * wrong
    assert metrics.nll(logits, labels) >= math.log(2) * wrong


@pytest.mark.parametrize("pool", ["probabilities", "logits"])
def test_no_temporary_grows_with_the_number_of_classes(monkeypatch, pool):
    """The rows that go through at once are fewer where there are more classes, and do not show in the values."""
    sizes = []
    spied = torch.Tensor.log_softmax

    def log_softmax(z, axis):
        sizes.append(z.numel())
        return spied(z, axis)

    monkeypatch.setitem(devices.TEMPORARY, "cpu", 6000)
    for classes in (5, 50, 500):
        logits, _ = make_task(samples=700, classes=classes)
        reference = logits.log_softmax(-1).logsumexp(0) - math.log(4)
        if pool == "logits":
            reference = logits.mean(0).log_softmax(-1)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "log_softmax", log_softmax)
            found = metrics.log_prediction(logits, pool)
        torch.testing.assert_close(found, reference, rtol=1e-14, atol=1e-14)
        assert len(sizes) == -(-700 // (6000 // (4 * classes)))
        assert max(sizes) <= 6000
        sizes.clear()


def test_predictions_are_computed_in_float64_whatever_comes_in():
    logits, labels = make_task()
    exact = metrics.nll(logits.float().double(), labels)
    assert metrics.nll(logits.float(), labels.to(torch.uint8)) == exact
    assert metrics.nll(torch.tensor([[[1000.0, 0.0]]]), torch.tensor([1])) == 1000  # p underflows, log p does not


# Calibration ----------------------------------------------------------------------------------------------------------
def test_calibration_by_hand():
    logits, labels = binary([0.6, 0.7, 0.75, 0.9], [1, 0, 1, 1])
    # Ten bins of width .1: .6 | .7 | .75 | .9 alone each; two of equal count: {.6, .7} and {.75, .9}.
    assert metrics.ece(logits, labels, 10) == pytest.approx((0.4 + 0.7 + 0.25 + 0.1) / 4)
    assert metrics.adaptive_ece(logits, labels, 2) == pytest.approx((abs(1.3 - 1) + abs(1.65 - 2)) / 4)
    assert metrics.calibration_gap(logits, labels) == pytest.approx(abs(2.95 - 3) / 4)
    # One bin per class: both classes miss by the same amount.
    assert metrics.classwise_ece(logits, labels, 1) == pytest.approx(0.05 / 4)


def test_bins_are_closed_above():
    # Four bins: .75 belongs to (.5, .75] with .7, not to (.75, 1] with .8.
    logits, labels = binary([0.7, 0.75, 0.8], [1, 0, 1])
    assert metrics.ece(logits, labels, 4) == pytest.approx((abs(1.45 - 1) + 0.2) / 3)
    # Eight bins: .5 and .625 end the bins that they close, and 1 ends the last.
    logits, labels = binary([0.5, 0.625, 1.0], [1, 1, 1])
    assert metrics.ece(logits, labels, 8) == pytest.approx((0.5 + 0.375) / 3)


def test_one_bin_is_the_calibration_gap():
    logits, labels = make_task()
    gap = metrics.calibration_gap(logits, labels)
    assert metrics.ece(logits, labels, 1) == pytest.approx(gap)
    assert metrics.adaptive_ece(logits, labels, 1) == pytest.approx(gap)


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
    expected = sum(abs((p.max(1) - hit)[part].sum()) for part in np.array_split(order, bins)) / 200
    assert metrics.adaptive_ece(logits, labels, bins) == pytest.approx(expected)


@pytest.mark.parametrize("metric", CALIBRATION)
def test_calibrated_predictions_have_little_error_and_overconfident_ones_much(metric):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1, 20_000, 3, generator=generator)
    labels = torch.multinomial(logits[0].softmax(-1), 1, generator=generator)[:, 0]
    assert metric(logits, labels) < 0.02
    assert metric(4 * logits, labels) > 0.08


@pytest.mark.parametrize("pool", ["probabilities", "logits"])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_temperature_is_recovered_and_optimal(pool, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 20_000, 4, generator=generator, dtype=torch.float64) * 2
    labels = torch.multinomial((logits[0] / temperature).softmax(-1), 1, generator=generator)[:, 0]
    fitted = metrics.fit_temperature(logits, labels, pool)
    assert fitted == pytest.approx(temperature, rel=0.05)
    log_p = metrics.log_prediction(logits, pool)[None]
    best = metrics.nll(log_p / fitted, labels)
    assert all(best <= metrics.nll(log_p / (fitted * factor), labels) for factor in (0.98, 1.02))


def test_temperature_calibrates_after_pooling():
    logits, labels = make_task(samples=2000)
    log_p = metrics.log_prediction(logits)
    calibrated = (log_p / metrics.fit_temperature(logits, labels))[None]
    assert metrics.nll(calibrated, labels) < metrics.nll(logits, labels)
    assert metrics.fit_temperature(calibrated, labels) == pytest.approx(1, abs=1e-6)
    assert metrics.fit_temperature(*binary([0.9, 0.8], [1, 1])) == pytest.approx(0.01)  # nothing wrong: no bound


# Out-of-distribution detection ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("ties", [False, True])
def test_detection_agrees_with_scikit_learn(ties):
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(0, 1, 300), rng.normal(1, 1, 200)
    if ties:
        id_scores, ood_scores = id_scores.round(), ood_scores.round()
    truth, scores = np.repeat([0, 1], [300, 200]), np.concatenate([id_scores, ood_scores])
    result = metrics.ood_detection(torch.from_numpy(id_scores), ood_scores)
    assert result.auroc == pytest.approx(sklearn_metrics.roc_auc_score(truth, scores), abs=1e-14)
    assert result.aupr_out == pytest.approx(sklearn_metrics.average_precision_score(truth, scores), abs=1e-14)
    assert result.aupr_in == pytest.approx(sklearn_metrics.average_precision_score(1 - truth, -scores), abs=1e-14)
    fpr, tpr, _ = sklearn_metrics.roc_curve(truth, scores, drop_intermediate=False)
    assert result.fpr95 == fpr[(tpr >= 0.95).argmax()]


def test_detection_by_hand():
    result = metrics.ood_detection(torch.tensor([1.0, 2.0, 4.0, 5.0]), torch.tensor([3.0, 6.0]))
    assert result == pytest.approx((6 / 8, (1 + 2 / 4) / 2, (1 + 1 + 3 / 4 + 4 / 5) / 4, 2 / 4))


def test_detection_does_not_depend_on_which_side_is_positive():
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(0, 1, 100).round(1), rng.normal(1, 1, 50).round(1)
    result, swapped = metrics.ood_detection(id_scores, ood_scores), metrics.ood_detection(-ood_scores, -id_scores)
    assert swapped.auroc == pytest.approx(result.auroc, abs=1e-15)
    assert (swapped.aupr_out, swapped.aupr_in) == pytest.approx((result.aupr_in, result.aupr_out), abs=1e-15)
    assert metrics.ood_detection(-id_scores, -ood_scores).auroc == pytest.approx(1 - result.auroc, abs=1e-15)


def test_a_constant_score_knows_nothing_and_a_perfect_one_everything():
    constant = metrics.ood_detection(np.zeros(30), np.zeros(10))
    assert constant == pytest.approx((0.5, 0.25, 0.75, 1.0))
    assert metrics.ood_detection(np.arange(30), np.arange(30, 40)) == (1.0, 1.0, 1.0, 0.0)


def test_auroc_interval_is_the_bootstrap_of_the_auroc():
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(0, 1, 400).round(1), rng.normal(1, 1, 300).round(1)
    low, high = metrics.auroc_interval(id_scores, ood_scores, repeats=1000)
    auroc = metrics.ood_detection(id_scores, ood_scores).auroc
    resampled = [
        metrics.ood_detection(rng.choice(id_scores, 400), rng.choice(ood_scores, 300)).auroc for _ in range(1000)
    ]
    assert low < auroc < high
    assert (low, high) == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.004)
    assert (low, high) == metrics.auroc_interval(torch.from_numpy(id_scores), ood_scores, repeats=1000)
    assert (low, high) != metrics.auroc_interval(id_scores, ood_scores, repeats=1000, seed=1)


def test_auroc_interval_of_a_difference_is_paired():
    rng = np.random.default_rng(0)
    noise = [rng.normal(0, 1, 400), rng.normal(0, 1, 300)]
    first = noise[0], noise[1] + 1
    other = [values + rng.normal(0, 0.1, len(values)) for values in (noise[0], noise[1] + 0.8)]
    low, high = metrics.auroc_interval(*first, repeats=1000, than=tuple(other))
    resampled = []
    for _ in range(1000):
        rows, others = rng.integers(400, size=400), rng.integers(300, size=300)
        both = [metrics.ood_detection(inside[rows], outside[others]).auroc for inside, outside in (first, other)]
        resampled.append(both[0] - both[1])
    assert (low, high) == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.004)
    alone = metrics.auroc_interval(*first, repeats=1000)
    assert 0 < high - low < (alone[1] - alone[0]) / 2
    assert metrics.auroc_interval(*first, repeats=20, than=first) == (0, 0)


# Selective prediction -------------------------------------------------------------------------------------------------
def test_selective_prediction_by_hand():
    logits, labels = binary([0.9, 0.8, 0.7, 0.6], [1, 0, 1, 0])
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4])
    coverage, risk = metrics.risk_coverage(logits, labels, scores)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert metrics.aurc(logits, labels, scores) == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4)
    assert metrics.augrc(logits, labels, scores) == pytest.approx(((0 + 1) / 2 + 1 + (1 + 2) / 2) / 4 / 4)
    assert metrics.risk_at_coverage(logits, labels, scores, 0.75) == pytest.approx(1 / 3)
    assert metrics.risk_at_coverage(logits, labels, scores, 0.6) == pytest.approx(1 / 3)  # at least 60 %
    hundred = binary([0.9] * 100, [1] * 7 + [0] + [1] * 92)
    assert metrics.risk_at_coverage(*hundred, torch.arange(100), 0.07) == 0  # 7 samples, though 0.07 * 100 > 7
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


def test_uninformed_order_has_the_error_rate_as_its_risk():
    logits, labels = make_task(samples=5000)
    wrong = 1 - metrics.accuracy(logits, labels)
    random = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    assert metrics.aurc(logits, labels, random) == pytest.approx(wrong, abs=0.03)
    assert metrics.augrc(logits, labels, random) == pytest.approx(wrong / 2, abs=0.01)
    constant = torch.zeros(5000)  # ties share their error: exact
    assert metrics.aurc(logits, labels, constant) == pytest.approx(wrong, abs=1e-12)
    assert metrics.augrc(logits, labels, constant) == pytest.approx(wrong / 2, abs=1e-12)
    assert metrics.aurc(logits, labels, decompose(logits).total) < 0.7 * wrong


def test_order_of_the_samples_does_not_matter():
    logits, labels = make_task()
    scores = torch.round(entropy(logits).mean(0), decimals=1)
    shuffled = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    for metric in SELECTIVE:
        expected = metric(logits, labels, scores)
        assert metric(logits[:, shuffled], labels[shuffled], scores[shuffled].numpy()) == pytest.approx(expected)


def test_quantiles_of_a_score_by_hand():
    values, scores = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.4, 0.1, 0.2, 0.3])  # in order: 2, 3, 4, 1
    halves = (0.5, 1.0)
    assert metrics.by_quantile(values, scores, halves).tolist() == [2.5, 2.5]
    assert metrics.by_quantile(values, scores, (0.25, 0.75, 1.0)).tolist() == [2.0, 3.5, 1.0]
    assert metrics.by_quantile(values, scores, (0.25, 0.75, 1.0), "acceptance").tolist() == [2.0, 3.0, 2.5]
    hits = np.array([True, False, False, True])
    assert metrics.by_quantile(hits, scores.numpy(), np.array(halves)).tolist() == [0.0, 1.0]


def test_acceptance_of_errors_is_the_risk_at_that_coverage():
    logits, labels = make_task()
    scores = decompose(logits).epistemic
    errors = logits.softmax(-1).mean(0).argmax(1) != labels
    accepted = metrics.by_quantile(errors, scores, (0.2, 0.8, 1.0), "acceptance").tolist()
    assert accepted == pytest.approx([metrics.risk_at_coverage(logits, labels, scores, q) for q in (0.2, 0.8, 1.0)])
    assert metrics.by_quantile(errors, scores).mean().item() == pytest.approx(errors.double().mean().item())


# Intervals ------------------------------------------------------------------------------------------------------------
def test_bootstrap_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(0, 1, 400)
    low, high = metrics.bootstrap(np.mean, values, repeats=2000)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert (low, high) == metrics.bootstrap(np.mean, values, repeats=2000)


def test_bootstrap_keeps_samples_paired_and_gives_bands():
    logits, labels = make_task(samples=200)
    low, high = metrics.bootstrap(metrics.accuracy, logits, labels, repeats=100)
    assert low < metrics.accuracy(logits, labels) < high
    x = torch.randn(50)
    assert metrics.bootstrap(lambda a, b: (a - torch.from_numpy(b)).abs().max(), x, x.numpy(), repeats=10) == (0, 0)
    low, high = metrics.bootstrap(lambda v: v.mean(0), torch.randn(50, 7), repeats=50)
    assert low.shape == high.shape == (7,)
    assert (low < high).all()


def test_bootstrap_resamples_the_axis_that_holds_the_samples():
    labels = torch.arange(50.0)
    rows = labels[:, None, None].expand(50, 7, 3)  # [samples, 7, 3], one number a sample
    plain = metrics.bootstrap(np.mean, labels.numpy(), repeats=40)
    for x in (rows[..., 0], rows, rows.transpose(0, 1)):
        assert metrics.bootstrap(lambda a, _: a.mean(), x, labels, repeats=40) == pytest.approx(plain)
    columns = rows.transpose(0, 1)
    numbers = metrics.bootstrap(lambda i: columns[:, i].mean(), torch.arange(50), repeats=40)
    assert numbers == pytest.approx(plain)


def test_bootstrap_never_guesses_an_axis():
    x, square = torch.rand(50, 7, 3), torch.rand(4, 9, 9)
    for arrays in ((x,), (square, torch.rand(9)), (x, torch.rand(20)), (torch.rand(()), torch.rand(9))):
        with pytest.raises(ValueError, match=r"samples' axis of an array .* is not clear.*resample numbers instead"):
            metrics.bootstrap(lambda *given: given[0].mean(), *arrays, repeats=2)


# Bad input ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("metric", [*QUALITY, *CALIBRATION, metrics.fit_temperature])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda z, y: (z[0], y), ValueError, r"for a single model use logits\[None\]"),
        (lambda z, y: (z, y[:-1]), ValueError, r"\[samples\] = \[500\] like the inputs, got \[499\]"),
        (lambda z, y: (z, y + 1), ValueError, r"labels must be 0 to 4, one for each of 5 outputs, got 1 to 5"),
        (lambda z, y: (z, y - 1), ValueError, "got -1 to 3; -1 stands for a missing label"),
        (lambda z, y: (z, y.float()), TypeError, r"integers, got torch\.float32; use labels\.long\(\)"),
        (lambda z, y: (z[:, :0], y[:0]), ValueError, "must not be empty"),
        (lambda z, y: (z / 0, y), ValueError, r"logits' log-probabilities must be finite, .* at \[0, "),
        (lambda z, y: (z[..., :1], 0 * y), ValueError, "two classes or more"),
    ],
)
def test_bad_predictions_are_refused(unchecked, metric, change, error, message):
    with pytest.raises(error, match=message):
        metric(*change(*make_task()))


@pytest.mark.parametrize("metric", SELECTIVE)
@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.zeros(499), r"scores must be \[samples\] = \[500\], got \[499\]"),
        (torch.full((500,), math.nan), r"scores must be finite, .* at \[0\]"),
        (torch.zeros(500, 1), "not empty, got"),
    ],
)
def test_bad_scores_are_refused(unchecked, metric, scores, message):
    with pytest.raises(ValueError, match=message):
        metric(*make_task(), scores)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z, y: metrics.accuracy(z, y, pool="median"), 'pool must be "probabilities" or "logits", got .median'),
        (lambda z, y: metrics.ece(z, y, 0), "bins must be at least 1, got 0"),
        (lambda z, y: metrics.adaptive_ece(z, y, -1), "bins must be at least 1"),
        (lambda z, y: metrics.ood_detection(z[0, :0, 0], z[0, :, 0]), "id_scores must be .* not empty"),
        (lambda z, y: metrics.ood_detection(z[0, :, 0], z[0, :, 0] / 0), "ood_scores must be finite"),
        (lambda z, y: metrics.auroc_interval(z[0, :, 0], z[0, :, 0], repeats=0), "repeats must be at least 1"),
        (lambda z, y: metrics.auroc_interval(y, y, than=(y, y[1:])), "than must be scores of the same inputs"),
        (lambda z, y: metrics.risk_at_coverage(z, y, y, 0.0), r"coverage must lie in \(0, 1\], got 0"),
        (lambda z, y: metrics.coverage_at_risk(z, y, y, 5), r"risk must lie in \[0, 1\], got 5"),
        (lambda z, y: metrics.by_quantile(y, y, (0.5, 0.2)), r"must increase in \(0, 1\]"),
        (lambda z, y: metrics.by_quantile(y, y, (0.5, 1.2)), r"must increase in \(0, 1\]"),
        (lambda z, y: metrics.by_quantile(y, y, ()), r"must increase in \(0, 1\]"),
        (lambda z, y: metrics.by_quantile(y[:4], y[:4]), "a sample in every bucket, .* for 4 samples"),
        (lambda z, y: metrics.by_quantile(y, y, mode="curve"), 'mode must be "bucket" or "acceptance", got .curve'),
        (lambda z, y: metrics.by_quantile(y, y[:-1]), r"scores must be \[samples\] = \[500\], got \[499\]"),
        (lambda z, y: metrics.bootstrap(np.mean, y, y[:-1]), r"share .* samples, got \[500, 499\]"),
        (lambda z, y: metrics.bootstrap(np.mean, y[:0]), r"positive number of samples, got \[0\]"),
        (lambda z, y: metrics.bootstrap(np.mean, y, repeats=0), "repeats must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(unchecked, call, message):
    with pytest.raises(ValueError, match=message):
        call(*make_task())


def test_confident_predictions_that_tie_in_float32_are_ranked():
    """The maximum softmax probability as a score: in log space and float64, as the pages compute it."""
    logits = torch.tensor([[[20.0, 0, 0], [22.0, 0, 0]]])  # one member, two inputs
    assert len(logits.softmax(-1).mean(0).amax(-1).unique()) == 1
    unsure, sure = -metrics.log_prediction(logits).amax(1)
    assert unsure > sure > 0
    assert metrics.ood_detection(sure[None], unsure[None]).auroc == 1


def test_intervals_have_the_level_asked_for():
    scores = torch.rand(200, generator=torch.Generator().manual_seed(0)), torch.rand(200) + 0.2
    for interval in (
        lambda level: metrics.auroc_interval(*scores, repeats=200, level=level),
        lambda level: metrics.bootstrap(lambda x: x.mean(), scores[0], repeats=200, level=level),
    ):
        (low, high), (lower, higher) = interval(0.5), interval(0.99)
        assert lower < low < high < higher
        for level in (-1.0, 0.0, 1.0, 1.5):
            with pytest.raises(ValueError, match="level must lie in"):
                interval(level)
