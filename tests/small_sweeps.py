"""A checkout with one notebook, and a stand-in for papermill's part, so that hundreds of runs take no time."""

import json
from pathlib import Path

import pytest
from small_runs import notebook

from uqlab.core.files import sha256, write
from uqlab.runs import execution, manifest

PARAMETERS = """seed = 0  # random seed
width = 1.0  # a factor
name = "digits"  # data set
sizes = [1, 2]  # numbers
device = "auto"  # also a circumstance of the run
output_dir = ""  # folder"""


@pytest.fixture(name="project")
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout with one notebook, as the current folder."""
    notebook(tmp_path / "notebooks" / "00_some.ipynb", "1 + 1", parameters=PARAMETERS)
    (tmp_path / "notebooks" / "profiles.yaml").write_text(
        "tiny: {00_some: {width: 0.5}}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(name="computed")
def stand_in(monkeypatch) -> list[dict]:
    """Stand in for papermill by writing what a page leaves; the result lists what was computed."""
    done = []

    def papermill(job, folder, *_):
        values = job.values
        done.append(job.parameters)
        results = {
            "numbers": {
                "square": values["seed"] ** 2,
                "fall": {"id": values["width"], "ood": [1, 2]},
                "device": "here",
            },
            "claims": {
                "even": {
                    "sentence": "It is <even>.",
                    "holds": values["seed"] % 2 == 0,
                    "margin": 0.5,
                    "paper": {"holds": True, "text": "Table <2>"},
                }
            },
        }
        write(folder / "results.json", json.dumps(results))
        write(folder / job.notebook.name, job.notebook.read_text())

    monkeypatch.setattr(execution, "run_notebook", papermill)
    monkeypatch.setattr(manifest, "commit", lambda: "abc")
    return done


def again(folder: Path, **changes) -> None:
    """Change the manifest of a finished run, as if it had been computed so."""
    changed = manifest.Manifest.read(folder)
    for name, value in changes.items():
        setattr(changed, name, value)
    changed.files["results.json"] = sha256(folder / "results.json")
    changed.save(folder)
