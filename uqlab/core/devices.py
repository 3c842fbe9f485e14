"""Where things are computed, in which precision, and what was tuned on one machine."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from uqlab.core.checks import one_of

# Multiply-adds of the outputs in a training step: below, one thread beats shards in
# several, for perceptrons, convolutional networks and transformers alike.
ONE_THREAD = 1e8
# Elements of a temporary: 2 MiB of float32 stay in a core's cache; a GPU pays for
# launches.
TEMPORARY = {"cpu": 2**19, "cuda": 2**25}


def elements_of_temporary(device: torch.device) -> int:
    """Return the number of elements that a temporary should have on a device."""
    return TEMPORARY.get(device.type, TEMPORARY["cuda"])


def device(name: str = "auto") -> torch.device:
    """Return the torch device of that name; "auto" is the GPU if there is one.

    "mps", the GPU of a Mac, has no float64 and is taken by its name alone. Raises
    ValueError for a device that cannot compute here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.empty(0, device=name).is_meta:  # tensors that hold no numbers
            raise RuntimeError
        return torch.device(name)
    except (AssertionError, RuntimeError) as error:  # the first: no CUDA in this build
        raise ValueError(
            'device must be "auto", "cpu", on a Mac "mps", or with a GPU and a CUDA '
            f'build of torch "cuda" or one like "cuda:1", got {name!r}'
        ) from error


@contextlib.contextmanager
def arithmetic(precision: str, where: torch.device) -> Iterator[None]:
    """Compute products inside the block in "float32", "bfloat16" or "float16".

    Weights, sums and the optimiser stay float32.
    On a GPU it is autocast; a CPU has no float16. A CPU with matrix units for bfloat16
    (AMX) rounds the factors of a product to it. On other CPUs it was measured to be up
    to twice as slow: they use float32, with a warning.
    """
    one_of("precision", precision, ("float32", "bfloat16", "float16"))
    if precision == "float32":
        yield
    elif where.type != "cpu":
        with torch.autocast(where.type, getattr(torch, precision)):
            yield
    elif precision == "float16":
        raise ValueError(
            'precision="float16" is for GPUs; on a CPU take "bfloat16" or "float32"'
        )
    elif torch.cpu.get_capabilities().get("amx_bf16", False):
        backend: Any = torch.backends.mkldnn
        before = backend.matmul.fp32_precision, backend.conv.fp32_precision
        backend.matmul.fp32_precision = backend.conv.fp32_precision = "bf16"
        try:
            yield
        finally:
            backend.matmul.fp32_precision, backend.conv.fp32_precision = before
    else:
        warnings.warn(
            "this CPU has no bfloat16 matrix units: products stay float32 (faster)",
            stacklevel=5,
        )
        yield


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, with those that torch holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    return free + held - torch.cuda.memory_allocated(device)
