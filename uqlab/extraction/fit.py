"""The training of masks."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core.checks import all_finite, at_least, class_labels, count_samples
from uqlab.core.modules import like_parameters
from uqlab.ensembles import member_seed
from uqlab.extraction.masks import Masked, MaskEnsemble, coin_entropy
from uqlab.training import Workers, cross_entropy


@dataclass(frozen=True)
class MaskHistory:
    """What `fit_masks` did: cross-entropy [steps, members] and mask diversity [steps], nats; steps; seconds."""

    loss: Tensor
    diversity: Tensor
    steps: int
    seconds: float


def fit_masks(
    ensemble: MaskEnsemble,
    inputs: Shaped[Tensor, "samples ..."],
    labels: Int[Tensor, " samples"],
    *,
    diversity: float = 2.0,
    steps: int = 600,
    lr: float = 0.05,
    batch_size: int = 128,
    seed: int = 0,
    progress: bool = True,
) -> MaskHistory:
    """Train the masks of `masks(...)` by Adam on the members' mean cross-entropy - diversity * `mask_diversity`.

    All members see the same batches of inputs, whose order follows from `seed`. Afterwards the masks are soft.

    Raises TypeError for another kind of ensemble and for labels that are no integers; ValueError for labels of one
    class alone or out of range, inputs that are empty or not finite, and settings out of range; FloatingPointError if a
    loss or, after the last step, a mask is not finite. Kirsch 2024, section D.4 (weight 2.0); optimiser and steps are
    our choice.
    """
    started = time.perf_counter()
    at_least("steps", steps)
    ensemble.soften().eval()
    samples = count_samples(inputs)
    x = like_parameters(ensemble, inputs.detach())
    with torch.no_grad():
        classes = ensemble(x[:1]).shape[-1]
    y = class_labels(labels, samples, classes).to(x.device)
    if (y == y[0]).all():
        raise ValueError(
            f"all labels are {int(y[0])}: with one class any mask will do; masks need two or more"
        )

    # One tensor holds all logits, and the layers' parameters are views of it: one sigmoid and one update serve all.
    parameters = _mask_logits(ensemble)
    logits = torch.cat([p.detach() for p in parameters], 1)  # [members, elements]
    for p, part in zip(
        parameters, logits.split([p.shape[1] for p in parameters], 1), strict=True
    ):
        p.data = part
    optimizer = torch.optim.Adam([logits], lr, fused=True)
    gradient = logits.grad = torch.zeros_like(logits)
    losses, diversities = (
        torch.zeros(steps, *size, device=x.device) for size in ((ensemble.members,), ())
    )
    products = (
        batch_size
        * ensemble.members
        * sum(layer.w.numel() for layer in ensemble.layers().values())
    )
    workers = Workers(ensemble, products, _mask_logits)
    with (
        workers,
        tqdm(total=steps, desc="fit masks", disable=not progress, leave=False) as bar,
    ):
        for step, rows in enumerate(
            itertools.islice(_batches(samples, batch_size, seed, x.device), steps)
        ):
            bx, by = x[rows], y[rows]

            def gradients(members: slice, shard, own, step=step, bx=bx, by=by) -> None:
                outputs = shard(bx)
                values = cross_entropy(outputs, by.expand(outputs.shape[:2]))
                losses[step, members] = values.detach()
                gradient[members] = torch.cat(torch.autograd.grad(values.sum(), own), 1)

            workers.run(gradients)
            p = logits.sigmoid()
            mean = p.mean(0)
            diversities[step] = (coin_entropy(mean) - coin_entropy(p).mean(0)).mean()
            # d (H(mean p) - mean H(p)) / dp = (logit(p) - logit(mean p)) / members, and logit(p) is what is trained
            slope = (logits - mean.logit(1e-7)).mul_(p).mul_(1 - p)
            gradient.div_(ensemble.members).sub_(
                slope, alpha=diversity / logits.numel()
            )
            optimizer.step()
            bar.update()
    for p in parameters:
        p.data = p.data.clone()
    bad = (~losses.isfinite()).nonzero()
    if len(bad) or not all_finite(logits):
        what = (
            f"the loss is not finite from step {int(bad[0, 0])} on"
            if len(bad)
            else "a mask is not finite"
        )
        raise FloatingPointError(f"{what}; lower lr")
    return MaskHistory(
        losses.cpu(), diversities.cpu(), steps, time.perf_counter() - started
    )


def _mask_logits(ensemble: nn.Module) -> list[nn.Parameter]:
    """What is trained: the mask logits of all layers, each [members, features]."""
    return [
        p
        for part in ensemble.modules()
        if isinstance(part, Masked)
        for p in part.own_parameters()
    ]


def _batches(
    samples: int, batch_size: int, seed: int, device: torch.device
) -> Iterator[Int[Tensor, " batch"]]:
    """Row numbers without end, every epoch in a new order, which is drawn on the CPU and equal on all devices."""
    generator = torch.Generator().manual_seed(member_seed(seed, 0, "mask batches"))
    while True:
        yield from (
            torch.randperm(samples, generator=generator).to(device).split(batch_size)
        )
