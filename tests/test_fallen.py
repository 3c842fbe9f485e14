"""What did not hold is on its page and in docs/: nothing that was tried is forgotten."""

import csv
import importlib.util

import pytest
import yaml

from uqlab import runs
from uqlab.runs import parameters

ROOT = parameters.PAGES.parent
spec = importlib.util.spec_from_file_location("fallen", ROOT / "tools" / "fallen.py")
fallen = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fallen)


def test_the_table_is_that_of_the_seeds_the_runs_and_the_predictions(tmp_path):
    found = [dict(zip(fallen.COLUMNS, row, strict=True)) for row in fallen.table()]
    with (ROOT / "figures" / "real" / "fallen.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == found, "run tools/fallen.py"
    told = (ROOT / "docs" / "did_not_hold.md").read_text()
    assert told.count("\n| ") - 1 == len(found)


def test_no_claim_is_forgotten():
    if not fallen.git("cat-file", "-t", fallen.SINCE):
        pytest.skip("the history does not reach back")
    told = yaml.safe_load((ROOT / "figures" / "real" / "fallen.yaml").read_text())
    told = {(row["page"], row["claim"]) for row in told}
    gone = {
        (page, name) for page, name, sentences in fallen.lost() if not sentences[-1]
    }
    assert ("04_mask_extraction", "weight_zero") in gone
    assert gone <= told


def test_a_page_shows_its_own_and_its_studys(tmp_path, monkeypatch):
    monkeypatch.chdir(parameters.PAGES)
    runs.begin(tmp_path, "04_mask_extraction")
    rows = runs.fallen()
    assert "no longer claimed" in {*rows["judged by"]}
    study = "By entropy the sub-models find fashion-mini at least as well as the single network does"
    assert rows.loc[study, "holds in"] == "0 of 5"
    runs.begin(tmp_path, "my_page")
    assert runs.fallen().empty


PAGES = {row[0] for row in fallen.table()}


@pytest.mark.parametrize(
    "page",
    parameters.all_notebooks() + parameters.all_notebooks("studies"),
    ids=lambda p: p.stem,
)
def test_a_page_with_such_sentences_shows_them(page):
    shows = "runs.fallen()" in page.read_text(encoding="utf-8")
    assert shows == bool({page.stem, f"{page.stem}_study"} & PAGES)
