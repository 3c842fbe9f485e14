"""What notebooks record."""

import json
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
    assert recorded()["tables"] == {"t": table}
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
    said = "It falls at least three times."
    fall = {"margin": 3.5 / 3, "paper": paper}
    assert runs.claim("fall", said, np.float64(3.5) > 3, **fall) is True
    none = torch.tensor(False), np.float32(0.5)
    assert runs.claim("none", "No image is missed.", none[0], margin=none[1]) is False
    assert runs.claim("fall", said, torch.tensor(2.0) > 3, **fall) is False  # again
    kept = recorded()["claims"]["fall"]
    assert (kept["sentence"], kept["holds"], kept["margin"]) == (said, False, 3.5 / 3)
    assert kept["paper"] == {"holds": False, "text": "Kirsch 2024, Table 2"}
    table = runs.claims()
    assert [*table.index] == [said, "No image is missed."]
    assert table["this run"].tolist() == ["fails", "fails"]
    assert table["paper"].tolist() == ["no (Kirsch 2024, Table 2)", "–"]
    runs.begin(runs.output_dir(), "x")
    assert recorded()["claims"] == {}
    assert runs.claims().empty


@pytest.fixture
def real(tmp_path, monkeypatch):
    """The folder of the long runs of page x, in a project where recording has begun."""
    monkeypatch.chdir(tmp_path)
    runs.begin(tmp_path / "out", "x")
    (folder := tmp_path / "figures" / "real" / "x").mkdir(parents=True)
    return folder


def test_the_table_of_claims_shows_in_how_many_seeds_of_the_long_runs_a_claim_holds(
    real,
):
    """With their data set, and with their own words where the claim was another."""
    runs.claim("a", "It falls from x1 to x8", True)
    runs.claim("b", "second", False)
    said = {"a": {"sentence": "It falls from x1 to x32", "holds": False},
            "b": {"sentence": "second", "holds": True}}  # fmt: skip
    (real / "results.json").write_text(json.dumps({"claims": said}))
    assert [*runs.claims()] == ["this run", "margin", "paper"]  # not finished
    about = {"parameters": {"dataset": "mnist"}, "uqlab": "0.1.0"}
    (real / "manifest.json").write_text(json.dumps(about))
    table = {"seed": [0, 1, 2], "claim_a": [True, False, True]}
    table["claim_b"] = [None, True, True]
    pd.DataFrame(table).to_csv(real / "table.csv", index=False)
    assert [*runs.claims()["`real` run"]] == [
        "2 of 3 seeds, mnist, uqlab 0.1.0: “It falls from x1 to x32”",
        "2 of 2 seeds, mnist, uqlab 0.1.0",
    ]


def test_the_table_of_claims_shows_in_how_many_other_seeds_a_claim_holds(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "figures" / "seeds").mkdir(parents=True)
    rows = {  # name: in the seeds 1 to 3, here, what is said of it
        "always": ("111", True, "clear", "3 of 3"),
        "often": ("101", True, "narrow", "2 of 3"),
        "once": ("001", True, "unsettled", "1 of 3"),
        "rarely": ("001", False, "fails", "1 of 3"),
    }
    held = pd.DataFrame(
        [[n, f"It {n} holds.", *(c == "1" for c in r[0])] for n, r in rows.items()],
        columns=["claim", "sentence", "1", "2", "3"],
    )
    held.loc[4] = ["new", "This was claimed of other data.", True, True, True]
    held.to_csv(folder / "x.csv", index=False)
    runs.begin(tmp_path / "out", "x")
    for name, (_, holds, *_) in rows.items():
        runs.claim(name, f"It {name} holds.", holds)
    runs.claim("identity", "The parts add up.", True, algebra=True)
    runs.claim("new", "This was claimed later.", True)
    runs.claim("long", "It holds on all of MNIST.", True, other_runs=True)
    table = runs.claims()
    said = [row[2] for row in rows.values()]
    assert table["this run"].tolist() == [*said, "algebra", "holds", "holds"]
    counted = [row[3] for row in rows.values()]
    assert table["other seeds"].tolist() == [*counted, "–", "–", "other runs"]


def test_a_number_of_the_long_runs_is_their_mean_and_spread(real):
    assert runs.committed("mi_1") == "–"
    table = {"seed": [0, 1, 2], "mi_1": [1.0, 2.0, 3.0], "mi_2": [None, None, 0.5]}
    pd.DataFrame(table).to_csv(real / "table.csv", index=False)
    assert runs.committed("mi_1") == "2.000 ± 1.000"
    assert runs.committed("mi_2", ".1f") == "0.5"
    assert runs.committed("mi_3") == "–"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"holds": 1}, "x: holds"),
        ({"holds": np.array([True, False])}, "x: holds"),
        ({"sentence": " "}, "x: the sentence"),
        ({"margin": float("nan")}, "margin of x is nan"),
        ({"margin": "1"}, "x: the margin"),
        ({"paper": "yes"}, "x: paper"),
        ({"name": "kept"}, "another sentence"),
    ],
)
def test_claims_that_claim_nothing_are_refused(recorded, given, words):
    runs.claim("kept", "It is not so.", True)
    with pytest.raises((TypeError, ValueError), match=words):
        runs.claim(**{"name": "x", "sentence": "It is so.", "holds": True} | given)
    assert [*recorded()["claims"]] == ["kept"]


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
