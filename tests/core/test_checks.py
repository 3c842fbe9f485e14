"""What users give is read as tensors, or refused in words."""

import math
import re

import numpy as np
import pytest
import torch

from uqlab.core import checks
from uqlab.core.checks import finite, within


@pytest.mark.parametrize("make", [torch.tensor, np.array, list, tuple])
def test_arrays_lists_and_tensors_are_the_same_numbers(make):
    numbers = [[1.0, 2.0], [3.0, 4.0]]
    found = checks.as_tensor("x", make(numbers), "rows columns")
    assert torch.equal(found.double(), torch.tensor(numbers).double())
    assert torch.equal(checks.as_scores(make([1, 2])), torch.tensor([1, 2]))
    labels = checks.as_labels(make([0, 1]), 2, classes=2)
    assert labels.dtype == torch.int64


def test_a_read_only_array_and_one_of_the_other_byte_order_are_copied():
    array = np.arange(3.0).astype(">f4")
    array.flags.writeable = False
    found = checks.as_tensor("x", array)
    assert found.tolist() == [0, 1, 2]
    assert found.dtype == torch.float32
    assert checks.as_tensor("x", np.arange(3)).dtype == torch.float64


def test_samples_are_counted_in_tensors_and_in_tensors_by_name():
    ids = torch.ones(3, 2, dtype=torch.int64)
    by_name = {"input_ids": ids, "attention_mask": ids}
    assert checks.count(checks.as_inputs(ids)) == 3
    assert checks.count(checks.as_inputs(by_name)) == 3


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (
            ["a", "b"],
            TypeError,
            "inputs must be a tensor, an array or lists of numbers",
        ),
        ([[1], [2, 3]], ValueError, "rows of different lengths"),
        ({}, ValueError, "at least one"),
        (torch.tensor(1.0), ValueError, "at least one"),
        (torch.ones(0, 2), ValueError, r"at least one, got \[0\] samples"),
        (torch.ones(2).to("meta"), TypeError, "must hold its numbers"),
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
        checks.as_inputs(inputs)


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
