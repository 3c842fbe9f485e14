"""Exercises under "Your turn": the right function passes, typical mistakes get their line."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy import stats

from uqlab import uncertainty
from uqlab.study import check

CASES = yaml.safe_load(Path(check.__file__).with_suffix(".yaml").read_text("utf-8"))


def decompose(p):
    parts = uncertainty.decompose(p.clamp_min(1e-30).log())
    return parts.total, parts.aleatoric, parts.epistemic


def with_nan(p):
    total = -(p.mean(0) * p.mean(0).log()).sum(-1)
    aleatoric = -(p * p.log()).sum(-1).mean(0)
    return total, aleatoric, total - aleatoric


def sub_ensembles(networks, size, groups):
    split = networks.unflatten(0, (groups, -1))
    return split.unflatten(1, (-1, size)).mean(2)


def between_within(p):
    parts = uncertainty.decompose_groups(p.clamp_min(1e-30).log())
    return parts.between, parts.within


def logit_variance(z):
    return (z - z.mean(-1, keepdim=True)).var(0).mean()


def hsic(gram, other):
    centre = torch.eye(len(gram)) - 1 / len(gram)
    return torch.trace(centre @ gram @ centre @ other).item() / (len(gram) - 1) ** 2


def paired_interval(one, other):
    apart = other - one
    half = stats.t.ppf(0.975, len(apart) - 1) * stats.sem(apart)
    return apart.mean(), apart.mean() - half, apart.mean() + half


RIGHT = {
    "00": decompose,
    "01": sub_ensembles,
    "02": between_within,
    "03": logit_variance,
    "10": hsic,
    "12": paired_interval,
}
MISTAKES = [
    ("00", lambda p: [part / math.log(2) for part in decompose(p)], "bits"),
    ("00", with_nan, "NaN"),
    ("01", lambda *x: 2 * sub_ensembles(*x), "divide"),
    ("01", lambda x, size, groups: x.view(2, 2, 2, 2).mean(1), "neighbours"),
    ("02", lambda p: between_within(p)[::-1], "changed places"),
    ("03", lambda z: z.var(0).mean(), "do not centre"),
    ("10", lambda gram, other: (gram * other).sum() / 9, "not centred"),
    ("12", lambda one, other: paired_interval(other, one), "other - one"),
]


@pytest.mark.parametrize("lesson", CASES)
def test_the_right_function_passes(lesson, capsys):
    check.exercise(lesson, RIGHT[lesson])
    assert capsys.readouterr().out.startswith("Right")


@pytest.mark.parametrize(("lesson", "mistake", "line"), MISTAKES)
def test_a_typical_mistake_gets_its_line(lesson, mistake, line):
    with pytest.raises(AssertionError, match=line):
        check.exercise(lesson, mistake)


@pytest.mark.parametrize("lesson", CASES)
def test_no_mistake_looks_like_the_right_answer_or_another(lesson):
    right, lines = CASES[lesson]["right"], {}
    for mistake in CASES[lesson]["mistakes"]:
        parts = {part: value for part, value in mistake.items() if part != "says"}
        assert parts.keys() <= right.keys()
        assert all(np.shape(right[part]) == np.shape(parts[part]) for part in parts)
        assert not any(np.allclose(right[part], parts[part], 1e-2) for part in parts)
        lines.setdefault(str(parts), set()).add(mistake["says"])
    assert {len(said) for said in lines.values()} == {1}


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda gram, other: None, "should return HSIC"),
        (lambda gram, other: gram, "HSIC is .*, it should be"),
        (lambda gram, other: 7.5, "HSIC is 7.5, it should be 32.1"),
    ],
)
def test_another_wrong_answer_is_explained_in_one_line(function, line):
    with pytest.raises(AssertionError, match=line) as caught:
        check.exercise("10", function)
    (shown,) = caught.value._render_traceback_()
    assert shown == f"Not yet: {caught.value}."
