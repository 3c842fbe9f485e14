"""Training and prediction of ensembles: one loop for all methods, all members in one program where the layers allow."""

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core import devices
from uqlab.core.checks import all_finite, class_labels, count_samples
from uqlab.core.devices import arithmetic
from uqlab.core.modules import evaluating, like_parameters, logits_of
from uqlab.ensembles import Ensemble, FoldedEnsemble, built_once, member_seed
from uqlab.training.cache import Training
from uqlab.training.checkpoints import Checkpoint, described
from uqlab.training.steps import (
    AutogradStep,
    ChainStep,
    Loss,
    Optimizer,
    lr_factor,
    make_step,
)

MOST_PADDING = 1000  # pixels
Augment = Callable[
    [Tensor, list[torch.Generator]], Tensor
]  # inputs [members, batch, ...], one generator a member


@dataclass(frozen=True)
class History:
    """What a training run did: mean loss [epochs, members] while training, steps taken, wall-clock seconds."""

    loss: Tensor
    steps: int
    seconds: float


def fit(
    ensemble: Ensemble,
    inputs: Shaped[Tensor, "samples ..."],
    labels: Shaped[Tensor, "samples ..."],
    *,
    epochs: int,
    lr: float,
    batch_size: int = 128,
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd",
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    schedule: Literal["constant", "cosine", "step"] = "constant",
    milestones: tuple[int, ...] | list[int] = (),
    warmup: int = 0,
    clip: float | None = None,
    loss: str | Loss = "cross_entropy",
    class_weights: Float[Tensor, " classes"] | None = None,
    augment: Augment | None = None,
    precision: str = "float32",
    seed: int = 0,
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
    watch: Callable[[int], object] | None = None,
) -> History:
    """Train every member on its own shuffling of the same data, which is moved to the ensemble's device once.

    The batches, the dropout and the augmentation of member m depend on (seed, m) alone: ten members equal 4 + 6 and ten
    runs of one, to float tolerance.

    labels: classes [samples], or for loss="mse" targets like the outputs.
    optimizer: "sgd", "adam" or "adamw". clip: the largest gradient norm of one member.
    schedule: "constant", "cosine" (to 0 over the run) or "step" (a tenth at each of `milestones`, in epochs), after
        `warmup` steps of linear increase.
    loss: "cross_entropy", weighed by `class_weights` as in torch, "mse", or a function (outputs, labels) -> [members].
    augment: a function of inputs [members, batch, ...] and one generator a member. precision: see `arithmetic`.
    checkpoint: a file that is written after every epoch and resumed from, bit-identical on a CPU.
    watch: called after every epoch with the number of epochs done.

    Where UQLAB_CACHE names a folder, a training that was done before is read from it, and one that was stopped goes on
    where it was a minute before, unless there is a `checkpoint` or a `watch`. Raises ValueError for empty or mismatched
    data, labels out of range, unknown names and a checkpoint that is damaged or of another run; TypeError for what is
    no ensemble or tensor; FloatingPointError for a loss or a weight that is not finite. After an error every module has
    the mode that it had before.
    """
    started = time.perf_counter()
    _check_data(inputs, labels)
    _check_loss(loss, class_weights)
    first_parameter = next(ensemble.parameters())
    where = first_parameter.device
    inputs = inputs.detach().to(
        where, first_parameter.dtype if inputs.is_floating_point() else None
    )
    labels = labels.detach().to(where)
    if not callable(loss):
        labels = _check_labels(ensemble, inputs, labels, loss, class_weights)
    steps_per_epoch = math.ceil(len(inputs) / batch_size)
    factor = lr_factor(schedule, epochs, steps_per_epoch, milestones, warmup)
    how = Optimizer(optimizer, weight_decay, momentum, clip)
    run = {
        "members": list(ensemble.member_ids),
        "seed": seed,
        "epochs": epochs,
        "lr": lr,
        "batch_size": batch_size,
    }
    run |= {
        "optimizer": list(how),
        "schedule": [schedule, list(milestones), warmup],
        "precision": precision,
    }
    run |= {"loss": described(loss), "augment": described(augment)}
    content = {"inputs": inputs, "labels": labels, "class_weights": class_weights}
    kept = (
        None
        if checkpoint or watch
        else Training.of(ensemble, [run, content, where.type], loss, augment)
    )
    if kept and (learned := kept.load()):
        ensemble.eval().zero_grad()
        return History(*learned)
    content |= {"initial weights": ensemble}
    resumed = (
        kept.state_of(run, content)
        if kept
        else Checkpoint.read(checkpoint, run, content)
    )

    def make(shard: Ensemble) -> ChainStep | AutogradStep:
        return make_step(
            shard, loss, class_weights, how, precision, flat=inputs.ndim == 2
        )

    # An activation, of which each bias makes one an input, costs about as much as a hundred multiply-adds. Of one
    # network, which has no biases of members, the kernels are what counts as often: once a pixel.
    rows, dear = min(batch_size, len(inputs)), 4 if ensemble.members == 1 else 2
    multiply_adds = rows * sum(
        p.numel() * (100 if p.ndim == dear else 1) for p in ensemble.parameters()
    )
    workers = Workers(ensemble, multiply_adds, make, resumed.bounds)
    losses = torch.zeros(epochs, ensemble.members, device=where)
    first = resumed.restore(ensemble, workers.steps, losses)

    def run_epoch(
        epoch: int, rows: slice, shard: Ensemble, take_step: ChainStep | AutogradStep
    ) -> None:
        shard.train().reseed(seed, epoch)
        batches = _batches(inputs, labels, batch_size, augment, seed, epoch, shard)
        for step, (x, y) in enumerate(batches):
            values = take_step(x, y, lr * factor(epoch * steps_per_epoch + step))
            losses[epoch, rows].add_(
                values, alpha=x.shape[1] / (shard.repeats * len(inputs))
            )

    bar = tqdm(
        total=epochs,
        initial=first,
        desc="fit",
        unit="epoch",
        disable=not progress,
        leave=False,
    )
    with evaluating(ensemble), bar, workers, arithmetic(precision, where):
        for epoch in range(first, epochs):
            workers.run(functools.partial(run_epoch, epoch))
            _check_finite(ensemble, losses[epoch], epoch)
            resumed.write(epoch + 1, ensemble, workers.bounds, workers.steps, losses)
            if watch:
                watch(epoch + 1)
            bar.update()
            if progress:
                bar.set_postfix_str(
                    f"loss {losses[epoch].mean().item():.3f}", refresh=False
                )
    ensemble.eval().zero_grad()
    history = History(
        losses.cpu(), (epochs - first) * steps_per_epoch, time.perf_counter() - started
    )
    if kept:
        kept.save(history.loss, history.steps, history.seconds)
    return history


