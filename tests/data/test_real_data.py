"""Small training runs on the real data sets, where $UQLAB_DATA holds them: the collapse is not a matter of toy data."""

import pytest
from small_files import needs

from uqlab import data, ensembles, metrics, models, training, uncertainty

pytestmark = pytest.mark.release


@needs("mnist", "fashion-mnist")
def test_mutual_information_falls_with_width_on_mnist():
    train, test = (
        data.load("mnist", "train", limit=5000),
        data.load("mnist", "test", limit=2000),
    )
    fashion = data.load("fashion-mnist", "test", limit=2000)
    found = {}
    for width in (1, 8):
        ensemble = ensembles.deep(
            lambda w=width: models.mlp(784, (64 * w, 32 * w)), members=5
        )
        training.fit(
            ensemble,
            train.inputs,
            train.labels,
            epochs=10,
            lr=0.05,
            momentum=0.9,
            progress=False,
        )
        inside, outside = (
            training.predict(ensemble, items.inputs) for items in (test, fashion)
        )
        known, unknown = (
            uncertainty.decompose(inside).epistemic,
            uncertainty.decompose(outside).epistemic,
        )
        found[width] = known.mean().item(), unknown.mean().item()
        assert metrics.accuracy(inside, test.labels) > 0.92
        assert metrics.ood_detection(known, unknown).auroc > 0.8
    assert found[8][0] < 0.7 * found[1][0]
    assert found[8][1] < 0.9 * found[1][1]
