"""Runs: what a run leaves behind, how several are computed, the page of all runs, interrupted and failing ones."""

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import joblib
import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from small_runs import call, heed_interrupts, notebook, two_notebooks  # noqa: F401  (a fixture)

import uqlab
from uqlab import runs
from uqlab.runs import execution, gallery, manifest, page, parameters


def test_run(project, monkeypatch):
    """One good and one failing notebook: contents, hashes, parameters, environment, error, earlier results, gallery."""
    wrong = (
        project / "kernels" / "python3"
    )  # a kernel of that name installed elsewhere must not be used
    wrong.mkdir(parents=True)
    (wrong / "kernel.json").write_text(
        '{"argv": ["/bin/false"], "display_name": "", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(project))
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    monkeypatch.setenv("UQLAB_CACHE", "")  # so that what --no-cache sets is undone
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    earlier = project / "out" / "tiny" / "01_bad" / "results.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text('{"numbers": {"earlier": 1}}')
    sources = {path: path.read_bytes() for path in (project / "notebooks").iterdir()}
    text = 'q"uo\\te {x} $HOME'
    options = [
        "--profile",
        "tiny",
        "--output-dir",
        "out",
        "--jobs",
        2,
        "-p",
        "seed",
        3,
        "-p",
        "name",
        text,
    ]
    result = call("run", *options)

    assert result.exit_code == 1
    assert {
        path: path.read_bytes() for path in (project / "notebooks").iterdir()
    } == sources
    assert "no parameter 'seed' in 01_bad" in result.output
    assert re.search(r"^00_good  ok ", result.output, re.MULTILINE)
    assert "01_bad  FAILED  01_bad failed In [4] " in result.output
    assert result.output.endswith("\n1 of 2 claims hold\n")

    folder = project / "out" / "tiny" / "00_good"
    about = json.loads((folder / "manifest.json").read_text())
    assert set(about["files"]) == {
        "00_good.ipynb",
        "results.json",
        "mi_ecdf.png",
        "mi_ecdf.pdf",
    }
    for name, digest in about["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert about["parameters"] == {
        "seed": 3,
        "lr": 1.0,
        "widths": [1, 2],
        "name": text,
    }
    assert (about["profile"], about["uqlab"]) == ("tiny", uqlab.__version__)
    assert about["commit"] == manifest.commit()
    assert about["packages"]["numpy"] == np.__version__
    assert 0 < about["seconds"] < 240
    assert about["device"]

    results = json.loads((folder / "results.json").read_text())
    numbers = results["numbers"]
    assert numbers["parameters"] == [3, 1.0, [1, 2], text]
    assert Path(numbers["executable"]).resolve() == Path(sys.executable).resolve()
    assert numbers["cwd"] == str(project / "notebooks")
    environment = numbers["environment"]
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert (environment["MKL_NUM_THREADS"], environment["UQLAB_CACHE"]) == (
        "7",
        "",
    )  # the user's
    assert environment["OMP_NUM_THREADS"] == str(max(1, joblib.cpu_count() // 2))
    assert about["threads"] == int(environment["OMP_NUM_THREADS"])
    assert results["figures"]["mi_ecdf"]["files"] == ["mi_ecdf.pdf", "mi_ecdf.png"]
    executed = (folder / "00_good.ipynb").read_text()
    assert ".tmp-" not in executed
    assert (
        str(folder) in executed
    )  # what the notebook printed of its folder is where it lies now

    assert "01_bad failed In [4] ValueError: the reason <b>\n" in result.output
    assert "ValueError: the reason <b>" in result.output
    assert "\x1b" not in result.output
    kept = project / "out" / "tiny" / "01_bad.failed" / "01_bad.ipynb"
    assert str(kept.relative_to(project)) in result.output
    ran = [
        cell.execution_count
        for cell in nbformat.read(kept, 4).cells
        if cell.cell_type == "code"
    ]
    assert ran == [1, 2, 3, 4, None]
    assert earlier.read_text() == '{"numbers": {"earlier": 1}}'
    assert not list((project / "out" / "tiny").glob(".*"))

    check_page(project / "out" / "tiny" / "index.html")

    notebook(project / "notebooks" / "01_bad.ipynb", "mended = 1")
    assert (
        call(
            "run", "01", "--profile", "tiny", "--output-dir", "out", "--quiet"
        ).exit_code
        == 0
    )
    assert not kept.exists()
    assert json.loads(earlier.read_text()) == {}  # it recorded nothing


def check_page(index: Path):
    """A gallery after `test_run`: all text escaped, links relative and alive, the failure shown beside what is kept."""
    elements = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            elements.append((tag, dict(attrs)))

    text = index.read_text()
    Parser().feed(text)
    images = [attributes for tag, attributes in elements if tag == "img"]
    assert [(image["src"], image["alt"]) for image in images] == [
        ("00_good/mi_ecdf.png", "MI < 1 & <script>alert(1)</script>")
    ]
    assert (images[0]["width"], images[0]["height"]) == ("330", "200")
    links = [
        attributes["href"]
        for tag, attributes in elements
        if tag == "a" and attributes["href"][0] != "#"
    ]
    assert {
        "00_good/00_good.ipynb",
        "00_good/mi_ecdf.pdf",
        "01_bad.failed/01_bad.ipynb",
    } <= set(links)
    for link in [*links, images[0]["src"]]:
        assert (index.parent / link).is_file()
    assert [tag for tag, _ in elements].count("script") == 1
    assert "<b>" not in text.replace("<b>Figure 2a</b>", "")
    assert "A title &amp; &lt;i&gt;" in text
    assert "the reason &lt;b&gt;" in text
    assert "earlier" in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stand_in(project, monkeypatch):
    """Three more notebooks, of which one took long before; what was executed, how."""
    for name in ("02", "03", "04"):
        notebook(project / "notebooks" / f"{name}_some.ipynb")
    for name, seconds in (("00_good", 50.5), ("02_some", 70.0), ("03_some", 20.0)):
        folder = project / "figures" / "quick" / name
        folder.mkdir(parents=True)
        manifest.Manifest(seconds=seconds).save(folder)
    done = []

    def papermill(job, output, variables, *_):
        done.append((job.notebook.stem[:2], int(variables["OMP_NUM_THREADS"])))
        if job.notebook.stem == "01_bad":
            raise RuntimeError("the reason")
        output.write_text("{}")

    monkeypatch.setattr(execution, "_papermill", papermill)
    monkeypatch.setattr("joblib.cpu_count", lambda: 4)
    monkeypatch.setattr("shutil.which", {"nvidia-smi": None}.get)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return done


def test_several_notebooks_run_on_all_cores_the_longest_first(
    project, stand_in, monkeypatch
):
    result = call("run", "--jobs", 1)
    assert result.exit_code == 1
    assert "01_bad  FAILED" in result.output
    assert [name for name, _ in stand_in] == ["01", "04", "02", "00", "03"]
    assert {threads for _, threads in stand_in} == {4}
    stand_in.clear()
    call("run")
    assert {threads for _, threads in stand_in} == {1}
    stand_in.clear()
    call("run", "02", "03")
    call("run", "03")
    monkeypatch.setattr("shutil.which", {"nvidia-smi": "/bin/true"}.get)
    call("run", "02", "03")
    assert [threads for _, threads in stand_in] == [2, 2, 4, 4, 4]


def test_progress_is_one_line_for_all_notebooks(project, stand_in, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    plan = parameters.per_notebook((), "quick", {})
    execution.execute_all(plan, project / "out", "quick", 1, None, quiet=False)
    lines = terminal.getvalue()
    assert "| 4/5 [" in lines
    assert "\n" not in lines


@pytest.mark.parametrize(("option", "kept"), [([], True), (["--no-cache"], False)])
def test_kernels_are_told_where_trainings_are_kept(project, monkeypatch, option, kept):
    monkeypatch.setenv("UQLAB_CACHE", "")
    monkeypatch.delenv("UQLAB_CACHE")
    found = []
    monkeypatch.setattr(
        execution,
        "_papermill",
        lambda job, output, variables, *_: found.append(variables["UQLAB_CACHE"]),
    )
    call("run", "00", *option)
    assert [Path(each).name for each in found] == (["trainings"] if kept else [""])


def test_gallery_shows_broken_runs_as_incomplete(tmp_path):
    for name, content in {
        "00_none": None,
        "01_broken": "{",
        "03_list": "[]",
    }.items():
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "manifest.json").write_text(content)
    (tmp_path / "02_file").mkdir()
    manifest.Manifest(files={"gone.png": ""}).save(tmp_path / "02_file")
    (tmp_path / "03_list" / "x.png").write_bytes(b"not a picture")
    (tmp_path / ".04_unfinished.tmp-0").mkdir()
    text = gallery.build(tmp_path).read_text()
    assert text.count("<section") == text.count("Incomplete:") == 4
    assert "gone.png missing" in text


def test_gallery_command_says_what_to_run_first(tmp_path):
    result = call("gallery", "--output-dir", tmp_path, "--profile", "paper")
    assert result.exit_code == 2
    assert "uqlab run NOTEBOOK --profile paper --output-dir" in result.output


def test_kernel_start_is_tried_twice_but_never_a_cell(tmp_path, monkeypatch):
    starts, output = [], tmp_path / "out.ipynb"

    def fail(output_path):
        starts.append(output_path)
        if len(starts) > 2:  # from the third start on, a cell has run
            cell = new_code_cell(
                "1", metadata={"papermill": {"start_time": "2026-01-01"}}
            )
            nbformat.write(new_notebook(cells=[cell]), output)
        raise RuntimeError("kernel died")

    monkeypatch.setattr("papermill.execute_notebook", fail)
    monkeypatch.setattr(page, "end_with_runner", lambda: None)
    for count in (2, 3):
        monkeypatch.setattr(
            sys, "stdin", io.StringIO(json.dumps({"output_path": str(output)}))
        )
        with pytest.raises(RuntimeError, match="kernel died"):
            page.main()
        assert len(starts) == count


def test_own_result_folder_is_no_source(project):
    path = notebook(project / "figures" / "quick" / "00_good" / "00_good.ipynb")
    with pytest.raises(ValueError, match="choose another output folder"):
        runs.execute(path)
    assert path.exists()


def test_timeout(project):
    notebook(
        project / "{slow}.ipynb", "import time\ntime.sleep(600)"
    )  # braces: papermill formats its paths
    result = call("run", "{slow}.ipynb", "--timeout", 1, "--quiet")
    assert result.exit_code == 1
    assert "it took more than 1 s (timeout)" in result.output
    assert (project / "figures" / "quick" / "{slow}.failed" / "error.txt").exists()


def test_interrupt_stops_the_kernel_and_leaves_nothing(project):
    sleep = "import os, time\nopen('pid.tmp', 'w').write(str(os.getpid()))\nos.rename('pid.tmp', 'pid')\ntime.sleep(600)"
    notebook(project / "02_slow.ipynb", sleep)
    command = [sys.executable, "-m", "uqlab.runs", "run", "02_slow.ipynb"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, preexec_fn=heed_interrupts
    )
    deadline = time.monotonic() + 240
    while not (project / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert errors == b"stopped; 0 of 1 runs are done, the same again does all of them\n"
    assert not list((project / "figures" / "quick").iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int((project / "pid").read_text()), 0)


def test_a_sweep_whose_runs_all_failed_names_no_table(project):
    said = call("sweep", "01")
    assert said.exit_code == 1
    assert "table" not in said.output
    (page,) = re.findall(r"look at: (.+)", said.output)
    assert Path(page).exists()
