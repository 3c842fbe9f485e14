"""The training of ensembles: one loop for all methods, and its state in a folder."""

import contextlib
import copy
import functools
import itertools
import pickle
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from uqlab.core import modules
from uqlab.core.checks import (
    ArrayLike,
    at_least,
    first_tensor,
    one_ensemble,
    one_of,
    opened,
)
from uqlab.core.extras import extra
from uqlab.core.files import StrPath, built, fingerprint, writing
from uqlab.core.modules import (
    Counted,
    arithmetic,
    call,
    evaluating,
    map_tensors,
    trainable,
)
from uqlab.ensembles import Ensemble, OneNetwork, member_generators
from uqlab.training.batches import Loaded, Tensors
from uqlab.training.losses import Loss, targets
from uqlab.training.steps import ChainStep, check_settings, make_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

# inputs [members, batch, ...], one generator a member -> inputs
Augment = Callable[[Any, list[torch.Generator]], Any]
# What no result depends on, and what is told otherwise.
NOT_COMPARED = (
    "ensemble", "data", "labels", "callbacks", "num_workers", "progress", "resume",
)  # fmt: skip
NAME = "training.pt"  # of a training's state, in its folder


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

    loss: Tensor = field(repr=False)
    steps: int
    seconds: float

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
    callbacks: Sequence[Callable] | Callable = (),
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
        Functions of a `State`, or one, called after every epoch. With `resume` those
        that have `state_dict` and `load_state_dict` go on from their state.
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
        Whether a last batch that is not full is left out; a loader has its own.
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
        was begun with (not with the cosine); one that a callback has stopped only
        without callbacks.

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
    task = SimpleNamespace(**locals())
    started = time.perf_counter()
    one_ensemble(ensemble, "fit")
    follows = {k: v for k, v in vars(task).items() if k not in NOT_COMPARED}
    _prepare(task)
    follows |= task.source.about | {"members": list(ensemble.member_ids)}
    known = follows.pop("epochs")
    if scheduler == "cosine":
        follows["epochs, on whose number the cosine depends"] = known
    losses, steps = _train(task, Checkpoint(resume, ensemble, follows, task.callbacks))
    return History(losses, steps, time.perf_counter() - started)


def _prepare(task):
    """Check the arguments of `fit`, and make of them what an epoch needs."""
    one_of("order", task.order, ("own", "shared"))
    at_least("epochs", task.epochs)
    at_least("batch_size", task.batch_size)
    if callable(task.callbacks):
        task.callbacks = [task.callbacks]
    task.device = next(task.ensemble.parameters()).device
    check_settings(task)
    if not trainable(task.ensemble):
        raise ValueError(
            "nothing in this ensemble is trained, all its parameters are frozen: for "
            "dropout train the network first, by fit(from_members([network]), ...), "
            "else use .requires_grad_()"
        )
    data = opened(task.data, task.labels)
    memory = isinstance(data, tuple)
    source: Any = Tensors(task, *data) if memory else Loaded(task, data)
    task.loss, check = targets(task.ensemble, source.two, task.loss, task.class_weights)
    source.check(check)
    if source.samples:
        task.batch_size = min(task.batch_size, source.samples)
    task.shared = task.order == "shared" or source.samples is None
    task.source, task.steps = source, _steps(task, source)


