"""The notebooks run at the `tiny` profile, and show what they claim to show."""

import json

import pytest
from small_pages import UNCONVERTED

from uqlab.runs import parameters

NOTEBOOKS = [path.stem for path in parameters.all_notebooks()]

# Claims that the `tiny` profile is too small to show: (page, claim) -> why, and how it is at `quick`.
FEW = "two members, a few epochs and at most 100 inputs are too few to show it"
NEEDS_QUICK: dict[tuple[str, str], str] = {
    (
        "03",
        "order",
    ): "halves of five members have two each; at quick the lower end of the difference is .14",
    (
        "03",
        "auroc_falls",
    ): "two sets of 8 x 8 digits and letters; at quick the smallest fall is .0055",
    (
        "04",
        "narrower",
    ): "networks of 8 x 8 digits give back all at x2 and at x0.5; on MNIST x8 gives .82 and x4 .59 back",
    (
        "05",
        "errors_ensemble",
    ): "three networks and 740 inputs; five networks and 2,400 inputs of MNIST show it",
    (
        "05",
        "mixed",
    ): "three sizes on digits of 8 x 8; six on MNIST: the AUROC of another is larger by .16",
    (
        "06",
        "beats_single",
    ): "fails at quick too: the interval of the difference begins .0018 below 0",
    ("06", "nll_single"): f"{FEW}; at quick the difference is .031 nats or more",
    ("06", "near_explicit"): f"{FEW}; at quick 1.2 points apart at most, of two",
    (
        "06",
        "beats_explicit",
    ): "fails at quick too: the interval of the difference begins .012 below 0",
    ("06", "equal_numbers"): f"{FEW}; at quick the difference is .007 or more",
    (
        "06",
        "premise",
    ): "one of 100 test inputs decides it; at quick the nearest end is .106 away",
    ("06", "members"): f"{FEW}; at quick the difference is .007 or more",
    (
        "06",
        "more_diverse",
    ): f"{FEW}; at quick the difference in disagreement is .010 or more",
    ("06", "corruption"): f"{FEW}; at quick the difference is .10 or more",
    ("07", "equal"): f"{FEW}; at quick 1.2 points apart at most, of three",
    ("07", "unrelated"): "fails at quick too: |cos| .25, where chance is .07",
    ("07", "equal_size"): f"{FEW}; at quick .47 intruders more or above",
    ("08", "near_lora"): f"{FEW}; at quick 1.3 points behind at most, of two",
    ("08", "gentle"): f"{FEW}; at quick the difference is .011 or more",
    ("08", "biases"): f"{FEW}; at quick the difference in disagreement is .015 or more",
    ("08", "loses_more"): f"{FEW}; at quick .068 lie between the two intervals",
    ("08", "equally_apart"): f"{FEW}; at quick 1.8 points apart at most, of two",
    ("08", "are_none"): f"{FEW}; at quick the larger smallest share is .31, of .5",
    (
        "09",
        "overlap",
    ): "four heads of 32 are gone, of which blind draws share none to two; at quick 9 and 7 of 12 (2 to 7)",
    (
        "09",
        "circuits",
    ): "one head a layer and 60 inputs of four digits; at quick the lowest end is .47 points above 0",
    (
        "09",
        "half",
    ): "the same: one head a layer is the most that leaves; at quick, with four, 1.66 points",
    (
        "09",
        "gradients",
    ): "60 inputs a set; at quick the lowest end is .19 points above 0 (from -2)",
    (
        "09",
        "seeds",
    ): "one pass of eight steps after pruning; at quick .024 nats (from 0)",
    (
        "09",
        "price",
    ): "it measures time, and two members may take less where all cores are busy; at quick 2.7 (from 1.5)",
    (
        "10",
        "copies",
    ): f"{FEW}; at quick .98 and .104 of the heads, a blind matching keeps up to .196",
    (
        "10",
        "pretraining",
    ): "networks that have learned hardly anything are alike; at quick .563 against .211",
    (
        "10",
        "lora",
    ): f"{FEW}; at quick the interval of the difference is .0055 to .0147 nats",
    (
        "10",
        "before",
    ): "fails at quick too: on letters the best head is .168 behind the classifier",
    (
        "10",
        "rivals",
    ): "pixels, heads and classifier find all letters beside 8 x 8 digits; at quick the margin is .0068",
    (
        "10",
        "useful",
    ): "fails at quick too: a rank correlation of .07, by chance up to .35",
    ("10", "circuit_euclidean"): f"{FEW}; at quick 1.28 to 1.46 times as far",
    ("10", "circuit_mahalanobis"): "fails at quick too: .88 to .99 times as far",
    (
        "11",
        "output",
    ): "four splits of 8 x 8 digits have intervals of points; twenty on MNIST: .65 (from .49)",
    (
        "11",
        "depth",
    ): "four splits cannot tell it from 0; twenty on MNIST: .54 (from .35)",
    (
        "11",
        "ensemble",
    ): "four splits cannot tell it from 0; twenty on MNIST: 1.9 (from 1.13)",
    (
        "11",
        "noise",
    ): "few inputs move by more than 0.05 points; on MNIST by .007 at most",
    (
        "11",
        "mistakes",
    ): "networks of 8 x 8 digits make hardly any; on MNIST .117 (from .066) thousandths",
    (
        "11",
        "pretrained",
    ): "twenty inputs a set; two hundred: 2.1 points (from .78); on CIFAR ResNets it fails",
    (
        "12",
        "rank_falls",
    ): "it rises with the width on 8 x 8 digits; eight runs on MNIST: 1.37 half-widths",
    (
        "12",
        "undecided",
    ): "entropy is ahead at both ends on 8 x 8 digits; eight runs on MNIST: 8.1",
    ("13", "short"): "two of three methods are on the front; at quick two of eighteen",
    (
        "13",
        "worse",
    ): "two ensembles, too few for a share; on the board that quick reads nine of seventeen: 1.59",
    (
        "13",
        "score",
    ): "three methods on 60 inputs, which the entropy finds best; at quick the least gain is .012",
    ("13", "pixels"): "twenty inputs a set; at quick the methods lead by .034 or more",
    ("14", "temperature"): "fails at quick too: the near end is .001 nats above 0",
    ("14", "circuit"): "60 pictures, and twelve for the search; at quick 3.4 points",
    ("14", "price"): "60 pictures; at quick 1.2 points",
    ("14", "together"): "two members and 24 unknown pictures; at quick 1.7 points",
    ("14", "new"): "fails at quick too: the low end is 1.0 points below 0",
    ("14", "modest"): "60 pictures have an ECE of their own; at quick .5 points",
    ("14", "judge"): "few answers of 60 are wrong; at quick .13",
    (
        "15",
        "rivals",
    ): "64 clips of four kinds, two members and four epochs; at quick 1.4 (from 1)",
    (
        "15",
        "parity",
    ): "64 clips: the interval is wider than five points; at quick 1.25 (from 1)",
    ("15", "unsure"): "a fifth of 64 clips is twelve; at quick .2 (from 0)",
    (
        "15",
        "pixels",
    ): "fails at quick, too, by .012: ahead by .030 and .041, but not resolved over five turns",
    (
        "16",
        "rivals",
    ): "160 digits of 8 x 8, of which a nearest neighbour errs about as rarely; at quick .005",
    ("16", "fifth"): "a few errors, and resamples without any; at quick .50",
    ("16", "rejects"): "the same; at quick .017",
    (
        "16",
        "pixels",
    ): "fails at quick too: the distance of pixels finds clothes almost without a mistake",
    ("16", "tiles"): "fails at quick too: on letters the interval begins .036 below 0",
    ("16", "masks"): "fails at quick too: on letters it begins .076 below 0",
    ("16", "gradient"): "fails at quick too: on one set of three it is further apart",
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_and_describes_what_it_wrote(results, name):
    recorded, folder = results(name)
    assert recorded["numbers"]
    assert recorded["figures"]
    for figure, about in recorded["figures"].items():
        assert len(about["caption"]) > 20, figure
        assert {(folder / file).suffix for file in about["files"]} == {".png", ".pdf"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_control_of_its_explorer_changes_the_picture(pages, name):
    """Each to all its places, a slider to its ends; then `reset` restores the picture (tests/small_pages.py)."""
    moved = json.loads((pages(name) / "moved.json").read_text())
    assert moved
    assert [control for control, changed in moved.items() if not changed] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_claim_holds_or_says_why_it_needs_quick(results, name):
    recorded = results(name)[0]
    claims, excused = (
        recorded["claims"],
        {claim for page, claim in NEEDS_QUICK if page == name[:2]},
    )
    assert excused <= claims.keys(), "claims that the page does not make"
    assert {
        key: c["sentence"]
        for key, c in claims.items()
        if not c["holds"] and key not in excused
    } == {}
    if name[:2] not in UNCONVERTED:
        assert 4 <= len(claims) <= 10
        assert {
            key for key, claim in claims.items() if claim["margin"] is None
        } == set()
        assert len(recorded["figures"]) <= 8


def test_excuses_are_of_pages_that_exist():
    assert {page for page, _ in NEEDS_QUICK} <= {name[:2] for name in NOTEBOOKS}
    assert all(len(why) > 20 for why in NEEDS_QUICK.values())


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_solutions_of_its_exercises_run(pages, name):
    """The blocks of code in them, in order, after the page's last cell; they may assert (tests/small_pages.py)."""
    solved = json.loads((pages(name) / "solved.json").read_text())
    assert "".join(solved) == ""


@pytest.mark.parametrize("path", parameters.all_notebooks(), ids=lambda path: path.stem)
def test_first_cell_installs_nothing_and_says_how(path):
    code = [
        "".join(cell["source"])
        for cell in parameters.cells(path)
        if cell["cell_type"] == "code"
    ]
    assert code[0].startswith("# %pip install -e ..  # where uqlab is missing")
    assert not [
        line
        for source in code
        for line in source.splitlines()
        if line.startswith(("%", "!"))
    ]
