"""Tensors that were computed before: what a page trained, in files that it finds again.

The variable UQLAB_CACHE, which `uqlab run` sets, names the folder. Where it is empty or
absent, nothing is kept.
"""

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uqlab.core.files import TRAININGS, fingerprint, sha256

if TYPE_CHECKING:
    from torch import Tensor

ROOM = 2 * 10**9  # bytes of all files together; the least recently used go first


def cached(
    name: str, make: Callable[[], "Mapping[str, Tensor]"], *depends_on: Any
) -> "Mapping[str, Tensor]":
    """Return the tensors that `make` returns, from a file where it was called before.

    Parameters
    ----------
    name
        What they are.
    make
        Returns tensors by name, as `state_dict` does. It should draw from no global
        generator, because where a file is read nothing is drawn.
    depends_on
        All that the result follows from: settings, data, initial weights. If one of
        them, a file of uqlab or torch's version changes, `make` is called again, as it
        is where the file is damaged.

    Returns
    -------
    Mapping
        The tensors; those of a file are on the CPU.

    Examples
    --------
    ::

        def trained():
            training.fit(ensemble, x, y, **settings)
            return ensemble.state_dict()

        weights = runs.cached("deep ensemble", trained, ensemble, x, y, settings)
        ensemble.load_state_dict(weights)
    """
    folder = os.environ.get(TRAININGS)
    if not folder:
        return make()
    from uqlab.core.tensors import load_tensors, save_tensors

    key = fingerprint(name, depends_on, _code())
    path = Path(folder, f"{key}.safetensors")
    with suppress(OSError, ValueError):  # absent or damaged
        tensors, _ = load_tensors(path)
        os.utime(path)
        return tensors
    tensors = make()
    with suppress(OSError, RuntimeError):  # a full disk costs no training
        save_tensors(path, tensors, {"name": name})
        _make_room(path.parent)
    return tensors


@functools.cache
def _code() -> str:
    """Return a digest of all that may compute the tensors."""
    import torch

    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return fingerprint(torch.__version__, [sha256(file) for file in files])


def _make_room(folder: Path) -> None:
    """Remove the files that were not used for the longest time, beyond ROOM bytes."""
    used = 0
    ours = "[0-9a-f]" * 64 + ".safetensors"  # weights of yours may lie there too
    files = [(path.stat(), path) for path in folder.glob(ours)]
    for status, path in sorted(files, key=lambda pair: -pair[0].st_mtime):
        used += status.st_size
        if used > ROOM:
            path.unlink(missing_ok=True)
