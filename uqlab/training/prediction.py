"""Prediction: what all members say of all inputs, batch by batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from tqdm.auto import tqdm

from uqlab.core.checks import a_network, at_least, count, inputs_alone
from uqlab.core.devices import arithmetic
from uqlab.core.modules import call, evaluating, logits_of, rows_of
from uqlab.core.reading import opened, read_batches
from uqlab.ensembles import Ensemble
from uqlab.training.batches import as_given


@torch.no_grad()
def predict(
    ensemble: nn.Module,
    data: Any,
    *,
    batch_size: int = 1024,
    precision: str = "float32",
    progress: bool = False,
    reduce: Callable | None = None,
) -> Any:
    """Return the logits of every member on every input, in evaluation mode.

    Parameters
    ----------
    ensemble
        An ensemble; any other module, whose outputs are [samples, classes], counts as
        an ensemble of one.
    data
        Inputs [samples, ...], or such tensors by name; a dataset, a loader. What `fit`
        takes, whose labels are left out.
    batch_size
        Inputs that go through at once, at most; fewer where a GPU's memory does not
        suffice.
    precision
        "float32", "bfloat16" or, on a GPU, "float16", as `arithmetic` takes it.
    progress
        Whether a bar is shown.
    reduce
        A function of the logits of some inputs that returns what is kept of them: a
        tensor [samples, ...], or a tuple of such, as `uncertainty.decompose` does. So
        neither many inputs nor dense outputs need memory for all logits.

    Returns
    -------
    Tensor or tuple of Tensor
        Logits [members, samples, classes], float32 on the CPU; or what `reduce`
        returns, of all samples.
    """
    a_network(ensemble, "predict", "an ensemble or a torch module")
    at_least("batch_size", batch_size)
    where = next(ensemble.parameters(), torch.empty(0)).device
    held = isinstance(opened(data), tuple)
    axis = 0 if reduce else 1
    kept: list = []
    bar = tqdm(desc="predict", unit="input", disable=not progress, leave=False)
    with bar, evaluating(ensemble), arithmetic(precision, where):
        for inputs, _ in read_batches(data, batch_size):
            x = inputs_alone(inputs)
            bar.total = count(x) if held else None
            for z in _answers(ensemble, x, batch_size):
                kept.append(_reduced(z, reduce) if reduce else z.cpu())
                bar.update(z.shape[1])
    return tree_map(lambda *parts: torch.cat(parts, axis), *kept)


def _reduced(z, reduce):
    """Return on the CPU what is kept of the logits of some inputs."""
    kept = tree_map(Tensor.cpu, reduce(z))
    shapes = [t.shape for t in tree_leaves(kept)]
    if any(shape[:1] != z.shape[1:2] for shape in shapes):
        raise ValueError(
            f"reduce must return tensors [samples, ...] = [{z.shape[1]}, ...], "
            f"got {[list(shape) for shape in shapes]}"
        )
    return kept


def _answers(ensemble, x, batch_size):
    """Yield the logits of some inputs after the other, few where memory is short."""
    start = 0
    while start < count(x):
        some = as_given(ensemble, rows_of(x, slice(start, start + batch_size)))
        try:
            z = logits_of(call(ensemble, some)).float()
        except torch.OutOfMemoryError:
            if batch_size == 1:
                raise
            batch_size //= 2
            continue
        start += count(some)
        z = z if isinstance(ensemble, Ensemble) else z[None]
        if z.shape[1:2] != (count(some),):
            raise ValueError(
                f"a network must return [samples, ...] = [{count(some)}, ...], got "
                f"{[*z.shape[1:]]}; of a wrapped ensemble give the ensemble, .module"
            )
        yield z
