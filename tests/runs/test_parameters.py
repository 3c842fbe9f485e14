"""Parameters and profiles: values given as text, and what is refused before anything runs."""

import json
import math
import re
from pathlib import Path

import pytest
from nbconvert import HTMLExporter
from papermill import PapermillExecutionError, execute_notebook
from small_pages import checking
from small_runs import PARAMETERS, call, notebook, two_notebooks  # noqa: F401  (a fixture)

import uqlab
from uqlab import data, runs
from uqlab.core.files import read_json
from uqlab.runs import parameters

PAGES = parameters.all_notebooks()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "-3", -3),
        ("lr", "1e-3", 1e-3),
        ("lr", "1", 1.0),
        ("widths", "[4, 8]", [4, 8]),
        ("widths", "[a, 1]", ["a", 1]),
        ("name", "1:30", "1:30"),
        ("name", "5", "5"),
        ("name", "__import__('os').getcwd()", "__import__('os').getcwd()"),
        ("flag", "true", True),
        ("nothing", "1:30", "1:30"),
        ("nothing", "null", None),
        ("nothing", "{a: 1}", {"a": 1}),
        ("seed", "010", 10),
        ("widths", "[010, 1:30, 1_0]", [10, "1:30", "1_0"]),
        ("widths", "[no, 'true', ~, 2026-01-01]", ["no", "true", None, "2026-01-01"]),
        ("widths", "[a, 1e-3, .5, -2]", ["a", 1e-3, 0.5, -2]),
        ("nothing", "{lr: 1e-3, a: true}", {"lr": 1e-3, "a": True}),
    ],
)
def test_values_are_data_of_the_default_s_type(tmp_path, name, text, value):
    path = notebook(
        tmp_path / "0.ipynb",
        parameters=PARAMETERS + "\nflag: bool = False\nnothing = None",
    )
    found = parameters.overrides(path, changes={name: text})
    assert found == {name: value}
    assert type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "sead", "1"], "unknown parameter 'sead'; 00_good has: seed"),
        (
            ["-p", "seed", "abc"],
            "00_good: parameter seed must be of type int, as 0, got 'abc'",
        ),
        (["-p", "seed", "1.5"], "seed must be of type int"),
        (["-p", "seed", "True"], "seed must be of type int"),
        (["-p", "widths", "3"], r"widths must be of type list, as \(1, 2\)"),
        (["-p", "output_dir", "x"], "use --output-dir"),
        (["-p", "seed", "1", "-p", "seed", "2"], "each NAME once"),
        (["--profile", "papr"], "no profile 'papr'; it has: quick, tiny"),
        (["99"], "'99' is not the start of one notebook's name"),
        (["0"], "'0' is not .* of: 00_good, 01_bad"),
        (["--studies"], "no studies in this folder"),
    ],
)
def test_bad_input_is_an_error_before_anything_runs(project, arguments, message):
    result = call("run", *arguments)
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.split())), result.output
    assert not (project / "figures").exists()


@pytest.mark.parametrize(
    "line", ["lr = 1 / 3", "a, b = 1, 2", "%matplotlib inline", "import os"]
)
def test_a_parameters_cell_that_computes_is_refused(tmp_path, line):
    path = notebook(tmp_path / "0.ipynb", parameters=f"seed = 0\n{line}")
    with pytest.raises(ValueError, match="next cell"):
        parameters.defaults(path)


def test_what_no_manifest_can_hold_is_refused_before_a_run(project, monkeypatch):
    monkeypatch.setattr(runs.execution, "run_notebook", None)
    notebook(project / "set.ipynb", parameters="sizes = {1, 2}")
    for command in ("run", "sweep"):
        result = call(command, "set.ipynb")
        assert result.exit_code == 2
        assert "set.sizes is a set; use" in result.output


def test_a_notebook_without_a_tagged_cell_says_so(project):
    notebook(project / "bare.ipynb", parameters="")
    result = call("run", "bare.ipynb", "-p", "seed", "1")
    assert "no cell is tagged `parameters`" in result.output


