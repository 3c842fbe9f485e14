"""Every public name under bad arguments: it works or refuses in words, and changes nothing that it should not."""

import inspect
import random

import pytest
import recipes
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from net import BAD, PACKAGE, faults, spoiled

from uqlab import uncertainty

PUBLIC = recipes.public()
CALLED = sorted(PUBLIC.keys() - recipes.NO_CALLS.keys())
SMALL = settings(
    max_examples=3,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_no_name_is_forgotten():
    """A new name needs a recipe, or a reason why it has none; those that are gone leave no trace."""
    assert not recipes.NO_CALLS.keys() - PUBLIC.keys()
    assert not recipes.OWN.keys() - PUBLIC.keys()
    for name in CALLED:
        recipes.valid(name, PUBLIC[name])


@pytest.mark.parametrize("name", CALLED)
def test_bad_arguments(name, unchecked):
    thing = PUBLIC[name]
    parameters = list(inspect.signature(thing).parameters)
    proper = recipes.valid(name, thing)
    assert faults(name, thing, {}) == []

    @SMALL
    @given(st.data())
    def call(data):
        parameter = data.draw(st.sampled_from(parameters))
        pool = [*BAD, *spoiled(proper.get(parameter))]
        given = {parameter: pool[data.draw(st.integers(0, len(pool) - 1))]}
        assert faults(name, thing, given) == [], given

    if parameters:
        call()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "scores.logits",
            {
                "model": recipes.network().half(),
                "inputs": 1e30 * recipes.draw(6, 8).double(),
            },
        ),
        ("ensembles.from_pretrained", {"folder": ""}),
    ],
)
def test_what_the_soak_has_found(name, change):
    assert faults(name, PUBLIC[name], change) == []


def mistaken():
    """A function of the package that looks up a key that is not there."""
    names = {}
    source = "def mistaken(logits):\n    return {}['key']"
    exec(compile(source, f"{PACKAGE}/made_up.py", "exec"), names)
    return names["mistaken"]


# The net can fail -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("does", "fault"),
    [
        (mistaken(), "a bug: KeyError"),
        (lambda logits: logits.mul_(2), "the argument logits is changed"),
        (lambda logits: logits * torch.nan, "a result is NaN"),
        (lambda logits: torch.rand(1), "torch's generator is changed"),
        (lambda logits: random.random(), "Python's generator is changed"),
        (lambda logits: (torch.set_grad_enabled(False), 1)[1], "grad is changed"),
    ],
)
def test_the_net_catches(does, fault, monkeypatch):
    monkeypatch.setitem(recipes.OWN, "metrics.made_up", {})
    try:
        found = faults("metrics.made_up", does, {})
    finally:
        torch.set_grad_enabled(True)
    assert any(part in each for each in found for part in fault.split("|")), found


def test_a_check_that_is_taken_away_is_missed(monkeypatch, unchecked):
    """Without its check of infinite logits a function falls into the net."""
    monkeypatch.setattr(uncertainty, "as_logits", lambda logits: logits)
    monkeypatch.setattr(uncertainty, "representable", lambda name, result: None)
    given = {"logits": recipes.draw(3, 6, 4) * torch.nan}
    assert faults("uncertainty.decompose", uncertainty.decompose, given) != []
