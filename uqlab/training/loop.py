"""The training of ensembles: one loop for all methods."""

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from uqlab.core.checks import ArrayLike, all_finite, as_inputs, at_least
from uqlab.core.devices import arithmetic
from uqlab.core.modules import evaluating, like_parameters
from uqlab.ensembles import Ensemble, member_seed
from uqlab.training.checkpoints import Checkpoint, described
from uqlab.training.losses import Loss, targets
from uqlab.training.optimisation import Optimisation
from uqlab.training.steps import AutogradStep, ChainStep, make_step
from uqlab.training.workers import Workers

# inputs [members, batch, ...], one generator a member -> inputs
Augment = Callable[[Tensor, list[torch.Generator]], Tensor]


@dataclass(frozen=True)
class History:
    """What a training did.

    Parameters
    ----------
    loss
        The mean loss of every member in every epoch [epochs, members].
    steps
        Steps taken.
    seconds
        Wall-clock time.
    """

    loss: Tensor
    steps: int
    seconds: float


def fit(
    ensemble: Ensemble,
    inputs: ArrayLike,
    labels: ArrayLike,
    *,
    epochs: int,
    lr: float,
    batch_size: int = 128,
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd",
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    schedule: Literal["constant", "cosine", "step"] = "constant",
    milestones: Sequence[int] = (),
    warmup: int = 0,
    clip: float | None = None,
    loss: str | Loss = "cross_entropy",
    class_weights: ArrayLike | None = None,
    augment: Augment | None = None,
    precision: str = "float32",
    seed: int = 0,
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
    watch: Callable[[int], object] | None = None,
) -> History:
    """Train every member on its own shuffling of the same data.

    The batches, the dropout and the augmentation of member m depend on (seed, m) alone:
    ten members equal 4 + 6 and ten runs of one, to float tolerance.

    Parameters
    ----------
    ensemble
        Trained in place; afterwards it is in evaluation mode.
    inputs
        [samples, ...], moved to the ensemble's device once.
    labels
        Classes [samples]; for loss="mse" targets like the outputs; for a loss of your
        own what it takes.
    epochs
        How often every member sees every sample.
    lr, optimizer, weight_decay, momentum, schedule, milestones, warmup, clip
        See `Optimisation`.
    batch_size
        Samples a step and member.
    loss
        "cross_entropy", "mse", or a function (outputs, labels) -> [members].
    class_weights
        [classes], of "cross_entropy", as in torch.
    augment
        A function of inputs [members, batch, ...] and one generator a member.
    precision
        "float32" or "bfloat16", as `arithmetic` takes it.
    seed
        Of all randomness of the training.
    progress
        Whether a bar is shown.
    checkpoint
        A file that is written after every epoch. Where it is there already, the
        training goes on from it, bit-identical on a CPU.
    watch
        Called after every epoch with the number of epochs done.

    Returns
    -------
    History
        Losses, steps and seconds.

    Raises
    ------
    ValueError
        For empty or mismatched data, labels out of range, unknown names, numbers out of
        range, and a checkpoint that is damaged or of another run.
    TypeError
        For what is no ensemble and for labels that are no integers.
    FloatingPointError
        For a loss or a weight that is not finite.
    """
    started = time.perf_counter()
    at_least("epochs", epochs)
    at_least("batch_size", batch_size)
    settings = Optimisation(
        lr, optimizer, weight_decay, momentum, schedule, milestones, warmup, clip
    )
    inputs = _inputs(ensemble, inputs)
    with torch.no_grad(), evaluating(ensemble):
        outputs = ensemble(inputs[:1])[0]
    labels, loss_of = targets(labels, len(inputs), outputs, loss, class_weights)
    steps_per_epoch = math.ceil(len(inputs) / batch_size)

    saved = Checkpoint(
        checkpoint,
        {
            "members": list(ensemble.member_ids),
            "seed": seed,
            "epochs": epochs,
            "batch_size": batch_size,
            "optimisation": settings,
            "precision": precision,
            "loss": described(loss),
            "augment": described(augment),
        },
        {
            "inputs": inputs,
            "labels": labels,
            "class_weights": class_weights,
            "initial weights": ensemble,
        },
    )
    autocast = precision != "float32" and inputs.is_cuda
    make = functools.partial(
        make_step, loss=loss_of, settings=settings, autocast=autocast,
        flat=inputs.ndim == 2,
    )  # fmt: skip
    work = _multiply_adds(ensemble, min(batch_size, len(inputs)))
    workers = Workers(ensemble, work, make, saved.header.get("bounds"))
    optimizers = [step.optimizer for step in workers.steps]
    losses = torch.zeros(epochs, ensemble.members, device=inputs.device)
    first = saved.restore(ensemble, optimizers, losses)

    def run_epoch(
        epoch: int, rows: slice, shard: Ensemble, take_step: ChainStep | AutogradStep
    ) -> None:
        shard.train().reseed(seed, epoch)
        batches = _batches(inputs, labels, batch_size, augment, seed, epoch, shard)
        for number, (x, y) in enumerate(batches, epoch * steps_per_epoch):
            values = take_step(x, y, settings.lr_at(number, steps_per_epoch, epochs))
            share = x.shape[1] / (shard.repeats * len(inputs))
            losses[epoch, rows].add_(values, alpha=share)

    bar = tqdm(
        total=epochs, initial=first, desc="fit", unit="epoch", disable=not progress,
        leave=False,
    )  # fmt: skip
    with evaluating(ensemble), bar, workers, arithmetic(precision, inputs.device):
        for epoch in range(first, epochs):
            workers.run(functools.partial(run_epoch, epoch))
            _check_finite(ensemble, losses[epoch], epoch)
            saved.write(epoch + 1, losses, workers.bounds, ensemble, optimizers)
            if watch:
                watch(epoch + 1)
            bar.update()
            if progress:
                mean = losses[epoch].mean().item()
                bar.set_postfix_str(f"loss {mean:.3f}", refresh=False)
    ensemble.eval().zero_grad()
    steps = (epochs - first) * steps_per_epoch
    return History(losses.cpu(), steps, time.perf_counter() - started)


