"""The rendered lessons in docs/: whole, up to date and small; what tools/render.py makes of a page; slides."""

import html
import io
import json
import re
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import essay
import nbformat
import numpy as np
import pytest
import render
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from uqlab.core.files import sha256
from uqlab.runs import parameters
from uqlab.runs.manifest import Manifest, Present

DOCS = Path(__file__).parents[1] / "docs"
LESSONS = parameters.all_notebooks()
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r'\]\(([^)\s]+)\)|(?:src|href)="([^"]+)"')


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_every_lesson_has_a_page_of_its_present_source(lesson):
    page = (DOCS / "lessons" / f"{lesson.stem}.md").read_text()
    said = re.findall(r"^<!-- sha256 (\w+) -->$", page, re.M)
    assert said == [parameters.source_sha256(lesson)], "make docs"
    link = f"](lessons/{lesson.stem}.md)"
    assert link in (DOCS / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere_and_nothing_is_of_one_machine(page):
    whole = page.read_text()
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", whole, flags=re.M | re.S)
    links = ["".join(pair).partition("#")[0] for pair in LINK.findall(text)]
    local = [link for link in links if link and not re.match(r"https?:", link)]
    assert local
    assert [link for link in local if not (page.parent / link).exists()] == []
    assert not re.search(r"(?<![\w.])/(work|home|tmp|root|usr)/|[A-Z]:\\\\", whole)
    assert not re.search(r" at 0x[0-9a-f]{6}|Warning:|Traceback|\d+it/s", whole)


def test_the_essay_is_one_small_file_of_its_present_sources():
    page = (DOCS / "essay.html").read_text("utf-8")
    assert page.endswith(f"<!-- sha256 {essay.digest()} -->\n"), "make docs"
    assert len(page.encode()) <= 4e6
    assert "](essay.html)" in (DOCS / "README.md").read_text()
    links = re.findall(r'href="([^"]+)"', page.partition("<script")[0])
    local = [link for link in links if not link.startswith("data:")]
    assert len(local) > 5
    assert [link for link in local if not (DOCS / link).exists()] == []
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)", page)


# What the text may say without the run: thresholds, years, a digit to draw.
BY_HAND = ["3", "95", "1", ".05", "2024", "17", "6", "2", "4", "5", "7"]


def test_the_numbers_of_the_essay_come_from_its_run():
    text = Path(essay.__file__).with_suffix(".html").read_text("utf-8")
    text = re.search(r"<main>(.+)<h3>References", text, re.S)[1]
    text = re.sub(r"<[^>]+>|\{\{\w+\}\}", " ", text)
    assert {*re.findall(r"\.?\d[\d.,]*\b", text)} <= {*BY_HAND}
    page = (DOCS / "essay.html").read_text("utf-8")
    main = re.search(r"<main>(.+)</main>", page, re.S)[1]
    assert "{{" not in main
    assert 1200 <= len(re.sub(r"<[^>]+>", " ", main).split()) <= 1500


def test_docs_is_small_and_its_pictures_are_shown():
    sizes = {path: path.stat().st_size for path in DOCS.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 8e6
    shown = "".join(page.read_text() for page in PAGES)
    for path in DOCS.rglob("*.png"):
        assert sizes[path] <= 80_000
        assert f"{path.parent.name}/{path.name}" in shown


# What is made of a page ---------------------------------------------------------------


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, "PNG")
    return file.getvalue()


def frame(name, data):
    page = f'<script type="application/json" id="data">{json.dumps(data)}</script>'
    return f'<iframe title="{name}" srcdoc="{html.escape(page)}"></iframe>'


def displayed(metadata=None, **data):
    kinds = {"html": "text/html", "md": "text/markdown", "png": "image/png"}
    data = {kinds.get(name, "text/plain"): value for name, value in data.items()}
    return new_output("display_data", data, metadata=metadata or {})


