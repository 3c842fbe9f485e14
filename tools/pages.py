"""The form of lessons and studies: what `make lint` refuses, a line for each finding.

    python tools/pages.py [repository]

A lesson is notebooks/NN_name.ipynb, a study notebooks/studies/*.ipynb; notebooks/rows/*.ipynb
make their tables. The limits of a lesson are for orientation: a tenth more words pass, and no text is folded or shortened only to pass.
The field's words are wanted in the guides and in the package too.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS, CELLS, FIGURES, LINES, COLUMNS = 1500, 30, 5, 10, 76
CLAIMS = range(3, 6)
# What is not said -> the field's word. Checked in prose and in code, so in labels and claims too.
WORDS_INSTEAD = {
    r"strangers?": "OOD inputs",
    r"rivals?": "baseline",
    r"too sure": "overconfident",
    r"too modest": "underconfident",
    r"dealt at random": "shuffled",
    r"starts of their own": "independent initialisations",
    r"blind draws?": "random pruning",
    r"not told from": "no significant difference",
    r"not resolved": "no significant difference",
    r"judges": "annotators",
    r"in small": "scaled down",
    r"by a hair": "narrowly",
    r"read no order": "conclude no order",
    r"lives? off": "depends on",
    r"intervals? knows?": "reflects",
    r"(trained|stored) numbers": "parameters",
    r"unknown (inputs?|pictures?)": "OOD inputs",
}
# What else is read: guides, docstrings, explorers. The CHANGELOG names what was.
TEXTS = (
    "README.md", "CONTRIBUTING.md", "notebooks/*.md", "notebooks/*.yaml", "book/**/*.md",
    "data/*.md", "figures/real/*.md", "figures/real/*.yaml", "uqlab/*/**/*.py",
    "uqlab/**/*.js", "uqlab/**/*.md", "benchmarks/*.py",
)  # fmt: skip
REPEATED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def source(cell: dict) -> str:
    """Return a cell's text."""
    return "".join(cell["source"])


def tags(cell: dict) -> set[str]:
    """Return a cell's tags."""
    return set(cell["metadata"].get("tags", []))


def prose(cells: list[dict]) -> str:
    """Return the text of a page without code and without what is folded."""
    text = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r"```.*?```", " ", text, flags=re.S)
    return re.sub(r"<details>.*?</details>", " ", text, flags=re.S)


def idea_cells(cells: list[dict]) -> Iterator[tuple[int, str]]:
    """Yield number and text of the cells whose code a reader of a lesson reads."""
    for number, cell in enumerate(cells):
        folded = {"hide-input", "parameters", "setup"} & tags(cell)
        if cell["cell_type"] == "code" and not folded:
            yield number, source(cell)


def in_code(text: str) -> Iterator[str]:
    """Yield what an idea cell may not hold."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > LINES:
        yield f"{len(lines)} lines, at most {LINES}"
    if any(len(line) > COLUMNS for line in lines):
        yield f"a line over {COLUMNS} columns"
    tree = ast.parse(re.sub(r"^[%!].*$", "", text, flags=re.M))
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            yield "a lambda"
        if isinstance(node, REPEATED) and len(node.generators) > 1:
            yield "a comprehension with two for"


def of_words(text: str) -> Iterator[str]:
    """Yield the words of a text that are not the field's."""
    for pattern, better in WORDS_INSTEAD.items():
        for hit in re.finditer(rf"\b{pattern}\b", text, flags=re.I):
            yield f"says {hit[0]!r}; write {better!r}"


def of_all(cells: list[dict]) -> Iterator[str]:
    """Yield what is wrong with a page, be it a lesson or a study."""
    yield from of_words("\n".join(source(cell) for cell in cells))
    if any(cell.get("outputs") for cell in cells):
        yield "holds outputs"


def of_lesson(cells: list[dict]) -> Iterator[str]:
    """Yield what is wrong with a lesson."""
    code = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "code")
    if (count := len(prose(cells).split())) > 1.1 * WORDS:
        yield f"{count} words, at most {WORDS}"
    if len(cells) > CELLS:
        yield f"{len(cells)} cells, at most {CELLS}"
    if (count := code.count("plots.save(")) > FIGURES:
        yield f"{count} figures, at most {FIGURES}"
    if (count := code.count("runs.claim(")) not in CLAIMS:
        yield f"{count} claims, not {CLAIMS.start} to {CLAIMS.stop - 1}"
    if not re.search(r"read \d+ min.*run \d+ s.*exercises \d+ min", source(cells[0])):
        yield "the first cell does not say how long it takes to read, run, exercise"
    for number, text in idea_cells(cells):
        for what in in_code(text):
            yield f"cell {number}: {what}"


def findings(path: Path) -> Iterator[str]:
    """Yield what is wrong with a page."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    yield from of_all(cells)
    if path.parent.name == "notebooks":
        yield from of_lesson(cells)


def main(root: Path) -> int:
    """Print the findings; 1 if there are any."""
    total = 0
    folder = root / "notebooks"
    pages = sorted([*folder.glob("[0-9]*.ipynb"), *folder.glob("*/*.ipynb")])
    found = [(path, findings(path)) for path in pages]
    texts = [path for pattern in TEXTS for path in sorted(root.glob(pattern))]
    found += [(path, of_words(path.read_text(encoding="utf-8"))) for path in texts]
    for path, lines in found:
        for line in lines:
            total += 1
            print(f"{path.relative_to(root)}: {line}")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
