"""The rendered lessons in docs/: whole, up to date and small; and what tools/render.py makes of a page."""

import html
import io
import json
import os
import re
from base64 import b64encode
from pathlib import Path

import nbformat
import numpy as np
import pytest
import render
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from uqlab.core.files import sha256
from uqlab.runs import parameters
from uqlab.runs.manifest import Manifest, Present

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LESSONS = parameters.all_notebooks()
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r'\]\(([^)\s]+)\)|(?:src|href)="([^"]+)"')


# What is committed --------------------------------------------------------------------


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_every_lesson_has_a_page_of_its_present_source(lesson):
    page = (DOCS / "lessons" / f"{lesson.stem}.md").read_text()
    said = re.findall(r"^<!-- sha256 (\w+) -->$", page, re.M)
    assert said == [parameters.source_sha256(lesson)], "make docs"
    assert page.startswith("# ")
    assert "<img " in page


def test_the_contents_name_each_lesson_with_a_picture_and_no_page_is_left_over():
    text = (DOCS / "README.md").read_text()
    cell = r"\[!\[.+\]\(lessons/(\w+)/\w+\.png\)\]\(lessons/\1\.md\)\n\n\*\*\[.+\]\(lessons/\1\.md\)\*\*<br>.+"
    rows = re.findall(cell, text)
    assert len(rows) == len(LESSONS)
    stems = {path.stem for path in (DOCS / "lessons").iterdir()}
    assert set(rows) == stems == {path.stem for path in LESSONS}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere_and_nothing_is_of_one_machine(page):
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.M | re.S)
    links = ["".join(pair).partition("#")[0] for pair in LINK.findall(text)]
    local = [link for link in links if link and not re.match(r"https?:", link)]
    assert local
    assert [link for link in local if not (page.parent / link).exists()] == []
    whole = page.read_text()
    assert not re.search(r"(?<![\w.])/(work|home|tmp|root|usr)/|[A-Z]:\\\\", whole)
    assert not re.search(r" at 0x[0-9a-f]{6}|Warning:|Traceback|\d+it/s", whole)
    assert not re.search(r"<(iframe|script|style|thead|div)\b", whole)


