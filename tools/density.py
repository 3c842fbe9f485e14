"""How much the package says, and how densely: expressions of its syntax trees, by subpackage.

A node is one expression in Python's `ast`: a name, a call, an operator. Lines can be made few
by making them dense; nodes cannot. `make lint` compares the figures with tools/density.json,
which may only fall; nodes a line may be anything up to the limit there.

    python tools/density.py            the subpackages, and the largest functions
    python tools/density.py --hold     exit status 1 if a figure rose above the committed one
    python tools/density.py --commit   write the figures, each the smaller of then and now
"""

import ast
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMITTED = Path(__file__).with_suffix(".json")
LARGE = 150  # nodes of a function
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def nodes(tree: ast.AST) -> int:
    """Return the number of expressions in a tree."""
    return sum(isinstance(node, ast.expr) for node in ast.walk(tree))


def lines_of_code(source: str, tree: ast.AST) -> int:
    """Return the number of lines that are neither blank nor comment nor docstring."""
    skipped = set()
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        if documented and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            skipped.update(range(text.lineno, text.end_lineno + 1))
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and line[0] != "#" and n not in skipped for n, line in lines)


def main(option: str = "") -> int:
    """Print, hold or commit the figures."""
    rooms, functions, code, public, files = Counter(), [], 0, 0, 0
    for path in sorted((ROOT / "uqlab").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        place = path.relative_to(ROOT)
        rooms[place.parts[1]] += nodes(tree)
        code += lines_of_code(source, tree)
        files += 1
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                public += not node.name.startswith("_")
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                functions.append((nodes(node), f"{place}:{node.lineno} {node.name}"))
    found = {
        "nodes": rooms.total(),
        "nodes a line": round(rooms.total() / code, 2),
        "public functions and classes": public,
        "files": files,
        "large functions": sum(size > LARGE for size, _ in functions),
    }
    if option == "":
        for name, size in [*rooms.most_common(), *sorted(functions)[:-16:-1]]:
            print(name, size)
    print(", ".join(f"{name} {value:,}" for name, value in found.items()))
    before = json.loads(COMMITTED.read_text())
    risen = [name for name, value in found.items() if value > before[name]]
    if option == "--commit":
        least = {name: min(value, before[name]) for name, value in found.items()}
        least["nodes a line"] = before["nodes a line"]
        COMMITTED.write_text(json.dumps(least, indent=1) + "\n")
    elif option == "--hold" and risen:
        print(f"{', '.join(risen)}: above {COMMITTED.name}; take something away")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
