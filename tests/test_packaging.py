"""The two ways to install agree, and what is promised is there."""

import importlib
import pathlib
import re
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_conda_and_pip_install_the_same_set():
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = {line.replace("pytorch=", "torch==") for line in lines if isinstance(line, str)} - {"pip"}
    assert conda == {*PROJECT["dependencies"], "python" + PROJECT["requires-python"]}


def test_every_dependency_says_what_it_is_for():
    lines = (ROOT / "environment.yml").read_text().splitlines()
    listed = [line for line in lines if re.match(r"  - \w.*\d", line) and "python>=" not in line]
    assert len(listed) == len(PROJECT["dependencies"])
    assert [line for line in listed if "  # " not in line] == []


def test_constraints_pin_every_dependency():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    wanted = {
        re.split(r"[=>\[]", line)[0] for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    }
    assert wanted <= set(pins)
    assert pins["torch"] == "2.13.0"


@pytest.mark.parametrize("module", [path.stem for path in sorted((ROOT / "uqlab").glob("*.py"))])
def test_modules_import_downwards_only(module):
    """Data flows one way (the order of this list); nothing imports upwards, and `runs` stands apart."""
    order = ["data", "models", "layers", "adapters", "ensembles", "steps", "checkpoints", "training", "extraction"]
    order += ["gradients", "uncertainty", "metrics", "diversity", "spectra", "representations", "heads"]
    order += ["plots", "widgets"]
    source = (ROOT / "uqlab" / f"{module}.py").read_text()
    imported = re.findall(r"^from uqlab\.(\w+) import|^from uqlab import (.+)$", source, re.MULTILINE)
    names = {name for one, several in imported for name in ([one] if one else re.findall(r"\w+", several))}
    importlib.import_module(f"uqlab.{module}" if module != "__init__" else "uqlab")
    if module in order:
        assert {name for name in names if name in order} <= set(order[: order.index(module)])
    if module == "runs":
        assert not names & set(order)
