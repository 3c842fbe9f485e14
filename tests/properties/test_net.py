"""Every public name under bad arguments: it works or refuses in words, and changes nothing that it should not."""

import inspect
import math
import random

import pytest
import recipes
import torch
from hypothesis import given
from hypothesis import strategies as st
from net import BAD, PACKAGE, faults, spoiled
from torch import nn

from uqlab import ensembles, metrics, models, training

PUBLIC = recipes.public()
CALLED = sorted(PUBLIC.keys() - recipes.NO_CALLS.keys())


def test_no_name_is_forgotten():
    """A new name needs a recipe, or a reason why it has none; those that are gone leave no trace."""
    assert not recipes.NO_CALLS.keys() - PUBLIC.keys()
    assert not recipes.OWN.keys() - PUBLIC.keys()
    for name in CALLED:
        recipes.valid(name, PUBLIC[name])


@pytest.mark.parametrize("name", CALLED)
def test_bad_arguments(name, unchecked):
    thing = PUBLIC[name]
    proper = recipes.valid(name, thing)
    pools = {
        parameter: [*BAD, *spoiled(proper.get(parameter))]
        for parameter in inspect.signature(thing).parameters
    }
    cases = [(name, at) for name, pool in pools.items() for at in range(len(pool))]
    assert faults(name, thing, {}) == []

    @given(st.lists(st.sampled_from(cases), min_size=1, max_size=2))
    def call(chosen):
        change = {parameter: pools[parameter][at] for parameter, at in chosen}
        assert faults(name, thing, change) == [], change

    if cases:
        call()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "scores.values",
            {"model": nn.Linear(8, 4).half(), "inputs": torch.full((6, 8), 1e30)},
        ),
        ("ensembles.from_pretrained", {"folder": ""}),
    ],
)
def test_what_was_found(name, change, unchecked):
    assert faults(name, PUBLIC[name], change) == []


def mistaken():
    """A function of the package that looks up a key that is not there."""
    names = {}
    source = "def mistaken(logits):\n    return {}['key']"
    exec(compile(source, f"{PACKAGE}/made_up.py", "exec"), names)
    return names["mistaken"]


@pytest.mark.parametrize(
    ("does", "fault"),
    [
        (mistaken(), "a bug: KeyError"),
        (lambda logits: logits.mul_(2), "the argument logits is changed"),
        (lambda logits: logits * torch.nan, "a result is NaN"),
        (lambda logits: random.random(), "Python's generator is changed"),
    ],
)
def test_the_net_catches(does, fault, monkeypatch):
    monkeypatch.setitem(recipes.OWN, "metrics.made_up", {})
    found = faults("metrics.made_up", does, {})
    assert any(fault in each for each in found), found


X, LABELS = torch.linspace(-1, 1, 48).reshape(6, 8), torch.arange(6) % 4
LOGITS, META = torch.linspace(-1, 1, 72).reshape(3, 6, 4), X.to("meta")


def net():
    return models.mlp(8, (6,), 4)


def fit(x=X, model=None, **changes):
    how = {"epochs": 1, "lr": 0.1, "progress": False} | changes
    training.fit(model or ensembles.deep(net, 2), x, LABELS, **how)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: training.device("nope"), ValueError, 'device must be "auto".*nope'),
        (lambda: fit(META), TypeError, "inputs must hold its"),
        (lambda: training.predict(net(), META), TypeError, "inputs must hold its"),
        (lambda: metrics.nll(LOGITS.to("meta"), LABELS), TypeError, "logits must hold"),
        (lambda: fit(seed=1.5), TypeError, "seed must be an integer"),
        (lambda: metrics.ece(LOGITS, LABELS, bins=math.nan), TypeError, "bins must be"),
        (lambda: fit(max_grad_norm=math.nan), ValueError, "max_grad_norm must be in"),
        (lambda: fit(lr=math.nan), ValueError, r"lr must be in \(0, inf\), got nan"),
    ],
)
def test_what_is_no_value_is_named(call, error, words, unchecked):
    with pytest.raises(error, match=words):
        call()
