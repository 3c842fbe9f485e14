"""What is printed works: code of the README and the guides on fewer inputs, every command up to what it would run."""

import functools
import itertools
import re
import shlex
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import every_method
import numpy as np
import printed
import pytest
import torch
from click.testing import CliRunner
from networks import NETWORKS
from small_runs import call

from uqlab import data, study
from uqlab.runs import cli, execution, parameters
from uqlab.study import methods, scoreboard, scores

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "book" / "guides"
SMALL = {
    r"epochs=\d+": "epochs=1",
    "members=16": "members=3",
    r"diversity=2.0\)": "diversity=2.0, steps=2)",
    r"range\(2\)(?=.*scores=)": "range(2), epochs=1, repeats=1, members=2",
    r"range\(2\)(?!.*scores=)": "range(2), epochs=1, repeats=1, members=2, scores=['entropy']",
    r"budget=5": "budget=2",
    r"\(3, 4, 5\)": "(1, 2)",
}


TEXTS = [
    path.relative_to(ROOT)
    for folder in ("", "notebooks", "benchmarks", "figures", "data", "tests")
    for path in (ROOT / folder).glob("*.md")
]


@pytest.mark.parametrize("path", TEXTS, ids=str)
def test_links_and_pictures_exist(path):  # the book's are checked where it is built
    path = ROOT / path
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    here = [target for target in targets if ":" not in target]
    assert [target for target in here if not (path.parent / target).exists()] == []


