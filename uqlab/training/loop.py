"""The training of ensembles: one loop for all methods."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from uqlab.core.checks import (
    ArrayLike,
    all_finite,
    at_least,
    first_tensor,
    one_ensemble,
    one_of,
)
from uqlab.core.devices import arithmetic
from uqlab.core.extras import extra
from uqlab.core.files import StrPath
from uqlab.core.modules import (
    Counted,
    call,
    evaluating,
    map_tensors,
    trainable,
)
from uqlab.core.reading import opened
from uqlab.ensembles import Ensemble, OneNetwork, member_generators
from uqlab.training.batches import Loaded, Tensors
from uqlab.training.checkpoints import Checkpoint
from uqlab.training.losses import Loss, targets
from uqlab.training.optimisation import Optimisation
from uqlab.training.steps import ChainStep, Step, make_step
from uqlab.training.workers import Workers, draws_noise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

# inputs [members, batch, ...], one generator a member -> inputs
Augment = Callable[[Any, list[torch.Generator]], Any]


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

    def frame(self) -> "DataFrame":
        """Return the losses as a table: a row an epoch, from 1, a column a member."""
        with extra("notebooks"):
            import pandas
        frame = pandas.DataFrame(self.loss.numpy()).rename_axis("epoch")
        return frame.set_index(frame.index + 1)

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """Draw the members' losses by epoch, and return the Axes."""
        return self.frame().plot(ax=ax, legend=False, ylabel="loss")


@dataclass
class State:
    """What a callback is given after an epoch.

    Parameters
    ----------
    epoch
        How many epochs are done, from 1.
    losses
        The members' mean losses in the epoch [members].
    ensemble
        What is trained.
    """

    epoch: int
    losses: Tensor
    ensemble: Ensemble
    stopped: bool = field(default=False, repr=False)

    def stop(self) -> None:
        """End the training after this epoch."""
        self.stopped = True


def fit(
    ensemble: Ensemble,
    data: Any,
    labels: ArrayLike | None = None,
    *,
    epochs: int,
    lr: float | None = None,
    batch_size: int = 128,
    optimizer: str | Callable = "sgd",
    scheduler: str | Callable | None = None,
    loss: str | Loss = "cross_entropy",
    callbacks: Sequence[Callable] = (),
    max_grad_norm: float | None = None,
    precision: str = "float32",
    order: str = "own",
    num_workers: int = 0,
    drop_last: bool = False,
    class_weights: ArrayLike | None = None,
    augment: Augment | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    milestones: Sequence[int] = (),
    warmup: int = 0,
    seed: int = 0,
    progress: bool = True,
    resume: StrPath | None = None,
) -> History:
    """Train every member, on its own shuffling of the same data where that is possible.

    The batches and the augmentation of member m depend on (seed, m) alone: without
    dropout ten members equal 4 + 6 and ten runs of one, to float tolerance. Dropout
    follows from the seed and from who is trained together.

    Parameters
    ----------
    ensemble
        Trained in place; afterwards it is in evaluation mode.
    data
        Inputs [samples, ...], or such tensors by name, moved to the ensemble's device
        once; or (inputs, labels). A `Dataset`, also of Hugging Face, is sampled for
        all members' orders. What yields batches (a `DataLoader`, an `IterableDataset`)
        is read once for all members, which see the same batches; it shuffles by `seed`.
        Batches are (inputs, labels), or mappings
        with "labels" or "label".
    labels
        What the loss takes, [samples, ...]. With tensors alone, which may also hold
        them by name.
    epochs
        How often every member sees every sample.
    lr
        The learning rate at its highest, of an optimiser by name or class; None: that
        class's own.
    batch_size
        Samples a step and member; a loader has its own.
    optimizer
        "sgd", "adam", "adamw", a class of torch.optim, or a function of the trained
        parameters. What members hold is stacked, [members, ...]: an optimiser with one
        norm for each parameter couples them.
    scheduler
        None or "constant", "cosine" (to zero at the end) or "step" (a tenth at each of
        `milestones`), step by step; or a function of the optimiser that returns a
        scheduler of torch, which moves once an epoch; `OneCycleLR` and `CyclicLR` once
        a step.
    loss
        "cross_entropy" of classes [samples], and of pixels: outputs [samples, classes,
        height, width], labels [samples, height, width], -100 where there is none.
        "binary_cross_entropy" of one logit or several labels: labels 0 to 1 like the
        outputs. "mse": targets like the outputs. "gaussian_nll": outputs [..., 2 k], k
        means and then k log-variances, and k targets; see `gaussian_nll`. Or a function
        (outputs, labels) -> [members].
    callbacks
        Functions of a `State`, called after every epoch. With `resume` those that have
        `state_dict` and `load_state_dict` go on from their state.
    max_grad_norm
        The largest norm of one member's gradient.
    precision
        "float32", "bfloat16" or, on a GPU, "float16" with a scaler of gradients, which
        skips a step of all members where one overflows; as `arithmetic` takes it.
    order
        "own": each member its own order. "shared": all see a batch at once, as of a
        loader; the batches and the augmentation depend on the seed alone.
    num_workers
        Processes that read a dataset, as of a `DataLoader`.
    drop_last
        Whether a last batch that is not full is left out.
    class_weights
        [classes], of "cross_entropy", as in torch.
    augment
        A function of inputs [members, batch, ...] and one generator a member; of shared
        batches, [1, batch, ...] and one.
    weight_decay, momentum
        As in `torch.optim`, of optimisers by name; the momentum is that of SGD.
    milestones
        Epochs.
    warmup
        Steps in which the learning rate rises linearly, before a scheduler by name.
    seed
        Of all randomness of the training.
    progress
        Whether a bar is shown.
    resume
        A folder that holds the state after every epoch. Where it is there already, the
        training goes on from it, bit-identical on a CPU, also to more epochs than it
        was begun with (not with the cosine).

    Returns
    -------
    History
        Losses, steps and seconds.

    Raises
    ------
    ValueError
        For empty or mismatched data, labels out of range, unknown names, numbers out of
        range, a loss or an augmentation that returns something else, and a folder whose
        file is damaged or of another run.
    TypeError
        If `ensemble` is not an ensemble, or labels are not integers.
    FloatingPointError
        For a loss or a weight that is not finite.
    """
    given = dict(locals())
    started = time.perf_counter()
    one_ensemble(ensemble, "fit")
    task = _task(**given)
    follows = {k: v for k, v in given.items() if k not in UNTOLD} | task.data.about
    follows["members"] = list(ensemble.member_ids)
    if scheduler != "cosine":
        del follows["epochs"]
    saved = Checkpoint(resume, ensemble, follows, callbacks)
    losses, steps = _train(ensemble, task, saved, progress, callbacks)
    return History(losses, steps, time.perf_counter() - started)


