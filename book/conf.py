"""The book: pages with their results, guides and the reference, as a site that opens from the file system.

`make book` builds it from what exists: a page that was run at the profile `quick` comes with its results, the others
without. No page is run and nothing is fetched.
"""

import inspect
import itertools
import json
import re
import shutil
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "figures" / "quick"
# Every room but `core`, which is for the other rooms; of two rooms the files are imported by name.
ROOMS = [
    *("uncertainty", "metrics", "data", "models", "ensembles", "training"),
    *("extraction", "heads", "gradients", "plots", "widgets", "runs"),
]
for room in ("analysis", "study"):
    files = ROOT.glob(f"uqlab/{room}/[a-z]*.py")
    ROOMS += sorted(f"{room}.{path.stem}" for path in files)

project = "uqlab"
author = "the uqlab authors"
release = version = version_of("uqlab")
html_title = "uqlab"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
]
html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
html_show_sourcelink = False
html_static_path = ["book.css"]
html_css_files = ["book.css"]
html_math_renderer = "mathml"
myst_enable_extensions = ["colon_fence", "dollarmath", "substitution"]
# {{ numbers }} of the text on cheap ensembles, by tools/cheap_ensembles.py
myst_substitutions = json.loads(
    (ROOT / "figures/real/17_observatory/numbers.json").read_text()
)
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # their scripts come from the network; the explorers have a form of their own without a kernel
nb_mime_priority_overrides = [("*", "text/html", 5)]
nitpicky = True
# What other packages document is out of reach without a network, and what a room keeps to itself has no page.
nitpick_ignore_regex = [
    ("py:.*", r"(?!uqlab\.).*|uqlab\.(?!analysis|study)\w+\.\w+\.\w+|.*\._\w+")
]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # torch's advice on `forward`
autodoc_default_options = {"members": True}
default_role = "code"
templates_path, exclude_patterns = [], []


ALIVE = re.compile(
    r"```python\n(?P<code>[^`]+)```\n\n<!-- alive in the book: (?P<name>\w+) -->"
)


def gather(app, config):
    """Lay the repository's texts, pages and pictures out as they lie there, so that their links hold."""
    source = Path(app.srcdir)
    kept = [
        "*.md",
        "LICENSE",
        "CITATION.cff",
        "data/*.md",
        "notebooks/*.md",
        "notebooks/profiles.yaml",
        "figures/*.md",
    ]
    kept += [
        "uqlab/*/assets/README.md",
        "benchmarks/results/*.md",
        "figures/gallery/*.png",
        "figures/real/*/*.png",
    ]
    for path in itertools.chain.from_iterable(map(ROOT.glob, kept)):
        copy(path, source / path.relative_to(ROOT))
    for path in itertools.chain(*map(Path(__file__).parent.rglob, ("*.md", "*.bib"))):
        copy(path, source / path.relative_to(Path(__file__).parent))
    (source / "README.md").unlink()  # index.md stands in its place
    for path in [
        *source.glob("*.md"),
        *source.glob("notebooks/*.md"),
        *source.glob("guides/*.md"),
    ]:
        moved = (
            path.read_text()
            .replace("](../README.md", "](../guides/start.md")
            .replace("](../book/", "](../")
            .replace("](../../", "](../")
        )
        path.write_text(ALIVE.sub(alive, moved.replace("](book/", "](")))
    lessons = sorted(path.stem for path in ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))
    studies = [
        f"{kind}/{path.stem}"
        for kind in ("studies", "rows")
        for path in sorted(ROOT.glob(f"notebooks/{kind}/*.ipynb"))
    ]
    pages = [*lessons, *studies]
    with (source / "notebooks/README.md").open("a") as guide:
        guide.write(
            "\n".join(
                ["\n```{toctree}\n:hidden:\n", *pages, "papers", "teaching", "```\n"]
            )
        )
    for name in ROOMS:
        own = (ROOT / "uqlab" / name).is_dir()  # a room's own names, by its __all__
        more = "   :imported-members:\n" if own else ""
        automodule = (
            f"# {name}\n\n```{{eval-rst}}\n.. automodule:: uqlab.{name}\n{more}```\n"
        )
        (source / "reference" / f"{name.rpartition('.')[2]}.md").write_text(automodule)
    for name in pages:
        (source / "notebooks" / name).parent.mkdir(parents=True, exist_ok=True)
        (source / "notebooks" / f"{name}.ipynb").write_text(
            json.dumps(page(ROOT / "notebooks" / f"{name}.ipynb"))
        )


def alive(match):
    """The code, and under it the explorer that it makes: its module and its data as JSON, without a kernel."""
    names = {}
    exec(match["code"], names)
    frame = names[match["name"]]._repr_mimebundle_()[0]["text/html"]
    return (
        match[0] + "\n\n" + frame.replace("\n", "&#10;") + "\n"
    )  # for Markdown HTML ends with an empty line


