"""Page 16 and `uqlab report` on models that are brought: checkpoints, a saved ensemble, texts; what is refused."""

import json
import re

import numpy as np
import pytest
import torch
from small_runs import call
from torch import nn

from uqlab import data, ensembles, models, study, training

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
    np.savez(
        tmp_path / "mine.npz",
        **arrays,
        **{f"y_{split}": items.labels.numpy() for split, items in sets.items()},
    )
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_report_on_an_ensemble_of_checkpoints(mine):
    options = [
        "--data",
        "mine.npz",
        "--ood",
        "letters",
        "--ood",
        "textures",
        "--profile",
        "tiny",
        "--quiet",
    ]
    result = call("report", "mine.py:make", "--weights", "three", *options)
    assert result.exit_code == 0, result.output
    recorded = json.loads((mine / "report" / PAGE / "results.json").read_text())
    said = recorded["numbers"]["model"]
    assert said["what"] == "an ensemble of 3"
    assert list(said["weights"]) == ["0.pt", "1.pt", "2.pt"]
    rows = dict(
        zip(
            recorded["tables"]["report"]["index"],
            recorded["tables"]["report"]["data"],
            strict=True,
        )
    )
    assert float(rows["accuracy"][0]) > 0.9
    low, high = map(float, rows["accuracy"][1].split(" to "))
    assert low <= float(rows["accuracy"][0]) <= high
    assert {"bound", "draws", "alarm"} <= recorded["claims"].keys()
    assert {"answered alone", "sets of one class"} <= rows.keys()
    assert {
        f"{name}: answered alone" for name in ("letters", "textures")
    } <= rows.keys()
    low, high = map(float, rows["answered alone"][1].split(" to "))
    assert 0 < low < float(rows["answered alone"][0]) <= high <= 1
    for row, (value, _, _) in rows.items():
        assert row in result.output
        assert value in result.output
    assert "What to do next" in result.output
    assert "look at: report/report.html" in result.output
    page = (mine / "report" / "report.html").read_text()
    assert "Bring your model" in page
    assert 'src="http' not in page, "it loads nothing from a network"
    assert "def shuffled" not in page, "folded code is left out"


@pytest.mark.release
def test_a_saved_ensemble_on_the_network_of_the_package(results, tmp_path):
    saved = ensembles.lora(models.embedded(10), 2, 2, seed=0)
    saved.save_pretrained(tmp_path / "two")
    changes = {
        "model": "uqlab.models:embedded",
        "weights": [str(tmp_path / "two")],
    }
    sets = {
        "dataset": "mnist-mini",
        "ood": ["letters"],
        "train_limit": 60,
        "limit": 60,
        "limit_ood": 20,
        "repeats": 10,
    }
    small = {"gradients": [], "mask_steps": 5, "tile_sizes": [2]}
    recorded, _ = results(STUDY, **changes, **sets, **small)
    assert {"members", "tiles", "masks"} <= recorded["claims"].keys()
    lesson, _ = results(PAGE, **changes, **sets, draws=2)
    for numbers in (recorded["numbers"], lesson["numbers"]):
        assert numbers["model"]["what"] == "an ensemble of 2"
        assert numbers["accuracy"] < 0.5, "its classifiers are as they were drawn"
    assert any(
        "It may answer nothing alone" in line for line in lesson["numbers"]["next"]
    )


@pytest.mark.release
def test_texts(results, tmp_path):
    words = {"good": 1, "great": 1, "bad": 0, "dull": 0}
    films = [
        f"a {word} film number {i}\t{label}"
        for i in range(40)
        for word, label in words.items()
    ]
    (tmp_path / "films.tsv").write_text("\n".join(["sentence\tlabel", *films]))
    news = [f"the market fell by {i} points\t0" for i in range(60)]
    (tmp_path / "news.tsv").write_text("\n".join(["sentence\tlabel", *news]))
    sets = {"dataset": str(tmp_path / "films.tsv"), "ood": [str(tmp_path / "news.tsv")]}
    brought = {
        "model": str(models.minilm()),
        "epochs": 2,
        "batch_size": 16,
        "repeats": 20,
    }
    lesson, _ = results(PAGE, **sets, **brought, draws=2)
    assert lesson["numbers"]["accuracy"] > 0.9
    recorded, _ = results(STUDY, **sets, **brought, gradients=[], mask_steps=5)
    assert recorded["numbers"]["accuracy"] == lesson["numbers"]["accuracy"]
    assert "tiles" not in recorded["claims"]
    assert "masks" in recorded["claims"]


