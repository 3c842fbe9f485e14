"""The guides of lessons, for teachers and to the papers' tables, name what exists."""

import ast
import functools
import re
from pathlib import Path

from small_pages import sources

from uqlab.runs import parameters

ROOT = Path(__file__).parents[2]
LESSONS = {path.stem[:2]: path for path in parameters.all_notebooks()}
TEXTS = {
    name: (ROOT / "notebooks" / name).read_text()
    for name in ("README.md", "teaching.md", "papers.md")
}
GUIDES = "\n".join(TEXTS.values())
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


@functools.cache
def cells(number, kind):
    """The cells of a lesson and of its study."""
    path = LESSONS[number]
    study = path.parent / "studies" / f"{path.stem}_study.ipynb"
    return sources(path, kind) + (sources(study, kind) if study.exists() else [])


@functools.cache
def headings(number):
    found = re.findall(
        r"^#+ (?:\d\. )?(.+)$", "\n".join(cells(number, "markdown")), re.MULTILINE
    )
    return {*found}


@functools.cache
def saved(number):
    """The names of the figures that a lesson and its study save."""
    code = re.sub(
        r"^\s*[%!].*", "", "\n".join(cells(number, "code")), flags=re.MULTILINE
    )
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    names = [
        c.args[1]
        for c in calls
        if ast.unparse(c.func) == "plots.save" and len(c.args) > 1
    ]
    return {name.value for name in names if isinstance(name, ast.Constant)}


def rows(text, heading):
    """The cells of each row of the table below a heading."""
    below = re.split(r"^## ", text.split(f"\n## {heading}")[1], flags=re.MULTILINE)[0]
    lines = [line for line in below.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_index_links_every_lesson_once_by_its_title():
    titles = [
        re.sub(r"^# (\d\d)\W+", r"\1 ", cells(number, "markdown")[0].splitlines()[0])
        for number in LESSONS
    ]
    index = "\n".join(map(" | ".join, rows(TEXTS["README.md"], "The lessons")))
    linked = [
        pair
        for pair in LINK.findall(index)
        if pair[0][:2] in LESSONS and pair[0] in titles
    ]
    assert linked == [
        (title, path.name) for title, path in zip(titles, LESSONS.values(), strict=True)
    ]
    for number in LESSONS:
        said = re.search(
            r"\*read (.+?), run (.+?), exercises (.+?)\*", cells(number, "markdown")[0]
        )
        assert ", ".join(said.groups()) in index, number


def test_figures_and_sections_that_are_named_exist():
    for number, figure in re.findall(r"`(\d\d)/(\w+)`", GUIDES):
        assert figure in saved(number), (number, figure)
    for number, names in re.findall(r"\b(\d\d), ((?:\*[^*]+\*(?:, )?)+)", GUIDES):
        assert {*re.findall(r"\*([^*]+)\*", names)} <= headings(number), number
    for lesson, *said in rows(TEXTS["teaching.md"], "Lesson by lesson"):
        number, shown = LINK.fullmatch(lesson)[1], " ".join(said)
        assert {*re.findall(r"`(\d\d)/\w+`", shown)} <= {number}
