"""Every public name under bad arguments: it works or refuses in words, and changes nothing that it should not."""

import inspect
import pkgutil
import random

import pytest
import recipes
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from net import BAD, faults, foreign, spoiled

import uqlab
from uqlab import heads, uncertainty
from uqlab.core import door

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


def test_every_function_stands_behind_the_door():
    rooms = {name.partition(".")[0] for name in PUBLIC}
    assert rooms == {module.name for module in pkgutil.iter_modules(uqlab.__path__)} - {
        "core"
    }
    functions = [
        name
        for name in PUBLIC
        if inspect.isfunction(PUBLIC[name]) and not name.startswith("runs.")
    ]
    assert [
        name for name in functions if not hasattr(PUBLIC[name], "readers")
    ] == []  # runs start without torch


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
        ("ensembles.save", {"path": ""}),
    ],
)
def test_what_the_soak_has_found(name, change):
    assert faults(name, PUBLIC[name], change) == []


# The net can fail -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("does", "fault"),
    [
        (lambda logits: logits.shape[9], "foreign type|foreign message"),
        (lambda logits: torch.ones(2) @ torch.ones(3), "foreign type: RuntimeError"),
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


@pytest.mark.parametrize("check", ["finite", "door"])
def test_a_check_that_is_taken_away_is_missed(check, monkeypatch, unchecked):
    """Without its check of infinite logits, or without the door, a function falls into the net."""
    logits = recipes.draw(3, 6, 4)
    if check == "finite":
        monkeypatch.setattr(uncertainty, "check_logits", lambda logits: None)
        monkeypatch.setattr(uncertainty, "representable", lambda name, result: None)
        assert (
            faults(
                "uncertainty.decompose",
                uncertainty.decompose,
                {"logits": logits * torch.nan},
            )
            != []
        )
    else:
        given = {"id_features": recipes.draw(6, 2, 3).tolist()}
        assert faults("heads.separation", heads.separation.__wrapped__, given) != []
        assert faults("heads.separation", heads.separation, given) == []


def test_an_error_that_says_nothing_is_foreign():
    def error(kind, text):
        try:
            raise kind(text)
        except kind as raised:
            return foreign(raised)

    assert (
        "foreign message" in error(ValueError, "math domain error")[0]
    )  # not raised by the package
    assert "foreign type" in error(KeyError, "a")[0]
    assert door.shown("a" * 99).endswith("...'")
