"""Layers and ensembles: the folded program is the members run one by one."""

import pytest
import torch
from same import near
from torch import nn

from uqlab import ensembles, models
from uqlab.ensembles import layers


def small_mlp(dropout=0.0):
    return models.mlp(16, (12, 8), classes=4, dropout=dropout)


def test_folded_equals_its_members():
    ensemble = ensembles.deep(lambda: small_mlp(0.5), 5, seed=3).eval()
    x = torch.randn(7, 1, 4, 4)
    logits = ensemble(x)
    for m in range(5):
        member = ensemble.member(m)
        assert not any(
            isinstance(part, layers.MemberLayer) for part in member.modules()
        )
        near(logits[m], member(x))
    assert not any(
        torch.allclose(logits[i], logits[j], atol=1e-2)
        for i in range(5)
        for j in range(i)
    )
    assert ensemble.double().member(1)(x.double()).dtype == torch.float64


def test_layers_that_mix_the_batch_are_not_folded():
    norm = {"affine": False, "track_running_stats": False}
    for mixing in (lambda: nn.BatchNorm1d(8, **norm), lambda: nn.Softmax(dim=0)):
        ensemble = ensembles.deep(
            lambda mix=mixing: nn.Sequential(nn.Linear(16, 8), mix(), nn.Linear(8, 3)),
            2,
        )
        x = torch.randn(6, 16)
        near(ensemble(x)[1], ensemble.member(1)(x))


def test_each_member_sees_its_own_batch():
    ensemble = ensembles.deep(small_mlp, 3).eval()
    x = torch.randn(3, 5, 16)
    expected = torch.stack([ensemble.member(m)(x[m]) for m in range(3)])
    near(ensemble.forward_members(x), expected)


def test_token_inputs_fold_too():
    make = lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3))  # noqa: E731
    ensemble = ensembles.deep(make, 4)
    x = torch.randn(2, 5, 6)  # [batch, tokens, features]
    near(ensemble(x)[2], ensemble.member(2)(x))


def test_member_depends_on_seed_and_number_alone():
    whole, rest = (
        ensembles.deep(small_mlp, 10, seed=1),
        ensembles.deep(small_mlp, range(4, 10), seed=1),
    )
    x = torch.randn(3, 16)
    torch.manual_seed(99)  # the global generator plays no part, and is left alone
    before = torch.get_rng_state()
    again = ensembles.deep(small_mlp, range(9, 10), seed=1)
    assert torch.equal(before, torch.get_rng_state())
    near(whole.eval()(x)[4:], rest.eval()(x))
    near(whole(x)[9:], again.eval()(x))
    assert not torch.allclose(
        whole(x)[0], ensembles.deep(small_mlp, 1, seed=2).eval()(x)[0]
    )


def test_convolutions_run_separately():
    make = lambda: models.wide_resnet(10, 1, classes=3, channels=1)  # noqa: E731
    ensemble = ensembles.deep(make, 2).eval()
    assert isinstance(ensemble, ensembles.SeparateEnsemble)
    x = torch.randn(4, 1, 16, 16)
    near(ensemble(x)[1], ensemble.member(1)(x))


class Unusual(nn.Module):
    """Its forward mixes the batch, which folding would get wrong."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 2)

    def forward(self, x):
        return self.linear(x - x.mean(0))


def test_a_forward_of_ones_own_is_not_folded_unasked():
    ensemble = ensembles.deep(Unusual, 2)
    x = torch.randn(3, 16)
    near(ensemble(x)[1], ensemble.member(1)(x))
    assert isinstance(ensembles.deep(Unusual, 2, fold=True), ensembles.FoldedEnsemble)


def test_from_members_wraps_without_copying():
    nets = [small_mlp().eval() for _ in range(3)]
    ensemble = ensembles.from_members(nets)
    x = torch.randn(5, 16)
    assert ensemble.member(1) is nets[1]
    near(ensemble(x), torch.stack([net(x) for net in nets]))


def test_dropout_streams_belong_to_members():
    layer = layers.MemberDropout(3, p=0.25)
    layer.reseed([5, 6, 7])
    x = torch.ones(3 * 4, 1000)
    y = layer(x)
    layer.reseed([5, 6, 7])
    near(layer(x), y)  # same seeds, same masks
    alone = layers.MemberDropout(1, p=0.25)
    alone.reseed([6])
    near(alone(x[4:8]), y[4:8])  # member 1 alone draws what it drew among three
    assert not torch.equal(y[:4], y[4:8])
    near(y.unique(), torch.tensor([0, 4 / 3]))
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert torch.equal(layer.eval()(x), x)


def test_dropout_gradient_is_its_mask():
    layer = layers.MemberDropout(2, p=0.5)
    x = torch.randn(4, 50, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    near(x.grad, torch.where(y == 0, 0.0, 2.0))


def test_replace_layers_by_type():
    network = small_mlp()
    names = layers.replace_layers(
        network, nn.Linear, lambda name, module: nn.Linear(1, 1)
    )
    assert len(names) == 3
    assert all(network.get_submodule(name).in_features == 1 for name in names)


ONE = small_mlp()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ensembles.deep(small_mlp, 0), "at least one member"),
        (lambda: ensembles.deep(lambda: ONE, 2), "same network twice"),
        (lambda: ensembles.deep(lambda: models.cifar_resnet(8), 2, fold=True), "all"),
        (lambda: ensembles.from_members([]), "at least one model"),
        (lambda: ensembles.deep(small_mlp, 2).member(2), "choose 0 to 1"),
        (lambda: ensembles.deep(small_mlp, 3).network(torch.ones(4, 16)), "multiple"),
    ],
)
def test_bad_input(call, error, unchecked):
    with pytest.raises((ValueError, IndexError), match=error):
        call()