def test_docs_is_small_and_its_pictures_are_opaque():
    sizes = {path: path.stat().st_size for path in DOCS.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 8e6
    pictures = {path: size for path, size in sizes.items() if path.suffix == ".png"}
    assert max(pictures.values()) <= 80_000
    shown = "".join(page.read_text() for page in PAGES)
    for path in pictures:
        assert f"{path.parent.name}/{path.name}" in shown, "no page shows it"
        with Image.open(path) as image:
            assert (image.mode, "transparency" in image.info) == ("P", False)


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
TABLE = """<style>#T_1 {color: red}</style><table><thead><tr><th></th><th>NLL</th><th>a|b</th><th>paper</th></tr></thead>
<tbody><tr><th>LoRA</th><td>-0.5</td><td>two
words</td><td>–</td></tr><tr><th>SVE</th><td>not run</td><td>3</td><td>–</td></tr></tbody></table>"""
GUESS = {
    "question": "How many?",
    "range": [0, 100, None],
    "unit": "%",
    "choices": [],
    "answer": 33.333,
    "then": "So *few*.",
}
FIRST = {"pictures": ["data:image/png;base64," + b64encode(GREY).decode()], "inches": [2, 1]}  # fmt: skip
FOLDED = {"jupyter": {"source_hidden": True}}
CELLS = [
    new_markdown_cell("# 09 · A page\n\n**Question.** Why\nnot?\n\nSee [that](studies/x.ipynb) and [this](03_wide.ipynb#why), `a[0](b)`."),
    new_code_cell("seed = 0", metadata={"tags": ["parameters"]}),
    new_code_cell("seed = 1", metadata={"tags": ["injected-parameters"]}),
    new_code_cell("import secret", metadata={"tags": ["hide-input"]}),
    new_markdown_cell("A mean $q$ of $p_m$:\n\n$$\na_{b} \\,\n$$\n\n1. ```python\n   x = f[0](1)  # $not$\n   ```"),
    new_code_cell(
        "z = rows[0](1)",
        outputs=[
            new_output("stream", name="stderr", text="UserWarning: no"),
            new_output("stream", name="stdout", text="  1%|#\r  2%|#\nsix\n"),
            new_output("stream", name="stdout", text="uqlab 0.2.0, torch 2.13.0+cpu, on cpu\n"),
            displayed(plain="History(loss=[1.0])"),
            displayed(plain="<pandas.Styler at 0x7f8eb6d26bd0>"),
            displayed(plain="torch.Size([2, 3])"),
            displayed(plain="0.25"),
        ],
    ),
    new_code_cell(
        "draw()",
        id="drawn",
        metadata=FOLDED,
        outputs=[
            displayed(html=frame("guess", GUESS), plain="How many?"),
            displayed(html=frame("frames", FIRST), plain="Left: this."),
            displayed({"image/png": {"width": 300}}, png=b64encode(GREY).decode(), plain="<Image>"),
            displayed(html="<audio controls></audio>", plain="<Audio>"),
            displayed(html="<audio controls></audio>", plain="<Audio>"),
            displayed(html=TABLE, plain="<Styler>"),
            displayed(md="At < 3 the curve falls. See [papers](papers.md).", plain="<Markdown>"),
        ],
    ),
    new_code_cell("def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION", metadata={"tags": ["your-turn"]}),
]  # fmt: skip
EXPECTED = """# 09 · A page

**Question.** Why
not?

[notebook](../../notebooks/09_page.ipynb) | run it: `uqlab lab` | [all lessons](../README.md)

*Cells that only prepare or draw are left out here; the notebook has all.*

See [that](../../notebooks/studies/x.ipynb) and [this](03_wide.md#why), `a[0](b)`.

A mean $q$ of $`p_m`$:

```math
a_{b} \\,
```

1. ```python
   x = f[0](1)  # $not$
   ```

```python
z = rows[0](1)
```

```text
six
```

```text
0.25
```

**Guess first.** How many? *(from 0 to 100 %)*

<details><summary>Answer</summary>

**33.3 %.** So *few*.

</details>

<img src="09_page/drawn_explorer.png" alt="Left: this." width="260">

*Left: this.*

> **Try it.** Move the controls of this picture. This needs the notebook: `uqlab lab`, then [notebooks/09_page.ipynb](../../notebooks/09_page.ipynb)

<img src="09_page/curve.png" alt="At &lt; 3 the curve falls." width="300">

*At < 3 the curve falls.*

> **Try it.** Listen to the sounds. This needs the notebook: `uqlab lab`, then [notebooks/09_page.ipynb](../../notebooks/09_page.ipynb)

|  | NLL | a\\|b |
| --- | ---: | --- |
| LoRA | -0.5 | two words |
| SVE | not run | 3 |

See [papers](../../notebooks/papers.md).

<details><summary>A solution</summary>

```python
def f():
    return 1
```

</details>

<!-- sha256 CHECKSUM -->
"""


@pytest.fixture
def lesson(tmp_path):
    """A lesson beside the folder figures/ with its finished run."""
    notebook = tmp_path / "notebooks" / "09_page.ipynb"
    run = tmp_path / "figures" / "quick" / notebook.stem
    for folder in (notebook.parent, run):
        folder.mkdir(parents=True)
        nbformat.write(new_notebook(cells=CELLS), folder / notebook.name)
    (run / "curve.png").write_bytes(GREY)
    figures = {"curve": {"caption": "At < 3 the curve falls."}}
    (run / "results.json").write_text(json.dumps({"figures": figures}))
    finish(notebook, run)
    return notebook


def finish(notebook, run):
    now = Present()
    files = {name: sha256(run / name) for name in ("results.json", notebook.name)}
    source = parameters.source_sha256(notebook)
    made = {"uqlab": now.uqlab, "commit": now.commit, "parameters": {"seed": 0}}
    Manifest(source_sha256=source, files=files, **made).save(run)


def test_a_page_shows_what_a_reader_needs_and_no_machinery(lesson, tmp_path):
    run = tmp_path / "figures" / "quick" / lesson.stem
    page = render.Page(lesson, run, tmp_path / "docs" / lesson.stem)
    wanted = EXPECTED.replace("CHECKSUM", parameters.source_sha256(lesson))
    assert page.text == wanted
    with Image.open(tmp_path / "docs" / lesson.stem / "curve.png") as image:
        first = image.convert("RGBA").getpixel((0, 0))
    assert first == (255, 255, 255, 255), "what was clear is white"


def test_any_picture_becomes_small():
    noise = np.random.default_rng(0).integers(0, 256, (500, 1400, 3))
    shrunk = render.small(Image.open(io.BytesIO(png(noise))))
    assert len(shrunk) <= render.LARGEST
    with Image.open(io.BytesIO(shrunk)) as image:
        assert image.width > 400


def test_a_lesson_runs_again_only_where_something_changed(lesson, tmp_path):
    figures = tmp_path / "figures"
    run = figures / "quick" / lesson.stem
    assert render.up_to_date(lesson, figures)

    seeds = figures / "seeds" / f"{lesson.stem}.csv"
    for table in (seeds, figures / "real" / lesson.stem / "table.csv"):
        table.parent.mkdir(parents=True)
        table.write_text("seed")
        os.utime(table, (1, 1))
        assert render.up_to_date(lesson, figures)
        os.utime(table, (4e9, 4e9))
        assert not render.up_to_date(lesson, figures), "a newer table"
        table.unlink()

    profiles = lesson.with_name("profiles.yaml")
    profiles.write_text(f"quick: {{{lesson.stem}: {{seed: 2}}}}")
    assert not render.up_to_date(lesson, figures), "other values"
    profiles.unlink()

    before = lesson.read_text()
    lesson.write_text(before.replace("A mean", "The mean"))
    assert not render.up_to_date(lesson, figures), "other prose"
    lesson.write_text(before)
    assert render.up_to_date(lesson, figures)

    (run / "results.json").write_text("{}")
    assert not render.up_to_date(lesson, figures), "a damaged run"
    (run / "manifest.json").unlink()
    assert not render.up_to_date(lesson, figures), "no run"
