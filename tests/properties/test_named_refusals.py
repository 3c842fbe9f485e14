"""Calls that once ended in a library's words, or in silence: each now says what was given and what is accepted."""

import math
import re

import numpy as np
import pytest
import torch
from same import near
from torch import nn

from uqlab import data, ensembles, metrics, models, training, uncertainty

X, LABELS = torch.linspace(-1, 1, 48).reshape(6, 8), torch.arange(6) % 4
LOGITS = torch.linspace(-1, 1, 72).reshape(3, 6, 4)
ONCE = {"epochs": 1, "lr": 0.1, "progress": False}


def net() -> nn.Sequential:
    return models.mlp(8, (6,), 4)


def fit(x=X, **changes):
    training.fit(ensembles.deep(net, 2), x, LABELS, **(ONCE | changes))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: training.device("nope"), ValueError, """device must be "auto", .* like "cuda:1", got .nope"""),
        (lambda: training.fit(ensembles.deep(net, 2), X.to("meta"), LABELS, **ONCE), TypeError, "inputs must hold its"),
        (lambda: training.predict(net(), X.to("meta")), TypeError, "inputs must hold its numbers, got .* on meta"),
        (lambda: training.predict(net().to("meta"), X), ValueError, "must hold its numbers, got weights on meta"),
        (lambda: metrics.nll(LOGITS.to("meta"), LABELS), TypeError, "logits must hold its numbers, got .* on meta"),
        (lambda: fit(seed=1.5), TypeError, "seed must be an integer"),
        (lambda: data.load("digits", limit=5, seed=None), TypeError, "seed must be an integer, got None"),
        (lambda: metrics.ece(LOGITS, LABELS, bins=math.nan), TypeError, "bins must be an integer, got nan"),
        (lambda: fit(max_grad_norm=math.nan), ValueError, r"max_grad_norm must be in \(0, inf\], got nan"),
        (lambda: fit(lr=math.nan), ValueError, r"lr must be in \(0, inf\), got nan"),
    ],
)  # fmt: skip
def test_what_is_no_value_is_named_with_what_is_accepted(call, error, words, unchecked):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    "make",
    [
        net,
        lambda: ensembles.deep(net, 2),
        lambda: ensembles.lora(net(), 2, 2),
        lambda: ensembles.from_members([net(), net()]),
        lambda: ensembles.dropout(models.mlp(8, (6,), 4, dropout=0.1), 2),
    ],
)
def test_a_wrong_feature_count_names_the_layer_and_both_sizes(make):
    model = make()
    calls = [lambda: training.predict(model, torch.ones(6, 9))]
    if model.__class__ is not nn.Sequential:
        calls.append(lambda: training.fit(model, torch.ones(6, 9), LABELS, **ONCE))
    for call in calls:
        with pytest.raises(
            RuntimeError,
            match=r"in layer '(\w+\.)*1(\.weight)?', \w+: check the inputs' shape",
        ) as refused:
            call()
        assert {"8", "9"} <= {*re.findall(r"\d+", str(refused.value))}, refused.value


def test_arrays_and_lists_are_taken_where_tensors_are_wanted():
    """Read once: the same numbers come out."""
    weights, half = [0.5, 0.25, 0.25], np.array([0.5, 0.25, 0.25])
    near(
        uncertainty.decompose(LOGITS, weights).total,
        uncertainty.decompose(LOGITS, half).total,
        check_dtype=False,
    )
    ours, theirs = ensembles.deep(net, 2), ensembles.deep(net, 2)
    training.fit(ours, X, LABELS, class_weights=torch.ones(4), **ONCE)
    training.fit(theirs, X.numpy(), LABELS.tolist(), class_weights=[1.0] * 4, **ONCE)
    near(training.predict(theirs, X.tolist()), training.predict(ours, X))
