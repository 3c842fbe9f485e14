"""The training of masks."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core.checks import (
    InputsLike,
    all_finite,
    as_labels,
    as_one,
    at_least,
    positive,
    within,
)
from uqlab.core.modules import like_parameters, trainable
from uqlab.core.reading import held
from uqlab.ensembles import member_seed
from uqlab.extraction.masks import MaskEnsemble, information
from uqlab.training import Workers, cross_entropy

_EPS = 1e-7  # below it float32 cannot tell 1 - p from 1


@dataclass(frozen=True)
class MaskHistory:
    """What `fit_masks` did.

    Parameters
    ----------
    loss
        Cross-entropy [steps, members], nats.
    diversity
        Mask diversity [steps], nats.
    steps, seconds
        How many, and how long.
    """

    loss: Tensor
    diversity: Tensor
    steps: int
    seconds: float


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
        For labels that are no integers.
    ValueError
        For labels of one class alone or out of range, inputs that are empty or not
        finite, and settings out of range.
    FloatingPointError
        If a loss or, after the last step, a mask is not finite.

    References
    ----------
    Kirsch 2024, section D.4 (weight 2.0); optimiser and steps are our choice.
    """
    started = time.perf_counter()
    at_least("steps", steps)
    positive("lr", lr)
    within("diversity", diversity, "[0, inf)")
    ensemble.soften().eval()
    x, y = _data(ensemble, inputs, labels)
    masks = trainable(ensemble)  # the mask logits of all layers, [members, features]
    optimizer = torch.optim.Adam(masks, lr, fused=True)
    losses = torch.zeros(steps, ensemble.members, device=x.device)
    diversities = losses.new_zeros(steps)
    batches = _batches(len(x), batch_size, seed, x.device)
    with _workers(ensemble, batch_size) as workers:
        for step in tqdm(range(steps), "fit masks", disable=not progress, leave=False):
            rows = next(batches)
            diversities[step] = _start_gradients(masks, diversity)
            workers.run(partial(_add_gradients, masks, x[rows], y[rows], losses[step]))
            optimizer.step()
    _check_finite(losses, masks)
    seconds = time.perf_counter() - started
    return MaskHistory(losses.cpu(), diversities.cpu(), steps, seconds)


def _workers(ensemble: MaskEnsemble, batch_size: int) -> Workers:
    """Return shards of the members, one a thread."""
    network = ensemble.network
    weights = sum(network.get_parameter(name).numel() for name in ensemble.seen)
    work = batch_size * ensemble.members * weights
    return Workers(ensemble, work, ensemble.can_shard(), trainable)


def _data(
    ensemble: MaskEnsemble, inputs: InputsLike, labels: Any
) -> tuple[Tensor, Tensor]:
    """Return inputs, and labels of two classes or more, on the ensemble's device."""
    inputs, labels = held(inputs, labels)
    x = like_parameters(ensemble, as_one(inputs))
    with torch.no_grad():
        classes = ensemble(x[:1]).shape[-1]
    y = as_labels(labels, len(x), classes).to(x.device)
    if (y == y[0]).all():
        raise ValueError(
            f"all labels are {int(y[0])}: with one class any mask will do; "
            "masks need two or more"
        )
    return x, y


def _start_gradients(masks: list[nn.Parameter], weight: float) -> Tensor:
    """Set the gradients of - weight * diversity, and return the diversity.

    By autograd this takes three times as long. The slope of a coin's entropy H(p) is
    -logit(p), and the logit is what is trained.
    """
    z = torch.cat([mask.detach() for mask in masks], 1)
    p = z.sigmoid()
    slope = (p.mean(0).logit(_EPS) - z) * p * (1 - p) * (weight / z.numel())
    sizes = [mask.shape[1] for mask in masks]
    for mask, gradient in zip(masks, slope.split(sizes, 1), strict=True):
        mask.grad = gradient.contiguous()
    return information(p)


def _add_gradients(
    masks: list[nn.Parameter],
    x: Tensor,
    y: Tensor,
    losses: Tensor,
    members: slice,
    shard: nn.Module,
    trained: list[nn.Parameter],
) -> None:
    """Add the gradients of some members' cross-entropy, which is noted in losses."""
    logits = shard(x)
    values = cross_entropy(logits, y.expand(logits.shape[:2]))
    losses[members] = values.detach()
    gradients = torch.autograd.grad(values.sum() / len(losses), trained)
    for mask, gradient in zip(masks, gradients, strict=True):
        cast(Tensor, mask.grad)[members].add_(gradient)


def _check_finite(losses: Tensor, masks: list[nn.Parameter]) -> None:
    """Raise FloatingPointError for losses and masks that are not finite."""
    finite = losses.isfinite().all(1)
    if not finite.all():
        step = int(finite.int().argmin())
        raise FloatingPointError(
            f"the loss is not finite from step {step} on; lower lr"
        )
    if not all(map(all_finite, masks)):
        raise FloatingPointError("a mask is not finite; lower lr")


def _batches(
    samples: int, batch_size: int, seed: int, device: torch.device
) -> Iterator[Int[Tensor, " batch"]]:
    """Yield row numbers without end, every epoch in a new order drawn on the CPU."""
    generator = torch.Generator().manual_seed(member_seed(seed, 0, "mask batches"))
    while True:
        order = torch.randperm(samples, generator=generator).to(device)
        yield from order.split(batch_size)
