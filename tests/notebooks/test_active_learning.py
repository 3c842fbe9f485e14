"""Rows of labelling, and the study that reads them: at the smallest size, and as they are committed."""

import itertools
import json
from pathlib import Path

import pandas as pd
import pytest
import torch

import uqlab
from uqlab import runs
from uqlab.core.files import read_json
from uqlab.runs import parameters

ROOT = Path(uqlab.__file__).parents[1]
COMMITTED = ROOT / "figures" / "real" / "11_gradient_uncertainty"
STUDY = ROOT / "notebooks" / "studies" / "active_learning.ipynb"
FIGURES = {"curves", "gradients", "collapse", "copies", "photographs"}


def enumerated(z):
    """I[y_1 .. y_n; member] by the sum over all labels of all inputs."""
    p = z.softmax(2)
    joint = own = 0.0
    for labels in itertools.product(range(z.shape[2]), repeat=z.shape[1]):
        each = p[:, torch.arange(z.shape[1]), torch.tensor(labels)].prod(1)
        joint -= torch.special.xlogy(each.mean(), each.mean()).item()
        own -= torch.special.xlogy(each, each).mean().item()
    return joint - own


@pytest.fixture
def page():
    """The functions of the rows' notebook that choose."""
    cells = json.loads(parameters.find("labelling_rows").read_text())["cells"]
    (code,) = ["".join(c["source"]) for c in cells if "def batch_bald" in str(c)]
    names = {"torch": torch, "labelings": 1000}
    exec(code[code.index("def choose") : code.index("def learned")], names)
    return names


def test_batch_bald_maximises_a_sum_over_all_labels(page):
    z = 2 * torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0)).double()
    taken = []
    for row in page["batch_bald"](z, 4, 0).tolist():
        others = [other for other in range(6) if other not in taken]
        found = {other: enumerated(z[:, [*taken, other]]) for other in others}
        assert row == max(found, key=found.get)
        taken.append(row)


def test_a_sample_of_labelings_chooses_no_copies(page):
    """Two undecided inputs, of which the one with the larger BALD is there three times."""
    first = torch.tensor([[4.0, 0, 0], [0, 4, 0], [0, 4, 0], [4, 0, 0]]).double()
    second = torch.tensor([[0, 3.0, 0], [0, 3, 0], [0, 0, 3], [0, 0, 3]]).double()
    z = torch.stack([first, first, first, second], 1)
    assert page["batch_bald"](z, 2, 0)[1] == 3
    page["labelings"] = 20
    assert len({*page["batch_bald"](z, 4, 0).tolist()}) == 4


def test_the_largest_are_chosen_and_ties_are_drawn(page):
    values = torch.tensor([0.0, 2, 1, 1, 1, 1, 3])
    found = [page["choose"](values, 3, draw).tolist() for draw in range(40)]
    assert {tuple(rows[:2]) for rows in found} == {(6, 1)}
    assert {rows[2] for rows in found} == {2, 3, 4, 5}


def labelled(folder, **changes):
    """The rows of one split at `tiny`."""
    notebook = parameters.find("labelling_rows")
    small = parameters.overrides(notebook, "tiny") | changes
    results = read_json(runs.execute(notebook, small, folder=folder) / "results.json")
    return pd.DataFrame(**results["tables"]["labelling"])


@pytest.mark.release
def test_rows_of_labelling(tmp_path):
    """All start from the same labels and weights; groups and few differ from all in who chooses alone."""
    found = labelled(tmp_path / "run", acquisitions=["random", "bald", "batch_bald"])
    assert not found.isna().any(axis=None)
    rows = found.set_index(["condition", "acquisition"]).sort_index()
    assert len(rows) == 3 + 3 + 2 + 2
    assert {name for name in found if name.startswith("accuracy ")} == {
        f"accuracy {count}" for count in (20, 30, 40)
    }
    first = rows["accuracy 20"]
    assert first.drop("wide", level="condition").nunique() == 1
    assert first["wide"].nunique() == 1
    mi = rows["MI 20"].xs("bald", level="acquisition")
    assert mi["groups"] < mi["few"]
    assert mi["groups"] < mi["plain"]
    assert (rows["MI corrected"] > 0).all()
    twice = labelled(
        tmp_path / "twice",
        acquisitions=["bald"],
        conditions=["plain"],
        pool=40,
        copies=2,
    )
    assert twice["different"].between(0.5, 1).all()


@pytest.mark.parametrize(
    ("name", "profile"),
    [("labelling", "real"), ("labelling_photographs", "photographs")],
)
def test_the_committed_rows_are_of_the_notebook_with_the_same_splits(name, profile):
    table = pd.read_csv(COMMITTED / f"{name}.csv")
    given = read_json(COMMITTED / f"{name}.json")["parameters"]
    notebook = parameters.find("labelling_rows")
    wanted = parameters.defaults(notebook) | parameters.overrides(notebook, profile)
    apart = {"output_dir", "seed", "copies", "pool", "conditions", "acquisitions"}
    same = {key: value for key, value in wanted.items() if key not in apart}
    assert {key: value for key, value in given.items() if key not in apart} == same
    rows = ["copies", "condition", "acquisition", "seed"]
    assert not table.duplicated(rows).any()
    for _, some in table.groupby("copies"):
        seeds = some.groupby(["condition", "acquisition"])["seed"].apply(sorted)
        assert len(seeds.map(tuple).unique()) == 1
        assert seeds.iloc[0] == list(range(len(seeds.iloc[0])))
    plain = table[(table["copies"] == 1) & (table["condition"] == "plain")]
    assert set(plain["acquisition"]) == set(wanted["acquisitions"])
    assert (COMMITTED / f"{name}.csv").stat().st_size < 3e5


def test_the_study_reads_the_committed_rows(tmp_path):
    results = read_json(runs.execute(STUDY, folder=tmp_path / "run") / "results.json")
    assert results["figures"].keys() == FIGURES
    claims = results["claims"]
    assert len(claims) >= 5
    assert all(claim["holds"] for claim in claims.values())
    assert all(claim["margin"] is not None for claim in claims.values())
