"""Slides of the first five pages for a class, `make slides`: questions, formulas, figures, claims of their last runs.

A section of a page is a column of slides: its formulas, then each guess above the figures that answer it. The prose of
the page is in the speaker's notes (key S). Nothing is run and nothing is fetched; key F is full screen.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conf import (
    RESULTS,
    copy,
    display,
    inline,
    page,
    saved,
)

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(ROOT.glob("notebooks/0[0-4]_*.ipynb"))
extensions = ["myst_parser", "sphinx_revealjs"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"
html_title = "uqlab"
revealjs_static_path = ["slides.css"]
revealjs_css_files = ["slides.css"]
revealjs_style_theme = "white"
revealjs_script_conf = {
    "hash": True,
    "width": 1280,
    "height": 720,
    "transition": "none",
    "slideNumber": True,
}


def gather(app, config):
    """Write one document of slides for each page, and an index of them."""
    source = Path(app.srcdir)
    named = {path.stem: slides(page(path), path.stem, source) for path in PAGES}
    for stem, text in named.items():
        (source / f"{stem}.md").write_text(text)
    listed = "\n".join(
        f"- [{text.splitlines()[0][2:]}]({stem}.md)" for stem, text in named.items()
    )
    head = "# uqlab: uncertainty, page by page\n\n## Choose a page\n\n"
    (source / "index.md").write_text(
        f"{head}{listed}\n\n```{{toctree}}\n:hidden:\n\n" + "\n".join(named) + "\n```\n"
    )


def slides(notebook, stem, source):
    """The slides of a page as Markdown: a heading of the second level begins a column, one of the third a slide."""
    folder = RESULTS / stem
    results = (
        json.loads((folder / "results.json").read_text())
        if (folder / "results.json").exists()
        else {}
    )
    figures, shown = results.get("figures", {}), []
    first, *cells = notebook["cells"]
    text = "".join(first["source"])
    question = re.search(r"\*\*Question\.\*\* (.+?)\n\n", text, re.DOTALL)[1]
    shown += [text.splitlines()[0], "## The question", question, notes(text)]
    heading = ""
    for cell in cells:
        text, *rest = re.split(
            r"^## (?:Try it|The paper and this run)",
            "".join(cell["source"]),
            flags=re.MULTILINE,
        )
        if cell["cell_type"] == "markdown":
            for part in re.split(r"^(?=#{2,3} )", text, flags=re.MULTILINE):
                found = re.match(r"#{2,3} (.+)", part)
                heading = found[1] if found else heading
                shown += of_prose(part, heading, "##" if found else "###")
        if rest:
            break
        shown += guesses(cell, heading)
        for name in [name for name in figures if saved(name, cells) is cell]:
            caption = figures[name]["caption"]
            if (folder / f"{name}.png").exists():
                copy(folder / f"{name}.png", source / stem / f"{name}.png")
                shown += [f"### {heading}", f"![{caption}]({stem}/{name}.png)", caption]
    claims = results.get("claims", {}).values()
    said = [
        f"- {'✓' if one['holds'] else '✗'} {re.sub(r' *[(]margin.*[)]', '', one['sentence'])}"
        for one in claims
    ]
    if said:
        shown += ["## What held in this run (✓), and what did not (✗)", "\n".join(said)]
    text = (
        "\n\n".join(one for one in shown if one) + "\n"
    )  # a heading alone takes the slide after it
    return re.sub(
        r"^## ([^\n]+)\n\n(:::.+?\n:::\n\n|)### \1\n\n",
        r"## \1\n\n\2",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def guesses(cell, heading):
    """A slide for each guess that a cell asks for, as `widgets.guess` shows it without a browser."""
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if 'title="guess"' in "".join(data.get("text/html", "")):
            yield f"### {heading}"
            yield f"**Guess first.** {''.join(data['text/plain'])}"


def of_prose(text, heading, level):
    """Slides of one piece of prose: its formulas and bold sentences, then its guess, with all of it as notes."""
    shown = re.findall(r"\$\$.+?\$\$", text, re.DOTALL)
    shown += [
        f"**{bold}**"
        for bold in re.findall(r"\*\*([^*]+)\*\*", text, re.DOTALL)
        if len(bold.split()) > 4
    ]
    shown = [f"{level} {heading}", *shown, notes(text)] if shown else []
    guess = re.search(r"\*\*Guess first[.:]*\*\*:? *(.+?)(?=\n\n|\Z)", text, re.DOTALL)
    if guess:
        above = [f"### {heading}"] if shown else [f"{level} {heading}", notes(text)]
        shown += [*above, f"**Guess first.** {guess[1][0].upper()}{guess[1][1:]}"]
    return shown or ([f"## {heading}", notes(text)] if level == "##" else [])


def notes(text):
    """The prose itself, for the speaker."""
    plain = re.sub(
        r"^#+ [^\n]+|<details>.*?</details>|```.*?```|\$\$.*?\$\$",
        "",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    # Studies are no slides.
    plain = re.sub(r"\[([^\]]+)\]\(studies/[^)]+\)", r"\1", plain).strip()
    return f":::{{revealjs-notes}}\n{plain}\n:::" if plain else ""


def setup(app):
    app.connect("config-inited", gather)
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
