"""Shards of an ensemble's members that are trained side by side, one in each thread."""

import copy
import itertools
from collections.abc import Callable
from concurrent import futures

import torch
from torch import nn

from uqlab.core import devices
from uqlab.core.checks import Inputs
from uqlab.core.modules import call
from uqlab.ensembles import Ensemble


class Workers:
    """Shards of an ensemble's members, on a CPU one a thread.

    Members need nothing from each other, so a shard runs through an epoch without
    waiting. What members train together cannot be sharded, nor one network; there every
    product is split over the cores, with a barrier after each, which pays from five
    times as much work. Below, one thread is faster: a transformer of width 32 takes a
    third of the time that it takes in two.

    Parameters
    ----------
    ensemble
        What is trained.
    multiply_adds
        Of all members' outputs in a step; see `devices.ONE_THREAD`.
    apart
        Whether members may train side by side: they share nothing that is trained, and
        no generator.
    make
        Shard -> whatever is needed to train it: its step, with its own optimiser.
    bounds
        The first member of each shard, and the end, of a run that goes on; its shards
        stay as they were, whatever the number of threads is now.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        multiply_adds: int,
        apart: bool,
        make: Callable,
        bounds: list[int] | None = None,
    ):
        members = ensemble.members
        self.threads = self.threads_each = torch.get_num_threads()
        self.device = next(ensemble.parameters()).device
        self.on_cpu = self.device.type == "cpu"
        apart = apart and members > 1
        little = multiply_adds < devices.ONE_THREAD * (1 if apart else 5)
        count = min(self.threads, members) if apart and not little else 1
        if self.on_cpu:
            self.threads_each = 1 if little else self.threads // count
        else:
            count = 1
        self.bounds = bounds or [round(i * members / count) for i in range(count + 1)]
        self.rows = [slice(*pair) for pair in itertools.pairwise(self.bounds)]
        self.shards = [ensemble]
        if len(self.rows) > 1:
            self.shards = [ensemble.shard(rows) for rows in self.rows]
        self.steps = [make(shard) for shard in self.shards]
        self.pool: futures.ThreadPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        # A thread of its own also for a single shard: what `_start` sets is a state of
        # the thread, which must not stay with the caller's.
        if self.on_cpu:
            self.pool = futures.ThreadPoolExecutor(len(self.shards), "", self._start)
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool:
            self.pool.shutdown()
            torch.set_num_threads(self.threads)

    def _start(self):
        torch.set_num_threads(self.threads_each)
        # Long runs meet denormal numbers, which are 100 times slower.
        torch.set_flush_denormal(True)

    def run(self, task: Callable) -> None:
        """Call task(rows, shard, step) for every shard, all shards at once."""
        over_shards = self.pool.map if self.pool else map
        list(over_shards(task, self.rows, self.shards, self.steps))


def draws_noise(network: nn.Module, x: Inputs) -> bool:
    """Return whether a network draws from torch's generator in training, on a CPU."""
    tried = copy.deepcopy(network).train()
    with torch.no_grad(), torch.random.fork_rng([]):
        before = torch.get_rng_state()
        call(tried, x)
        return not torch.equal(before, torch.get_rng_state())
