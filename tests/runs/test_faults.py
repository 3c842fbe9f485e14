"""Faults: processes killed, a notebook that raises or dies, a full disk, Ctrl-C; nothing finished is ever lost.

The notebook's behaviour follows from its seed and from files in its folder, where it also leaves word of every start.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import call, heed_interrupts, notebook
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)

from uqlab import runs
from uqlab.runs.manifest import Manifest

START = """import os, signal, time
from pathlib import Path
with open("starts", "a") as file:
    print(seed, os.getpid(), file=file)
mended = Path("mended").exists()"""
PARAMETERS = "seed = 0  # what happens"


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def starts(project: Path) -> list[tuple[int, int]]:
    """(seed, process) of every start so far."""
    path = project / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        (int(seed), int(process)) for seed, process in (line.split() for line in lines)
    ]


def sweep_command(*arguments: str, before=heed_interrupts) -> subprocess.Popen:
    """A sweep in a process of its own; `before` is called in that process before it starts."""
    command = [sys.executable, "-m", "uqlab.runs", "sweep", "0.ipynb", *arguments]
    return subprocess.Popen(
        command,
        preexec_fn=before,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not (
        state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"
    )


def finished(project: Path) -> int:
    folders = [
        path
        for path in project.glob("figures/quick/0.sweep/*")
        if path.is_dir() and path.suffix != ".failed"
    ]
    return sum(whole(folder) for folder in folders)


def whole(folder: Path) -> bool:
    return Manifest.read(folder).undamaged(folder)


def half_done(project: Path) -> list[Path]:
    return list(project.glob("figures/quick/0.sweep/.*.tmp"))


def test_a_run_that_fails_stops_no_other(desk):
    """Of four at once one raises, one's kernel is killed, one can write no more; the fourth is well."""
    misbehave = """if not mended and seed == 1:
    raise ValueError("the reason")
if not mended and seed == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == 3:
    print("x" * 300_000)"""
    notebook(desk / "0.ipynb", START, misbehave, parameters=PARAMETERS)

    def limit():  # what a full disk does: a write fails half-way
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    process = sweep_command("-g", "seed", "0:4", "--jobs", "4", before=limit)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    summed = output.partition("failed: 3\n")[2].splitlines()
    lines = [line.split("  ", 1) for line in summed if line.startswith("seed=")]
    reasons = dict(lines)
    assert reasons.keys() == {f"seed={seed}" for seed in range(1, 4)}, output
    assert "In [4] ValueError: the reason" in reasons["seed=1"]
    assert "Kernel died" in reasons["seed=2"]
    assert "File too large" in reasons["seed=3"]
    assert finished(desk) == 1
    assert half_done(desk) == []
    wait_for(lambda: not any(lives(kernel) for _, kernel in starts(desk)))

    (desk / "mended").touch()
    report = runs.sweep("0.ipynb", {"seed": "0:4"}, jobs=4, progress=False)
    assert [o.status for o in report.outcomes] == ["done before"] + ["ok"] * 3
    assert sorted(seed for seed, _ in starts(desk)) == [0, 1, 1, 2, 2, 3, 3]
    assert finished(desk) == 4


@pytest.mark.parametrize(
    "kill", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"]
)
def test_a_sweep_that_is_stopped_goes_on_where_it_was(desk, kill):
    """Stopped with a run done and two in progress; then a sweep, or two at once, do what is missing, each run once."""
    notebook(
        desk / "0.ipynb",
        START,
        "while seed and not mended:\n    time.sleep(0.1)",
        parameters=PARAMETERS,
    )
    process = sweep_command("-g", "seed", "0:3", "--jobs", "2")
    wait_for(lambda: finished(desk) == 1 and len(starts(desk)) == 3)
    process.send_signal(kill)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == (-9 if kill == signal.SIGKILL else 130)
    wait_for(lambda: not any(lives(kernel) for _, kernel in starts(desk)))
    assert finished(desk) == 1
    assert len(half_done(desk)) == (2 if kill == signal.SIGKILL else 0)

    (desk / "mended").touch()
    arguments = "-g", "seed", "0:3"
    other = sweep_command(*arguments) if kill == signal.SIGKILL else None
    report = runs.sweep("0.ipynb", {"seed": "0:3"}, progress=False)
    if other:
        output, _ = other.communicate(timeout=240)
        assert other.returncode == 0, output
    assert report.failed == []
    assert sorted(seed for seed, _ in starts(desk)) == [0, 1, 1, 2, 2]
    assert finished(desk) == 3
    assert half_done(desk) == []


