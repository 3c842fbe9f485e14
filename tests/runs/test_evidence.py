"""What is kept of long runs, and the text that sums them up."""

import pandas as pd
import yaml
from small_runs import call
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)

from uqlab.core.files import read_json
from uqlab.runs import evidence, gallery, identity

PAGE = "00_some"


def entry(seeds="0:3", **more):
    compared = [
        {"what": "the least", "number": "fall.id", "paper": 1.0},
        {"what": "the square", "number": "square", "paper": 2.0},
    ]
    return {
        "seeds": seeds,
        "figures": [],
        "smaller": "All of it.",
        "compared": compared,
    } | more


def told(project, **entries):
    """Write evidence.yaml, and return what `uqlab evidence` says and its exit code."""
    (project / "notebooks" / "profiles.yaml").write_text(
        "real: {00_some: {name: mnist}}\n"
    )
    (folder := project / "figures" / "real").mkdir(parents=True, exist_ok=True)
    (folder / "evidence.yaml").write_text(yaml.safe_dump(entries))
    said = call("evidence")
    return said.output, said.exit_code


def test_long_runs_are_swept_once_and_kept_with_a_text_that_sums_them_up(
    project, computed
):
    entries = {
        PAGE: entry(reasons={"numbers": "It counts."}),
        "01_later": {"smaller": "Not run."},
    }
    output, code = told(project, **entries)
    assert code == 0, output
    assert [given["seed"] for given in computed] == [0, 1, 2]
    folder = project / "figures" / "real" / PAGE
    kept = {"manifest.json", "results.json", "table.csv", "table.json"}
    assert {path.name for path in folder.iterdir()} == kept
    assert list(pd.read_csv(folder / "table.csv")["claim_even"]) == [True, False, True]
    assert read_json(folder / "table.json")["parameters"]["seed"] == [0, 1, 2]
    manifest = read_json(folder / "manifest.json")
    assert manifest["parameters"]["seed"] == 0
    assert identity.undamaged(folder, manifest)
    text = (folder.parent / "README.md").read_text()
    assert text == evidence.readme(folder.parent)
    assert f"| [00 some]({PAGE}) | – | – | 3 | 0.00 |" in text
    assert "| 0 of 1 in every run |" in text
    assert (
        "Of 2 numbers the largest deviation: the square is 1.6667 ± 2.0817, in the paper 2.0. It counts."
        in text
    )
    assert "Not run." not in text
    assert told(project, **entries)[1] == 0
    assert len(computed) == 3


def test_where_most_runs_contradict_a_paper_a_reason_must_be_given(project, computed):
    numbers = {"numbers": "It counts."}
    output, code = told(project, **{PAGE: entry("1,2,3", reasons=numbers)})
    assert code == 2
    assert "most runs contradict Table <2> in the claim even: why?" in output
    output, code = told(
        project, **{PAGE: entry("1,2,3", reasons=numbers | {"even": "Odd seeds."})}
    )
    assert code == 0, output
    text = (project / "figures" / "real" / "README.md").read_text()
    assert (
        "“It is <even>.”: in 1 of 3 runs, in the paper so (Table <2>). Odd seeds."
        in text
    )


def test_the_gallery_shows_what_is_kept_and_marks_it_when_the_code_has_changed(
    project, computed, monkeypatch
):
    told(project, **{PAGE: entry(reasons={"numbers": "It counts."})})
    (folder := project / "figures" / "real" / f"{PAGE}.sweep").rename(
        project / "elsewhere"
    )
    (
        study := folder.with_name("09_study")
    ).mkdir()  # made by a notebook beside the page: rows alone
    (study / "rows.csv").write_text("seed\n0\n")
    page = gallery.build(folder.parent).read_text()
    assert "Incomplete" not in page
    assert 'href="09_study/rows.csv"' in page
    assert f'href="{PAGE}/table.csv"' in page
    assert "Stale:" not in page
    monkeypatch.setattr(identity, "PACKAGE", project)
    assert (
        "Stale: __init__.py changed since" in gallery.build(folder.parent).read_text()
    )


def test_a_page_without_seeds_is_refused(project, computed):
    told(project, **{PAGE: {"smaller": "All."}})
    said = call("evidence", "00")
    assert said.exit_code == 2
    assert "no seeds in" in said.output
