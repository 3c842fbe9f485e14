"""Sweeps: what a grid means, what is computed and what is skipped.

Most runs here are written by a stand-in for papermill's part, so that hundreds take no time; one sweep is real.
"""

import json
import re
import threading
from concurrent import futures

import pytest
from nbformat.v4 import new_output
from small_runs import call, notebook
from small_sweeps import PARAMETERS, checkout, stand_in  # noqa: F401  (fixtures)

from uqlab import runs
from uqlab.runs import execution
from uqlab.runs.manifest import Manifest


def statuses(report: execution.Report) -> list[str]:
    return [outcome.status for outcome in report.outcomes]


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("seed", "0:3", [0, 1, 2]),
        ("seed", "0:6:2", [0, 2, 4]),
        ("seed", "3:0:-1", [3, 2, 1]),
        ("seed", "5,010", [5, 10]),
        ("width", "1, 1e-3", [1.0, 0.001]),
        ("sizes", "[1e-3, a],[no]", [[1e-3, "a"], ["no"]]),
        ("name", "0:3", ["0:3"]),
        ("name", "digits[0,6],mnist", ["digits[0,6]", "mnist"]),
        ("sizes", "[1, 2],[3]", [[1, 2], [3]]),
        ("sizes", """["a,b"],[{x: [1, 2]}]""", [["a,b"], [{"x": [1, 2]}]]),
    ],
)
def test_the_text_of_a_grid_means_a_list(project, name, text, values):
    planned = runs.sweep("00", {name: text}, dry_run=True).outcomes
    assert [job.parameters[name] for job in planned] == values
    assert {job.status for job in planned} == {"would run"}


@pytest.mark.parametrize("text", ["", "5:5", "0:3:-1", "[1", "1:30,5"])
def test_a_grid_that_is_no_list_of_the_parameter_s_type_is_refused(project, text):
    with pytest.raises(ValueError, match=r"give 0:5|of type int, as 0, got '1:30'"):
        runs.sweep("00", {"seed": text}, dry_run=True)
    with pytest.raises(ValueError, match=r'cannot be read; .* \["a"\],\["b"\]'):
        runs.sweep("00", {"sizes": "[digits[0-3]],[letters]"}, dry_run=True)


def test_the_grid_is_a_product_of_checked_values(project, computed):
    grid = {"seed": "0:2", "width": [1, "2"], "sizes": "[3],[1, 2]"}
    report = runs.sweep("00", grid, {"name": "x"}, progress=False)
    points = [
        {"seed": seed, "width": width, "sizes": sizes}
        for seed in (0, 1)
        for width in (1.0, 2.0)
        for sizes in ([3], [1, 2])
    ]
    assert [outcome.varied for outcome in report.outcomes] == points
    wanted = [{"name": "x"} | point for point in points]
    assert computed == wanted
    one = runs.sweep("00", {"seed": [7, 7]}, progress=False)
    assert statuses(one) == ["ok"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-g", "sead", "0:2"], "unknown parameter 'sead'; 00_some has: seed"),
        (
            ["-g", "seed", "0,one"],
            "00_some: parameter seed must be of type int, as 0, got 'one'",
        ),
        (["-g", "seed", "0:2", "-g", "seed", "5"], "each NAME once"),
        (["-g", "seed", "0:2", "-p", "seed", "1"], "in the grid and given as one"),
        (["-g", "output_dir", "a,b"], "use --output-dir"),
        (["--resources", "GPU"], "could not convert"),
        (["--jobs", "0"], "0 is not in the range"),
    ],
)
def test_bad_input_is_an_error_before_anything_runs(
    project, computed, arguments, message
):
    result = call("sweep", "00", *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.output), result.output
    assert computed == []
    assert not (project / "figures").exists()


def test_a_dry_sweep_says_what_is_kept_and_computes_nothing(project, computed):
    assert call("sweep", "00", "-g", "seed", "0:2").exit_code == 0
    computed.clear()
    said = call("sweep", "00", "-g", "seed", "0:4", "--dry-run").output
    for seed in range(4):
        status = "done before" if seed < 2 else "would run"
        assert f"seed={seed}  {status} " in said
    assert said.endswith("would run 2 of 4, 2 done before\n")
    assert computed == []


# Computed once -------------------------------------------------------------------------


def test_finished_runs_are_skipped_and_the_rest_computed(project, computed):
    first = runs.sweep("00", {"seed": "0:3"}, progress=False)
    again = runs.sweep("00", {"seed": "0:4"}, progress=False)
    assert statuses(first) == ["ok"] * 3
    assert statuses(again) == ["done before"] * 3 + ["ok"]
    assert runs.run_one("00", {"seed": 3}) == again.outcomes[3].folder
    assert len(computed) == 4
    assert again.folder == project / "figures" / "quick" / "00_some.sweep"
    found = {path.parent for path in again.folder.glob("*/manifest.json")}
    assert found == {outcome.folder for outcome in again.outcomes}


def test_a_run_s_folder_depends_on_source_and_parameters_alone(project, computed):
    path = project / "notebooks" / "00_some.ipynb"
    first = runs.run_one(path)
    same = {"seed": "0", "width": 1, "name": "digits"}  # the defaults
    assert runs.run_one("00", same) == first
    text = json.loads(path.read_text())
    outputs = [new_output("stream", text="2")]  # run in JupyterLab
    text["cells"][-1] |= {"outputs": outputs, "execution_count": 7}
    path.write_text(json.dumps(text))
    assert runs.run_one("00") == first
    assert len(computed) == 1
    others = [runs.run_one("00", {"seed": 1}), runs.run_one("00", profile="tiny")]
    notebook(path, "1 + 2", parameters=PARAMETERS)
    assert len({first, runs.run_one("00"), *others}) == 4


