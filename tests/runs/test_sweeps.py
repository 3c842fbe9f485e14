"""Sweeps: what a grid means, what is computed and what is skipped.

Most runs here are written by a stand-in for papermill's part, so that hundreds take no time; one sweep is real.
"""

import json
import multiprocessing
import re
import threading
import time
from concurrent import futures
from contextlib import nullcontext

import joblib
import pandas as pd
import pytest
from nbformat.v4 import new_output
from small_runs import call, notebook
from small_sweeps import PARAMETERS, checkout, stand_in  # noqa: F401  (fixtures)

import uqlab
from uqlab import runs
from uqlab.runs import execution, manifest, parameters, sweeps, tables


def statuses(report: sweeps.Report) -> list[str]:
    return [outcome.status for outcome in report.outcomes]


# --- The grid --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "default", "values"),
    [
        ("0:3", 0, [0, 1, 2]),
        ("0:6:2", 0, [0, 2, 4]),
        ("3:0:-1", 0, [3, 2, 1]),
        ("-1:1", 0.0, [-1, 0]),
        ("1,2, 4", 0, ["1", "2", "4"]),
        ("1e-3,1e-4", 0.1, ["1e-3", "1e-4"]),
        ("0:3", "digits", ["0:3"]),
        ("digits[0-6],mnist", "digits", ["digits[0-6]", "mnist"]),
        ("[1, 2],[3]", [1], ["[1, 2]", "[3]"]),
        ("""["a,b"],{x: [1, 2]}""", [1], ["""["a,b"]""", "{x: [1, 2]}"]),
        ("[1,[2,3]],[[4],5]", [1], ["[1,[2,3]]", "[[4],5]"]),
    ],
)
def test_axis(text, default, values):
    assert sweeps.axis(text, default) == values


@pytest.mark.parametrize("text", ["", "1,,2", "5:5", "0:3:-1", "1,"])
def test_an_empty_axis_is_refused(text):
    with pytest.raises(ValueError, match="empty range or item; give 0:5"):
        sweeps.axis(text, 0)


