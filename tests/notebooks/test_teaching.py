"""The guide and the page for teachers name what exists, and the courses add up."""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest
from small_pages import sources

from uqlab.runs import cli, parameters

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
GUIDE = ROOT / "notebooks" / "README.md"
TEACHING = ROOT / "notebooks" / "teaching.md"
TEXT = GUIDE.read_text() + TEACHING.read_text()
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def page(number):
    """The path of page "03"."""
    found = [path for path in NOTEBOOKS if path.stem.startswith(f"{number}_")]
    assert len(found) == 1, f"no page {number}"
    return found[0]


@functools.cache
def cells(path, kind):
    """The cells of a page and of its study."""
    study = path.parent / "studies" / f"{path.stem}_study.ipynb"
    return sources(path, kind) + (sources(study, kind) if study.exists() else [])


def headings(text):
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def section(name):
    """The text below a `##` heading of the guide."""
    return re.split(r"^## ", TEXT.split(f"\n## {name}\n")[1], flags=re.MULTILINE)[0]


def rows(name):
    """The table of a section: a dict a row, by the names of the columns."""
    lines = [line for line in section(name).splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in table} == {len(table[0])}, (
        f"{name}: rows of different length"
    )
    assert set("".join(table[1])) == {"-"}, f"{name}: no line below the header"
    return [dict(zip(table[0], row, strict=True)) for row in table[2:]]


@functools.cache
def saved(path):
    """The names of the figures that a page saves."""
    code = "\n".join(
        re.sub(r"^\s*[%!].*", "", cell, flags=re.MULTILINE) + "\n"
        for cell in cells(path, "code")
    )
    calls = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and len(node.args) > 1
    ]
    calls = [node for node in calls if ast.unparse(node.func) == "plots.save"]
    return {
        node.args[1].value for node in calls if isinstance(node.args[1], ast.Constant)
    }


def test_the_index_links_every_page_once_by_its_title():
    titles = [
        re.sub(r"^# (\d\d)\W+", r"\1 ", cells(path, "markdown")[0].splitlines()[0])
        for path in NOTEBOOKS
    ]
    links = [LINK.fullmatch(row["lesson"]) for row in rows("The lessons")]
    assert [(link[1], link[2]) for link in links if link] == [
        (title, path.name) for title, path in zip(titles, NOTEBOOKS, strict=True)
    ]


@pytest.mark.parametrize("row", rows("The lessons"), ids=lambda row: row["lesson"][1:3])
def test_the_index_tells_of_each_lesson_what_it_tells_itself(row):
    path = page(row["lesson"][1:3])
    first = cells(path, "markdown")[0]
    minutes = re.search(r"\*read (.+?), run (.+?), exercises (.+?)\*", first)
    assert row["read, run, exercises"] == ", ".join(minutes.groups())
    assert row["question"].endswith("?")
    assert bool(row["the explorer is for"]) == (
        "widgets." in "".join(cells(path, "code"))
    )
    for number in re.findall(r"\d\d", row["read first"]):
        page(number)


def test_every_lesson_is_on_one_track():
    tracks = {row["lesson"][1:3]: row["track"] for row in rows("The lessons")}
    listed = re.findall(
        r"^- \*\*(.+?)\*\*.*?: (\d\d(?:, \d\d)+)\.",
        section("The lessons"),
        re.MULTILINE,
    )
    assert len(listed) == 3
    assert {
        n: name.lower() for name, all_ in listed for n in all_.split(", ")
    } == tracks


def test_links_lead_to_files():
    """None to a heading: JupyterLab and GitHub give headings different names."""
    targets = [target for _, target in LINK.findall(TEXT)]
    assert [target for target in targets if not (GUIDE.parent / target).is_file()] == []


def test_figures_and_sections_exist():
    figures = re.findall(r"`(\d\d)/(\w+)`", TEXT)
    assert [
        f"{number}/{name}"
        for number, name in figures
        if name not in saved(page(number))
    ] == []
    for number, heading in re.findall(r"\b(\d\d), \*([^*]+)\*", TEXT):
        known = headings("\n".join(cells(page(number), "markdown")))
        assert heading in [re.sub(r"^\d\. ", "", one) for one in known], (
            f"{number}, {heading}"
        )


@pytest.mark.parametrize(
    "row", rows("Lesson by lesson"), ids=lambda row: row["lesson"][1:3]
)
def test_what_a_lecturer_shows_is_on_the_lesson(row):
    link = LINK.fullmatch(row["lesson"])
    assert link[2] == page(link[1]).name
    assert all(row.values())
    shown = re.findall(r"`(\d\d)/(\w+)`", row["you show"])
    assert {number for number, _ in shown} <= {link[1]}
    known = [
        re.sub(r"^\d\. ", "", one)
        for one in headings("\n".join(cells(page(link[1]), "markdown")))
    ]
    sections = re.findall(r"(?<!\w)\*([A-Z][^*]+)\*", row["you show"])
    assert [one for one in sections if one not in known] == []
    assert re.fullmatch(r"exercise [123]", row["homework"])


