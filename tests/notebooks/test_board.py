"""The notebooks that fill the larger board of page 13, and the tables of pages 06 and 09."""

from pathlib import Path

import pandas as pd
import pytest

import uqlab
from uqlab import runs
from uqlab.core.files import read_json
from uqlab.study.methods import FIT, METHODS

pytestmark = pytest.mark.release
ROOT = Path(uqlab.__file__).parents[1]


def run(folder, name, given=None, **how):
    """The tables and numbers of a notebook of rows, run in a folder."""
    notebook = ROOT / "notebooks" / "rows" / f"{name}.ipynb"
    results = read_json(
        runs.execute(notebook, given, folder=folder, **how) / "results.json"
    )
    tables = {key: pd.DataFrame(**table) for key, table in results["tables"].items()}
    return tables, results["numbers"]


def test_rows_of_the_board_their_rates_and_what_a_backbone_cannot_carry(tmp_path):
    tables, recorded = run(tmp_path / "run", "board", profile="tiny")
    table, search = tables["board"], tables["search"]
    names = ("batch", "single", "single_temperature")
    rows = [["convolutional", name, seed] for name in names for seed in (3, 4)]
    assert sorted(table[["backbone", "method", "seed"]].to_numpy().tolist()) == rows
    expected = {
        "nll_blurred",
        "soft_kl_ambiguous",
        "ece_scaled",
        "auroc_mi_kmnist-mini",
    }
    assert expected <= set(table.columns)
    assert not table.query("method == 'batch'").isna().any(axis=None)
    one = table.set_index(["method", "seed"])["nll_scaled"]["single"]
    scaled = table.set_index(["method", "seed"])["nll"]["single_temperature"]
    assert scaled.tolist() == one.tolist()
    assert search.groupby("method")["taken"].sum().to_dict() == {
        "single": 1,
        "batch": 1,
    }
    for name, tried in search.groupby("method"):
        assert tried["nll"].min() == tried.query("taken")["nll"].item()
        first = 10 * METHODS[name].fit.get("lr", FIT["lr"])
        assert tried["lr"].tolist() == pytest.approx([first / 2, first])
    left_out = recorded["left_out"]["convolutional"]
    assert left_out.keys() == {"hydra"}
    assert "no attention" in left_out["hydra"]


def test_the_committed_boards_first_row_comes_back_within_the_spread_of_its_seeds(
    tmp_path,
):
    board = pd.read_csv(ROOT / "figures" / "real" / "13_scoreboard" / "fair.csv")
    kept = board.query("backbone == 'transformer' and method == 'single'").set_index(
        "seed"
    )
    cheap = {
        "methods": ["single"],
        "seeds": [0],
        "rates": [1.0],  # the one that the search took
        "scores": ["entropy"],
        "few": {},
        "repeats": 1,
    }
    tables, _ = run(tmp_path / "run", "board", cheap)
    rows = tables["board"].query("method == 'single'")
    again = rows.set_index("seed").loc[0]
    assert len(kept) == 10
    for name in (
        "accuracy",
        "nll",
        "ece",
        "brier",
        "auroc_entropy_fashion-mini",
        "nll_blurred",
    ):
        assert abs(again[name] - kept.loc[0, name]) < kept[name].std(), name


def test_rows_of_the_ablations(tmp_path):
    rows = [
        "embeddings",
        "MLPs",
        "backbone trained",
        "the same batches for all",
        "normal start 0.5",
        "on a trained network",
    ]
    small = {
        "ablations": rows,
        "seeds": [3],
        "members": 2,
        "rates": [0.004],
        "stds": [0.5],
        "epochs": 1,
    }
    small |= {"train_limit": 20, "held_out": 20, "limit": 20}
    tables, _ = run(tmp_path / "run", "ablations", small)
    found = tables["ablations"].set_index("ablation")
    assert found.index.tolist() == rows
    assert not found.isna().any(axis=None)
    numbers = found["numbers"]
    assert numbers["embeddings"] < numbers["MLPs"] < numbers["backbone trained"]
    assert (
        numbers["the same batches for all"]
        == numbers["normal start 0.5"]
        > numbers["on a trained network"]
    )


def test_rows_of_hydra(tmp_path):
    small = {
        "seed": 3,
        "train_limit": 16,
        "held_out": 10,
        "limit": 12,
        "limit_ood": 6,
        "shifted": 4,
        "members": 2,
    }
    small |= {
        "removed": [2, 3],
        "as_printed": [3],
        "epochs": 1,
        "epochs_tuned": 1,
        "rates": [0.01],
    }
    found = run(tmp_path / "run", "hydra", small)[0]["hydra"]
    assert not found.isna().any(axis=None)
    prunings = ["CircAvg", "Taylor", "Hydra (Circ)"]
    recipes = {2: ["not", "page 09"], 3: ["not", "page 09", "D.2", "D.2, classifier"]}
    expected = {
        (name, recipe, gone)
        for gone, each in recipes.items()
        for recipe in each
        for name in prunings
    }
    expected |= {("single", recipe, 0) for recipe in ("not", "page 09", "D.2")} | {
        ("OBA", "page 09", 3)
    }
    expected |= {("deep ensemble", "not", 0), ("LoRA-Ensemble", "page 09", 0)}
    assert {
        *found[["row", "trained on", "removed"]].itertuples(index=False, name=None)
    } == expected
    assert len(found) == len(expected)


def test_settings_for_one_row_of_a_table(tmp_path):
    """Each is asked in both ways; a table of rows is drawn without any training."""
    small = {
        "settings": ["normalised", "mixtures"],
        "members": 2,
        "epochs": 1,
        "asked": [1],
        "limit": 40,
    }
    found = run(tmp_path / "run", "table_2", small)[0]["settings"]
    found.to_csv(tmp_path / "rows.csv", index=False)
    rows = {"settings": [str(tmp_path / "rows.csv")]}
    again = run(tmp_path / "drawn", "table_2", rows)[0]["settings"]
    assert found[["setting", "dropout when asked"]].to_numpy().tolist() == [
        [name, noisy] for name in small["settings"] for noisy in (False, True)
    ]
    assert not found.isna().any(axis=None)
    on, off = (
        found[found["dropout when asked"] == noisy]["MI, id"].to_numpy()
        for noisy in (True, False)
    )
    assert (on > off).all()
    assert again["MI, id"].tolist() == pytest.approx(found["MI, id"].tolist())
    assert (tmp_path / "drawn" / "settings.png").is_file()


def test_groups_of_nine_networks(tmp_path):
    """Of nine networks trained here; the groups and three of them have as many speakers, and groups show less."""
    small = {
        "dataset": "digits",
        "ood": ["letters"],
        "epochs": 1,
        "limit": 200,
        "shuffles": 3,
        "repeats": 20,
        "seed": 4,
    }
    tables, _ = run(tmp_path / "run", "resnets", small)
    found = tables["resnets"].set_index("listened to")
    assert list(found.index) == ["nine of one", "three of three", "three of one"]
    assert found["seed"].tolist() == [4] * 3
    assert (
        found.loc["three of three", ["MI, ID", "MI, OOD"]]
        < found.loc["three of one", ["MI, ID", "MI, OOD"]]
    ).all()
    assert found.loc["nine of one", ["change of AUROC", "low", "high"]].tolist() == [
        0,
        0,
        0,
    ]
    assert (found["low"] <= found["high"]).all()
    assert (found["accuracy, all"] >= found["accuracy, single"] - 0.05).all()
