"""What the container files list is run, in folders and an environment of its own; docker itself is not needed for that."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "requires-python"
].removeprefix(">=")
OF_THE_SYSTEM = ("apt-get", "useradd")  # what needs a container
# As options of pip: only what lies in the copied folders is built, with the packages of these tests.
OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}


def steps():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [line.split(maxsplit=1) for line in lines if line[:1].isupper()]


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
    environment = options | {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "UQLAB_"))
    }
    environment |= {"PATH": f"{programs}{os.pathsep}{environment['PATH']}"}

    def run(command, folder):
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    folder = tmp_path / "image"
    for step, rest in steps():
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
    assert "claims hold" in run(["uqlab", "run", "00", "--profile", "tiny"], folder)


def test_the_image_has_a_reader_and_a_token():
    users = [rest for step, rest in steps() if step == "USER"]
    assert users
    assert "root" not in users
    (command,) = (json.loads(rest) for step, rest in steps() if step == "CMD")
    assert "--ip=0.0.0.0" in command
    assert not [o for o in command if "token" in o or "password" in o]
    (image,) = (rest for step, rest in steps() if step == "FROM")
    assert image.partition(":")[2].startswith(PYTHON)


def test_the_development_container_makes_the_environment():
    about = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert about["image"].rpartition(":")[2] == PYTHON
    command = shlex.split(about["postCreateCommand"])
    said = subprocess.run(
        [*command, "--dry-run", "--always-make"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    made = about["customizations"]["vscode"]["settings"]
    assert (
        f"{made['python.defaultInterpreterPath']} -m pip".removeprefix(
            "${containerWorkspaceFolder}/"
        )
        in said
    )
    assert "'.[dev]'" in said
    installs = [line for line in said.splitlines() if " install " in line]
    assert installs
    assert all("--extra-index-url" in line for line in installs)
