"""The notebooks run at the `tiny` profile, and show what they claim to show."""

import json
import re

import pytest
from small_pages import sources

from uqlab.runs import parameters

NOTEBOOKS = [path.stem for path in parameters.all_notebooks()]
STUDIES = [
    path.stem
    for path in parameters.all_notebooks("studies")
    if path.stem.endswith("_study")
]


@pytest.mark.parametrize("name", [*NOTEBOOKS, *STUDIES])
def test_runs_and_describes_what_it_wrote(results, name):
    recorded, folder = results(name)
    assert recorded["numbers"]
    assert recorded["figures"]
    for figure, about in recorded["figures"].items():
        assert len(about["caption"]) > 20, figure
        assert {(folder / file).suffix for file in about["files"]} == {".png", ".pdf"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_control_of_its_explorer_changes_the_picture(pages, name):
    """Each to all its places, a slider to its ends; then `reset` restores the picture (tests/small_pages.py)."""
    moved = json.loads((pages(name) / "moved.json").read_text())
    assert moved
    assert [control for control, changed in moved.items() if not changed] == []


@pytest.mark.parametrize("name", [*NOTEBOOKS, *STUDIES])
def test_every_claim_says_how_far_it_is_from_its_bound(results, name):
    """Whether they hold is a matter of `quick` and of other seeds: figures/seeds."""
    claims = results(name)[0]["claims"]
    assert len([claim for claim in claims.values() if not claim["algebra"]]) >= 2
    without = [
        key
        for key, claim in claims.items()
        if claim["margin"] is None and not claim["algebra"]
    ]
    assert without == []
    if name in NOTEBOOKS:
        assert len(claims) <= 5
        assert len(results(name)[0]["figures"]) <= 5


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_solutions_of_its_exercises_run(pages, name):
    """The blocks of code in them, in order, after the page's last cell; they may assert (tests/small_pages.py)."""
    solved = json.loads((pages(name) / "solved.json").read_text())
    assert "".join(solved) == ""


@pytest.mark.parametrize(
    "path",
    [*parameters.all_notebooks(), *parameters.all_notebooks("studies")],
    ids=lambda path: path.stem,
)
def test_first_cell_installs_nothing_and_says_how(path):
    code = sources(path, "code")
    clone, extra = re.match(
        r"# %pip install '(.+)\[(\w+)\]'  # where uqlab is missing", code[0]
    ).groups()
    assert (path.parent / clone / "pyproject.toml").is_file()
    assert extra == "notebooks"
    assert not [
        line
        for source in code
        for line in source.splitlines()
        if line.startswith(("%", "!"))
    ]