def test_the_grid_is_a_product_of_checked_values(project, computed):
    report = sweeps.sweep(
        "00",
        {"seed": "0:2", "width": [1, "2"], "sizes": "[3],[1, 2]"},
        {"name": "x"},
        progress=False,
    )
    assert [outcome.parameters for outcome in report.outcomes] == [
        {"seed": seed, "width": width, "sizes": sizes}
        for seed in (0, 1)
        for width in (1.0, 2.0)
        for sizes in ([3], [1, 2])
    ]
    wanted = [{"name": "x"} | outcome.parameters for outcome in report.outcomes]
    assert len(computed) == len(wanted)
    assert all(given in wanted for given in computed)
    assert statuses(sweeps.sweep("00", {"seed": [7, 7]}, progress=False)) == [
        "ok"
    ]  # one point
    assert statuses(sweeps.sweep("00", {}, progress=False)) == ["ok"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-g", "sead", "0:2"], "unknown parameter 'sead'; did you mean 'seed'"),
        (
            ["-g", "seed", "0,one"],
            "00_some: parameter seed must be a valid integer, got 'one'",
        ),
        (["-g", "seed", "__import__('os').getcwd()"], "seed must be a valid integer"),
        (["-g", "seed", "5:5"], "'5:5' has an empty range or item"),
        (
            ["-g", "seed", "0:2", "-g", "seed", "5"],
            "each NAME once",
        ),
        (
            ["-g", "seed", "0:2", "-p", "seed", "1"],
            "seed: in the grid and given as one value",
        ),
        (["-g", "output_dir", "a,b"], "use --output-dir"),
        (["--resources", "GPU"], "'' is not a valid float"),
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
    assert not list(project.rglob("*.lock"))


# --- Computed once ---------------------------------------------------------------------------------------------------


def test_finished_runs_are_skipped_and_the_rest_computed(project, computed):
    first = sweeps.sweep("00", {"seed": "0:3"}, progress=False)
    again = sweeps.sweep("00", {"seed": "0:4"}, progress=False)
    assert statuses(first) == ["ok"] * 3
    assert statuses(again) == ["done before"] * 3 + ["ok"]
    assert len(computed) == 4
    assert sweeps.run_one("00", {"seed": 3}) == again.outcomes[3].folder
    assert len(computed) == 4
    assert again.folder == project / "figures" / "quick" / "00_some.sweep"
    assert {path.parent for path in again.folder.glob("*/manifest.json")} == {
        o.folder for o in again.outcomes
    }


def test_a_run_s_folder_depends_on_source_and_parameters_alone(project, computed):
    path = project / "notebooks" / "00_some.ipynb"
    first = sweeps.run_one(path)
    assert (
        sweeps.run_one("00", {"seed": "0", "width": 1, "name": "digits"}) == first
    )  # the defaults
    text = json.loads(path.read_text())
    text["cells"][-1] |= {
        "outputs": [new_output("stream", text="2")],
        "execution_count": 7,
    }
    path.write_text(json.dumps(text))  # run in JupyterLab
    assert sweeps.run_one("00") == first
    assert len(computed) == 1
    others = [sweeps.run_one("00", {"seed": 1}), sweeps.run_one("00", profile="tiny")]
    notebook(path, "1 + 2", parameters=PARAMETERS)
    assert len({first.name, *(folder.name for folder in others)}) == 3
    plan = sweeps.jobs_of_grid(path, "quick", project, {}, {})
    assert first.name not in {folder.name for folder in plan}


@pytest.mark.parametrize("name", ["manifest.json", "results.json", "00_some.ipynb"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "flipped", "other"])
def test_a_damaged_run_is_computed_anew_and_the_others_kept(
    project, computed, name, damage
):
    report = sweeps.sweep("00", {"seed": "0:3"}, progress=False)
    path = report.outcomes[1].folder / name
    data = path.read_bytes()
    at = data.index(b'"results.json"' if name == "manifest.json" else b"1") + 1
    path.write_bytes(
        {
            "missing": b"",
            "empty": b"",
            "half": data[: len(data) // 2],
            "flipped": data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
            "other": b'{"files": 3, "parameters": []}',
        }[damage]
    )
    if damage == "missing":
        path.unlink()
    assert not manifest.finished(report.outcomes[1].folder)
    if name != "00_some.ipynb":
        assert [row["seed"] for row in tables.read(report.folder).rows] == [0, 2]
        with pytest.warns(
            UserWarning, match=r"1 runs of .* left out: \w{16}: unfinished or damaged"
        ):
            assert len(runs.load(report.folder)) == 2
    again = sweeps.sweep("00", {"seed": "0:3"}, progress=False)
    assert statuses(again) == ["done before", "ok", "done before"]
    assert all(map(manifest.finished, (outcome.folder for outcome in again.outcomes)))
    assert len(computed) == 4


def test_a_run_that_another_process_computes_is_left_to_it(project, computed):
    """Another sweep holds the first run and finishes it later: this one does the rest meanwhile, and it only once."""
    given = ("figures", {}, {"seed": 0})
    (job,) = sweeps.jobs_of_grid(parameters.find("00"), "quick", *given).values()
    held, release = threading.Event(), threading.Event()

    def other():
        with execution.locked(job.folder):
            held.set()
            release.wait(30)
            execution._execute(job, None, None, threading.Event(), {})

    thread = threading.Thread(target=other)
    thread.start()
    held.wait(30)
    with pytest.raises(execution.Busy, match=r"another process is computing \w{16}"):
        sweeps.run_one("00", {"seed": 0}, wait=False)
    threading.Thread(
        target=lambda: (len(computed) >= 2 or time.sleep(1), release.set())
    ).start()
    report = sweeps.sweep("00", {"seed": "0:3"}, progress=False)
    thread.join()
    assert statuses(report) == ["ok"] * 3
    assert sorted(given["seed"] for given in computed) == [0, 1, 2]


def test_two_sweeps_of_one_grid_at_once_compute_every_run_once(project, computed):
    reports = []

    def sweep():
        return reports.append(
            sweeps.sweep("00", {"seed": "0:40"}, jobs=4, progress=False)
        )

    threads = [threading.Thread(target=sweep) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given["seed"] for given in computed) == list(range(40))
    assert [report.failed for report in reports] == [[], [], []]


def test_runs_go_on_after_an_interrupted_sweep(project, computed, monkeypatch):
    """Ctrl-C in one sweep of a session, as in JupyterLab, stops that sweep alone."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(execution.futures, "as_completed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sweeps.sweep("00", {"seed": "0:2"})
    assert statuses(sweeps.sweep("00", {"seed": "5:7"})) == ["ok", "ok"]


def test_a_stop_ends_the_runs_of_its_own_call(project, tmp_path):
    notebook(project / "0.ipynb", "import time\ntime.sleep(600)", parameters="x = 1")
    stop, other = threading.Event(), threading.Event()
    with futures.ThreadPoolExecutor() as pool:
        run = pool.submit(
            runs.execute, project / "0.ipynb", folder=tmp_path / "out", stop=stop
        )
        while not list(tmp_path.glob(".out.tmp")):
            time.sleep(0.05)
        stop.set()
        with pytest.raises(runs.RunError, match="stopped"):
            run.result(30)
    assert not list(tmp_path.glob("*out*"))
    assert not other.is_set()
    with pytest.raises(runs.RunError, match="stopped"):
        runs.execute(
            project / "0.ipynb", folder=tmp_path / "out", stop=stop
        )  # it starts no kernel
    with pytest.raises(runs.RunError, match="took more than"):
        runs.execute(
            project / "0.ipynb", folder=tmp_path / "out", stop=other, timeout=1
        )


def test_a_run_that_is_lost_with_its_worker_is_made_again_and_the_one_to_blame_named(
    project, computed, monkeypatch
):
    """Dask gives up innocent runs too, which waited at the workers that another run killed."""
    started = []

    def killed(*_):
        raise RuntimeError("killed")

    class Dying(futures.ThreadPoolExecutor):
        def submit(self, work, job):
            seed = job.parameters["seed"]
            started.append(seed)
            dies = seed == 2 or (seed == 3 and started.count(3) == 1)
            return super().submit(killed if dies else work, job)

    monkeypatch.setattr(execution, "_here", lambda *_: nullcontext((Dying(1), {})))
    report = sweeps.sweep("00", {"seed": "0:5"}, progress=False)
    assert statuses(report) == ["ok", "ok", "failed", "ok", "ok"]
    assert report.failed[0].reason == "its worker died: killed"
    assert started == [0, 1, 2, 3, 4, 2, 3]


def test_any_executor_computes_jobs(project):
    """Here processes of a pool, each of which starts one for papermill."""
    jobs = sweeps.jobs_of_grid(
        parameters.find("00"), "tiny", "out", {"seed": "0:2"}, {}
    )
    said = []
    with futures.ProcessPoolExecutor(
        2, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        ended = execution.run_many(
            jobs.values(), pool, lambda job, result: said.append(job.folder), threads=1
        )
    assert [ended[folder].status for folder in jobs] == ["ok", "ok"]
    assert set(said) == set(jobs)
    assert all(map(manifest.finished, jobs))


def test_a_scheduler_that_goes_away_is_an_error_in_one_line(
    project, computed, monkeypatch
):
    """Dask cancels what is not done; a client without its scheduler leaves further calls pending for ever."""

    class Gone(futures.Executor):
        def submit(self, *_):
            future = futures.Future()
            assert future.cancel()
            future.set_running_or_notify_cancel()
            return future

    monkeypatch.setattr(execution, "_here", lambda *_: nullcontext((Gone(), {})))
    result = call("sweep", "00", "-g", "seed", "0:2")
    assert result.exit_code == 1
    assert result.output.endswith(
        "Error: the Dask scheduler is gone; the same again does what is missing\n"
    )


def test_a_notebook_that_changes_meanwhile_is_not_mixed_in(
    project, computed, monkeypatch
):
    papermill = execution._papermill

    def change(job, *arguments):
        papermill(job, *arguments)
        notebook(job.notebook, f"{len(computed)}", parameters=PARAMETERS)

    monkeypatch.setattr(execution, "_papermill", change)
    report = sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    assert statuses(report) == ["ok", "failed"]
    assert "changed while the sweep ran" in report.failed[0].reason


def test_results_go_into_the_home_folder(project, computed, monkeypatch):
    monkeypatch.setenv("HOME", str(project / "home"))
    (folder,) = (o.folder for o in sweeps.sweep("00", {}, root="~/a").outcomes)
    assert folder.parents[2] == project / "home" / "a"
    assert call("collect", "00", "--output-dir", "~/a").exit_code == 0
    assert len(runs.load("00", root="~/a")) == len(runs.load(str(folder.parent))) == 1
    assert runs.execute("00", folder="~/one") == project / "home" / "one"
    assert not (project / "~").exists()


def test_an_unwritable_folder_fails_by_name_run_by_run(project, computed):
    sweep = project / "figures" / "quick" / "00_some.sweep"
    sweep.parent.mkdir(parents=True)
    sweep.write_text("a file where the folder should be")
    report = sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    assert statuses(report) == ["failed"] * 2
    assert (
        "FileExistsError" in report.failed[0].reason
        or "NotADirectoryError" in report.failed[0].reason
    )


# --- A real sweep ----------------------------------------------------------------------------------------------------


def test_sweep_command(project, monkeypatch):
    """Two runs at a time of a notebook outside the notebooks folder, one of which fails until a file is there."""
    source = """from pathlib import Path
from uqlab import runs
runs.begin(output_dir, "x")
runs.record("square", seed**2)
with open("starts", "a") as file:
    print(seed, file=file)
assert seed < 2 or Path("mended").exists(), "two\\nlines\""""
    path = notebook(
        project.parent / f"{project.name} outside" / "x.ipynb",
        source,
        parameters=PARAMETERS,
    )
    arguments = ["sweep", path, "-g", "seed", "0:3", "--jobs", 2]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    result = call(*arguments)
    assert result.exit_code == 1
    assert "x: 3 runs, 0 done before, 3 to do" in result.output
    assert re.search(r"^seed=\d  ok  [\d.]+ s$", result.output, re.MULTILINE)
    assert re.search(
        r"^seed=2  FAILED  x failed In \[\d\] AssertionError: two$",
        result.output,
        re.MULTILINE,
    )
    assert re.search(
        r"failed +1\nok +2\n\nfailed because\n\{'seed': 2\} .*AssertionError: two\n",
        result.output,
    )
    sweep = project / "figures" / "quick" / "x.sweep"
    table = pd.read_csv(sweep / "table.csv")
    assert list(table.square) == [0, 1]
    assert (project / "figures" / "quick" / "index.html").exists()
    about = json.loads(next(sweep.glob("*/manifest.json")).read_text())
    assert about["notebook"] == str(path)
    assert about["threads"] == max(1, joblib.cpu_count() // 2)
    assert about["uqlab"] == uqlab.__version__

    (path.parent / "mended").touch()
    result = call(*arguments, "--quiet")
    assert result.exit_code == 0
    assert re.match(
        r"(note: .*\n)?status +runs\ndone before +2\nok +1\n\ntable: ", result.output
    )
    assert sorted((path.parent / "starts").read_text().split()) == ["0", "1", "2", "2"]
    assert not list(sweep.glob("*.failed"))
    assert not list(sweep.glob(".*"))
    assert len(runs.load(sweep)) == 3