GREY = png([[[0, 0, 0, 0], [9, 9, 9, 255]]])  # a clear pixel and a dark one
TABLE = """<style>#T_1 {color: red}</style><table><thead><tr><th></th><th>NLL</th><th>a|b</th></tr></thead>
<tbody><tr><th>LoRA</th><td>-0.5</td><td>two
words</td></tr></tbody></table>"""
GUESS = {"question": "How many?", "range": [0, 100, None], "unit": "%", "choices": [], "answer": 33.333, "then": "So *few*."}  # fmt: skip
SOLUTION = "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION"
CELLS = [
    new_markdown_cell("# 09 · A page\n\nSee [that](studies/x.ipynb) and [this](03_wide.ipynb#why), `a[0](b)`."),
    new_code_cell("seed = 0", metadata={"tags": ["parameters"]}),
    new_code_cell("seed = 1", metadata={"tags": ["injected-parameters"]}),
    new_code_cell("import secret", metadata={"tags": ["hide-input"]}),
    new_markdown_cell("A mean of $p_m$:\n\n$$\na_{b} \\,\n$$"),
    new_code_cell("z = rows[0](1)", outputs=[
        new_output("stream", name="stderr", text="UserWarning: no"),
        new_output("stream", name="stdout", text="  1%|#\r  2%|#\nsix\n"),
        displayed(plain="<pandas.Styler at 0x7f8eb6d26bd0>"),
        displayed(plain="0.25"),
    ]),
    new_code_cell("draw()", id="drawn", metadata={"jupyter": {"source_hidden": True}}, outputs=[
        displayed(html=frame("guess", GUESS), plain="How many?"),
        displayed({"image/png": {"width": 300}}, png=b64encode(GREY).decode(), plain="<Image>"),
        displayed(html=TABLE, plain="<Styler>"),
        displayed(md="At < 3 it falls. See [papers](papers.md).", plain="<Markdown>"),
    ]),
    new_code_cell(SOLUTION, metadata={"tags": ["your-turn"]}),
]  # fmt: skip
SHOWN = [
    "See [that](../../notebooks/studies/x.ipynb) and [this](03_wide.md#why), `a[0](b)`.",
    "A mean of $`p_m`$:\n\n```math\na_{b} \\,\n```",
    "```python\nz = rows[0](1)\n```\n\n```text\nsix\n```\n\n```text\n0.25\n```",
    "**Guess first.** How many?",
    "**33.3 %.** So *few*.",
    '<img src="09_page/curve.png" alt="At &lt; 3 it falls." width="300">\n\n*At < 3 it falls.*',
    "|  | NLL | a\\|b |\n| --- | ---: | --- |\n| LoRA | -0.5 | two words |",
    "See [papers](../../notebooks/papers.md).",
    "    return 1",
]
HIDDEN = ["secret", "seed = 1", "UserWarning", "%|", "0x7f8", "###", "draw()"]


@pytest.fixture
def lesson(tmp_path):
    """A lesson beside the folder figures/ with its finished run."""
    notebook = tmp_path / "notebooks" / "09_page.ipynb"
    run = tmp_path / "figures" / "quick" / notebook.stem
    for folder in (notebook.parent, run):
        folder.mkdir(parents=True)
        nbformat.write(new_notebook(cells=CELLS), folder / notebook.name)
    (run / "curve.png").write_bytes(GREY)
    figures = {"curve": {"caption": "At < 3 it falls."}}
    (run / "results.json").write_text(json.dumps({"figures": figures}))
    now = Present().now
    files = {name: sha256(run / name) for name in ("results.json", notebook.name)}
    made = {"uqlab": now.uqlab, "commit": now.commit, "parameters": {"seed": 0}}
    source = parameters.source_sha256(notebook)
    Manifest(source_sha256=source, files=files, **made).save(run)
    return notebook


def test_a_page_shows_what_a_reader_needs_and_no_machinery(lesson, tmp_path):
    run = tmp_path / "figures" / "quick" / lesson.stem
    text = render.Page(lesson, run, tmp_path / "docs" / lesson.stem).text
    assert [each for each in SHOWN if each not in text] == []
    assert [each for each in HIDDEN if each in text] == []
    assert f"sha256 {parameters.source_sha256(lesson)}" in text
    with Image.open(tmp_path / "docs" / lesson.stem / "curve.png") as image:
        clear = image.convert("RGBA").getpixel((0, 0))
    assert clear == (255, 255, 255, 255)  # white


def test_any_picture_becomes_small():
    noise = np.random.default_rng(0).integers(0, 256, (120, 700, 3))
    shrunk = render.small(Image.open(io.BytesIO(png(noise))))
    assert len(shrunk) <= render.LARGEST


def test_a_lesson_runs_again_where_its_values_its_prose_or_its_run_changed(lesson):
    figures, source = lesson.parents[1] / "figures", lesson.read_text()
    profiles = lesson.with_name("profiles.yaml")
    assert render.up_to_date(lesson, figures)
    profiles.write_text(f"quick: {{{lesson.stem}: {{seed: 2}}}}")
    assert not render.up_to_date(lesson, figures)
    profiles.unlink()
    lesson.write_text(source.replace("A mean", "The mean"))
    assert not render.up_to_date(lesson, figures)
    lesson.write_text(source)
    (figures / "quick" / lesson.stem / "results.json").write_text("{}")
    assert not render.up_to_date(lesson, figures)


@pytest.mark.slow
def test_slides_open_without_a_network(tmp_path):
    (tmp_path / "source").mkdir()
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    command += ["-b", "revealjs", "-c", "book/slides"]
    folders = [tmp_path / "source", tmp_path / "html"]
    subprocess.run([*command, *folders], cwd=DOCS.parent, check=True)
    made = [*(tmp_path / "html").glob("*.html")]
    assert {path.stem for path in made} >= {path.stem for path in LESSONS[:5]}
    for path in made:
        text, tags = (
            path.read_text(),
            r"<(?:script|link|img)[^>]+(?:src|href)=\"([^\"]+)",
        )
        loaded = [link.split("?")[0] for link in re.findall(tags, text)]
        assert loaded
        assert all("//" not in x and (path.parent / x).exists() for x in loaded)
