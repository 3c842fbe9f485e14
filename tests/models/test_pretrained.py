"""CIFAR-10 networks trained by others, where $UQLAB_DATA holds them: the published errors come out."""

import math
import os
import pathlib

import pytest
import torch
from torch import nn

from uqlab import data, metrics, models, training
from uqlab.extraction import tiles

FOLDER = pathlib.Path(os.environ.get("UQLAB_DATA") or "nowhere")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean, standard deviation
FIVE = {
    f"ensemble_resnet20_{run}.th": error
    for run, error in enumerate((7.58, 7.94, 7.49, 7.70, 7.57), 1)
}


def needs(*files):
    missing = [file for file in files if not (FOLDER / file).exists()]
    return pytest.mark.skipif(
        bool(missing), reason=f"$UQLAB_DATA does not hold {', '.join(missing)}"
    )


def network(file, depth=20):
    weights = data.file(f"resnet_cifar10/{file}", root=FOLDER)
    return nn.Sequential(
        models.Standardize(*IMAGENET),
        models.load_weights(models.cifar_resnet(depth), weights),
    ).eval()


def predict(model, inputs):
    """Channels last, which is half as fast again on a CPU."""
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    return training.predict(
        model.to(memory_format=torch.channels_last), inputs, batch_size=125
    )


def error(logits, labels):
    return 100 * (1 - metrics.accuracy(logits, labels))


def margin(percent, count):
    """Three standard deviations of the error (%) of `count` of the 10,000 images, drawn without replacement."""
    return (
        300
        * math.sqrt(percent / 100 * (1 - percent / 100) / count * (1 - count / 10_000))
        + 0.02
    )


@needs("cifar-10-batches-bin", "resnet_cifar10")
@pytest.mark.parametrize(
    ("depth", "file", "percent", "count"),
    [
        (20, "resnet20-12fca82f.th", 8.27, 2000),  # within 1.7 points
        (32, "resnet32-d509ac18.th", 7.37, 1000),  # within 2.4 points
        (44, "resnet44-014dd654.th", 6.89, 1000),  # 2.3
        (56, "resnet56-4bfd9763.th", 6.61, 2000),  # 1.5
    ],
)
def test_published_errors_come_out(depth, file, percent, count):
    test = data.load("cifar10", "test", root=FOLDER, limit=count)
    found = error(predict(network(file, depth), test.inputs), test.labels)
    assert found == pytest.approx(percent, abs=margin(percent, count))


@needs("cifar-10-batches-bin", "resnet_cifar10")
def test_five_runs_are_better_together():
    test = data.load("cifar10", "test", root=FOLDER, limit=2000)
    logits = torch.cat([predict(network(file), test.inputs) for file in FIVE])
    alone = [error(each[None], test.labels) for each in logits]
    for found, percent in zip(alone, FIVE.values(), strict=True):
        assert found == pytest.approx(percent, abs=margin(percent, 2000))  # 1.6 points
    assert error(logits, test.labels) == pytest.approx(
        5.46, abs=margin(5.46, 2000)
    )  # 1.4
    assert error(logits, test.labels) < min(alone) - 0.5
    mixed = logits.log_softmax(-1).logsumexp(0) - math.log(len(FIVE))
    losses = torch.nn.functional.nll_loss(mixed, test.labels, reduction="none")
    spread = 3 * losses.std().item() / math.sqrt(2000)  # three standard errors
    assert spread < 0.07
    assert metrics.nll(logits, test.labels) == pytest.approx(0.184, abs=spread)


@needs("cifar-10-batches-bin", "resnet_cifar10")
def test_tiles_of_a_trained_network():
    test, model = (
        data.load("cifar10", "test", root=FOLDER, limit=300),
        network("resnet20-12fca82f.th"),
    )
    own = predict(model, test.inputs)
    for size in (1, 2, 4, 8):
        logits = predict(tiles(model, size), test.inputs)
        torch.testing.assert_close(logits.mean(0), own[0], atol=1e-4, rtol=1e-4)
    assert (
        metrics.accuracy(logits, test.labels) > 0.8
    )  # 64 members, each of which sees one position of the map