@pytest.mark.filterwarnings("default")  # Dask's own, of processes that are killed
def test_workers_of_a_cluster_that_are_killed(desk):
    """One run kills its worker once and is computed by another, one does so always and is given up."""
    distributed = pytest.importorskip("distributed")
    murder = """if seed == 2 or (seed == 1 and not Path("killed").exists()):
    Path("killed").touch()
    import psutil
    psutil.Process().parents()[1].kill()  # that of the process in which papermill runs
    time.sleep(600)"""
    notebook(desk / "0.ipynb", START, murder, parameters=PARAMETERS)
    options = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "dashboard_address": ":0",
        "silence_logs": 50,
    }
    with (
        distributed.LocalCluster(resources={"GPU": 1}, **options) as cluster,
    ):
        how = {"cluster": cluster.scheduler_address, "resources": {"GPU": 1}}
        report = runs.sweep("0.ipynb", {"seed": "0:3"}, progress=False, **how)
    assert [outcome.status for outcome in report.outcomes] == ["ok", "ok", "failed"]
    assert "KilledWorker" in report.failed[0].reason
    assert finished(desk) == 2
    wait_for(lambda: not any(lives(kernel) for _, kernel in starts(desk)))


# Results are never lost ----------------------------------------------------------------


def test_a_kill_between_the_two_renames_loses_nothing(project, computed):
    """The old result is hidden then, and the new one may be half done."""
    folder = runs.run_one("00")
    for left in ("old", "tmp"):
        folder.rename(folder.with_name(f".{folder.name}.{left}"))
        folder.with_name(f".{folder.name}.tmp").mkdir(exist_ok=True)
        report = runs.sweep("00", {}, progress=False)
        assert [outcome.status for outcome in report.outcomes] == ["ok"]
        assert whole(folder)
        assert len(computed) == (1 if left == "old" else 2)  # no result yet


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
    assert Manifest.read(folder).parameters["seed"] == 2
    assert whole(folder)
    hidden = [path.suffix for path in project.rglob(".*") if "00_some" in path.name]
    assert {*hidden} <= {".lock"}
    call("gallery")
    assert 'id="tiny/00_some"' in (project / "figures/index.html").read_text()


def test_a_sweep_behind_a_link_goes_on(project, computed):
    (project / "scratch").mkdir()
    (project / "figures/tiny").mkdir(parents=True)
    (project / "figures/tiny/00_some.sweep").symlink_to(project / "scratch")
    command = ("sweep", "00", "-g", "seed", "0:2", "--profile", "tiny")
    for _ in range(2):
        result = call(*command)
        assert result.exit_code == 0, result.output
    assert len(computed) == 2
    shutil.rmtree(project / "scratch")  # as a cluster does after 30 days
    assert call(*command).exit_code == 0
    assert len(computed) == 4


def test_what_no_run_has_written_is_not_replaced(project, computed):
    (project / "mine").mkdir()
    (project / "mine" / "thesis.tex").write_text("years")
    for place in ("mine", "mine/thesis.tex"):
        with pytest.raises(ValueError, match="no run has written"):
            runs.execute("00", folder=place)
    folder = runs.execute("00", {"seed": 1})
    (folder / "notes").mkdir()
    (folder / "notes" / "why.md").write_text("because")
    (folder / "notes" / "results.json").write_text("mine")
    runs.execute("00", {"seed": 2})
    runs.execute("00", {"seed": 3})
    assert (folder / "notes" / "why.md").read_text() == "because"
    assert (folder / "notes" / "results.json").read_text() == "mine"
    (folder / "manifest.json").write_text("damaged")
    runs.execute("00", {"seed": 3})
    assert (folder / "notes" / "why.md").read_text() == "because"
    assert Manifest.read(folder).parameters["seed"] == 3
    assert (project / "mine" / "thesis.tex").read_text() == "years"


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
