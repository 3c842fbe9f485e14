"""What notebooks record."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from uqlab import runs
from uqlab.core import recording
from uqlab.study import published


class Pair(NamedTuple):
    auroc: float
    fpr95: float | np.floating


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Start recording into an empty folder; the result reads back results.json."""
    monkeypatch.setattr(recording, "_folder", None)
    runs.begin(tmp_path / "out", "x")
    return lambda: json.loads((tmp_path / "out" / "results.json").read_text())


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (torch.tensor(0.25, requires_grad=True), 0.25),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (np.bool_(True), True),
        ("text", "text"),
        (None, None),
        ((1, [np.float64(2.0)]), [1, [2.0]]),
        ({0.5: torch.tensor(1), "b": {"c": (1,)}}, {"0.5": 1, "b": {"c": [1]}}),
        (Pair(0.9, np.float32(0.5)), {"auroc": 0.9, "fpr95": 0.5}),
    ],
)
def test_record_stores_plain_data_and_returns_the_value(recorded, value, stored):
    assert runs.record("x", value) is value
    assert recorded()["numbers"] == {"x": stored}
    assert type(recorded()["numbers"]["x"]) is type(stored)


def test_record_table(recorded):
    columns = pd.MultiIndex.from_tuples([("MI", "paper"), ("MI", "run")])
    frame = pd.DataFrame(
        [[0.5, 1], [float("nan"), 2]],
        index=pd.Index([1, 2], name="width"),
        columns=columns,
    )
    assert runs.record("t", frame) is frame
    table = {
        "columns": [["MI", "paper"], ["MI", "run"]],
        "index": [1, 2],
        "data": [[0.5, 1], [None, 2]],
    }
    assert recorded()["tables"] == {"t": table | {"index_names": ["width"]}}
    runs.record("t", 1)  # a cell run again, changed
    assert (recorded()["tables"], recorded()["numbers"]) == ({}, {"t": 1})


def test_record_refuses_what_json_cannot_hold(recorded):
    runs.record("kept", 1)
    for value in (
        float("nan"),
        torch.tensor([1.0, float("inf")]),
        pd.DataFrame({"a": [float("inf")]}),
    ):
        with pytest.raises(ValueError, match=r"^mi.*allow_nan"):
            runs.record("mi", value)
    with pytest.raises(TypeError, match=r"mi\.a is a set"):
        runs.record("mi", {"a": {1}})
    assert recorded()["numbers"] == {"kept": 1}
    runs.record("mi", [1.0, float("nan")], allow_nan=True)
    assert recorded()["numbers"]["mi"] == [1.0, None]


def test_claims_are_recorded_with_margin_and_paper(recorded):
    paper = published.kirsch.table_2.says(
        "mnist", lambda frame: frame["MI, OOD"][1] > 3 * frame["MI, OOD"][128]
    )
    assert (
        runs.claim(
            "fall",
            "It falls at least three times.",
            np.float64(3.5) > 3,
            margin=3.5 / 3,
            paper=paper,
        )
        is True
    )
    assert (
        runs.claim(
            "none", "No image is missed.", torch.tensor(False), margin=np.float32(0.5)
        )
        is False
    )
    assert (
        runs.claim(
            "fall",
            "It falls at least three times.",
            torch.tensor(2.0) > 3,
            margin=0,
            paper=paper,
        )
        is False
    )
    kept = {
        "sentence": "It falls at least three times.",
        "holds": False,
        "margin": 0,
        "unit": "",
    }
    assert recorded()["claims"]["fall"] == kept | {
        "paper": {"holds": False, "text": "Kirsch 2024, Table 2"},
        "algebra": False,
        "other_runs": False,
        "seeds": None,
    }
    table = runs.claims()
    assert list(table.index) == [
        "It falls at least three times.",
        "No image is missed.",
    ]
    assert table["this run"].tolist() == ["fails", "fails"]
    assert table["paper"].tolist() == ["no (Kirsch 2024, Table 2)", "–"]
    runs.begin(runs.output_dir(), "x")
    assert recorded()["claims"] == {}
    assert runs.claims().empty


def test_the_table_of_claims_shows_in_how_many_seeds_of_the_long_runs_a_claim_holds(
    tmp_path, monkeypatch
):
    """With their data set, and with their own words where the claim was another."""
    monkeypatch.chdir(tmp_path)
    runs.begin(tmp_path / "out", "x")
    runs.claim("a", "It falls from x1 to x8", True)
    runs.claim("b", "second", False)
    assert list(runs.claims()) == ["this run", "margin", "paper"]
    (folder := tmp_path / "figures" / "real" / "x").mkdir(parents=True)
    said = {"a": {"sentence": "It falls from x1 to x32", "holds": False},
            "b": {"sentence": "second", "holds": True}}  # fmt: skip
    (folder / "results.json").write_text(json.dumps({"claims": said}))
    assert list(runs.claims()) == ["this run", "margin", "paper"]
    (folder / "manifest.json").write_text(
        '{"parameters": {"dataset": "mnist"}, "uqlab": "0.1.0"}'
    )
    pd.DataFrame(
        {
            "seed": [0, 1, 2],
            "claim_a": [True, False, True],
            "claim_b": [None, True, True],
        }
    ).to_csv(folder / "table.csv", index=False)
    assert list(runs.claims()["`real` run"]) == [
        "2 of 3 seeds, mnist, uqlab 0.1.0: “It falls from x1 to x32”",
        "2 of 2 seeds, mnist, uqlab 0.1.0",
    ]


