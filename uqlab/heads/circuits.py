"""Circuits: heads are removed one after the other, always the head that is missed least (Hydra, Algorithm 1)."""

import contextlib
import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core.checks import count_samples
from uqlab.core.devices import arithmetic
from uqlab.core.files import fingerprint, writing
from uqlab.core.modules import Inputs
from uqlab.heads.attention import Head, Place, addresses, check_labels, take
from uqlab.heads.leave_one_out import Search, TowerSearch, search_of
from uqlab.metrics import ood_detection
from uqlab.models import attentions

WRITE_EVERY = 60.0  # seconds within a step


class Circuit(list[Head]):
    """Heads in the order of their removal, with the scores that led to it.

    start: the score with all heads. scores: in each step, the score without the heads that were removed before and
    without this one; NaN for heads that were not tried. The head with the highest score is removed.
    """

    def __init__(
        self,
        heads: Iterable[Head],
        start: float,
        scores: Float[Tensor, "steps layers heads"],
    ):
        super().__init__(heads)
        self.start, self.scores = start, scores


def greedy_circuit(
    model: nn.Module,
    id_inputs: Inputs,
    id_labels: Int[Tensor, " id"] | None,
    ood_inputs: Inputs | None,
    *,
    score: Literal["acc", "ood", "avg"] = "avg",
    budget: int,
    batch_size: int | None = None,
    precision: str = "float32",
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
) -> Circuit:
    """The first `budget` heads that a greedy search removes, the least useful first (Hydra, Algorithm 1).

    In every step each remaining head is left out in turn, and the head without which the score is highest is removed
    for good; of equal scores, the head with the lowest (layer, head). The heads that stay are the circuit: CircAcc,
    CircOOD or CircAvg. All heads of a layer may go: the residual connection carries the layer's input past it. Of a
    `ZeroShot` both towers are searched together; without a head of the text tower only the prompts are encoded again.

    model: returns logits [batch, classes]; it is used in evaluation mode and is not changed.
    id_inputs [id, ...], id_labels, ood_inputs [ood, ...]: validation data in and out of distribution; tensors, or
        tensors by name. "acc" needs no ood_inputs and "ood" needs no id_labels: give None.
    score: "acc", accuracy; "ood", AUROC of the maximum softmax probability, ID against OOD; "avg", the mean of both.
    batch_size: inputs at a time; None for as many as stay in a CPU's cache, 256 on a GPU. It does not change scores.
    precision: as in `training.fit`.
    checkpoint: a file that is written after every step, and every minute within a step. A search that finds the file
        continues from it, also with a larger budget.

    Trying a head costs the layers after its attention. Each thread holds three tensors [batch, tokens, width] for each
    layer. Raises ValueError for a budget below 1 or above the number of heads, labels out of range, networks whose
    heads are not separable or whose layers do not run one after the other, and for a checkpoint that is damaged or
    belongs to another search; TypeError for inputs and labels that are not tensors.
    """
    found = attentions(model)
    every = [
        (layer, head)
        for layer, attention in enumerate(found)
        for head in range(attention.heads)
    ]
    if not 1 <= budget <= len(every):
        raise ValueError(
            f"budget must be 1 to {len(every)}, the number of heads, got {budget}"
        )
    if (score != "ood" and id_labels is None) or (
        score != "acc" and ood_inputs is None
    ):
        raise ValueError(
            f'score="{score}" needs {"id_labels" if id_labels is None else "ood_inputs"}, got None'
        )
    sets = (
        [id_inputs] if score == "acc" or ood_inputs is None else [id_inputs, ood_inputs]
    )
    counts = [count_samples(inputs) for inputs in sets]
    search = search_of(model, take(model, id_inputs, slice(2)))
    labels = (
        None
        if score == "ood" or id_labels is None
        else check_labels(search.network, id_inputs, id_labels)
    )

    state = _State(
        checkpoint,
        checkpoint and [score, precision, fingerprint(search.network, *sets, labels)],
    )
    for head in state.order():
        search.remove(*head)
    trials = [sum(counts) * (len(every) - step) for step in range(budget)]
    bar = tqdm(
        total=sum(trials), initial=sum(trials[: len(state.scores)]), desc=f"circuit ({score})", unit="input",
        unit_scale=True, disable=not progress, leave=False,
    )  # fmt: skip
    where = next(search.network.parameters()).device
    threads = torch.get_num_threads() if where.type == "cpu" else 1
    size = batch_size or min(search.rows, -(-sum(counts) // threads))

    def tried(
        heads: list[Place], inputs: Inputs, rows: slice, view: Search | TowerSearch
    ) -> tuple[Tensor, Tensor]:
        """For the network and without each head: uncertainty [1 + heads, batch], correct answers [1 + heads]."""
        uncertainty = torch.empty(
            1 + len(heads), rows.stop - rows.start, dtype=torch.float64
        )
        hits = torch.zeros(1 + len(heads), dtype=torch.int64)
        for i, logits in view.logits(take(search.network, inputs, rows), heads):
            uncertainty[i + 1] = -logits.double().log_softmax(1).amax(1)
            if labels is not None and inputs is id_inputs:
                hits[i + 1] = (logits.argmax(1) == labels[rows]).sum()
        return uncertainty, hits

    with bar, arithmetic(precision, where), _in_threads(search, threads) as in_order:
        while len(state.scores) < budget:
            removed = state.order()
            heads = [head for head in every if head not in removed]
            bar.update(len(heads) * state.done)
            state.begin(len(heads) + 1, sum(counts))
            batches = list(_batches(sets, counts, state.done, size))
            jobs = [
                functools.partial(tried, heads, inputs, rows)
                for inputs, rows, _ in batches
            ]
            for (_, _, columns), (uncertainty, hits) in zip(
                batches, in_order(jobs), strict=True
            ):
                state.uncertainty[:, columns] = uncertainty
                state.hits += hits
                state.advance(columns.stop)
                bar.update(len(heads) * (columns.stop - columns.start))
            whole, *without = (
                _score(score, state, row, counts[0]) for row in range(len(heads) + 1)
            )
            grid = torch.full(
                (len(found), max(attention.heads for attention in found)),
                math.nan,
                dtype=torch.float64,
            )
            for head, value in zip(heads, without, strict=True):
                grid[head] = value
            state.end(whole, grid)
            search.remove(*state.order()[-1])
    return Circuit(
        addresses(found, state.order()[:budget]),
        state.start,
        torch.stack(state.scores[:budget]),
    )


@contextlib.contextmanager
def _in_threads(
    search: Search | TowerSearch, threads: int
) -> Iterator[Callable[[list[Callable[[Any], Any]]], Iterator[Any]]]:
    """A function that gives the results of jobs in order; every thread has its own view of the search.

    Batches in several threads are faster than products that are split over several cores: those wait for the slowest.
    """
    if threads == 1:
        yield lambda jobs: (job(search) for job in jobs)
        return
    own = threading.local()

    def start() -> None:
        torch.set_num_threads(1)
        own.view = search.twin()

    pool = futures.ThreadPoolExecutor(threads, initializer=start)
    try:
        yield lambda jobs: pool.map(lambda job: job(own.view), jobs)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _score(score: str, state: "_State", row: int, count: int) -> float:
    """Accuracy on the first `count` inputs, AUROC of these against the other inputs, or the mean of both."""
    accuracy = int(state.hits[row]) / count
    if score == "acc":
        return accuracy
    auroc = ood_detection(
        state.uncertainty[row, :count], state.uncertainty[row, count:]
    ).auroc
    return auroc if score == "ood" else (accuracy + auroc) / 2


def _batches(
    sets: list[Inputs], counts: list[int], done: int, size: int
) -> Iterator[tuple[Inputs, slice, slice]]:
    """The batches that are not done yet: (inputs, the batch's rows in them, its columns among all inputs)."""
    before = 0
    for inputs, count in zip(sets, counts, strict=True):
        for low in range(max(0, done - before), count, size):
            high = min(low + size, count)
            yield inputs, slice(low, high), slice(before + low, before + high)
        before += count


class _State:
    """How far a search is: its finished steps, and what the first `done` inputs gave in the step in progress.

    It is read from the file at `path`, if there is one; `run` tells this search from others.
    """

    def __init__(self, path: str | os.PathLike | None, run: Any):
        self.path, self.run, self.written = path, run, time.monotonic()
        self.scores: list[Tensor] = []  # of each step [layers, heads]
        self.start, self.done = math.nan, 0
        self.uncertainty, self.hits = (
            torch.empty(0, 0),
            torch.empty(0, dtype=torch.int64),
        )
        if path is not None and os.path.exists(path):
            self._read(path)

    def order(self) -> list[Place]:
        """The heads that the finished steps removed: in each step the highest score, of equal scores the first."""
        return [
            divmod(int(step.nan_to_num(-math.inf).argmax()), step.shape[1])
            for step in self.scores
        ]

    def begin(self, rows: int, columns: int) -> None:
        """Begin a step, unless the checkpoint was written in the middle of it."""
        if self.done == 0:
            self.uncertainty = torch.zeros(rows, columns, dtype=torch.float64)
            self.hits = torch.zeros(rows, dtype=torch.int64)

    def advance(self, done: int) -> None:
        self.done = done
        if time.monotonic() - self.written > WRITE_EVERY:
            self._write()

    def end(self, whole: float, scores: Tensor) -> None:
        self.start = self.start if self.scores else whole
        self.scores.append(scores)
        self.done = 0
        self._write()

    def _read(self, path: str | os.PathLike) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["uqlab"])
                tensors = {
                    name: file.get_tensor(name)
                    for name in ("scores", "uncertainty", "hits")
                }
            if about.pop("sha256") != fingerprint(
                tensors, json.dumps(about, sort_keys=True)
            ):
                raise ValueError("its checksum is wrong")
            self.start, self.done = float(about["start"]), int(about["done"])
            self.scores, self.uncertainty, self.hits = (
                list(tensors["scores"]),
                tensors["uncertainty"],
                tensors["hits"],
            )
        except (SafetensorError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"checkpoint {path} is damaged or of another kind; delete the file: {error}"
            ) from error
        if about["run"] != self.run:
            raise ValueError(
                f"checkpoint {path} is of another search; delete the file or name another"
            )

    def _write(self) -> None:
        if self.path is None:
            return
        scores = torch.stack(self.scores) if self.scores else torch.empty(0, 0, 0)
        tensors = {"scores": scores, "uncertainty": self.uncertainty, "hits": self.hits}
        about = {"run": self.run, "start": self.start, "done": self.done}
        about["sha256"] = fingerprint(tensors, json.dumps(about, sort_keys=True))
        with writing(self.path) as temporary:
            save_file(tensors, temporary, {"uqlab": json.dumps(about)})
        self.written = time.monotonic()
