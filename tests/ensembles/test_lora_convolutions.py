"""Convolutions of implicit ensembles: LoRA's kernel of low rank beside a frozen one, BatchEnsemble's scaling."""

import copy

import pytest
import torch
from same import near, unchanged
from small_networks import cnn, count, generators, images, moved, owned, resnet
from torch import nn

from uqlab import ensembles, training
from uqlab.ensembles import LowRank, MemberModule, Scaled
from uqlab.ensembles.lora import start_of_lora

SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": "same"}]
)


@SETTINGS
@pytest.mark.parametrize(("size", "scale"), [(1, 1.0), (3, 1.0), (3, -2.5)])
def test_it_is_a_convolution_with_another_kernel(size, scale, settings):
    torch.manual_seed(0)
    plain, x = nn.Conv2d(2, 5, size, **settings), torch.rand(3 * 4, 2, 9, 9)
    low = LowRank(
        plain.weight, *start_of_lora(plain.weight, 2, 10.0, generators(3)), scale
    )
    layer = MemberModule(copy.deepcopy(plain), {"weight": low})
    near(layer(x), plain(x))
    low.up.data.normal_()
    for m, rows in enumerate(x.split(4)):
        member = layer.member(m)
        update = (member.weight - plain.weight).flatten(1)
        near(update, scale * low.up[m] @ low.down[m])
        assert torch.linalg.matrix_rank(update, rtol=1e-4) == 2 or size == 1
        near(layer(x).split(4)[m], member(rows))


@SETTINGS
def test_batch_ensemble_scales_the_channels_of_one_kernel(settings):
    torch.manual_seed(0)
    plain, x = nn.Conv2d(2, 5, 3, **settings), torch.rand(3 * 4, 2, 9, 9)
    left, right = torch.ones(3, 5), torch.ones(3, 2)
    scaled = Scaled(plain.weight, 3, nn.Parameter(left), nn.Parameter(right))
    layer = MemberModule(copy.deepcopy(plain), {"weight": scaled})
    near(layer(x), plain(x))
    for p in (scaled.left, scaled.right):
        p.data.normal_(1, 0.5)
    for m, rows in enumerate(x.split(4)):
        member = layer.member(m)
        update = scaled.left[m][:, None, None, None] * scaled.right[m][:, None, None]
        near(member.weight, plain.weight * update)
        near(layer(x).split(4)[m], member(rows))


KINDS = {
    "lora": (LowRank, lambda backbone, members: ensembles.lora(backbone, members, 2, seed=3)),
    "lora, all trained": (
        LowRank, lambda backbone, members: ensembles.lora(backbone, members, 2, seed=3, train_backbone=True)
    ),
    "batch": (Scaled, lambda backbone, members: ensembles.batch(backbone, members, seed=3)),
}  # fmt: skip


@pytest.mark.parametrize("network", [cnn, resnet])
@pytest.mark.parametrize("kind", KINDS)
def test_members_are_plain_networks(network, kind, tmp_path):
    (x, y), backbone, (layer, made) = images(12), network(), KINDS[kind]
    make = lambda members: made(backbone, members)  # noqa: E731
    ensemble = make(3)
    assert len(owned(ensemble, layer)) == sum(
        isinstance(part, nn.Conv2d) for part in backbone.modules()
    )
    together = moved(ensemble)(x)
    assert (together[0] - together[1]).abs().max() > 1e-3
    for m in range(3):
        near(ensemble.member(m)(x), together[m])
    ensemble.chunk = 2
    near(ensemble(x), together)
    with unchanged(backbone):
        training.fit(ensemble, x, y, epochs=1, lr=0.02, batch_size=4, progress=False)
    ensembles.save(ensemble, tmp_path / "e.safetensors")
    near(ensembles.load(tmp_path / "e.safetensors", network())(x), ensemble(x))
    shards = [make("0:1"), make("1:3")]
    near(ensembles.concatenate(shards).eval()(x), make(3).eval()(x))
    assert ensemble.can_shard() == (kind == "lora")


def test_what_is_trained_and_what_may_be_asked():
    kernels = (
        (1 * 9 + 8) + (8 * 9 + 16) + (16 * 9 + 16)
    )  # A and B of rank 1, for 1 -> 8 -> 16 -> 16 channels
    assert count(ensembles.lora(cnn(), 2, 1)) == 2 * (kernels + 17 * 3)
    assert count(ensembles.lora(cnn(), 2, 2, target=r"^3$")) == 2 * (
        2 * (8 * 9 + 16) + 17 * 3
    )
    with pytest.warns(UserWarning, match="largest possible: 0 8"):
        assert ensembles.lora(cnn(), 2, 9).network[0].weight.depth == 8
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        ensembles.lora(cnn(), 2, 0)