# What no result depends on, and what is told otherwise.
UNTOLD = (
    "ensemble", "data", "labels", "callbacks", "num_workers", "progress", "resume",
)  # fmt: skip


def _task(ensemble, data, labels, loss, class_weights, num_workers, order, **given):
    """Return what is learned, of the arguments of `fit`."""
    one_of("order", order, ("own", "shared"))
    at_least("epochs", given["epochs"])
    at_least("batch_size", given["batch_size"])
    settings = Optimisation(**{k: given[k] for k in Optimisation.__match_args__})
    opened_data = opened(data, labels)
    if isinstance(opened_data, tuple):
        source: Any = Tensors(ensemble, *opened_data)
    else:
        how = {k: given[k] for k in ("seed", "batch_size", "drop_last")}
        source = Loaded(ensemble, opened_data, num_workers, **how)
    loss_of, check = targets(ensemble, source.two, loss, class_weights)
    source.check(check)
    if source.samples:
        given["batch_size"] = min(given["batch_size"], source.samples)
    shared = order == "shared" or source.samples is None
    more = {k: given[k] for k in Task.__match_args__ if k in given}
    return Task(source, loss_of, settings, shared, **more)


@dataclass(frozen=True)
class Task:
    """What is learned, and in which order: all that an epoch of some members needs."""

    data: Any  # Tensors or Loaded
    loss: Loss
    settings: Optimisation
    shared: bool
    augment: Augment | None
    precision: str
    seed: int
    epochs: int
    batch_size: int
    drop_last: bool

    @property
    def steps(self) -> int | None:
        """How many batches the whole run has, where that is known."""
        if n := self.data.samples:
            last = 0 if self.drop_last else self.batch_size - 1
            return self.epochs * ((n + last) // self.batch_size)
        with contextlib.suppress(TypeError):
            return self.epochs * len(self.data.data)

    def run(self, losses, epoch, rows: slice, shard: Ensemble, take_step: Step):
        """Train a shard, the members `rows`, for an epoch; put down its losses."""
        shard.train()
        take_step.start(self.seed, epoch)
        seen = 0
        for x, y in self.batches(epoch, shard):
            take_step.next(epoch, self.steps)
            with _naming_one():
                losses[rows].add_(take_step(x, y), alpha=y.shape[1])
            seen += y.shape[1]
        losses[rows].div_(seen)
        take_step.end_epoch(losses[rows])

    def orders(self, generators, natural: bool):
        """Return an epoch's rows [generators, batch], each drawn on the CPU.

        So they are the same on every device. A full batch may have its natural order.
        """
        n = self.data.samples
        order = torch.stack([torch.randperm(n, generator=g) for g in generators])
        if natural and n == self.batch_size:
            order = torch.arange(n).expand_as(order)
        stop = n - n % self.batch_size * self.drop_last
        return order[:, :stop].split(self.batch_size, dim=1)

    def batches(self, epoch, ensemble):
        """Yield an epoch's batches, x and y [members, batch, ...], each in its order.

        What all members share is [1, batch, ...].
        """
        own = member_generators(self.seed, ensemble.member_ids, "order", epoch)
        drawing = own
        if self.shared:
            drawing = member_generators(self.seed, [0], "order", epoch)
        natural = not self.augment and ensemble.repeats == 1
        orders = self.orders(drawing, natural) if self.data.samples else ()
        for x, y in self.data.epoch(epoch, orders, len(drawing)):
            places = torch.arange(y.shape[1], device=y.device)
            places = places.expand(ensemble.members, -1)
            rows = ensemble.mixed(places, own)
            if rows is not places:  # of MIMO, which repeats samples
                x, y = map_tensors(lambda t, r=rows: t[0][r], x), y[0][rows]
                drawing = own
            yield _same(self.augment(x, drawing), y) if self.augment else x, y


def _same(x, y):
    """Return what `augment` returned; ValueError unless it is of the same samples."""
    if first_tensor(x).shape[:2] != y.shape[:2]:
        raise ValueError(
            f"augment must return inputs {[*y.shape[:2]]} [members, batch, ...], got "
            f"{[*first_tensor(x).shape]}"
        )
    return x


@contextlib.contextmanager
def _naming_one():
    """Say what to do where batch norm is given one sample."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            "the last batch is one sample, of which batch norm has no statistics; drop "
            "it by drop_last=True, or take another batch_size"
        ) from error


def _train(ensemble, task, saved, progress, callbacks):
    """Run the epochs that `saved` lacks; return all losses, and the steps taken."""
    workers = _workers(ensemble, task, saved.bounds)
    losses = torch.zeros(task.epochs, ensemble.members, device=workers.device)
    done = saved.restore(ensemble, workers, losses)
    before = workers.steps[0].done
    left = range(done, done if saved.ended else task.epochs)
    bar = tqdm(left, "fit", task.epochs, False, disable=not progress, initial=done)
    numbers = _numbers(task.precision, workers.device)
    # Whatever happens, the ensemble is in evaluation mode afterwards.
    with evaluating(ensemble), saved.kept(ensemble), bar, workers, numbers:
        for epoch in bar:
            workers.run(functools.partial(task.run, losses[epoch], epoch))
            done = epoch + 1
            state = State(done, losses[epoch].cpu(), ensemble.eval())
            _check_finite(state)
            for callback in callbacks:
                callback(state)
            saved.write(ensemble, workers, losses[:done], state.stopped)
            if state.stopped:
                break
    ensemble.eval().zero_grad()
    return losses[:done].cpu(), workers.steps[0].done - before


@contextlib.contextmanager
def _numbers(precision, device):
    """Compute in a precision; torch's generators are as before then."""
    generators = torch.random.fork_rng([device] * (device.type == "cuda"))
    with arithmetic(precision, device), generators:
        yield


def _workers(ensemble, task, bounds):
    """Return shards of the ensemble, each with its step, sized by the work of a step.

    It is counted on two samples of the first member, without gradients.
    """
    two = task.data.two
    first = first_tensor(two)
    make = functools.partial(
        make_step,
        loss=task.loss,
        settings=task.settings,
        precision=task.precision if first.is_cuda else "float32",
        flat=isinstance(two, Tensor) and two.ndim == 2,
    )
    whole = isinstance(ensemble, OneNetwork)
    one = ensemble if whole else ensemble.member(0)
    with evaluating(one), torch.no_grad(), Counted() as counted:
        call(one, two)
    rows = task.batch_size * ensemble.repeats
    passes = 1 if whole else ensemble.members
    multiply_adds = counted.multiply_adds * passes * rows // len(first)
    # Members that are read for together stay together, and what a user made.
    apart = isinstance(task.data, Tensors) and task.settings.by_name
    apart = apart and ensemble.can_shard()
    # Perceptrons' steps have generators of each member's; other noise is torch's one.
    if apart and ensemble.members > 1 and not isinstance(make(ensemble), ChainStep):
        # Batch norm wants two samples.
        four = map_tensors(lambda t: torch.cat([t, t]), two)
        apart = not draws_noise(one, four)
    return Workers(ensemble, multiply_adds, apart, make, bounds)


def _check_finite(state):
    """Refuse an epoch whose losses, or the weights after it, are not finite."""
    bad = (~state.losses.isfinite()).nonzero().flatten().tolist()
    if bad or not all(map(all_finite, trainable(state.ensemble))):
        what = f"the loss of members {bad}" if bad else "a weight"
        raise FloatingPointError(
            f"{what} is not finite in epoch {state.epoch}; lower lr, add warmup or "
            "max_grad_norm"
        )
