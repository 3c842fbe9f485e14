"""What every ensemble keeps to: frozen is frozen, members are apart, and it does not show how many go at once."""

import threading

import pytest
import torch
import torch.nn.functional as F
from same import near
from small_networks import EVERY, bert, moved
from torch import nn

from uqlab import ensembles, models, training
from uqlab.core import modules


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


# Frozen ---------------------------------------------------------------------------------------------------------------
@EVERY
def test_batch_statistics_of_the_backbone_are_frozen_too(make, monkeypatch):
    """Neither the caller's change nor the ensemble's, so that members do not depend on each other or on the threads."""
    x, y = 3 + 2 * torch.randn(30, 8), torch.arange(30) % 3
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(modules, "ONE_THREAD", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        backbone = normalised()
        before = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
        ensemble = make(backbone)
        training.fit(ensemble, x, y, epochs=2, lr=0.05, batch_size=10, progress=False)
        for owner in (backbone, ensemble.network):
            assert all(
                torch.equal(dict(owner.named_buffers())[name], value)
                for name, value in before.items()
            )
        found.append(ensemble(x).detach())
    near(*found)


def test_a_member_of_its_own_keeps_statistics_of_its_own():
    ensemble = ensembles.deep(normalised, 2)
    training.fit(
        ensemble,
        3 + torch.randn(30, 8),
        torch.arange(30) % 3,
        epochs=1,
        lr=0.1,
        progress=False,
    )
    assert all(ensemble.member(m)[1].running_mean.abs().max() > 0 for m in range(2))


# Shared ---------------------------------------------------------------------------------------------------------------
def test_members_that_share_a_network_follow_their_mean_loss():
    net, other = nn.Linear(4, 3), nn.Linear(4, 3)
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    ensemble = ensembles.from_members([net, other, net])
    assert set(ensemble.shared_parameters()) == set(net.parameters())
    assert not ensemble.can_shard()
    expected = []
    for each in (net, other):
        gradients = torch.autograd.grad(
            F.cross_entropy(each(x), y), list(each.parameters())
        )
        expected.append(
            [
                p.detach() - 0.1 * g
                for p, g in zip(each.parameters(), gradients, strict=True)
            ]
        )
    training.fit(ensemble, x, y, epochs=1, lr=0.1, batch_size=10, progress=False)
    for each, after in zip((net, other), expected, strict=True):
        near(list(each.parameters()), [nn.Parameter(p) for p in after])


# One contract for networks of transformers and tensors by name --------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: ensembles.from_members([bert(), bert()]),
        lambda: ensembles.lora(bert(), 2),
    ],
)
def test_members_take_tensors_by_name(make):
    ensemble = make().eval()
    tokens = {
        "input_ids": torch.randint(50, (3, 7)),
        "attention_mask": torch.ones(3, 7, dtype=torch.int64),
    }
    near(ensemble(tokens)[1], ensemble.member(1)(**tokens).logits)
    near(ensemble(**tokens), ensemble(tokens))


# Members in a pass ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_two_threads_may_use_one_ensemble(mode):
    ensemble = moved(ensembles.lora(models.mlp(8, (6,), 3, dropout=0.0), 4, 2))
    ensemble.mode = mode
    inputs = [torch.randn(5, 8) for _ in range(2)]
    expected = [ensemble(x).detach() for x in inputs]
    found = {}

    def call(number):
        found[number] = [ensemble(inputs[number]).detach() for _ in range(20)]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, each in found.items():
        for logits in each:
            near(logits, expected[number])


class Memory(nn.Module):
    """A network of which a device holds so many rows at once, of as many members as vmap takes."""

    def __init__(self, rows):
        super().__init__()
        self.layer, self.rows = nn.Linear(4, 3), rows

    def forward(self, x):
        members = 1
        if torch._C._functorch.is_batchedtensor(self.layer.weight):
            members = len(torch._C._functorch.get_unwrapped(self.layer.weight))
        if members * len(x) > self.rows:
            raise torch.OutOfMemoryError("out of memory")
        return self.layer(x)


def memories(members, rows):
    ensemble = ensembles.deep(lambda: Memory(100), members)
    ensemble.network.rows = rows
    return ensemble


def test_fewer_members_go_through_where_memory_runs_out():
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    roomy, tight = memories(8, 100), memories(8, 13)
    expected = training.predict(roomy, x)
    near(training.predict(tight, x), expected)
    assert tight.chunk_size == 2  # of six inputs
    settings = {
        "epochs": 1,
        "lr": 0.1,
        "batch_size": 6,
        "progress": False,
        "max_grad_norm": 1.0,
    }
    tight = memories(8, 13)
    for ensemble in (roomy, tight):
        training.fit(ensemble, x, y, **settings)
    near(tight(x), roomy(x))
