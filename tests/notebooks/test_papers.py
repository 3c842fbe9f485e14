"""The table of the papers' tables and figures: nothing is missing, and what it names exists."""

import re
from collections import Counter

import pytest
import yaml
from small_pages import ran_for
from test_teaching import ROOT, TEXTS, rows

from uqlab.runs import parameters
from uqlab.study import published

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
    text = (SHARED / getattr(published, paper).text).read_text()
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
