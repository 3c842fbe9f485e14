"""What a reader writes under "Your turn" is judged in words: the key passes, typical mistakes get their line."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from uqlab import uncertainty
from uqlab.study import check


def entropy(p):
    return torch.special.entr(p).sum(-1)


def decompose(p):
    parts = uncertainty.decompose(p.clamp_min(1e-30).log())
    return parts.total, parts.aleatoric, parts.epistemic


def swapped(p):
    total, aleatoric, epistemic = decompose(p)
    return aleatoric, total, -epistemic


def total_twice(p):
    total, _, _ = decompose(p)
    return total, total, total - total


def in_bits(p):
    total, aleatoric, epistemic = decompose(p)
    return total / math.log(2), aleatoric / math.log(2), epistemic / math.log(2)


def with_nan(p):
    total = -(p.mean(0) * p.mean(0).log()).sum(-1)
    aleatoric = -(p * p.log()).sum(-1).mean(0)
    return total, aleatoric, total - aleatoric


def sub_ensembles(networks, size, groups):
    split = networks.unflatten(0, (groups, -1))
    return split.unflatten(1, (-1, size)).mean(2)


def sums(networks, size, groups):
    return size * sub_ensembles(networks, size, groups)


def the_same(networks, size, groups):
    return sub_ensembles(networks, size, groups)[:1].repeat(groups, 1, 1)


def every_second(networks, size, groups):
    return networks.unflatten(0, (groups, size, -1)).mean(1)


def between_within(p):
    parts = uncertainty.decompose_groups(p.clamp_min(1e-30).log())
    return parts.between, parts.within


def changed_places(p):
    return tuple(reversed(between_within(p)))


def everything_between(p):
    between, within = between_within(p)
    return between + within, within


def sum_over_groups(p):
    between, within = between_within(p)
    return between, len(p) * within


def between_classes(z):
    return z - z.mean(-1, keepdim=True)


def logit_variance(z):
    return between_classes(z).var(0).mean()


def logits_as_they_are(z):
    return z.var(0).mean()


def by_members(z):
    return between_classes(z).var(0, correction=0).mean()


def deviation(z):
    return between_classes(z).std(0).mean()


def over_classes(z):
    return z.var(-1).mean()


def centred(gram):
    centre = torch.eye(len(gram)) - 1 / len(gram)
    return centre @ gram @ centre


def hsic(gram, other):
    return (centred(gram) * centred(other)).sum() / (len(gram) - 1) ** 2


def by_trace(gram, other):
    """Centring one of the two is enough."""
    return torch.trace(centred(gram) @ other).item() / (len(gram) - 1) ** 2


def not_centred(gram, other):
    return (gram * other).sum() / (len(gram) - 1) ** 2


def one_axis(gram, other):
    both = (gram - gram.mean(0)) * (other - other.mean(0))
    return both.sum() / (len(gram) - 1) ** 2


def by_n(gram, other):
    return (centred(gram) * centred(other)).sum() / len(gram) ** 2


def centred_twice(gram, other):
    return hsic(gram, gram)


def product_of_diagonals(gram, other):
    return torch.trace(centred(gram) * centred(other)) / (len(gram) - 1) ** 2


def all_entries(gram, other):
    return (centred(gram) @ centred(other)).sum() / (len(gram) - 1) ** 2


def paired_interval(one, other, quantile=0.975, ddof=1, root=True):
    apart = other - one
    half = stats.t.ppf(quantile, len(apart) - 1) * apart.std(ddof=ddof)
    half = half / len(apart) ** 0.5 if root else half
    return apart.mean(), apart.mean() - half, apart.mean() + half


def backwards(one, other):
    return paired_interval(other, one)


def unpaired(one, other):
    ends = stats.ttest_ind(other, one, equal_var=False).confidence_interval()
    return other.mean() - one.mean(), *ends


def normal(one, other):
    half = 1.96 * stats.sem(other - one)
    return np.mean(other - one) + half * np.array([0, -1, 1])


def not_a_mean(one, other):
    return paired_interval(one, other, root=False)


KEYS = [
    ("00", decompose),
    ("01", sub_ensembles),
    ("02", between_within),
    ("03", logit_variance),
    ("10", hsic),
    ("10", by_trace),
    ("12", paired_interval),
]
MISTAKES = [
    ("00", swapped, "mean of the entropies"),
    ("00", total_twice, "entropy of the mean"),
    ("00", in_bits, "bits"),
    ("00", with_nan, "NaN"),
    ("01", sums, "divide"),
    ("01", the_same, "the same networks"),
    ("01", every_second, "neighbours"),
    ("02", changed_places, "changed places"),
    ("02", everything_between, "all members"),
    ("02", sum_over_groups, "sum over the groups"),
    ("03", logits_as_they_are, "do not centre"),
    ("03", by_members, "M - 1"),
    ("03", deviation, "standard deviations"),
    ("03", over_classes, "over the members"),
    ("10", not_centred, "not centred"),
    ("10", one_axis, "one axis"),
    ("10", by_n, "N\\^2"),
    ("10", centred_twice, "first matrix with itself"),
    ("10", product_of_diagonals, "diagonal"),
    ("10", all_entries, "trace"),
    ("12", backwards, "other - one"),
    ("12", unpaired, "unpaired"),
    ("12", normal, "Student"),
    ("12", not_a_mean, "root of R"),
]


@pytest.mark.parametrize(("lesson", "key"), KEYS)
def test_the_key_passes(lesson, key, capsys):
    check.exercise(lesson, key)
    assert capsys.readouterr().out.startswith("Right")


@pytest.mark.parametrize(("lesson", "mistake", "line"), MISTAKES)
def test_a_typical_mistake_gets_its_line(lesson, mistake, line):
    with pytest.raises(check.NotYet, match=line):
        check.exercise(lesson, mistake)


def fails(gram, other):
    return gram @ other[:2]


def blank(gram, other):
    raise NotImplementedError("your turn")


def unlike_all(gram, other):
    return 7.5


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda gram, other: None, "raised"),
        (fails, "raised RuntimeError"),
        (blank, "still to be written"),
        (lambda gram, other: gram, "HSIC has shape"),
        (lambda gram, other: (1.0, 2.0), "HSIC has shape"),
        (unlike_all, "HSIC is 7.5, it should be 32.1"),
    ],
)
def test_another_wrong_answer_is_explained_in_one_line(function, line):
    with pytest.raises(check.NotYet, match=line) as caught:
        check.exercise("10", function)
    (shown,) = caught.value._render_traceback_()
    assert shown == f"Not yet: {caught.value}."
