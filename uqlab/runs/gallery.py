"""One page for all runs: figures beside captions, parameters, numbers and the paper.

This file gathers what the page shows; its HTML is in gallery.html.j2. The page works
from disk: pictures and notebooks by relative links, style and script inside.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from uqlab.core.files import Values, read_json, write
from uqlab.core.recording import Record
from uqlab.runs import tables
from uqlab.runs.manifest import Manifest, Present

PAPER = "paper_and_this_run"  # the table that compares; it comes first
HIDDEN = (".json", ".txt")


def build(root: Path, profiles: Sequence[str] = ()) -> Path:
    """Write index.html for the result folders in a folder; return its path.

    Parameters
    ----------
    root
        Such as figures/quick.
    profiles
        Folders in `root` to show instead; the page then filters by profile too.
    """
    sections = list(_sections(root, profiles))
    held = []
    for section in sections:
        if not section["sweep"]:
            held += section["runs"][0]["record"].claims_held()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"url": quote, "json": json.dumps}
    page = environment.get_template("gallery.html.j2").render(
        root=root.name,
        profiles=profiles,
        notebooks=sorted({section["notebook"] for section in sections}),
        sections=sections,
        claims=tables.counted(held) if held else "",
    )
    write(root / "index.html", page)
    return root / "index.html"


def _sections(root: Path, profiles: Sequence[str]) -> Iterator[Values]:
    """Yield what the page shows of each notebook and each sweep."""
    present = Present()
    for profile in profiles or [""]:
        folders = (root / profile).glob("[!.]*/")
        for name in sorted({path.name.removesuffix(".failed") for path in folders}):
            notebook = name.removesuffix(".sweep")
            gather = _notebook if name == notebook else _sweep
            section = {
                "id": f"{profile}/{name}".lstrip("/"),
                "notebook": notebook,
                "profile": profile or root.name,
                "sweep": name != notebook,
            }
            yield section | gather(root, root / profile / name, present)


def profiles_of(root: Path) -> list[str]:
    """Return the profiles that have runs in a folder such as figures."""
    runs = []
    for pattern in ("*/*/manifest.json", "*/*.failed", "*/*.sweep"):
        runs += root.glob(pattern)
    return sorted({path.relative_to(root).parts[0] for path in runs})


def _notebook(root: Path, folder: Path, present: Present) -> Values:
    """Return the last result of a notebook, and the failure that came after it."""
    failure = folder.with_name(f"{folder.name}.failed")
    shown = folder if folder.is_dir() else failure
    run = _run(root, shown, present)
    files = run["manifest"].files
    missing = [name for name in files if not (shown / name).is_file()]
    rows_alone = any(shown.glob("*.csv")) and not (shown / "manifest.json").exists()
    run["problem"] = ""
    if failure.is_dir():
        earlier = "; below is the result of an earlier run" if shown == folder else ""
        run["problem"] = f"The last run failed{earlier}.\n{_error(failure)}"
    elif missing:
        run["problem"] = f"Incomplete: {', '.join(missing)} missing."
    elif not files and not rows_alone:
        run["problem"] = "Incomplete: manifest.json is missing or broken."
    if shown != failure:
        run["links"] += _links(root, failure.glob("*.ipynb"), "the failed ")
    return {"title": folder.name, "runs": [run]} | _opening(shown)


def _sweep(root: Path, sweep: Path, present: Present) -> Values:
    """Return a table of all runs of a sweep, each of them, and those that failed."""
    runs = tables.read(sweep)
    varied = [name for name in runs.parameters if _several(runs.rows, name)]
    columns = [*varied, *runs.numbers, "run_seconds"]
    shown = []
    cells = []
    for row in runs.rows:
        cells.append([row.get(name) for name in columns])
        run = _run(root, sweep / row["run"], present)
        shown.append(run | {"varied": {name: row[name] for name in varied}})
    failed = [_failed(root, folder) for folder in sorted(sweep.glob("*.failed"))]
    first = sweep / runs.rows[0]["run"] if runs.rows else sweep
    return {
        "title": sweep.name,
        "links": _links(root, sorted(sweep.glob("table.*"))),
        "left_out": runs.left_out,
        "mixed": runs.mixed,
        "table": {
            "columns": columns,
            "data": cells,
            "index": [row["run"] for row in runs.rows],
        },
        "runs": shown + failed,
        **_opening(first),
    }


def _several(rows: list[Values], name: str) -> bool:
    """Return whether a parameter has several values."""
    return any(row[name] != rows[0][name] for row in rows)


def _failed(root: Path, folder: Path) -> Values:
    """Return a failed run of a sweep; papermill notes its parameters."""
    parameters = {}
    for path in folder.glob("*.ipynb"):
        about = read_json(path).get("metadata", {})
        parameters = about.get("papermill", {}).get("parameters", {})
        parameters.pop("output_dir", None)
    return {
        "failed": folder.stem,
        "varied": parameters,
        "problem": f"This run failed.\n{_error(folder)}",
        "links": _links(root, folder.glob("*.ipynb")),
        "figures": [],
    }


def _run(root: Path, folder: Path, present: Present) -> Values:
    """Return what a result folder holds."""
    manifest = Manifest.read(folder)
    record = Record.read(folder)
    files = []
    for pattern in ("*.ipynb", "results.json", "manifest.json", "*.csv"):
        files += sorted(folder.glob(pattern))
    return {
        "manifest": manifest,
        "record": record,
        "stale": present.stale(manifest) if manifest.files else "",
        "figures": list(_figures(root, folder, record)),
        "tables": sorted(record.tables.items(), key=lambda table: table[0] != PAPER),
        "links": _links(root, files),
    }


def _figures(root: Path, folder: Path, record: Record) -> Iterator[Values]:
    """Yield a folder's figures, those with a caption first, in their order."""
    files = sorted(path for path in folder.glob("*.*") if path.suffix not in HIDDEN)
    pictures = {path.stem: path for path in files if path.suffix == ".svg"}
    pictures |= {path.stem: path for path in files if path.suffix == ".png"}
    for name in dict.fromkeys([*record.figures, *pictures]):
        if name in pictures:
            others = [p for p in files if p.stem == name and p != pictures[name]]
            about = record.figures.get(name, {})
            yield {
                "url": _links(root, [pictures[name]])[0][0],
                "caption": about.get("caption") or name,
                "paper": about.get("paper"),
                "size": _size(pictures[name]),
                "links": _links(root, others),
            }


def _links(root: Path, paths: Any, before: str = "") -> list[tuple[str, str]]:
    """Return links relative to the page, and their texts."""
    return [
        (quote(path.relative_to(root).as_posix()), before + path.name) for path in paths
    ]


def _error(failure: Path) -> str:
    with suppress(OSError):
        return (failure / "error.txt").read_text(encoding="utf-8")
    return ""


def _size(picture: Path) -> tuple[int, int] | None:
    """Return a PNG's width and height in CSS pixels, 100 an inch at 200 dpi."""
    from PIL import Image

    with suppress(OSError), Image.open(picture) as image:
        return image.width // 2, image.height // 2
    return None


def _opening(folder: Path) -> dict[str, str]:
    """Return the first heading and the question of the notebook in a folder."""
    for path in folder.glob("*.ipynb"):
        cells = read_json(path).get("cells", [])
        prose = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        text = "\n\n".join(prose)
        title = re.search(r"^\s*# (.+)", text, re.MULTILINE)
        question = re.search(r"\*\*Question\.\*\* (.+?)(?:\n\n|$)", text, re.DOTALL)
        found = {"title": title, "question": question}
        return {name: hit[1] for name, hit in found.items() if hit}
    return {}
