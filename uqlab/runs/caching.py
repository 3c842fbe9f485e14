"""Tensors that were computed before: what a notebook trained, in files.

The variable UQLAB_CACHE, which `uqlab run` sets, names the folder. Where it is empty or
absent, nothing is kept.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uqlab.core.files import TRAININGS, fingerprint
from uqlab.runs.manifest import commit

if TYPE_CHECKING:
    from torch import Tensor


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
        is if the file is damaged.

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
    import torch

    from uqlab.core.modules import load_tensors, save_tensors

    key = fingerprint(name, depends_on, torch.__version__, commit())
    path = Path(folder, f"{key}.safetensors")
    with suppress(OSError, ValueError):  # absent or damaged
        return load_tensors(path)[0]
    tensors = make()
    with suppress(OSError, RuntimeError):  # a full disk costs no training
        save_tensors(path, tensors, {"name": name})
    return tensors
