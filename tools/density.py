"""How much the package says, and how densely: expressions of its syntax trees, by room.

A node is one expression in Python's `ast`: a name, a call, an operator. Lines can be made few
by making them dense; nodes cannot. `make lint` holds the figures of tools/density.json, which
may only fall; capabilities that came later, the files of LATER, have an allowance of their own.

    python tools/density.py            the rooms, and the largest functions
    python tools/density.py --hold     exit status 1 if a figure rose above the committed one
    python tools/density.py --commit   write the figures, each the smaller of then and now
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMITTED = Path(__file__).with_suffix(".json")
LARGE = 150  # nodes of a function
LATER = (
    "ensembles/export.py",
    "ensembles/last_layer.py",
    "models/backbones.py",
    "study/acquire.py",
    "study/decide.py",
)
ALLOWED = 4300  # nodes of those together
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def nodes(tree: ast.AST) -> int:
    """Return the number of expressions in a tree."""
    return sum(isinstance(node, ast.expr) for node in ast.walk(tree))


def lines_of_code(source: str, tree: ast.AST) -> int:
    """Return the lines that are neither blank nor comment nor docstring."""
    skipped: set[int] = set()
    for scope in ast.walk(tree):
        if (
            isinstance(scope, SCOPES)
            and ast.get_docstring(scope, clean=False) is not None
        ):
            first = scope.body[0]
            skipped.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    count = 0
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        count += bool(text) and not text.startswith("#") and number not in skipped
    return count


def functions(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the size and the place of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield nodes(node), f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def measure(
    folder: Path,
) -> tuple[dict[str, float], dict[str, int], list[tuple[int, str]]]:
    """Return the package's figures, the nodes of its rooms and its functions, largest first."""
    rooms: dict[str, int] = {}
    found: list[tuple[int, str]] = []
    code = later = 0
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        place = path.relative_to(folder)
        room = place.parts[0]
        later += nodes(tree) if place.as_posix() in LATER else 0
        rooms[room] = rooms.get(room, 0) + nodes(tree)
        code += lines_of_code(source, tree)
        found += functions(path, tree)
    total = sum(rooms.values())
    large = sum(size > LARGE for size, _ in found)
    figures = {
        "nodes": total - later,
        "later nodes": later,
        "nodes a line": round(total / code, 2),
        "large functions": large,
    }
    return figures, rooms, sorted(found, reverse=True)


def main() -> int:
    """Print, hold or commit the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--commit", action="store_true")
    options = parser.parse_args()
    figures, rooms, found = measure(ROOT / "uqlab")
    before = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else figures
    if options.commit:
        least = {name: min(value, before[name]) for name, value in figures.items()}
        COMMITTED.write_text(json.dumps(least, indent=1) + "\n")
        return 0
    if not options.hold:
        for room, size in sorted(rooms.items(), key=lambda item: -item[1]):
            print(f"{size:6} {room}")
        for size, place in found[:15]:
            print(f"{size:6} {place}")
    print(", ".join(f"{name} {value:,}" for name, value in figures.items()))
    before |= {"later nodes": ALLOWED}
    risen = [name for name, value in figures.items() if value > before[name]]
    for name in risen if options.hold else []:
        print(
            f"{name} rose from {before[name]:,} to {figures[name]:,}: take something away"
        )
    return int(options.hold and bool(risen))


if __name__ == "__main__":
    sys.exit(main())