def test_broken_files_are_named(tmp_path):
    path = notebook(tmp_path / "0.ipynb")
    for entries in ("[1, 2]", "{'0': [1]}"):
        (tmp_path / "profiles.yaml").write_text(f"tiny: {entries}")
        with pytest.raises(ValueError, match=r"profiles\.yaml must map profile"):
            parameters.overrides(path, "tiny")
    (tmp_path / "profiles.yaml").write_text("tiny:\n  '0':")  # its own values
    assert parameters.overrides(path, "tiny") == {}
    (tmp_path / "profiles.yaml").unlink()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with pytest.raises(ValueError, match=r"0\.ipynb is not a notebook .* byte-order"):
        parameters.overrides(path)


def test_a_profile_means_what_a_command_line_means(tmp_path):
    path = notebook(tmp_path / "0.ipynb")
    written = (
        "a: {b: &a {name: no}}\ntiny: {'0': {<<: *a, seed: 010, widths: [1e-3, 1:30]}}"
    )
    (tmp_path / "profiles.yaml").write_text(written)
    found = parameters.overrides(path, "tiny")
    assert found == {"name": "no", "seed": 10, "widths": [1e-3, "1:30"]}


def test_profiles_name_notebooks_and_parameters_that_exist():
    folder = Path(uqlab.__file__).parents[1] / "notebooks"
    for notebooks in parameters.profiles(folder / "any").values():
        for stem, values in notebooks.items():
            known = parameters.defaults(parameters.find(stem))
            parameters.checked(values, known, stem)


def test_a_notebook_without_a_profile_is_refused_and_left_out(project):
    notebook(project / "notebooks" / "02_third.ipynb", "1 + 1")
    for ask in (
        lambda: runs.execute("02", profile="tiny"),
        lambda: runs.run_one("02", profile="tiny"),
        lambda: runs.sweep("02", {"seed": [0]}, profile="tiny"),
    ):
        with pytest.raises(ValueError, match="02_third has no profile 'tiny'"):
            ask()
    said = call("run", "--profile", "tiny", "--dry-run").output
    assert "would run 2 of 2" in said
    assert "02_third" not in said


def test_a_missing_profile_is_offered_where_a_study_of_that_number_has_it():
    lesson, study = parameters.find("03"), parameters.find("studies/03")
    offer = f"has no profile 'paper'.*run {study.stem} --profile paper"
    with pytest.raises(ValueError, match=f"(?s){offer}"):
        parameters.overrides(lesson, "paper")
    assert parameters.find(study.stem) == study
    assert parameters.overrides(study, "paper")


def test_folders_and_patterns_are_those_of_the_callers_folder_too(project):
    (project / "nets" / "digits").mkdir(parents=True)
    (project / "nets" / "best").touch()
    (project / "digits").mkdir()  # and yet the set of this name is meant
    (project / "letters").touch()
    (project / "my model.py").touch()
    here = project.as_posix()
    for given, meant in {
        "nets/": f"{here}/nets",
        "./nets": f"{here}/nets",
        "nets/*": f"{here}/nets/*",
        "[nets/best , digits]": f"[{here}/nets/best , digits]",
        "my model.py:make": f"{here}/my model.py:make",
        "nets/none": "nets/none",
        "letters": "letters",
        "It is 1/2.": "It is 1/2.",
    }.items():
        for command in (["run", "00"], ["sweep", "00", "-g", "seed", "0:1"]):
            said = call(*command, "-p", "name", given, "--dry-run").output
            if command[0] == "run":
                assert str({"name": meant}) in said
            else:
                assert f"'name': {meant!r}" in said


def test_own_files_are_those_of_the_callers_folder(project):
    """Typed by name, they are found by a page that runs in another folder."""
    (project / "mine.npz").touch()
    (project / "mine.csv.gz").touch()
    here = project.as_posix()
    for given, meant in {
        "mine.npz": f"{here}/mine.npz",
        "mine.csv.gz": f"{here}/mine.csv.gz",
        "./mine.npz[0-3]": f"{here}/mine.npz[0-3]",
        "other.npz": "other.npz",
        "digits": "digits",
        """["mine.npz[1]", 'letters', mine.npz]""": f"""["{here}/mine.npz[1]", 'letters', {here}/mine.npz]""",
    }.items():
        said = call("run", "00", "-p", "name", given, "--dry-run").output
        assert str({"name": meant}) in said


