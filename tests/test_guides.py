"""The code of the README and of the book's guides runs as it stands, on fewer inputs, members and steps."""

import re
from pathlib import Path

import pytest

from uqlab import data
from uqlab.study import methods, scoreboard, scores

ROOT = Path(__file__).parents[1]
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
    assert run(ROOT / "book" / "guides" / f"{name}.md")


def test_the_readme_compares_methods_in_a_table(run):
    table = run(ROOT / "README.md")["table"]
    names = ["single", "lora", "deep"]
    assert table["method"].drop_duplicates().tolist() == names
    assert table.groupby("method")["seed"].nunique().eq(2).all()
    assert set(scoreboard.ranks(table, "nll").index) == set(names)
    trained = table.groupby("method")["trained"].first()
    assert trained["lora"] < trained["single"] < trained["deep"]


def test_a_command_comes_within_250_words_of_the_readme():
    text = (ROOT / "README.md").read_text().partition("\n    make ")[0]
    text = re.sub(r"!?\[(.*?)\]\(.*?\)", r"\1", text)
    assert len(re.findall(r"\w[\w'.-]*", text)) < 250


@pytest.mark.slow
def test_the_guide_of_methods_and_scores_runs(run):
    names = run(ROOT / "book" / "guides" / "method.md")
    lora, mine = (rows for _, rows in names["mine"].groupby("method"))
    assert (
        mine["trained"].tolist() == [2 * (128 * 10 + 10)] * 2 < lora["trained"].tolist()
    )
    assert set(scoreboard.ranks(names["mine"], "nll").index) == {"lora", "mine"}
    advice = scoreboard.recommend(names["mine"], "trained", {})
    assert advice.reason.startswith("classifiers alone has the best trained of the 2")
    assert names["table"]["auroc_gap_fashion-mini"].between(0, 1).all()
