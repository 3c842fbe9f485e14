"""CIFAR-10 networks trained by others, where $UQLAB_DATA holds them: the published errors come out."""

import os
import pathlib

import pytest
import torch
from torch import nn

from uqlab import data, metrics, models, training
from uqlab.extraction import tiles

FOLDER = pathlib.Path(os.environ.get("UQLAB_DATA") or "nowhere")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean, standard deviation
FIVE = {f"ensemble_resnet20_{run}.th": error for run, error in enumerate((7.58, 7.94, 7.49, 7.70, 7.57), 1)}


def needs(*files):
    missing = [file for file in files if not (FOLDER / file).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"$UQLAB_DATA does not hold {', '.join(missing)}")


def network(file, depth=20):
    weights = data.file(f"resnet_cifar10/{file}", root=FOLDER)
    return nn.Sequential(models.Standardize(*IMAGENET), models.load_weights(models.cifar_resnet(depth), weights)).eval()


def predict(model, inputs):
    """Channels last, which is half as fast again on a CPU."""
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    return training.predict(model.to(memory_format=torch.channels_last), inputs, batch_size=125)


def error(logits, labels):
    return 100 * (1 - metrics.accuracy(logits, labels))


@needs("cifar-10-batches-bin", "resnet_cifar10")
@pytest.mark.parametrize(
    ("depth", "file", "percent"),
    [
        (20, "resnet20-12fca82f.th", 8.27),
        (32, "resnet32-d509ac18.th", 7.37),
        (44, "resnet44-014dd654.th", 6.89),
        (56, "resnet56-4bfd9763.th", 6.61),
    ],
)
def test_published_errors_come_out(depth, file, percent):
    test = data.load("cifar10", "test", root=FOLDER)
    assert error(predict(network(file, depth), test.inputs), test.labels) == pytest.approx(percent, abs=0.02)


@needs("cifar-10-batches-bin", "resnet_cifar10")
def test_five_runs_are_better_together():
    test = data.load("cifar10", "test", root=FOLDER)
    logits = torch.cat([predict(network(file), test.inputs) for file in FIVE])
    for alone, percent in zip(logits, FIVE.values(), strict=True):
        assert error(alone[None], test.labels) == pytest.approx(percent, abs=0.02)
    assert error(logits, test.labels) == pytest.approx(5.46, abs=0.02)
    assert metrics.nll(logits, test.labels) == pytest.approx(0.184, abs=0.001)


@needs("cifar-10-batches-bin", "resnet_cifar10")
def test_tiles_of_a_trained_network():
    test, model = data.load("cifar10", "test", root=FOLDER, limit=300), network("resnet20-12fca82f.th")
    own = predict(model, test.inputs)
    for size in (1, 2, 4, 8):
        logits = predict(tiles(model, size), test.inputs)
        torch.testing.assert_close(logits.mean(0), own[0], atol=1e-4, rtol=1e-4)
    assert metrics.accuracy(logits, test.labels) > 0.8  # 64 members, each of which sees one position of the map
