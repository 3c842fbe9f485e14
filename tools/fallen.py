"""Sentences that were tried and fell: figures/real/fallen.csv, which pages show, and docs/did_not_hold.md.

    python tools/fallen.py              write both
    python tools/fallen.py --history    list the claims since 0e38689 that no page makes any longer, or in other words

Four sources. Claims that fail in one of the other seeds (figures/seeds) or of the long runs (figures/real), registered
predictions that were false or not decided (figures/real/*_predictions.csv), and what pages no longer claim
(figures/real/fallen.yaml). Reasons are those of figures/real/evidence.yaml and fallen.yaml.
"""

import ast
import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from uqlab.core.recording import Record

ROOT = Path(__file__).resolve().parents[1]
SEEDS, REAL, SINCE = ROOT / "figures" / "seeds", ROOT / "figures" / "real", "0e38689"
COLUMNS = ["page", "sentence", "where", "held", "why"]


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def counted(values: list[str]) -> str:
    """Return how many are true, and of how many."""
    return f"{values.count('True')} of {len(values)}"


def in_other_seeds() -> Iterator[tuple[str, ...]]:
    """Yield the claims that fail in one of the other seeds."""
    for path in sorted(SEEDS.glob("*.csv")):
        for row in rows(path):
            values = [value for key, value in row.items() if key.isdigit()]
            if "False" in values:
                yield path.stem, row["sentence"], "other seeds", counted(values), ""


def in_long_runs() -> Iterator[tuple[str, ...]]:
    """Yield the claims that fail in one of the long runs."""
    evidence = yaml.safe_load((REAL / "evidence.yaml").read_text())
    for path in sorted(REAL.glob("*/table.csv")):
        page, table = path.parent.name, rows(path)
        reasons = evidence.get(page, {}).get("reasons", {})
        for name, claim in Record.read(path.parent).claims.items():
            values = [row.get(f"claim_{name}", "") for row in table]
            if "False" in values:
                sentence = claim.sentence.partition(" (margin: ")[0]
                sentence = sentence.replace("explicit ensemble", "deep ensemble")
                why = reasons.get(name, "")
                yield f"{page}_study", sentence, "long runs", counted(values), why


def predicted() -> Iterator[tuple[str, ...]]:
    """Yield the registered predictions that are false or not decided."""
    for path in sorted(REAL.glob("*_predictions.csv")):
        page = path.stem.replace("predictions", "study")
        for row in rows(path):
            if row["verdict"] != "true":
                sentence = f"{row['prediction']} ({row['set']})"
                yield page, sentence, "predictions", row["verdict"], row["found"]


def given_up() -> Iterator[tuple[str, ...]]:
    """Yield what pages no longer claim."""
    for row in yaml.safe_load((REAL / "fallen.yaml").read_text()):
        yield row["page"], row["sentence"], "no longer claimed", "", row["why"]


def git(*words: str) -> str:
    """Return what git says."""
    return subprocess.run(
        ["git", "-C", ROOT, *words], capture_output=True, text=True
    ).stdout


def claims(page: str) -> dict[str, str]:
    """Return the claims of a notebook's text: name -> sentence as it stands in the code."""
    found: dict[str, str] = {}
    for cell in json.loads(page)["cells"]:
        try:
            tree = (
                ast.parse("".join(cell["source"]))
                if cell["cell_type"] == "code"
                else None
            )
        except SyntaxError:  # a line of IPython
            continue
        said: dict[str, str] = {}
        nodes = (
            [node for node in ast.walk(tree) if hasattr(node, "lineno")] if tree else []
        )
        for node in sorted(nodes, key=lambda node: node.lineno):
            if isinstance(node, ast.Assign) and isinstance(
                node.value, ast.Constant | ast.JoinedStr
            ):
                said |= {
                    ast.unparse(target): words(node.value) for target in node.targets
                }
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("claim")
                and len(node.args) > 1
            ):
                name, sentence = node.args[:2]
                found[words(name)] = said.get(ast.unparse(sentence), words(sentence))
    return found


def words(node: ast.expr) -> str:
    """Return the text of a string, with the names that it takes in braces."""
    if isinstance(node, ast.JoinedStr):
        parts = [
            p.value if isinstance(p, ast.Constant) else f"{{{ast.unparse(p.value)}}}"
            for p in node.values
        ]
        text = "".join(map(str, parts))
    else:
        text = str(node.value if isinstance(node, ast.Constant) else ast.unparse(node))
    return text.partition(" (margin: ")[0]  # earlier claims said so how it is measured


def history() -> dict[tuple[str, str], list[str]]:
    """Return (page, claim) -> its sentences since 0e38689; the last is "" where no page makes it any longer."""
    commits = git(
        "rev-list",
        "--reverse",
        "--first-parent",
        f"{SINCE}..HEAD",
        "--",
        "notebooks/*.ipynb",
    ).split()
    read: dict[str, dict[str, str]] = {}
    found: dict[tuple[str, str], list[str]] = {}
    for commit in [SINCE, *commits]:
        now = {}
        for line in git("ls-tree", "-r", commit, "notebooks").splitlines():
            about, path = line.split("\t")
            if path.endswith(".ipynb"):
                blob = about.split()[2]
                if blob not in read:
                    read[blob] = claims(git("cat-file", "-p", blob))
                now |= {
                    (Path(path).stem, name): sentence
                    for name, sentence in read[blob].items()
                }
        for key in found.keys() | now.keys():
            known, sentence = found.setdefault(key, []), now.get(key, "")
            if not known or known[-1] != sentence:
                known.append(sentence)
    return found


def lost() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the claims in other words; the last are "" where no page makes one any longer."""
    found = history()
    claimed = {name for (_, name), sentences in found.items() if sentences[-1]}
    for (page, name), sentences in sorted(found.items()):
        told = [
            s
            for s in dict.fromkeys(sentences)
            if s and not re.fullmatch(r"\{?\w+\}?", s)
        ]
        told += [""] if name not in claimed else []
        if len(told) > 1:
            yield page, name, told


def table() -> list[tuple[str, ...]]:
    """Return all that fell, by page."""
    found = [*in_other_seeds(), *in_long_runs(), *predicted(), *given_up()]
    return sorted(found, key=lambda row: row[0])


def main() -> None:
    """Write the table and the page, or list what the history lost."""
    if "--history" in sys.argv:
        for page, name, sentences in lost():
            print(page, name, *sentences, sep="\n    ")
        return
    found = table()
    with (REAL / "fallen.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *found])
    lines = [
        "# What did not hold",
        "",
        "Sentences that were tried on a page and fell, or that stand on weaker ground than the page's own run: claims are chosen on seed 0 and judged on five",
        "other seeds, and on long runs on official data where there are some. *Predictions* were committed before their runs; what is not decided supports no",
        "sentence. Made by `python tools/fallen.py`.",
        "",
        "| page | sentence | judged by | holds in | reason, or what was found |",
        "|---|---|---|--:|---|",
    ]
    for page, *rest in found:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in rest]
        lines.append(f"| {' | '.join([linked(page), *cells])} |")
    (ROOT / "docs" / "did_not_hold.md").write_text(
        "\n".join(lines) + "\n", encoding="utf-8"
    )


def linked(page: str) -> str:
    """Return a page's number with a link to it."""
    short = page.split("_")[0]
    if page.endswith("_study"):
        return f"[study {short}](../notebooks/studies/{page}.ipynb)"
    return f"[{short}](lessons/{page}.md)"


if __name__ == "__main__":
    main()
