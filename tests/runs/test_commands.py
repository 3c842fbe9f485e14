"""The `uqlab` command as its users meet it: a project of one's own, reports, the doctor."""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from small_runs import call, two_notebooks  # noqa: F401  (a fixture)
from torch import nn

from uqlab import data
from uqlab.runs import cli, execution, parameters
from uqlab.study import bring


def test_a_project_is_a_copy_to_work_in(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name in ("demo", "empty"):
        made = call("new", tmp_path / name)
        assert made.exit_code == 0, made.output
    page = tmp_path / "demo" / "notebooks" / "00_uncertainty_decomposition.ipynb"
    assert not page.is_symlink()
    page.write_text("{}")
    again = call("new", tmp_path / "demo")
    assert again.exit_code == 2
    assert "name another" in again.output
    assert page.read_text() == "{}"
    below = call("new", page / "below")
    assert below.exit_code == 1
    assert "Not a directory" in below.output
    monkeypatch.chdir(tmp_path / "demo")
    assert parameters.find("00") == page
    monkeypatch.chdir(tmp_path)  # without a project, the package's own
    assert parameters.find("00") == parameters.PAGES / page.name


def cells_to_write(folder):
    """The cells tagged `your-turn` and the cells after them, of all lessons of a folder."""
    for page in sorted((folder / "notebooks").glob("[0-9]*.ipynb")):
        cells = json.loads(page.read_text())["cells"]
        for cell, after in itertools.pairwise(cells):
            if "your-turn" in cell["metadata"].get("tags", []):
                yield cell, after


def test_a_student_gets_the_functions_to_write_without_their_key(tmp_path):
    call("new", tmp_path / "key")
    made = call("new", tmp_path / "blank", "--student")
    assert made.exit_code == 0, made.output
    keys, blanks = (list(cells_to_write(tmp_path / f)) for f in ("key", "blank"))
    assert len(keys) == len(blanks) > 0
    identities = []
    for (key, judge), (blank, same) in zip(keys, blanks, strict=True):
        written, left = "".join(key["source"]), "".join(blank["source"])
        assert left.startswith(written.split("### BEGIN SOLUTION\n")[0])
        assert "SOLUTION" not in left
        names = {}
        exec(left, names)
        (function,) = [names[n] for n in names if callable(names[n])]
        with pytest.raises(NotImplementedError, match="your turn"):
            function(*[None] * function.__code__.co_argcount)
        assert key["metadata"] == blank["metadata"]
        assert judge == same
        write, grade = (each["metadata"]["nbgrader"] for each in (key, judge))
        assert write["solution"]
        assert not write["grade"]
        assert grade["grade"]
        assert grade["locked"]
        assert grade["points"] > 0
        identities += [write["grade_id"], grade["grade_id"]]
    assert len(set(identities)) == len(identities)
    for path in (tmp_path / "key" / "notebooks").rglob("*"):
        if path.is_file() and "your-turn" not in path.read_text():
            copy = tmp_path / "blank" / path.relative_to(tmp_path / "key")
            assert copy.read_text() == path.read_text()


def test_settings_of_a_model_are_data_and_files_that_the_page_finds(
    tmp_path, monkeypatch
):
    """The line of the guide: uqlab report uqlab.models:cifar_resnet -s depth 32."""
    monkeypatch.chdir(tmp_path)
    for name in ("best.pt", "mine.npz", "net.py"):
        (tmp_path / name).touch()
    (tmp_path / "digits").mkdir()  # and yet the set of this name is meant
    planned = []
    monkeypatch.setattr(execution, "run_all", lambda jobs, **_: planned.extend(jobs))
    typed = {"depth": "32", "rate": "1e-3", "name": "a, b", "file": "best.pt"}
    options = [word for pair in typed.items() for word in ("-s", *pair)]
    options += ["--ood", "digits", "--data", "mine.npz[0-3]", "--weights", "*.pt"]
    call("report", "net.py:make", *options)
    assert planned[0].parameters["settings"] == {
        **{"depth": 32, "rate": 1e-3, "name": "a, b"},
        "file": str(tmp_path / "best.pt"),
    }
    assert planned[0].parameters["model"] == f"{tmp_path}/net.py:make"
    assert planned[0].parameters["ood"] == ["digits"]
    assert planned[0].parameters["dataset"] == f"{tmp_path}/mine.npz[0-3]"
    assert planned[0].parameters["weights"] == [f"{tmp_path}/*.pt"]
    task, resnet = data.load("digits", limit=9), "uqlab.models:cifar_resnet"
    network = bring.model(resnet, task, settings={"depth": 32}).model
    assert sum(isinstance(part, nn.Conv2d) for part in network.modules()) == 31
    said = call("report", "--data", "digits", "-p", "dataset", "letters")
    assert "dataset: given by an option and by -p" in said.output


@pytest.mark.parametrize(
    ("advice", "title"),
    [
        ("Divide its logits by 2: `fit` (06).", "What to do next (in brackets"),
        ("Divide the logits by 2.00.", "What to do next\n"),
    ],
)
def test_a_report_prints_what_it_has(tmp_path, monkeypatch, advice, title):
    """No line on claims where the page makes none, no word on brackets without any."""

    def compute(jobs):
        (job,) = jobs
        job.folder.mkdir(parents=True)
        shutil.copy(job.notebook, job.folder / f"{job.folder.name}.ipynb")
        table = {"index": ["accuracy"], "columns": ["value"], "data": [["0.9"]]}
        results = {"numbers": {"next": [advice]}, "tables": {"report": table}}
        (job.folder / "results.json").write_text(json.dumps(results))
        job.status = "ok"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(execution, "run_all", compute)
    (tmp_path / "run.npz").touch()
    said = call("report", "--logits", "run.npz").output
    assert f"\n{title}" in said
    assert "claims" not in said
    assert "\n\n\n" not in said
    assert said.rstrip().endswith("ok: 1")


def test_jupyterlab_does_not_open_the_packages_own_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "PACKED", tmp_path)  # as in an installed package
    monkeypatch.setattr(parameters, "PAGES", tmp_path / "notebooks")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00.ipynb").touch()
    monkeypatch.chdir(tmp_path.parent)
    said = call("lab")
    assert said.exit_code == 2
    assert "first: uqlab new FOLDER" in said.output


