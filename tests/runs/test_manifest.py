"""What makes a run the same run: notebook source and parameters, and neither uqlab nor its data changed since."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from small_runs import call
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)

from uqlab import __version__, runs
from uqlab.core.files import read_json, sha256, write
from uqlab.runs import execution, gallery, manifest, parameters, sweeps


@pytest.fixture
def other(monkeypatch):
    """Call it, and another commit of uqlab is there."""
    return lambda: monkeypatch.setattr(manifest, "commit", lambda: "def")


WHY = f"of uqlab {__version__} (abc), now {__version__} (def)"


def statuses(report: sweeps.Report) -> list[str]:
    return [outcome.status for outcome in report.outcomes]


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
    assert list(manifest.named_files({"any": value}, tmp_path)) == [
        tmp_path / name for name in names
    ]


def test_data_files_in_the_home_folder(tmp_path):
    assert list(manifest.named_files("~/mine.npz", tmp_path)) == [
        Path.home() / "mine.npz"
    ]


def test_runs_of_another_commit_are_stale(project, computed, other, capsys):
    first = sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    assert (
        statuses(sweeps.sweep("00", {"seed": "0:2"}, progress=False))
        == ["done before"] * 2
    )
    assert sweeps.run_one("00", {"seed": 0}) == first.outcomes[0].folder
    assert len(computed) == 2
    assert "stale" not in capsys.readouterr().err

    other()
    kept = sweeps.sweep("00", {"seed": "0:3"}, progress=False, keep_stale=True)
    said = f"2 of 2 finished runs are stale: {WHY}; "
    assert capsys.readouterr().err == f"{said}kept\n"
    assert statuses(kept) == ["done before"] * 2 + ["ok"]
    assert [outcome.reason for outcome in kept.outcomes] == [WHY] * 2 + [""]
    assert sweeps.summary(kept) == (
        "status        runs\nok               1\nstale, kept      2\n\nclaim  holds in\neven  2 of 3 runs"
    )
    assert (
        sweeps.run_one("00", {"seed": 0}, keep_stale=True) == first.outcomes[0].folder
    )
    assert len(computed) == 3

    anew = sweeps.sweep("00", {"seed": "0:3"}, progress=False)
    assert (
        capsys.readouterr().err
        == f"{said.replace('of 2', 'of 3')}computed anew (--keep-stale keeps them)\n"
    )
    assert statuses(anew) == ["ok", "ok", "done before"]
    assert computed[3:] == [{"seed": 0}, {"seed": 1}]
    assert (
        statuses(sweeps.sweep("00", {"seed": "0:3"}, progress=False))
        == ["done before"] * 3
    )


def test_run_one_computes_a_stale_run_anew(project, computed, other):
    folder = sweeps.run_one("00")
    other()
    assert sweeps.run_one("00") == folder
    assert len(computed) == 2


def test_the_commit_is_the_last_that_changed_the_package(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(manifest, "PACKAGE", package)
    assert manifest.commit() == ""  # no checkout

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True)

    def commit(path, text):
        path.write_text(text)
        git("add", ".")
        git("commit", "-qm", "more")

    git("init", "-q")
    commit(package / "a.py", "1")
    first = manifest.commit()
    assert re.fullmatch(r"[0-9a-f]{9}", first)
    commit(tmp_path / "README.md", "1")
    assert manifest.commit() == first
    (package / "a.py").write_text("2")
    changed = manifest.commit()
    assert re.fullmatch(rf"{first}\+[0-9a-f]{{8}}", changed)
    (package / "a.py").write_text("3")
    assert manifest.commit() not in (first, changed)
    commit(package / "a.py", "3")
    assert "+" not in manifest.commit() != first
    (package / "new.py").write_text("1")
    added = manifest.commit()
    assert "+" in added
    (package / "new.py").write_text("2")
    assert added != manifest.commit()


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
    anew = sweeps.sweep("00", grid, progress=False)
    assert statuses(anew) == ["done before", "ok"]
    assert manifest.Manifest.read(anew.outcomes[1].folder).data == {
        str(path): sha256(path)
    }


def test_runs_of_an_earlier_uqlab_are_read_and_stale(project, computed):
    folder = sweeps.run_one("00")
    content = read_json(folder / "manifest.json")
    del content["commit"]
    content["git"] = {"commit": "0123456789abcdef", "dirty": True}
    content["code"] = {"__init__.py": "a digest"}
    write(folder / "manifest.json", json.dumps(manifest._sealed(content)))
    assert manifest.finished(folder)
    with pytest.warns(UserWarning, match="1 of 1 runs are stale: of uqlab"):
        assert list(runs.load(folder.parent).run_stale) == [True]
    assert statuses(sweeps.sweep("00", {}, progress=False)) == ["ok"]


def test_sweep_command_says_how_many_are_stale(project, computed, other):
    arguments = ["sweep", "00", "-g", "seed", "0:2"]
    assert "stale" not in call(*arguments).output
    other()
    kept = call(*arguments, "--keep-stale", "--quiet")
    assert kept.exit_code == 0
    assert f"2 of 2 finished runs are stale: {WHY}; kept\n" in kept.output
    assert len(computed) == 2
    assert "2 runs, 0 done before, 2 to do\n" in call(*arguments).output
    assert len(computed) == 4


# --- Tables and the page ---------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(project, computed, other) -> Path:
    """The folder of a sweep of three runs, two of them stale."""
    sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    other()
    return sweeps.sweep("00", {"seed": "0:3"}, progress=False, keep_stale=True).folder


def test_a_table_never_mixes_in_silence(mixed):
    with pytest.warns(UserWarning, match=rf"2 of 3 runs are stale: {re.escape(WHY)}"):
        frame = runs.load(mixed)
    assert list(frame.run_stale) == [True, True, False]
    assert list(frame.run_code) == [f"{__version__} (abc)"] * 2 + [
        f"{__version__} (def)"
    ]
    assert f"2 of 3 runs are stale: {WHY}" in call("collect", "00").output
    assert list(runs.load(mixed / "table.csv").run_stale) == list(frame.run_stale)


def test_the_page_marks_stale_runs(mixed, monkeypatch):
    execution.execute(
        parameters.find("00"), {}, profile="quick", folder=mixed.parent / "00_some"
    )
    mark = f'<p class="stale">Stale: {WHY}</p>'
    row = '<span class="stale">stale</span></summary>'
    text = gallery.build(mixed.parent).read_text()
    assert (text.count(mark), text.count(row)) == (2, 2)
    assert marked(text) == [("0", True), ("1", True), ("2", False)]
    monkeypatch.setattr(manifest, "commit", lambda: "ghi")
    text = gallery.build(mixed.parent).read_text()
    assert (text.count('class="stale">Stale: '), text.count(row)) == (4, 3)


def marked(text: str) -> list[tuple[str, bool]]:
    """(seed, whether it is marked) of the runs on the page."""
    lines = [line for line in text.splitlines() if "<summary>seed = " in line]
    return [(line.partition("seed = ")[2][0], "stale" in line) for line in lines]


def test_every_damage_to_a_manifest_is_seen(project, computed):
    folder = sweeps.run_one("00")
    path = folder / "manifest.json"
    whole = path.read_bytes()
    assert manifest.finished(folder)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        # white space may differ
        assert not manifest.finished(folder) or read_json(path) == json.loads(whole)


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
        ("mine.py:make", "package/sub/mod.py"),
        ("nets.deep.layer:make", "nets/other.py"),
        ("nets.deep.layer:make", "utils/more.py"),
    ],
)
def test_whatever_a_parameter_names_makes_its_run_stale(tmp_path, named, changed):
    names = ["ckpts/a/best.pt", "ckpts/b/best.pt", "mine.py", "helper.py"]
    names += ["package/__init__.py", "package/sub/__init__.py", "package/sub/mod.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    # Without __init__.py, as many have it; one names another.
    for name, text in {
        "helper.py": "1\nif 1:\n    from nets.deep import layer\n    import package",
        "nets/deep/layer.py": "from utils.more import some",
        "nets/other.py": "1",
        "utils/more.py": "1",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in ("", "nets/deep"):  # as an editor makes them
        (tmp_path / folder / ".#layer.py").symlink_to("nowhere")

    def checksums():
        return manifest.Present().data({"model": named}, tmp_path)

    before = checksums()
    for written in ("ckpts/__pycache__", "package/__pycache__", "ckpts/.cache"):
        (tmp_path / written).mkdir()
        (tmp_path / written / "some").write_text("2")
    (tmp_path / "ckpts/b/around").symlink_to(tmp_path / "ckpts/b")
    (tmp_path / "ckpts/report").mkdir()
    manifest.Manifest(notebook="00").save(tmp_path / "ckpts/report")  # a page's
    assert checksums() == before
    (tmp_path / changed).write_text("2")
    assert checksums() != before


def test_files_of_one_name_that_a_pattern_finds_are_told_apart(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "best.pt").write_text(name)
    place = tmp_path / "*/best.pt"
    before = manifest.Present().digest(place)
    (tmp_path / "a/best.pt").write_text("b")
    assert manifest.Present().digest(place) != before