def test_pages_of_the_package_come_after_one_s_own(project, monkeypatch):
    package, lesson = parameters.PAGES, "16_bring_your_model"
    for folder in (project, project / "notebooks"):
        monkeypatch.chdir(folder)
        assert parameters.find("00") == project / "notebooks" / "00_good.ipynb"
        assert parameters.find("01_bad.ipynb") == project / "notebooks" / "01_bad.ipynb"
        assert parameters.find("16") == package / f"{lesson}.ipynb"
        study = package / "studies" / f"{lesson}_study.ipynb"
        assert parameters.find("studies/16") == study
        assert parameters.all_notebooks() == [*map(parameters.find, ("00", "01"))]
    for name in ("/nowhere/00", "../00"):
        with pytest.raises(ValueError, match="of: 00_good, 01_bad"):
            parameters.find(name)


# What a notebook checks itself ---------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem[:2])
def test_a_page_checks_its_parameters_before_it_begins(path):
    """As its own lines do it, with the values of every profile."""
    known = parameters.defaults(path)
    lines = checking(path)
    assert lines.startswith("runs.check(globals()")
    assert "dataset" not in known or "check(dataset" in lines
    for profile in parameters.profiles(path).values():
        legal = known | parameters.checked(profile.get(path.stem, {}), known, path.stem)
        exec(lines, legal | {"runs": runs, "data": Anything, "check": Anything.check})


class Anything:
    """Stands in for the data sets, of which some must be fetched."""

    @staticmethod
    def check(*_, **__):
        pass


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"members": 1}, "members must be an integer >= 2, got 1"),
        ({"members": 2.5}, "members must be an integer"),
        ({"epochs": "5"}, "epochs must be an integer"),
        ({"ood": []}, "ood must be a list"),
        ({"ood": "letters"}, "ood must be a list"),
        ({"lr": math.nan}, "lr must be in .*got nan"),
        ({"level": 1.0}, r"level must be in \(0, 1\), got 1.0"),
        ({"seeds": [3, 3]}, "seeds must be a list of different values"),
        ({"seeds": [3, 4, 3]}, "seeds must be a list of different values"),
        ({"sizes": [1, 0]}, r"sizes\[1\] must be an integer >= 1, got 0"),
        ({"precision": "float64"}, "precision must be one of .*bfloat16"),
    ],
)
def test_wrong_parameters_are_refused_by_name(wrong, words):
    with pytest.raises(ValueError, match=words):
        runs.check(wrong)


@pytest.mark.parametrize(
    ("rules", "legal", "wrong"),
    [
        ({}, {"epochs": 3, "seed": 2**40, "other": object()}, {"epochs": 0}),
        ({"ood": str}, {"ood": "letters"}, {"epochs": 0}),
        ({"held_out": "(0, 1)"}, {"held_out": 0.3}, {"held_out": 1.0}),
        ({"enough": "(0, 1]"}, {"enough": 1.0}, {"enough": 0}),
        ({"shown": (2, 3)}, {"shown": 2}, {"shown": 4}),
        ({"methods": [str] * 2}, {"methods": []}, {"methods": ["deep"]}),
        ({"widths": ["(0, inf)"] * 2}, {"widths": [1, 2.0]}, {"widths": [1.0, 1.0]}),
    ],
)
def test_a_page_may_have_rules_of_its_own(rules, legal, wrong):
    runs.check(legal, **rules)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
        runs.check(wrong, **rules)


