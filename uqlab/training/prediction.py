"""Prediction: what all members say of all inputs, batch by batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from tqdm.auto import tqdm

from uqlab.core.checks import as_inputs, at_least, count, one_network, read_batches
from uqlab.core.modules import arithmetic, call, evaluating, logits_of, rows_of
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
    one_network(ensemble, "predict", or_ensemble=True)
    at_least("batch_size", batch_size)
    where = next(ensemble.parameters(), torch.empty(0)).device
    samples, kept = 0, []
    bar = tqdm(desc="predict", unit="input", disable=not progress, leave=False)
    with bar, evaluating(ensemble), arithmetic(precision, where):
        for inputs, _ in read_batches(data, batch_size):
            for z in _answers(ensemble, as_inputs(inputs, read=False), batch_size):
                kept.append(tree_map(Tensor.cpu, reduce(z) if reduce else z))
                samples += z.shape[1]
                bar.update(z.shape[1])
    axis = 0 if reduce else 1
    found = tree_map(lambda *parts: torch.cat(parts, axis), *kept)
    if any(t.shape[axis] != samples for t in tree_leaves(found)):
        raise ValueError(f"reduce must return tensors [samples, ...] of {samples}")
    return found


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
        z = z if hasattr(ensemble, "member_ids") else z[None]
        if z.shape[1:2] != (count(some),):
            raise ValueError(
                f"a network must return [samples, ...] = [{count(some)}, ...], got "
                f"{[*z.shape[1:]]}; of a wrapped ensemble give the ensemble, .module, "
                "one input as inputs[None]"
            )
        yield z