class Workers:
    """Shards of the ensemble's members, on a CPU one a thread, each with a training step and an optimiser of its own.

    Members need nothing from each other, so a shard runs through an epoch without waiting; splitting every product over
    the cores instead means a barrier after each, which beside busy neighbours costs more than the products themselves.
    A folded ensemble of which a step takes fewer multiply-adds than ONE_THREAD (ten perceptrons of the paper's width
    x1, batch 128, are there) is fastest in one thread, and so is one small network: the embedded transformer takes
    3.2 s in one and 5.2 s in two.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        multiply_adds: int,
        make: Callable[[Any], Any],
        bounds: list[int] | None = None,
    ):
        self.threads = torch.get_num_threads()
        self.on_cpu = next(ensemble.parameters()).device.type == "cpu"
        count, self.threads_each = 1, self.threads
        if self.on_cpu and ensemble.can_shard():
            foldable = isinstance(ensemble, FoldedEnsemble) or ensemble.members == 1
            small = foldable and multiply_adds < devices.ONE_THREAD
            count = 1 if small else min(self.threads, ensemble.members)
            self.threads_each = 1 if small else self.threads // count
        # A resumed run keeps its shards, whatever the number of threads is now.
        self.bounds = bounds or [
            round(i * ensemble.members / count) for i in range(count + 1)
        ]
        self.rows = [slice(low, high) for low, high in itertools.pairwise(self.bounds)]
        self.shards = (
            [ensemble.shard(rows) for rows in self.rows]
            if len(self.rows) > 1
            else [ensemble]
        )
        self.steps = [make(shard) for shard in self.shards]
        self.pool: futures.ThreadPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        if self.on_cpu:
            self.pool = futures.ThreadPoolExecutor(
                len(self.shards), initializer=self._start
            )
        return self

    def __exit__(self, *exc: object) -> None:
        if self.pool is not None:
            self.pool.shutdown()
            torch.set_num_threads(self.threads)

    def _start(self) -> None:
        torch.set_num_threads(self.threads_each)
        torch.set_flush_denormal(
            True
        )  # long runs meet denormals, which are 100 times slower; a state of the thread

    def run(self, task: Callable[[slice, Any, Any], None]) -> None:
        """Call task(rows, shard, step) for every shard, all shards at once."""
        each = map if self.pool is None else self.pool.map
        list(each(task, self.rows, self.shards, self.steps))


def _batches(
    inputs: Tensor,
    labels: Tensor,
    batch_size: int,
    augment: Augment | None,
    seed: int,
    epoch: int,
    ensemble: Ensemble,
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch's batches of an ensemble, x and y [members, batch, ...], in orders of their own.

    A full batch needs no order and no copy. x lies in the same memory in every step: fresh memory would cost as much as
    filling it. Orders are drawn on the CPU, so they are the same on every device.
    """
    ids = ensemble.member_ids
    if batch_size >= len(inputs) and augment is None and ensemble.repeats == 1:
        yield (
            inputs.expand(len(ids), *inputs.shape),
            labels.expand(len(ids), *labels.shape),
        )
        return
    generators = [
        torch.Generator().manual_seed(member_seed(seed, m, "order", epoch)) for m in ids
    ]
    orders = torch.stack(
        [torch.randperm(len(inputs), generator=g) for g in generators]
    ).to(inputs.device)
    memory = inputs.new_empty(
        len(ids) * ensemble.repeats * min(batch_size, len(inputs)), *inputs.shape[1:]
    )
    for drawn in orders.split(batch_size, dim=1):  # [members, batch]
        rows = ensemble.mixed(drawn, generators)
        flat = rows.flatten()
        x = torch.index_select(inputs, 0, flat, out=memory[: len(flat)]).unflatten(
            0, rows.shape
        )
        y = labels.index_select(0, flat).unflatten(0, rows.shape)
        yield (x if augment is None else augment(x, generators)), y


