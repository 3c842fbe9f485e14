"""Where the runs of a sweep are computed: joblib's threads on this machine, or the workers of a Dask cluster."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import click

from uqlab.runs.execution import first_line

Result = tuple[str, float, str]  # status, seconds, reason


@contextmanager
def connected(
    jobs: int, cluster: str | None, resources: Mapping[str, float | int] | None
) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield the threads of each run's kernel and the arguments of joblib.Parallel, connected to a cluster if asked."""
    from joblib import cpu_count, parallel_config

    if cluster is None:
        yield max(1, cpu_count() // jobs), {"n_jobs": jobs, "prefer": "threads"}
        return
    if jobs > 1:
        raise ValueError("jobs are for this machine alone; on a cluster its workers say how many runs go at a time")
    try:
        from distributed import Client
    except ImportError as error:
        raise ValueError("a cluster needs dask.distributed: pip install 'uqlab[cluster]'") from error
    from joblib._dask import DaskDistributedBackend

    class Backend(DaskDistributedBackend):
        """Joblib's own would wait for ever for a task that Dask has given up because its workers died, and would
        compute in this process what a cluster of one worker should.
        """

        def effective_n_jobs(self, n_jobs):
            return max(2, len(self.client.ncores()))  # type: ignore[arg-type]

        def submit(self, func, callback=None):
            future = super().submit(func, callback)
            future.add_done_callback(lambda done: callback and done.exception() and callback(done.exception()))
            return future

        def retrieve_result_callback(self, out):
            if isinstance(out, BaseException):
                raise out
            return super().retrieve_result_callback(out)

    try:
        client = Client(cluster, timeout=30, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler at {cluster}: {error}") from error
    with client:
        if not client.ncores():
            click.echo("waiting for the cluster's first worker", err=True)
            client.wait_for_workers(1)
        offers = [worker.get("resources") or {} for worker in client.scheduler_info(-1)["workers"].values()]
        if resources and not any(all(each.get(k, 0) >= n for k, n in resources.items()) for each in offers):
            click.echo(f"waiting for a worker that offers {resources}; now none does", err=True)
        with parallel_config(backend=Backend(client=client, resources=resources)):  # type: ignore[arg-type]
            yield None, {"pre_dispatch": "all"}  # a cluster may grow


def results(
    work: Callable[..., tuple], calls: dict[Path, tuple], backend: dict[str, Any]
) -> Iterator[tuple[Path, Result]]:
    """Make the calls in parallel and yield what came of each, as it comes.

    work: called with the arguments of each call and whether to wait for a run that another process is computing;
    returns (folder, status, seconds, reason). Calls that are "busy" are made again at the end, and wait then.
    A worker that dies may take all that run with it. What is left is called again, at first one by one if no result
    has come, so that only the call to blame fails.
    """
    from joblib import Parallel, delayed

    left, alone, wait = dict(calls), False, False
    options: dict[str, Any] = {"return_as": "generator_unordered", "batch_size": 1} | backend
    while left:
        batch, broken = list(left)[: 1 if alone else None], ""
        before = len(left)
        try:
            tasks = [delayed(work)(*left[path], wait) for path in batch]
            for path, *result in cast(Iterator[tuple], Parallel(**options)(tasks)):
                if result[0] != "busy":
                    del left[Path(path)]
                    yield Path(path), cast(Result, tuple(result))
        except Exception as error:
            broken = first_line(f"its worker died: {type(error).__name__}: {error}")
        if broken and alone:
            del left[batch[0]]
            yield batch[0], ("failed", 0.0, broken)
        wait = not broken and not alone
        alone = bool(broken) and len(left) == before
