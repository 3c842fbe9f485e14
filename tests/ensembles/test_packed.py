"""Packed-Ensembles: narrow networks side by side, equal to networks that are narrow, and apart."""

import pytest
import torch
from networks import logits
from same import near
from small_networks import images, vit
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from uqlab import ensembles, models, training

PIXELS = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}


def narrow_vit():
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=1,
            intermediate_size=16,
            **PIXELS,
        )
    )


NETWORKS = {  # twice as wide, and as wide as a member is
    "mlp": (lambda: models.mlp(64, (12, 6), 3), lambda: models.mlp(64, (6, 3), 3)),
    "cnn": (lambda: models.small_cnn(3, width=8), lambda: models.small_cnn(3, width=4)),
    "vit": (vit, narrow_vit),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_packed_is_an_ensemble_of_networks_of_that_width(name):
    wide, narrow = NETWORKS[name]
    together, apart = (
        ensembles.packed(wide(), 3, 1.5, seed=5),
        ensembles.deep(narrow, 3, seed=5),
    )
    x, y = images(12)
    near(together.eval()(x), apart.eval()(x))
    for ensemble in (together, apart):
        training.fit(ensemble, x, y, epochs=2, lr=0.05, batch_size=4, progress=False)
    near(together(x), apart(x))
    for m in range(3):
        near(logits(together.member(m), x), logits(apart.member(m), x))


def test_shortcuts_without_weights_follow_the_widths():
    """He et al.'s option A fills with zeros as many channels as are missing, also an odd number of them."""
    ensemble, x = (
        ensembles.packed(models.cifar_resnet(8, 3), 3, 1.7).eval(),
        torch.rand(2, 3, 8, 8),
    )
    member = ensemble.member(1)
    assert [member.layer3[0].conv1.weight.shape[axis] for axis in (1, 0)] == [19, 37]
    near(ensemble(x)[1], member(x))


@pytest.mark.parametrize("members", [3, 4])
def test_widths_are_rounded_up_and_inputs_and_classes_stay(members):
    net = nn.Sequential(nn.Conv2d(1, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.Flatten(), nn.Linear(360, 7), nn.ReLU(),
                        nn.Linear(7, 3))  # fmt: skip
    member = ensembles.packed(net, members, 2.0).member(0)
    channels, features = (7, 5) if members == 3 else (5, 4)
    shapes = [list(p.shape) for p in member.parameters() if p.ndim > 1]
    assert shapes == [[channels, 1, 3, 3], [features, channels * 36], [3, features]]
    double = ensembles.packed(net.double(), members, 2.0)
    assert double(images()[0].double()).shape == (members, 4, 3)
