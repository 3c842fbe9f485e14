"""Page 05 on CIFAR-10 networks trained by others, judged by people, where $UQLAB_DATA holds them."""

import json

import pandas as pd
import pytest
from small_files import needs

from uqlab import runs

pytestmark = pytest.mark.release


@needs(
    "cifar-10-batches-bin", "cifar10h-counts.npy", "resnet_cifar10", "cifar-100-binary"
)
def test_tiles_of_a_residual_network_against_an_ensemble_and_people(tmp_path):
    changes = {"limit": 400, "ood": ["cifar100"], "sizes": [2, 4, 8], "repeats": 20}
    folder = runs.execute(
        "05_tile_extraction_study", changes, profile="paper", folder=tmp_path / "run"
    )
    recorded = json.loads((folder / "results.json").read_text())
    numbers = recorded["numbers"]
    assert numbers["tile_mean_error"] < 1e-3
    steep = pd.DataFrame(**recorded["tables"]["paper_and_this_run"])[
        "by score: acceptance, NLL"
    ]
    assert numbers["accuracy_ensemble"] > 0.92
    assert abs(numbers["accuracy_original"] - 0.92) < 0.03
    for s in (2, 4, 8):
        assert (
            numbers[f"accuracy_{s}"] > 0.85
        )  # each tile alone is right far less often
        assert steep[f"MI, {s} x {s}"] < 0
        assert numbers[f"auc_accuracy_{s}"] < numbers["auc_accuracy_original"]
        assert (
            numbers["spearman_human_total_ensemble"]
            > numbers[f"spearman_human_total_{s}"]
            > 0.05
        )
        assert numbers["auroc_mi_ensemble"] > numbers[f"auroc_mi_{s}"]
    counts = {
        row[0]: row[1] for row in map(list, recorded["tables"]["counts"]["data"])
    }  # members -> that weights leave
    assert all(
        left > 0.99 * members for members, left in counts.items()
    )  # logit sums are constant after weight decay
    assert numbers["temperature_original"] > 1.5  # the network is too sure
    assert numbers["temperature_8"] < 1  # its tiles together are not sure enough
