"""One page for all runs: figures beside captions, parameters, numbers and claims.

This file gathers what the page shows; its HTML is in gallery.html.j2. The page works
from disk: pictures and notebooks by relative links.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader

from uqlab.core.files import Values, write
from uqlab.core.recording import Record
from uqlab.runs import tables
from uqlab.runs.manifest import Manifest, Present
from uqlab.runs.parameters import cells


def build(root: Path, profiles: Sequence[str] = ("",)) -> Path:
    """Write index.html for the result folders in a folder; return its path.

    Parameters
    ----------
    root
        Such as figures/quick.
    profiles
        Folders in `root` to show instead.
    """
    present = Present()
    sections = []
    for profile in profiles:
        folders = (root / profile).glob("[!.]*/")
        for name in sorted({folder.name.removesuffix(".failed") for folder in folders}):
            folder = root / profile / name
            section: Values = {"id": folder.relative_to(root).as_posix(), "table": ""}
            several = sorted(folder.glob("[!.]*/")) if name.endswith(".sweep") else []
            section["runs"] = [
                _run(root, each, present) for each in several or [folder]
            ]
            if several:
                with suppress(ValueError):  # no finished run
                    section["table"] = _table(folder)
            sections.append(section)
    if not sections:
        raise ValueError(f"no runs in {root}; first: uqlab run NOTEBOOK")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
    )
    template = environment.get_template("gallery.html.j2")
    write(root / "index.html", template.render(root=root.name, sections=sections))
    return root / "index.html"


def profiles_of(root: Path) -> list[str]:
    """Return the profiles that have runs in a folder such as figures."""
    runs = []
    for pattern in ("*/*/manifest.json", "*/*.failed", "*/*.sweep"):
        runs += root.glob(pattern)
    return sorted({path.relative_to(root).parts[0] for path in runs})


def _table(sweep: Path) -> str:
    """Return the columns of a sweep in which runs differ, in HTML."""
    frame = tables.read(sweep)
    varied = frame.loc[:, frame.nunique() > 1]
    return varied.to_html(index=False, border=0, float_format="{:.4g}".format)


def _run(root: Path, folder: Path, present: Present) -> Values:
    """Return what a result folder holds, and the failure of a later run."""
    manifest = Manifest.read(folder)
    failed = folder.with_name(f"{folder.stem}.failed")
    problem = present.stale(manifest) and f"Stale: {present.stale(manifest)}"
    if not manifest.undamaged(folder):
        problem = "Incomplete: files or manifest.json are missing or damaged."
    with suppress(OSError):
        reason = (failed / "error.txt").read_text("utf-8")
        problem = f"The last run failed.\n{reason}"
    record = Record.read(folder)
    claims = record.claims.values()
    files = {*folder.glob("*.*"), *failed.glob("*.ipynb")}
    return {
        "name": folder.name,
        "title": _title(folder),
        "problem": problem,
        "manifest": manifest,
        "record": record,
        "claims": [
            (c.sentence, c.result, c.in_seeds, c.in_units, c.in_paper) for c in claims
        ],
        "files": {
            path.name: quote(path.relative_to(root).as_posix())
            for path in sorted(files)
        },
    }


def _title(folder: Path) -> str:
    """Return the first heading of the notebook in a folder, else the folder's name."""
    with suppress(ValueError, IndexError):  # no notebook, or without cells
        (notebook,) = folder.glob("*.ipynb")
        heading = "".join(cells(notebook)[0]["source"]).strip()
        return heading.partition("\n")[0].lstrip("# ")
    return folder.name
