"""What the container files list is run, in folders and an environment of its own; docker itself is not needed for that."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHON = PROJECT["requires-python"].removeprefix(">=")
OF_THE_SYSTEM = ("apt-get", "useradd")  # what needs a container
# As options of pip: only what lies in the copied folders is built, with the packages of these tests.
OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
LINES = (ROOT / "Dockerfile").read_text().splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if line[:1].isupper()]


def copy(source, target):
    """As COPY does: a folder's content, or a file, also into a folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        hidden = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(source, target, ignore=hidden)
    else:
        shutil.copy(source, target)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(OFFLINE, marks=pytest.mark.slow, id="as the tests"),
        pytest.param({}, marks=pytest.mark.release, id="everything installed"),
    ],
)
def test_the_image_is_built_and_serves_the_pages(tmp_path, options):
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    programs = tmp_path / "venv" / "bin"
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    if options:
        shutil.rmtree(own / "setuptools", ignore_errors=True)  # Python 3.11 brings 65
        shared = [path for path in sys.path if path.endswith("site-packages")]
        (own / "shared.pth").write_text("\n".join(shared))
    ours = ("PYTHON", "UQLAB_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}

    def run(command, folder):
        how = {"cwd": folder, "env": options | kept | path, "text": True}
        done = subprocess.run(command, **how, capture_output=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    folder = tmp_path / "image"
    for step, rest in STEPS:
        if step == "WORKDIR":
            folder = tmp_path / "image" / rest.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif step == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(ROOT / source, folder / target)
        elif step == "RUN" and not rest.startswith(OF_THE_SYSTEM):
            run(["bash", "-c", rest], folder)
        elif step == "CMD":
            assert run([*json.loads(rest), "--version"], folder)[0].isdigit()
    assert "ok: 1" in run(["uqlab", "run", "00", "--profile", "tiny"], folder)


def test_the_image_has_a_reader_a_token_and_the_pythons_version():
    said = dict(STEPS)
    assert said["USER"] != "root"
    options = json.loads(said["CMD"])
    assert not [o for o in options if "token" in o or "password" in o]
    about = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert about["image"].rpartition(":")[2] == PYTHON
    assert said["FROM"].partition(":")[2].startswith(PYTHON)
