"""Circuits: heads are removed one by one, always the head that is missed least."""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core.checks import ArrayLike, as_inputs, at_least, count, one_of
from uqlab.core.devices import arithmetic
from uqlab.core.files import fingerprint
from uqlab.core.tensors import load_tensors, save_tensors
from uqlab.heads.attention import (
    Head,
    Place,
    addresses,
    check_labels,
    score_table,
    take,
)
from uqlab.heads.search import Search, TowerSearch, search_of
from uqlab.metrics import ood_detection
from uqlab.models import attentions


class Circuit(list[Head]):
    """Heads in the order of their removal, with the scores that led to it.

    Attributes
    ----------
    start : float
        The score with all heads.
    scores : Tensor
        In each step [steps, layers, heads] the score without the heads that were
        removed before and without this one; NaN for heads that were not tried.
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
    id_inputs: Any,
    id_labels: ArrayLike | None,
    ood_inputs: Any,
    *,
    score: Literal["acc", "ood", "avg"] = "avg",
    budget: int,
    batch_size: int | None = None,
    precision: str = "float32",
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
) -> Circuit:
    """Find the first heads that a greedy search removes, the least useful first.

    In every step each remaining head is left out in turn, and the head without which
    the score is highest is removed for good; of equal scores, the head with the lowest
    (layer, head). The heads that stay are the circuit: CircAcc, CircOOD or CircAvg. All
    heads of a layer may go: the residual connection carries the layer's input past it.
    Of a `ZeroShot` both towers are searched together.

    Parameters
    ----------
    model : nn.Module
        Returns logits [batch, classes]; it is used in evaluation mode and not changed.
    id_inputs, id_labels, ood_inputs
        Validation data in and out of distribution: inputs [samples, ...], or tensors by
        name, and classes [samples]. "acc" needs no OOD inputs and "ood" no labels.
    score : str
        "acc", accuracy; "ood", AUROC of the maximum softmax probability, ID against
        OOD; "avg", the mean of both.
    budget : int
        How many heads to remove.
    batch_size : int, optional
        Inputs at a time; by default as many as stay in a CPU's cache, 256 on a GPU. It
        does not change the scores.
    precision : str
        As in `training.fit`.
    progress : bool
        Whether a bar shows the time left.
    checkpoint : path, optional
        A file that is written after every step. A search that finds the file continues
        from it, also with a larger budget.

    Returns
    -------
    Circuit
        Pairs (layer, head); of two towers (tower, layer, head).

    Raises
    ------
    ValueError
        For a budget below 1 or above the number of heads, labels out of range, networks
        whose heads are not separable or whose layers run more than once, and for a
        checkpoint that is damaged or of another search.

    References
    ----------
    Gabetni et al. 2025, Algorithm 1.
    """
    found = attentions(model)
    every = [(i, head) for i, each in enumerate(found) for head in range(each.heads)]
    if not 1 <= budget <= len(every):
        raise ValueError(
            f"budget must be 1 to {len(every)}, the number of heads, got {budget}"
        )
    task = _Task(score, id_inputs, id_labels, ood_inputs)
    search = search_of(model, take(model, task.sets[0], slice(2)))
    task.check_labels(search.network)
    where = next(search.network.parameters()).device
    threads = torch.get_num_threads() if where.type == "cpu" else 1
    batches = task.batches(batch_size, search.rows, threads)
    run = [score, precision, fingerprint(search.network, *task.sets, task.labels)]
    start, scores = _read(checkpoint, run)
    order = [_best(step) for step in scores]
    for head in order:
        search.remove(*head)
    total, done = (steps * len(batches) for steps in (budget, len(scores)))
    bar = tqdm(
        total=total, initial=done, desc=f"circuit ({score})", unit="batch",
        disable=not progress, leave=False,
    )  # fmt: skip
    with bar, arithmetic(precision, where), _in_threads(search, threads) as results:
        while len(scores) < budget:
            heads = [head for head in every if head not in order]
            search.prepare(heads)
            answers = []
            for answer in results(partial(task.answers, heads), batches):
                answers.append(answer)
                bar.update()
            whole, *without = task.scores(answers)
            start = start if scores else whole
            scores.append(score_table(found, dict(zip(heads, without, strict=True))))
            order.append(_best(scores[-1]))
            search.remove(*order[-1])
            if checkpoint is not None:
                header = {"run": run, "start": start}
                save_tensors(checkpoint, {"scores": torch.stack(scores)}, header)
    table = torch.stack(scores[:budget])
    return Circuit(addresses(found, order[:budget]), start, table)


class _Task:
    """Validation data in distribution, then out of it, and what answers are worth."""

    def __init__(self, score: str, id_inputs: Any, id_labels: Any, ood_inputs: Any):
        one_of("score", score, ("acc", "ood", "avg"))
        needs = {"id_labels": id_labels} if score != "ood" else {}
        needs |= {"ood_inputs": ood_inputs} if score != "acc" else {}
        for name, value in needs.items():
            if value is None:
                raise ValueError(f'score="{score}" needs {name}, got None')
        sets = [id_inputs] if score == "acc" else [id_inputs, ood_inputs]
        self.sets = [as_inputs(inputs) for inputs in sets]
        self.labels = id_labels if score != "ood" else None
        self.score = score

    def check_labels(self, network: nn.Module) -> None:
        """Check the labels, where the score needs them."""
        if self.labels is not None:
            self.labels = check_labels(network, self.sets[0], self.labels)

    def batches(
        self, batch_size: int | None, rows: int, threads: int
    ) -> list[tuple[int, slice]]:
        """Return the number of a set, and which of its inputs."""
        total = sum(map(count, self.sets))
        size = min(rows, -(-total // threads))
        if batch_size is not None:
            size = at_least("batch_size", batch_size)
        batches = []
        for number, inputs in enumerate(self.sets):
            for low in range(0, count(inputs), size):
                batches.append((number, slice(low, low + size)))
        return batches

    def answers(
        self,
        heads: list[Place],
        search: Search | TowerSearch,
        batch: tuple[int, slice],
    ) -> tuple[Tensor, Tensor]:
        """Return the uncertainty of a batch and whether it is answered correctly.

        Both are [1 + heads, batch]: of the network, then without each of these heads.
        """
        number, rows = batch
        inputs = take(search.network, self.sets[number], rows)
        logits = torch.stack([*search.logits(inputs, heads)])
        uncertainty = -logits.double().log_softmax(2).amax(2)
        correct = torch.zeros_like(uncertainty)
        if number == 0 and self.labels is not None:
            correct += logits.argmax(2) == self.labels[rows]
        return uncertainty.cpu(), correct.cpu()

    def scores(self, answers: list[tuple[Tensor, Tensor]]) -> list[float]:
        """Return the score of the network, then those without each of the heads."""
        known = count(self.sets[0])
        uncertainty, correct = (torch.cat(t, 1) for t in zip(*answers, strict=True))
        accuracy = correct[:, :known].mean(1).tolist()
        if self.score == "acc":
            return accuracy
        auroc = [ood_detection(u[:known], u[known:]).auroc for u in uncertainty]
        if self.score == "ood":
            return auroc
        return [(a + b) / 2 for a, b in zip(accuracy, auroc, strict=True)]


@contextlib.contextmanager
def _in_threads(search: Search | TowerSearch, threads: int) -> Iterator[Callable]:
    """Return a function that gives a job's results for each item.

    Batches in several threads are faster than products that are split over several
    cores: those wait for the slowest.
    """
    if threads == 1:
        yield lambda job, items: (job(search, item) for item in items)
        return
    local = threading.local()

    def start() -> None:
        torch.set_num_threads(1)
        local.search = search.twin()

    pool = futures.ThreadPoolExecutor(threads, initializer=start)
    try:
        yield lambda job, items: pool.map(lambda item: job(local.search, item), items)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _best(scores: Tensor) -> Place:
    """Return the head with the highest score [layers, heads], the first of equals."""
    first = int(scores.nan_to_num(-math.inf).argmax())
    return divmod(first, scores.shape[1])


def _read(path: str | os.PathLike | None, run: list[Any]) -> tuple[float, list[Tensor]]:
    """Return the score with all heads and those of the finished steps, if any."""
    if path is None or not os.path.exists(path):
        return math.nan, []
    tensors, header = load_tensors(path)
    if header.get("run") != run:
        raise ValueError(
            f"checkpoint {path} is of another search; delete the file or name another"
        )
    return header["start"], [*tensors["scores"]]
