"""The table of a sweep, tables that its runs recorded, and the page of all runs."""

import json
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from small_runs import call, notebook
from small_sweeps import PARAMETERS, again, checkout, stand_in  # noqa: F401  (fixtures)

from uqlab import runs
from uqlab.core.files import read_json, write
from uqlab.runs import tables


def test_table(project, computed):
    grid = {"seed": [10, 9], "sizes": ["[2]", "[1, 2]"]}
    report = runs.sweep("00", grid, progress=False)
    frame = runs.load(report.folder)
    assert {*frame.columns} == {
        *("run", "seed", "width", "name", "sizes", "device"),
        *("square", "device_recorded", "fall.id", "fall.ood", "claim_even"),
        *(f"run_{fact}" for fact in ("stale", *tables.FACTS)),
    }
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
    assert re.match(r"4 runs, 20 columns: .*table\.parquet and \.csv\n$", result.output)
    pd.testing.assert_frame_equal(runs.load(report.folder / "table.parquet"), frame)
    csv = pd.read_csv(report.folder / "table.csv").dropna(axis="columns", how="all")
    written = frame.dropna(axis="columns", how="all")
    pd.testing.assert_frame_equal(csv, written, check_dtype=False)
    pd.testing.assert_frame_equal(runs.load("00"), frame)


def test_tables_of_all_runs_are_joined(project, computed):
    report = runs.sweep("00", {"seed": "0:3"}, progress=False)
    for seed, outcome in enumerate(report.outcomes[1:], 1):  # the first has none
        rows = [["a", seed / 3], ["b", None]]
        table = {"index": [0, 1], "columns": ["row", "value"], "data": rows}
        found = read_json(outcome.folder / "results.json")
        found |= {"tables": {"board": table}}
        write(outcome.folder / "results.json", json.dumps(found))
        again(outcome.folder, seconds=1800)
    result = call("collect", "00", "--table", "board")
    assert result.exit_code == 0, result.output
    frame = pd.read_csv(report.folder / "board.csv")
    assert frame.row.tolist() == ["a", "b"] * 2
    assert frame.value[[0, 2]].tolist() == [0.33333, 0.66667]
    assert frame.value[[1, 3]].isna().all()
    about = read_json(report.folder / "board.json")
    kept = about["runs"], about["hours"], about["packages"]
    assert kept[:2] == (2, 1.0)
    assert kept[2]["torch"]
    assert about["parameters"]["seed"] == [1, 2]
    assert about["parameters"]["width"] == 1.0
    with pytest.raises(ValueError, match="has recorded a table 'bord'"):
        tables.join(report.folder, "bord")
    with pytest.raises(ValueError, match="sweep's own"):
        tables.join(report.folder, "table")


def test_table_in_a_notebook_is_found_beside_its_folder(project, computed, monkeypatch):
    runs.sweep("00", {"seed": "0:2"}, progress=False)
    monkeypatch.chdir(project / "notebooks")
    assert len(runs.load("../figures/quick/00_some.sweep")) == 2
    assert len(runs.load("00_some.ipynb")) == 2
    with pytest.raises(ValueError, match="first: uqlab sweep NOTEBOOK"):
        runs.load("00_some.ipynb", profile="tiny")


def test_table_holds_runs_of_the_latest_version_alone(project, computed, capsys):
    runs.sweep("00", {"seed": "0:3"}, progress=False)
    notebook(project / "notebooks" / "00_some.ipynb", "1 + 2", parameters=PARAMETERS)
    report = runs.sweep("00", {"seed": "0:2"}, progress=False)
    frame = runs.load(report.folder)
    assert "left out: of another notebook version" in capsys.readouterr().err
    assert set(frame.run) == {outcome.folder.name for outcome in report.outcomes}
    result = call("collect", "00")
    assert result.output.count("left out") == 3
    assert "2 runs, " in result.output


def test_columns_that_no_file_could_hold_are_text(project, computed):
    report = runs.sweep("00", {"seed": "0:3"}, progress=False)
    for outcome, value in zip(report.outcomes, (1.5, "text", None), strict=True):
        results = json.dumps({"numbers": {"mixed": value}})
        write(outcome.folder / "results.json", results)
        again(outcome.folder)
    frame = tables.save(report.folder)
    assert list(frame.mixed[:2]) == ["1.5", '"text"']
    assert frame.mixed.isna()[2]
    pd.testing.assert_frame_equal(runs.load(report.folder / "table.parquet"), frame)


