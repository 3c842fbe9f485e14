"""Packed-Ensembles: narrow networks side by side, equal to networks that are narrow, and apart."""

import pytest
import torch
from networks import logits
from same import near
from small_networks import bert, images, vit
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from uqlab import ensembles, models, training
from uqlab.ensembles import GroupedLinear

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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: models.small_cnn(3, width=8),
        lambda: models.wide_resnet(10, 1, 3, 1),
        vit,
    ],
)
def test_members_see_nothing_of_each_other(make, gamma, train):
    if make is vit and gamma > 1:
        with pytest.raises(
            ValueError, match="gamma must be 1 in a network of transformers"
        ):
            ensembles.packed(vit(), 3, gamma=2)
        return
    ensemble = ensembles.packed(make(), 3, 2.0, gamma).train(train)
    x = torch.rand(
        3, 4, 1, 8, 8, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    for m in range(3):
        (slope,) = torch.autograd.grad(ensemble.forward_each(x)[m].square().sum(), x)
        assert slope[m].abs().max() > 0
        assert not slope[[other for other in range(3) if other != m]].any()


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


def test_groups_inside_a_member_are_apart():
    layer, plain = GroupedLinear(6, 4, 2), nn.Linear(6, 4)
    with torch.no_grad():
        plain.weight.zero_()
        for g in range(2):
            rows = slice(2 * g, 2 * g + 2)
            plain.weight[rows, 3 * g : 3 * g + 3] = layer.weight[rows, :, 0]
        plain.bias.copy_(layer.bias)
    x = torch.rand(5, 2, 6)
    near(layer(x), plain(x))
    ensemble = ensembles.packed(models.mlp(8, (12, 12, 12), 3), 2, 2.0, gamma=3)
    inner = [type(part) for part in ensemble.member(0) if hasattr(part, "weight")]
    assert inner == [nn.Linear, GroupedLinear, GroupedLinear, nn.Linear]
    convolutions = ensembles.packed(models.small_cnn(3, width=8), 2, 2.0, gamma=2)
    assert [
        part.groups for part in convolutions.modules() if isinstance(part, nn.Conv2d)
    ] == [1, 2, 2]


def test_networks_inside_others_and_texts_become_narrow():
    x = images()[0]
    inside = nn.Sequential(
        nn.Upsample(size=8),
        models.Standardize([0.5], [0.5]),
        models.vit(8, 4, width=16, heads=2),
    )
    assert ensembles.packed(inside, 2, 1.0).eval()(x).shape == (2, 4, 10)
    tokens = torch.randint(1, 50, (4, 7))
    assert ensembles.packed(bert(), 2, 1.0).eval()(tokens).shape == (2, 4, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ensembles.packed(models.mlp(4), 2, 0.0),
            r"alpha must be in \(0, inf\)",
        ),
        (
            lambda: ensembles.packed(models.mlp(4), 2, gamma=0),
            "gamma must be at least 1",
        ),
        (
            lambda: ensembles.packed(
                nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2)), 2
            ),
            "GroupNorm",
        ),
    ],
)
def test_bad_input(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
