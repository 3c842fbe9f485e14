"""Runs: what a run leaves behind, how several are computed, the page of all runs, interrupted and failing ones."""

import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import joblib
import nbformat
import numpy as np
import pytest
from small_runs import call, heed_interrupts, notebook, two_notebooks  # noqa: F401  (a fixture)

import uqlab
from uqlab.runs import execution, manifest, tables


def test_run(project, monkeypatch):
    """One good and one failing notebook: contents, hashes, parameters, environment, error, earlier results, gallery."""
    wrong = project / "kernels" / "python3"  # of that name, installed elsewhere
    wrong.mkdir(parents=True)
    (wrong / "kernel.json").write_text(
        '{"argv": ["/bin/false"], "display_name": "", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(project))
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    monkeypatch.setenv("UQLAB_CACHE", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    earlier = project / "out" / "tiny" / "01_bad" / "results.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text('{"numbers": {"earlier": 1}}')
    sources = {path: path.read_bytes() for path in (project / "notebooks").iterdir()}
    text = 'q"uo\\te {x} $HOME'
    options = ["--profile", "tiny", "--output-dir", "out", "--jobs", 2]
    result = call("run", *options, "-p", "seed", 3, "-p", "name", text)

    assert result.exit_code == 1
    kept_sources = {path: path.read_bytes() for path in sources}
    assert kept_sources == sources
    assert re.search(r"^00_good  ok ", result.output, re.MULTILINE)
    assert "01_bad  failed  01_bad failed: In [4] ValueError: it does" in result.output
    assert "the reason <b>; kept" in result.output  # whole: the way out stands last
    assert "ok: 1\nfailed: 1\n" in result.output

    folder = project / "out" / "tiny" / "00_good"
    about = json.loads((folder / "manifest.json").read_text())
    written = {"00_good.ipynb", "results.json", "mi_ecdf.png", "mi_ecdf.pdf"}
    assert set(about["files"]) == written
    for name, digest in about["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    given = {"seed": 3, "lr": 1.0, "widths": [1, 2], "name": text}
    assert about["parameters"] == given
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
    assert environment["MKL_NUM_THREADS"] == "7"  # the user's
    assert environment["OMP_NUM_THREADS"] == str(max(1, joblib.cpu_count() // 2))
    assert about["threads"] == int(environment["OMP_NUM_THREADS"])

    failed = project / "out" / "tiny" / "01_bad.failed"
    assert str(failed.relative_to(project)) in result.output
    assert "the reason <b>" in (failed / "error.txt").read_text()
    assert "\x1b" not in (failed / "error.txt").read_text()
    cells = nbformat.read(failed / "01_bad.ipynb", 4).cells
    ran = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert ran == [1, 2, 3, 4, None]
    assert earlier.read_text() == '{"numbers": {"earlier": 1}}'
    assert {p.suffix for p in (project / "out" / "tiny").glob(".*")} <= {".lock"}

    check_page(project / "out" / "tiny" / "index.html")

    notebook(project / "notebooks" / "01_bad.ipynb", "mended = 1")
    again = call("run", "01", "--profile", "tiny", "--output-dir", "out")
    assert again.exit_code == 0
    assert not failed.exists()
    assert not earlier.exists()  # it recorded nothing


def check_page(index: Path):
    """A gallery after `test_run`: all text escaped, links relative and alive, the failure shown."""
    elements = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            elements.append((tag, dict(attrs)))

    text = index.read_text()
    Parser().feed(text)
    [image] = [attributes for tag, attributes in elements if tag == "img"]
    assert image["src"] == "00_good/mi_ecdf.png"
    assert image["alt"] == "MI < 1 & <script>alert(1)</script>"
    links = [attributes["href"] for tag, attributes in elements if tag == "a"]
    links = [link for link in links if link[0] != "#"]
    named = {"00_good/00_good.ipynb", "00_good/mi_ecdf.pdf"}
    assert named | {"01_bad.failed/01_bad.ipynb"} <= set(links)
    for link in [*links, image["src"]]:
        assert (index.parent / link).is_file()
    assert not [tag for tag, _ in elements if tag == "script"]
    assert "<b>" not in text.replace("<b>Figure 2a</b>", "")
    assert "the reason &lt;b&gt;" in text


@pytest.fixture
def stand_in(project, monkeypatch):
    """Three more notebooks; what was executed, and on how many threads."""
    for name in ("02", "03", "04"):
        notebook(project / "notebooks" / f"{name}_some.ipynb")
    done = []

    def run_notebook(job, folder, variables, *_):
        done.append((job.notebook.stem[:2], int(variables["OMP_NUM_THREADS"])))
        if job.notebook.stem == "01_bad":
            raise RuntimeError("the reason")
        (folder / job.notebook.name).write_text("{}")

    monkeypatch.setattr(execution, "run_notebook", run_notebook)
    monkeypatch.setattr("joblib.cpu_count", lambda: 4)
    monkeypatch.setattr("shutil.which", {"nvidia-smi": None}.get)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return done


def test_several_notebooks_run_on_all_cores(project, stand_in, monkeypatch):
    result = call("run", "--jobs", 1)
    assert result.exit_code == 1
    assert "01_bad  failed" in result.output
    assert [name for name, _ in stand_in] == ["00", "01", "02", "03", "04"]
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


def test_the_gallery_shows_broken_runs_beside_the_others(tmp_path):
    for name, content in {"00_none": "", "01_broken": "{", "03_list": "[]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(content)
    (tmp_path / "02_file").mkdir()
    manifest.Manifest(files={"gone.png": ""}).save(tmp_path / "02_file")
    (tmp_path / "02_file" / "results.json").write_text('{"numbers": {"a": "\\ud800"}}')
    (tmp_path / "03_list" / "x.png").write_bytes(b"not a picture")
    (tmp_path / ".04_unfinished.tmp-0").mkdir()
    text = tables.gallery(tmp_path).read_text()
    assert text.count("<section") == text.count("Incomplete:") == 4


def test_kernel_start_is_tried_twice_but_never_a_cell(tmp_path):
    """A stand-in for papermill notes how often it is called."""
    notebook(tmp_path / "0.ipynb")
    for error, count in (("RuntimeError", 2), ("DeadKernelError", 1)):
        code = f"""import runpy, sys, papermill
def fail(*_, **__):
    print("called", flush=True)
    raise {error}("no reply")
papermill.execute_notebook = fail
runpy.run_module("uqlab.runs.execution", run_name="__main__")"""
        how = {"input": '["x", "y", {}]\n', "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, "-c", code], **how)
        assert done.stdout.count("called") == count, done.stderr
