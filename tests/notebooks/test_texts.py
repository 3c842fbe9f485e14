"""Pages on texts with a part of MiniLM: their profile `text`, made small, where $UQLAB_DATA holds SST-2."""

import json
import re
import shlex

import pytest
from filelock import FileLock
from small_files import needs
from small_pages import sources

from uqlab import models, runs
from uqlab.runs import parameters

pytestmark = pytest.mark.release
TEXTS = [
    "SST-2/train.tsv",
    "trec/TREC_10.label",
    "text/agnews_test.tsv.gz",
    "text/rte_all.tsv.gz",
]
needs_texts = needs(*TEXTS)
LAYERS, NEURONS, WORDS = 2, 192, 5000
FEW = {
    "seed": 372,
    "members": 2,
    "train_limit": 16,
    "limit": 12,
    "epochs": 1,
    "batch_size": 8,
    "warmup": 1,
}  # short ones
OOD = {"ood": ["trec"], "shifted": 8}
SMALL = {
    "08_singular_value_ensemble_study": FEW | OOD | {"rank": 2},
    "09_hydra_head_pruning_study": FEW | {"ood": ["trec", "rte"], "near": ["rte"], "held_out": 8, "remove": 1, "removed": [1],
                                          "blind_draws": 1, "epochs_tuned": 1},
    "10_head_similarity_study": FEW | {"ood": ["trec"], "held_out": 8, "epochs_own": 1, "rank": 2, "remove": 2, "draws": 2},
    "11_gradient_uncertainty_study": {"limit": 24, "evaluated": 8, "splits": 4, "members": 2, "epochs": 1,
                                      "perturbations": 1, "asked": 12, "repeats": 50},
    "13_scoreboard_study": {"members": 2, "train_limit": 16, "limit": 12, "held_out": 8, "asked": 8, "ood": ["trec"],
                      "methods": ["single", "lora"], "settings": {"epochs": 1}, "scores": ["entropy", "mahalanobis"],
                      "repeats": 1, "resamples": 50},
}  # fmt: skip


@pytest.fixture(scope="session")
def backbone(shared):
    """A folder with the first layers of MiniLM, of its neurons and of its words, to put others together from."""
    folder, part = shared / "minilm", shared / "minilm.part"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            small = models.from_pretrained(models.minilm(), 2, "text")
            small.network.encoder.layer = small.network.encoder.layer[:LAYERS]
            for layer in small.network.encoder.layer:
                for weight in (
                    layer.intermediate.dense.weight,
                    layer.intermediate.dense.bias,
                ):
                    weight.data = weight[:NEURONS].data.clone()
                layer.output.dense.weight.data = layer.output.dense.weight[
                    :, :NEURONS
                ].data.clone()
            small.network.config.update(
                {"num_hidden_layers": LAYERS, "intermediate_size": NEURONS}
            )
            small.network.resize_token_embeddings(WORDS)
            small.network.save_pretrained(part)
            small.tokenizer.save_pretrained(part)
            known = json.loads((part / "tokenizer.json").read_text())
            known["model"]["vocab"] = {
                word: i for word, i in known["model"]["vocab"].items() if i < WORDS
            }
            (part / "tokenizer.json").write_text(json.dumps(known))
            part.rename(folder)
    return folder


def test_a_page_at_tiny_runs_on_sentences_of_ones_own(backbone, tmp_path):
    own, some = (
        tmp_path / "own.tsv",
        [f"{word} film number {i}" for i in range(40) for word in ("good", "bad")],
    )
    lines = [
        "\t".join((line, line.split()[0], "test" if i % 4 < 2 else "train"))
        for i, line in enumerate(some)
    ]
    own.write_text("\n".join(["text\tlabel\tsplit", *lines]))
    given = FEW | {
        "rank": 2,
        "k": 8,
        "top": 4,
        "dataset": str(own),
        "backbone": str(backbone),
    }
    folder = runs.execute(
        "studies/07_intruder_dimensions_study",
        given,
        profile="tiny",
        folder=tmp_path / "run",
        threads=1,
    )
    assert json.loads((folder / "results.json").read_text())["claims"]


@needs_texts
@pytest.mark.parametrize("page", SMALL)
def test_a_page_runs_on_texts(page, backbone, tmp_path):
    where = (
        {"weights": [str(backbone)]}
        if page.startswith("11")
        else {"backbone": str(backbone)}
    )
    changes = SMALL[page] | where
    folder = runs.execute(
        page, changes, profile="text", folder=tmp_path / "run", threads=1
    )
    found = json.loads((folder / "results.json").read_text())
    assert found["claims"]
    assert "rarity of words" in str(found["tables"])


@needs_texts
def test_the_recipe_of_study_06_runs_as_written(backbone, tmp_path):
    """Study 06, but for its size and the place of the backbone."""
    cells = sources(parameters.find("studies/06"), "markdown")
    page = "\n".join(cells).replace("\\\n", " ")
    recipe = re.search(r"^ +uqlab run studies/06 (.+)$", page, re.MULTILINE)
    words = shlex.split(recipe[1])
    given = dict(zip(words[1::3], words[2::3], strict=True))
    assert set(words[::3]) == {"-p"}
    assert (given["dataset"], given["ood"]) == ("sst2", '["agnews"]')
    small = FEW | {"backbone": str(backbone), "rank": 4, "shifted": 6}
    folder = runs.execute(
        "studies/06", given | small, folder=tmp_path / "run", threads=1
    )
    found = json.loads((folder / "results.json").read_text())
    assert "rarity of words" in found["tables"]["ood"]["index"]
    assert found["claims"]["beats_single"]["paper"]["holds"] is True
    assert (
        found["claims"]["beats_explicit"]["paper"]["holds"] is False
    )  # Table 8: 92.7 against 93.2
