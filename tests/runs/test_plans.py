"""What would run, what is reused, and how long it took before."""

import re

import pytest
from small_runs import call, notebook
from small_sweeps import again, checkout, stand_in  # noqa: F401  (fixtures)

from uqlab import runs
from uqlab.runs import execution, parameters
from uqlab.runs.manifest import Manifest


@pytest.fixture
def two(project):
    """A second page beside the first, whose own values are its profile, and a third that has no profile."""
    notebook(project / "notebooks" / "01_other.ipynb", "1 + 1")
    notebook(project / "notebooks" / "02_third.ipynb", "1 + 1")
    profiles = project / "notebooks" / "profiles.yaml"
    profiles.write_text("tiny: {00_some: {width: 0.5}, 01_other: {}}\n")
    return project


def took(folder, seconds):
    folder.mkdir(parents=True)
    Manifest(seconds=float(seconds)).save(folder)


def test_a_dry_run_says_what_would_run_and_how_long_it_took(two, monkeypatch, tmp_path):
    monkeypatch.setattr(execution, "execute_all", None)  # nothing may be executed
    monkeypatch.setenv("UQLAB_CACHE", str(tmp_path / "kept"))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_bytes(bytes(3_000_000))
    took(two / "figures" / "tiny" / "00_some", 70.2)
    said = call("run", "--profile", "tiny", "--dry-run", "--jobs", 1, "-p", "seed", 7)
    assert said.exit_code == 0, said.output
    assert re.search(
        r"^00_some +seed=7 width=0.5  last time 0:01:10$", said.output, re.MULTILINE
    )
    assert re.search(r"^01_other +seed=7$", said.output, re.MULTILINE)
    assert "would run 2 notebooks, 1 at a time, into figures/tiny\n" in said.output
    assert f"{tmp_path / 'kept'}: 1 files, 3 MB" in said.output
    assert (
        "every network is trained anew" in call("run", "--dry-run", "--no-cache").output
    )
    assert call("run", "--dry-run", "-p", "sead", 1).exit_code == 2
    assert [path.name for path in two.glob("figures/*/*/*")] == ["manifest.json"]


def test_a_profile_that_a_page_does_not_have_is_refused(two, monkeypatch):
    """By name and from Python; without a name the pages that have it run."""
    monkeypatch.setattr(execution, "run_all", None)  # nothing may be executed
    for command in (["run", "02"], ["sweep", "02", "-g", "seed", "0:2"]):
        said = call(*command, "--profile", "tiny")
        assert said.exit_code == 2
        assert "only 00_some, 01_other has it: uqlab run 00_some" in said.output
    for ask in (
        lambda: runs.execute("02", profile="tiny"),
        lambda: runs.run_one("02", profile="tiny"),
        lambda: runs.sweep("02", {"seed": [0]}, profile="tiny"),
    ):
        with pytest.raises(ValueError, match="02_third has no profile 'tiny'"):
            ask()
    assert call("run", "02", "--dry-run").exit_code == 0
    lessons = {"03": "studies/03", "06": "studies/06"}
    for lesson, study in lessons.items():
        with pytest.raises(ValueError, match=f"only {study} has it: uqlab run {study}"):
            parameters.of_profile(parameters.PAGES / f"{lesson}.ipynb", "paper")


def test_a_dry_sweep_says_what_is_kept_and_computes_nothing(project, computed):
    assert call("sweep", "00", "-g", "seed", "0:2").exit_code == 0
    for folder in project.glob("figures/quick/00_some.sweep/*/"):
        again(folder, seconds=1.5)
    computed.clear()
    said = call("sweep", "00", "-g", "seed", "0:5", "--jobs", 2, "--dry-run")
    assert said.exit_code == 0, said.output
    assert [
        line
        for line in said.output.splitlines()
        if line.startswith("done before, kept: ")
    ] == [f"done before, kept: seed={seed}  last time 0:00:02" for seed in (0, 1)]
    assert [
        line for line in said.output.splitlines() if line.startswith("would run: ")
    ] == [f"would run: seed={seed}" for seed in (2, 3, 4)]
    assert "00_some: 5 runs, 2 done before, would run 3, 2 at a time\n" in said.output
    for folder in project.glob("figures/quick/00_some.sweep/*/"):
        again(folder, commit="def")
    stale = call("sweep", "00", "-g", "seed", "0:2", "--dry-run").output
    assert "would run: seed=0  last time 0:00:02  stale: of uqlab " in stale
    assert "would run 2" in stale
    assert (
        "would run 0"
        in call("sweep", "00", "-g", "seed", "0:2", "--dry-run", "--keep-stale").output
    )
    assert computed == []
