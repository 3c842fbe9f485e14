"""The rows about ensembles on one network as it grows, small, and those that are committed."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import uqlab
from uqlab import models, runs
from uqlab.core.files import read_json

ROOT = Path(uqlab.__file__).parents[1]
TABLES = sorted((ROOT / "figures" / "real" / "17_observatory").glob("*.csv"))


def run(folder, **given):
    notebook = ROOT / "notebooks" / "rows" / "observatory.ipynb"
    done = runs.execute(notebook, given, profile="tiny", folder=folder)
    results = read_json(done / "results.json")
    return pd.DataFrame(**results["tables"]["observatory"]), results["numbers"]


def check(table):
    """What every row must satisfy, whatever was trained."""
    split = table["aleatoric"] + table["MI"]
    assert (table["total"] - split).abs().max() < 1.1e-4  # tables have five digits
    keys = ["note", "seed", "backbone", "width", "own", "method", "members", "set"]
    spread = table.groupby(keys, dropna=False)["total"].agg(
        lambda total: total.max() - total.min()
    )
    assert spread.max() < 1e-4  # groups keep the total
    several = table[table["members"] // table["group"] > 1].sort_values("group")
    falls = several.groupby(keys, dropna=False)["MI"].apply(
        lambda mi: mi.is_monotonic_decreasing
    )
    assert falls.all()
    assert (several["MI_jackknife"] > several["MI"]).mean() > 0.9
    assert table["auroc_entropy"].between(0, 1).all()


@pytest.mark.release
def test_rows_of_a_network_from_a_file(tmp_path):
    torch.manual_seed(0)
    network = models.vit(28, 7, width=32, layers=1, heads=2, classes=26)
    about = json.dumps({"accuracy": 0.25, "epochs": 1.5})
    path = tmp_path / "epochs_32x1_0.safetensors"
    save_file(network.state_dict(), path, {"provenance": about})
    table, numbers = run(tmp_path / "run", backbone=str(path), scaled=True)
    check(table)
    assert {*table["method"], *numbers["left_out"]} == {
        "deep", "lora", "hydra", "single",
    }  # fmt: skip
    first = table.iloc[0]
    assert (first["width"], first["layers"], first["letters"]) == (32, 1, 0.25)
    assert set(table["series"]) == {"epochs"}
    single = table[table["method"] == "single"]
    assert single["exgrad"].notna().all()
    assert (single["MI"].abs() < 1e-6).all()


@pytest.mark.release
def test_members_from_scratch_share_nothing(tmp_path):
    given = {"backbone": "perceptron", "width": 8, "sizes": [1, 2, 4], "used": []}
    table, _ = run(tmp_path / "run", **given)
    check(table)
    assert set(table["method"]) == {"deep"}
    assert set(table["series"]) == {"scratch"}
    assert sorted(set(table["group"])) == [1, 2, 4]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_committed_rows(path):
    table = pd.read_csv(path)
    check(table)
    about = read_json(path.with_suffix(".json"))
    runs_of = table.groupby(["backbone", "width", "own", "seed"], dropna=False)
    several = any(isinstance(names, list) for names in about["parameters"]["methods"])
    methods = len(about["parameters"]["methods"]) if several else 1  # a run each
    assert len(runs_of) <= about["runs"] <= methods * len(runs_of)


def test_the_text_in_the_book_has_the_numbers_of_the_study(results):
    recorded, _ = results("17_cheap_ensembles_study")
    committed = ROOT / "figures" / "real" / "17_observatory" / "numbers.json"
    assert recorded["numbers"]["text"] == read_json(committed)
    text = (ROOT / "book" / "text" / "cheap_ensembles.md").read_text()
    used = set(re.findall(r"\{\{ (\w+) \}\}", text))
    assert used <= recorded["numbers"]["text"].keys()
    assert not re.search(r"[-−+]0\.\d\d \(", text)  # no slope is typed by hand