def test_advice_on_an_ensemble_is_that_of_the_board_of_this_kind_of_network(results):
    """By Holm's method 13 has none better than one network on a convolutional one, and says so."""
    recorded, _ = results(PAGE)
    (advised,) = [line for line in recorded["numbers"]["next"] if "page 13" in line]
    assert "convolutional" in advised
    assert "by NLL: no method" in advised
    assert "ensemble;" not in advised
    silent, _ = results(PAGE, board="", draws=2, repeats=2)
    assert not [line for line in silent["numbers"]["next"] if "page 13" in line]


@pytest.mark.release
def test_all_scores_are_compared_on_the_same_inputs(results):
    recorded, _ = results(STUDY, asked=30, mask_steps=0, tile_sizes=[], repeats=2)
    rows = recorded["tables"]["rejection"]["index"]
    assert {"ExGrad", "GradNorm", "random order"} <= set(rows)
    assert "on these 30 inputs" in recorded["figures"]["rejection"]["caption"]


@pytest.mark.release
def test_a_decision_from_saved_logits_and_an_alarm_for_new_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)

    def draw(n, doubt=1.0):
        z = 5 * torch.randn(n, 4, generator=generator)
        labels = torch.distributions.Categorical(logits=z).sample()
        return (z / doubt)[None] + torch.randn(3, n, 4, generator=generator) / 3, labels

    torch.manual_seed(0)
    logits, labels = draw(3000)
    far = {"far": draw(200, 4)[0]}
    study.evaluate(logits, labels, far, save="run.npz", repeats=2)
    np.savez("same.npz", logits=draw(400)[0])
    np.savez("new.npz", logits=draw(400, 3)[0])
    result = call("report", "--logits", "run.npz", "--quiet")
    assert result.exit_code == 0, result.output
    recorded = json.loads((tmp_path / "report/saved_logits/results.json").read_text())
    rows = recorded["tables"]["report"]
    rows = dict(zip(rows["index"], rows["data"], strict=True))
    assert float(rows["answered alone"][0]) > 0.3
    assert float(rows["wrong among the answered"][0]) < 0.03
    assert float(rows["sets that hold the class"][0]) == pytest.approx(0.95, abs=0.03)
    assert float(rows["far: answered alone"][0]) < float(rows["answered alone"][0])
    terms = recorded["tables"]["by_class"]
    shares = [row[terms["columns"].index("share of the MI")] for row in terms["data"]]
    assert sum(shares) == pytest.approx(1)
    continued = (tmp_path / "report/logits.html").read_bytes()
    for name, rings in {"same": False, "new": True}.items():
        result = call("report", "--watch", f"{name}.npz", "--quiet")
        assert result.exit_code == 0, result.output
        assert f"report/watch_{name}.html" in result.output
        folder = tmp_path / f"report/watch_{name}/saved_logits"
        found = json.loads((folder / "results.json").read_text())
        assert bool(found["numbers"]["rings"]) == rings
    again = json.loads((tmp_path / "report/saved_logits/results.json").read_text())
    assert again == recorded, "the report that is watched by stays"
    assert (tmp_path / "report/logits.html").read_bytes() == continued
    np.savez("wide.npz", logits=torch.randn(400, 7, generator=generator))
    result = call("report", "--watch", "wide.npz", "--quiet")
    assert result.exit_code == 1
    assert "3 members" in result.output
    np.savez("wide.npz", logits=torch.randn(3, 400, 7, generator=generator))
    result = call("report", "--watch", "wide.npz", "--quiet")
    assert "4 classes" in result.output
    result = call("report", "--watch", "new.npz", "--output-dir", "none")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py:make"], "no file .*nowhere.py; a model is FILE.py:FUNCTION"),
        (["--logits", "nowhere.npz"], "File 'nowhere.npz' does not exist"),
        (["--watch", "mine.npz"], "no .*alarm.json; first: uqlab report --logits"),
        (
            ["--watch", "mine.npz", "--logits", "mine.npz"],
            "give one of --logits, --watch",
        ),
        (["mine.py:make", "--logits", "mine.npz"], "give one of --logits, --watch"),
        (["--data", "digits", "--watch", "mine.npz"], "give one of --logits, --watch"),
        (
            ["mine.py:make", "-p", "modle", "x"],
            "unknown parameter 'modle'; did you mean 'model'",
        ),
        (["mine.py:make", "--profile", "none"], "has no profile 'none'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(mine, arguments, words):

    result = call("report", *arguments)
    assert result.exit_code == 2
    assert re.search(words, " ".join(result.output.split()))
    assert not (mine / "report").exists()
