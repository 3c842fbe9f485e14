"""Convolutions of implicit ensembles: LoRA's kernel of low rank beside a frozen one, BatchEnsemble's scaling."""

import pytest
import torch
from small_networks import cnn, count, images, moved, resnet
from torch import nn

from uqlab import ensembles, training
from uqlab.ensembles import BatchConv2d, LoRAConv2d, MemberLayer

SETTINGS = pytest.mark.parametrize("settings", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": "same"}])


@SETTINGS
@pytest.mark.parametrize(("size", "scale"), [(1, 1.0), (3, 1.0), (3, -2.5)])
def test_it_is_a_convolution_with_another_kernel(size, scale, settings):
    torch.manual_seed(0)
    plain, x = nn.Conv2d(2, 5, size, **settings), torch.rand(3 * 4, 2, 9, 9)
    layer = LoRAConv2d(plain, 2, 10.0, [torch.Generator().manual_seed(m) for m in range(3)], scale)
    torch.testing.assert_close(layer(x), plain(x))
    layer.up.data.normal_()
    for m, rows in enumerate(x.split(4)):
        member = layer.member(m)
        update = (member.weight - plain.weight).flatten(1)
        torch.testing.assert_close(update, scale * layer.up[m] @ layer.down[m].flatten(1), rtol=1e-4, atol=1e-5)
        assert torch.linalg.matrix_rank(update, rtol=1e-4) == 2 or size == 1
        torch.testing.assert_close(layer(x).split(4)[m], member(rows), rtol=1e-4, atol=1e-4)


@SETTINGS
def test_batch_ensemble_scales_the_channels_of_one_kernel(settings):
    torch.manual_seed(0)
    plain, x = nn.Conv2d(2, 5, 3, **settings), torch.rand(3 * 4, 2, 9, 9)
    generators = [torch.Generator().manual_seed(m) for m in range(3)]
    torch.testing.assert_close(BatchConv2d(plain, 0.0, generators)(x), plain(x))
    layer = BatchConv2d(plain, 0.5, generators)
    layer.bias.data.normal_()
    for m, rows in enumerate(x.split(4)):
        member = layer.member(m)
        update = layer.left[m][:, None, None, None] * layer.right[m][:, None, None]
        torch.testing.assert_close(member.weight, plain.weight * update)
        torch.testing.assert_close(layer(x).split(4)[m], member(rows), rtol=1e-4, atol=1e-5)


KINDS = {
    "lora": (LoRAConv2d, lambda backbone, members: ensembles.lora(backbone, members, 2, seed=3)),
    "lora, all trained": (
        LoRAConv2d, lambda backbone, members: ensembles.lora(backbone, members, 2, seed=3, train_backbone=True)
    ),
    "batch": (BatchConv2d, lambda backbone, members: ensembles.batch(backbone, members, seed=3)),
}  # fmt: skip


@pytest.mark.parametrize("network", [cnn, resnet])
@pytest.mark.parametrize("kind", KINDS)
def test_members_are_plain_networks(network, kind, tmp_path):
    (x, y), backbone, (layer, made) = images(12), network(), KINDS[kind]
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    make = lambda members: made(backbone, members)  # noqa: E731
    ensemble = make(3)
    assert sum(isinstance(part, layer) for part in ensemble.modules()) == sum(
        isinstance(part, nn.Conv2d) for part in backbone.modules()
    )
    together = moved(ensemble)(x)
    assert (together[0] - together[1]).abs().max() > 1e-3
    for m in range(3):
        assert not any(isinstance(part, MemberLayer) for part in ensemble.member(m).modules())
        torch.testing.assert_close(ensemble.member(m)(x), together[m], rtol=1e-3, atol=1e-4)
    ensemble.chunk = 2
    torch.testing.assert_close(ensemble(x), together, rtol=1e-4, atol=1e-5)
    training.fit(ensemble, x, y, epochs=1, lr=0.02, batch_size=4, progress=False)
    ensembles.save(ensemble, tmp_path / "e.safetensors")
    torch.testing.assert_close(ensembles.load(tmp_path / "e.safetensors", network())(x), ensemble(x))
    shards = [make("0:1"), make("1:3")]
    torch.testing.assert_close(ensembles.concatenate(shards).eval()(x), make(3).eval()(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    assert ensemble.can_shard() == (kind == "lora")


def test_what_is_trained_and_what_may_be_asked():
    kernels = (1 * 9 + 8) + (8 * 9 + 16) + (16 * 9 + 16)  # A and B of rank 1, for 1 -> 8 -> 16 -> 16 channels
    assert count(ensembles.lora(cnn(), 2, 1)) == 2 * (kernels + 17 * 3)
    assert count(ensembles.lora(cnn(), 2, 2, target=r"^3$")) == 2 * (2 * (8 * 9 + 16) + 17 * 3)
    with pytest.raises(ValueError, match=r"rank must be 1 to 8 for 0 \[8, 1, 3, 3\], got 9"):
        ensembles.lora(cnn(), 2, 9)
    depthwise = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(ValueError, match="matches no linear layer or convolution"):
        ensembles.lora(depthwise, 2, 1)
    with pytest.raises(ValueError, match="matches no linear layer before the classifier '11'; there are none"):
        ensembles.batch(cnn(), 2, additive=True)  # which is for linear layers
