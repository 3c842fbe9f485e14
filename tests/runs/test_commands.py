"""The `uqlab` command as its users meet it: a project of one's own, help in groups, completion by the Tab key."""

import itertools
import json
import os
import re
import sys

import pytest
from click.shell_completion import ShellComplete
from small_runs import call, two_notebooks  # noqa: F401  (a fixture)
from torch import nn

from uqlab import data
from uqlab.runs import cli, doctor, parameters, report
from uqlab.study import bring


def test_a_project_is_a_copy_to_work_in(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name in ("demo", "empty"):
        made = call("new", tmp_path / name)
        assert made.exit_code == 0, made.output
        assert f"{len(parameters.all_notebooks())} lessons" in made.output
    page = tmp_path / "demo" / "notebooks" / "00_uncertainty_decomposition.ipynb"
    assert not page.is_symlink()
    page.write_text("{}")
    again = call("new", tmp_path / "demo")
    assert again.exit_code == 2
    assert "name another" in again.output
    assert page.read_text() == "{}"
    below = call("new", page / "below")
    assert below.exit_code == 1
    assert "Error: [Errno 20] Not a directory" in below.output
    monkeypatch.chdir(tmp_path / "demo")
    assert parameters.find("00") == page
    monkeypatch.chdir(tmp_path)
    assert (
        parameters.find("00") == parameters.PAGES / page.name
    )  # where there is no project, the package's own


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
    for (key, judge), (blank, same) in zip(keys, blanks, strict=True):
        written, left = "".join(key["source"]), "".join(blank["source"])
        assert "### BEGIN SOLUTION\n" in written
        assert left.startswith(written.split("### BEGIN")[0])
        assert "SOLUTION" not in left
        names = {}
        exec(left, names)
        (function,) = [names[n] for n in names if callable(names[n])]
        with pytest.raises(NotImplementedError, match="your turn"):
            function(*[None] * function.__code__.co_argcount)
        assert key["metadata"] == blank["metadata"]
        assert judge == same
    untouched = [
        path.relative_to(tmp_path / "key")
        for path in (tmp_path / "key" / "notebooks").rglob("*")
        if path.is_file() and "your-turn" not in path.read_text()
    ]
    for path in untouched:
        assert (tmp_path / "blank" / path).read_text() == (
            tmp_path / "key" / path
        ).read_text()


def test_functions_to_write_have_the_metadata_of_nbgrader(tmp_path):
    call("new", tmp_path / "key")
    keys = {
        "grade",
        "grade_id",
        "locked",
        "points",
        "schema_version",
        "solution",
        "task",
    }
    found = []
    for cell, after in cells_to_write(tmp_path / "key"):
        write, judge = (each["metadata"]["nbgrader"] for each in (cell, after))
        assert write.keys() == judge.keys() == keys
        assert write["solution"]
        assert not any((write["grade"], write["locked"], judge["solution"]))
        assert judge["grade"]
        assert judge["locked"]
        assert judge["points"] > 0
        assert {write["schema_version"], judge["schema_version"]} == {3}
        assert "check.exercise" in "".join(after["source"])
        found += [write["grade_id"], judge["grade_id"]]
    assert found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "00", "-p", "seed", "1", "-p", "seed", "2"], "each NAME once"),
        (["report", "-s", "depth", "20", "-s", "depth", "32"], "each NAME once"),
        (["report", "--data", "digits", "-p", "dataset", "letters"], "dataset: given"),
        (["run", "--studies"], "no studies in .*notebooks; name"),
    ],
)
def test_no_value_takes_another_s_place_and_none_is_made_up(project, arguments, words):
    said = call(*arguments)
    assert said.exit_code == 2
    assert re.search(words, said.output)
    assert not (project / "report").exists()


