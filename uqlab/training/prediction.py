"""Prediction: the logits of all members on all inputs, batch by batch."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core.checks import InputsLike, a_network, as_inputs, at_least, count
from uqlab.core.devices import arithmetic
from uqlab.core.modules import call, evaluating, logits_of, take
from uqlab.ensembles import Ensemble


@torch.no_grad()
def predict(
    ensemble: nn.Module,
    inputs: InputsLike,
    *,
    batch_size: int = 1024,
    precision: str = "float32",
    progress: bool = False,
) -> Float[Tensor, "members samples *outputs"]:
    """Return the logits of every member on every input, in evaluation mode.

    Parameters
    ----------
    ensemble
        An ensemble; any other module, whose outputs are [samples, classes], counts as
        an ensemble of one.
    inputs
        [samples, ...], or such tensors by name.
    batch_size
        Inputs that go through at once; fewer where a GPU's memory does not suffice.
    precision
        "float32" or "bfloat16", as `arithmetic` takes it.
    progress
        Whether a bar is shown.

    Returns
    -------
    Tensor
        Logits [members, samples, classes], float32 on the CPU.
    """
    a_network(ensemble, "predict", "an ensemble or a torch module")
    x = as_inputs(inputs)
    at_least("batch_size", batch_size)
    where = next(ensemble.parameters(), torch.empty(0)).device
    logits = []
    start = 0
    bar = tqdm(
        total=count(x), desc="predict", unit="input", disable=not progress,
        leave=False,
    )  # fmt: skip
    with bar, evaluating(ensemble), arithmetic(precision, where):
        while start < count(x):
            batch = take(ensemble, x, slice(start, start + batch_size))
            try:
                z = logits_of(call(ensemble, batch)).float()
            except torch.OutOfMemoryError:
                if batch_size == 1:
                    raise
                batch_size //= 2
                continue
            logits.append((z if isinstance(ensemble, Ensemble) else z[None]).cpu())
            start += count(batch)
            bar.update(count(batch))
    return torch.cat(logits, dim=1)
