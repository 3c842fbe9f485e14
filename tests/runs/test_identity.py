"""What makes a run the same run: notebook source and parameters, and neither its data nor its code changed since."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_runs import call, notebook
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)

import uqlab
from uqlab import runs
from uqlab.core.files import read_json, sha256, write
from uqlab.runs import execution, gallery, identity, parameters, sweeps


@pytest.fixture
def package(tmp_path_factory, monkeypatch) -> Path:
    """A package that can be changed, in place of uqlab's own files; the stand-in's runs import its `__init__.py`."""
    folder = tmp_path_factory.mktemp("package")
    for name in ("__init__.py", "other.py"):
        (folder / name).write_text("1")
    monkeypatch.setattr(identity, "PACKAGE", folder)
    return folder


def statuses(report: sweeps.Report) -> list[str]:
    return [outcome.status for outcome in report.outcomes]


def manifest_of(folder: Path) -> dict:
    return read_json(folder / "manifest.json")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("digits", []),
        ("mine.npz", ["mine.npz"]),
        ("mine.npz[0-3]", ["mine.npz"]),
        ("/a b/mine.npz[0, 2]", ["/a b/mine.npz"]),
        (["letters", "x/mine.npz[1]", "mine.npz"], ["x/mine.npz", "mine.npz"]),
        ({"ood": ("mine.npz",), "of": 3}, ["mine.npz"]),
        ("mine.tsv.gz", ["mine.tsv.gz"]),
        ("mine.npz.txt", []),
    ],
)
def test_data_files_that_parameters_name(tmp_path, value, names):
    assert list(identity.data_files({"any": value}, tmp_path)) == [
        tmp_path / name for name in names
    ]


def test_data_files_in_the_home_folder(tmp_path):
    assert list(identity.data_files("~/mine.npz", tmp_path)) == [
        Path.home() / "mine.npz"
    ]


def test_a_changed_module_makes_runs_stale_and_another_does_not(
    project, computed, package, capsys
):
    first = sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    (package / "other.py").write_text("2")  # no run imported it
    assert (
        statuses(sweeps.sweep("00", {"seed": "0:2"}, progress=False))
        == ["done before"] * 2
    )
    assert sweeps.run_one("00", {"seed": 0}) == first.outcomes[0].folder
    assert len(computed) == 2
    assert "stale" not in capsys.readouterr().err

    (package / "__init__.py").write_text("2")
    kept = sweeps.sweep("00", {"seed": "0:3"}, progress=False, keep_stale=True)
    said = "2 of 2 finished runs are stale: __init__.py changed since; "
    assert capsys.readouterr().err == f"{said}kept\n"
    assert statuses(kept) == ["done before"] * 2 + ["ok"]
    assert [outcome.reason for outcome in kept.outcomes] == [
        "__init__.py changed since"
    ] * 2 + [""]
    assert sweeps.summary(kept) == (
        "status        runs\nstale, kept      2\nok               1\n\nclaim  holds in\neven   2 of 3 runs"
    )
    assert (
        sweeps.run_one("00", {"seed": 0}, keep_stale=True) == first.outcomes[0].folder
    )
    assert len(computed) == 3

    again = sweeps.sweep("00", {"seed": "0:3"}, progress=False)
    assert (
        capsys.readouterr().err
        == f"{said.replace('of 2', 'of 3')}computed anew (--keep-stale keeps them)\n"
    )
    assert statuses(again) == ["ok", "ok", "done before"]
    assert [outcome.folder for outcome in again.outcomes[:2]] == [
        outcome.folder for outcome in first.outcomes
    ]
    assert computed[3:] == [{"seed": 0}, {"seed": 1}]
    assert (
        statuses(sweeps.sweep("00", {"seed": "0:3"}, progress=False))
        == ["done before"] * 3
    )


def test_run_one_computes_a_stale_run_anew(project, computed, package):
    folder = sweeps.run_one("00")
    (package / "__init__.py").write_text("2")
    assert sweeps.run_one("00") == folder
    assert len(computed) == 2
    (package / "__init__.py").unlink()  # the module was moved
    assert identity.Present().stale(manifest_of(folder)) == "__init__.py changed since"


@pytest.mark.parametrize("name", ["mine.npz", "mine.npz[0-1]"])
def test_a_changed_data_file_makes_stale_the_runs_that_name_it(project, computed, name):
    path = (
        project / "notebooks" / "mine.npz"
    )  # where the kernel looks for a relative path
    np.savez(path, x=np.zeros((4, 2, 2)))
    grid = {"name": ["digits", name]}
    sweeps.sweep("00", grid, progress=False)
    os.utime(path, (1, 1))
    assert (
        statuses(sweeps.sweep("00", grid, progress=False)) == ["done before"] * 2
    )  # its content is the same
    np.savez(path, x=np.ones((4, 2, 2)))
    kept = sweeps.sweep("00", grid, progress=False, keep_stale=True)
    assert [outcome.reason for outcome in kept.outcomes] == [
        "",
        "mine.npz changed since",
    ]
    again = sweeps.sweep("00", grid, progress=False)
    assert statuses(again) == ["done before", "ok"]
    assert manifest_of(again.outcomes[1].folder)["data"] == {str(path): sha256(path)}


@pytest.mark.parametrize("lacking", ["code", "data"])
def test_runs_of_before_there_were_digests_are_stale(project, computed, lacking):
    folder = sweeps.run_one("00")
    manifest = manifest_of(folder)
    del manifest[lacking]
    write(folder / "manifest.json", json.dumps(identity.sealed(manifest)))
    assert sweeps.finished(folder)
    with pytest.warns(
        UserWarning, match="1 of 1 runs are stale: no record of its code"
    ):
        assert list(runs.load(folder.parent).run_stale) == [True]
    assert statuses(sweeps.sweep("00", {}, progress=False)) == ["ok"]


def test_sweep_command_says_how_many_are_stale(project, computed, package):
    arguments = ["sweep", "00", "-g", "seed", "0:2"]
    assert "stale" not in call(*arguments).output
    (package / "__init__.py").write_text("2")
    kept = call(*arguments, "--keep-stale", "--quiet")
    assert kept.exit_code == 0
    assert (
        "2 of 2 finished runs are stale: __init__.py changed since; kept\n"
        in kept.output
    )
    assert "stale, kept      2" in kept.output
    assert len(computed) == 2
    output = call(*arguments).output
    stale = "2 of 2 finished runs are stale: __init__.py changed since; computed"
    assert re.search(
        rf"2 runs, 0 done before, 2 to do(, about [\d:]+)?\n{stale}", output
    )
    assert len(computed) == 4


# --- Tables and the page ---------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(project, computed, package) -> Path:
    """The folder of a sweep of three runs, two of them stale."""
    sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    (package / "__init__.py").write_text("2")
    return sweeps.sweep("00", {"seed": "0:3"}, progress=False, keep_stale=True).folder


def test_a_table_never_mixes_in_silence(mixed):
    with pytest.warns(
        UserWarning,
        match=r"2 of 3 runs are stale: __init__\.py changed since \(code: \w{8}, \w{8}\)",
    ):
        frame = runs.load(mixed)
    assert list(frame.run_stale) == [True, True, False]
    assert frame.code[0] == frame.code[1] != frame.code[2]
    result = call("collect", "00")
    assert "2 of 3 runs are stale: __init__.py changed since (code: " in result.output
    assert list(runs.load(mixed / "table.csv").code) == list(frame.code)


def test_of_equal_parameters_the_latest_run_is_in_the_table(project, computed):
    """A run that an earlier uqlab left under another name is not a second sample of the same point."""
    folder = sweeps.run_one("00")
    shutil.copytree(folder, folder.with_name("0" * 16))
    manifest = manifest_of(folder)
    write(
        folder.with_name("0" * 16) / "manifest.json",
        json.dumps(identity.sealed(manifest | {"started": "2025-01-01"})),
    )
    with pytest.warns(
        UserWarning, match="0: there is a later run of the same parameters"
    ):
        assert list(runs.load(folder.parent).run) == [folder.name]


def test_the_page_marks_stale_runs(mixed, package):
    single = execution.execute(
        parameters.find("00"), {}, profile="quick", folder=mixed.parent / "00_some"
    )
    mark, row = (
        '<p class="stale">Stale: __init__.py changed since</p>',
        '<span class="stale">stale</span></summary>',
    )
    text = gallery.build(mixed.parent).read_text()
    assert (text.count(mark), text.count(row)) == (2, 2)
    assert marked(text) == [("0", True), ("1", True), ("2", False)]
    (package / "__init__.py").write_text("3")
    text = gallery.build(mixed.parent).read_text()
    assert (text.count(mark), text.count(row)) == (4, 3)
    assert manifest_of(single)["code"]


def marked(text: str) -> list[tuple[str, bool]]:
    """(seed, whether it is marked) of the runs on the page."""
    lines = [line for line in text.splitlines() if "<summary>seed = " in line]
    return [(line.partition("seed = ")[2][0], "stale" in line) for line in lines]


# --- A real kernel ---------------------------------------------------------------------------------------------------


def test_kernels_note_what_they_import(tmp_path):
    """Also what a cell imports inside a function, or after the last record; and where nothing is recorded."""
    source = "def late():\n    from uqlab.core import checks\nlate()"
    path = notebook(tmp_path / "0.ipynb", source, parameters="x = 1")
    folder = runs.execute(path, folder=tmp_path / "out")
    code = manifest_of(folder)["code"]
    assert set(code) == {
        f"{name}.py"
        for name in (
            "__init__",
            "core/__init__",
            "core/files",
            "core/recording",
            "core/checks",
        )
    }
    assert all(
        sha256(identity.PACKAGE / name) == digest for name, digest in code.items()
    )
    assert identity.Present().stale(manifest_of(folder)) == ""
    assert sorted(file.name for file in folder.iterdir()) == [
        "0.ipynb",
        "manifest.json",
        "results.json",
    ]


def test_a_notebook_that_records_does_not_depend_on_the_runner(tmp_path):
    path = notebook(
        tmp_path / "0.ipynb",
        "from uqlab import runs\nruns.record('x', 1)",
        parameters="x = 1",
    )
    code = manifest_of(runs.execute(path, folder=tmp_path / "out"))["code"]
    assert [name for name in code if name.startswith("runs/")] == ["runs/__init__.py"]


def test_sweeps_follow_the_code_of_a_checkout(tmp_path):
    """End to end, in processes that import a copy of the package, some files of which change."""
    package = tmp_path / "lib" / "uqlab"
    shutil.copytree(
        Path(uqlab.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    notebook(tmp_path / "0.ipynb", "from uqlab.core import checks", parameters="x = 1")
    environment = os.environ | {"PYTHONPATH": str(package.parent)}

    def sweep(*options: str) -> str:
        command = [sys.executable, "-m", "uqlab.runs", "sweep", "0.ipynb", *options]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout + done.stderr

    assert "1 runs, 0 done before, 1 to do" in sweep()
    for name in ("core/devices.py", "uncertainty.py", "runs/sweeps.py"):
        with (package / name).open("a") as file:
            file.write("# changed\n")
    assert "1 runs, 1 done before, 0 to do" in sweep()
    with (package / "core" / "checks.py").open("a") as file:
        file.write("# changed\n")
    kept = sweep("--keep-stale")
    assert "1 of 1 finished runs are stale: core/checks.py changed since; kept" in kept
    assert "1 runs, 1 done before, 0 to do" in kept
    assert "1 runs, 0 done before, 1 to do" in sweep()
    assert "1 runs, 1 done before, 0 to do" in sweep()


def test_a_damaged_name_of_the_checksum_does_not_take_it_away(tmp_path):
    write(tmp_path / "results.json", "{}")
    manifest = {
        "parameters": {"seed": 0},
        "files": {"results.json": sha256(tmp_path / "results.json")},
    }
    whole = identity.sealed(manifest)
    damaged = {name.replace("sha256", "sha2%6"): value for name, value in whole.items()}
    for given, fine in (
        (manifest, True),
        (whole, True),
        (damaged, False),
        (whole | {"parameters": {"seed": 1}}, False),
    ):
        assert identity.undamaged(tmp_path, given) is fine
