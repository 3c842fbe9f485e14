"""Lessons as they look when they have run, for readers without Python: docs/, which GitHub shows.

    python tools/render.py          every lesson, and the table of contents
    python tools/render.py 03 07    those lessons alone, and the table of contents

A page is made from the lesson's run in figures/quick. `uqlab run` first makes the runs that are missing, and those of
other code, values, data or committed tables. Folded code is left out. Explorers need a browser's scripts: a line says
where they are. Each page ends with the checksum of its lesson, which tests/test_docs.py holds.
"""

import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from bs4 import BeautifulSoup
from PIL import Image

from uqlab.core.files import Values
from uqlab.core.recording import Record
from uqlab.runs import parameters
from uqlab.runs.manifest import Manifest, Present

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 80_000  # bytes of a picture
# Colours and share of the width: the first that make a picture small enough are taken.
SMALLER = (256, 1), (128, 1), (64, 1), (128, 0.75), (64, 0.5), (16, 0.5), (8, 0.3)
FOLDED = {"hide-input", "parameters", "injected-parameters", "setup"}
KEY = re.compile(r"^ *### (BEGIN|END) SOLUTION\n?", re.M)
CODE = re.compile(r"(^[ .\d]*```.*?^ *```|`[^`\n]+`)", re.M | re.S)
NUMBER = re.compile(r"[-−]?\d[\d,.]*(e[-+]?\d+)?( %)?( ± [\d.]+)?")
NOTHING = ("", "–", "not run")
EXPLORERS = {
    "alarm": "Set the threshold of an alarm, and see which inputs it catches.",
    "cloud": "Drag the predictions of the members, and watch the split.",
    "draw": "Draw an input of your own, and see what the networks answer.",
    "frames": "Move the controls of this picture.",
    "front": "Choose a method by what it costs and how good it is.",
    "map": "Remove attention heads, and see what changes.",
    "sounds": "Listen to the sounds.",
    "spectra": "Compare the directions of weights before and after training.",
}

CONTENTS = """# The lessons, with their results

[The essay](essay.html) tells the story of the first lessons in eight minutes, and every figure in it can be played with:
download the file and open it in a browser. It loads nothing.

To read the lessons nothing has to be installed. In the notebooks you change every value, draw, drag and guess:
[how to run them](../README.md). [The guide](../notebooks/README.md) has the lessons by track, and a glossary.
[What did not hold](did_not_hold.md) lists every sentence that was tried and fell.
"""


def up_to_date(notebook: Path, figures: Path) -> bool:
    """Whether a lesson's run is whole, and of today's source, values, package, data and committed tables."""
    run = figures / "quick" / notebook.stem
    made = Manifest.read(run)
    values = parameters.defaults(notebook) | parameters.overrides(notebook)
    values = {n: x for n, x in values.items() if n != "output_dir"}
    now = parameters.source_sha256(notebook), json.loads(json.dumps(values))
    if (made.source_sha256, made.parameters) != now:
        return False
    text = notebook.read_text("utf-8")
    tables = [*figures.glob(f"seeds/{notebook.stem}.csv")]
    for path in figures.glob("real/*/*"):
        if path.parent.name == notebook.stem or path.parent.name in text:
            tables.append(path)
    written = (run / "manifest.json").stat().st_mtime
    old = any(path.stat().st_mtime > written for path in tables)
    return not old and not Present().stale(made) and made.undamaged(run)


def prose(text: str) -> str:
    """Return a lesson's Markdown as GitHub takes it from docs/lessons/: its links and formulas."""
    parts = CODE.split(text)
    for i in range(0, len(parts), 2):  # between pieces of code
        part = re.sub(r"(?<=\]\()[^)\s]+", lambda link: moved(link[0]), parts[i])
        part = re.sub(
            r"^\$\$\s*(.+?)\s*\$\$$", r"```math\n\1\n```", part, flags=re.M | re.S
        )
        between = re.split(r"(^```.*?^```)", part, flags=re.M | re.S)
        for j in range(0, len(between), 2):
            between[j] = re.sub(r"\$(?!\s)([^$]+?)(?<!\s)\$", formula, between[j])
        parts[i] = "".join(between)
    return "".join(parts).strip()


def formula(found: re.Match) -> str:
    """Return a formula between backticks, as GitHub wants it where it holds Markdown's own characters."""
    text = found[1].replace("\n", " ")
    return f"$`{text}`$" if re.search(r"[\\_*<>|~[\]]", text) else f"${text}$"


def moved(link: str) -> str:
    """Return a lesson's link as it is from docs/lessons/; a link to a lesson leads to its page."""
    path, mark, anchor = link.partition("#")
    if not path or re.match(r"\w+:|/", path):
        return link
    if re.fullmatch(r"\d\d_\w+\.ipynb", path):
        return path.replace(".ipynb", ".md") + mark + anchor
    return os.path.relpath(f"notebooks/{path}", "docs/lessons") + mark + anchor


