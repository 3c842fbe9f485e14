"""The training of ensembles: one loop for all methods."""

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core.checks import ArrayLike, all_finite, as_one, at_least, one_ensemble
from uqlab.core.devices import arithmetic
from uqlab.core.files import StrPath
from uqlab.core.modules import (
    Counted,
    call,
    evaluating,
    like_parameters,
    trainable,
)
from uqlab.ensembles import Ensemble, OneNetwork, member_generators
from uqlab.training.checkpoints import WEIGHTS, Checkpoint, described
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

    def __repr__(self) -> str:
        epochs, members = self.loss.shape
        first, last = self.loss.mean(1)[[0, -1]].tolist()
        return (
            f"History({epochs} epochs of {members} members, {self.steps} steps in "
            f"{self.seconds:.1f} s, mean loss {first:.3g} to {last:.3g})"
        )


def fit(
    ensemble: Ensemble,
    inputs: ArrayLike,
    labels: ArrayLike | None = None,
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
    checkpoint: StrPath | None = None,
    watch: Callable[[int], object] | None = None,
) -> History:
    """Train every member on its own shuffling of the same data.

    The batches and the augmentation of member m depend on (seed, m) alone: without
    dropout ten members equal 4 + 6 and ten runs of one, to float tolerance. Dropout
    follows from the seed and from who is trained together.

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
        training goes on from it, bit-identical on a CPU, also to more epochs than it
        was begun with (not with the cosine).
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
        range, a loss or an augmentation that returns something else, and a checkpoint
        that is damaged or of another run.
    TypeError
        For what is no ensemble and for labels that are no integers.
    FloatingPointError
        For a loss or a weight that is not finite.
    """
    started = time.perf_counter()
    settings = Optimisation(
        lr, optimizer, weight_decay, momentum, schedule, milestones, warmup, clip
    )
    x = _inputs(ensemble, inputs)
    y, loss_of = targets(ensemble, x, labels, loss, class_weights)
    if not trainable(ensemble):
        raise ValueError("nothing is trained: requires_grad is False everywhere")
    task = Task(x, y, loss_of, epochs, batch_size, augment, precision, seed, settings)
    saved = Checkpoint(checkpoint, task.depends_on(ensemble, loss, class_weights))
    losses, steps = _train(ensemble, task, saved, progress, watch)
    return History(losses, steps, time.perf_counter() - started)


def _augmented(x: Any, rows: Tensor) -> Tensor:
    """Return what `augment` returned; ValueError unless it has the same samples."""
    if not isinstance(x, Tensor) or x.shape[:2] != rows.shape:
        got = list(x.shape) if isinstance(x, Tensor) else type(x)
        raise ValueError(
            f"augment must return inputs {[*rows.shape]} [members, batch, ...], "
            f"got {got}"
        )
    return x


