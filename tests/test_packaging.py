"""The two ways to install agree, and what is promised is there."""

import ast
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import uqlab

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What the notebooks need, by one list for pip and one for conda.
EVERYTHING = [
    line
    for line in (*PROJECT["dependencies"], *EXTRAS["models"], *EXTRAS["notebooks"])
    if not line.startswith("uqlab")
]


def test_conda_and_pip_install_the_same_set():
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = {
        line.replace("pytorch", "torch") for line in lines if isinstance(line, str)
    }
    assert conda - {"pip"} == {*EVERYTHING, "python" + PROJECT["requires-python"]}


def core_alone():
    """The installed distributions that the core brings, by their normalised names."""
    found, todo = set(), [*PROJECT["dependencies"]]
    while todo:
        need = Requirement(todo.pop())
        name = canonicalize_name(need.name)
        if name in found or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        todo += metadata.requires(name) or []
    return found


CODE = re.compile(r"```python\n(.+?)```", re.DOTALL)
ALONE = """import importlib, sys
from importlib.machinery import PathFinder
class Shown(PathFinder):
    @classmethod
    def find_spec(cls, name, *more):
        return None if name.partition(".")[0] in {hidden} else super().find_spec(name, *more)
sys.meta_path[sys.meta_path.index(PathFinder)] = Shown
for room in {rooms}:
    importlib.import_module(f"uqlab.{room}")
{code}
from uqlab import analysis, runs, study
table = study.evaluate({"ensemble": ensemble, "one": ensemble.member(0)}, test, {"clothes": clothes}, repeats=2)
assert "nll one - ensemble" in str(table)
for refused, named in {
    lambda: study.scoreboard: "notebooks",
    lambda: importlib.import_module("uqlab.plots"): "notebooks",
    lambda: importlib.import_module("uqlab.widgets"): "notebooks",
    lambda: table.frame(): "notebooks",
    lambda: runs.sweep: "notebooks",
    lambda: runs.claims(): "notebooks",
    lambda: data.load("mnist", root="nowhere"): "notebooks",
    lambda: models.embedded(): "models",
    lambda: models.from_pretrained("nowhere", 2): "models",
    lambda: models.clip_zero_shot("nowhere", []): "models",
    lambda: ensembles.export(ensemble, "nowhere.onnx", test.inputs[:2]): "onnx",
}.items():
    try:
        refused()
    except ImportError as error:
        assert f"'.[{named}]'" in str(error), error
    else:
        raise AssertionError(named)
from uqlab.runs.__main__ import main
main()
"""
ROOMS = (
    "analysis core data ensembles extraction gradients heads metrics models runs study "
    "training uncertainty analysis.diversity analysis.representations analysis.spectra"
)


def test_the_core_alone_runs_the_first_lines_and_names_the_extra_of_all_else(tmp_path):
    """Everything that it does not bring is hidden; then `uqlab` says what it needs."""
    core, ours = core_alone(), {"uqlab", "shared", "pip"}
    installed = metadata.packages_distributions().items()
    hidden = [
        module
        for module, names in installed
        if not core & {*map(canonicalize_name, names)} and module not in ours
    ]
    assert {"pooch", "pandas", "PIL", "yaml", "click", "transformers"} <= {*hidden}
    code = CODE.search((ROOT / "README.md").read_text())[1]
    source = ALONE.replace("{hidden}", repr(hidden)).replace(
        "{rooms}", repr(ROOMS.split())
    )
    source = source.replace("{code}", code.replace("epochs=20", "epochs=1"))
    how = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", source], **how)
    assert 0.5 < float(done.stdout or "nan") < 1, done.stderr
    assert done.returncode == 1
    assert "'.[notebooks]'" in done.stderr.splitlines()[-1]


# Brought by what is declared: ipywidgets, papermill, transformers, torch.
BROUGHT = {"ipython", "nbclient", "traitlets", "tokenizers", "typing-extensions"}


def test_what_the_package_imports_is_declared():
    named = [*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())]
    declared = {canonicalize_name(Requirement(line).name) for line in named}
    brings = metadata.packages_distributions()
    for path in (ROOT / "uqlab").rglob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module.partition(".")[0])
        for module in modules - sys.stdlib_module_names:
            names = {canonicalize_name(name) for name in brings[module]}
            assert names & (declared | BROUGHT), (path, module)


FROM_THE_INDEX = re.compile(
    r"pip3? install(?:\s+(?!in\b|#)[^\s`]+){0,4}?\s+['\"]?uqlab(?![\w./-])"
)


