"""The table of the papers' tables and figures: nothing is missing, and what it names exists."""

import re
from pathlib import Path

import pytest
import yaml
from small_pages import ran_for
from test_teaching import cells, headings, page, saved

from uqlab.runs import parameters
from uqlab.study import published

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "notebooks" / "papers.md").read_text()
SHARED = ROOT.parent / "shared" / "papers"
PAPERS = {
    "kirsch": "Kirsch 2024",
    "lora": "LoRA-Ensemble",
    "sve": "Singular value",
    "hydra": "Hydra",
    "regrad": "REGrad",
}
LAST = {
    "kirsch": (6, 6),
    "lora": (18, 23),
    "sve": (0, 0),
    "hydra": (7, 28),
    "regrad": (0, 0),
}  # figures, tables


def rows(heading):
    """The rows of the table below a heading, [cell, ...] each."""
    (below,) = [
        part
        for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
        if part.startswith(heading)
    ]
    lines = [line for line in below.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named(cell):
    """ "Tables 6, 19-22; Figs 3, 12" -> table_6, table_19, ... table_22, fig_3, fig_12."""
    found = []
    for kind, numbers in re.findall(r"(Table|Fig|Digest)s?\.? ([\d, -]+)", cell):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", numbers):
            found += [
                f"{kind.lower()}_{n}" for n in range(int(first), int(last or first) + 1)
            ]
    return found


SHOWN = [(paper, row) for paper, heading in PAPERS.items() for row in rows(heading)]
NOT_SHOWN = rows("Not shown here")
pages = pytest.mark.parametrize(
    ("paper", "row"), SHOWN, ids=lambda part: part if isinstance(part, str) else part[0]
)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_stands_in_it_once(paper):
    shown = [name for which, row in SHOWN if which == paper for name in named(row[0])]
    left = [
        name
        for which, names, _ in NOT_SHOWN
        if which.startswith(PAPERS[paper])
        for name in named(names)
    ]
    figures, tables = LAST[paper]
    expected = [f"fig_{n}" for n in range(1, figures + 1)] + [
        f"table_{n}" for n in range(1, tables + 1)
    ]
    expected += [
        name for name in dir(getattr(published, paper)) if name.startswith("digest")
    ]
    assert sorted(shown + left) == sorted(expected)
    assert set(dir(getattr(published, paper))) <= {*expected, "study_1"}
    assert all(reason for _, _, reason in NOT_SHOWN)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the papers' text is not here")
@pytest.mark.parametrize("paper", ["kirsch", "lora", "hydra"])
def test_the_last_numbers_are_those_of_the_papers(paper):
    text = (SHARED / getattr(published, paper).entry["text"]).read_text()
    numbers = [
        re.findall(rf"^[\d\s*]*{kind} (\d+):", text, re.MULTILINE)
        for kind in ("Figure", "Table")
    ]
    assert tuple(max(map(int, found)) for found in numbers) == LAST[paper]


@pages
def test_pages_sections_and_figures_exist(paper, row):
    _, what, here, setting = row
    assert what
    assert setting
    found = re.findall(r"\b(\d\d), ((?:\*[^*]+\*(?:, )?)+)", here)
    assert found
    for number, sections in found:
        known = [
            re.sub(r"^\d\. ", "", one)
            for one in headings("\n".join(cells(page(number), "markdown")))
        ]
        assert [
            one for one in re.findall(r"\*([^*]+)\*", sections) if one not in known
        ] == []
    for number, figure in re.findall(r"`(\d\d)/(\w+)`", here):
        assert figure in saved(page(number)), f"{number}/{figure}"


@pages
def test_a_profile_that_is_named_alone_has_the_papers_settings(paper, row):
    names, _, here, setting = row
    known = [name for name in named(names) if name in dir(getattr(published, paper))]
    profile = re.fullmatch(r"`(\w+)`(?: with ((?:`\w+=[^`]+`(?:, )?)+))?", setting)
    if not profile:
        assert not setting.startswith("`") or "`, but" in setting
        return
    given = dict(each.split("=") for each in re.findall(r"`([^`]+)`", profile[2] or ""))
    notebook = ran_for(re.search(r"\d\d", here)[0])
    values = parameters.defaults(notebook) | parameters.overrides(notebook, profile[1])
    values |= {name: yaml.safe_load(value) for name, value in given.items()}
    assert known
    for name in known:
        assert (
            published.differs(getattr(getattr(published, paper), name).settings, values)
            == []
        ), name
