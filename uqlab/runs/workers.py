"""Where the runs of a sweep are computed: by threads of this machine, or by the workers of a Dask cluster."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import click

Result = tuple[str, float, str]  # status, seconds, reason


@contextmanager
def connected(
    jobs: int,
    cluster: str | None,
    resources: Mapping[str, float | int] | None,
    stop: Event,
) -> Iterator[tuple[int | None, futures.Executor]]:
    """Yield the number of threads for each run's kernel, and the executor that computes the runs, here or on a cluster.

    At the end of the block, also on Ctrl-C, `stop` ends the runs that this machine still computes.
    """
    if cluster is None:
        from joblib import cpu_count

        pool = futures.ThreadPoolExecutor(jobs)
        try:
            yield max(1, cpu_count() // jobs), pool
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        return
    if jobs > 1:
        raise ValueError(
            "jobs are for this machine alone; on a cluster its workers say how many runs go at a time"
        )
    try:
        from distributed import Client
    except ImportError as error:
        raise ValueError(
            "a cluster needs dask.distributed: pip install 'uqlab[cluster]'"
        ) from error
    try:
        client = Client(cluster, timeout=30, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler at {cluster}: {error}") from error
    with client:
        wanted = resources or {}
        offers = [
            worker.get("resources") or {}
            for worker in client.scheduler_info(-1)["workers"].values()
        ]
        if not any(
            all(each.get(name, 0) >= n for name, n in wanted.items()) for each in offers
        ):
            click.echo(
                f"waiting for a worker{f' that offers {wanted}' if wanted else ''}; now there is none",
                err=True,
            )
        yield None, client.get_executor(pure=False, resources=resources)


def first_line(reason: str) -> str:
    """Return the first line of a reason, no longer than a line of a terminal."""
    return next(iter(reason.strip().splitlines()), "no reason given")[:160]


def results(
    executor: futures.Executor, work: Callable[..., Result], calls: Mapping[Path, tuple]
) -> Iterator[tuple[Path, Result]]:
    """Make the calls in parallel and yield the result of each as soon as it is there.

    work: takes the arguments of a call, and whether to wait for a run that another process is computing. Calls that
    are "busy" are made again at the end, and wait then. When a worker dies Dask gives up all its calls, also harmless
    ones: each is made once more, one by one. Raises ConnectionError if the scheduler is gone.
    """
    later: dict[str, list[Path]] = {"busy": [], "died": []}

    def made(
        paths: Iterable[Path], wait: bool, lost: str = "died"
    ) -> Iterator[tuple[Path, Result]]:
        pending = {executor.submit(work, *calls[path], wait): path for path in paths}
        for future in futures.as_completed(pending):
            try:
                result = future.result()
            except futures.CancelledError as error:
                raise ConnectionError(
                    "the Dask scheduler is gone; the same again does what is missing"
                ) from error
            except Exception as error:
                result = (
                    lost,
                    0.0,
                    first_line(f"its worker died: {type(error).__name__}: {error}"),
                )
            if result[0] in later:
                later[result[0]].append(pending[future])
            else:
                yield pending[future], result

    yield from made(calls, wait=False)
    yield from made(later["busy"], wait=True)
    for path in later["died"]:
        yield from made([path], wait=True, lost="failed")
