"""Decisions hold on fresh data: coverage, errors among the answered, false alarms, found drifts."""

import math

import numpy as np
import pytest
import torch
from same import near
from scipy import stats

from uqlab.study import decide

CLASSES = 5


def world(n, generator, spread=1.5):
    """Logits [1, n, classes] of a network that is overconfident, and labels."""
    logits = spread * torch.randn(n, CLASSES, generator=generator)
    labels = torch.distributions.Categorical(logits=logits)
    torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return 2 * logits[None], labels.sample()


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_coverage_follows_its_beta_law(method):
    """On 200 calibration sets of 99 inputs: k = 90, so Beta(90, 10), mean .9."""
    generator = torch.Generator().manual_seed(0)
    shares, sizes = [], []
    for split in range(200):
        found = decide.conformal(*world(99, generator), method=method, seed=split)
        logits, labels = world(2000, generator)
        sets = found.sets(logits)
        shares.append(sets[torch.arange(2000), labels].double().mean().item())
        sizes.append(sets.sum(1).double().mean().item())
    assert stats.kstest(shares, stats.beta(90, 10).cdf).pvalue > 0.01
    assert 1 < np.mean(sizes) < CLASSES


def test_by_class_covers_a_class_that_the_network_neglects():
    generator = torch.Generator().manual_seed(0)

    def neglecting():
        logits, labels = world(4000, generator)
        logits[..., 0] -= 3
        return logits, labels

    def covered(by_class):
        found = decide.conformal(*neglecting(), by_class=by_class)
        logits, labels = neglecting()
        sets = found.sets(logits)
        return sets[labels == 0, 0].double().mean().item()

    assert covered(False) < 0.8
    assert covered(True) == pytest.approx(0.9, abs=0.04)


def test_the_threshold_is_that_of_the_definition():
    p = torch.tensor([0.9, 0.8, 0.7, 0.6])
    logits = torch.stack([p, 1 - p], 1).log()[None]
    found = decide.conformal(logits, torch.zeros(4, dtype=torch.long), level=0.6)
    assert found.thresholds.tolist() == pytest.approx([0.3, 0.3])  # the third of four
    # A class with 1 - p of at most .3 is in the set: the first of three, none of the last.
    assert found.sets(logits).tolist() == [[True, False]] * 3 + [[False, False]]


def test_the_bound_on_errors_is_broken_in_at_most_the_promised_share():
    """A risk of 10 %, 90 % confidence, 200 sets: broken in at most 20, and not idle."""
    generator = torch.Generator().manual_seed(0)
    broken, answered = 0, []
    for _ in range(200):
        logits, labels = world(400, generator, 4)
        doubt = 1 - logits[0].softmax(1).amax(1)
        end = decide.abstain(logits, labels, doubt, risk=0.1, confidence=0.9)
        logits, labels = world(4000, generator, 4)
        kept = 1 - logits[0].softmax(1).amax(1) <= end
        wrong = (logits[0].argmax(1) != labels)[kept]
        broken += bool(len(wrong)) and wrong.double().mean().item() > 0.1
        answered.append(kept.double().mean().item())
    assert broken <= 20
    assert np.mean(answered) > 0.2


def test_with_many_inputs_an_early_error_does_not_end_the_search():
    """The least uncertain inputs are wrong in 0.5 of 100; of 150 one or more often is."""
    generator = torch.Generator().manual_seed(1)
    ends, risks = [], []
    for _ in range(100):
        doubt = torch.rand(5000, generator=generator)
        wrong = torch.rand(5000, generator=generator) < 0.005 + 0.2 * doubt**3
        logits = torch.stack([(~wrong).float(), wrong.float()], 1)[None]
        end = decide.abstain(logits, torch.zeros(5000).long(), doubt, risk=0.02)
        ends.append(end)
        risks.append(0.005 + 0.05 * end**3 if end > 0 else 0)  # of those up to it
    assert sum(end > 0.35 for end in ends) >= 95
    assert sum(risk > 0.02 for risk in risks) <= 5


def test_no_threshold_holds_where_the_network_guesses():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 500, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (500,), generator=generator)
    assert decide.abstain(logits, labels, torch.rand(500)) == -math.inf
    perfect = logits[0].argmax(1)
    assert decide.abstain(logits, perfect, torch.arange(500.0)) == 499


@pytest.mark.slow
def test_false_alarms_are_as_rare_as_promised():
    """Alarm at 1 / d = 20: at most d of 400 streams in which nothing changes."""
    generator = np.random.default_rng(0)
    false = 0
    for seed in range(400):
        alarm = decide.drift(generator.normal(size=300), seed)
        false += bool((alarm.update(generator.normal(size=500)) > 20).any())
    assert false <= 20


def test_a_shift_of_all_scores_is_found_within_200_inputs():
    generator = np.random.default_rng(0)
    late = 0
    for seed in range(200):
        alarm = decide.drift(generator.normal(size=300), seed)
        alarm.update(generator.normal(size=100))
        late += not (alarm.update(generator.normal(1.0, size=200)) > 20).any()
    assert late <= 10


@pytest.mark.slow
def test_a_drift_of_one_class_is_found_within_200_inputs():
    """Inputs of one class in five lose their evidence; scores are predictive entropies."""
    generator = torch.Generator().manual_seed(0)

    def doubt(n, drifted):
        logits, labels = world(n, generator, 4)
        logits[:, labels == 0] *= 0.1 if drifted else 1
        return torch.distributions.Categorical(logits=logits[0]).entropy()

    late = 0
    for seed in range(200):
        alarm = decide.drift(doubt(300, False), seed)
        alarm.update(doubt(100, False))
        late += not (alarm.update(doubt(200, True)) > 20).any()
    assert late <= 10


def test_wealth_does_not_depend_on_how_scores_are_handed_over():
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.randint(20, (n,), generator=generator) for n in (50, 60))
    whole = decide.drift(before, 3).update(after)
    alarm = decide.drift(before, 3)
    near(torch.cat([alarm.update(after[:25]), alarm.update(after[25:])]), whole)


def test_saved_logits_and_probabilities_are_read_alike(tmp_path):
    logits = torch.randn(2, 6, 3)
    labels, other = torch.arange(6) % 3, torch.randn(2, 4, 3)
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels, ood_far=other)
    np.savez(
        tmp_path / "b.npz", probabilities=logits.softmax(-1), ood_far=other.softmax(-1)
    )
    np.savez(tmp_path / "c.npz", logits=logits[0])
    a, b, c = (decide.saved(tmp_path / f"{name}.npz") for name in "abc")
    assert torch.equal(a.logits, logits)
    assert torch.equal(a.labels, labels)
    near(b.logits.softmax(-1), logits.softmax(-1))
    near(b.ood["far"].softmax(-1), other.softmax(-1))
    assert b.labels is None
    assert torch.equal(c.logits, logits[:1])
    np.savez(tmp_path / "d.npz", x=logits)
    np.savez(tmp_path / "e.npz", probabilities=logits)
    np.savez(tmp_path / "f.npz", logits=logits, labels=labels[:5])
    torch.save({"logits": logits}, tmp_path / "g.npz")  # a zip, too
    wrong = {"d": "logits or prob", "e": "sum to 1", "f": "labels", "g": "savez"}
    for name, words in wrong.items():
        with pytest.raises(ValueError, match=words):
            decide.saved(tmp_path / f"{name}.npz")


def test_a_missing_file_is_not_called_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        decide.saved(tmp_path / "none.npz")