@pytest.mark.parametrize("name", ["manifest.json", "results.json", "00_some.ipynb"])
@pytest.mark.parametrize("damage", ["missing", "half", "flipped", "other"])
def test_a_damaged_run_is_computed_anew_and_the_others_kept(
    project, computed, name, damage, capsys
):
    report = runs.sweep("00", {"seed": "0:3"}, progress=False)
    path = report.outcomes[1].folder / name
    data = path.read_bytes()
    at = data.index(b'"results.json"' if name == "manifest.json" else b"1") + 1
    contents = {
        "half": data[: len(data) // 2],
        "flipped": data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
        "other": b'{"files": 3, "parameters": []}',
    }
    path.write_bytes(contents[damage]) if damage in contents else path.unlink()
    assert not Manifest.read(report.outcomes[1].folder).undamaged(
        report.outcomes[1].folder
    )
    assert list(runs.load(report.folder).seed) == [0, 2]
    assert " left out: unfinished or damaged" in capsys.readouterr().err
    again = runs.sweep("00", {"seed": "0:3"}, progress=False)
    assert statuses(again) == ["done before", "ok", "done before"]
    assert all(Manifest.read(o.folder).undamaged(o.folder) for o in again.outcomes)
    assert len(computed) == 4


def test_sweeps_of_one_grid_at_once_compute_every_run_once(project, computed):
    reports = []

    def sweep():
        reports.append(runs.sweep("00", {"seed": "0:40"}, jobs=4, progress=False))

    threads = [threading.Thread(target=sweep) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given["seed"] for given in computed) == list(range(40))
    assert [report.failed for report in reports] == [[], [], []]


@pytest.mark.parametrize(
    ("lost", "reason"), [("killed", "RuntimeError: killed"), ("cancelled", "Cancelled")]
)
def test_a_run_that_is_lost_with_its_worker_fails_by_name(
    project, computed, monkeypatch, lost, reason
):
    """As Dask loses it with a worker, or all of them with the scheduler."""

    class Dying(futures.ThreadPoolExecutor):
        def submit(self, work, job):
            if job.parameters["seed"] != 2:
                return super().submit(work, job)
            future = futures.Future()
            if lost == "cancelled":
                future.cancel()
                future.set_running_or_notify_cancel()
            else:
                future.set_exception(RuntimeError("killed"))
            return future

    monkeypatch.setattr(futures, "ThreadPoolExecutor", Dying)
    report = runs.sweep("00", {"seed": "0:4"}, progress=False)
    assert statuses(report) == ["ok", "ok", "failed", "ok"]
    assert report.failed[0].reason.startswith(reason)


def test_a_notebook_that_changes_meanwhile_is_not_mixed_in(
    project, computed, monkeypatch
):
    written = execution.run_notebook

    def change(job, *arguments):
        written(job, *arguments)
        notebook(job.notebook, f"{len(computed)}", parameters=PARAMETERS)

    monkeypatch.setattr(execution, "run_notebook", change)
    report = runs.sweep("00", {"seed": "0:2"}, progress=False)
    assert statuses(report) == ["ok", "failed"]
    assert "changed while the sweep ran" in report.failed[0].reason


def test_results_go_into_the_home_folder(project, computed, monkeypatch):
    monkeypatch.setenv("HOME", str(project / "home"))
    (folder,) = (o.folder for o in runs.sweep("00", {}, root="~/a").outcomes)
    assert folder.parents[2] == project / "home" / "a"
    assert len(runs.load("00", root="~/a")) == len(runs.load(str(folder.parent))) == 1
    assert runs.execute("00", folder="~/one") == project / "home" / "one"
    assert not (project / "~").exists()


def test_an_unwritable_folder_fails_by_name_run_by_run(project, computed):
    sweep = project / "figures" / "quick" / "00_some.sweep"
    sweep.parent.mkdir(parents=True)
    sweep.write_text("a file where the folder should be")
    report = runs.sweep("00", {"seed": "0:2"}, progress=False)
    assert statuses(report) == ["failed"] * 2
    assert re.search("FileExists|NotADirectory", report.failed[0].reason)


def test_sweep_command(project, monkeypatch):
    """Two real runs at a time of a notebook outside the notebooks folder, one of which fails until a file is there."""
    source = """from pathlib import Path
from uqlab import runs
runs.begin(output_dir, "x")
runs.record("square", seed**2)
with open("starts", "a") as file:
    print(seed, file=file)
assert seed < 2 or Path("mended").exists(), "two\\nlines\""""
    outside = project.parent / f"{project.name} outside" / "x.ipynb"
    path = notebook(outside, source, parameters=PARAMETERS)
    arguments = ["sweep", path, "-g", "seed", "0:3", "--jobs", 2]
    result = call(*arguments)
    assert result.exit_code == 1
    assert "0 of 3 runs done before" in result.output
    assert re.search(r"^seed=\d  ok  [\d.]+ s$", result.output, re.MULTILINE)
    failed = r"seed=2  failed  x failed: In \[\d\] AssertionError: two lines; kept: "
    assert len(re.findall(failed, result.output)) == 2
    assert "2 runs, " in result.output
    (outside.parent / "mended").touch()
    again = call(*arguments)
    assert again.exit_code == 0, again.output
    assert "2 of 3 runs done before" in again.output
    assert list(runs.load(path).square) == [0, 1, 4]
    counts = (outside.parent / "starts").read_text().split()
    assert sorted(counts) == ["0", "1", "2", "2"]
