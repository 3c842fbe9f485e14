"""A checkout with one notebook, and a stand-in for papermill's part, so that hundreds of runs take no time."""

import json
from pathlib import Path

import pytest
from small_runs import notebook

from uqlab.core.files import sha256, write
from uqlab.runs import execution, identity, parameters

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
    """Replace the execution of a notebook by writing what one leaves; the result lists what was computed."""
    done = []

    def execute(path, given, *, profile, folder, **_):
        values = parameters.defaults(path) | parameters.overrides(path, profile, given)
        done.append(given)
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {
            "square": values["seed"] ** 2,
            "fall": {"id": values["width"], "ood": [1, 2]},
            "device": "here",
        }
        paper = {"holds": True, "text": "Table <2>"}
        even = {
            "sentence": "It is <even>.",
            "holds": values["seed"] % 2 == 0,
            "margin": 0.5,
            "paper": paper,
        }
        results = {
            "numbers": numbers,
            "tables": {},
            "figures": {},
            "claims": {"even": even},
        }
        write(folder / "results.json", json.dumps(results))
        write(folder / f"{path.stem}.ipynb", path.read_text())
        files = {
            file.name: sha256(file)
            for file in folder.iterdir()
            if file.name != "manifest.json"
        }
        manifest = {
            "parameters": {
                name: value for name, value in values.items() if name != "output_dir"
            },
            "source_sha256": parameters.source_sha256(path),
            "code": {"__init__.py": sha256(identity.PACKAGE / "__init__.py")},
            "data": identity.Present().data(values, path.parent),
            "started": f"2026-01-01T00:00:{len(done):02}",
            "seconds": 1.5,
            "files": files,
        }
        write(folder / "manifest.json", json.dumps(identity.sealed(manifest)))
        return folder

    monkeypatch.setattr(execution, "execute", execute)
    return done
