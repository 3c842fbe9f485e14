"""The table of a sweep's runs, and the page of all runs."""

import json
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from small_runs import call, notebook
from small_sweeps import PARAMETERS, again, checkout, stand_in  # noqa: F401  (fixtures)

from uqlab import runs
from uqlab.core.files import read_json, write
from uqlab.runs import execution, gallery, parameters, sweeps, tables

# --- The table -------------------------------------------------------------------------------------------------------


def test_table(project, computed):
    report = sweeps.sweep(
        "00", {"seed": [10, 9], "sizes": ["[2]", "[1, 2]"]}, progress=False
    )
    frame = runs.load(report.folder)
    assert list(frame.columns) == [
        *("run", "seed", "width", "name", "sizes", "device"),
        *("square", "fall.id", "fall.ood", "device_recorded", "claim_even"),
        *(f"run_{fact}" for fact in ("stale", *tables.FACTS)),
    ]
    assert list(frame.seed) == [9, 9, 10, 10]  # sorted as numbers
    assert list(frame.sizes) == ["[1, 2]", "[2]"] * 2
    assert list(frame.square) == [81, 81, 100, 100]
    assert set(frame["fall.ood"]) == {"[1, 2]"}
    assert list(frame.claim_even) == [False, False, True, True]
    assert set(frame.device) == {"auto"}
    assert frame.run_seconds.between(0, 60).all()
    assert frame.seed.dtype.kind == "i"
    assert frame.width.dtype.kind == "f"

    result = call("collect", "00")
    assert result.exit_code == 0
    assert re.match(r"4 runs, 19 columns: .*table\.parquet and \.csv\n$", result.output)
    pd.testing.assert_frame_equal(runs.load(report.folder / "table.parquet"), frame)
    csv = runs.load(report.folder / "table.csv").dropna(axis="columns", how="all")
    pd.testing.assert_frame_equal(
        csv, frame.dropna(axis="columns", how="all"), check_dtype=False
    )
    pd.testing.assert_frame_equal(runs.load("00"), frame)
    assert not list(report.folder.glob("*.tmp*"))


def test_tables_of_all_runs_are_joined(project, computed):
    report = sweeps.sweep("00", {"seed": "0:3"}, progress=False)
    for outcome in report.outcomes[1:]:  # the first has recorded none
        seed = outcome.parameters["seed"]
        table = {
            "index": [0, 1],
            "columns": ["row", "value"],
            "data": [["a", seed / 3], ["b", None]],
        }
        found = read_json(outcome.folder / "results.json") | {
            "tables": {"board": table}
        }
        write(outcome.folder / "results.json", json.dumps(found))
        again(outcome.folder, seconds=1800)
    result = call("collect", "00", "--table", "board")
    assert result.exit_code == 0, result.output
    frame = pd.read_csv(report.folder / "board.csv")
    assert frame.row.tolist() == ["a", "b"] * 2
    assert frame.value[[0, 2]].tolist() == [0.33333, 0.66667]
    assert frame.value[[1, 3]].isna().all()
    about = read_json(report.folder / "board.json")
    assert (about["runs"], about["hours"], about["packages"]) == (
        2,
        1.0,
        {"torch": "2"},
    )
    assert about["parameters"]["seed"] == [1, 2]
    assert about["parameters"]["width"] == 1.0
    assert about["recorded"]["square"] == [1, 4]
    with pytest.raises(
        ValueError, match=r"no finished run in .* has recorded a table 'bord'"
    ):
        tables.joined(report.folder, "bord")


def test_table_in_a_notebook_is_found_beside_its_folder(project, computed, monkeypatch):
    sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    monkeypatch.chdir(project / "notebooks")
    assert (
        len(runs.load("figures/quick/00_some.sweep"))
        == len(runs.load("00_some.ipynb"))
        == 2
    )
    with pytest.raises(
        ValueError,
        match=r"no sweep in .*tiny.*first: uqlab sweep 00_some\.ipynb -g NAME VALUES --profile tiny",
    ):
        runs.load("00_some.ipynb", profile="tiny")


def test_table_holds_runs_of_the_latest_version_alone(project, computed):
    sweeps.sweep("00", {"seed": "0:3"}, progress=False)
    notebook(project / "notebooks" / "00_some.ipynb", "1 + 2", parameters=PARAMETERS)
    report = sweeps.sweep("00", {"seed": "0:2"}, progress=False)
    with pytest.warns(
        UserWarning, match="3 runs .* left out: .* of another version of the notebook"
    ):
        frame = runs.load(report.folder)
    assert set(frame.run) == {outcome.folder.name for outcome in report.outcomes}
    result = call("collect")
    assert result.output.count("left out") == 3
    assert "2 runs, " in result.output


