"""tools/seeds.py: which claims get a row, and in which seeds they hold."""

from types import SimpleNamespace

import pytest
from small_pages import rows_of

from uqlab import runs
from uqlab.runs import parameters
from uqlab.runs.manifest import Manifest


@pytest.fixture
def report(tmp_path):
    """Two finished runs of one page, whose claims hold as the seed says."""

    def make(sentence="It falls."):
        outcomes = []
        for seed in (1, 2):
            folder = runs.begin(tmp_path / str(seed), "x")
            runs.claim("falls", sentence.format(seed), seed == 1)
            runs.claim("adds up", "The parts add up.", True, algebra=True)
            runs.claim("long", "It holds on MNIST.", True, other_runs=True)
            Manifest(parameters={"seed": seed}).save(folder)
            outcomes.append(SimpleNamespace(folder=folder))
        return SimpleNamespace(outcomes=outcomes)

    return make


def test_only_what_a_seed_can_refute_has_a_row(report):
    [row] = rows_of(report(), parameters.find("00"))
    assert (row["claim"], row["sentence"]) == ("falls", "It falls.")
    assert (row[1], row[2]) == (True, False)


def test_a_sentence_that_changes_with_the_seed_is_refused(report):
    with pytest.raises(ValueError, match="another sentence in 2"):
        rows_of(report("It falls in run {}."), parameters.find("00"))
