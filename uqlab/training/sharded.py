"""Shards of an ensemble: trained on several devices or machines, and joined."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from uqlab.core.checks import ArrayLike, at_least
from uqlab.core.files import StrPath
from uqlab.ensembles import GENERATOR, Ensemble, concatenate, member_range
from uqlab.training.loop import NAME, Checkpoint, fit


def fit_sharded(
    make_ensemble: Callable[[range], Ensemble],
    data: Any,
    labels: ArrayLike | None = None,
    *,
    members: int | range,
    client: Any,
    shards: int,
    folder: StrPath,
    **settings: Any,
) -> Ensemble:
    """Train shards of an ensemble wherever a client runs them, and join them.

    Without dropout this is `fit` of the whole ensemble, to rounding, because member m
    depends on (seed, m) alone. Called again after a worker or a machine was lost, it
    goes on from the last epochs that were finished, and trains no shard twice.

    Parameters
    ----------
    make_ensemble : callable
        The members' numbers -> their ensemble, not trained:
        `lambda ids: ensembles.lora(backbone, ids)`. A pool of processes needs a
        function at the top of a module.
    data, labels
        As in `fit`. They are sent to each worker; of a `Dataset` of files the names.
    members : int or range
        Of the whole ensemble.
    client
        Anything with `submit`: an executor of `concurrent.futures` or of submitit, a
        client of Dask. With CUDA shard i takes device i % count of those that its
        worker sees.
    shards : int
        How many; at most one for each member.
    folder : str or path
        That all workers see; it holds a folder for each shard.
    **settings
        Of `fit`: epochs, lr, ...

    Returns
    -------
    Ensemble
        The whole, in evaluation mode; with CUDA it is on the CPU.

    Raises
    ------
    ValueError
        For numbers below 1, an ensemble whose members train something together, and
        what `fit` refuses.
    """
    ids = member_range(members)
    made = _shards(make_ensemble, ids, min(at_least("shards", shards), len(ids)))
    place = Path(folder).expanduser().absolute()  # workers stand elsewhere
    places = [place / f"{shard.part.start}-{shard.part.stop}" for shard in made]
    jobs = []
    for number, (shard, where) in enumerate(zip(made, places, strict=True)):
        given = number, where, _own(data), labels, settings
        jobs.append(client.submit(_train, shard, *given))
    for error in [job.exception() for job in jobs]:  # when all have ended
        if error:
            error.add_note(f"called again, fit_sharded goes on from {folder}")
            raise error
    return concatenate(list(map(_read, made, places))).eval()


def _shards(make_ensemble, ids, count):
    """Return so many shards; ValueError if they could not be joined."""
    bounds = [i * len(ids) // count for i in range(count + 1)]
    parts = [ids[low:high] for low, high in itertools.pairwise(bounds)]
    # All are made before one is trained: threads have torch's generator in common.
    made = [_Shard(make_ensemble, part) for part in parts]
    if made[0].ensemble.shared_parameters():
        raise ValueError(
            "members of shards must train nothing together; train the ensemble as a "
            "whole by fit"
        )
    concatenate([shard.ensemble for shard in made])
    return made


def _read(shard, where):
    """Return a shard's ensemble with the weights that its training left in a folder."""
    shard.ensemble.cpu().load_state_dict(Checkpoint.read(where / NAME)["weights"])
    return shard.ensemble


def _own(data):
    """Return a loader that draws for itself, also in a thread; its data are one."""
    if not isinstance(data, DataLoader):
        return data
    running = data._iterator  # of workers that persist
    return copy.deepcopy(data, {id(data.dataset): data.dataset, id(running): None})


class _Shard:
    """Some members with their own network object; a process makes them anew."""

    def __init__(self, make_ensemble, part):
        self.make_ensemble, self.part = make_ensemble, part
        with GENERATOR:
            self.ensemble = copy.deepcopy(make_ensemble(part))

    def __reduce__(self):
        return _Shard, (self.make_ensemble, self.part)


def _train(shard, number, where, data, labels, settings):
    """Train a shard, or go on with it, and leave its state in a folder."""
    if count := torch.cuda.device_count():
        shard.ensemble.to(f"cuda:{number % count}")
    settings = {"progress": False, **settings}
    fit(shard.ensemble, data, labels, resume=where, **settings)