def test_settings_of_a_model_are_data_and_files_that_the_page_finds(
    tmp_path, monkeypatch
):
    """The line of the guide: uqlab report uqlab.models:cifar_resnet -s depth 32."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best.pt").touch()
    typed = {"depth": "32", "rate": "1e-3", "name": "a, b", "file": "best.pt"}
    model = "uqlab.models:cifar_resnet"
    brought = {"dataset": None, "ood": (), "weights": (), "settings": typed}
    _, page, values = report.plan(None, None, tmp_path, model=model, **brought)
    settings = parameters.overrides(parameters.find(page), "quick", values)["settings"]
    assert settings == {
        **{"depth": 32, "rate": 1e-3, "name": "a, b"},
        "file": str(tmp_path / "best.pt"),
    }
    task = data.load("digits", limit=9)
    network = bring.model(model, task, settings={"depth": settings["depth"]}).model
    assert sum(isinstance(part, nn.Conv2d) for part in network.modules()) == 31


def test_pages_of_the_package_come_after_one_s_own(project, monkeypatch):
    """In a project of the user's with notebooks of its own, and below it."""
    package = parameters.PAGES
    lesson = "16_bring_your_model"
    for folder in (project, project / "notebooks"):
        monkeypatch.chdir(folder)
        assert parameters.find("00") == project / "notebooks" / "00_good.ipynb"
        assert parameters.find("01_bad.ipynb") == project / "notebooks" / "01_bad.ipynb"
        assert parameters.find("16") == package / f"{lesson}.ipynb"
        study = package / "studies" / f"{lesson}_study.ipynb"
        assert parameters.find("studies/16") == study
        assert parameters.all_notebooks() == [*map(parameters.find, ("00", "01"))]
    for name in ("/nowhere/00", "../00"):
        with pytest.raises(ValueError, match="no notebook of: 00_good, 01_bad"):
            parameters.find(name)


def test_jupyterlab_does_not_open_the_packages_own_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "PACKED", tmp_path)  # as in an installed package
    monkeypatch.setattr(parameters, "PAGES", tmp_path / "notebooks")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00.ipynb").touch()
    monkeypatch.chdir(tmp_path.parent)
    said = call("lab")
    assert said.exit_code == 2
    assert "first: uqlab new FOLDER" in said.output


def test_help_names_every_command_once():
    said = call("--help").output
    for name in cli.main.commands:
        assert said.count(f"\n  {name} ") == 1


@pytest.mark.parametrize(
    ("before", "typed", "offered"),
    [
        (["run"], "0", ["00_good", "01_bad"]),
        (["run", "00_good"], "01", ["01_bad"]),
        (["sweep"], "00", ["00_good"]),
        (["run", "--profile"], "t", ["tiny"]),
        ([], "swe", ["sweep"]),
    ],
)
def test_completion(project, before, typed, offered):
    complete = ShellComplete(cli.main, {}, "uqlab", "_UQLAB_COMPLETE")
    assert (
        sorted(item.value for item in complete.get_completions(before, typed))
        == offered
    )


def test_a_path_is_completed_by_the_shell(project):
    complete = ShellComplete(cli.main, {}, "uqlab", "_UQLAB_COMPLETE")
    (item,) = complete.get_completions(["run"], f".{os.sep}mine")
    assert item.type == "file"


def test_the_doctor_finds_data_and_caches(project, monkeypatch, tmp_path):
    """By a kernel of its own; the folders are those that runs would use."""
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    (tmp_path / "data" / "mnist" / "t10k-labels-idx1-ubyte.gz").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_bytes(bytes(2_000_000))
    monkeypatch.setenv("UQLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("UQLAB_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(doctor, "lacking", list)
    said = call("doctor")
    assert said.exit_code == 0, said.output
    assert f"\ndata       {tmp_path / 'data'}: mnist\n" in said.output
    assert f"\ntrainings  {tmp_path / 'kept'}: 1 files, 2 MB\n" in said.output
    assert f"\npages      2 in {project / 'notebooks'}\n" in said.output
    assert sys.executable in said.output
    assert said.output.endswith("\nall is well\n")


def test_the_doctor_says_what_is_wrong(project, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE", "raise ImportError('libtorch is gone')")
    monkeypatch.setattr(doctor, "lacking", lambda: ["uqlab requires x."])
    said = call("doctor")
    assert said.exit_code == 1
    assert "wrong      uqlab requires x. pip install it" in said.output
    assert (
        "does not answer: ImportError: libtorch is gone; install uqlab anew"
        in said.output
    )
    assert "all is well" not in said.output


def test_the_doctor_says_what_it_cannot_check_without_pip(project, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE", "print('{}')")
    assert "not checked" not in call("doctor").output
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert "without pip here, not checked" in call("doctor").output
