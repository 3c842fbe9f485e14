"""Faults: processes killed, a notebook that raises, hangs or dies, a full disk, Ctrl-C; nothing finished is ever lost.

The notebook's behaviour follows from its seed and from files in its folder, where it also leaves word of every start.
"""

import hashlib
import inspect
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from small_runs import heed_interrupts, notebook

from uqlab import ensembles, models, training
from uqlab.runs import manifest, sweeps

START = """import os, signal, time
from pathlib import Path
with open("starts", "a") as file:
    print(seed, os.getpid(), file=file)
mended = Path("mended").exists()"""
PARAMETERS = "seed = 0  # what happens"


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
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
    return sum(map(manifest.finished, folders))


def half_done(project: Path) -> list[Path]:
    return list(project.glob("figures/quick/0.sweep/.*.tmp"))


def test_a_run_that_fails_stops_no_other(project):
    """Of five at once one raises, one hangs, one's kernel is killed, one can write no more; the fifth is well."""
    misbehave = """if not mended and seed == 1:
    raise ValueError("the reason")
if not mended and seed == 2:
    time.sleep(600)
if not mended and seed == 3:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == 4:
    print("x" * 300_000)"""
    notebook(project / "0.ipynb", START, misbehave, parameters=PARAMETERS)

    def limit():  # what a full disk does: a write fails half-way
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    process = sweep_command(
        "-g", "seed", "0:5", "--jobs", "5", "--timeout", "60", "--quiet", before=limit
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    reasons = dict(
        line.split("}  ")
        for line in output.partition("failed because\n")[2].splitlines()
        if "seed" in line
    )
    assert reasons.keys() == {f"{{'seed': {seed}" for seed in range(1, 5)}, output
    assert "In [4] ValueError: the reason" in reasons["{'seed': 1"]
    assert "In [4] it took more than 60 s (timeout)" in reasons["{'seed': 2"]
    assert "Kernel died" in reasons["{'seed': 3"]
    assert "File too large" in reasons["{'seed': 4"]
    assert finished(project) == 1
    assert half_done(project) == []
    wait_for(lambda: not any(lives(kernel) for _, kernel in starts(project)))

    (project / "mended").touch()
    report = sweeps.sweep("0.ipynb", {"seed": "0:5"}, jobs=4, progress=False)
    assert [outcome.status for outcome in report.outcomes] == ["done before"] + [
        "ok"
    ] * 4
    assert sorted(seed for seed, _ in starts(project)) == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert finished(project) == 5


@pytest.mark.parametrize(
    "kill", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"]
)
def test_a_sweep_that_is_stopped_goes_on_where_it_was(project, kill):
    """Stopped with a run done and two in progress; then a sweep, or two at once, do what is missing, each run once."""
    notebook(
        project / "0.ipynb",
        START,
        "while seed and not mended:\n    time.sleep(0.1)",
        parameters=PARAMETERS,
    )
    process = sweep_command("-g", "seed", "0:3", "--jobs", "2")
    wait_for(lambda: finished(project) == 1 and len(starts(project)) == 3)
    process.send_signal(kill)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == (-9 if kill == signal.SIGKILL else 130)
    wait_for(lambda: not any(lives(kernel) for _, kernel in starts(project)))
    assert finished(project) == 1
    if kill == signal.SIGINT:
        assert output.endswith(
            "stopped; 1 of 3 runs are done, the same again does the rest\n"
        )
        assert half_done(project) == []
    else:
        assert len(half_done(project)) == 2

    (project / "mended").touch()
    other = (
        sweep_command("-g", "seed", "0:3", "--quiet")
        if kill == signal.SIGKILL
        else None
    )
    report = sweeps.sweep("0.ipynb", {"seed": "0:3"}, progress=False)
    if other:
        output, _ = other.communicate(timeout=240)
        assert other.returncode == 0, output
    assert report.failed == []
    assert sorted(seed for seed, _ in starts(project)) == [0, 1, 1, 2, 2]
    assert finished(project) == 3
    assert half_done(project) == []


@pytest.mark.filterwarnings("default")  # Dask's own, of processes that are killed
def test_workers_of_a_cluster_that_are_killed(project):
    """One run kills its worker once and is computed by another, one does so always and is given up; both are named."""
    distributed = pytest.importorskip("distributed")
    murder = """while seed == 0 and len(open("starts").readlines()) < 3:
    time.sleep(0.1)
if seed == 2 or (seed == 1 and not Path("killed").exists()):
    Path("killed").touch()
    import psutil
    psutil.Process().parents()[1].kill()  # that of the process in which papermill runs
    time.sleep(600)"""
    notebook(project / "0.ipynb", START, murder, parameters=PARAMETERS)
    options = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "dashboard_address": ":0",
        "silence_logs": 50,
    }
    with distributed.LocalCluster(resources={"GPU": 1}, **options) as cluster:
        address = cluster.scheduler_address
        report = sweeps.sweep(
            "0.ipynb",
            {"seed": "0:3"},
            cluster=address,
            resources={"GPU": 1},
            progress=False,
        )
    assert [outcome.status for outcome in report.outcomes] == ["ok", "ok", "failed"]
    assert "killed twice" in report.failed[0].reason
    assert sum(seed == 2 for seed, _ in starts(project)) == 2
    assert finished(project) == 2
    assert half_done(project) == []
    wait_for(lambda: not any(lives(kernel) for _, kernel in starts(project)))