def test_nothing_tells_to_install_uqlab_from_the_index_and_nothing_is_a_link():
    """There the name belongs to another package, which README says."""
    assert FROM_THE_INDEX.search("%pip install -q 'uqlab[onnx]'")
    assert not FROM_THE_INDEX.search("pip install './uqlab[notebooks]'")
    how = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
    said = subprocess.run(["git", "ls-files", "-s", "-z"], **how).stdout
    for line in filter(None, said.split("\0")):
        path = ROOT / line.partition("\t")[2]
        assert line[:6] != "120000", f"{path} is a symbolic link"
        if path.is_file() and path != pathlib.Path(__file__):
            text = path.read_bytes().decode(errors="ignore")
            assert not FROM_THE_INDEX.search(text), path
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"package index.*\n?.*another package", readme)


WHEEL = """import importlib, pathlib, pkgutil, sys
import uqlab
from uqlab.runs import tables
assert pathlib.Path(sys.prefix) in pathlib.Path(uqlab.__file__).parents, uqlab.__file__
for module in pkgutil.walk_packages(uqlab.__path__, "uqlab."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(tables.gallery(pathlib.Path("figures")).read_text())"""


OUTSIDE = """import pathlib, sys
import torch, uqlab
from uqlab import data, models, runs
runs.record("digits", len(data.load("mnist-mini")))
runs.record("logits", list(models.embedded()(torch.zeros(1, 1, 28, 28)).shape))
runs.record("installed", pathlib.Path(sys.prefix) in pathlib.Path(uqlab.__file__).parents)"""


def run(*command, **how):
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def below(folder, *patterns):
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    files = [path for path in paths if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_wheel_is_whole(tmp_path):
    """Built and installed apart from the checkout it has every file, every module imports, and it draws the gallery.

    `uqlab new` makes a project of it, in which a notebook from elsewhere finds the package and the embedded data.
    """
    source, made = tmp_path / "source", tmp_path / "venv"
    left = shutil.ignore_patterns("__pycache__", ".ipynb*", "*.sweep")
    for name in ("uqlab", "notebooks", "figures/real", "data"):
        shutil.copytree(ROOT / name, source / name, ignore=left)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    files = below(source, "uqlab/**/*").keys()
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, *build, "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    assert files <= {*packed}
    assert any(name.endswith("/licenses/LICENSE") for name in packed)

    venv.create(made, symlinks=True)
    python, tool = made / "bin" / "python", made / "bin" / "uqlab"
    run(*pip, f"--python={python}", "install", "--no-deps", "--no-index", wheel)
    (own,) = made.glob("lib/python*/site-packages")
    # All but uqlab: .pth files in there are not followed.
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (own / "shared.pth").write_text("\n".join(shared))
    figure = tmp_path / "figures" / "00_some"
    figure.mkdir(parents=True)
    (figure / "manifest.json").write_text("{}")
    (figure / "results.json").write_text('{"numbers": {"width": 0.25}}')
    assert "width" in run(python, "-I", "-c", WHEEL, cwd=tmp_path)

    version = run(tool, "--version", cwd=tmp_path)
    assert version == f"uqlab, version {uqlab.__version__}\n"
    assert "cd demo" in run(tool, "new", "demo", cwd=tmp_path)
    demo = tmp_path / "demo"
    pages = [f"notebooks/{folder}[!.]*.*" for folder in ("", "studies/", "rows/")]
    assert below(demo, *pages) == below(ROOT, *pages)
    assert (demo / "figures" / "real" / "13_scoreboard" / "fair.csv").is_file()
    links = re.findall(r"\]\(([^)]+)\)", (demo / "README.md").read_text())
    assert links
    assert [link for link in links if not (demo / link).is_file()] == []

    mine = new_notebook(cells=[new_code_cell(OUTSIDE)])
    nbformat.write(mine, tmp_path / "mine.ipynb")
    ours = ("PYTHONPATH", "UQLAB_DATA")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    run(tool, "run", "../mine.ipynb", cwd=demo, env=environment)
    results = demo / "figures" / "quick" / "mine" / "results.json"
    found = json.loads(results.read_text())["numbers"]
    assert found == {"digits": 2000, "logits": [1, 10], "installed": True}


@pytest.mark.release
def test_the_wheel_alone_runs_the_first_lines_in_a_new_environment(tmp_path):
    """With what pip takes for the core, from an index; README's six lines and `uqlab --help`."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-q"]
    run(*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", "-c", ROOT / "constraints.txt", wheel)
    code = CODE.search((ROOT / "README.md").read_text())[1]
    assert 0.8 < float(run(python, "-I", "-c", code, cwd=tmp_path)) < 1
    command = [python.with_name("uqlab"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "'.[notebooks]'" in done.stderr
