"""Ensembles: one program of all members is the members run one by one."""

import pytest
import torch
from same import near
from torch import nn

from uqlab import ensembles, models


def small_mlp(dropout=0.0):
    return models.mlp(16, (12, 8), classes=4, dropout=dropout)


def test_members_are_plain_networks():
    ensemble = ensembles.deep(lambda: small_mlp(0.5), 5, seed=3).eval()
    x = torch.randn(7, 1, 4, 4)
    logits = ensemble(x)
    for m in range(5):
        member = ensemble.member(m)
        assert [type(part) for part in member] == [
            type(part) for part in small_mlp(0.5)
        ]
        near(logits[m], member(x))
    assert not any(
        torch.allclose(logits[i], logits[j], atol=1e-2)
        for i in range(5)
        for j in range(i)
    )
    assert ensemble.double().member(1)(x.double()).dtype == torch.float64


def test_layers_that_mix_the_batch():
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
    near(ensemble.forward_each(x), expected)


def test_inputs_of_tokens():
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


class Unusual(nn.Module):
    """Its forward mixes the batch, so members must not go through in one batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 2)

    def forward(self, x):
        return self.linear(x - x.mean(0))


def test_a_forward_of_ones_own():
    ensemble = ensembles.deep(Unusual, 2)
    x = torch.randn(3, 16)
    near(ensemble(x)[1], ensemble.member(1)(x))


def test_from_members_wraps_without_copying():
    nets = [small_mlp().eval() for _ in range(3)]
    ensemble = ensembles.from_members(nets)
    x = torch.randn(5, 16)
    assert ensemble.member(1) is nets[1]
    near(ensemble(x), torch.stack([net(x) for net in nets]))


ONE = small_mlp()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ensembles.deep(small_mlp, 0), "at least one member"),
        (lambda: ensembles.deep(lambda: ONE, 2), "same network twice"),
        (lambda: ensembles.from_members([]), "at least one model"),
        (lambda: ensembles.deep(small_mlp, 2).member(2), "choose 0 to 1"),
    ],
)
def test_bad_input(call, error, unchecked):
    with pytest.raises((ValueError, IndexError), match=error):
        call()
