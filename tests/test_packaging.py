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


def test_the_lock_file_pins_every_dependency_within_its_bounds():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.lstrip().startswith("#"):
            pin = Requirement(line)
            (only,) = pin.specifier
            pins[canonicalize_name(pin.name)] = only.version
    for line in [*EVERYTHING, *EXTRAS["backbones"], *EXTRAS["cluster"], *EXTRAS["dev"]]:
        need = Requirement(line)
        if need.name != "uqlab":
            assert need.specifier.contains(pins[canonicalize_name(need.name)]), line


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
ROOMS = [
    *("analysis", "core", "data", "ensembles", "extraction", "gradients", "heads"),
    *(
        "metrics",
        "models",
        "runs",
        "study",
        "training",
        "uncertainty",
        "analysis.diversity",
    ),
    *("analysis.representations", "analysis.spectra"),
]


def test_the_core_alone_runs_the_first_lines_and_names_the_extra_of_all_else(tmp_path):
    """Everything that it does not bring is hidden; then `uqlab` says what it needs."""
    core = core_alone()
    hidden = [
        module
        for module, names in metadata.packages_distributions().items()
        if not core & {canonicalize_name(name) for name in names}
        and module not in ("uqlab", "shared", "pip")
    ]
    assert {"pooch", "pandas", "PIL", "yaml", "click", "transformers"} <= {*hidden}
    code = CODE.search((ROOT / "README.md").read_text())[1]
    for mark, text in {
        "hidden": repr(hidden),
        "rooms": repr(ROOMS),
        "code": code.replace("epochs=20", "epochs=1"),
    }.items():
        source = (source if mark != "hidden" else ALONE).replace(f"{{{mark}}}", text)
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0.5 < float(done.stdout or "nan") < 1, done.stderr
    assert done.returncode == 1
    assert "'.[notebooks]'" in done.stderr.splitlines()[-1]


# Brought by what is declared: ipywidgets, transformers, torch.
BROUGHT = {"ipython", "traitlets", "tokenizers", "typing-extensions"}


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