def blocks(path):
    return re.findall(r"```python\n(.+?)```", path.read_text(), re.DOTALL)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs all code of a file, one block after the other, in a folder of its own; gives the names it made."""
    load, names = data.load, {}
    monkeypatch.setattr(
        data, "load", lambda name, split="test", limit=0: load(name, split, limit=40)
    )
    few = functools.partial(study.evaluate, repeats=20)
    monkeypatch.setattr(study, "evaluate", few)
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
    monkeypatch.setattr(scores, "SCORES", dict(scores.SCORES))
    monkeypatch.setattr(scoreboard, "SCORES", scores.SCORES, raising=False)
    monkeypatch.chdir(tmp_path)

    def each(path):
        for block in blocks(path):
            for long, short in SMALL.items():
                block = re.sub(long, short, block)
            exec(compile(block, path.name, "exec"), names)
        return names

    return each


@pytest.mark.parametrize(
    "name",
    [
        *("data", "report", "explorers"),
        pytest.param("network", marks=pytest.mark.slow),
        pytest.param("export", marks=pytest.mark.slow),
    ],
)
def test_a_guide_runs(run, name):
    assert run(GUIDES / f"{name}.md")


def test_the_guides_shards_are_joined(run, tmp_path):
    """By a client, and by processes of torchrun, here one."""
    lines = blocks(GUIDES / "sweeps.md")[1:]
    (tmp_path / "shards.md").write_text("".join(f"```python\n{b}```\n" for b in lines))
    names = run(tmp_path / "shards.md")
    x, few = names["train"].inputs, names["sixteen"]  # which are fewer here
    whole = names["whole"](x)[: few.members]
    torch.testing.assert_close(whole, few(x), rtol=1e-4, atol=1e-4)


def test_the_guides_callbacks_stop_a_training_and_write_a_table(run, monkeypatch):
    monkeypatch.delitem(SMALL, r"epochs=\d+")  # it stops before
    names = run(GUIDES / "training.md")
    epochs = len(names["stopped"].loss)
    assert names["stopping"].patience < epochs < 50
    rows = [row.split(",") for row in Path("losses.csv").read_text().split()]
    assert [int(row[0]) for row in rows] == [*range(1, epochs + 1)]
    assert [float(x) for x in rows[-1][1:]] == names["stopped"].loss[-1].tolist()


def test_the_readme_evaluates_an_ensemble(run, capsys):
    """What it prints has the rows that the text shows."""
    assert run(ROOT / "README.md")["ensemble"].members == 8
    printed = [line.split()[:1] for line in capsys.readouterr().out.splitlines()]
    shown = (ROOT / "README.md").read_text().partition("\n```\n ")[2]
    rows = [line.split()[:1] for line in shown.partition("\n\n")[0].splitlines()[1:]]
    assert ["auroc_mi_clothes"] in rows
    assert [name for name in printed if name in rows] == rows


@pytest.mark.slow
def test_the_guide_of_methods_and_scores_runs(run):
    names = run(GUIDES / "method.md")
    lora, mine = (rows["trained"] for _, rows in names["mine"].groupby("method"))
    assert mine.tolist() == [2 * (128 * 10 + 10)] * 2 < lora.tolist()
    assert names["table"]["auroc_gap_fashion-mini"].between(0, 1).all()


@pytest.mark.parametrize(
    "name", ["vit", "bert", "lstm", "conv1d", "torch attention", "tied weights"]
)
def test_the_guides_method_of_ones_own_is_right(name, monkeypatch, tmp_path):
    (code,) = [b for b in blocks(GUIDES / "method.md") if "class Mine" in b]
    exec(code, made := {})
    make = lambda network, _, m: made["scaled"](network, m, 5)  # noqa: E731
    mine = every_method.Method("mine", make, saved=False)
    monkeypatch.setitem(every_method.METHODS, "mine", mine)
    every_method.check(NETWORKS[name], "mine", tmp_path)


# Commands -------------------------------------------------------------------------------------------------------------
LINES = {  # each once, wherever it is printed
    line: name
    for name, text in printed.texts().items()
    for line in printed.of_text(text)
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A clone with the files that the texts name."""
    folder = tmp_path_factory.mktemp("a desk")
    for name in ("notebooks", "tests", "tools", "benchmarks", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    made = "figures/backbones checkpoints path/to/folder sixteen report data/text dist"
    for name in made.split():
        (folder / name).mkdir(parents=True)
    (folder / "figures" / "real").symlink_to(ROOT / "figures" / "real")
    images = {"x": np.zeros((60, 28, 28), np.uint8), "y": np.arange(60) % 3}
    np.savez(folder / "mine.npz", **images)
    (folder / "mymodel.py").write_text("def make(): ...")
    empty = "run.npz new.npz report/alarm.json dist/uqlab.whl best.safetensors"
    for name in (*empty.split(), "sixteen/ensemble.safetensors", "resnet32.th"):
        (folder / name).touch()
    for name in ("films.tsv", "news.tsv"):
        (folder / name).write_text("sentence\tlabel\n" + "good\t1\nbad\t0\n" * 30)
    sizes = ("32x4", "64x4", "128x4", "192x4", "256x4", "96x2", "96x4", "96x8")
    for kind, size, seed in itertools.product(("accuracy", "epochs"), sizes, range(10)):
        (folder / f"figures/backbones/{kind}_{size}_{seed}.safetensors").touch()
    return folder


@pytest.fixture
def run_nothing(monkeypatch):
    """Commands go as far as to the first run, and every page that would run checks what it is given."""

    def check_all(jobs, *_, **__):
        different = {}  # but for their seeds
        for job in jobs:
            values = {**job.parameters, "seed": 0}
            different[job.notebook, repr(values)] = job
        for job in different.values():
            printed.check_page(job.notebook, job.parameters)
        raise SystemExit(0)

    monkeypatch.setattr(execution, "run_all", check_all)
    monkeypatch.setattr(cli, "PROBE", "")  # has tests of its own
    monkeypatch.setattr("jupyterlab.labapp.LabApp.launch_instance", lambda *_: None)


def uqlab(words):
    """Calls the command; where it names another that comes first, calls that one instead."""
    command = cli.main.commands.get(words[0])
    if command and words[1:] == [] and any(p.required for p in command.params):
        return  # its name, not a line to type
    said = call(*[word for word in words if word != "--dry-run"])
    if "requires a" in said.output or "requires 2 arg" in said.output:
        return  # an option is mentioned
    first = re.search(r"; first: uqlab (.+)", said.output)
    if first and words[0] in ("gallery", "collect"):
        line = (
            first[1].replace("-g NAME VALUES", "-g seed 0:2").replace("NOTEBOOK", "03")
        )
        said = call(*shlex.split(line))
    assert said.exit_code == 0, said.output


OPTIONS = ("-c", "--extra-index-url")  # of pip, with a value


def make(words):
    text = (ROOT / "Makefile").read_text()
    for word in words:
        name, equals, _ = word.partition("=")
        pattern = rf"^{re.escape(name)} *[:?]?=" if equals else rf"^{re.escape(name)}:"
        assert re.search(pattern, text, re.MULTILINE), word


def papermill(words):
    """Calls the command of papermill up to what it would run, and checks that as the page does."""
    from papermill import cli as of_papermill
    from papermill.translators import PythonTranslator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_papermill, "execute_notebook", papermilled := MagicMock())
        said = CliRunner().invoke(of_papermill.papermill, words)
    assert said.exit_code == 0, said.output
    if not papermilled.called:
        return  # its help, which has read the page
    given = papermilled.call_args.kwargs
    page = Path(given["input_path"]).resolve()
    shown = "\n".join(f"{k} = {v!r}" for k, v in parameters.defaults(page).items())
    injected = PythonTranslator.codify(given["parameters"])
    printed.check_page(page, given["parameters"] | {"In": ["", shown, injected]})


