"""One page for all runs: each figure beside its caption, parameters, numbers and the paper's figure and numbers.

This file gathers what the page shows; its HTML is in gallery.html.j2. The page works from disk: pictures and notebooks
by relative links, style and script inside.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from PIL import Image

from uqlab.core.files import read_json, write
from uqlab.runs import tables
from uqlab.runs.identity import Present

PICTURES = (".png", ".svg")
PAPER = "paper_and_this_run"  # the table that compares; it comes first


def build(root: Path, profiles: Sequence[str] = ()) -> Path:
    """Write index.html for the result folders in a folder such as figures/quick, and return its path.

    profiles: folders in `root` to show instead, such as those of figures; the page then filters by profile too.
    """
    sections, gathered = [], _Gathered(root)
    for profile in profiles or [""]:
        parent = root / profile
        folders = [
            path for path in parent.iterdir() if path.is_dir() and path.name[0] != "."
        ]
        for name in sorted({path.name.removesuffix(".failed") for path in folders}):
            notebook = name.removesuffix(".sweep")
            section = {
                "id": f"{profile}/{name}".lstrip("/"),
                "notebook": notebook,
                "profile": profile,
            }
            gather = gathered.notebook if name == notebook else gathered.sweep
            try:
                sections.append(section | gather(parent, name))
            except (
                AttributeError,
                LookupError,
                OSError,
                TypeError,
                ValueError,
            ) as error:  # the others are shown
                broken = f"Its files cannot be read: {type(error).__name__}: {error}"
                sections.append(
                    section
                    | {
                        "title": name,
                        "sweep": False,
                        "runs": [{"problem": broken, "claims": [], "figures": []}],
                    }
                )
    notebooks = sorted({section["notebook"] for section in sections})
    html = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=ChainableUndefined,
    )
    html.trim_blocks = html.lstrip_blocks = True
    html.filters |= {"url": quote, "json": json.dumps}
    page = html.get_template("gallery.html.j2")
    held: dict[str, list[bool]] = {}
    for section in sections:
        for claim in () if section["sweep"] else section["runs"][0]["claims"]:
            held.setdefault(section["profile"] or root.name, []).append(claim["holds"])
    claims = [f"{profile}: {tables.counted(each)}" for profile, each in held.items()]
    shown = {
        "profiles": profiles,
        "notebooks": notebooks,
        "sections": sections,
        "claims": claims,
    }
    write(root / "index.html", page.render(root=root.name, **shown))
    return root / "index.html"


def found(root: Path) -> list[str]:
    """Return the profiles that have runs in a folder such as figures."""
    runs = [
        path
        for each in ("*/*/manifest.json", "*/*.failed", "*/*.sweep")
        for path in root.glob(each)
    ]
    return sorted({path.relative_to(root).parts[0] for path in runs})


class _Gathered:
    """Gathers what the page shows of each result folder; links are relative to `root`."""

    def __init__(self, root: Path):
        self.root, self.present = root, Present()

    def notebook(self, parent: Path, name: str) -> dict[str, Any]:
        """Return the section of one notebook: its last result, and the failure that came after it."""
        failure = parent / f"{name}.failed"
        folder = parent / name if (parent / name).is_dir() else failure
        files = read_json(folder / "manifest.json").get("files")
        missing = [file for file in files or () if not (folder / file).is_file()]
        problem = ""
        if failure.is_dir():
            kept = (
                "" if folder == failure else "; below is the result of an earlier run"
            )
            problem = _with_error(f"The last run failed{kept}.", failure)
        elif not files and (
            (folder / "manifest.json").exists() or not any(folder.glob("*.csv"))
        ):
            problem = "Incomplete: manifest.json is missing or broken."
        elif missing:
            problem = f"Incomplete: {', '.join(missing)} missing."
        run: dict[str, Any] = self.run(folder) | {"problem": problem}
        if folder != failure:
            run["links"] += [
                self.link(path, f"the failed {path.name}")
                for path in failure.glob("*.ipynb")
            ]
        return {"title": _title(folder) or name, "sweep": False, "runs": [run]}

    def sweep(self, parent: Path, name: str) -> dict[str, Any]:
        """Return the section of a sweep: a table of all runs, then each of them, and those that failed."""
        sweep = parent / name
        runs = tables.read(sweep)
        varied = [
            p
            for p in runs.parameters
            if len({json.dumps(row.get(p)) for row in runs.rows}) > 1
        ]
        columns = [*varied, *runs.numbers, "run_seconds"]
        data = [[row.get(column) for column in columns] for row in runs.rows]
        shown = [
            self.run(sweep / row["run"], {p: row.get(p) for p in varied})
            for row in runs.rows
        ]
        for folder in sorted(sweep.glob("*.failed")):
            notebook = next(folder.glob("*.ipynb"), None)
            about = read_json(notebook).get("metadata", {}) if notebook else {}
            given = about.get("papermill", {}).get("parameters", {})
            given = {p: value for p, value in given.items() if p != "output_dir"}
            links = [self.link(notebook, notebook.name)] if notebook else []
            problem = _with_error("This run failed.", folder)
            shown.append(
                {
                    "failed": folder.stem,
                    "varied": given,
                    "problem": problem,
                    "links": links,
                    "figures": [],
                }
            )
        return {
            "title": _title(sweep / runs.rows[0]["run"]) if runs.rows else name,
            "sweep": True,
            "links": [
                self.link(path, path.name) for path in sorted(sweep.glob("table.*"))
            ],
            "left_out": runs.left_out,
            "mixed": runs.mixed,
            "table": {
                "columns": columns,
                "data": data,
                "index": [row["run"] for row in runs.rows],
            },
            "runs": shown,
        }

    def run(self, folder: Path, varied: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what a result folder holds; varied: the parameters that tell it apart from others of its sweep."""
        manifest, results = (
            read_json(folder / "manifest.json"),
            read_json(folder / "results.json"),
        )
        files = [
            next(folder.glob("*.ipynb"), None),
            folder / "results.json",
            folder / "manifest.json",
        ]
        files += sorted(folder.glob("*.csv"))  # of long runs: rows of several seeds
        return {
            "varied": varied or {},
            "manifest": manifest,
            "stale": self.present.stale(manifest) if manifest.get("files") else "",
            "figures": list(self.figures(folder, results.get("figures", {}))),
            "tables": sorted(
                results.get("tables", {}).items(), key=lambda item: item[0] != PAPER
            ),
            "numbers": results.get("numbers"),
            "claims": list(tables.claims(folder).values()),
            "links": [
                self.link(path, path.name) for path in files if path and path.is_file()
            ],
        }

    def figures(
        self, folder: Path, described: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield the folder's figures, those with a caption first, in the order in which they were saved."""
        found = {
            path.stem: path
            for suffix in reversed(PICTURES)
            for path in sorted(folder.glob(f"*{suffix}"))
        }
        for name in dict.fromkeys(
            [*(name for name in described if name in found), *found]
        ):
            about = described.get(name, {})
            others = [
                path
                for path in sorted(folder.glob("*.*"))
                if path.stem == name and path != found[name]
            ]
            yield {
                "url": self.link(found[name], "")[0],
                "caption": about.get("caption") or name,
                "paper": about.get("paper"),
                "size": _size(found[name]),
                "links": [
                    self.link(path, path.suffix[1:].upper())
                    for path in others
                    if path.suffix != ".json"
                ],
            }

    def link(self, path: Path, text: str) -> tuple[str, str]:
        return quote(path.relative_to(self.root).as_posix()), text


def _with_error(text: str, failure: Path) -> str:
    with suppress(OSError):
        return text + "\n" + (failure / "error.txt").read_text(encoding="utf-8")
    return text


def _size(picture: Path) -> tuple[int, int] | None:
    """Return the width and height of a PNG in CSS pixels, 100 per inch at 200 dpi; None for other pictures."""
    with suppress(OSError), Image.open(picture) as image:
        return image.width // 2, image.height // 2
    return None


def _title(folder: Path) -> str:
    """Return the first heading of the notebook in a folder."""
    for path in folder.glob("*.ipynb"):
        for cell in read_json(path).get("cells", []):
            line = "".join(cell["source"]).lstrip().split("\n")[0]
            if cell["cell_type"] == "markdown" and line.startswith("# "):
                return line[2:].strip()
    return ""
