"""The guides of lessons, for teachers and to the papers' tables, name what exists."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from small_pages import ran_for, sources

from uqlab.runs import parameters
from uqlab.study import published

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


def headings(number):
    found = re.findall(
        r"^#+ (?:\d\. )?(.+)$", "\n".join(cells(number, "markdown")), re.MULTILINE
    )
    return {*found}


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


# The table of the papers' tables and figures ------------------------------------------

SHARED = ROOT.parent / "shared" / "papers"
PAPERS = {
    "kirsch": "Kirsch 2024",
    "lora": "LoRA-Ensemble",
    "sve": "Singular value",
    "hydra": "Hydra",
    "regrad": "REGrad",
}
LAST = {"kirsch": (6, 6), "lora": (18, 23), "hydra": (7, 28)}  # figures, tables
LEFT_OUT = {  # numbers with a point: printed, and in papers.md with the reason
    ("kirsch", 1): 1, ("lora", 7): 1, ("lora", 16): 2, ("hydra", 5): 12, ("hydra", 15): 9, ("hydra", 23): 29,
}  # fmt: skip
TABLES = [(paper, number) for paper in LAST for number in range(1, LAST[paper][1] + 1)]
SHOWN = [
    (paper, row)
    for paper, heading in PAPERS.items()
    for row in rows(TEXTS["papers.md"], heading)
]


def named(cell):
    """ "Tables 6, 19-22; Figs 3, 12" -> table_6, table_19, ... table_22, fig_3, fig_12."""
    found = []
    for kind, numbers in re.findall(r"(Table|Fig|Digest)s?\.? ([\d, -]+)", cell):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", numbers):
            every = range(int(first), int(last or first) + 1)
            found += [f"{kind.lower()}_{n}" for n in every]
    return found


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_stands_in_it_once(paper):
    shown = [name for which, row in SHOWN if which == paper for name in named(row[0])]
    for which, names, reason in rows(TEXTS["papers.md"], "Not shown here"):
        assert reason
        shown += named(names) if which.startswith(PAPERS[paper]) else []
    figures, tables = LAST.get(paper, (0, 0))
    expected = [f"fig_{n + 1}" for n in range(figures)] + [
        f"table_{n + 1}" for n in range(tables)
    ]
    expected += [
        name for name in dir(getattr(published, paper)) if name.startswith("digest")
    ]
    assert sorted(shown) == sorted(expected)


def decimals(text):
    return [float(each) for each in re.findall(r"-?\d*\.\d+(?:e-?\d+)?", text)]


def printed(paper, number):
    """The lines of a table in the paper's text, below its caption or above."""
    text = (SHARED / getattr(published, paper).entry["text"]).read_text()
    parts = re.split(r"\n\s*\n", text)
    captions = [re.search(r"^[\d\s*]*Table (\d+):", p, re.MULTILINE) for p in parts]
    place = next(i for i, c in enumerate(captions) if c and c[1] == str(number))
    for part, caption in zip(parts[place:], captions[place:], strict=True):
        if caption and caption[1] != str(number):
            break
        if "\t" in part:
            return part
    return parts[place - 1]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the papers' text is not here")
@pytest.mark.parametrize(("paper", "number"), TABLES)
def test_each_number_of_a_papers_table_is_here_or_left_out_by_name(paper, number):
    entry = getattr(getattr(published, paper), f"table_{number}").entry
    known = Counter()
    for part in ("data", "deviations"):
        for numbers in entry.get(part, {}).values():
            for row, values in numbers.items():
                known.update(decimals(str(row)) if part == "data" else [])
                known.update(values.values() if isinstance(values, dict) else values)
    left = Counter(decimals(printed(paper, number))) - known
    assert left.total() == LEFT_OUT.get((paper, number), 0), left


@pytest.mark.parametrize(
    ("paper", "row"), SHOWN, ids=lambda part: part if isinstance(part, str) else part[0]
)
def test_a_profile_that_is_named_alone_has_the_papers_settings(paper, row):
    names, _, here, setting = row
    profile = re.fullmatch(r"`(\w+)`(?: with ((?:`\w+=[^`]+`(?:, )?)+))?", setting)
    if not profile:
        assert not setting.startswith("`") or "`, but" in setting
        return
    given = dict(each.split("=") for each in re.findall(r"`([^`]+)`", profile[2] or ""))
    notebook = ran_for(re.search(r"\d\d", here)[0])
    values = parameters.defaults(notebook) | parameters.overrides(notebook, profile[1])
    values |= {name: yaml.safe_load(value) for name, value in given.items()}
    tables = getattr(published, paper)
    for name in [name for name in named(names) if name in dir(tables)]:
        assert published.differs(getattr(tables, name).settings, values) == []
