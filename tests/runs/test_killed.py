"""What processes that were killed leave beside a result the next run puts right or removes, and nothing else."""

import json
import os

import pytest
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)

from uqlab.runs import execution, sweeps


def result(folder, value, whole=True):
    folder.mkdir(parents=True)
    (folder / "value").write_text(value)
    if whole:
        (folder / "manifest.json").write_text(json.dumps({"files": {}}))


@pytest.mark.parametrize(
    ("new", "value"), [("whole", "new"), ("half-done", "old"), ("none", "old")]
)
def test_a_kill_between_the_two_renames(tmp_path, new, value):
    """Both results are hidden then: the new one takes its place if it is whole, else the old one comes back."""
    result(tmp_path / ".03.old", "old")
    result(tmp_path / ".03_other.old", "another's")
    if new != "none":
        result(tmp_path / ".03.tmp", "new", whole=new == "whole")
    execution.tidy(tmp_path / "03")
    assert (tmp_path / "03" / "value").read_text() == value
    assert {path.name for path in tmp_path.iterdir()} == {"03", ".03_other.old"}


def test_a_result_that_stands_is_never_replaced(tmp_path):
    result(tmp_path / "03", "stands")
    result(tmp_path / ".03.old", "old")
    result(tmp_path / ".03.tmp", "new")
    execution.tidy(tmp_path / "03")
    assert (tmp_path / "03" / "value").read_text() == "stands"
    assert {path.name for path in tmp_path.iterdir()} == {"03"}


def test_a_sweep_restores_what_a_kill_has_hidden(project, computed):
    report = sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    hidden = report.outcomes[0].folder
    hidden.rename(hidden.with_name(f".{hidden.name}.old"))
    (hidden.with_name(f".{hidden.name}.tmp")).mkdir()
    (hidden.with_name(f".{hidden.name}.lock")).touch()
    again = sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    assert [outcome.status for outcome in again.outcomes] == ["done before"] * 2
    assert {path.name for path in report.folder.iterdir()} == {
        outcome.folder.name for outcome in report.outcomes
    }


def test_a_lock_that_its_holder_removed_is_taken_anew(tmp_path):
    path = tmp_path / "run"
    with (
        execution.locked(path),
        pytest.raises(execution.Busy),
        execution.locked(path),
    ):
        pass
    with execution.locked(path):
        assert os.listdir(tmp_path) == [".run.lock"]
    assert os.listdir(tmp_path) == []