@torch.no_grad()
def predict(
    ensemble: nn.Module,
    inputs: Shaped[Tensor, "samples ..."],
    *,
    batch_size: int = 1024,
    precision: str = "float32",
    progress: bool = False,
) -> Float[Tensor, "members samples *outputs"]:
    """The logits of every member on every input, [members, samples, classes], float32 on the CPU, in evaluation mode.

    A plain module, whose outputs are [samples, classes], counts as an ensemble of one. Weights of members that must be
    built are built once for all batches. Where the memory of a GPU does
    not suffice, fewer members and then fewer inputs go through at once.
    """
    count_samples(inputs)
    where = next(ensemble.parameters(), torch.empty(0)).device
    chunks, start = [], 0
    bar = tqdm(
        total=len(inputs),
        desc="predict",
        unit="input",
        disable=not progress,
        leave=False,
    )
    with bar, evaluating(ensemble), arithmetic(precision, where), built_once():
        while start < len(inputs):
            some = inputs[start : start + batch_size]
            try:
                logits = logits_of(ensemble(like_parameters(ensemble, some))).float()
            except torch.OutOfMemoryError:
                if batch_size == 1:
                    raise
                batch_size //= 2
                continue
            chunks.append(
                (logits if isinstance(ensemble, Ensemble) else logits[None]).cpu()
            )
            start += len(some)
            bar.update(len(some))
    return torch.cat(chunks, dim=1)


