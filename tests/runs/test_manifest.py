"""What makes a run the same run: notebook source and parameters, and neither uqlab nor its data changed since."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from small_runs import call, notebook
from small_sweeps import PARAMETERS, checkout, stand_in  # noqa: F401  (fixtures)

from uqlab import __version__, runs
from uqlab.core.files import read_json, sha256
from uqlab.runs import execution, manifest

WHY = f"of uqlab {__version__} (abc), now {__version__} (def)"


def statuses(report: execution.Report) -> list[str]:
    return [outcome.status for outcome in report.outcomes]


def test_runs_of_another_commit_are_stale(project, computed, monkeypatch, capsys):
    first = runs.sweep("00", {"seed": "0:2"}, progress=False)
    again = runs.sweep("00", {"seed": "0:2"}, progress=False)
    assert statuses(again) == ["done before"] * 2
    assert runs.run_one("00", {"seed": 0}) == first.outcomes[0].folder
    assert len(computed) == 2
    assert "stale" not in capsys.readouterr().err

    monkeypatch.setattr(manifest, "commit", lambda: "def")
    kept = runs.sweep("00", {"seed": "0:3"}, progress=False, keep_stale=True)
    said = f"2 runs are stale: {WHY}; "
    assert capsys.readouterr().err == f"{said}kept\n"
    assert statuses(kept) == ["done before"] * 2 + ["ok"]
    assert [outcome.reason for outcome in kept.outcomes][:2] == [WHY] * 2
    runs.run_one("00", {"seed": 0}, keep_stale=True)
    assert len(computed) == 3
    capsys.readouterr()
    frame = runs.load(kept.folder)
    assert f"2 of 3 runs are stale: {WHY}" in capsys.readouterr().err
    assert list(frame.run_stale) == [True, True, False]
    assert list(frame.run_code) == [
        f"{__version__} ({c})" for c in ("abc", "abc", "def")
    ]
    assert f"2 of 3 runs are stale: {WHY}" in call("collect", "00").output
    call("gallery")
    text = (project / "figures" / "index.html").read_text()
    assert text.count(f"Stale: {WHY}") == 2

    anew = runs.sweep("00", {"seed": "0:3"}, progress=False)
    assert "computed anew" in capsys.readouterr().err
    assert statuses(anew) == ["ok", "ok", "done before"]
    assert computed[3:] == [{"seed": 0}, {"seed": 1}]
    monkeypatch.setattr(manifest, "commit", lambda: "ghi")
    assert runs.run_one("00", {"seed": 0}) == anew.outcomes[0].folder
    assert len(computed) == 6


def test_the_commit_tells_every_state_of_the_package_apart(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("1")
    monkeypatch.setattr(manifest, "PACKAGE", package)
    assert re.fullmatch(r"\+[0-9a-f]{8}", manifest.commit())  # no checkout
    elsewhere = shutil.copytree(package, tmp_path / "moved" / "package")
    here = manifest.commit()
    monkeypatch.setattr(manifest, "PACKAGE", elsewhere)
    assert manifest.commit() == here
    monkeypatch.setattr(manifest, "PACKAGE", package)
    shutil.rmtree(elsewhere.parent)

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True)

    def commit(path, text):
        path.write_text(text)
        git("add", ".")
        git("commit", "-qm", "more")

    git("init", "-q")
    commit(package / "a.py", "1")
    states = [manifest.commit()]
    assert re.fullmatch(r"[0-9a-f]{9}\+[0-9a-f]{8}", states[0])
    commit(tmp_path / "README.md", "1")
    assert manifest.commit() == states[0]
    for name, text in [("a.py", "2"), ("a.py", "3"), ("new.py", "1"), ("new.py", "2")]:
        (package / name).write_text(text)
        states.append(manifest.commit())
    commit(package / "a.py", "3")
    states.append(manifest.commit())
    assert len({*states}) == 6


@pytest.mark.parametrize("name", ["mine.npz", "mine.npz[0-1]"])
def test_a_changed_data_file_makes_stale_the_runs_that_name_it(project, computed, name):
    path = project / "notebooks" / "mine.npz"  # where the kernel looks
    np.savez(path, x=np.zeros((4, 2, 2)))
    grid = {"name": ["digits", name]}
    runs.sweep("00", grid, progress=False)
    os.utime(path, (1, 1))  # its content is the same
    assert statuses(runs.sweep("00", grid, progress=False)) == ["done before"] * 2
    np.savez(path, x=np.ones((4, 2, 2)))
    kept = runs.sweep("00", grid, progress=False, keep_stale=True)
    assert [o.reason for o in kept.outcomes] == ["", "mine.npz changed since"]
    anew = runs.sweep("00", grid, progress=False)
    assert statuses(anew) == ["done before", "ok"]
    made = manifest.Manifest.read(anew.outcomes[1].folder)
    assert made.data == {str(path): sha256(path)}


@pytest.mark.parametrize(
    "line",
    ["import os, helper", "from helper import f", "%run helper.py", "import nets.a"],
)
def test_modules_beside_a_notebook_that_it_imports_make_its_runs_stale(
    project, computed, line
):
    folder = project / "notebooks"
    (folder / "nets").mkdir()
    for name in ("helper.py", "nets/a.py"):
        (folder / name).write_text("f = 1")
    notebook(folder / "00_some.ipynb", f"1\n  {line}", parameters=PARAMETERS)
    grid = {"seed": [0]}
    runs.sweep("00", grid, progress=False)
    assert statuses(runs.sweep("00", grid, progress=False)) == ["done before"]
    changed = "nets/a.py" if "nets" in line else "helper.py"
    (folder / changed).write_text("f = 2")
    kept = runs.sweep("00", grid, progress=False, keep_stale=True).outcomes[0]
    assert kept.reason == f"{Path(changed).name} changed since"
    assert statuses(runs.sweep("00", grid, progress=False)) == ["ok"]


def test_a_notebook_that_moved_is_not_done_with_other_data(project, computed, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "d.csv").write_text(name)
    page = notebook(tmp_path / "a" / "x.ipynb", parameters=PARAMETERS)
    grid = {"name": ["d.csv"]}
    assert statuses(runs.sweep(page, grid, progress=False)) == ["ok"]
    moved = page.rename(tmp_path / "b" / "x.ipynb")
    assert statuses(runs.sweep(moved, grid, progress=False)) == ["ok"]
    assert statuses(runs.sweep(moved, grid, progress=False)) == ["done before"]


def test_two_notebooks_of_one_name_do_not_share_a_folder(
    project, computed, tmp_path, monkeypatch
):
    one, other = (
        notebook(tmp_path / f / "x.ipynb", parameters=PARAMETERS) for f in "ab"
    )
    makes = [
        runs.execute,
        runs.run_one,
        lambda page: runs.sweep(page, {"seed": "0:2"}, progress=False),
    ]
    for make in makes:
        make(one)
        with pytest.raises(ValueError, match=r"a/x\.ipynb.*--output-dir"):
            make(other)
    count = len(computed)
    assert call("run", other, "--output-dir", "elsewhere").exit_code == 0
    monkeypatch.chdir(one.parent)
    runs.run_one("x.ipynb", root="../figures")  # the same, seen from elsewhere
    runs.execute("x.ipynb", folder="../figures/quick/x")
    assert len(computed) == count + 2
    one.unlink()
    runs.execute(other, folder="../figures/quick/x")


def test_every_damage_to_a_manifest_is_seen(project, computed):
    folder = runs.run_one("00")
    path = folder / "manifest.json"
    whole = path.read_bytes()
    assert manifest.Manifest.read(folder).undamaged(folder)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        # white space may differ
        read = manifest.Manifest.read(folder)
        assert not read.undamaged(folder) or read_json(path) == json.loads(whole)


@pytest.mark.parametrize(
    ("named", "changed"),
    [
        ("ckpts/*/best.pt", "ckpts/a/best.pt"),
        ("ckpts/*", "ckpts/a/best.pt"),
        ("ckpts", "ckpts/a/best.pt"),
        ("package:make", "package/sub/mod.py"),
        ("package.sub.mod:make", "package/__init__.py"),
        ("mine.py:make", "helper.py"),
        ("mine.py:make", "nets/deep/layer.py"),
        ("nets.deep.layer:make", "utils/more.py"),
        ("nets.deep.a.b.last:make", "nets/deep/a/b/last.py"),
    ],
)
def test_whatever_a_parameter_names_makes_its_run_stale(tmp_path, named, changed):
    names = ["ckpts/a/best.pt", "ckpts/b/best.pt", "mine.py", "helper.py"]
    names += ["package/__init__.py", "package/sub/__init__.py", "package/sub/mod.py"]
    names += ["nets/deep/layer.py", "utils/more.py", "nets/deep/a/b/last.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    for folder in ("", "nets/deep"):  # as an editor makes them
        (tmp_path / folder / ".#layer.py").symlink_to("nowhere")

    page = notebook(tmp_path / "0.ipynb")

    def checksums():
        return manifest.Present().data({"model": named}, page)

    before = checksums()
    assert before
    for written in ("ckpts/a/__pycache__", "package/__pycache__", "ckpts/.cache"):
        (tmp_path / written).mkdir()
        (tmp_path / written / "some.pyc").write_text("2")
    assert checksums() == before
    (tmp_path / changed).write_text("2")
    assert checksums() != before
    both = checksums()
    if named == "ckpts/*/best.pt":  # of one name
        shutil.copy(tmp_path / "ckpts/b/best.pt", tmp_path / changed)
        assert checksums() != both


def test_what_parameters_do_not_name_has_no_checksum(tmp_path):
    values = {"dataset": "digits", "ood": ["letters[0-2]"], "settings": {"a": 3}}
    page = notebook(tmp_path / "0.ipynb", "from uqlab import data\nimport os, mine")
    assert manifest.Present().data(values, page) == {}
    home = Path.home() / ".profile"
    if home.exists():
        found = manifest.Present().data({"a": "~/.profile"}, page)
        assert found.keys() == {str(home)}
