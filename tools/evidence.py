"""Long runs of pages, kept small enough to be committed, and the text that sums them up.

    python tools/evidence.py             sweep what is missing, keep it, write the README
    python tools/evidence.py 03 04       those pages alone
    python tools/evidence.py --summary   run nothing: only write the README

evidence.yaml in the folder of what is kept names the pages: the `seeds` of a sweep, the
`figures` to keep, what was `learned` and what `strange` where the runs' parameters do
not say it, what is `smaller` than in the papers, what was `found`, numbers `compared`
with the papers', and the `reasons` where runs and papers differ.
"""

import argparse
import dataclasses
import json
import re
import shutil
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas
import yaml

from uqlab import runs
from uqlab.core.files import read_json, write
from uqlab.core.recording import Record
from uqlab.runs import parameters, tables
from uqlab.runs.manifest import Manifest

HEAD = """# Long runs of the pages

`tools/evidence.py` writes this text from the files beside it; `make evidence` computes anew what is missing of the sweeps.
A run is a page with the profile `real` and a seed. Each folder has the runs as a table and what they depend on, and the
results and some figures of the first.

| page | learned | strange | runs | hours | machine, threads | uqlab | claims that hold |
|---|---|---|---|---|---|---|---|
"""
VERSION = re.compile(r"\d+\.\d+\.\d+")
APART = """
## What is smaller than in the papers, and where the runs differ from them

Numbers are means over the runs, ± one standard deviation.

"""


def main(arguments: list[str] | None = None) -> int:
    """Sweep pages with the profile real over seeds, and keep what they found.

    Finished runs are skipped, also stale ones. Returns 1 if a run failed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("notebooks", nargs="*")
    parser.add_argument("--root", type=Path, default=Path("figures"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args(arguments)
    folder = options.root / "real"
    entries, failed = plan(folder), False
    names = [parameters.find(name).stem for name in options.notebooks]
    names = names or [name for name, entry in entries.items() if "seeds" in entry]
    if without := [name for name in names if "seeds" not in entries.get(name, {})]:
        parser.error(f"{', '.join(without)}: no seeds in {folder / 'evidence.yaml'}")
    for name in () if options.summary else names:
        report = runs.sweep(
            ran_for(name),
            {"seed": entries[name]["seeds"]},
            profile="real",
            root=options.root,
            jobs=options.jobs,
            keep_stale=True,
        )
        failed |= bool(report.failed)
        if len(report.failed) < len(report.outcomes):
            keep(report.folder, folder / name, entries[name]["figures"])
        print(f"\n{runs.summary(report)}\n")
    write(folder / "README.md", readme(folder))
    print(f"summary: {folder / 'README.md'}")
    return int(failed)


def ran_for(name: str) -> Path:
    """Return the notebook whose runs are kept under a page's name: its study, if any."""
    lesson = parameters.find(name)
    study = lesson.parent / "studies" / f"{lesson.stem}_study.ipynb"
    return study if study.exists() else lesson


def plan(root: Path) -> dict[str, dict[str, Any]]:
    """Return what evidence.yaml says: the name of a page -> its entry."""
    return yaml.safe_load((root / "evidence.yaml").read_text(encoding="utf-8"))


def keep(sweep: Path, folder: Path, figures: Iterable[str]) -> None:
    """Keep a finished sweep's table, and results, manifest and figures of the first run.

    The manifest is cut to the files that are kept; data files in the current folder are
    named as seen from there.
    """
    frame = runs.load(sweep)
    first = sweep / frame.run[0]
    manifest = Manifest.read(first)
    kept = ["results.json", *(f"{name}.png" for name in figures)]
    folder.mkdir(parents=True, exist_ok=True)
    for name in kept:
        shutil.copyfile(first / name, folder / name)
    here = f"{Path.cwd().resolve()}/"
    data = {
        str(Path(path).resolve()).removeprefix(here): checksum
        for path, checksum in manifest.data.items()
    }
    files = {name: manifest.files[name] for name in kept}
    notebook = str((first / manifest.notebook).resolve()).removeprefix(here)
    frame["run_notebook"] = notebook
    manifest = dataclasses.replace(manifest, data=data, files=files, notebook=notebook)
    manifest.save(folder)
    write(folder / "table.csv", frame.to_csv(index=False, float_format="%.6g"))
    about = tables.circumstances([Manifest.read(sweep / run) for run in frame.run])
    write(folder / "table.json", json.dumps(about, indent=1))