def pip(words):
    """What is installed is a wheel, this folder with an extra that it has, or a package that is pinned or named here."""
    files = "constraints.txt", "Makefile", "pyproject.toml"
    known = "".join((ROOT / name).read_text() for name in files)
    assert words[0] in ("install", "wheel")
    given = [w for before, w in pairwise(words) if before not in OPTIONS]
    for name in [word for word in given if not word.startswith("-")]:
        path, _, extra = name.rstrip("]").partition("[")
        for each in filter(None, extra.split(",")):
            assert re.search(rf"^{each} = \[", known, re.MULTILINE), name
        local = path in (".", "..", "../..") or path.endswith(".whl")
        cloned = path == "uqlab" and "-e" in words  # after git clone
        named = path != "uqlab" and re.search(rf"\b{path}\b", known)
        assert local or cloned or named, name


def others(words):
    """A file of the repository that Python or Jupyter is given is there."""
    for word in words:
        if word.startswith(("tests/", "tools/", "benchmarks/", "notebooks/")):
            assert (ROOT / word).exists(), word


CHECKS = {"uqlab": uqlab, "make": make, "papermill": papermill, "pip": pip}


@pytest.mark.parametrize(("line", "place"), LINES.items())
def test_a_printed_command_does_what_it_says(
    line, place, desk, run_nothing, monkeypatch
):
    """Typed into a shell; of what would run, all parameters, profiles, targets and packages exist, and pages take them."""
    calls = printed.typed(line, desk)
    assert calls
    monkeypatch.setenv("UQLAB_DATA", str(desk / "data"))
    for folder, (name, *words) in calls:
        if (folder, words[:1]) == (desk, ["new"]) and words[1:]:
            shutil.rmtree(desk / words[1])
        monkeypatch.chdir(folder)
        CHECKS.get(name, others)(words)


def test_the_code_for_clusters_plans_runs_that_their_pages_take(desk, monkeypatch):
    """With stand-ins for the packages that bring the cluster."""
    for name in ("dask_jobqueue", "submitit"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    cluster = sys.modules["dask_jobqueue"].SLURMCluster.return_value
    cluster.scheduler_address = "tcp://here:8786"
    sys.modules["submitit"].AutoExecutor.return_value.map_array = lambda f, xs: [
        *map(f, xs)
    ]
    planned = []

    def compute(job, folder=None, *_):
        printed.check_page(job.notebook, job.parameters)
        planned.append(job.parameters)
        if folder:
            shutil.copy(job.notebook, folder)

    def compute_all(jobs, **_):
        for job in jobs:
            compute(job)

    monkeypatch.setattr(execution, "run_notebook", compute)
    monkeypatch.setattr(execution, "run_all", compute_all)
    monkeypatch.chdir(desk)
    exec(blocks(GUIDES / "sweeps.md")[0], {})
    assert planned[:20] == planned[20:]
    assert {given["seed"] for given in planned} == {*range(20)}
