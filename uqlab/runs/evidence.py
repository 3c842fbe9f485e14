"""Long runs of pages, kept small enough to be committed, and the text that sums them up.

evidence.yaml in the folder of what is kept names the pages: the `seeds` of a sweep, the `figures` to keep, what was
`learned` and what `strange` where the runs' parameters do not say it, what is `smaller` than in the papers, what was
`found`, numbers `compared` with the papers', and the `reasons` where runs and papers differ.
"""

import json
import shutil
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from uqlab.core.files import read_json, write
from uqlab.runs import tables
from uqlab.runs.execution import named
from uqlab.runs.identity import sealed

HEAD = """# Long runs of the pages

`uqlab evidence` writes this text from the files beside it; `make evidence` computes anew what is missing of the sweeps.
A run is a page with the profile `real` and a seed. Each folder has the runs as a table and what they depend on, and the
results and some figures of the first.

| page | learned | strange | runs | hours | machine, threads | claims that hold |
|---|---|---|---|---|---|---|
"""
APART = """
## What is smaller than in the papers, and where the runs differ from them

Numbers are means over the runs, ± one standard deviation.

"""


def plan(root: Path) -> dict[str, dict[str, Any]]:
    """What evidence.yaml says: the name of a page -> its entry."""
    return yaml.safe_load((root / "evidence.yaml").read_text(encoding="utf-8"))


def keep(sweep: Path, folder: Path, figures: Iterable[str]) -> None:
    """Keep of a finished sweep its table, what the runs depend on, and results, manifest and some figures of the first.

    The manifest is cut to the files that are kept; data files in the current folder are named as seen from there.
    """
    runs = tables.read(sweep)
    frame, first = tables.as_frame(runs, sweep), sweep / runs.rows[0]["run"]
    manifest = read_json(first / "manifest.json")
    kept = ["results.json", *(f"{name}.png" for name in figures)]
    folder.mkdir(parents=True, exist_ok=True)
    for name in kept:
        shutil.copyfile(first / name, folder / name)
    manifest["data"] = {
        named(Path(path).resolve()): digest for path, digest in manifest["data"].items()
    }
    manifest["files"] = {name: manifest["files"][name] for name in kept}
    write(folder / "manifest.json", json.dumps(sealed(manifest), indent=1))
    write(folder / "table.csv", frame.to_csv(index=False, float_format="%.6g"))
    write(
        folder / "table.json",
        json.dumps(tables.circumstances(runs, sweep, runs.rows), indent=1),
    )


def readme(root: Path) -> str:
    """The text that sums up what is kept in a folder: a row a page, then the differences and their reasons.

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
    """The cells of a page's row."""
    manifest, held = (
        read_json(folder / "manifest.json"),
        [all(each) for each in _held(folder).values()],
    )
    every = [
        about
        for path in sorted(folder.glob("*.json"))
        if "hours" in (about := read_json(path))
    ]
    every = every or [manifest | {"runs": 1, "hours": manifest["seconds"] / 3600}]
    given = manifest.get("parameters") or every[0]["parameters"]
    machines = dict.fromkeys(
        f"{about['device']}, {about['threads']}" for about in every
    )
    claims = tables.counted(held, "in every run") if held else "–"
    return [
        f"[{folder.name.replace('_', ' ')}]({folder.name})",
        entry.get("learned") or given.get("dataset", "–"),
        entry.get("strange") or ", ".join(given.get("ood", [])) or "–",
        str(sum(about["runs"] for about in every)),
        f"{sum(about['hours'] for about in every):.2f}",
        "; ".join(machines),
        claims,
    ]


def _apart(folder: Path, entry: dict[str, Any]) -> Iterator[str]:
    """What is smaller, the number that differs most, the claims that the paper answers otherwise, and why."""
    yield from (entry[key] for key in ("smaller", "found") if key in entry)
    reasons, table = (
        entry.get("reasons", {}),
        tables.load(folder / "table.csv") if entry.get("compared") else None,
    )
    if table is not None:
        each = [(table[line["number"]], line) for line in entry["compared"]]
        values, most = max(
            each, key=lambda pair: abs(pair[0].mean() / pair[1]["paper"] - 1)
        )
        found = f"{values.mean():.4f} ± {statistics.stdev(values):.4f}"
        yield f"Of {len(each)} numbers the largest deviation: {most['what']} is {found}, in the paper {most['paper']}."
        yield reasons["numbers"]
    said = tables.claims(folder)
    for name, held in _held(folder).items():
        paper = said.get(name, {}).get("paper")
        if paper and paper["holds"] != (2 * sum(held) > len(held)):
            if name not in reasons:
                raise ValueError(
                    f"{folder.name}: most runs contradict {paper['text']} in the claim {name}: why?"
                )
            here, there = (
                tables.counted(held, "runs"),
                "so" if paper["holds"] else "not so",
            )
            yield f"“{said[name]['sentence']}”: in {here}, in the paper {there} ({paper['text']}). {reasons[name]}"


def _held(folder: Path) -> dict[str, list[bool]]:
    """Whether each claim holds in each run."""
    if (folder / "table.csv").is_file():
        table = tables.load(folder / "table.csv")
        names = [name for name in table if name.startswith("claim_")]
        return {
            name.removeprefix("claim_"): [bool(held) for held in table[name].dropna()]
            for name in names
        }
    return {name: [claim["holds"]] for name, claim in tables.claims(folder).items()}
