"""Study 05 takes a network of ImageNet apart."""

import numpy as np
import pytest

from uqlab import runs
from uqlab.core.files import read_json
from uqlab.runs import parameters


@pytest.mark.release
def test_positions_of_a_network_of_imagenet_average_to_the_network(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 96, 96, 3), dtype=np.uint8)
    photographs = tmp_path / "photographs.npz"
    labels = np.linspace(0, 999, 12).astype(int)  # of a thousand classes
    np.savez(photographs, x_train=images, y_train=labels, x_test=images, y_test=labels)
    given = {"dataset": str(photographs), "model": "efficientnet-lite0"}
    given |= {"ambiguous": "", "ood": ["glyphs"], "limit": 12, "map_side": 3}
    given |= {"sizes": [2, 3], "shown": 2, "repeats": 20, "quantiles": 3}
    done = runs.execute(parameters.find("studies/05"), given, folder=tmp_path / "run")
    claims = read_json(done / "results.json")["claims"]
    assert claims["average"]["holds"]
