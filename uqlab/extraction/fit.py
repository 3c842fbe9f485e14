"""The training of masks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from uqlab.core.checks import (
    InputsLike,
    as_inputs,
    as_labels,
    at_least,
    held,
    positive,
    within,
)
from uqlab.core.modules import like_parameters, trainable
from uqlab.ensembles import member_seed
from uqlab.extraction.masks import MaskEnsemble, information
from uqlab.training import cross_entropy


class MaskHistory(NamedTuple):
    """The course of a training of masks.

    Attributes
    ----------
    loss
        Cross-entropy [steps, members], nats.
    diversity
        Mask diversity [steps], nats.
    """

    loss: Tensor
    diversity: Tensor


def fit_masks(
    ensemble: MaskEnsemble,
    inputs: InputsLike,
    labels: Any = None,
    *,
    diversity: float = 2.0,
    steps: int = 600,
    lr: float = 0.05,
    batch_size: int = 128,
    seed: int = 0,
    progress: bool = True,
) -> MaskHistory:
    """Train the masks of `masks(...)` by Adam; afterwards they are soft.

    The loss is the members' mean cross-entropy - diversity * `mask_diversity`. All
    members see the same batches of inputs, whose order follows from `seed`.

    Raises
    ------
    TypeError
        If labels are not integers.
    ValueError
        If labels are all of one class or out of range, inputs are empty or not finite,
        or settings are out of range.
    FloatingPointError
        If a loss or, after the last step, a mask is not finite.

    References
    ----------
    Kirsch 2024, section D.4 (weight 2.0); optimiser and steps are our choice.
    """
    at_least("steps", steps)
    positive("lr", lr)
    within("diversity", diversity, "[0, inf)")
    ensemble.soften().eval()
    x, y = _data(ensemble, inputs, labels)
    masks: Any = trainable(ensemble)  # logits of all layers, [members, features]
    optimizer = torch.optim.Adam(masks, lr, fused=True)
    batches, measured = _batches(len(x), batch_size, seed), []
    for _ in tqdm(range(steps), "fit masks", disable=not progress, leave=False):
        rows = next(batches)
        logits = ensemble(x[rows])
        loss = cross_entropy(logits, y[rows].expand(logits.shape[:2]))
        shared = information(torch.cat(masks, 1).sigmoid())
        optimizer.zero_grad()
        (loss.mean() - diversity * shared).backward()
        optimizer.step()
        measured.append((loss.detach(), shared.detach()))
    return _history(measured, masks)


def _history(measured: list[tuple[Tensor, Tensor]], masks: list[Tensor]) -> MaskHistory:
    """Return the history; raise FloatingPointError where it or a mask is not finite."""
    losses, diversities = (
        torch.stack(part).cpu() for part in zip(*measured, strict=True)
    )
    finite = losses.isfinite().all(1)
    if not finite.all():
        step = int(finite.int().argmin())
        raise FloatingPointError(f"the loss is not finite from step {step}; lower `lr`")
    if not all(mask.isfinite().all() for mask in masks):
        raise FloatingPointError("a mask is not finite; lower `lr`")
    return MaskHistory(losses, diversities)


def _data(
    ensemble: MaskEnsemble, inputs: InputsLike, labels: Any
) -> tuple[Tensor, Tensor]:
    """Return inputs, and labels of two classes or more, on the ensemble's device."""
    inputs, labels = held(inputs, labels)
    x = like_parameters(ensemble, as_inputs(inputs, by_name=False))
    with torch.no_grad():
        classes = ensemble(x[:1]).shape[-1]
    y = as_labels(labels, len(x), classes).to(x.device)
    if (y == y[0]).all():
        raise ValueError(f"all labels are {int(y[0])}; masks need two classes or more")
    return x, y


def _batches(
    samples: int, batch_size: int, seed: int
) -> Iterator[Int[Tensor, " batch"]]:
    """Yield row numbers without end, every epoch in a new order."""
    generator = torch.Generator().manual_seed(member_seed(seed, 0, "mask batches"))
    while True:
        yield from torch.randperm(samples, generator=generator).split(batch_size)