@dataclass(frozen=True)
class Task:
    """What is learned, and in which order: all that an epoch of some members needs."""

    inputs: Tensor
    labels: Tensor
    loss: Loss
    epochs: int
    batch_size: int
    augment: Augment | None
    precision: str
    seed: int
    settings: Optimisation

    def __post_init__(self) -> None:
        at_least("epochs", self.epochs)
        at_least("batch_size", self.batch_size)

    def depends_on(
        self, ensemble: Ensemble, loss: str | Loss, class_weights: ArrayLike | None
    ) -> dict[str, Any]:
        """Return what a training follows from, by the names that messages use."""
        fixed = self.settings.schedule == "cosine"
        return vars(self) | vars(self.settings) | {
            "epochs": self.epochs if fixed else "any number",
            "members": list(ensemble.member_ids), WEIGHTS: ensemble,
            "loss": described(loss), "class_weights": class_weights,
            "augment": described(self.augment),
        }  # fmt: skip

    @property
    def rows(self) -> int:
        """How many samples a full batch has."""
        return min(self.batch_size, len(self.inputs))

    @property
    def steps_per_epoch(self) -> int:
        """How many batches there are."""
        return math.ceil(len(self.inputs) / self.rows)

    def run(
        self,
        losses: Tensor,
        epoch: int,
        rows: slice,
        shard: Ensemble,
        take_step: ChainStep | AutogradStep,
    ) -> None:
        """Train a shard, the members `rows`, for an epoch; add its losses [members].

        `take_step` computes the losses of a batch and their gradients, and updates the
        weights: by written out derivatives for members that are plain perceptrons
        (ChainStep), and by autograd for all others.
        """
        shard.train()
        take_step.start(self.seed, epoch)
        first = epoch * self.steps_per_epoch
        for number, (x, y) in enumerate(self.batches(epoch, shard), first):
            lr = self.settings.lr_at(number, self.steps_per_epoch, self.epochs)
            # Of the epoch. MIMO shows each sample `repeats` times, in other mixtures.
            share = x.shape[1] / (shard.repeats * len(self.inputs))
            losses[rows].add_(take_step(x, y, lr), alpha=share)

    def batches(
        self, epoch: int, ensemble: Ensemble
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield an epoch's batches, x and y [members, batch, ...], each in its order.

        A full batch needs no order and no copy. x lies in the same memory in every
        step: fresh memory would cost as much as filling it. Orders are drawn on the
        CPU, so they are the same on every device.
        """
        x = self.inputs
        y = self.labels
        members = ensemble.members
        if self.rows == len(x) and not self.augment and ensemble.repeats == 1:
            yield x.expand(members, *x.shape), y.expand(members, *y.shape)
            return
        generators = member_generators(self.seed, ensemble.member_ids, "order", epoch)
        orders = torch.stack([torch.randperm(len(x), generator=g) for g in generators])
        memory = x.new_empty(0)
        for order in orders.to(x.device).split(self.rows, dim=1):
            # [members, batch]: the order itself, but for MIMO, which repeats samples.
            rows = ensemble.mixed(order, generators)
            flat = rows.flatten()
            memory.resize_(0)  # it keeps its bytes, and grows to what is drawn
            drawn = torch.index_select(x, 0, flat, out=memory).unflatten(0, rows.shape)
            if self.augment:
                drawn = _augmented(self.augment(drawn, generators), rows)
            yield drawn, y.index_select(0, flat).unflatten(0, rows.shape)


def _train(
    ensemble: Ensemble,
    task: Task,
    saved: Checkpoint,
    progress: bool,
    watch: Callable[[int], object] | None,
) -> tuple[Tensor, int]:
    """Run the epochs that `saved` lacks; return all losses, and the steps taken."""
    workers = _workers(ensemble, task, saved.bounds)
    losses = torch.zeros(task.epochs, ensemble.members, device=task.inputs.device)
    first = saved.restore(ensemble, workers, losses)
    epochs = range(first, task.epochs)
    if not first:  # a file that cannot be written is no news after an epoch
        saved.write(0, ensemble, workers, losses)
    bar = tqdm(epochs, "fit", task.epochs, False, disable=not progress, initial=first)
    # Whatever happens, the ensemble is in evaluation mode afterwards.
    with evaluating(ensemble), bar, workers, _numbers(task):
        for epoch in bar:
            workers.run(functools.partial(task.run, losses[epoch], epoch))
            _check_finite(ensemble, losses[epoch], epoch)
            saved.write(epoch + 1, ensemble, workers, losses)
            if watch:
                watch(epoch + 1)
            bar.set_postfix_str(f"loss {losses[epoch].mean():.3f}", refresh=False)
    ensemble.eval().zero_grad()
    return losses.cpu(), len(epochs) * task.steps_per_epoch


@contextlib.contextmanager
def _numbers(task: Task) -> Iterator[None]:
    """Compute in the precision of a task; torch's generators are as before then."""
    device = task.inputs.device
    generators = torch.random.fork_rng([device] * (device.type == "cuda"))
    with arithmetic(task.precision, device), generators:
        yield


def _inputs(ensemble: Ensemble, inputs: ArrayLike) -> Tensor:
    """Return the inputs, checked, on the device and in the precision of the weights."""
    one_ensemble(ensemble, "fit")
    x = as_one(inputs)
    if x.dtype == torch.uint8:
        raise ValueError(
            "inputs are uint8; give images as floating point in [0, 1]: "
            "inputs.float() / 255, of an array inputs / 255"
        )
    return like_parameters(ensemble, x.detach())


def _workers(ensemble: Ensemble, task: Task, bounds: list[int] | None) -> Workers:
    """Return shards of the ensemble, each with its step, sized by the work of a step.

    It is counted on two samples of the first member, without gradients.
    """
    make = functools.partial(
        make_step,
        loss=task.loss,
        settings=task.settings,
        autocast=task.precision != "float32" and task.inputs.is_cuda,
        flat=task.inputs.ndim == 2,
    )
    whole = isinstance(ensemble, OneNetwork)
    two, one = task.inputs[:2], ensemble if whole else ensemble.member(0)
    with evaluating(one), torch.no_grad(), Counted() as counted:
        call(one, two)
    rows = task.rows * ensemble.repeats
    passes = 1 if whole else ensemble.members
    multiply_adds = counted.multiply_adds * passes * rows // len(two)
    apart = ensemble.can_shard()
    # Perceptrons' steps have generators of each member's; other noise is torch's one.
    if apart and ensemble.members > 1 and not isinstance(make(ensemble), ChainStep):
        # Batch norm wants two samples.
        apart = not _draws_noise(one, torch.cat([two, two]))
    return Workers(ensemble, multiply_adds, apart, make, bounds)


def _draws_noise(network: nn.Module, x: Tensor) -> bool:
    """Return whether a network draws from torch's generator in training, on a CPU."""
    tried = copy.deepcopy(network).train()
    with torch.no_grad(), torch.random.fork_rng([]):
        before = torch.get_rng_state()
        call(tried, x)
        return not torch.equal(before, torch.get_rng_state())


def _check_finite(ensemble: Ensemble, losses: Tensor, epoch: int) -> None:
    """Refuse an epoch whose losses, or the weights after it, are not finite."""
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if bad or not all(map(all_finite, trainable(ensemble))):
        what = f"the loss of members {bad}" if bad else "a weight"
        raise FloatingPointError(
            f"{what} is not finite in epoch {epoch + 1}; lower lr, add warmup or clip"
        )
