"""The table of the papers' tables and figures: nothing is missing, and what it names exists."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from small_pages import ran_for
from test_teaching import NOTEBOOKS, cells, headings, page, saved

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
SHAPES = {  # of each table in the paper: data sets x rows x columns
    "kirsch": "1x7x4 1x7x7 3x7x3 3x7x3 1x16x3 1x16x3",
    "lora": """1x7x5 1x9x5 1x5x5 1x6x4 1x7x5 1x5x5 1x3x6 1x6x5 1x2x3 3x4x6 1x7x3 1x5x5
        1x6x6 1x8x2 1x4x5 1x3x5 1x25x5 1x13x2 1x2x2 1x2x2 1x5x2 1x2x3 1x3x2""",
    "hydra": """2x12x8 1x8x8 1x7x8 3x3x8 1x6x4 1x2x10 1x5x6 1x8x8 1x7x4 1x4x10 1x3x8
        2x3x8 1x12x6 1x12x6 1x11x9 1x13x9 1x9x9 1x9x9 1x9x9 1x9x6 1x13x9 1x13x9
        1x11x15 1x27x10 1x21x6 1x27x6 1x12x10 2x4x9""",
}
DEVIATIONS = {  # how many are legible
    "lora": {1: 35, 2: 45, 3: 25, 4: 20, 5: 35, 6: 25, 7: 12, 8: 30, 10: 60, 14: 16}
    | {16: 5, 19: 2},
    "hydra": {12: 16},
}
LEFT_OUT = {  # numbers with a point: printed, and in papers.md with the reason
    ("kirsch", 1): 1,
    ("lora", 7): 1,  # a number twice
    ("lora", 16): 2,
    ("hydra", 5): 12,
    ("hydra", 15): 9,
    ("hydra", 23): 29,
}
TABLES = [
    (paper, number)
    for paper in SHAPES
    for number in range(1, len(SHAPES[paper].split()) + 1)
]


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
NO_PAGE = rows("Numbers on no page")
NOT_PRINTED = rows("Not in print here")
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
    expected += [name for name in entries(paper) if name.startswith("digest")]
    assert sorted(shown + left) == sorted(expected)
    assert set(entries(paper)) <= {*expected}
    assert all(reason for _, _, reason in NOT_SHOWN)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the papers' text is not here")
@pytest.mark.parametrize("paper", ["kirsch", "lora", "hydra"])
def test_the_last_numbers_are_those_of_the_papers(paper):
    text = (SHARED / getattr(published, paper).text).read_text()
    numbers = [
        re.findall(rf"^[\d\s*]*{kind} (\d+):", text, re.MULTILINE)
        for kind in ("Figure", "Table")
    ]
    assert tuple(max(map(int, found)) for found in numbers) == LAST[paper]


def entries(paper):
    return [name for name in vars(getattr(published, paper)) if "_" in name]


def listed(table, paper):
    """The tables of a paper that one of the lists names."""
    return {
        name
        for which, names, _ in table
        if which.startswith(PAPERS[paper])
        for name in named(names)
    }


def decimals(text):
    return [float(each) for each in re.findall(r"-?\d*\.\d+(?:e-?\d+)?", text)]


def printed(paper, number):
    """The lines of a table in the paper's text, below its caption or above."""
    text = (SHARED / getattr(published, paper).text).read_text()
    parts = re.split(r"\n\s*\n", text)
    captions = [re.search(r"^[\d\s*]*Table (\d+):", p, re.MULTILINE) for p in parts]
    place = next(i for i, found in enumerate(captions) if found and found[1] == number)
    for part, caption in zip(parts[place:], captions[place:], strict=True):
        if caption and caption[1] != number:
            break
        if "\t" in part:
            return part
    return parts[place - 1]


@pytest.mark.parametrize("paper", SHAPES)
def test_each_table_has_the_papers_rows_and_columns(paper):
    for number, shape in enumerate(SHAPES[paper].split(), 1):
        table = getattr(getattr(published, paper), f"table_{number}")
        frames = [table.frame(dataset) for dataset in table.datasets]
        found = {f"{len(frames)}x{len(each)}x{each.shape[1]}" for each in frames}
        assert found == {shape}, number
        deviations = {**table.entry, "data": table.entry.get("deviations", {})}
        spread = [
            published.Table("", deviations).frame(dataset) for dataset in table.datasets
        ]
        for each, numbers in zip(spread, frames, strict=True):
            assert {*each.index} <= {*numbers.index}
            assert {*each.columns} <= {*numbers.columns}
        count = sum(each.count().sum() for each in spread)
        assert count == DEVIATIONS.get(paper, {}).get(number, 0), number
    assert len(SHAPES[paper].split()) == LAST[paper][1]
    left = {f"table_{n}" for which, n in LEFT_OUT if which == paper}
    assert left <= listed(NOT_PRINTED, paper)


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
    left = Counter(decimals(printed(paper, str(number)))) - known
    assert left.total() == LEFT_OUT.get((paper, number), 0), left


def on_pages(paper):
    """The tables and digests of a paper that a page's code reads or its text names."""
    found = set()
    for path in NOTEBOOKS:
        code = "\n".join(cells(path, "code"))
        objects = [rf"published\.{paper}", rf"\b{paper}"]
        if f"paper = published.{paper}\n" in code:
            objects.append(r"\bpaper")
            found |= {*re.findall(r'"(table_\d+)", "', code)}
        kinds = r"((?:table|digest)_\d+)\b"
        found |= {*re.findall(rf"(?:{'|'.join(objects)})\.{kinds}", code)}
    return found


@pytest.mark.parametrize("paper", PAPERS)
def test_no_page_reads_the_numbers_that_are_said_to_be_on_none(paper):
    assert not listed(NO_PAGE, paper) & on_pages(paper)
    seen = on_pages(paper)
    if paper == "hydra":  # 09 and 14 have some in sentences; 09 reads others by number
        prose = [cell for path in NOTEBOOKS for cell in cells(path, "markdown")]
        text = "\n".join(cell for cell in prose if not cell.startswith("# "))
        seen |= {*named(text.replace(" and ", ", "))}
        code = "\n".join(cell for path in NOTEBOOKS for cell in cells(path, "code"))
        boards = "".join(re.findall("BOARDS.*", code))
        for board in re.findall(r"\((\d+(?:, \d+)+)\)", boards):
            seen |= {f"table_{number}" for number in board.split(", ")}
    tables = {n for n in entries(paper) if not n.startswith("fig")}
    assert tables - listed(NO_PAGE, paper) <= seen


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
    known = [name for name in named(names) if name in entries(paper)]
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
