"""The container files name what is there: paths, targets and commands; docker itself is not needed for that."""

import json
import re
import tomllib
from pathlib import Path

from uqlab.runs import cli

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_image_copies_what_a_wheel_needs_and_serves_with_a_token():
    steps = [
        line.split(maxsplit=1)
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line[:1].isupper()
    ]
    copied = [
        path for step, rest in steps if step == "COPY" for path in rest.split()[:-1]
    ]
    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert {
        "pyproject.toml",
        "constraints.txt",
        PROJECT["readme"],
        PROJECT["license-files"][0],
        "uqlab",
    } <= {*copied}
    links = [path for path in (ROOT / "uqlab").rglob("*") if path.is_symlink()]
    assert len(links) == 3
    assert {link.resolve().relative_to(ROOT).as_posix() for link in links} <= {
        *copied
    }  # what they lead to comes too
    (image,) = (rest for step, rest in steps if step == "FROM")
    assert image.partition(":")[2].startswith(
        PROJECT["requires-python"].removeprefix(">=")
    )
    users = [rest for step, rest in steps if step == "USER"]
    assert users
    assert "root" not in users
    program, command, *options = json.loads(
        next(rest for step, rest in steps if step == "CMD")
    )
    assert (program, command in cli.main.commands) == ("uqlab", True)
    assert "--ip=0.0.0.0" in options
    assert not [
        option for option in options if re.search("token|password", option)
    ]  # JupyterLab makes a token
    assert "c constraints.txt ." in " ".join(
        rest for step, rest in steps if step == "RUN"
    )


def test_the_development_container_makes_the_environment():
    about = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert about["image"].rpartition(":")[2] == PROJECT["requires-python"].removeprefix(
        ">="
    )
    program, target, _ = about["postCreateCommand"].split(maxsplit=2)
    assert program == "make"
    assert re.search(
        rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    interpreter = about["customizations"]["vscode"]["settings"][
        "python.defaultInterpreterPath"
    ]
    assert interpreter.endswith("/.venv/bin/python")
