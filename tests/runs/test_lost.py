"""Runs replace nothing but results, wherever these lie."""

import os
import shutil
import subprocess
import sys

import pytest
from small_runs import call
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)

from uqlab import runs
from uqlab.runs import caching, manifest


@pytest.mark.parametrize("link", ["figures", "figures/tiny", "figures/tiny/00_some"])
def test_a_result_folder_behind_a_link_is_replaced_where_it_lies(
    project, computed, link
):
    scratch = project / "scratch disk"
    (project / link).parent.mkdir(parents=True, exist_ok=True)
    scratch.mkdir()
    (project / link).symlink_to(scratch)
    for seed in range(3):
        result = call("run", "00", "--profile", "tiny", "-p", "seed", seed)
        assert result.exit_code == 0, result.output
        assert (project / link).readlink() == scratch
    folder = project / "figures/tiny/00_some"
    assert manifest.Manifest.read(folder).parameters["seed"] == 2
    assert manifest.finished(folder)
    assert [p for p in project.rglob(".*") if "00_some" in p.name] == []


def test_a_sweep_behind_a_link_goes_on(project, computed):
    (project / "scratch").mkdir()
    (project / "figures/tiny").mkdir(parents=True)
    (project / "figures/tiny/00_some.sweep").symlink_to(project / "scratch")
    for _ in range(2):
        command = ("sweep", "00", "-g", "seed", "0:2", "--profile", "tiny")
        result = call(*command, "--quiet")
        assert result.exit_code == 0, result.output
    assert len(computed) == 2
    shutil.rmtree(project / "scratch")  # as a cluster does after 30 days
    assert call(*command, "--quiet").exit_code == 0
    assert len(computed) == 4


def test_what_no_run_has_written_is_not_replaced(project, computed):
    (project / "mine").mkdir()
    (project / "mine" / "thesis.tex").write_text("years")
    for place in ("mine", "mine/thesis.tex"):
        with pytest.raises(ValueError, match="what no run has written"):
            runs.execute("00", folder=place)
    assert (project / "mine" / "thesis.tex").read_text() == "years"


def test_notes_beside_a_result_stay_when_it_is_replaced(project, computed):
    folder = runs.execute("00", {"seed": 1})
    (folder / "notes").mkdir()
    (folder / "notes" / "why.md").write_text("because")
    runs.execute("00", {"seed": 2})
    assert (folder / "notes" / "why.md").read_text() == "because"
    assert manifest.Manifest.read(folder).parameters["seed"] == 2


def test_room_for_trainings_is_not_made_of_weights_of_yours(tmp_path, monkeypatch):
    monkeypatch.setenv("UQLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(caching, "ROOM", 0)
    (tmp_path / "best.safetensors").write_bytes(b"weights")
    runs.cached("some", dict)
    assert [path.name for path in tmp_path.iterdir()] == ["best.safetensors"]


FULL = """
import resource, signal
import torch
from torch import nn
from uqlab import ensembles, runs, training
x, y = torch.randn(9, 600), torch.arange(9) % 3
def fit(epochs):
    ensemble = ensembles.deep(lambda: nn.Linear(600, 3), 2)
    training.fit(
        ensemble, x, y, epochs=epochs, lr=0.1, progress=False, resume="run"
    )
fit(1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
assert "some" in runs.cached("a", lambda: {"some": torch.zeros(9999)})
try:
    fit(2)
except OSError as error:
    assert "make room" in str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    fit(3)
    print("went on")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no limit of files")
def test_a_full_disk_costs_no_training(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL],
        cwd=tmp_path,
        env=os.environ | {"UQLAB_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "went on\n", done.stderr


def test_a_notebook_with_a_byte_order_mark_says_what_to_do(project):
    page = project / "notebooks/00_some.ipynb"
    page.write_bytes(b"\xef\xbb\xbf" + page.read_bytes())
    result = call("run", page)
    assert result.exit_code == 2
    assert "byte-order mark" in result.output
