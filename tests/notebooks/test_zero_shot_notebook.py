"""Page 14 and its study: two questions, what prunings are worth, and a CLIP from a folder."""

import json
import shutil

import pytest

from uqlab.models import CAPTIONS_CLIP

PAGE = "14_zero_shot_hydra"
STUDY = f"{PAGE}_study"


def read(folder):
    return json.loads((folder / "results.json").read_text())


def test_each_score_answers_its_question(pages):
    recorded = read(pages(PAGE))
    numbers, auroc = recorded["numbers"], recorded["numbers"]["auroc"]
    assert numbers["accuracy"] > 0.8 > 10 * numbers["regressions"]
    assert auroc["largest cosine, new-shapes"] > auroc["entropy, new-shapes"]
    assert auroc["entropy, wrong answers"] > auroc["largest cosine, wrong answers"]
    assert auroc["distance of pixels, letters"] > 0.9
    assert numbers["auroc_among_certain"] > 0.5
    rejected = recorded["tables"]["rejected"]
    assert rejected["index"] == ["entropy", "largest cosine"]


def test_all_methods_stand_beside_the_papers_numbers(pages):
    recorded = read(pages(STUDY))
    numbers, table = recorded["numbers"], recorded["tables"]["paper_and_this_run"]
    rows = dict(zip(table["index"], table["data"], strict=True))
    columns = table["columns"]
    assert numbers["acc_single"] > 0.8
    assert rows["temperature"][0] == rows["single"][0] == numbers["acc_single"]
    assert rows["Hydra"][columns.index("paper: OpenCLIP, ECE")] == pytest.approx(0.0349)
    assert rows["error head"][0] is None
    assert {
        "Laplace",
        "Taylor",
        "CircAcc",
        "CircOOD",
        "CircAvg",
        "vision tower only",
        "single, LiT",
    } <= rows.keys()


def test_a_search_stands_beside_random_pruning_of_its_own_tower(pages):
    recorded = read(pages(STUDY))
    assert "taylor_or_tower" in recorded["claims"]
    assert 0 <= recorded["numbers"]["heads_in_two_searches"] <= 4


@pytest.mark.release
def test_a_clip_in_a_folder(pages, tmp_path):
    """Its pictures are standardised, as those of CLIP's checkpoints are; its captions may share a word, here "red"."""
    shutil.copytree(CAPTIONS_CLIP, tmp_path / "clip")
    small = {
        "dataset": "captions[0-11]",
        "held_out": 8,
        "limit": 24,
        "ranked": 4,
        "ood": ["letters"],
        "near": [],
    }
    recorded = read(
        pages(STUDY, checkpoint=str(tmp_path / "clip"), prompt="{}", **small)
    )
    assert "AUROC, far" in recorded["tables"]["board"]["columns"]
    assert "AUROC, near" not in recorded["tables"]["board"]["columns"]
    assert (
        recorded["numbers"]["acc_single"] < read(pages(STUDY))["numbers"]["acc_single"]
    )
