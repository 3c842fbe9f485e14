"""What users give is read as tensors, or refused in words; devices by name."""

import math
import re

import numpy as np
import pytest
import torch

from uqlab.core import checks
from uqlab.core.checks import finite, within
from uqlab.core.modules import device


@pytest.mark.parametrize("make", [torch.tensor, np.array, list, tuple])
def test_arrays_lists_and_tensors_are_the_same_numbers(make):
    numbers = [[1.0, 2.0], [3.0, 4.0]]
    found = checks.as_tensor("x", make(numbers), "rows columns")
    assert torch.equal(found.double(), torch.tensor(numbers).double())
    labels = checks.as_labels(make([0, 1]), 2, classes=2)
    assert labels.dtype == torch.int64


def test_a_read_only_array_and_one_of_the_other_byte_order_are_copied():
    array = np.arange(3.0).astype(">f4")
    array.flags.writeable = False
    found = checks.as_tensor("x", array)
    assert found.tolist() == [0, 1, 2]
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["a", "b"], "tensor, an array or lists"),
        ([[1], [2, 3]], "different lengths"),
        ({}, "at least one"),
        (torch.ones(0, 2), "at least one"),
        (torch.ones(2).to("meta"), "hold its numbers"),
        ({"ids": torch.ones(2, 1), "mask": torch.ones(3, 1)}, "same number of"),
        (torch.tensor([[0.0], [torch.nan]]), r"finite, got .* at \[1, 0\]"),
        ({"ids": torch.ones(1, 1), "x": torch.tensor([[torch.inf]])}, "finite"),
    ],
)
def test_inputs_that_cannot_be_counted(inputs, words):
    with pytest.raises((TypeError, ValueError), match=words):
        checks.as_inputs(inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_large_values_are_finite_though_their_sum_is_not(dtype):
    finite("x", torch.full((4,), torch.finfo(dtype).max, dtype=dtype))


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("(0, 1]", (1e-300, 1), (0, -1, 1.001, math.nan, math.inf)),
        ("[0, 1)", (0, 0.5), (-1e-9, 1, math.nan)),
        ("(-inf, inf)", (-5, 5), (math.inf, -math.inf, math.nan)),
        ("(0, inf]", (1, math.inf), (0, math.nan)),
    ],
)
def test_numbers_in_intervals(interval, inside, outside):
    for value in inside:
        within("x", value, interval)
    for value in outside:
        with pytest.raises(ValueError, match=re.escape(f"in {interval}, got {value}")):
            within("x", value, interval)


def test_a_gpu_is_taken_by_name_where_it_is(monkeypatch):
    if torch.cuda.is_available():
        assert device("cuda").type == "cuda"
    else:
        with pytest.raises(ValueError, match="device must be"):
            device("cuda")
    empty = torch.empty  # as on a Mac: tensors can be made there
    monkeypatch.setattr(torch, "empty", lambda *sizes, device: empty(*sizes))
    assert device("mps") == torch.device("mps")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", ""])
def test_what_does_not_compute_is_refused(name):
    with pytest.raises(ValueError, match="device must be"):
        device(name)
