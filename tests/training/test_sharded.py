"""Shards that a client trains: joined they are the whole, also after a worker was killed."""

import os
import signal
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from uqlab import ensembles, models, training

X = torch.rand(60, 12, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 3
FIT = {"epochs": 3, "lr": 0.05, "momentum": 0.9, "batch_size": 16, "seed": 4}


def network():
    return models.mlp(12, (16, 8), classes=3, dropout=0.0)


def deep(ids):
    return ensembles.deep(network, ids, seed=3)


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def deep_convolutions(ids):
    return ensembles.deep(convolutions, ids, seed=3)


def lora(ids):
    torch.manual_seed(0)
    return ensembles.lora(network(), ids, 2, seed=3)


def masks(ids):
    from uqlab import extraction

    torch.manual_seed(0)
    return extraction.masks(network(), ids, seed=3)


@pytest.mark.parametrize("make", [deep, deep_convolutions, lora, masks])
@pytest.mark.parametrize("members", [5, range(3, 8)])
def test_shards_in_threads_are_the_whole(make, members, tmp_path):
    ids = range(5) if members == 5 else members
    whole = make(ids)
    training.fit(whole, X, Y, progress=False, **FIT)
    with ThreadPoolExecutor(3) as client:
        joined = training.fit_sharded(
            make, X, Y, members=members, client=client, shards=3, folder=tmp_path, **FIT
        )
    assert joined.member_ids == whole.member_ids
    assert_close(joined(X), whole(X), rtol=1e-5, atol=1e-5)
    assert (joined(X) - make(ids).eval()(X)).abs().max() > 1e-4


def test_a_shard_that_is_done_is_not_trained_again(tmp_path):
    done = []
    more = {"members": 4, "shards": 2, "folder": tmp_path, "callbacks": [done.append]}
    with ThreadPoolExecutor(2) as client:
        for _ in range(2):
            training.fit_sharded(deep, X, Y, client=client, **more, **FIT)
        assert len(done) == 2 * FIT["epochs"]
        with pytest.raises(ValueError, match="of another run") as caught:
            training.fit_sharded(deep, X, 2 - Y, client=client, **more, **FIT)
    assert "called again" in caught.value.__notes__[0]


class Killed:
    """A callback that kills its process once, in the second epoch of the members from 2 on."""

    def __init__(self, mark):
        self.mark = Path(mark)

    def __call__(self, state):
        if (
            state.epoch == 2
            and 2 in state.ensemble.member_ids
            and not self.mark.exists()
        ):
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_is_no_loss(tmp_path):
    """Of four processes; the pool is broken then, and a new one goes on."""
    whole = deep(8)
    training.fit(whole, X, Y, progress=False, **FIT)
    more = {"members": 8, "shards": 4, "folder": tmp_path / "run"}
    more["callbacks"] = [Killed(tmp_path / "killed")]
    spawn = get_context("spawn")
    with ProcessPoolExecutor(4, spawn) as client, pytest.raises(BrokenProcessPool):
        training.fit_sharded(deep, X, Y, client=client, **more, **FIT)
    assert (tmp_path / "killed").exists()
    with ProcessPoolExecutor(4, spawn) as client:
        joined = training.fit_sharded(deep, X, Y, client=client, **more, **FIT)
    assert_close(joined(X), whole(X), rtol=1e-5, atol=1e-5)


def together(ids):
    torch.manual_seed(0)
    return ensembles.batch(network(), ids, additive=True, seed=3)


def test_members_that_train_something_together_are_refused_before_it_costs(tmp_path):
    epochs = []
    with (
        ThreadPoolExecutor(2) as client,
        pytest.raises(ValueError, match="as a whole"),
    ):
        training.fit_sharded(
            together, X, Y, members=4, shards=2, client=client, folder=tmp_path,
            callbacks=[epochs.append], **FIT,
        )  # fmt: skip
    assert not epochs


@pytest.mark.parametrize("replacement", [False, True])
def test_shards_in_threads_do_not_draw_from_one_loader(replacement, tmp_path):
    """With replacement torch draws the rows of an epoch in parts."""

    def loader():
        data, generator = TensorDataset(X, Y), torch.Generator()
        how = {"replacement": replacement, "num_samples": 600 if replacement else 60}
        sampler = RandomSampler(data, generator=generator, **how)
        return DataLoader(data, 16, sampler=sampler)

    whole = deep(range(4))
    training.fit(whole, loader(), progress=False, **FIT)
    more = {"members": 4, "shards": 4, "folder": tmp_path}
    with ThreadPoolExecutor(4) as client:
        joined = training.fit_sharded(deep, loader(), client=client, **more, **FIT)
    assert_close(joined(X), whole(X), rtol=1e-4, atol=1e-4)