def test_a_cluster_without_a_fit_worker_is_waited_for(project, capsys):
    distributed = pytest.importorskip("distributed")
    notebook(project / "0.ipynb", parameters=PARAMETERS)
    with distributed.LocalCluster(
        n_workers=0, dashboard_address=":0", silence_logs=50
    ) as cluster:
        threading.Timer(2, cluster.scale, (1,)).start()
        report = sweeps.sweep("0.ipynb", {}, cluster=cluster.scheduler_address)
    assert [outcome.status for outcome in report.outcomes] == ["ok"]
    assert capsys.readouterr().err == "waiting for a worker; now there is none\n"


def test_a_cluster_that_is_not_there(project):
    pytest.importorskip("distributed")
    notebook(project / "0.ipynb", parameters=PARAMETERS)
    with pytest.raises(ValueError, match="no Dask scheduler at nowhere: "):
        sweeps.sweep("0.ipynb", {"seed": "0:3"}, cluster="nowhere", progress=False)


DELAY = 0.0  # seconds a batch


def slowly(x, generators):
    """An augmentation that is the same in the killed process and in the one that resumes, where it does not wait."""
    time.sleep(DELAY)
    return x


TRAINING = f"""import time, torch
from uqlab import ensembles, models, training
torch.set_num_threads(2)
x = torch.rand(80, 12, generator=torch.Generator().manual_seed(0))
ensemble = ensembles.deep(lambda: models.mlp(12, (16, 8), classes=3), 4, seed=3)
DELAY = 0.1
{inspect.getsource(slowly)}
history = training.fit(ensemble, x, torch.arange(80) % 3, epochs=8, lr=0.1, momentum=0.9, batch_size=16, seed=5,
                       progress=False, resume="run", augment=slowly)
"""


def test_training_that_is_killed_resumes_bit_identically(project):
    """kill -9 as soon as two epochs are on disk; the resumed run equals one that was never stopped in every bit."""
    script = project / "train.py"  # a file, so that the augmentation has a source
    script.write_text(TRAINING)
    process = subprocess.Popen([sys.executable, script])
    seen = set()

    def two_epochs():
        seen.add(
            (project / "run" / "training.pt").stat().st_mtime_ns
            if (project / "run" / "training.pt").exists()
            else None
        )
        return len(seen - {None}) >= 2

    wait_for(two_epochs)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    x = torch.rand(80, 12, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    def trained(resume: str | None) -> tuple[str, int]:
        ensemble = ensembles.deep(lambda: models.mlp(12, (16, 8), classes=3), 4, seed=3)
        settings = {
            "epochs": 8,
            "lr": 0.1,
            "momentum": 0.9,
            "batch_size": 16,
            "seed": 5,
            "progress": False,
        }
        history = training.fit(
            ensemble,
            x,
            torch.arange(80) % 3,
            augment=slowly,
            resume=resume,
            **settings,
        )
        state = (
            b"".join(p.detach().numpy().tobytes() for p in ensemble.parameters())
            + history.loss.numpy().tobytes()
        )
        return hashlib.sha256(state).hexdigest(), history.steps

    resumed, steps = trained("run")
    whole, all_steps = trained(None)
    torch.set_num_threads(threads)
    assert 0 < steps < all_steps == 40
    assert steps % 5 == 0
    assert resumed == whole
