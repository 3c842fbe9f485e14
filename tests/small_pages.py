"""Copies of the notebooks, each with two more cells: one moves its explorers, one runs its exercises' solutions."""

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path

import nbformat

from uqlab.runs import parameters

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from seeds import code_of, rows_of  # noqa: F401

REAL = Path("figures/real")
TABLES = [  # committed ones that pages read
    REAL / "03_mlp_width_sweep" / "widths.csv",
    REAL / "03_mlp_width_sweep" / "widths_gpu.csv",
    REAL / "13_scoreboard",
    REAL / "08_singular_value_ensemble" / "table.csv",
    REAL / "17_observatory",
]
# An explorer that nobody holds is gone when its cell ends, where no browser is open.
KEEP = """
from uqlab.widgets import Hand

explorers, made = [], Hand.__init__
def keep(self, *args, **named):
    made(self, *args, **named)
    explorers.append(self)
Hand.__init__ = keep
"""
MOVE = """
import json, math
from uqlab import runs

def move(hand):  # which of its controls change the picture from what is shown first
    controls, shown = hand.data["controls"], hand.data["shown"]
    sizes = [len(control["names"]) for control in controls]
    assert len(shown) == len(hand.data["lines"]) == math.prod(sizes)
    moved, first = {}, [control["first"] for control in controls]
    def picture(places):
        at = 0
        for place, size in zip(places, sizes):
            at = at * size + place
        return shown[at]
    for i, size in enumerate(sizes):
        others = [picture([*first[:i], place, *first[i + 1:]]) for place in range(size)]
        if size > 1:
            moved[controls[i]["name"]] = len({*others}) > 1
    return moved

def touch(hand):  # its page alone
    return {hand.name: len(hand.html()) > 1000}

moved_controls = {}
for each in explorers:
    moved_controls |= touch(each) | (move(each) if each.name == "frames" else {})
(runs.output_dir() / "moved.json").write_text(json.dumps(moved_controls))
"""

SOLVE = """
import json, traceback
from uqlab import runs
solved = []
for number, source in enumerate({sources!r}, 1):
    try:
        exec(compile(source, f"solution {{number}}", "exec"), globals())
        solved.append("")
    except Exception:
        solved.append(traceback.format_exc())
(runs.output_dir() / "solved.json").write_text(json.dumps(solved))
"""


def sources(path: Path, kind: str) -> list[str]:
    """What stands in the cells of one kind, code or markdown."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def checking(path: Path) -> str:
    """The lines of a page that check its parameters, up to where it begins."""
    code = sources(path, "code")
    (cell,) = [cell for cell in code if "runs.check(" in cell]
    begins = re.split(
        r"^plots\.use_style|^runs\.begin|\n\n\n", cell, flags=re.MULTILINE
    )
    named = re.findall(
        r"^[A-Z]+(?:, [A-Z]+)* = .+$", "\n".join(code[: code.index(cell)]), re.MULTILINE
    )
    return "\n".join([*named, begins[0]])


def solutions(path: Path) -> list[str]:
    """The ```python blocks in the folded solutions of a page's exercises."""
    text = "\n".join(sources(path, "markdown"))
    folded = re.findall(
        r"<details>(.+?)</details>", text.partition("## Exercises\n")[2], re.DOTALL
    )
    blocks = re.findall(
        r"^ *```python\n(.+?)^ *```", "\n".join(folded), re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(block) for block in blocks]


def ran_for(page: str) -> Path:
    """The notebook whose long runs are kept under a page's name: its study, if it has one."""
    lesson = parameters.find(page)
    study = lesson.parent / "studies" / f"{lesson.stem}_study.ipynb"
    return study if study.exists() else lesson


def copies(folder: Path) -> Path:
    """Copy the lessons with those cells, the studies and the profiles into a folder, which is returned."""
    if not folder.exists():
        folder.mkdir(parents=True)
        for path in parameters.all_notebooks():
            page = nbformat.read(path, 4)
            page.cells.insert(0, nbformat.v4.new_code_cell(KEEP, id="keeps"))
            page.cells.append(nbformat.v4.new_code_cell(MOVE, id="moves"))
            page.cells.append(
                nbformat.v4.new_code_cell(
                    SOLVE.format(sources=solutions(path)), id="solves"
                )
            )
            nbformat.write(page, folder / path.name)
        for kind in ("studies", "rows"):
            shutil.copytree(path.parent / kind, folder / kind)
        shutil.copy(path.parent / "profiles.yaml", folder)
        for table in TABLES:
            (folder.parent / table).parent.mkdir(parents=True, exist_ok=True)
            source = path.parents[1] / table
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder.parent / table)
    return folder