def readme(root: Path) -> str:
    """Return the text that sums up what is kept: a row a page, then the differences.

    Raises ValueError where most of the runs contradict a paper and no reason is given.
    """
    entries = {
        name: entry
        for name, entry in sorted(plan(root).items())
        if (root / name).is_dir()
    }
    rows = "".join(
        f"| {' | '.join(_row(root / name, entry))} |\n"
        for name, entry in entries.items()
    )
    apart = "".join(
        f"- **{name[:2]}.** {' '.join(_apart(root / name, entry))}\n"
        for name, entry in entries.items()
    )
    return HEAD + rows + APART + apart


def _row(folder: Path, entry: dict[str, Any]) -> list[str]:
    """Return the cells of a page's row."""
    manifest = Manifest.read(folder)
    held = [all(answers) for answers in _held(folder).values()]
    contents = [read_json(path) for path in sorted(folder.glob("*.json"))]
    studies = [content for content in contents if "hours" in content]
    if not studies:
        hours = (manifest.seconds or 0) / 3600
        studies = [dataclasses.asdict(manifest) | {"runs": 1, "hours": hours}]
    given = manifest.parameters or studies[0]["parameters"]
    machines = [f"{about['device']}, {about['threads']}" for about in studies]
    return [
        f"[{folder.name.replace('_', ' ')}]({folder.name})",
        entry.get("learned") or given.get("dataset", "–"),
        entry.get("strange") or ", ".join(given.get("ood", [])) or "–",
        str(sum(about["runs"] for about in studies)),
        f"{sum(about['hours'] for about in studies):.2f}",
        "; ".join(dict.fromkeys(machines)),
        ", ".join(
            sorted({v for a in studies for v in VERSION.findall(str(a["uqlab"]))})
        ),
        f"{sum(held)} of {len(held)} in every run" if held else "–",
    ]


def _apart(folder: Path, entry: dict[str, Any]) -> Iterator[str]:
    """Yield what is smaller, the number that differs most, claims that differ, and why."""
    yield from (entry[key] for key in ("smaller", "found") if key in entry)
    reasons = entry.get("reasons", {})
    if entry.get("compared"):
        table = pandas.read_csv(folder / "table.csv")
        numbers = [(table[line["number"]], line) for line in entry["compared"]]
        values, most = max(
            numbers, key=lambda pair: abs(pair[0].mean() / pair[1]["paper"] - 1)
        )
        found = f"{values.mean():.4f} ± {statistics.stdev(values):.4f}"
        yield (
            f"Of {len(numbers)} numbers the largest deviation: {most['what']} is {found}, "
            f"in the paper {most['paper']}."
        )
        yield reasons["numbers"]
    claims = Record.read(folder).claims
    for name, held in _held(folder).items():
        paper = claims[name].paper if name in claims else None
        if paper and paper["holds"] != (2 * sum(held) > len(held)):
            if name not in reasons:
                raise ValueError(
                    f"{folder.name}: most runs contradict {paper['text']} "
                    f"in the claim {name}: why?"
                )
            there = "so" if paper["holds"] else "not so"
            yield (
                f"“{claims[name].sentence}”: in {sum(held)} of {len(held)} runs, "
                f"in the paper {there} ({paper['text']}). {reasons[name]}"
            )


def _held(folder: Path) -> dict[str, list[bool]]:
    """Return whether each claim holds in each run."""
    if (folder / "table.csv").is_file():
        table = pandas.read_csv(folder / "table.csv")
        names = [name for name in table if name.startswith("claim_")]
        return {
            name.removeprefix("claim_"): [bool(held) for held in table[name].dropna()]
            for name in names
        }
    claims = Record.read(folder).claims
    return {name: [claim.holds] for name, claim in claims.items()}


if __name__ == "__main__":
    sys.exit(main())