@pytest.mark.parametrize(
    ("numbers", "columns"),
    [
        ({"run": 1, "run_seconds": 2}, ["run_recorded", "run_seconds_recorded"]),
        (
            {"run_stale": 1, "claim_even": 2},
            ["run_stale_recorded", "claim_even_recorded"],
        ),
        ({"seed_recorded": 1, "seed": 2}, ["seed_recorded", "seed_recorded_recorded"]),
        ({"fall": {"id": 1}, "fall.id": 2}, ["fall.id", "fall.id_recorded"]),
        ({"big": 2**70, "pair": [1, 2**64]}, ["big", "pair"]),
    ],
)
def test_whatever_a_notebook_records_the_table_is_written(
    project, computed, numbers, columns
):
    report = runs.sweep("00", {"seed": [5, 6]}, progress=False)
    for outcome in report.outcomes:
        found = read_json(outcome.folder / "results.json") | {"numbers": numbers}
        write(outcome.folder / "results.json", json.dumps(found))
        again(outcome.folder)
    frame = tables.save(report.folder)
    assert [*frame.seed] == [5, 6]
    assert [*frame.run] == [outcome.folder.name for outcome in report.outcomes]
    assert not frame.run_stale.any()
    assert [*frame.claim_even] == [False, True]
    values = [v["id"] if isinstance(v, dict) else v for v in numbers.values()]
    for column, value in zip(columns, values, strict=True):
        assert json.loads(str(frame[column][1])) == value
    pd.testing.assert_frame_equal(runs.load(report.folder / "table.parquet"), frame)


def test_texts_of_a_table_stay_texts(project, computed):
    texts = ["001", "NA", "None"]
    report = runs.sweep("00", {"name": texts}, progress=False)
    call("collect", "00")
    for table in (report.folder, report.folder / "table.parquet"):
        assert [*runs.load(table).name] == texts
    with pytest.raises(ValueError, match=r"table\.parquet"):
        runs.load(report.folder / "table.csv")


def test_without_runs_commands_say_what_to_run_first(project):
    for arguments in (["collect", "00"], ["gallery"]):
        result = call(*arguments)
        assert result.exit_code == 2
        assert "first: uqlab" in result.output
    (project / "figures" / "quick" / "00_some.sweep").mkdir(parents=True)
    assert "no finished run in" in call("collect", "00").output


def test_gallery_of_all_profiles(project, computed):
    report = runs.sweep("00", {"seed": "0:2", "name": ["<b>"]}, progress=False)
    failed = report.folder / "0123456789abcdef.failed"
    failed.mkdir()
    (failed / "error.txt").write_text("the reason <i>")
    tiny = runs.execute("00", profile="tiny")
    found = read_json(tiny / "results.json")
    found["tables"] = {"a_table": {"columns": ["c"], "index": [0], "data": [[1 / 3]]}}
    write(tiny / "results.json", json.dumps(found))
    again(tiny)
    assert call("gallery").output == "figures/index.html\n"
    page = project / "figures" / "index.html"
    text = page.read_text()
    sections, links = [], []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag == "section":
                sections.append(dict(attrs)["id"])
            if tag == "a" and dict(attrs)["href"][0] != "#":
                links.append(dict(attrs)["href"])

    Parser().feed(text)
    runs_of = sorted(outcome.folder.name for outcome in report.outcomes)
    swept = ["0123456789abcdef", *runs_of]
    assert sections == [
        *(f"quick/00_some.sweep/{name}" for name in sorted(swept)),
        "tiny/00_some",
    ]
    for link in links:
        assert (page.parent / link).is_file(), link
    names = [f"quick/00_some.sweep/{o.folder.name}" for o in report.outcomes]
    assert {f"{name}/00_some.ipynb" for name in names} <= set(links)
    assert "the reason &lt;i&gt;" in text
    assert "<i>" not in text
    assert text.count("It is &lt;even&gt;.") == 3
    assert text.count("yes (Table &lt;2&gt;)") == 3
    assert "<h3>a table</h3>" in text
    assert "0.3333" in text

    below = tables.gallery(project / "figures" / "tiny").read_text()
    assert 'href="00_some/00_some.ipynb"' in below
