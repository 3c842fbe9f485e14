"""Page 16 and `uqlab report` on models that are brought: checkpoints, a saved ensemble, texts; what is refused."""

import re

import numpy as np
import pytest
import torch
from small_runs import call
from torch import nn

from uqlab import data, ensembles, models, study, training
from uqlab.core.files import read_json

PAGE = "16_bring_your_model"
STUDY = "16_bring_your_model_study"
MINE = """from torch import nn

def make(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, classes))
"""


def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 5))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's folder: a function, three checkpoints, and data with splits."""
    sets = {split: data.load("digits[0-4]", split) for split in ("train", "test")}
    trained = ensembles.deep(make, 3, seed=0)
    x, y = sets["train"].inputs, sets["train"].labels
    training.fit(trained, x, y, epochs=20, lr=0.1, momentum=0.9, progress=False)
    (tmp_path / "three").mkdir()
    for m in range(3):
        torch.save(trained.member(m).state_dict(), tmp_path / "three" / f"{m}.pt")
    arrays = {f"x_{split}": items.inputs.numpy() for split, items in sets.items()}
    arrays |= {f"y_{split}": items.labels.numpy() for split, items in sets.items()}
    np.savez(tmp_path / "mine.npz", **arrays)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_report_on_an_ensemble_of_checkpoints(mine):
    options = "--data mine.npz --ood letters --ood textures --profile tiny"
    result = call("report", "mine.py:make", "--weights", "three", *options.split())
    assert result.exit_code == 0, result.output
    recorded = read_json(mine / "report" / PAGE / "results.json")
    said, table = recorded["numbers"]["model"], recorded["tables"]["report"]
    assert (said["what"], [*said["weights"]]) == (
        "an ensemble of 3",
        ["three/0.pt", "three/1.pt", "three/2.pt"],
    )
    rows = dict(zip(table["index"], table["data"], strict=True))
    assert float(rows["accuracy"][0]) > 0.9
    assert {"bound", "draws", "alarm"} <= recorded["claims"].keys()
    assert {"sets of one class", "letters: answered alone"} <= rows.keys()
    for name in ("accuracy", "answered alone"):
        low, high = map(float, rows[name][1].split(" to "))
        assert 0 < low <= float(rows[name][0]) <= high <= 1
    for row, (value, *_) in rows.items():
        assert row in result.output
        assert value in result.output
    assert "What to do next" in result.output
    page = (mine / "report" / "report.html").read_text()
    assert "Bring your model" in page
    assert 'src="http' not in page, "it loads nothing from a network"


@pytest.mark.release
def test_a_saved_ensemble_on_the_network_of_the_package(results, tmp_path):
    saved = ensembles.lora(models.embedded(10), 2, 2, seed=0)
    saved.save_pretrained(tmp_path / "two")
    given = {"model": "uqlab.models:embedded", "weights": [str(tmp_path / "two")]}
    given |= {"dataset": "mnist-mini", "ood": ["letters"], "train_limit": 60}
    given |= {"limit": 60, "limit_ood": 20, "repeats": 10}
    small = {"gradients": [], "mask_steps": 5, "tile_sizes": [2]}
    study, lesson = (
        results(STUDY, **given, **small)[0],
        results(PAGE, **given, draws=2)[0],
    )
    assert {"members", "tiles", "masks"} <= study["claims"].keys()
    for numbers in (study["numbers"], lesson["numbers"]):
        assert numbers["model"]["what"] == "an ensemble of 2"
        assert numbers["accuracy"] < 0.5, "its classifiers are as they were drawn"
    assert any("answer nothing alone" in line for line in lesson["numbers"]["next"])


@pytest.mark.release
def test_texts(results, tmp_path):
    words = {"good": 1, "great": 1, "bad": 0, "dull": 0}
    films = [f"a {w} film number {i}\t{words[w]}" for i in range(40) for w in words]
    news = [f"the market fell by {i} points\t0" for i in range(60)]
    for name, lines in {"films": films, "news": news}.items():
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]))
    given = {
        "dataset": str(tmp_path / "films.tsv"),
        "ood": [str(tmp_path / "news.tsv")],
    }
    given |= {"model": str(models.minilm()), "epochs": 2, "batch_size": 16}
    given |= {"repeats": 20}
    lesson = results(PAGE, **given, draws=2)[0]
    study = results(STUDY, **given, gradients=[], mask_steps=5)[0]
    assert study["numbers"]["accuracy"] == lesson["numbers"]["accuracy"] > 0.9
    assert "tiles" not in study["claims"]
    assert "masks" in study["claims"]


@pytest.mark.release
def test_a_decision_from_saved_logits_and_an_alarm_for_new_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)

    def draw(n, doubt=1.0, classes=4):
        z = 5 * torch.randn(n, classes, generator=generator)
        labels = torch.distributions.Categorical(logits=z).sample()
        noise = torch.randn(3, n, classes, generator=generator) / 3
        return (z / doubt)[None] + noise, labels

    torch.manual_seed(0)
    logits, labels = draw(3000)
    far = {"far": draw(200, 4)[0]}
    study.evaluate(logits, labels, far, save="run.npz", repeats=2)
    np.savez("same.npz", logits=draw(400)[0])
    np.savez("new.npz", logits=draw(400, 3)[0])
    result = call("report", "--logits", "run.npz")
    assert result.exit_code == 0, result.output
    recorded = read_json(tmp_path / "report/saved_logits/results.json")
    table = recorded["tables"]["report"]
    rows = {k: float(v[0]) for k, v in zip(table["index"], table["data"], strict=True)}
    assert rows["answered alone"] > max(0.3, rows["far: answered alone"])
    assert rows["wrong among the answered"] < 0.03
    assert rows["sets that hold the class"] == pytest.approx(0.95, abs=0.03)
    for name, rings in {"same": False, "new": True}.items():
        result = call("report", "--watch", f"{name}.npz")
        assert result.exit_code == 0, result.output
        folder = tmp_path / f"report/watch_{name}/saved_logits"
        assert bool(read_json(folder / "results.json")["numbers"]["rings"]) == rings
    again = read_json(tmp_path / "report/saved_logits/results.json")
    assert again == recorded, "the report that is watched by stays"
    found = read_json(folder / "results.json")
    (tmp_path / "later").mkdir()
    np.savez("later/new.npz", logits=draw(400)[0])
    result = call("report", "--watch", "later/new.npz")
    assert (result.exit_code, "is the report on" in result.output) == (2, True)
    assert read_json(folder / "results.json") == found
    np.savez("wide.npz", logits=draw(400, classes=7)[0])
    result = call("report", "--watch", "wide.npz")
    assert (result.exit_code, "4 classes" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py:make"], "no file .*nowhere.py"),
        (["--watch", "mine.npz"], "no .*alarm.json; first: uqlab report --logits"),
        (
            ["mine.py:make", "--logits", "mine.npz"],
            "one of --logits, --watch and a model",
        ),
        (["mine.py:make", "-p", "modle", "x"], "unknown parameter 'modle'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(mine, arguments, words):
    result = call("report", *arguments)
    assert result.exit_code == 2
    assert re.search(words, " ".join(result.output.split()))
    assert not (mine / "report").exists()