def crop_flip(
    x: Tensor, generators: list[torch.Generator], padding: int = 4, flip: bool = True
) -> Tensor:
    """Random crops of the zero-padded images [members, batch, channels, height, width]; every second is mirrored."""
    if (
        x.ndim != 5
        or len(generators) != len(x)
        or 0 in x.shape
        or not 0 <= padding <= MOST_PADDING
    ):
        raise ValueError(
            "crop_flip takes x [members, batch, channels, height, width], a generator for each member and a padding of "
            f"0 to {MOST_PADDING}, got {list(x.shape)}, {len(generators)} generators and {padding}"
        )
    members, batch, _, height, width = x.shape
    draws = torch.stack(
        [torch.randint(2 * padding + 1, (2, batch), generator=g) for g in generators]
    ).to(x.device)
    flips = torch.stack(
        [torch.rand(batch, generator=g) < 0.5 * flip for g in generators]
    ).to(x.device)
    rows = draws[:, 0, :, None] + torch.arange(
        height, device=x.device
    )  # [members, batch, height]
    columns = draws[:, 1, :, None] + torch.arange(width, device=x.device)
    columns = torch.where(flips[..., None], columns.flip(-1), columns)
    padded = F.pad(x, (padding,) * 4)
    m = torch.arange(members, device=x.device)[:, None, None, None]
    b = torch.arange(batch, device=x.device)[None, :, None, None]
    # Indexing apart from the channel axis puts that axis last: [members, batch, height, width, channels].
    return padded[m, b, :, rows[..., :, None], columns[..., None, :]].movedim(-1, 2)


def _check_data(inputs: Tensor, labels: Tensor) -> None:
    samples = count_samples(inputs)
    if labels.ndim == 0 or samples != len(labels):
        raise ValueError(
            f"inputs and labels must be equally many, got {list(inputs.shape)} and {list(labels.shape)}"
        )
    if inputs.dtype == torch.uint8:
        raise ValueError(
            "inputs are uint8; give images as floating point in [0, 1]: inputs.float() / 255"
        )


def _check_loss(loss: str | Loss, class_weights: Tensor | None) -> None:
    if not callable(loss) and loss not in ("cross_entropy", "mse"):
        raise ValueError(
            f'loss must be "cross_entropy", "mse" or a function (outputs, labels) -> [members], got {loss!r}'
        )
    if class_weights is not None and loss != "cross_entropy":
        raise ValueError(
            f'class_weights weigh the loss "cross_entropy" alone, got loss={loss!r}'
        )


def _check_labels(
    ensemble: Ensemble,
    inputs: Tensor,
    labels: Tensor,
    loss: str,
    class_weights: Tensor | None,
) -> Tensor:
    """The labels as the loss wants them, checked against the outputs for one input before training starts."""
    with torch.no_grad(), evaluating(ensemble):
        outputs = ensemble(inputs[:1])[0, 0]
    if loss != "cross_entropy":
        if (
            labels[0].numel() != outputs.numel()
            or not labels.is_floating_point()
            or not labels.isfinite().all()
        ):
            need = f"finite floating targets of {outputs.numel()} values a sample, like the outputs"
            raise ValueError(
                f'loss="mse" needs {need}; got {list(labels.shape)} {labels.dtype}'
            )
        return labels.to(inputs.dtype)
    classes = outputs.shape[-1]
    if class_weights is not None and (
        class_weights.shape != (classes,)
        or not (class_weights >= 0).all()
        or not class_weights.sum() > 0
    ):
        raise ValueError(
            f"class_weights must be [{classes}], not negative and not all zero, got {class_weights}"
        )
    return class_labels(labels, len(inputs), classes)


def _check_finite(ensemble: Ensemble, losses: Tensor, epoch: int) -> None:
    """Raise FloatingPointError unless the losses of an epoch are finite, and the weights after its last update."""
    bad, what = (~losses.isfinite()).nonzero().flatten().tolist(), "a weight"
    if bad:
        what = f"the loss of member {bad[0]} ({len(bad)} of {len(losses)} members)"
    if bad or not all(all_finite(p) for p in ensemble.parameters() if p.requires_grad):
        raise FloatingPointError(
            f"{what} is not finite in epoch {epoch + 1}; lower lr, add warmup or clip"
        )
