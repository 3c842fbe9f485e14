"""A page's form, without a run; tools/pages.py has the lessons' limits."""

import ast
import csv
import functools
import json
import re
from pathlib import Path

import pytest
from small_pages import code_of, solutions, sources

from uqlab.runs import parameters

ROOT = Path(__file__).parents[2]
LESSONS = parameters.all_notebooks()
ALL_STUDIES = parameters.all_notebooks("studies")
STUDIES = [path for path in ALL_STUDIES if path.stem.endswith("_study")]


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


pages = each([*LESSONS, *STUDIES])


@functools.cache
def cells(path):
    return json.loads(path.read_text())["cells"]


def source(cell):
    return "".join(cell["source"])


def tags(cell):
    return cell["metadata"].get("tags", [])


@pages
def test_drawing_cells_are_folded_and_nothing_is_stored(path):
    for cell in [cell for cell in cells(path) if cell["cell_type"] == "code"]:
        folded = cell["metadata"].get("jupyter", {}).get("source_hidden", False)
        assert folded == ("hide-input" in tags(cell)), source(cell)
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pages
def test_the_parameters_cell_says_what_each_means(path):
    (cell,) = [cell for cell in cells(path) if "parameters" in tags(cell)]
    for line in filter(str.strip, source(cell).splitlines()):
        ast.literal_eval(ast.parse(line).body[0].value)
        assert re.search(r"  # \w", line), line


@each(LESSONS)
def test_a_lesson_opens_with_its_question_and_ends_with_exercises(path):
    first, text = source(cells(path)[0]), "\n\n".join(sources(path, "markdown"))
    assert first.startswith(f"# {path.stem[:2]} · ")
    assert "?" in first
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[-1] == "Exercises"
    assert len(solutions(path)) >= 2, "each solution has a block of ```python"
    code = "\n".join(sources(path, "code"))
    assert "widgets.guess(" in code
    assert "runs.claims()" in code


COMMITTED = {"17_cheap_ensembles_study", "photographs", "active_learning"}


@each([*LESSONS, *(path for path in ALL_STUDIES if path.stem != "saved_logits")])
def test_claims_are_judged_on_five_other_seeds_of_a_pages_present_code(path):
    if path.stem in COMMITTED:  # all that they claim is of committed runs
        claims = "\n".join(sources(path, "code")).split("runs.claim(")[1:]
        assert all("other_runs=True" in claim for claim in claims)
        return
    text = (ROOT / "figures" / "seeds" / f"{path.stem}.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    seeds = {name for name in rows[0] if name.isdigit()}
    assert len(seeds - {"0"}) == 5
    assert {row["code"] for row in rows} == {code_of(path)}


@each([*LESSONS, *ALL_STUDIES])
def test_links_lead_to_files_and_the_first_cell_installs_nothing(path):
    text = "\n\n".join(sources(path, "markdown"))
    targets = re.findall(r"\]\((?!https?:|attachment:|#)([^)#\s]+)", text)
    assert [name for name in targets if not (path.parent / name).exists()] == []
    code = "\n".join(sources(path, "code"))
    said = r"# %pip install '(.+)\[notebooks\]'  # where uqlab is missing"
    assert (path.parent / re.match(said, code)[1] / "pyproject.toml").is_file()
    assert not re.search(r"^[%!]", code, re.MULTILINE)
