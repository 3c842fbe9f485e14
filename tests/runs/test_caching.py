"""What was computed before is read bit for bit, and only where nothing changed."""

import pytest
import torch

from uqlab import runs
from uqlab.runs import manifest

W = {"w": torch.arange(6.0).view(2, 3), "steps": torch.tensor(7)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("UQLAB_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def make():
    def make():
        make.calls += 1
        return W

    make.calls = 0
    return make


def test_the_second_of_two_equal_calls_is_read(folder, make):
    for _ in range(2):
        tensors = runs.cached("w", make, torch.ones(3), {"lr": 0.1})
        assert all(torch.equal(tensors[name], W[name]) for name in W)
    assert make.calls == len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "depends_on", "commit"),
    [
        ("v", [torch.ones(3), 0.1], "a"),
        ("w", [torch.zeros(3), 0.1], "a"),
        ("w", [], "a"),
        ("w", [torch.ones(3), 0.1], "b"),
    ],
)
def test_whatever_is_changed_is_made_anew(
    folder, make, monkeypatch, name, depends_on, commit
):
    monkeypatch.setattr(manifest, "commit", lambda: "a")
    runs.cached("w", make, torch.ones(3), 0.1)
    monkeypatch.setattr(manifest, "commit", lambda: commit)
    runs.cached(name, make, *depends_on)
    assert make.calls == 2


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b[:-9] + bytes(9), lambda b: b""]
)
def test_a_damaged_file_is_made_anew(folder, make, damage):
    runs.cached("w", make)
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert torch.equal(runs.cached("w", make)["w"], W["w"])
    runs.cached("w", make)
    assert make.calls == 2


def test_nothing_is_kept_unless_asked(tmp_path, make, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UQLAB_CACHE", "")
    runs.cached("w", make)
    runs.cached("w", make)
    assert make.calls == 2
    assert not list(tmp_path.iterdir())
