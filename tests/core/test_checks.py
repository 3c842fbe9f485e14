"""Inputs are counted and checked before work starts."""

import math
import re

import pytest
import torch

from uqlab.core.checks import count_samples, finite, within


def test_samples_are_counted_in_tensors_and_in_tensors_by_name():
    ids = torch.ones(3, 2, dtype=torch.int64)
    assert (
        count_samples(ids)
        == count_samples({"input_ids": ids, "attention_mask": ids})
        == 3
    )


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([1, 2], TypeError, "inputs must be a tensor .*got list; use torch.as_tensor"),
        ({}, TypeError, "got dict"),
        ({"ids": [1, 2]}, TypeError, "tensors by name"),
        (torch.tensor(1.0), TypeError, r"tensor \[samples, ...\]"),
        (torch.ones(0, 2), ValueError, r"at least one, got \[0\] samples"),
        (
            {"ids": torch.ones(2, 1), "mask": torch.ones(3, 1)},
            ValueError,
            "the same number of samples",
        ),
        (
            torch.tensor([[0.0], [torch.nan]]),
            ValueError,
            r"inputs must be finite, got .* at \[1, 0\]",
        ),
        (
            {"ids": torch.ones(1, 1), "x": torch.tensor([[torch.inf]])},
            ValueError,
            "inputs must be finite",
        ),
    ],
)
def test_inputs_that_cannot_be_counted(inputs, error, message):
    with pytest.raises(error, match=message):
        count_samples(inputs)


def test_large_values_are_finite_though_their_sum_is_not():
    for dtype, largest in (
        (torch.float16, 6e4),
        (torch.float32, 3e38),
        (torch.float64, 1e308),
    ):
        finite("x", torch.full((4,), largest, dtype=dtype))


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("(0, 1]", (1e-300, 1), (0, -1, 1.001, math.nan, math.inf)),
        ("[0, 1)", (0, 0.5), (-1e-9, 1, math.nan)),
        ("[0, inf)", (0, 1e300), (-1, math.inf, math.nan)),
        ("(-inf, inf)", (-5, 5), (math.inf, -math.inf, math.nan)),
        ("(0, inf]", (1, math.inf), (0, math.nan)),
    ],
)
def test_numbers_in_intervals(interval, inside, outside):
    for value in inside:
        within("x", value, interval)
    for value in outside:
        with pytest.raises(
            ValueError, match=re.escape(f"x must be in {interval}, got {value}")
        ):
            within("x", value, interval)
