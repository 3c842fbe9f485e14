"""Shards of an ensemble: trained on several devices or machines, and joined."""

import copy
import itertools
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from uqlab.core.checks import ArrayLike, at_least
from uqlab.core.files import StrPath
from uqlab.ensembles import (
    GENERATOR,
    Ensemble,
    concatenate,
    from_pretrained,
    member_range,
)
from uqlab.training.loop import fit


def fit_sharded(
    make_ensemble: Callable[[range], Ensemble],
    data: Any,
    labels: ArrayLike | None = None,
    *,
    members: int | str | range,
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
    members : int, str or range
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
    TypeError
        For a `make_ensemble` that cannot be sent to processes.
    ValueError
        For numbers below 1, an ensemble whose members train something together, and
        what `fit` refuses.
    """
    ids = member_range(members)
    count = min(at_least("shards", shards), len(ids))
    if isinstance(client, ProcessPoolExecutor):
        _check_sent(make_ensemble)
    parts = _parts(ids, count)
    place = Path(folder).expanduser().absolute()  # workers stand elsewhere
    places = [place / f"{part.start}-{part.stop}" for part in parts]
    # All are made before one is trained: threads have torch's generator in common.
    made = [_Shard(make_ensemble, part) for part in parts]
    _check_apart([shard.ensemble for shard in made])
    jobs = [
        client.submit(_train, shard, number, where, _own(data), labels, settings)
        for number, (shard, where) in enumerate(zip(made, places, strict=True))
    ]
    for error in [job.exception() for job in jobs]:  # when all have ended
        if error:
            error.add_note(f"called again, fit_sharded goes on from {folder}")
            raise error
    each = [shard.ensemble for shard in made]
    return concatenate(list(map(from_pretrained, places, each)))


def _parts(ids, count):
    """Return the numbers in so many parts, as equal as can be."""
    bounds = [i * len(ids) // count for i in range(count + 1)]
    return [ids[low:high] for low, high in itertools.pairwise(bounds)]


class _Shard:
    """Some members with a network object of their own; a process makes them anew."""

    def __init__(self, make_ensemble, part):
        self.how = make_ensemble, part
        with GENERATOR:
            self.ensemble = copy.deepcopy(make_ensemble(part))

    def __reduce__(self):
        return _Shard, self.how


def _train(shard, number, where, data, labels, settings):
    """Train a shard, or go on with it, and leave it in its folder."""
    ensemble, count = shard.ensemble, torch.cuda.device_count()
    if count:
        ensemble.to(f"cuda:{number % count}")
    fit(ensemble, data, labels, resume=where, **{"progress": False, **settings})
    ensemble.save_pretrained(where)
    if count:
        ensemble.cpu()


def _check_apart(shards):
    """Raise what joining them would raise once they are trained."""
    concatenate(shards)
    if shards[0].shared_parameters():
        raise ValueError(
            "members of shards must train nothing together; train the ensemble as a "
            "whole by fit"
        )


def _own(data):
    """Return a loader that draws for itself, also in a thread; its data are one."""
    if not isinstance(data, DataLoader):
        return data
    running = data._iterator  # of workers that persist
    return copy.deepcopy(data, {id(data.dataset): data.dataset, id(running): None})


def _check_sent(make_ensemble):
    try:
        pickle.dumps(make_ensemble)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            "make_ensemble must be picklable for a pool of processes, such as a "
            f"function at the top of a module: {error}"
        ) from error
