"""Convolutions of implicit ensembles: LoRA's kernel of low rank beside a frozen one, BatchEnsemble's scaling."""

import pytest
import torch
from same import near, unchanged
from small_networks import cnn, count, images, moved, owned, resnet
from torch import nn
from torch.func import functional_call

from uqlab import ensembles, training
from uqlab.ensembles import LowRank, Scaled

SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": "same"}]
)


@SETTINGS
@pytest.mark.parametrize(("size", "scale"), [(1, 1.0), (3, 1.0), (3, -2.5)])
def test_it_is_a_convolution_with_another_kernel(size, scale, settings):
    torch.manual_seed(0)
    plain, x = nn.Conv2d(2, 5, size, **settings), torch.rand(4, 2, 9, 9)
    low = LowRank(torch.randn(2, 2 * size**2), torch.randn(5, 2), scale)
    kernel = low(plain.weight)
    update = scale * low.lora_B @ low.lora_A
    near((kernel - plain.weight).flatten(1), update)
    # A convolution to two channels, and one of 1 x 1.
    down, up = (
        nn.Conv2d(2, 2, size, **settings, bias=False),
        nn.Conv2d(2, 5, 1, bias=False),
    )
    down.weight.data = low.lora_A.data.view_as(down.weight)
    up.weight.data = low.lora_B.data.view_as(up.weight)
    member = functional_call(plain, {"weight": kernel}, (x,))
    near(member, plain(x) + scale * up(down(x)))


@SETTINGS
def test_batch_ensemble_scales_the_channels_of_one_kernel(settings):
    torch.manual_seed(0)
    plain, x = nn.Conv2d(2, 5, 3, **settings), torch.rand(4, 2, 9, 9)
    scaled = Scaled(torch.randn(5), torch.randn(2))
    member = functional_call(plain, {"weight": scaled(plain.weight)}, (x,))
    bias = plain.bias.view(-1, 1, 1)
    inputs = x * scaled.s.view(-1, 1, 1)
    near(member, (plain(inputs) - bias) * scaled.r.view(-1, 1, 1) + bias)


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
    ensemble.chunk_size = 2
    near(ensemble(x), together)
    with unchanged(backbone):
        training.fit(ensemble, x, y, epochs=1, lr=0.02, batch_size=4, progress=False)
    ensemble.save_pretrained(tmp_path)
    near(ensembles.from_pretrained(tmp_path, network())(x), ensemble(x))
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
        assert owned(ensembles.lora(cnn(), 2, 9), LowRank)["0"].lora_A.shape[1] == 8
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        ensembles.lora(cnn(), 2, 0)
