"""Ensembles: one program of all members is the members run one by one."""

import torch
from same import near

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


def test_from_members_wraps_without_copying():
    nets = [small_mlp().eval() for _ in range(3)]
    ensemble = ensembles.from_members(nets)
    x = torch.randn(5, 16)
    assert ensemble.member(1) is nets[1]
    near(ensemble(x), torch.stack([net(x) for net in nets]))
