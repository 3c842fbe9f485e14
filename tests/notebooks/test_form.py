"""A page's form: folded cells of drawing, sections that every page has; tools/pages.py has the lessons' limits."""

import ast
import csv
import functools
import json
import re

import pytest
from small_pages import code_of, is_split, solutions

from uqlab.runs import parameters

LESSONS = parameters.all_notebooks()
STUDIES = [
    path for path in parameters.all_notebooks("studies") if path.stem.endswith("_study")
]


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


pages = each([*LESSONS, *STUDIES])
unsplit = each([path for path in LESSONS if not is_split(path)])
split = each([path for path in LESSONS if is_split(path)])


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


def is_setup(cell):
    return "parameters" in tags(cell) or source(cell).lstrip().startswith(
        ("import ", "from ", "# %pip")
    )


def lines(cell):
    return [line for line in source(cell).splitlines() if line.strip()]


@unsplit
def test_cells_are_few_and_short(path):
    assert 15 <= len(cells(path)) <= 45
    code = [cell for cell in cells(path, "code") if not is_setup(cell)]
    ideas = [cell for cell in code if not is_drawing(cell)]
    assert len(ideas) <= 20
    assert [source(cell) for cell in ideas if len(lines(cell)) > 12] == []
    assert [source(cell) for cell in cells(path, "code") if len(lines(cell)) > 25] == []
    kinds = [
        "text" if c["cell_type"] == "markdown" else "idea" if c in ideas else ""
        for c in cells(path)
    ]
    assert "idea idea idea" not in " ".join(kind for kind in kinds if kind), (
        "three idea cells without a sentence"
    )


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


@unsplit
def test_a_page_opens_with_its_question_and_what_it_takes(path):
    first = source(cells(path)[0])
    assert first.startswith(f"# {path.stem[:2]} · ")
    assert re.search(r"\*\*Takes\*\* .+ on two\s+cores", first)
    assert "?" in first
    assert "<details>" in text(path).split("## Exercises")[0], (
        "the finding is folded, behind the reader's guess"
    )


@unsplit
def test_a_page_ends_with_the_paper_the_claims_and_three_exercises(path):
    found = re.findall(r"^## (?:\d+\. )?(.+)$", text(path), re.MULTILINE)
    assert found[-1] == "Exercises"
    assert "Paper and this run" in found
    code = "\n".join(map(source, cells(path, "code")))
    assert "runs.claim(" in code
    assert "runs.claims()" in code
    asked = re.sub(
        r"<details>.+?</details>",
        "",
        text(path).split("## Exercises\n")[1],
        flags=re.DOTALL,
    )
    assert re.findall(r"^(?:\*\*)?(\d)\. ", asked, re.MULTILINE) == ["1", "2", "3"]
    assert len(solutions(path)) >= 3, "each solution has a block of ```python"


@split
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


@pytest.mark.parametrize(
    "table",
    sorted((LESSONS[0].parents[1] / "figures" / "seeds").glob("*.csv")),
    ids=lambda table: table.stem,
)
def test_the_table_of_other_seeds_belongs_to_the_page(table):
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    seeds = [name for name in rows[0] if name.isdigit()]
    assert len(seeds) == 5
    assert "0" not in seeds
    assert {row["code"] for row in rows} == {code_of(parameters.find(table.stem))}


@pages
def test_links_of_a_page_lead_to_files(path):
    targets = re.findall(r"\]\((?!https?:|attachment:|#)([^)\s]+)\)", text(path))
    assert [
        target
        for target in targets
        if not (path.parent / target.split("#")[0]).exists()
    ] == []