def _steps(task, source):
    """Return how many batches the whole run has, where that is known."""
    if n := source.samples:
        last = 0 if task.drop_last else task.batch_size - 1
        return task.epochs * ((n + last) // task.batch_size)
    with contextlib.suppress(TypeError):
        return task.epochs * len(source.data)
    if task.scheduler == "cosine":
        raise ValueError(
            'scheduler="cosine" needs the number of batches, which this loader '
            "does not know; give a function of the optimiser"
        )


def _train(task, saved):
    """Run the epochs that `saved` lacks; return all losses, and the steps taken."""
    ensemble = task.ensemble
    rows, steps, cores = _shards(task, saved.state.get("shards"))
    losses = torch.zeros(task.epochs, ensemble.members, device=task.device)
    done = saved.restore(ensemble, steps, losses)
    before = steps[0].done
    left = range(done, done if saved.ended else task.epochs)
    bar = tqdm(left, "fit", task.epochs, False, disable=not task.progress, initial=done)
    pool = _pool(task.precision, task.device, len(steps), cores)
    # Whatever happens, the ensemble is in evaluation mode afterwards.
    with evaluating(ensemble), saved.kept(ensemble), bar, pool as over:
        for epoch in bar:
            list(over(functools.partial(_epoch, task, losses, epoch), rows, steps))
            done = epoch + 1
            stopped = _call_callbacks(
                task, State(done, losses[epoch].cpu(), ensemble.eval())
            )
            saved.write(ensemble, steps, losses[:done], stopped)
            if stopped:
                break
    ensemble.eval().zero_grad()
    return losses[:done].cpu(), steps[0].done - before


def _shards(task, count):
    """Return members, steps and the number of cores of shards: `count`, or as it pays.

    On a CPU members that need nothing from each other are trained side by side, without
    waiting: convolutional networks in 0.6, perceptrons of width 512 in 0.8 of the time.
    Where a step has little work, one core is faster than several, which wait for each
    other after every product: for a transformer of width 32 three times.
    """
    ensemble, cores = task.ensemble, torch.get_num_threads()
    whole = make_step(ensemble, task)
    most = 1
    if task.device.type == "cpu":
        apart = _apart(task, whole)
        # Threads within one operation pay off later than threads of whole members.
        cores = 1 if _work(task) < modules.ONE_THREAD * (1 if apart else 5) else cores
        most = min(cores, ensemble.members) if apart else 1
    count = count or most
    bounds = [round(i * ensemble.members / count) for i in range(count + 1)]
    rows = [slice(*pair) for pair in itertools.pairwise(bounds)]
    if count == 1:
        return rows, [whole], cores
    steps = [make_step(ensemble.shard(members), task) for members in rows]
    return rows, steps, max(1, cores // count)


def _apart(task, step):
    """Whether members share nothing that is trained, and no generator."""
    ensemble, two = task.ensemble, task.source.two
    by_name = isinstance(task.optimizer, str) and not callable(task.scheduler)
    if not (by_name and isinstance(task.source, Tensors) and ensemble.can_shard()):
        return False
    if isinstance(step, ChainStep):  # with generators of each member's
        return ensemble.members > 1
    network = copy.deepcopy(ensemble.member(0)).train()
    four = map_tensors(lambda t: torch.cat([t, t]), two)  # batch norm wants two
    with torch.no_grad(), torch.random.fork_rng([]):
        before = torch.get_rng_state()
        call(network, four)
        drawn = not torch.equal(before, torch.get_rng_state())
    return ensemble.members > 1 and not drawn


def _work(task):
    """Return the multiply-adds of a step's outputs, counted on the first member."""
    ensemble, two = task.ensemble, task.source.two
    whole = isinstance(ensemble, OneNetwork)
    one = ensemble if whole else ensemble.member(0)
    with evaluating(one), torch.no_grad(), Counted() as counted:
        call(one, two)
    passes = task.batch_size * ensemble.repeats * (1 if whole else ensemble.members)
    return counted.multiply_adds * passes / len(first_tensor(two))


@contextlib.contextmanager
def _pool(precision, device, count, cores):
    """Yield a map over shards; torch's generators are as before then.

    On a CPU each has a thread, also a single one, because settings are of the thread.
    """
    generators = torch.random.fork_rng([device] * (device.type == "cuda"))
    with arithmetic(precision, device), generators:
        if device.type != "cpu":
            yield map
            return
        before = torch.get_num_threads()

        def start():
            torch.set_num_threads(cores)
            # Long runs meet denormal numbers, which are 100 times slower.
            torch.set_flush_denormal(True)

        try:
            with futures.ThreadPoolExecutor(count, "", start) as pool:
                yield pool.map
        finally:
            torch.set_num_threads(before)


def _epoch(task, losses, epoch, rows, step):
    """Train a shard, the members `rows`, for an epoch; put down its losses."""
    step.ensemble.train()
    step.start(epoch)
    own, seen = losses[epoch, rows], 0
    try:
        for x, y in _batches(task, epoch, step.ensemble):
            own.add_(step(x, y), alpha=y.shape[1])
            seen += y.shape[1]
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            error.add_note(
                "the last batch is one sample: drop it by drop_last=True, of a "
                "DataLoader by drop_last=True of the DataLoader"
            )
        raise
    step.end_epoch(own.div_(seen))


def _batches(task, epoch, ensemble):
    """Yield an epoch's batches, x and y [members, batch, ...], each in its order.

    What all members share is [1, batch, ...].
    """
    source = task.source
    own = member_generators(task.seed, ensemble.member_ids, "order", epoch)
    drawing = own
    if task.shared:
        drawing = member_generators(task.seed, [0], "order", epoch)
    orders = _orders(task, drawing) if source.samples else ()
    for x, y in source.epoch(epoch, orders, len(drawing)):
        places = torch.arange(y.shape[1], device=y.device)
        places = places.expand(ensemble.members, -1)
        rows = ensemble.mixed(places, own)
        if rows is not places:  # of MIMO, which repeats samples
            x, y = map_tensors(lambda t, r=rows: t[0][r], x), y[0][rows]
            drawing = own
        if task.augment:
            x = task.augment(x, drawing)
            if first_tensor(x).shape[:2] != y.shape[:2]:
                got = list(first_tensor(x).shape)
                wanted = f"{list(y.shape[:2])} [members, batch, ...]"
                raise ValueError(f"augment must return inputs {wanted}, got {got}")
        yield x, y


def _orders(task, generators):
    """Return an epoch's rows [generators, batch], each drawn on the CPU.

    So they are the same on every device. A full batch may have its natural order.
    """
    n = task.source.samples
    order = torch.stack([torch.randperm(n, generator=g) for g in generators])
    if n == task.batch_size and not task.augment and task.ensemble.repeats == 1:
        order = torch.arange(n).expand_as(order)
    stop = n - n % task.batch_size * task.drop_last
    return order[:, :stop].split(task.batch_size, dim=1)


def _call_callbacks(task, state):
    """Tell the callbacks of an epoch; return whether one of them stopped.

    Losses, or the weights after the epoch, that are not finite are refused.
    """
    bad = (~state.losses.isfinite()).nonzero().flatten().tolist()
    if bad or not all(p.isfinite().all() for p in trainable(state.ensemble)):
        what = f"the loss of members {bad}" if bad else "a weight"
        raise FloatingPointError(
            f"{what} is not finite in epoch {state.epoch}; lower lr, add warmup or "
            "max_grad_norm"
        )
    for callback in task.callbacks:
        callback(state)
    return state.stopped


class Checkpoint:
    """The state of a training, in a folder, which says what training it is of.

    Parameters
    ----------
    folder
        Where it is, or will be; None: nothing is written.
    ensemble
        What is trained, with its initial weights or those that the folder holds.
    follows
        What else the training follows from, by name: settings, data.
    callbacks
        Those with `state_dict` and `load_state_dict` go on from their state too.

    Raises
    ------
    ValueError
        If the file in it is damaged or of another training.
    """

    def __init__(
        self,
        folder: StrPath | None,
        ensemble: Any,
        follows: Mapping[str, Any],
        callbacks: Sequence[Any] = (),
    ):
        self.callbacks = [c for c in callbacks if hasattr(c, "load_state_dict")]
        self.path = None if folder is None else Path(folder).expanduser() / NAME
        self.state: dict[str, Any] = {}
        self.ended = False
        if self.path is None:
            return
        follows = {"network": built(ensemble), **follows}
        follows["initial weights"] = dict(ensemble.state_dict())
        self.run = {name: fingerprint(value) for name, value in follows.items()}
        if self.path.exists():
            self.state = self.read(self.path)
            # Without a callback that stops, a training goes on that one has stopped.
            self.ended = self.state["ended"] and bool(callbacks)
            self._check(self.state["run"])

    def _check(self, theirs):
        """Raise ValueError if the file is of another run."""
        if self.run["initial weights"] == fingerprint(dict(self.state["weights"])):
            self.run["initial weights"] = theirs["initial weights"]
        if other := [name for name in self.run if theirs.get(name) != self.run[name]]:
            raise ValueError(
                f"resume: {self.path} is of another run, with other "
                f"{', '.join(other)}; give it the same, or name another folder"
            )

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """Return what a file holds; ValueError if it is damaged."""
        try:
            with zipfile.ZipFile(path) as file:
                if file.testzip():
                    raise RuntimeError("a wrong checksum")
            return modules.load_plain(path)
        except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(
                f"resume: {path} is damaged or not written by uqlab, or a state_dict "
                "holds other than tensors, arrays, numbers and texts (of a callback?): "
                f"{error}; copy it anew, or name another folder"
            ) from error

    def restore(self, ensemble: Any, steps: Sequence[Any], losses: Tensor) -> int:
        """Put the state back, if there is one; return the number of epochs done."""
        if not self.state:
            self.write(ensemble, steps, losses[:0], False)
            return 0
        done = len(self.state["losses"])
        if done > len(losses):
            raise ValueError(
                f"resume: {self.path} has done {done} epochs; "
                f"epochs must be at least as many, got {len(losses)}"
            )
        losses[:done] = self.state["losses"]
        ensemble.load_state_dict(self.state["weights"])
        parts = [*steps, *self.callbacks]
        for part, state in zip(parts, self.state["parts"], strict=False):
            part.load_state_dict(state)
        return done

    @contextlib.contextmanager
    def kept(self, ensemble: Any) -> Iterator[None]:
        """Leave the ensemble as the file has it if the training is stopped.

        So the same call goes on, whatever an epoch had done.
        """
        try:
            yield
        except BaseException:
            if self.path:
                ensemble.load_state_dict(self.read(self.path)["weights"])
            raise

    def write(
        self, ensemble: Any, steps: Sequence[Any], losses: Tensor, ended: bool
    ) -> None:
        """Write the state after an epoch in place of the last one."""
        if self.path is None:
            return
        state = {
            "run": self.run,
            "weights": ensemble.state_dict(),
            "shards": len(steps),
            "parts": [part.state_dict() for part in [*steps, *self.callbacks]],
            "losses": losses.clone(),
            "ended": ended,
        }
        with writing(self.path) as temporary:
            try:
                torch.save(state, temporary)
            except RuntimeError as error:  # a full disk
                text = f"resume: {self.path} cannot be written: {error}; make room"
                raise OSError(text) from error
            # What cannot be read again is found out while the last state is there.
            if len(losses) < 2 or self.callbacks:
                self.read(temporary)
