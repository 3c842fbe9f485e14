"""A page's form: few and short cells of ideas, folded cells of drawing, sections that every page has."""

import ast
import functools
import json
import re

import pytest
from small_pages import UNCONVERTED, solutions

from uqlab.runs import parameters

NOTEBOOKS = [
    path for path in parameters.all_notebooks() if path.stem[:2] not in UNCONVERTED
]
pages = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])


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


@pages
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


@pages
def test_a_page_opens_with_its_question_and_what_it_takes(path):
    first = source(cells(path)[0])
    assert first.startswith(f"# {path.stem[:2]} · ")
    assert re.search(r"\*\*Takes\*\* .+ on two\s+cores", first)
    assert "?" in first
    assert "<details>" in text(path).split("## Exercises")[0], (
        "the finding is folded, behind the reader's guess"
    )


@pages
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


@pages
def test_links_of_a_page_lead_to_files(path):
    targets = re.findall(r"\]\((?!https?:|attachment:|#)([^)\s]+)\)", text(path))
    assert [
        target
        for target in targets
        if not (path.parent / target.split("#")[0]).exists()
    ] == []