def test_the_courses():
    lessons = {row["lesson"][1:3] for row in rows("Lesson by lesson")}
    assert lessons == {path.stem[:2] for path in NOTEBOOKS}
    core = [row["lesson"][1:3] for row in rows("The lessons") if row["track"] == "core"]
    afternoon = rows("An afternoon")
    assert {row["lesson"][1:3] for row in afternoon} == set(core)
    assert sum(int(row["min"]) for row in afternoon) == 240
    assert [row["day"] for row in rows("A week")] == list("12345")
    named = {n for n, _ in LINK.findall(section("A week"))}
    assert named == lessons


def test_commands_are_understood():
    lines = [
        shlex.split(line)
        for line in TEXT.replace("\\\n", "").splitlines()
        if line.startswith("    uqlab ")
    ]
    lines += [shlex.split(line) for line in re.findall(r"`(uqlab [^`]+)`", TEXT)]
    for _, command, *words in lines:
        context = cli.main.commands[command].make_context(
            command, list(words)
        )  # knows the options, runs nothing
        notebooks = context.params.get("notebooks") or [
            context.params.get("notebook") or "00"
        ]
        names = [
            name
            for option in ("given", "grid")
            for name in dict(context.params.get(option) or {})
        ]
        for notebook in notebooks:
            assert set(names) <= set(parameters.defaults(parameters.find(notebook))), (
                words
            )


def test_the_glossary_is_sorted():
    entries = re.findall(r"^- \*\*(.+?)\.\*\* (.+)$", section("Glossary"), re.MULTILINE)
    terms = [term.lower() for term, _ in entries]
    assert len(terms) == section("Glossary").count("\n- ")
    assert terms == sorted(set(terms))


GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega|"
    "Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell"
)


def formulas(text):
    """What stands between dollars, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [
        first or second
        for first, second in re.findall(r"\$\$(.+?)\$\$|\$([^$]+)\$", text, re.DOTALL)
    ]


def symbols(formula):
    r"""The letters of a formula: w, \mu, \mathcal{L}; words in \mathrm or \text are none."""
    formula = re.sub(r"\\(mathrm|text|operatorname|tag)\s*\{[^{}]*\}", " ", formula)
    fonts = re.findall(r"\\(mathcal|mathbb|mathbf)\s*\{?\s*([A-Za-z])\}?", formula)
    formula = re.sub(r"\\(mathcal|mathbb|mathbf)\s*\{?\s*[A-Za-z]\}?", " ", formula)
    greek = set(re.findall(rf"\\(?:{GREEK})(?![A-Za-z])", formula))
    plain = set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", formula)))
    return plain | greek | {f"\\{font}{{{letter}}}" for font, letter in fonts}


def test_symbols_of_a_formula():
    assert symbols(r"\mathcal L + \mathbf{r}_m \cdot \mathrm{CE} \le \tfrac12 \mu'") == {
        r"\mathcal{L}", r"\mathbf{r}", "m", r"\mu",
    }  # fmt: skip


def test_a_letter_means_one_thing_on_each_page_that_the_guide_names():
    meant = {}
    for row in rows("Symbols"):
        for symbol in set().union(*map(symbols, formulas(row["symbol"]))):
            pages = row["pages"].split(", ")
            before = meant.setdefault(symbol, [])
            assert "all" not in [*before, *pages[: len(before)]], symbol
            assert not {*before} & {*pages}, f"{symbol} stands twice for a page"
            before += pages
    used = {
        path.stem[:2]: set().union(
            *map(symbols, formulas("\n".join(cells(path, "markdown"))))
        )
        for path in NOTEBOOKS
    }
    unknown = {
        number: [s for s in found if not {"all", number} & {*meant.get(s, ())}]
        for number, found in used.items()
    }
    assert {number: found for number, found in unknown.items() if found} == {}
    idle = [
        (symbol, number)
        for symbol, pages in meant.items()
        for number in pages
        if number != "all" and symbol not in used[number]
    ]
    assert idle == []
    assert set().union(*map(symbols, formulas(TEXT))) <= meant.keys()


def test_mathematics_survives_markdown():
    """A bar would end a table's cell, and Markdown takes the backslash from before punctuation."""
    formulas = re.findall(r"\$([^$\n]+)\$", TEXT)
    assert TEXT.count("$") == 2 * len(formulas)
    assert [
        formula for formula in formulas if re.search(r"\||\\[^A-Za-z]|[<*]", formula)
    ] == []