def head(cells: list[Values]) -> tuple[str, str, str]:
    """Return the title, the hook and the rest of a lesson's first cell."""
    text = "".join(cells[0]["source"]).strip()
    title, hook, rest = (*re.split(r"\n\s*\n", text, maxsplit=2), "", "")[:3]
    return title.removeprefix("# "), hook, rest


class Page:
    """A lesson with the results of its run: `text`, and pictures in a folder."""

    def __init__(self, notebook: Path, run: Path, pictures: Path):
        self.pictures = pictures
        self.heard = False
        self.caption = ""  # of the last picture; some lessons print it too
        shutil.rmtree(pictures, ignore_errors=True)
        pictures.mkdir(parents=True)
        self.figures = {
            (run / f"{name}.png").read_bytes(): (name, about["caption"])
            for name, about in Record.read(run).figures.items()
            if (run / f"{name}.png").exists()
        }
        cells = parameters.cells(run / notebook.name)
        title, hook, rest = head(cells)
        self.notebook = f"../../notebooks/{notebook.name}"
        where = f"[notebook]({self.notebook}) | run it: `uqlab lab` | [all lessons](../README.md)"
        left = (
            "Cells that only prepare or draw are left out here; the notebook has all."
        )
        parts = [f"# {title}", prose(hook), f"{where}\n\n*{left}*", prose(rest)]
        for cell in cells[1:]:
            parts += self.cell(cell)
        parts.append(f"<!-- sha256 {parameters.source_sha256(notebook)} -->\n")
        self.text = "\n\n".join(part for part in parts if part)

    def cell(self, cell: Values) -> Iterator[str]:
        """Yield what a cell shows."""
        source = "".join(cell["source"]).strip()
        tags = set(cell["metadata"].get("tags", []))
        if cell["cell_type"] == "markdown":
            yield prose(source)
            return
        hidden = cell["metadata"].get("jupyter", {}).get("source_hidden")
        if source and not hidden and not FOLDED & tags:
            code = f"```python\n{KEY.sub('', source).strip()}\n```"
            yield folded("A solution", code) if "your-turn" in tags else code
        for output in cell.get("outputs", ()):
            if output.get("name") == "stdout":
                yield printed("".join(output["text"]))
            elif "data" in output:
                data = {kind: "".join(x) for kind, x in output["data"].items() if x}
                yield from self.output(cell["id"], data, output["metadata"])

    def output(
        self, cell: str, data: dict[str, str], metadata: Values
    ) -> Iterator[str]:
        """Yield what a displayed thing shows: nothing, if it is an object that only has a name."""
        plain = data.get("text/plain", "")
        if "image/png" in data:
            image = b64decode(data["image/png"])
            here = f"{cell}_{len([*self.pictures.iterdir()])}"
            name, caption = self.figures.get(image, (here, ""))
            width = metadata.get("image/png", {}).get("width")
            self.caption = caption
            yield self.picture(image, name, caption, width)
        elif "text/html" in data:
            soup = BeautifulSoup(data["text/html"], "html.parser")
            if frame := soup.find("iframe"):
                yield from self.explorer(cell, frame["title"], frame["srcdoc"], plain)
            elif soup.find("audio") and not self.heard:
                self.heard = True  # one line for all sounds of a page
                yield from self.explorer(cell, "sounds", "", "")
            elif soup.find("table"):
                yield table(soup)
        elif "text/markdown" in data:
            yield prose(data["text/markdown"].removeprefix(self.caption))
        elif set(data) == {"text/plain"} and not re.match(r"<|[\w.]*[A-Z]\w*\(", plain):
            yield f"```text\n{plain}\n```"

    def explorer(self, cell: str, name: str, page: str, plain: str) -> Iterator[str]:
        """Yield the first picture of an explorer, if it has one, and where it is; or a guess."""
        script = BeautifulSoup(page, "html.parser").find(id="data")
        data = json.loads(script.string) if script else {}
        if name == "guess":
            yield from guess(**data)
            return
        if pictures := data.get("pictures"):
            image, width = b64decode(pictures[0].split(",")[1]), 130 * data["inches"][0]
            yield self.picture(image, f"{cell}_explorer", plain, round(width))
        what = EXPLORERS.get(name, "There is more to try.")
        link = f"[notebooks/{Path(self.notebook).name}]({self.notebook})"
        yield f"> **Try it.** {what} This needs the notebook: `uqlab lab`, then {link}"

    def picture(self, image: bytes, name: str, caption: str, width: int | None) -> str:
        """Write a picture; return what shows it, with its caption."""
        path = self.pictures / f"{name}.png"
        path.write_bytes(small(Image.open(io.BytesIO(image))))
        alt, size = html.escape(caption), f' width="{width}"' if width else ""
        shown = f'<img src="{self.pictures.name}/{path.name}" alt="{alt}"{size}>'
        return f"{shown}\n\n*{prose(caption)}*" if caption else shown


