"""In how many other seeds the claims of the lessons hold: figures/seeds/<page>.csv.

    python tools/seeds.py             sweep every lesson over seeds 1 to 5 at `quick`
    python tools/seeds.py 03 04       those pages alone

Bounds and sentences are chosen on seed 0; these runs judge them. A row is a seed; a column is
a claim, or `code`, the checksum of the page's code that the run belongs to. Finished runs are
kept in figures/quick, so that an interrupted sweep goes on where it stopped.
"""

import argparse
import csv
import sys
from pathlib import Path

from uqlab import runs
from uqlab.core.files import fingerprint
from uqlab.core.recording import Record
from uqlab.runs import parameters
from uqlab.runs.manifest import Manifest
from uqlab.runs.sweeps import Report

SEEDS = "1:6"


def code_of(notebook: Path) -> str:
    """Return the checksum of a notebook's code; its prose may change."""
    cells = parameters.cells(notebook)
    code = [c["source"] for c in cells if c["cell_type"] == "code"]
    return fingerprint(["".join(source) for source in code])[:16]


def rows_of(report: Report, notebook: Path) -> list[dict]:
    """Return a row for each run: its seed, the code's checksum, which claims hold."""
    rows = []
    for outcome in report.outcomes:
        seed = Manifest.read(outcome.folder).parameters["seed"]
        row = {"seed": seed, "code": code_of(notebook)}
        for name, claim in Record.read(outcome.folder).claims.items():
            if not claim.algebra:
                row[name] = claim.holds
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Sweep lessons over other seeds and keep which claims hold; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebooks", nargs="*")
    parser.add_argument("--root", type=Path, default=Path("figures"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    pages = [parameters.find(name) for name in options.notebooks]
    failed = False
    for notebook in pages or parameters.all_notebooks():
        report = runs.sweep(
            notebook, {"seed": SEEDS}, root=options.root, jobs=options.jobs
        )
        print(f"\n{runs.summary(report)}\n")
        if report.failed:
            failed = True
            continue
        rows = rows_of(report, notebook)
        path = options.root / "seeds" / f"{notebook.stem}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