def _inputs(ensemble: Ensemble, inputs: ArrayLike) -> Tensor:
    """Return the inputs, checked, on the device and in the precision of the weights."""
    if not isinstance(ensemble, Ensemble):
        raise TypeError(
            f"fit takes an ensemble, got {type(ensemble).__name__}; "
            "use ensembles.from_members([model])"
        )
    inputs = as_inputs(inputs)
    if inputs.dtype == torch.uint8:
        raise ValueError(
            "inputs are uint8; give images as floating point in [0, 1]: "
            "inputs.float() / 255"
        )
    return like_parameters(ensemble, inputs.detach())


def _multiply_adds(ensemble: Ensemble, rows: int) -> int:
    """Return about how many multiply-adds a step of `rows` samples a member takes.

    An activation, of which each bias makes one an input, costs about as much as a
    hundred of them. Of one network, which has no biases of members, the kernels are
    what counts as often: once a pixel.
    """
    dear = 4 if ensemble.members == 1 else 2  # axes
    sizes = [p.numel() * (100 if p.ndim == dear else 1) for p in ensemble.parameters()]
    return rows * sum(sizes)


def _batches(
    inputs: Tensor,
    labels: Tensor,
    batch_size: int,
    augment: Augment | None,
    seed: int,
    epoch: int,
    ensemble: Ensemble,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch's batches, x and y [members, batch, ...], each in its own order.

    A full batch needs no order and no copy. x lies in the same memory in every step:
    fresh memory would cost as much as filling it. Orders are drawn on the CPU, so they
    are the same on every device.
    """
    ids, samples = ensemble.member_ids, len(inputs)
    if batch_size >= samples and augment is None and ensemble.repeats == 1:
        yield tuple(t.expand(len(ids), *t.shape) for t in (inputs, labels))
        return
    seeds = [member_seed(seed, m, "order", epoch) for m in ids]
    generators = [torch.Generator().manual_seed(one) for one in seeds]
    orders = [torch.randperm(samples, generator=g) for g in generators]
    size = len(ids) * ensemble.repeats * min(batch_size, samples)
    memory = inputs.new_empty(size, *inputs.shape[1:])
    for order in torch.stack(orders).to(inputs.device).split(batch_size, dim=1):
        rows = ensemble.mixed(order, generators)  # [members, batch]
        flat = rows.flatten()
        x = torch.index_select(inputs, 0, flat, out=memory[: len(flat)])
        x = x.unflatten(0, rows.shape)
        y = labels.index_select(0, flat).unflatten(0, rows.shape)
        yield (x if augment is None else augment(x, generators)), y


def _check_finite(ensemble: Ensemble, losses: Tensor, epoch: int) -> None:
    """Refuse an epoch whose losses, or the weights after it, are not finite."""
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    trained = [p for p in ensemble.parameters() if p.requires_grad]
    if not bad and all(map(all_finite, trained)):
        return
    what = "a weight"
    if bad:
        what = f"the loss of member {bad[0]} ({len(bad)} of {len(losses)} members)"
    raise FloatingPointError(
        f"{what} is not finite in epoch {epoch + 1}; lower lr, add warmup or clip"
    )
