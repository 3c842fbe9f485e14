"""What is kept of long runs, and the text that sums them up."""

import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)

from uqlab.core.files import read_json
from uqlab.runs.manifest import Manifest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import evidence

PAGE = "00_some"


def entry(seeds="0:3", **more):
    compared = [
        {"what": "the least", "number": "fall.id", "paper": 1.0},
        {"what": "the square", "number": "square", "paper": 2.0},
    ]
    return {
        "seeds": seeds,
        "figures": [],
        "smaller": "All of it.",
        "compared": compared,
    } | more


def told(project, **entries):
    """Write evidence.yaml, and return the exit code of tools/evidence.py."""
    (project / "notebooks" / "profiles.yaml").write_text(
        "real: {00_some: {name: mnist}}\n"
    )
    (folder := project / "figures" / "real").mkdir(parents=True, exist_ok=True)
    (folder / "evidence.yaml").write_text(yaml.safe_dump(entries))
    return evidence.main([])


def test_long_runs_are_swept_once_and_kept_with_a_text_that_sums_them_up(
    project, computed
):
    entries = {
        PAGE: entry(reasons={"numbers": "It counts."}),
        "01_later": {"smaller": "Not run."},
    }
    assert told(project, **entries) == 0
    assert [given["seed"] for given in computed] == [0, 1, 2]
    folder = project / "figures" / "real" / PAGE
    kept = {"manifest.json", "results.json", "table.csv", "table.json"}
    assert {path.name for path in folder.iterdir()} == kept
    assert list(pd.read_csv(folder / "table.csv")["claim_even"]) == [True, False, True]
    assert read_json(folder / "table.json")["parameters"]["seed"] == [0, 1, 2]
    about = Manifest.read(folder)
    assert about.parameters["seed"] == 0
    assert about.undamaged(folder)
    text = (folder.parent / "README.md").read_text()
    assert text == evidence.readme(folder.parent)
    assert f"| [00 some]({PAGE}) | – | – | 3 | 0.00 |" in text
    assert "| 0 of 1 in every run |" in text
    assert (
        "Of 2 numbers the largest deviation: the square is 1.6667 ± 2.0817, in the paper 2.0. It counts."
        in text
    )
    assert "Not run." not in text
    assert told(project, **entries) == 0
    assert len(computed) == 3


def test_where_most_runs_contradict_a_paper_a_reason_must_be_given(project, computed):
    numbers = {"numbers": "It counts."}
    said = r"most runs contradict Table <2> in the claim even: why\?"
    with pytest.raises(ValueError, match=said):
        told(project, **{PAGE: entry("1,2,3", reasons=numbers)})
    reasons = numbers | {"even": "Odd seeds."}
    assert told(project, **{PAGE: entry("1,2,3", reasons=reasons)}) == 0
    text = (project / "figures" / "real" / "README.md").read_text()
    assert (
        "“It is <even>.”: in 1 of 3 runs, in the paper so (Table <2>). Odd seeds."
        in text
    )
