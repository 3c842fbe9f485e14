"""Decompositions: identities, known numbers, plain references, bad input."""

import math

import numpy as np
import pytest
import torch
from same import near
from torch.testing import assert_close

from uqlab.core import modules
from uqlab.uncertainty import (
    decompose,
    decompose_gaussian,
    decompose_groups,
    decompose_score,
    entropy,
    expected_pairwise_kl,
    group_members,
    logit_sum_weights,
    temperature_of_total,
)

RULES = {
    "log": lambda p: torch.special.entr(p).sum(-1),
    "brier": lambda p: 1 - p.square().sum(-1),
    "zero-one": lambda p: 1 - p.amax(-1),
}


def make_logits(
    *shape: int, scale: float = 3.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    return scale * torch.randn(
        *shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)
    )


def plug_in(
    p: torch.Tensor, rule: str = "log", weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Total, aleatoric and epistemic from probabilities [M, N, C], as the definitions read."""
    weights = (
        torch.full(p.shape[:1], 1 / len(p), dtype=p.dtype)
        if weights is None
        else weights
    )
    weights = (weights if weights.ndim == 2 else weights[:, None]).expand(p.shape[:2])
    total = RULES[rule]((weights[..., None] * p).sum(0))
    aleatoric = (weights * RULES[rule](p)).sum(0)
    return total, aleatoric, total - aleatoric


def dirichlet_logits(members: int, inputs: int, alpha: float) -> torch.Tensor:
    """Members drawn from a symmetric Dirichlet over ten classes; the log of a gamma variable serves as a logit."""
    return torch.from_numpy(
        np.log(np.random.default_rng(0).standard_gamma(alpha, (members, inputs, 10)))
    )


# Identities and known numbers -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_total_is_aleatoric_plus_epistemic_and_the_entropy_of_the_mean(dtype):
    logits = make_logits(7, 50, 4, dtype=dtype)
    result = decompose(logits)
    near(tuple(result), plug_in(logits.softmax(-1)))
    assert torch.equal(result.total, result.aleatoric + result.epistemic)
    assert result.epistemic.min() >= 0
    assert result.aleatoric.min() >= 0


def test_uniform_second_order_law_on_two_classes():
    p = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    logits = torch.stack([p.log(), (-p).log1p()], -1)[:, None]  # [M, 1, 2]
    _, aleatoric, epistemic = decompose(logits)
    assert aleatoric.item() == pytest.approx(0.5, abs=1e-6)
    assert epistemic.item() == pytest.approx(math.log(2) - 0.5, abs=1e-6)


@pytest.mark.parametrize("members", [2, 3, 10])
def test_equal_members_do_not_disagree(members):
    logits = make_logits(1, 200, 5, dtype=torch.float32).expand(members, -1, -1)
    for result in (decompose(logits), decompose(logits, correct="jackknife")):
        assert result.epistemic.max() < 1e-12
    assert expected_pairwise_kl(logits).max() < 1e-10


def test_small_disagreement_keeps_its_digits_in_float32():
    logits = make_logits(1, 100, 10) + 1e-3 * make_logits(5, 100, 10, scale=1.0, seed=1)
    exact = plug_in(logits.softmax(-1))[2]
    assert exact.max() < 1e-6
    # Rounding the logits themselves costs 1e-7 / 1e-3; a difference of entropies would be off by 100 %.
    assert_close(decompose(logits.float()).epistemic.double(), exact, rtol=2e-3, atol=0)


def test_log_probabilities_and_shifted_logits_give_the_same():
    logits = make_logits(4, 20, 3)
    expected = decompose(logits)
    shifted = logits + make_logits(4, 20, 1, scale=10.0, seed=1)
    near(decompose(logits.log_softmax(-1)), expected)
    near(decompose(shifted), expected)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4, 5)])
def test_entropy_of_any_leading_shape(shape):
    logits = make_logits(*shape)
    near(entropy(logits), RULES["log"](logits.softmax(-1)))


# Rules and weights ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [None, (4,), (4, 30)])
def test_scoring_rules_and_weights_agree_with_the_definition(rule, shape):
    logits, weights = (
        make_logits(4, 30, 3),
        None if shape is None else torch.rand(shape, dtype=torch.float64) + 0.1,
    )
    expected = plug_in(
        logits.softmax(-1), rule, None if weights is None else weights / weights.sum(0)
    )
    near(tuple(decompose_score(logits, rule, weights)), expected)
    assert decompose_score(logits.float(), rule, weights).epistemic.min() >= 0


def test_large_weights_are_weights():
    logits, weights = (
        make_logits(3, 30, 4, dtype=torch.float32),
        torch.tensor([1.0, 1.5, 0.5]),
    )
    near(decompose(logits, weights * 2e38), decompose(logits, weights))


def test_a_member_without_weight_does_not_matter_even_where_it_alone_believes():
    logits = torch.tensor([[[500.0, 0.0]], [[-500.0, 0.0]]])
    _, aleatoric, epistemic = decompose(logits, torch.tensor([0.0, 1.0]))
    assert aleatoric.item() == epistemic.item() == 0


def test_logit_sum_weights_follow_the_formula():
    logits = make_logits(5, 40, 3, scale=1.0)
    sums = logits.sum(-1).exp().sum(1)
    near(logit_sum_weights(logits), sums / sums.sum())
    huge = logit_sum_weights(
        logits.float() * 1e4
    )  # exp of the sums overflows; the weights do not
    near(huge.sum().item(), 1.0)


# Few members ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("members", [2, 3, 6])
def test_jackknife_is_the_leave_one_out_formula(rule, members):
    p = make_logits(members, 40, 4).softmax(-1)
    left_out = [
        plug_in(p[[j for j in range(members) if j != i]], rule)[2]
        for i in range(members)
    ]
    expected = members * plug_in(p, rule)[2] - (members - 1) * torch.stack(
        left_out
    ).mean(0)
    result = decompose_score(p.log(), rule, correct="jackknife")
    near(result.epistemic, expected)
    near(result.aleatoric, plug_in(p, rule)[1])
    near(result.total, result.aleatoric + result.epistemic)


@pytest.mark.parametrize(
    ("correct", "alpha", "ratios"),
    [
        ("jackknife", 1.0, {2: 0.945, 3: 0.984, 5: 0.996, 10: 0.999, 24: 1.000}),
        (None, 10.0, {2: 0.50, 3: 0.67, 5: 0.80, 10: 0.90, 24: 0.96}),  # about 1 - 1/M
    ],
)
def test_jackknife_removes_the_bias_of_few_members(correct, alpha, ratios):
    logits = dirichlet_logits(24, 20_000, alpha)
    at = torch.tensor([10 * alpha + 1, alpha + 1], dtype=torch.float64).digamma()
    truth = (
        math.log(10) - (at[0] - at[1]).item()
    )  # infinitely many members: log C - E[H]
    found = {
        m: decompose(logits[:m], None, correct).epistemic.mean().item() / truth
        for m in ratios
    }
    assert found == pytest.approx(ratios, abs=0.008)


# Groups ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 6, 12])
def test_chain_rule_holds_for_every_grouping(size):
    logits = make_logits(12, 30, 5)
    whole, grouped = decompose(logits), decompose_groups(group_members(logits, size))
    assert torch.equal(
        group_members(logits, size)[0], logits[:size]
    )  # consecutive members
    near(grouped.between + grouped.within, whole.epistemic)
    assert torch.equal(grouped.epistemic, grouped.between + grouped.within)
    near(grouped.total, whole.total)
    near(grouped.aleatoric, whole.aleatoric)
    assert min(grouped.between.min(), grouped.within.min()) >= 0
    if size == 1:
        assert grouped.within.max() < 1e-15
    if size == 12:
        assert grouped.between.max() < 1e-15


@pytest.mark.parametrize("correct", [None, "jackknife"])
def test_between_is_the_information_of_the_group_means(correct):
    grouped = group_members(make_logits(12, 30, 5), 3)
    means = grouped.softmax(-1).mean(1).log()
    near(
        decompose_groups(grouped, correct).between,
        decompose(means, None, correct).epistemic,
    )


def test_information_between_groups_collapses_with_their_size_and_their_number():
    logits = dirichlet_logits(24, 4_000, 3.0)

    def between(groups: int, size: int, correct: str | None = None) -> float:
        return (
            decompose_groups(group_members(logits[: groups * size], size), correct)
            .between.mean()
            .item()
        )

    # METHODS: I[Y; K] is proportional to (1 - 1/K) / M, here with K x M = 24.
    scaled = [m * between(24 // m, m) / (1 - m / 24) for m in (2, 4, 8, 12)]
    assert scaled == pytest.approx([scaled[-1]] * 4, rel=0.1)
    assert between(2, 2) / between(12, 2) == pytest.approx(
        (1 / 2) / (11 / 12), rel=0.05
    )
    assert between(2, 2, "jackknife") == pytest.approx(
        between(12, 2, "jackknife"), rel=0.05
    )


# Other measures -------------------------------------------------------------------------------------------------------
def test_expected_pairwise_kl_is_the_mean_over_pairs_and_the_sum_of_both_informations():
    logits = make_logits(5, 30, 4)
    log_p = logits.log_softmax(-1)
    p, q = log_p.exp(), log_p.exp().mean(0)
    pairs = [
        (p[i] * (log_p[i] - log_p[j])).sum(-1)
        for i in range(5)
        for j in range(5)
        if i != j
    ]
    result = expected_pairwise_kl(logits)
    near(result, torch.stack(pairs).mean(0))
    reverse = (q * (q.log() - log_p)).sum(-1).mean(0)
    near(
        result, 5 / 4 * (decompose(logits).epistemic + reverse)
    )  # Schweighofer et al., C3


def test_expected_pairwise_kl_grows_like_the_logit_gap_where_a_probability_vanishes():
    logits = torch.tensor([[[1e4, 0.0]], [[-1e4, 0.0]]])  # p underflows, log p = -1e4
    assert expected_pairwise_kl(logits).item() == pytest.approx(1e4)


def test_gaussian_members_follow_the_law_of_total_variance():
    means, variances = make_logits(6, 20), make_logits(6, 20, seed=1).square()
    plain, corrected = (
        decompose_gaussian(means, variances),
        decompose_gaussian(means, variances, "jackknife"),
    )
    near(plain.total, (variances + means.square()).mean(0) - means.mean(0).square())
    near(plain.aleatoric, variances.mean(0))
    near(corrected.epistemic, plain.epistemic * 6 / 5)
    near(corrected.total, corrected.aleatoric + corrected.epistemic)


# Chunks, dtypes, gradients --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("correct", [None, "jackknife"])
def test_chunks_do_not_show(monkeypatch, correct):
    logits, weights = make_logits(4, 101, 3), torch.rand(4, 101)
    whole = (
        decompose(logits, correct=correct),
        decompose_groups(logits.view(2, 2, 101, 3), correct),
    )
    weighted = decompose(logits, weights)
    monkeypatch.setitem(
        modules.TEMPORARY, "cpu", 4 * 3 * 10
    )  # ten inputs at a time, and one left
    chunked = (
        decompose(logits, correct=correct),
        decompose_groups(logits.view(2, 2, 101, 3), correct),
    )
    near(chunked, whole)
    near(decompose(logits, weights), weighted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    logits = make_logits(4, 20, 3, dtype=dtype)
    assert_close(decompose(logits), decompose(logits.float()), atol=0, rtol=0)
    assert decompose(logits).total.dtype == torch.float32


def test_any_memory_layout_is_read_and_never_written():
    logits = make_logits(3, 4, 5)
    for layout in (
        (0, 1, 2),
        (2, 0, 1),
        (2, 1, 0),
    ):  # the second is the working layout itself
        back = sorted(range(3), key=lambda axis, layout=layout: layout[axis])
        view = logits.permute(layout).contiguous().permute(back)
        before = view.clone()
        near(decompose(view), decompose(logits))
        assert torch.equal(view, before)


@pytest.mark.parametrize("correct", [None, "jackknife"])
def test_gradients_pass_through(correct):
    logits = make_logits(3, 2, 4, scale=1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: decompose(z, correct=correct), logits)


# Bad input ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "measure", [decompose, expected_pairwise_kl, logit_sum_weights, decompose_score]
)
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (128, 10),
            r"must be \[members, batch, classes\], got \[128, 10\]; for a single model use logits\[None\]",
        ),
        ((2, 3, 4, 5), "for groups decompose_groups"),
        ((2, 0, 3), "must not be empty"),
        ((0, 2, 3), "must not be empty"),
        ((2, 3, 1), "two classes or more"),
    ],
)
def test_wrong_shapes_are_named(unchecked, measure, shape, message):
    with pytest.raises(ValueError, match=message):
        measure(torch.zeros(shape))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "measure",
    [
        decompose,
        entropy,
        expected_pairwise_kl,
        logit_sum_weights,
        lambda z: decompose_score(z, "brier"),
        lambda z: decompose_score(z, "zero-one"),
        lambda z: decompose(z, torch.tensor([1.0, 1.0, 0.0, 1.0])),
        lambda z: decompose_groups(group_members(z, 2)),
    ],
)
def test_infinite_and_nan_logits_are_located(measure, value, monkeypatch):
    monkeypatch.setitem(modules.TEMPORARY, "cpu", 4 * 3 * 2)
    logits = make_logits(4, 5, 3, dtype=torch.float32)
    logits[2, 3, 1] = value
    where = r"logits must be finite, .* at \[2, 3, 1\]"
    with pytest.raises(ValueError, match=where):
        measure(logits)


def test_logits_beyond_float32_are_an_error_not_a_nan():
    with pytest.raises(ValueError, match=r"logits are too large for torch\.float32"):
        decompose(torch.tensor([[[0.0, 1.0], [3e38, -3e38]]]))


def test_integers_are_refused(unchecked):
    with pytest.raises(
        TypeError, match=r"must be a floating tensor, got .*\.float\(\)"
    ):
        decompose(torch.zeros(2, 3, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z: decompose(z, torch.ones(3)), r"\[members\] = \[6\]"),
        (lambda z: decompose(z, torch.tensor([1.0, 1, 1, 1, 1, -1])), "not negative"),
        (lambda z: decompose(z, torch.tensor([1.0, 1, 1, 1, 1, math.nan])), "finite"),
        (lambda z: decompose(z, torch.zeros(6, 4)), "positive sum"),
        (lambda z: decompose(z, correct="bootstrap"), "correct must be"),
        (lambda z: decompose(z[:1], correct="jackknife"), "at least 2 members"),
        (lambda z: decompose(z, torch.ones(6), "jackknife"), "not both"),
        (lambda z: decompose_score(z, "accuracy"), "rule must be"),
        (lambda z: expected_pairwise_kl(z[:1]), "members must be at least 2"),
        (lambda z: group_members(z, 4), "groups of 4 do not divide 6 members"),
        (decompose_groups, "group_members"),
        (lambda z: decompose_groups(z[None], "jackknife"), "at least 2 groups"),
        (lambda z: decompose_gaussian(z[0], z[0, :2]), "means and variances must both"),
        (lambda z: decompose_gaussian(z[0], -z[0].abs()), "must not be negative"),
        (lambda z: decompose_gaussian(z[0] / 0, z[0].abs()), "finite"),
        (
            lambda z: decompose_gaussian(1e30 * z[0].float(), z[0].float().abs()),
            "large",
        ),
        (lambda z: entropy(z[0, 0, 0]), "two classes or more"),
    ],
)
def test_bad_arguments_are_refused(unchecked, call, message):
    with pytest.raises(ValueError, match=message):
        call(make_logits(6, 4, 3))


def test_at_the_temperature_of_a_total_the_mean_total_is_that():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 200, 10, generator=generator)
    own = decompose(logits).total.mean().item()
    assert temperature_of_total(logits, own) == pytest.approx(1, abs=1e-4)
    for total in (1.7, 2.0, 2.2):
        scaled = logits / temperature_of_total(logits, total)
        assert decompose(scaled).total.mean().item() == pytest.approx(total, abs=1e-4)
    assert temperature_of_total(logits, 3.0) == pytest.approx(100)  # above log 10
    assert temperature_of_total(logits, 0.1) == pytest.approx(0.01)  # members disagree


@pytest.mark.parametrize(
    ("weights", "correct"), [(None, None), ([0.2, 0.5, 0.3], None), (None, "jackknife")]
)
def test_the_classes_terms_sum_to_the_parts_and_none_is_negative(weights, correct):
    logits = 3 * torch.randn(3, 500, 5, dtype=torch.float64)
    whole = decompose(logits, weights, correct)
    terms = decompose(logits, weights, correct, by="class")
    for part, by_class in zip(whole, terms, strict=True):
        assert (by_class >= 0).all()
        near(by_class.sum(1), part)
    if correct:
        return
    p = logits.softmax(-1)
    shares = torch.tensor(weights or [1 / 3] * 3, dtype=torch.float64)
    mean = torch.einsum("mnc,m->nc", p, shares)
    near(terms.total, torch.special.entr(mean))
