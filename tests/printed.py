"""Commands as they are printed: found in texts, typed into a shell, and what each would run."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from small_pages import checking

from uqlab import data, runs
from uqlab.data.embedded import EMBEDDED
from uqlab.runs import cli, parameters

ROOT = Path(__file__).parents[1]
NAMES = "uqlab|make|papermill|pip|python|jupyter"
COMMAND = re.compile(
    rf"^(?:for \w+ in .+; do |[A-Z]\w*=|%?(?:\.\w+/bin/)?(?:{NAMES}) )"
)
INLINE = re.compile(rf"`((?:\.\w+/bin/)?(?:{NAMES}) [^`]+)`")
FENCE = re.compile(r"^( *)```(\w*)\n(.+?)^ *```", re.DOTALL | re.MULTILINE)
FOR = {  # what stands for something -> an example of it
    r"-g NAME VALUES": "-g seed 0:2",
    r"--profile NAME": "--profile tiny",
    r"\bNOTEBOOK\b": "03",
    r"\bCOMMAND\b": "run",
    r"\bFOLDER\b": "folder",
    r"\bFILE\b": "run.npz",
    r"\bADDRESS\b": "https://example.org",
    r"\bNAME\b": "a_name",
}
# Stands in for a command: notes where and with which arguments it was called. `new` makes its folder.
NOTE = """#!/bin/bash
name="${0##*/}"
if [ "$name" = python ] && [[ "$*" == "-c import json"* ]]; then exec "$REAL_PYTHON" "$@"; fi
{ printf '%s\\x1f' "$name" "$PWD" "$@"; printf '\\x1e'; } >> "$CALLS"
if [ "$name $1" = "uqlab new" ] && [ "$2" ]; then mkdir -p "$2"; fi
"""


def of_text(text: str) -> list[str]:
    """The lines of commands in a text of Markdown: in blocks, and between backticks."""
    blocks = [body for _, kind, body in FENCE.findall(text) if kind != "python"]
    text = FENCE.sub("", text)
    blocks += ["\n".join(re.findall(r"^ {4,}(.+)$", text, re.MULTILINE))]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if COMMAND.match(line.strip())]
    inline = re.sub(r"^ {4,}.*$", "", text, flags=re.MULTILINE)
    return found + [" ".join(each.split()) for each in INLINE.findall(inline)]


def texts() -> dict[str, str]:
    """Everything that prints commands, by name."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("*.yaml"), *ROOT.glob("book/**/*.md")]
    for folder in ("notebooks", "benchmarks", "benchmarks/results", "figures", "data"):
        paths += [*ROOT.glob(f"{folder}/*.md"), *ROOT.glob(f"{folder}/*.yaml")]
    paths += ROOT.glob("figures/real/*.md")
    paths += ROOT.glob("uqlab/**/*.md")
    found = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    del found["CHANGELOG.md"]  # what was
    for path in ROOT.glob("uqlab/**/*.py"):
        found[str(path.relative_to(ROOT))] = re.sub(
            "^ +", "", path.read_text(), flags=re.M
        )
    for name in ("Makefile", "Dockerfile", "environment.yml", "pyproject.toml"):
        comments = re.findall(r"^ *#(.*)$", (ROOT / name).read_text(), re.MULTILINE)
        found[name] = "\n".join(comments)
    for kind in parameters.KINDS:
        for path in parameters.all_notebooks(kind):
            cells = json.loads(path.read_text())["cells"]
            prose = [c["source"] for c in cells if c["cell_type"] == "markdown"]
            found[f"{kind}: {path.stem}"] = "\n\n".join(map("".join, prose))
    for name, command in {"": cli.main, **cli.main.commands}.items():
        said = f"{command.help or ''}\n{command.epilog or ''}".replace("\b", "")
        found[f"uqlab {name} --help"] = re.sub(
            r"^ *uqlab", "    uqlab", said, flags=re.M
        )
    return found


def typed(line: str, where: Path) -> list[tuple[Path, list[str]]]:
    """The commands that a shell calls for a line: the folder of each, and its words."""
    for stands, example in FOR.items():
        line = re.sub(stands, example, line)
    line = re.sub(r"(?<!\S)(?:%|\.\w+/bin/)", "", line)
    bin, calls = where / "bin", where / "calls"
    bin.mkdir(exist_ok=True)
    for name in NAMES.split("|"):
        (bin / name).write_text(NOTE)
        (bin / name).chmod(0o755)
    calls.write_text("")
    surroundings = {"PATH": f"{bin}:/usr/bin:/bin", "HOME": str(where)}
    surroundings |= {"UQLAB_DATA": str(where / "data"), "CALLS": str(calls)}
    surroundings["REAL_PYTHON"] = sys.executable
    done = subprocess.run(
        ["bash", "-ec", line], cwd=where, env=surroundings, capture_output=True
    )
    assert done.returncode == 0, (line, done.stderr.decode())
    noted = [call.split("\x1f")[:-1] for call in calls.read_text().split("\x1e")[:-1]]
    return [(Path(folder), [name, *words]) for name, folder, *words in noted]


@functools.cache
def check_sets(*names, kinds=("images",), **_):
    """As `data.check`, of the sets that are here; the names of the others are known."""
    here = [n for n in names if n.split("[")[0] in {*EMBEDDED, ""} or Path(n).is_file()]
    away = {name.split("[")[0] for name in names if name not in here}
    away = {name for name in away if not name.endswith((".tsv.gz", ".npz"))}
    assert away <= {*data.names()}
    if names[0] in here:
        data.check(*here, kinds=kinds)


def check(*names, kinds=("images",), **_):
    check_sets(*names, kinds=tuple(kinds))


def check_page(path: Path, given: dict) -> None:
    """Check parameters as the page itself does before it begins."""
    known, lines = of_page(path)
    names = {"runs": runs, "data": SimpleNamespace(check=check), "check": check}
    exec(lines, known | given | names)


@functools.cache
def of_page(path: Path):
    lines = compile(checking(path), path.name, "exec")
    return parameters.defaults(path), lines
