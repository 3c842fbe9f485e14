"""MIMO: one network for the inputs of all members."""

import pytest
import torch
from same import near
from small_networks import clip, cnn, images, logits, mlp, moved, resnet, vit
from torch import nn

from uqlab import ensembles, models, training


def standardized():
    torch.manual_seed(0)
    return nn.Sequential(
        models.Standardize([0.4], [0.2]), models.vit(8, 4, width=16, heads=2, classes=3)
    ).eval()


NETWORKS = pytest.mark.parametrize(
    "network", [mlp, cnn, resnet, vit, clip, standardized]
)


@NETWORKS
def test_a_member_is_the_backbone_with_a_new_classifier(network):
    net, (x, _) = network(), images()
    ensemble = ensembles.mimo(net, 3)
    together = ensemble(x)
    for m in range(3):
        member = ensemble.member(m)
        own = {k: v for k, v in member.state_dict().items() if v.shape[:1] == (3,)}
        member.load_state_dict(net.state_dict() | own)
        near(logits(member, x), together[m])


@NETWORKS
def test_each_member_answers_for_its_own_input(network):
    """Weights and inputs permuted alike: the answers are permuted."""
    ensemble, x = moved(ensembles.mimo(network(), 3)), torch.rand(3, 4, 1, 8, 8)
    before, order = ensemble.forward_each(x).detach(), torch.tensor([2, 0, 1])
    assert not torch.allclose(ensemble.forward_each(x[order])[0], before[order][0])
    first, head = (
        ensemble.network.get_submodule(name) for name in (ensemble.first, ensemble.head)
    )
    first.weight.data = first.weight.data.unflatten(1, (3, -1))[:, order].flatten(1, 2)
    for p in head.parameters():
        p.data = p.data.unflatten(0, (3, -1))[order].flatten(0, 1)
    near(ensemble.forward_each(x[order]), before[order])


@pytest.mark.parametrize("rho", [0.0, 0.25, 1.0])
def test_inputs_are_shared_as_often_as_rho_says_and_targets_go_with_them(rho):
    ensemble, seen, targets = (
        ensembles.mimo(models.mlp(1, (4,), 40), 3, rho, repeats=5),
        [],
        [],
    )

    def look(x, _):
        seen.append(x.clone())
        return x

    def loss(outputs, labels):
        targets.append(labels)
        return outputs.square().mean((1, 2))

    x = torch.arange(40.0).unsqueeze(1) / 40
    settings = {"epochs": 2, "lr": 1e-6, "batch_size": 16, "progress": False}
    training.fit(ensemble, x, torch.arange(40), loss=loss, augment=look, **settings)
    assert [len(part[0]) for part in seen] == [80, 80, 40] * 2
    for inputs, labels in zip(seen, targets, strict=True):
        assert torch.equal(inputs[..., 0], labels / 40)
        assert all(len(row.unique()) == len(row) / 5 for row in labels)
        same = (labels[0] == labels[1]).float().mean().item()
        assert same == 1 if rho == 1 else rho <= same < rho + 0.25
    history = training.fit(ensemble, x, torch.arange(40) % 4, **settings)
    assert history.loss.shape == (2, 3)
    assert 3 < history.loss.mean() < 5  # log 40: repeats do not count twice


def test_with_rho_1_it_is_one_network_with_several_classifiers():
    """All members see the same, so the first layer has one weight in three places; else it learns."""
    x, y = images(12)
    for rho in (1.0, 0.0):
        ensemble = ensembles.mimo(cnn(), 3, rho)
        training.fit(ensemble, x, y, epochs=3, lr=0.1, batch_size=4, progress=False)
        first, second, third = (
            ensemble.network.get_submodule(ensemble.first)
            .weight.unflatten(1, (3, -1))
            .unbind(1)
        )
        apart = max(
            (first - second).abs().max().item(), (first - third).abs().max().item()
        )
        assert apart < 1e-5 if rho == 1 else apart > 1e-3
