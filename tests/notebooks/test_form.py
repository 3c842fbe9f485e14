"""A page's form: folded cells of drawing, sections that every page has; tools/pages.py has the lessons' limits."""

import ast
import csv
import functools
import json
import re
from pathlib import Path

import pytest
from small_pages import code_of, solutions

from uqlab.runs import parameters

LESSONS = parameters.all_notebooks()
STUDIES = [
    path for path in parameters.all_notebooks("studies") if path.stem.endswith("_study")
]


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


pages = each([*LESSONS, *STUDIES])


@functools.cache
def cells(path, kind=None):
    return [
        cell
        for cell in json.loads(path.read_text())["cells"]
        if kind in (None, cell["cell_type"])
    ]


def source(cell):
    return "".join(cell["source"])


def text(path):
    return "\n\n".join(source(cell) for cell in cells(path, "markdown"))


def tags(cell):
    return cell["metadata"].get("tags", [])


def is_drawing(cell):
    return "hide-input" in tags(cell)


def lines(cell):
    return [line for line in source(cell).splitlines() if line.strip()]


@pages
def test_drawing_cells_are_folded_and_nothing_is_stored(path):
    for cell in cells(path, "code"):
        assert cell["metadata"].get("jupyter", {}).get(
            "source_hidden", False
        ) == is_drawing(cell), source(cell)
        assert not cell["outputs"]
        assert cell["execution_count"] is None


@pages
def test_the_parameters_cell_says_what_each_means(path):
    (cell,) = [cell for cell in cells(path, "code") if "parameters" in tags(cell)]
    for line in lines(cell):
        (statement,) = ast.parse(line).body
        ast.literal_eval(statement.value)
        assert re.search(r"  # \w", line), line


@each(LESSONS)
def test_a_lesson_opens_with_its_question_and_ends_with_exercises(path):
    first = source(cells(path)[0])
    assert first.startswith(f"# {path.stem[:2]} · ")
    assert "?" in first
    titles = re.findall(r"^## (?:\d+\. )?(.+)$", text(path), re.MULTILINE)
    assert titles[-1] == "Exercises"
    code = "\n".join(map(source, cells(path, "code")))
    assert "widgets.guess(" in code
    assert "runs.claims()" in code
    exercises = text(path).split("## Exercises\n")[1]
    assert exercises.count("min)") >= 2, "each exercise says how hard and how long"
    assert len(solutions(path)) >= 2, "each solution has a block of ```python"
    study = path.parent / "studies" / f"{path.stem}_study.ipynb"
    assert f"](studies/{study.name})" in text(path)
    assert study.exists()


@each(STUDIES)
def test_a_study_names_its_lesson_and_its_claims(path):
    lesson = f"{path.stem.removesuffix('_study')}.ipynb"
    assert f"](../{lesson})" in text(path)
    assert "runs.claims()" in "\n".join(map(source, cells(path, "code")))


COMMITTED = {"17_cheap_ensembles_study", "photographs", "active_learning"}
CLAIMING = [
    path
    for path in parameters.all_notebooks("studies")
    if path.stem != "saved_logits"  # which claims nothing
]


@each([*LESSONS, *CLAIMING])
def test_claims_are_judged_on_five_other_seeds_of_a_pages_present_code(path):
    if path.stem in COMMITTED:  # all that they claim is of committed runs
        claims = "\n".join(map(source, cells(path, "code"))).split("runs.claim(")[1:]
        assert all("other_runs=True" in claim for claim in claims)
        return
    root = Path(__file__).parents[2]
    with (root / "figures" / "seeds" / f"{path.stem}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    seeds = [name for name in rows[0] if name.isdigit()]
    assert len(seeds) == 5
    assert "0" not in seeds
    assert {row["code"] for row in rows} == {code_of(path)}


@pages
def test_links_of_a_page_lead_to_files(path):
    targets = re.findall(r"\]\((?!https?:|attachment:|#)([^)\s]+)\)", text(path))
    assert [
        target
        for target in targets
        if not (path.parent / target.split("#")[0]).exists()
    ] == []