@pytest.mark.parametrize(
    ("page", "given", "left"),
    [
        ("03", {"members": 5}, {"sizes": [1]}),
        ("02", {"members": 8}, {"sizes": [1, 2, 4], "counts": [2, 4, 8]}),
        ("studies/07", {"top": 20}, {"k": 20}),
        ("studies/09", {"ood": ["letters"]}, {"near": ["letters"]}),
        ("03", {"members": 9, "sizes": [2]}, "must divide members=9"),
        ("02", {"members": 7}, "members=7 must be even"),
        ("studies/09", {"near": ["leters"]}, "got .leters"),
    ],
)
def test_a_page_adapts_its_defaults_or_refuses_what_leaves_nothing(page, given, left):
    path = parameters.find(page)
    names = parameters.defaults(path) | given
    names |= {"runs": runs, "data": data, "check": data.check}
    if isinstance(left, dict):
        exec(checking(path), names)
        assert {name: names[name] for name in left} == left
        return
    with pytest.raises(ValueError, match=left):
        exec(checking(path), names)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("digits", "leters"), "name must be .*letters.* got .leters"),
        (("digits[3]",), "must have labels of two classes or more"),
        (("targets.csv",), "a table the column label"),
        (("spoken-digits", "texts.tsv"), "texts holds texts"),
    ],
)
def test_sets_that_a_page_cannot_take_are_refused(sets, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"word {i}\t{i % 2}" for i in range(30)]
    Path("texts.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    Path("targets.csv").write_text("text,target\na,0\nb,1\n")
    data.check("digits", "letters", "")
    data.check("texts.tsv", kinds=["images", "texts"])
    with pytest.raises(ValueError, match=words):
        data.check(*sets, kinds=["images"])


# papermill alone -----------------------------------------------------------------------

BEFORE = ["", "import torch\nx = 1", "widths = [0.5, 8.0]  # factors\nmembers = 4", "x"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("memebrs = 3", "unknown parameter 'memebrs'; .* has: widths, members"),
        (
            'widths = "[0.5, 8]"',
            r"-y\): .*widths must be of type list, as .*, got '\[0.5, 8\]'",
        ),
        ("members = 2.5", "members must be of type int, as .*, got 2.5"),
        ("members = 3\nwidths = [1, 2]", ""),
    ],
)
def test_what_papermill_writes_below_the_parameters_is_checked(given, words):
    cells = {"In": [*BEFORE, f"# Parameters\n{given}", "other = 1"]}
    if not words:
        return runs.check(cells)
    with pytest.raises(ValueError, match=words):
        runs.check(cells)


def test_an_executed_page_refuses_a_misspelt_name_and_exports_its_explorers(tmp_path):
    page = notebook(
        tmp_path / "page.ipynb",
        "from uqlab import runs, widgets\nruns.check(globals())",
        'widgets.guess("how many?", 1, 9, answer=7, then="It was seven.")',
    )
    out = str(tmp_path / "out.ipynb")
    how = {"kernel_name": "python3", "language": "python", "progress_bar": False}
    with pytest.raises(PapermillExecutionError, match="unknown parameter 'sede'"):
        execute_notebook(str(page), out, {"sede": 1}, **how)
    execute_notebook(str(page), out, {"seed": 1}, **how)
    html = HTMLExporter().from_filename(out)[0]
    assert "<iframe" in html
    assert "It was seven." in html
    assert "widget-view" not in html


# What a profile needs ------------------------------------------------------------------


def test_a_dry_run_says_what_a_profile_needs(project, monkeypatch):
    """By the notebook's metadata; whether data are here, by uqlab.data."""
    page = project / "notebooks" / "00_good.ipynb"
    content = json.loads(page.read_text())
    sizes = {"mnist": 11_594_722, "kmnist": 21_240_888}
    needs = {"data": sizes, "notes": ["one H100: 3 hours, estimated"]}
    content["metadata"]["uqlab"] = {"needs": {"tiny": needs}}
    page.write_text(json.dumps(content))
    (project / "sets" / "mnist").mkdir(parents=True)
    (project / "sets" / "mnist" / "t10k-labels-idx1-ubyte.gz").touch()
    monkeypatch.setenv("UQLAB_DATA", str(project / "sets"))
    said = call("run", "00", "--profile", "tiny", "--dry-run").output
    assert "00_good needs mnist: here\n" in said
    assert "00_good needs kmnist: 21 MB to fetch\n" in said
    assert "00_good needs one H100: 3 hours, estimated\n" in said
    assert "needs" not in call("run", "00", "--dry-run").output


def test_every_paper_profile_says_what_it_needs():
    profiles = parameters.profiles(parameters.PAGES / "any")
    for stem in profiles["paper"]:
        about = read_json(parameters.find(stem))["metadata"]["uqlab"]["needs"]["paper"]
        assert about["data"].keys() | {"notes"}
        hours = [note for note in about["notes"] if "H100" in note]
        assert len(hours) == 1
        assert re.search("estimated|measured|unknown", hours[0])
