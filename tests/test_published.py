"""The papers' numbers are in the papers, and are said of the data set that they belong to."""

import re
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from uqlab.study import published

ROOT = Path(__file__).parents[1]
SHARED = (
    ROOT.parent / "shared" if (ROOT.parent / "shared" / "papers").is_dir() else None
)
PAPERS = ["kirsch", "lora", "sve", "hydra", "regrad", "uncertainty_baselines"]
ENTRIES = [
    (paper, name)
    for paper in PAPERS
    for name in vars(getattr(published, paper))
    if "_" in name
]
NUMBER = re.compile(r"-?\d*\.?\d+(?:e-?\d+)?")


def lines(paper, name):
    """The paper's text about an entry; the digest's where the paper's own tables were not available."""
    if name.startswith(("digest", "study")):
        return (SHARED / "design" / "METHODS.md").read_text().splitlines()
    text = (SHARED / "papers" / getattr(published, paper).text).read_text().splitlines()
    if not name.startswith("table"):
        return text
    number = name.partition("_")[2]
    place = next(
        i for i, line in enumerate(text) if re.match(rf"[\d\s*]*Table {number}:", line)
    )
    return text[
        max(0, place - 12) : place + 40
    ]  # a caption stands above its table, or below


def numbers(line):
    return [
        float(each) for each in NUMBER.findall(re.sub(r"(?<=\d)'(?=\d)|[−–]", "", line))
    ]


@pytest.mark.skipif(SHARED is None, reason="the papers' text is not here")
@pytest.mark.parametrize(("paper", "name"), ENTRIES)
def test_every_number_and_every_quote_is_in_the_text(paper, name):
    table, text = getattr(getattr(published, paper), name), lines(paper, name)
    found = [numbers(line) for line in text]
    if (paper, name) == ("lora", "table_16"):  # its rows run into each other
        found += [[*one, *other] for one, other in pairwise(found)]
    for dataset in table.datasets:
        spread = type(table)("", {"data": table.entry.get("deviations", {})})
        printed = pd.concat([table.frame(dataset), spread.frame(dataset)], axis=1)
        for row, values in printed.iterrows():
            wanted = values.dropna().tolist()
            assert any(
                all(line.count(v) >= wanted.count(v) for v in wanted) for line in found
            ), (dataset, row)
    for dataset, stated in table.entry.get("states", {}).items():
        file = SHARED / "papers" / getattr(published, paper).text
        words = " ".join(file.read_text().split())
        for each in stated.values():
            assert each["quote"] in words, (dataset, each["quote"])


def test_numbers_by_data_set():
    table = published.kirsch.table_2
    assert table.title == "Kirsch 2024, Table 2"
    assert published.kirsch.fig_4.title == "Kirsch 2024, Fig. 4"
    assert (
        table.frame("mnist")["MI, OOD"][128]
        == table.frame("mnist-mini")["MI, OOD"][128]
        == 0.11
    )
    assert isinstance(table.frame("digits"), pd.DataFrame)
    assert table.frame("digits").empty


def test_a_paper_says_yes_or_no_of_its_own_data_sets_alone():
    table, sst2 = published.lora.table_1, published.lora.table_8

    def wins(frame):
        return frame.accuracy["lora"] > frame.accuracy["explicit"]

    assert table.says(
        "cifar100", wins, ("lora", "accuracy"), ("explicit", "accuracy")
    ) == (
        True,
        "Mühlematter et al. 2024, Table 1: 82.5, 79.8",
    )
    assert sst2.says("sst2", wins) == (False, "Mühlematter et al. 2024, Table 8")
    assert table.says("digits", wins) is table.says("sst2", wins) is None
    missing = published.sve.digest_2
    assert (
        missing.says(
            "cifar100", lambda frame: frame.FPR95["sve"] < frame.FPR95["explicit"]
        )
        is None
    )
    with pytest.raises(KeyError):
        table.says("cifar100", lambda frame: frame.accuracy["no such method"] > 0)


def test_what_a_paper_states_in_words():
    assert published.kirsch.fig_4.states("cifar10", "AUROC falls").holds
    assert not published.kirsch.fig_5.states(
        "mnist-mini", "matches the single network by entropy"
    ).holds
    assert published.kirsch.fig_4.states("digits", "AUROC falls") is None
    with pytest.raises(ValueError, match=r"Fig\. 4 states nothing named 'AUROC rises'"):
        published.kirsch.fig_4.states("cifar10", "AUROC rises")


def test_a_run_is_the_papers_only_in_all_its_settings():
    theirs = published.kirsch.table_2.settings
    ours = {
        **theirs,
        "widths": [1.0, 2.0, 4.0, 8.0, 32.0, 64.0, 128.0],
        "seed": 3,
        "ood": ["fashion-mnist", "letters"],
    }
    assert published.differs(theirs, ours) == []
    assert published.differs(theirs, {**ours, "lr": 0.05, "widths": [1, 2]}) == [
        "widths",
        "lr",
    ]
    assert published.differs(theirs, {**ours, "dataset": "mnist-mini"}) == ["dataset"]
    assert published.differs({"members": 4}, {}) == ["members"]
