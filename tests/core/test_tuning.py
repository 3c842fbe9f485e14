"""Choices by measurement: every way against every other, what is remembered, and when nothing is timed."""

import json
import threading
import time

import pytest
import torch
from small_networks import images, moved, vit
from torch import nn

from uqlab import gradients, heads
from uqlab.core import tuning


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Timing is on, nothing is known, and the file is this test's own."""
    monkeypatch.setenv("UQLAB_TUNE", "1")
    monkeypatch.setattr(tuning, "_FOUND", {})
    monkeypatch.setattr(tuning, "choices", lambda: tmp_path / "choices.json")
    return tmp_path / "choices.json"


X = torch.zeros(2, 3)


def slow(seconds):
    return lambda: time.sleep(seconds)


def chosen(rule="slow", shape=(1,), like=X, **more):
    ways = {"slow": slow(0.004), "fast": slow(0.0005)}
    with torch.no_grad():
        return tuning.choose("sleep", shape, like, ways | more, rule)


# The choice -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["slow", "fast"])
def test_the_fastest_way_is_chosen(rule):
    assert chosen(rule) == "fast"


def test_a_small_gain_leaves_the_rule():
    with torch.no_grad():
        ways = {"first": slow(0.004), "second": slow(0.00395)}
        assert [tuning.choose("sleep", rule, X, ways, rule) for rule in ways] == list(
            ways
        )


def test_times_are_compared_for_equal_work():
    ways = {"one": slow(0.002), "four": slow(0.004)}
    with torch.no_grad():
        assert (
            tuning.choose("sleep", 1, X, ways, "one", {"one": 1, "four": 4}) == "four"
        )
        assert tuning.choose("sleep", 2, X, ways, "four") == "one"


def test_it_is_remembered_by_the_process_and_in_the_file(fresh, monkeypatch):
    calls = []
    count = lambda: calls.append(0)  # noqa: E731
    assert chosen() == chosen(count=count) == "fast"
    assert not calls
    monkeypatch.setattr(tuning, "_FOUND", {})  # another process
    assert chosen(count=count) == "fast"
    assert not calls
    [(line, way)] = json.loads(fresh.read_text()).items()
    assert way == "fast"
    assert line.startswith("sleep (1,) torch.float32 on cpu, ")
    chosen(like=X.double())
    chosen(shape=(2,))
    assert len(json.loads(fresh.read_text())) == 3


@pytest.mark.parametrize("content", ["{", "[]", '{"sleep": 3}', ""])
def test_a_broken_file_counts_as_empty(fresh, content):
    fresh.write_text(content)
    assert chosen() == "fast"
    assert "fast" in json.loads(fresh.read_text()).values()


def test_a_way_that_is_gone_is_timed_anew(fresh):
    chosen()
    fresh.write_text(fresh.read_text().replace('"fast"', '"older"'))
    tuning._FOUND.clear()
    assert chosen() == "fast"


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tuning, "choices", lambda: tmp_path / "file" / "choices.json")
    assert chosen() == "fast"


def test_when_nothing_is_timed(monkeypatch):
    ways = {"slow": pytest.fail, "fast": pytest.fail}  # neither is called
    assert tuning.choose("sleep", 1, X, ways, "slow") == "slow"  # with gradients
    with torch.no_grad():
        assert tuning.choose("sleep", 1, X, {"slow": pytest.fail}, "slow") == "slow"
        found = torch.func.vmap(
            lambda row: row + len(tuning.choose("sleep", 1, row, ways, "slow"))
        )(X)
        assert (found == 4).all()
        monkeypatch.setenv("UQLAB_TUNE", "0")
        assert tuning.choose("sleep", 1, X, ways, "slow") == "slow"


def test_a_second_thread_takes_the_rule():
    inside, found = threading.Event(), []

    def other():
        inside.wait()
        found.append(chosen("slow", (2,)))

    thread = threading.Thread(target=other)
    thread.start()

    def busy():
        inside.set()
        thread.join()

    with torch.no_grad():
        tuning.choose("sleep", 1, X, {"slow": busy, "fast": slow(0)}, "slow")
    assert found == ["slow"]


# The ways -------------------------------------------------------------------------------------------------------------
def pruned():
    """Members with other numbers of heads in a layer."""
    return [
        heads.prune(vit(), pairs) for pairs in ([(0, 0)], [(0, 1), (1, 0)], [(1, 1)])
    ]


MADE = {
    "fused": lambda: heads.fuse(pruned()),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("batch", [1, 70])
def test_every_way_gives_the_same(name, batch, monkeypatch):
    """Each way forced, in every layer and in the passes, against the rules of thumb."""
    ensemble, x, seen = moved(MADE[name]()).eval(), images(batch)[0], {}
    with torch.no_grad():
        monkeypatch.setenv("UQLAB_TUNE", "0")
        expected = ensemble(x)
        monkeypatch.setenv("UQLAB_TUNE", "1")
        for turn in range(6):

            def forced(kind, shape, like, ways, rule, work=None, turn=turn):
                of_passes = kind.startswith(
                    ("members", "parts")
                )  # changes first, the layers' own ways after it
                name = list(ways)[(turn if of_passes else turn // 3) % len(ways)]
                seen.setdefault(kind.partition(" of ")[0], set()).add(name)
                return name

            monkeypatch.setattr(tuning, "choose", forced)
            ensemble.__dict__.get("_parts", {}).clear()
            torch.testing.assert_close(ensemble(x), expected, rtol=1e-5, atol=1e-5)
    assert seen
    assert batch == 1 or all(len(ways) > 1 for ways in seen.values())


@pytest.mark.parametrize("name", MADE)
def test_a_choice_leaves_no_trace(name):
    """The first call measures; it and the next ones give what the rules give, and modes stay."""
    ensemble, x = moved(MADE[name]()).eval(), images(5)[0]
    noise = torch.get_rng_state()
    with torch.no_grad():
        first = ensemble(x)
        torch.testing.assert_close(ensemble(x), first, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), noise)
    assert not any(part.training for part in ensemble.modules())
    assert tuning._FOUND


def small_map():
    """Convolutions of which unfolding pays, or not, and linear layers on tokens."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 16, 3, stride=2)
    return nn.Sequential(
        first,
        nn.ReLU(),
        second,
        nn.Flatten(2),
        nn.Linear(9, 30),
        nn.Flatten(),
        nn.Linear(480, 3),
    )


@pytest.mark.parametrize("make", [vit, small_map])
@pytest.mark.parametrize("classes", ["all", "one"])
def test_every_way_gives_the_same_gradient_norms(make, classes, monkeypatch):
    model, (x, _), seen = make().eval(), images(4), {}

    def norms():
        if classes == "all":
            return gradients.gradient_norms(model, x)[0]
        return gradients.regrad(model, x, class_weight="predicted", perturbations=2)

    monkeypatch.setenv("UQLAB_TUNE", "0")
    expected = norms()
    monkeypatch.setenv("UQLAB_TUNE", "1")
    for turn in range(2):

        def forced(kind, shape, like, ways, rule, work=None, turn=turn):
            seen.setdefault(kind, set()).add(name := list(ways)[turn % len(ways)])
            return name

        monkeypatch.setattr(tuning, "choose", forced)
        torch.testing.assert_close(norms(), expected, rtol=1e-4, atol=1e-6)
    assert seen
    assert all(len(ways) > 1 for ways in seen.values())