def test_the_table_of_claims_shows_runs_of_the_same_page_on_sentences(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "figures" / "real" / "x").mkdir(parents=True)
    rows = {"run_notebook": ["notebooks/studies/x_study.ipynb"] * 3}
    rows |= {"claim_a": [True, False, True], "claim_b": [True, True, True]}
    pd.DataFrame(rows).to_csv(folder / "sentences.csv", index=False)
    runs.begin(tmp_path / "out", "x_study")
    runs.claim("a", "It falls.", True)
    runs.claim("c", "It was not asked there.", True)
    assert list(runs.claims()["sentences"]) == ["2 of 3 seeds", "–"]
    runs.begin(tmp_path / "out", "x")  # its lesson
    runs.claim("a", "Another claim of that name.", True)
    assert "sentences" not in runs.claims()


def test_the_table_of_claims_shows_in_how_many_other_seeds_a_claim_holds(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "figures" / "seeds").mkdir(parents=True)
    held = {
        "claim": ["always", "often", "rarely", "once", "new"],
        "sentence": [
            *("It always holds.", "It often holds.", "It rarely holds."),
            *("It once holds.", "This was claimed of other data."),
        ],
        "1": [True, True, False, False, True],
        "2": [True, False, False, False, True],
        "3": [True, True, True, True, True],
    }
    pd.DataFrame(held).to_csv(folder / "x.csv", index=False)
    runs.begin(tmp_path / "out", "x")
    for name, holds in {
        "always": True,
        "often": True,
        "once": True,
        "rarely": False,
    }.items():
        runs.claim(name, f"It {name} holds.", holds)
    runs.claim("identity", "The parts add up.", True, algebra=True)
    runs.claim("new", "This was claimed later.", True)
    runs.claim("long", "It holds on all of MNIST.", True, other_runs=True)
    table = runs.claims()
    assert table["this run"].tolist() == [
        "clear",
        "narrow",
        "unsettled",
        "fails",
        "algebra",
        "holds",
        "holds",
    ]
    counted = ["3 of 3", "2 of 3", *["1 of 3"] * 2, "–", "–", "other runs"]
    assert table["other seeds"].tolist() == counted


def test_a_number_of_the_long_runs_is_their_mean_and_spread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs.begin(tmp_path / "out", "x")
    assert runs.committed("mi_1") == "–"
    (folder := tmp_path / "figures" / "real" / "x").mkdir(parents=True)
    table = pd.DataFrame(
        {"seed": [0, 1, 2], "mi_1": [1.0, 2.0, 3.0], "mi_2": [None, None, 0.5]}
    )
    table.to_csv(folder / "table.csv", index=False)
    assert runs.committed("mi_1") == "2.000 ± 1.000"
    assert runs.committed("mi_2", ".1f") == "0.5"
    assert runs.committed("mi_3") == "–"


def test_claims_that_claim_nothing_are_refused(recorded):
    runs.claim("kept", "It is so.", True)
    for wrong in (1, "yes", None, np.array([True, False])):
        with pytest.raises(TypeError, match="claim x: holds"):
            runs.claim("x", "It is so.", wrong)
    for wrong in ("", "  "):
        with pytest.raises(ValueError, match="claim x: the sentence"):
            runs.claim("x", wrong, True)
    with pytest.raises(ValueError, match="margin of x is nan"):
        runs.claim("x", "It is so.", True, margin=float("nan"))
    for wrong in ("1", True, [1, 2]):
        with pytest.raises(TypeError, match="claim x: the margin"):
            runs.claim("x", "It is so.", True, margin=wrong)
    with pytest.raises(TypeError, match="claim x: paper is 'yes'"):
        runs.claim("x", "It is so.", True, paper="yes")
    with pytest.raises(ValueError, match="claimed kept with another sentence"):
        runs.claim("kept", "It is not so.", True)
    assert list(recorded()["claims"]) == ["kept"]


def test_results_appear_whole(recorded, monkeypatch):
    runs.record("first", 1)
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        runs.record("second", 2)
    assert recorded()["numbers"] == {"first": 1}
    assert [path.name for path in runs.output_dir().iterdir()] == ["results.json"]


def test_begin_by_hand_writes_beside_the_notebooks_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_folder", None)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert (
        runs.begin("", "03_x")
        == runs.output_dir()
        == tmp_path / "figures" / "interactive" / "03_x"
    )


def test_importing_runs_is_cheap():
    heavy = "{'papermill', 'torch', 'matplotlib', 'pandas', 'numpy'}"
    code = f"import sys, uqlab.runs; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)
