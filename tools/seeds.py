"""In how many other seeds the claims of the pages hold: figures/seeds/<page>.csv.

    python tools/seeds.py                 sweep every lesson over five other seeds at `quick`
    python tools/seeds.py 03 studies/04   those pages alone
    python tools/seeds.py --studies       every study: two hours of one core

Bounds and sentences are chosen on seed 0; these runs judge them. A row is a claim: its sentence,
the checksum of the page's code that the runs belong to, and whether it holds in each seed. Claims of
what holds by definition and claims about other runs, which have seeds of their own, have none.
Finished runs are kept in figures/quick, so that an interrupted sweep goes on where it stopped.
"""

import argparse
import csv
import sys
from pathlib import Path

from uqlab import runs
from uqlab.core.files import fingerprint
from uqlab.core.recording import Record
from uqlab.runs import parameters
from uqlab.runs.execution import Report
from uqlab.runs.manifest import Manifest

SEEDS = "1:6"
# Pages whose sizes or sentences were changed after a look at seeds that judged them: judged on others.
FRESH = {
    "03_mlp_width_sweep": "6:11",
    "04_mask_extraction": "11:16",
    "06_lora_ensemble": "11:16",
    "08_singular_value_ensemble": "11:16",
    "09_hydra_head_pruning": "16:21",
    "15_sound_ensemble": "11:16",
    "17_cheap_ensembles": "6:11",
}


def code_of(notebook: Path) -> str:
    """Return the checksum of a notebook's code; its prose may change."""
    cells = parameters.cells(notebook)
    code = [c["source"] for c in cells if c["cell_type"] == "code"]
    return fingerprint(["".join(source) for source in code])[:16]


def rows_of(report: Report, notebook: Path) -> list[dict]:
    """Return a row for each claim; ValueError where its sentence depends on the seed."""
    rows: dict[str, dict] = {}
    for outcome in report.outcomes:
        seed = Manifest.read(outcome.folder).parameters["seed"]
        for name, claim in Record.read(outcome.folder).claims.items():
            if claim.algebra or claim.other_runs:
                continue
            new = {"claim": name, "sentence": claim.sentence, "code": code_of(notebook)}
            row = rows.setdefault(name, new)
            if row["sentence"] != claim.sentence:
                raise ValueError(f"{notebook.stem}, {name}: another sentence in {seed}")
            row[seed] = claim.holds
    return list(rows.values())


def main(arguments: list[str] | None = None) -> int:
    """Sweep pages over other seeds and keep which claims hold; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebooks", nargs="*")
    parser.add_argument("--studies", action="store_true")
    parser.add_argument("--root", type=Path, default=Path("figures"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    pages = [parameters.find(name) for name in options.notebooks]
    pages = pages or parameters.all_notebooks(
        "studies" if options.studies else "lessons"
    )
    failed = False
    for notebook in pages:
        report = runs.sweep(
            notebook,
            {"seed": FRESH.get(notebook.stem, SEEDS)},
            root=options.root,
            jobs=options.jobs,
        )
        print(f"\n{runs.summary(report)}\n")
        if report.failed:
            failed = True
            continue
        rows = rows_of(report, notebook)
        if not rows:
            continue
        path = options.root / "seeds" / f"{notebook.stem}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