@pytest.mark.parametrize(
    "command",
    [
        ["run", "00"],
        ["sweep", "00", "-g", "seed", "0:2"],
        ["collect", "00"],
        ["gallery"],
    ],
)
def test_a_file_is_no_folder_for_results(command, tmp_path):
    file = tmp_path / "file"
    file.touch()
    said = call(*command, "--output-dir", file)
    assert said.exit_code == 2
    assert "is a file" in said.output
    assert list(tmp_path.iterdir()) == [file]


def test_the_doctor_finds_data_and_caches(project, monkeypatch, tmp_path):
    """By a kernel of its own; the folders are those that runs would use."""
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    (tmp_path / "data" / "mnist" / "t10k-labels-idx1-ubyte.gz").touch()
    monkeypatch.setenv("UQLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("UQLAB_CACHE", str(tmp_path / "kept"))
    said = call("doctor").output
    for line in [
        rf"data +{tmp_path / 'data'} mnist",
        rf"trainings +{tmp_path / 'kept'}",
        rf"notebooks +2 in {project / 'notebooks'}",
        rf"Python .*{re.escape(sys.executable)}",
        "(all is well|wrong .*)",
    ]:
        assert re.search(f"^{line}$", said, re.MULTILINE), line


def test_the_doctor_says_what_is_wrong(project, monkeypatch):
    monkeypatch.setattr(cli, "PROBE", "raise ImportError('libtorch is gone')")
    said = call("doctor")
    assert said.exit_code == 1
    assert "wrong      ImportError: libtorch is gone; install uqlab anew" in said.output
    assert "all is well" not in said.output
    assert Path(parameters.PACKED.with_suffix(".md")).is_file()
