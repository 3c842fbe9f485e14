"""What every ensemble keeps to: frozen is frozen, members are apart, and it does not show how many go at once."""

import threading

import pytest
import torch
import torch.nn.functional as F
from same import near
from small_networks import EVERY, bert, moved
from torch import nn

from uqlab import ensembles, models, training
from uqlab.core import devices
from uqlab.ensembles.layers import MemberDropout, active_members, joined, sharded


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
        monkeypatch.setattr(devices, "ONE_THREAD", 0)
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
    assert list(ensemble.shared_parameters().values()) == [2, 2]
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
def test_two_threads_may_use_one_ensemble():
    """Which members are in a pass belongs to the call: a pass of another thread in the middle of it changes nothing."""
    ensemble = moved(ensembles.lora(models.mlp(8, (6,), 3, dropout=0.0), 2, 2))
    ensemble.chunk = 1
    x = torch.randn(5, 8)
    expected = ensemble(x).detach()
    inside, resumed, found = threading.Event(), threading.Event(), []

    def wait(*_):
        if (
            threading.current_thread() is not threading.main_thread()
            and not inside.is_set()
        ):
            inside.set()
            assert resumed.wait(30)

    hook = ensemble.network[1].register_forward_pre_hook(
        wait
    )  # before the first member layer
    other = threading.Thread(target=lambda: found.append(ensemble(x).detach()))
    other.start()
    assert inside.wait(30)
    near(ensemble(x), expected)
    with active_members(slice(1, 2)):
        resumed.set()
        other.join(30)
    hook.remove()
    near(found[0], expected)


def test_dropout_noise_does_not_depend_on_chunks_and_short_batches():
    """Eight members in chunks are four and four: with a last batch of another size, which makes other chunks, too."""
    x, y = torch.rand(11, 8), torch.arange(11) % 3

    def fitted(members, chunks):
        torch.manual_seed(0)
        ensemble = ensembles.lora(models.mlp(8, (12, 6), 3, dropout=0.5), members, 2)
        ensemble.members_per_pass = lambda inputs: chunks.get(
            inputs.shape[1], ensemble.members
        )
        training.fit(ensemble, x, y, epochs=3, lr=0.1, batch_size=6, progress=False)
        return ensemble(x).detach()

    whole = fitted(8, {6: 3, 5: 8})
    halves = [fitted(members, {6: 4, 5: 2}) for members in ("0:4", "4:8")]
    near(whole, torch.cat(halves))


def test_a_stream_of_noise_goes_on_where_its_member_left_it():
    whole, parts = MemberDropout(3), MemberDropout(3)
    x = torch.ones(3 * 2, 50_000)
    expected = [whole(x) for _ in range(3)]
    found = []
    for step in range(3):
        rows = [slice(0, 2), slice(2, 3)] if step != 1 else [slice(0, 1), slice(1, 3)]
        for some in rows:
            with active_members(some):
                found.append(parts(x[: 2 * len(range(3)[some])]))
    near(torch.cat(found), torch.cat(expected))


def test_a_part_of_the_members_keeps_their_noise():
    whole, x = MemberDropout(3), torch.ones(3 * 2, 100)
    whole.reseed([5, 6, 7])
    parts = [sharded(whole, rows) for rows in (slice(0, 1), slice(1, 3))]
    again = joined(parts)
    expected = whole(x)
    found = [parts[0](x[:2]), parts[1](x[2:])]
    near(torch.cat(found), expected)
    near(again(x), expected)


def test_a_member_of_a_deep_ensemble_is_a_backbone_whose_dropout_becomes_the_members():
    deep = ensembles.deep(lambda: models.mlp(8, (6,), 3, dropout=0.5), 2, fold=False)
    ensemble = ensembles.lora(deep.member(1), 3, 2)
    assert [layer.members for layer, _, _ in ensemble.noise_layers()] == [3]


class Memory(nn.Module):
    """A network whose device holds so many rows at once."""

    def __init__(self, rows):
        super().__init__()
        self.layer, self.rows, self.seen = nn.Linear(4, 3), rows, []

    def forward(self, x):
        if len(x) > self.rows:
            raise torch.OutOfMemoryError("out of memory")
        self.seen.append(len(x))
        return self.layer(x)


def test_fewer_members_go_through_where_memory_runs_out():
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    roomy, tight = (
        ensembles.deep(lambda rows=rows: Memory(rows), 8, fold=True)
        for rows in (100, 13)
    )
    expected = training.predict(roomy, x)
    near(training.predict(tight, x), expected)
    assert max(tight.network.seen) == 12  # two members of six inputs
    settings = {"epochs": 1, "lr": 0.1, "batch_size": 6, "progress": False, "clip": 1.0}
    for ensemble in (roomy, tight):
        training.fit(ensemble, x, y, **settings)
    near(tight(x), roomy(x))


def test_fewer_inputs_go_through_where_one_member_is_too_much():
    x = torch.randn(50, 4)
    roomy, tight = (
        ensembles.deep(lambda rows=rows: Memory(rows), 4, fold=True)
        for rows in (1000, 7)
    )
    near(training.predict(tight, x), training.predict(roomy, x))
    none = ensembles.deep(lambda: Memory(0), 2, fold=True)
    with pytest.raises(torch.OutOfMemoryError):
        training.predict(none, x)
