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


def sub_ensembles(networks, size, groups=10):
    split = networks.unflatten(0, (groups, -1))
    return split.unflatten(1, (-1, size)).mean(2)


def sums(networks, size):
    return size * sub_ensembles(networks, size)


def the_same(networks, size):
    return sub_ensembles(networks, size)[:1].repeat(10, 1, 1)


def every_second(networks, size):
    return networks.unflatten(0, (10, size, -1)).mean(1)


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
    (check.page_00, decompose),
    (check.page_01, sub_ensembles),
    (check.page_02, between_within),
    (check.page_03, logit_variance),
    (check.page_10, hsic),
    (check.page_10, by_trace),
    (check.page_12, paired_interval),
]
MISTAKES = [
    (check.page_00, swapped, "mean of the entropies"),
    (check.page_00, total_twice, "entropy of the mean"),
    (check.page_00, in_bits, "bits"),
    (check.page_00, with_nan, "NaN"),
    (check.page_01, sums, "divide"),
    (check.page_01, the_same, "the same networks"),
    (check.page_01, every_second, "neighbours"),
    (check.page_02, changed_places, "changed places"),
    (check.page_02, everything_between, "all members"),
    (check.page_02, sum_over_groups, "sum over the groups"),
    (check.page_03, logits_as_they_are, "do not centre"),
    (check.page_03, by_members, "M - 1"),
    (check.page_03, deviation, "standard deviations"),
    (check.page_03, over_classes, "over the members"),
    (check.page_10, not_centred, "not centred"),
    (check.page_10, one_axis, "one axis"),
    (check.page_10, by_n, "N\\^2"),
    (check.page_10, centred_twice, "first matrix with itself"),
    (check.page_10, product_of_diagonals, "diagonal"),
    (check.page_10, all_entries, "trace"),
    (check.page_12, backwards, "other - one"),
    (check.page_12, unpaired, "unpaired"),
    (check.page_12, normal, "Student"),
    (check.page_12, not_a_mean, "root of R"),
]


@pytest.mark.parametrize(("judge", "key"), KEYS)
def test_the_key_passes(judge, key, capsys):
    judge(key)
    assert capsys.readouterr().out.startswith("Right")


@pytest.mark.parametrize(("judge", "mistake", "line"), MISTAKES)
def test_a_typical_mistake_gets_its_line(judge, mistake, line):
    with pytest.raises(check.NotYet, match=line):
        judge(mistake)


@pytest.mark.parametrize("name", check.cases())
def test_no_mistake_of_a_case_looks_like_the_right_answer_or_another(name):
    right, lines = check.cases()[name]["right"], {}
    for mistake in check.cases()[name]["mistakes"]:
        parts = {part: value for part, value in mistake.items() if part != "says"}
        assert parts
        assert parts.keys() <= right.keys()
        assert all(np.shape(right[part]) == np.shape(parts[part]) for part in parts)
        assert not any(np.allclose(right[part], parts[part], 1e-2) for part in parts)
        lines.setdefault(str(parts), set()).add(mistake["says"])
    assert {len(said) for said in lines.values()} == {1}


def test_another_number_of_groups():
    check.page_01(lambda networks, size: sub_ensembles(networks, size, 3), groups=3)


def nothing(gram, other):
    """What a function without `return` gives."""


def fails(gram, other):
    return gram @ other[:2]


def blank(gram, other):
    raise NotImplementedError("your turn")


def matrix(gram, other):
    return gram


def unlike_all(gram, other):
    return 7.5


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (nothing, "should be numbers"),
        (fails, "raised RuntimeError"),
        (blank, "still to be written"),
        (matrix, r"the shape \[4, 4\], it should be \[\]"),
        (unlike_all, "HSIC is 7.5, it should be 32.1"),
    ],
)
def test_whatever_else_is_wrong_is_told_in_words(function, line):
    with pytest.raises(check.NotYet, match=line) as caught:
        check.page_10(function)
    (shown,) = caught.value._render_traceback_()
    assert shown == f"Not yet: {caught.value}."


@pytest.mark.parametrize("answer", [None, 3.0, (1.0, 2.0)])
def test_an_answer_of_other_parts_is_told_in_words(answer):
    with pytest.raises(check.NotYet, match="should return mean, low, high"):
        check.page_12(lambda one, other: answer)