def test_columns_that_no_file_could_hold_are_text(project, computed, monkeypatch):
    report = sweeps.sweep("00", {"seed": "0:3"}, progress=False)
    for outcome, value in zip(report.outcomes, (1.5, "text", None), strict=True):
        write(
            outcome.folder / "results.json",
            json.dumps({"numbers": {"mixed": value}}),
        )
        again(outcome.folder)
    frame = tables.save(tables.read(report.folder), report.folder)
    assert list(frame.mixed[:2]) == ["1.5", '"text"']
    assert frame.mixed.isna()[2]
    pd.testing.assert_frame_equal(runs.load(report.folder / "table.parquet"), frame)


def test_nothing_to_collect_is_an_error(project):
    for arguments in (["collect"], ["collect", "00"]):
        result = call(*arguments)
        assert result.exit_code == 2
        assert "first: uqlab sweep" in result.output
    (project / "figures" / "quick" / "00_some.sweep").mkdir(parents=True)
    assert "no finished run in" in call("collect").output


# --- The page --------------------------------------------------------------------------------------------------------


def test_gallery_of_all_profiles(project, computed):
    report = sweeps.sweep("00", {"seed": "0:2", "name": ["<b>"]}, progress=False)
    failed = report.folder / "0123456789abcdef.failed"
    failed.mkdir()
    (failed / "error.txt").write_text("the reason <i>")
    executed = {
        "cells": [],
        "metadata": {"papermill": {"parameters": {"seed": 9, "output_dir": "x"}}},
    }
    (failed / "00_some.ipynb").write_text(json.dumps(executed))
    tiny = execution.execute(
        parameters.find("00"),
        {},
        profile="tiny",
        folder=project / "figures" / "tiny" / "00_some",
    )
    drawn = {
        name: {"columns": ["c"], "index": [0], "data": [[1]]}
        for name in ("a", gallery.PAPER)
    }
    claimed = json.loads((tiny / "results.json").read_text())["claims"]
    (tiny / "results.json").write_text(json.dumps({"tables": drawn, "claims": claimed}))
    (project / "figures" / "gallery").mkdir()
    result = call("gallery")
    assert result.output == "figures/index.html\n"
    page = project / "figures" / "index.html"
    text = page.read_text()
    sections, links = [], []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            attributes = dict(attrs)
            if tag == "section":
                sections.append(
                    (
                        attributes["id"],
                        attributes["data-notebook"],
                        attributes["data-profile"],
                    )
                )
            if tag == "a" and attributes["href"][0] != "#":
                links.append(attributes["href"])

    Parser().feed(text)
    assert sections == [
        ("quick/00_some.sweep", "00_some", "quick"),
        ("tiny/00_some", "00_some", "tiny"),
    ]
    assert links
    for link in links:
        assert (page.parent / link).is_file(), link
    assert {
        f"quick/00_some.sweep/{outcome.folder.name}/00_some.ipynb"
        for outcome in report.outcomes
    } <= set(links)
    assert "A title &amp; &lt;i&gt;: 2 runs" in text
    assert '<p class="question">Why &amp; how?</p>' in text
    assert text.count("<details><summary>seed = ") == 2
    assert "<summary>failed: seed = 9</summary>" in text
    assert "the reason &lt;i&gt;" in text
    assert "<b>" not in text
    assert (
        text.count("<caption>Claims: 1 of 1 hold") == 2
    )  # of the sweep's run with seed 0, and of the one run
    assert text.count("<caption>Claims: 0 of 1 hold") == 1
    assert "It is &lt;even&gt;." in text
    assert "yes (Table &lt;2&gt;)" in text
    assert "2 figures · 1 of 1 claims hold" in text.replace("0 figures", "2 figures")
    assert text.index("<caption>paper and this run") < text.index("<caption>a<")

    assert call("gallery", "--profile", "tiny").output == "figures/tiny/index.html\n"
    assert (
        'href="00_some/00_some.ipynb"'
        in (project / "figures" / "tiny" / "index.html").read_text()
    )


def test_gallery_without_runs_says_what_to_run_first(project):
    for arguments in ([], ["--profile", "tiny"]):
        result = call("gallery", *arguments)
        assert result.exit_code == 2
        assert "first: uqlab run" in result.output
    for command in ("gallery", "collect"):  # what such a line said would be refused
        assert "unknown profile 'none'" in call(command, "--profile", "none").output
