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

from uqlab.core.checks import ArrayLike, as_inputs, at_least, between, count, one_of
from uqlab.core.devices import arithmetic
from uqlab.core.files import StrPath, fingerprint
from uqlab.core.modules import take
from uqlab.core.reading import held
from uqlab.core.tensors import load_tensors, save_tensors
from uqlab.heads.attention import Head, Place, addresses, check_labels, score_table
from uqlab.heads.search import Search, TowerSearch, search_of
from uqlab.metrics import ood_detection
from uqlab.models import Attention, attentions


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
        self.start = start
        self.scores = scores


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
    checkpoint: StrPath | None = None,
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
    layers = attentions(model)
    heads = sum(layer.heads for layer in layers)
    between("budget", budget, 1, heads, ", the number of heads")
    task = _Task(model, score, id_inputs, id_labels, ood_inputs, batch_size)
    run = [score, precision, task.fingerprint()]
    steps = _Steps(task.search, layers, checkpoint, run)
    done = len(steps.order) * len(task.batches)
    bar = tqdm(
        total=budget * len(task.batches), initial=done, desc=f"circuit ({score})",
        unit="batch", disable=not progress, leave=False,
    )  # fmt: skip
    with bar, arithmetic(precision, task.device), task.in_threads() as results:
        while len(steps.order) < budget:
            left = steps.left()
            steps.add(left, *task.scores(left, results, bar))
    return steps.circuit(budget)


class _Steps:
    """The finished steps of a search, which a file holds if there is a path."""

    def __init__(
        self,
        search: Search | TowerSearch,
        layers: list[Attention],
        path: StrPath | None,
        run: list[Any],
    ):
        self.search = search
        self.layers = layers
        self.path = path
        self.run = run
        self.start = math.nan
        self.scores = []
        self.order = []
        if path is None or not os.path.exists(path):
            return
        tensors, header = load_tensors(path)
        if header.get("run") != run:
            raise ValueError(
                f"checkpoint {path} is of another search; delete the file or name "
                "another"
            )
        self.start = header["start"]
        for table in tensors["scores"]:
            self._remove_best(table)

    def _remove_best(self, table: Tensor) -> None:
        """Remove the head of the highest score [layers, heads], the first of equals."""
        first = int(table.nan_to_num(-math.inf).argmax())
        place = divmod(first, table.shape[1])
        self.search.remove(*place)
        self.scores.append(table)
        self.order.append(place)

    def left(self) -> list[Place]:
        """Return the heads that are not removed."""
        heads = []
        for number, layer in enumerate(self.layers):
            heads += [(number, head) for head in range(layer.heads)]
        return [head for head in heads if head not in self.order]

    def add(self, heads: list[Place], start: float, *scores: float) -> None:
        """Note the score of the network, and those without each of these heads."""
        if not self.scores:
            self.start = start
        without = dict(zip(heads, scores, strict=True))
        self._remove_best(score_table(self.layers, without))
        if self.path is not None:
            header = {"run": self.run, "start": self.start}
            save_tensors(self.path, {"scores": torch.stack(self.scores)}, header)

    def circuit(self, budget: int) -> Circuit:
        """Return the first steps."""
        heads = addresses(self.layers, self.order[:budget])
        return Circuit(heads, self.start, torch.stack(self.scores[:budget]))


class _Task:
    """Data in distribution, then out of it, and what a network's answers are worth."""

    def __init__(
        self,
        model: nn.Module,
        score: str,
        id_inputs: Any,
        id_labels: Any,
        ood_inputs: Any,
        batch_size: int | None,
    ):
        one_of("score", score, ("acc", "ood", "avg"))
        id_inputs, id_labels = held(id_inputs, id_labels)
        needs = {"id_labels": id_labels} if score != "ood" else {}
        needs |= {"ood_inputs": ood_inputs} if score != "acc" else {}
        for name, value in needs.items():
            if value is None:
                raise ValueError(f'score="{score}" needs {name}, got None')
        sets = [id_inputs] if score == "acc" else [id_inputs, ood_inputs]
        self.score = score
        self.sets = [as_inputs(inputs) for inputs in sets]
        self.search = search_of(model, take(model, self.sets[0], slice(2)))
        self.labels = None
        if score != "ood":
            self.labels = check_labels(self.search.network, self.sets[0], id_labels)
        self.device = next(model.parameters()).device
        self.threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        self.batches = self._batches(batch_size)

    def _batches(self, batch_size: int | None) -> list[tuple[int, slice]]:
        """Return the number of a set, and which of its inputs."""
        total = sum(map(count, self.sets))
        size = min(self.search.rows, -(-total // self.threads))
        if batch_size is not None:
            size = at_least("batch_size", batch_size)
        batches = []
        for number, inputs in enumerate(self.sets):
            lows = range(0, count(inputs), size)
            batches += [(number, slice(low, low + size)) for low in lows]
        return batches

    def fingerprint(self) -> str:
        """Return what tells this network and these data from others."""
        return fingerprint(self.search.network, *self.sets, self.labels)

    def scores(self, heads: list[Place], results: Callable, bar: tqdm) -> list[float]:
        """Return the score of the network, then those without each of the heads."""
        self.search.prepare(heads)
        answers = []
        for answer in results(partial(self._answers, heads), self.batches):
            answers.append(answer)
            bar.update()
        known = count(self.sets[0])
        uncertainty, correct = (torch.cat(t, 1) for t in zip(*answers, strict=True))
        accuracy = correct[:, :known].mean(1).tolist()
        if self.score == "acc":
            return accuracy
        auroc = [ood_detection(u[:known], u[known:]).auroc for u in uncertainty]
        if self.score == "ood":
            return auroc
        return [(a + b) / 2 for a, b in zip(accuracy, auroc, strict=True)]

    def _answers(
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

    @contextlib.contextmanager
    def in_threads(self) -> Iterator[Callable]:
        """Return a function that gives a job's results for each item.

        Batches in several threads are faster than products that are split over several
        cores: those wait for the slowest.
        """
        if self.threads == 1:
            yield lambda job, items: (job(self.search, item) for item in items)
            return
        local = threading.local()

        def start():
            torch.set_num_threads(1)
            local.search = self.search.twin()

        pool = futures.ThreadPoolExecutor(self.threads, initializer=start)
        try:
            yield lambda job, items: pool.map(
                lambda item: job(local.search, item), items
            )
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self.threads)
