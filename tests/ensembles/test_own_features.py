"""Members that see features of their own: masks that are fixed (Masksembles), and norms of their own (FiLM)."""

import pytest
import torch
from same import near
from small_networks import bert, cnn, images, mlp, moved, owned, resnet, vit
from torch import nn

from uqlab import ensembles, models, training


def settled(network):
    """The network with batch statistics and weights that are not those of the start."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and "norm" not in name.lower():
            tensor += 0.3 * torch.rand(tensor.shape, generator=generator)
    return network


def masks_of(ensemble):
    return {
        name: kind
        for name, kind in owned(ensemble, ensembles.Scaled).items()
        if hasattr(kind, "mask")
    }


NETWORKS = pytest.mark.parametrize(
    "network", [mlp, cnn, resnet, vit, bert], ids=lambda make: make.__name__
)
METHODS = pytest.mark.parametrize("method", [ensembles.masksembles, ensembles.film])


# Masksembles ----------------------------------------------------------------------------------------------------------
@NETWORKS
def test_with_scale_1_masksembles_are_the_network(network):
    net, x = network(), torch.randint(1, 50, (4, 7)) if network is bert else images()[0]
    expected = getattr(net(x), "logits", net(x))
    near(ensembles.masksembles(net, 3, 1.0).eval()(x), expected.expand(3, -1, -1))


@pytest.mark.parametrize(
    ("members", "scale"), [(4, 4.0), (4, 2.0), (3, 1.5), (5, 3.0), (3, 2.0), (2, 8.0)]
)
def test_masks_keep_their_share_and_leave_no_feature_out(members, scale):
    """Durasov et al.: each keeps 1 / (S (1 - (1 - 1 / S)^M)) of the features, and every feature is used."""
    drawn = [
        layer.mask
        for layer in masks_of(ensembles.masksembles(cnn(), members, scale)).values()
    ]
    assert [mask.shape[1] for mask in drawn] == [
        8,
        16,
        16,
    ]  # of the convolutions but the first, and of the head
    assert not torch.equal(drawn[1], drawn[2])
    wide = nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 3))
    mask = masks_of(ensembles.masksembles(wide, members, scale))["2"].mask
    share = 1 / (scale * (1 - (1 - 1 / scale) ** members))
    for each in (*drawn, mask):
        assert (each.sum(1) == each.sum(1)[0]).all()
        assert each.amax(0).all()
    assert mask.sum(1)[0] / 512 == pytest.approx(share, abs=0.02)


def test_a_shard_has_the_masks_of_the_whole():
    whole, last = (
        ensembles.masksembles(cnn(), 3),
        ensembles.masksembles(cnn(), range(1, 3), total_members=3),
    )
    for name, layer in masks_of(whole).items():
        assert torch.equal(layer.mask[1:], masks_of(last)[name].mask)
    with pytest.raises(ValueError, match="at least 3, got 2"):
        ensembles.masksembles(cnn(), 3, total_members=2)


@pytest.mark.parametrize("network", [mlp, cnn, resnet])
def test_a_member_is_the_network_without_what_its_mask_leaves_out(network):
    net, x = settled(network()), images()[0]
    ensemble = ensembles.masksembles(net, 3, 2.0, seed=5).eval()
    for m in range(3):
        for name, layer in masks_of(ensemble).items():
            weight = net.get_submodule(name).weight
            expected = weight * layer.mask[m].view(1, -1, *[1] * (weight.ndim - 2))
            near(ensemble.member(m).get_submodule(name).weight, expected)
        hooks = [
            net.get_submodule(name).register_forward_pre_hook(
                lambda _, args, mask=layer.mask[m]: (
                    args[0] * mask.view(1, -1, *[1] * (args[0].ndim - 2)),
                )
            )
            for name, layer in masks_of(ensemble).items()
        ]
        near(net(x), ensemble(x)[m])
        for hook in hooks:
            hook.remove()


def test_a_network_learns_for_its_masks_and_not_for_others():
    """The control: the same trained weights under masks whose features are shuffled."""
    x, y = (
        torch.rand(60, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(60) % 3,
    )
    x[torch.arange(60), y] += 1
    torch.manual_seed(0)
    ensemble = ensembles.masksembles(models.mlp(8, (24, 24), 3, dropout=0.0), 4, 2.0)
    training.fit(
        ensemble,
        x,
        y,
        epochs=30,
        lr=0.02,
        batch_size=20,
        optimizer="adam",
        progress=False,
    )
    logits = ensemble(x).flatten(0, 1)
    for layer in masks_of(ensemble).values():
        layer.mask = layer.mask[
            :,
            torch.randperm(
                layer.mask.shape[1], generator=torch.Generator().manual_seed(1)
            ),
        ]
    own, other = (
        nn.functional.cross_entropy(z, y.repeat(4))
        for z in (logits, ensemble(x).flatten(0, 1))
    )
    assert own < 0.1
    assert other > 2 * own


def test_in_a_transformer_what_follows_the_activation_is_masked():
    names = masks_of(ensembles.masksembles(vit(), 2))
    assert list(names) == ["vit.layers.0.mlp.fc2", "vit.layers.1.mlp.fc2"]
    assert len(masks_of(ensembles.masksembles(bert(), 2))) == 2
    assert list(masks_of(ensembles.masksembles(vit(), 2, target="fc1"))) == [
        "vit.layers.0.mlp.fc1",
        "vit.layers.1.mlp.fc1",
    ]


# FiLM -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "network", [cnn, resnet, vit, bert], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("train_backbone", [True, False])
def test_film_members_differ_in_their_norms_alone(network, train_backbone):
    net, x = network(), torch.randint(1, 50, (4, 7)) if network is bert else images()[0]
    expected = getattr(net(x), "logits", net(x))
    equal = ensembles.film(net, 3, std=0.0, train_backbone=train_backbone).eval()
    near(equal(x), expected.expand(3, -1, -1))
    ensemble = ensembles.film(net, 3, std=0.3, train_backbone=train_backbone)
    if network is not bert:
        training.fit(
            ensemble, *images(9), epochs=2, lr=0.05, batch_size=3, progress=False
        )
    first, second = (ensemble.member(m).state_dict() for m in range(2))
    different = {name for name in first if not torch.equal(first[name], second[name])}
    norms = [
        name
        for name, part in net.named_modules()
        if isinstance(part, nn.BatchNorm2d | nn.LayerNorm)
    ]
    assert different <= {
        f"{name}.{p}"
        for name in norms
        for p in ("weight", "bias", "running_mean", "running_var")
    }
    assert {f"{name}.weight" for name in norms} <= different


@METHODS
@pytest.mark.parametrize("network", [cnn, resnet])
def test_batch_statistics_are_those_of_the_member_s_own_batches(method, network):
    """In training a member is normalised by its own rows: as a plain network on its own batch."""
    ensemble = moved(method(network(), 3)).train()
    x = torch.rand(
        3, 6, 1, 8, 8, generator=torch.Generator().manual_seed(4)
    ) * torch.tensor([1, 2, 3]).view(3, 1, 1, 1, 1)
    plain = [ensemble.member(m).train() for m in range(3)]
    expected = torch.stack([net(rows) for net, rows in zip(plain, x, strict=True)])
    near(ensemble.forward_each(x), expected)
    for m, net in enumerate(plain):
        for name, buffer in ensemble.member(m).named_buffers():
            if "running" in name:
                near(buffer, net.get_buffer(name))
    near(ensemble.eval()(x[0])[1], plain[1].eval()(x[0]))
    norms = [name for name in ensemble.seen if name.endswith("running_mean")]
    assert len(norms) == sum(
        "BatchNorm" in type(p).__name__ for p in plain[0].modules()
    )


# Both -----------------------------------------------------------------------------------------------------------------
