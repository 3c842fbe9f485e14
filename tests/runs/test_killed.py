"""What processes that were killed leave beside a result the next run puts right or removes, and nothing else."""

import json
import os
import subprocess
import sys
from threading import Event

import pytest
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)

from uqlab.core.files import read_json
from uqlab.runs import execution, kernels, sweeps


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
    result(tmp_path / ".03.old-1", "old")
    result(tmp_path / ".03_other.old-1", "another's")
    if new != "none":
        result(tmp_path / ".03.tmp-2", "new", whole=new == "whole")
    execution.restore(tmp_path / "03")
    execution.clear(tmp_path / "03")
    assert (tmp_path / "03" / "value").read_text() == value
    assert {path.name for path in tmp_path.iterdir()} == {"03", ".03_other.old-1"}


def test_a_result_that_stands_is_never_replaced(tmp_path):
    result(tmp_path / "03", "stands")
    result(tmp_path / ".03.old-1", "old")
    result(tmp_path / ".03.tmp-1", "new")
    execution.restore(tmp_path / "03")
    assert (tmp_path / "03" / "value").read_text() == "stands"
    assert {path.name for path in tmp_path.iterdir()} == {"03", ".03.tmp-1"}


def test_half_done_folders_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    for name in (".03.tmp-dead", ".03.tmp-living"):
        result(tmp_path / name, "half", whole=False)
    hold = "import sys; from uqlab.runs import execution; from pathlib import Path; execution._hold(Path(sys.argv[1]))"
    wait = f"{hold}; print(flush=True); input()"
    command = [sys.executable, "-c", wait, str(tmp_path / ".03.tmp-living")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline()
        execution.clear(tmp_path / "03")
        assert [path.name for path in tmp_path.iterdir()] == [".03.tmp-living"]
        process.kill()
        process.wait()
    execution.clear(tmp_path / "03")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_restores_what_a_kill_has_hidden(project, computed):
    report = sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    hidden = report.outcomes[0].folder
    hidden.rename(hidden.with_name(f".{hidden.name}.old-1"))
    (hidden.with_name(f".{hidden.name}.tmp-1")).mkdir()
    (hidden.with_name(f".{hidden.name}.lock")).touch()
    again = sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    assert [outcome.status for outcome in again.outcomes] == ["done before"] * 2
    assert {path.name for path in report.folder.iterdir()} == {
        outcome.folder.name for outcome in report.outcomes
    }


def test_a_lock_that_its_holder_removed_is_taken_anew(tmp_path):
    path = tmp_path / "run"
    with (
        sweeps._claimed(path, wait=False),
        pytest.raises(sweeps.Busy),
        sweeps._claimed(path, wait=False),
    ):
        pass
    with sweeps._claimed(path, wait=False):
        assert os.listdir(tmp_path) == [".run.lock"]
    assert os.listdir(tmp_path) == []


def test_a_kernel_s_connection_file_lies_in_the_folder_of_its_run(tmp_path):
    manager = kernels._kernel_manager(tmp_path, {}, 0.0, Event(), lambda: None)()
    assert manager.connection_file == str(tmp_path / ".kernel.json")


def test_a_manifest_says_its_own_checksum(project, computed):
    folder = sweeps.run_one("00")
    path = folder / "manifest.json"
    whole = path.read_bytes()
    assert sweeps.finished(folder)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        kept = read_json(path)  # white space may differ, and the name of the checksum
        assert not sweeps.finished(folder) or all(
            kept.get(n) == v for n, v in json.loads(whole).items() if n != "sha256"
        )