def small(image: Image.Image) -> bytes:
    """Return a PNG of few colours on white, of at most LARGEST bytes."""
    white = Image.new("RGBA", image.size, "white")
    image = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    for colours, share in SMALLER:
        file = io.BytesIO()
        size = [round(share * pixels) for pixels in image.size]
        # The method that keeps rare colours, those of lines and letters.
        few = image.resize(size).quantize(colours, Image.Quantize.MAXCOVERAGE, dither=0)
        few.save(file, "PNG", optimize=True)
        if file.tell() <= LARGEST:
            break
    return file.getvalue()


def guess(question, range, unit, choices, answer, then, **_) -> Iterator[str]:
    """Yield a question, and its answer folded."""
    between = f"from {range[0]:g} to {range[1]:g} {unit}".strip()
    choices = " / ".join(choices) or between
    yield f"**Guess first.** {prose(question)} *({choices})*"
    if isinstance(answer, int | float):
        answer = f"{answer:.3g} {unit}".strip()
    if answer or then:
        yield folded("Answer", f"**{answer}.** {prose(then)}" if answer else then)


def printed(text: str) -> str:
    """Return printed text without bars of progress and the lesson's last line, which says where it ran."""
    lines = [line for line in text.split("\n") if "\r" not in line]
    lines = [line for line in lines if not re.match(r"uqlab .+, torch ", line)]
    lines = ["\n".join(wrap(line, 100)) if len(line) > 100 else line for line in lines]
    text = "\n".join(lines).strip("\n")
    return f"```text\n{text}\n```" if text else ""


def folded(title: str, text: str) -> str:
    """Return a text that opens on a click."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def table(soup) -> str:
    """Return an HTML table as Markdown, numbers on the right, without its empty columns."""
    grid = []
    for row in soup.find_all("tr"):
        line = []
        for cell in row.find_all(["th", "td"]):
            text = prose(" ".join(cell.get_text().split())).replace("|", "\\|")
            line += [text] * int(cell.get("colspan", 1))
        grid.append(line)
    width = max(map(len, grid))
    grid = [[""] * (width - len(line)) + line for line in grid]  # below a tall cell
    above = len(soup.select("thead tr"))
    columns = []
    for column in zip(*grid, strict=True):
        values = [value for value in column[above:] if value not in NOTHING]
        if values or len(grid) == above:
            mark = "---:" if all(map(NUMBER.fullmatch, values)) else "---"
            columns.append([" ".join(column[:above]).strip(), mark, *column[above:]])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def contents(lessons: list[Path], docs: Path) -> str:
    """Return docs/README.md: a picture, the title and the question of each lesson."""
    cells = []
    for notebook in lessons:
        page = f"lessons/{notebook.stem}.md"
        title, hook, _ = head(parameters.cells(notebook))
        hook = prose(hook).removeprefix("**Question.** ")
        shown = re.findall(r'<img src="(.+?)"', (docs / page).read_text("utf-8"))
        shown.sort(key=lambda path: path.endswith("_explorer.png"))
        picture = f"[![{title}](lessons/{shown[0]})]({page})\n\n" if shown else ""
        text = f"{picture}**[{title}]({page})**<br>{hook}"
        cells.append(f'<td width="50%" valign="top">\n\n{text}\n\n</td>\n')
    rows = [
        "<tr>\n" + "".join(cells[i : i + 2]) + "</tr>\n"
        for i in range(0, len(cells), 2)
    ]
    return f"{CONTENTS}\n<table>\n{''.join(rows)}</table>\n"


def main(names: list[str]) -> None:
    """Run lessons where that is needed, by default all; write their pages and the contents."""
    os.chdir(ROOT)
    every = parameters.all_notebooks()
    lessons = [parameters.find(name) for name in names] or every
    figures, docs, pages = Path("figures"), Path("docs"), Path("docs/lessons")
    todo = [path.stem for path in lessons if not up_to_date(path, figures)]
    command = [sys.executable, "-m", "uqlab.runs", "run", "--profile", "quick", *todo]
    if todo and subprocess.run(command, check=False).returncode:
        sys.exit("a lesson failed, so no page was written")
    for notebook in lessons:
        folder = figures / "quick" / notebook.stem
        page = Page(notebook, folder, pages / notebook.stem)
        (pages / f"{notebook.stem}.md").write_text(page.text, "utf-8")
    for path in pages.iterdir():
        if path.stem not in [notebook.stem for notebook in every]:  # it is gone
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    written = [path for path in every if (pages / f"{path.stem}.md").exists()]
    (docs / "README.md").write_text(contents(written, docs), "utf-8")
    size = sum(path.stat().st_size for path in docs.rglob("*") if path.is_file())
    print(f"{len(written)} lessons, {len(todo)} run now, {size / 1e6:.1f} MB in {docs}")


if __name__ == "__main__":
    main(sys.argv[1:])
