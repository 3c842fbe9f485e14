"""Each run has a GPU of its own: no GPU is needed to see which one it is told to use."""

import itertools
import json
import threading

import pytest
from small_runs import call, notebook

from uqlab import runs

PAGE = """from uqlab import runs
import os, time
folder = runs.begin(output_dir, "0")
begun = time.time()
time.sleep(1)
runs.record("span", [begun, time.time()])
runs.record("gpu", os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return notebook(tmp_path / "notebooks" / "0.ipynb", PAGE)


def spans(folder):
    """When each GPU was in use."""
    found = {}
    for path in folder.rglob("results.json"):
        values = json.loads(path.read_text())["numbers"]
        found.setdefault(values["gpu"], []).append(values["span"])
    return found


@pytest.mark.slow
def test_no_two_runs_share_a_gpu_also_of_two_sweeps_at_once(page, tmp_path):
    how = {"gpus": ["5", "6"], "root": "other", "progress": False}
    thread = threading.Thread(
        target=runs.sweep, args=(page, {"seed": "4:6"}), kwargs=how
    )
    thread.start()
    result = call("sweep", page, "-g", "seed", "0:4", "--gpus", "5, 6")
    thread.join()
    assert result.exit_code == 0, result.output
    found = spans(tmp_path)
    assert sorted(found) == ["5", "6"]
    assert sum(map(len, found.values())) == 6
    for each in found.values():
        each.sort()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(each))


@pytest.mark.slow
def test_a_run_on_a_cluster_has_one_of_its_workers_gpus(page, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None}
    with distributed.LocalCluster(resources={"GPU": 2}, **options) as cluster:
        address = cluster.scheduler_address
        how = {"cluster": address, "resources": {"GPU": 1}, "progress": False}
        report = runs.sweep(page, {"seed": "0:4"}, **how)
    assert not report.failed
    found = spans(tmp_path)
    assert sorted(found) == ["2", "3"]


@pytest.mark.parametrize("wrong", ["cuda:0", "0,", "all"])
def test_what_is_no_gpu_would_compute_on_the_cpu(page, wrong):
    result = call("sweep", page, "-g", "seed", "0:2", "--gpus", wrong)
    assert result.exit_code == 2
    assert "give numbers like 0,1" in result.output