def tracked():
    """Every file in git, as mode and path."""
    said = subprocess.run(
        ["git", "ls-files", "-s", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    for line in said.strip("\0").split("\0"):
        yield line[:6], ROOT / line.partition("\t")[2]


def test_no_file_is_a_symbolic_link():
    assert [path for mode, path in tracked() if mode == "120000"] == []


FROM_THE_INDEX = re.compile(
    r"pip3? install(?:\s+(?!in\b|#)[^\s`]+){0,4}?\s+['\"]?uqlab(?![\w./-])"
)


def test_nothing_tells_to_install_uqlab_from_the_index():
    """There the name belongs to another package, which README says."""
    for line in ("pip install uqlab", "%pip install -q 'uqlab[onnx]'"):
        assert FROM_THE_INDEX.search(line)
    for line in ("pip install '.[onnx]'", "pip install './uqlab[notebooks]'"):
        assert not FROM_THE_INDEX.search(line)
    found = []
    for _, path in tracked():
        if path != pathlib.Path(__file__) and path.suffix not in (".png", ".npz"):
            text = path.read_bytes().decode(errors="ignore")
            found += [(path, line) for line in FROM_THE_INDEX.findall(text)]
    assert found == []
    assert re.search(
        r"package index.*\n?.*another package", (ROOT / "README.md").read_text()
    )


def test_the_citation_is_of_this_version_and_names_the_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (
        uqlab.__version__,
        PROJECT["license"],
    )
    papers = yaml.safe_load((ROOT / "uqlab" / "study" / "published.yaml").read_text())
    assert len(cited["references"]) == len(papers) == 6


def test_every_room_but_core_has_a_door():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    held = {
        name for contract in contracts for name in contract.get("protected_modules", [])
    }
    assert held == {
        f"uqlab.{path.parent.name}.*" for path in (ROOT / "uqlab").glob("*/__init__.py")
    } - {"uqlab.core.*", "uqlab.analysis.*", "uqlab.study.*"}  # by the names of files


COMPILE = """import pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("*.py"):
    compile(path.read_bytes(), path, "exec")"""


@pytest.mark.parametrize("python", ["python3.12", "python3.13", sys.executable])
def test_newer_pythons_read_the_package(python):
    """Every Python that is here compiles every module without a warning; torch is only there for one of them."""
    versions = pathlib.Path.home().glob(
        f".pyenv/versions/{python.removeprefix('python')}.*/bin/python"
    )
    python = next(versions, None) or shutil.which(python) or sys.executable
    subprocess.run(
        [python, "-I", "-B", "-W", "error", "-c", COMPILE, ROOT / "uqlab"], check=True
    )


WHEEL = """import importlib, pathlib, pkgutil, sys
import uqlab
from uqlab.runs import gallery
assert pathlib.Path(sys.prefix) in pathlib.Path(uqlab.__file__).parents, uqlab.__file__
for module in pkgutil.walk_packages(uqlab.__path__, "uqlab."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(gallery.build(pathlib.Path("figures")).read_text())"""


OUTSIDE = """import pathlib, sys
import torch, uqlab
from uqlab import data, models, runs
runs.record("digits", len(data.load("mnist-mini")))
runs.record("logits", list(models.embedded()(torch.zeros(1, 1, 28, 28)).shape))
runs.record("installed", pathlib.Path(sys.prefix) in pathlib.Path(uqlab.__file__).parents)"""
LINKS = re.compile(r"\]\(([^)]+)\)")


def test_the_wheel_is_whole(tmp_path):
    """Built and installed apart from the checkout it has every file, every module imports, and it draws the gallery.

    `uqlab new` makes a project of it, in which a notebook from elsewhere finds the package and the embedded data.
    """
    source, made = tmp_path / "source", tmp_path / "venv"
    shutil.copytree(
        ROOT / "uqlab",
        source / "uqlab",
        ignore=shutil.ignore_patterns("__pycache__", ".ipynb*", "*.sweep"),
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("notebooks", "figures/real", "data"):
        shutil.copytree(
            ROOT / name,
            source / name,
            ignore=shutil.ignore_patterns(".ipynb*", "*.sweep"),
        )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "-q",
    ]
    files = {
        path.relative_to(source).as_posix()
        for path in source.rglob("uqlab/**/*")
        if path.is_file()
    }
    subprocess.run(
        [
            *pip,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            tmp_path,
            source,
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    assert files <= set(packed)
    assert [
        name for name in packed if "/licenses/" in name and name.endswith("LICENSE")
    ]

    venv.create(made, symlinks=True)
    python = made / "bin" / "python"
    subprocess.run(
        [*pip, f"--python={python}", "install", "--no-deps", "--no-index", wheel],
        check=True,
    )
    (own,) = made.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (own / "shared.pth").write_text(
        "\n".join(shared)
    )  # all but uqlab: .pth files in there are not followed
    run = tmp_path / "figures" / "00_some"
    run.mkdir(parents=True)
    (run / "results.json").write_text('{"numbers": {"width": 0.25}}')
    done = subprocess.run(
        [python, "-I", "-c", WHEEL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "<dt>width</dt>" in done.stdout

    def tool(*arguments: str, cwd: pathlib.Path = tmp_path) -> str:
        done = subprocess.run(
            [made / "bin" / "uqlab", *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert tool("--version") == f"uqlab, version {uqlab.__version__}\n"
    assert "cd demo" in tool("new", "demo")
    demo = tmp_path / "demo"

    def pages(folder: pathlib.Path) -> dict[str, bytes]:
        found = [
            *folder.glob("notebooks/[!.]*.*"),
            *folder.glob("notebooks/studies/[!.]*.*"),
            *folder.glob("notebooks/rows/[!.]*.*"),
        ]
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in found
        }

    assert len(pages(demo)) > 30
    assert pages(demo) == pages(ROOT)
    assert (demo / "figures" / "real" / "13_scoreboard" / "fair.csv").is_file()
    assert LINKS.findall((demo / "README.md").read_text()) == [
        "notebooks/README.md",
        "data/README.md",
    ]
    assert [
        link
        for link in LINKS.findall((demo / "README.md").read_text())
        if not (demo / link).is_file()
    ] == []

    nbformat.write(
        new_notebook(cells=[new_code_cell(OUTSIDE)]), tmp_path / "mine.ipynb"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "UQLAB_DATA")
    }
    subprocess.run(
        [made / "bin" / "uqlab", "run", "../mine.ipynb"],
        cwd=demo,
        env=environment,
        check=True,
    )
    found = json.loads(
        (demo / "figures" / "quick" / "mine" / "results.json").read_text()
    )["numbers"]
    assert found == {"digits": 2000, "logits": [1, 10], "installed": True}


@pytest.mark.release
def test_the_wheel_alone_runs_the_first_lines_in_a_new_environment(tmp_path):
    """With what pip takes for the core, from an index; README's six lines and `uqlab --help`."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT], cwd=tmp_path, check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "-c", ROOT / "constraints.txt", wheel], check=True)
    code = CODE.search((ROOT / "README.md").read_text())[1]

    def run(*command):
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    done = run(python, "-I", "-c", code)
    assert 0.8 < float(done.stdout or "nan") < 1, done.stderr
    done = run(python.with_name("uqlab"), "--help")
    assert done.returncode == 1
    assert "'.[notebooks]'" in done.stderr