def add_essay(app, error):
    """The essay as it is, beside the front page; its links lead to the lessons in the book."""
    text = (ROOT / "docs" / "essay.html").read_text("utf-8")
    text = re.sub(r'href="lessons/(\w+)\.md"', r'href="notebooks/\1.html"', text)
    text = text.replace('href="../README.md"', 'href="index.html"')
    (Path(app.outdir) / "essay.html").write_text(text, "utf-8")


def copy(path, to):
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def page(path):
    """The page with the results of its last run, captions at its figures."""
    run = RESULTS / path.stem / path.name
    if not run.exists():
        book = json.loads(path.read_text())
        name = (
            path.name[:2]
            if path.parent.name == "notebooks"
            else f"{path.parent.name}/{path.stem}"
        )
        note = f"*This page has not been run here: `uqlab run {name}` puts its results into the book.*"
        book["cells"].insert(
            1,
            {"cell_type": "markdown", "id": "not-run", "metadata": {}, "source": note},
        )
        return book
    book = json.loads(run.read_text())
    captions = {
        name: one["caption"]
        for name, one in json.loads((run.parent / "results.json").read_text())[
            "figures"
        ].items()
    }
    cells = [
        cell
        for cell in book["cells"]
        if "injected-parameters" not in cell["metadata"].get("tags", [])
    ]
    book["cells"] = []
    for cell in cells:
        book["cells"].append(cell)
        if cell["cell_type"] == "code":
            cell["outputs"] = [
                out for out in cell["outputs"] if out.get("name") != "stderr"
            ]
            names = [name for name in captions if saved(name, cells) is cell]
            if len(names) == 1:
                book["cells"] += captioned(cell, captions[names[0]])
    return book


def captioned(cell, caption):
    """Take the outputs out of a cell: its first picture in a cell with the caption, the others in cells without one."""
    outputs, cell["outputs"] = cell["outputs"], []
    for number, output in enumerate(outputs):
        metadata = {"tags": ["remove-input"]}
        if caption and "image/png" in output.get("data", {}):
            metadata["mystnb"], caption = {"figure": {"caption": caption}}, None
        alone = {
            "id": f"{cell['id']}-{number}",
            "source": "# its output",
            "execution_count": None,
        }
        yield {**cell, **alone, "outputs": [output], "metadata": metadata}


def saved(name, cells):
    """The cell that saves the figure of this name; of several that name it, the first that saves one."""
    named = [
        cell
        for cell in cells
        if cell["cell_type"] == "code" and f'"{name}"' in "".join(cell["source"])
    ]
    return next(
        (cell for cell in named if "plots.save(" in "".join(cell["source"])),
        named[0] if named else None,
    )


PARAMETER = re.compile(
    r"^(\*{0,2}\w+(?: \[[^]]*\])?(?:, \*{0,2}\w+(?: \[[^]]*\])?)*): (.*)"
)


def restructured(app, what, name, thing, options, lines):
    """Give Sphinx the house's docstrings as it reads them: "name: text", with its indented rest, is an item."""
    found, inside, taken = [], False, parameters(thing)
    for line in lines:
        match = PARAMETER.match(line)
        match = (
            match
            if match
            and set(re.findall(r"\w+", re.sub(r" \[[^]]*\]", "", match[1]))) <= taken
            else None
        )
        if inside != bool(match or (inside and line.startswith("    "))):
            found.append("")
            inside = not inside
        text = (
            f"- **{escaped(match[1])}**: {escaped(match[2])}"
            if match
            else escaped(line)
        )
        found.append(f"  {text.lstrip()}" if inside and not match else text)
    lines[:] = [*found, ""]


def parameters(thing):
    """The names that a docstring may explain in its items."""
    try:
        return set(inspect.signature(thing).parameters) | set(
            getattr(thing, "__annotations__", {})
        )
    except (TypeError, ValueError):
        return set()


def escaped(line):
    """Text between backticks as code, all else as it stands."""
    parts = re.split(r"(`[^`]+`)", line)
    special = re.compile(r"([*|_`\\])")
    return "".join(
        f"{part}\\ " if part[:1] == "`" != part else special.sub(r"\\\1", part)
        for part in parts
    )


def of_tuples(app, what, name, thing, skip, options):
    """A named tuple says what its fields are in the text above them."""
    return (
        True
        if (getattr(thing, "__doc__", "") or "").startswith("Alias for field number")
        else None
    )


def mathml(formula, display="inline"):
    """MathML, which browsers draw by themselves, with a space after the name of a function."""
    return re.sub(
        "<mi>(log|max|min|exp)</mi>",
        r'<mi>\1</mi><mspace width="0.17em"/>',
        convert(formula, display=display),
    )


def inline(self, node):
    self.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def display(self, node):
    self.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app):
    app.connect("config-inited", gather)
    app.connect("autodoc-process-docstring", restructured)
    app.connect("autodoc-skip-member", of_tuples)
    app.connect("build-finished", add_essay)
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
