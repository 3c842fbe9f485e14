"""Circuits: a greedy search removes the least useful attention head at each step."""

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

from uqlab.core.checks import (
    ArrayLike,
    Inputs,
    as_inputs,
    at_least,
    between,
    count,
    one_of,
)
from uqlab.core.devices import arithmetic
from uqlab.core.files import StrPath, fingerprint
from uqlab.core.modules import first_of, frozen, take
from uqlab.core.reading import held
from uqlab.core.tensors import load_tensors, save_tensors
from uqlab.heads.attention import Head, Place, addresses, check_labels, run, score_table
from uqlab.metrics import ood_detection
from uqlab.models import Attention, attentions


class Circuit(list[Head]):
    """Heads in the order of their removal, with the scores of every step.

    Attributes
    ----------
    start : float
        The score with all heads.
    scores : Tensor
        The score [steps, layers, heads] without the heads of earlier steps and without
        this head; NaN for heads that were removed before.
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
    """Find the heads that a greedy search removes, the least useful head first.

    Each step tries every remaining head and removes the head without which the score is
    highest. Of equal scores, the head with the lowest (layer, head) goes first. The
    heads that remain are the circuit: CircAcc, CircOOD or CircAvg. A layer may lose all
    heads: the residual connection then carries its input. In a `ZeroShot` the search
    covers both towers.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts and that returns logits [batch, classes]. It runs
        in evaluation mode and is not changed.
    id_inputs, id_labels, ood_inputs
        Validation data in and out of distribution: inputs [samples, ...], or tensors by
        name, and classes [samples]. "acc" needs no OOD inputs and "ood" no labels.
    score : str
        "acc", accuracy; "ood", AUROC of the maximum softmax probability, ID against
        OOD; "avg", the mean of both.
    budget : int
        Number of heads to remove.
    batch_size : int, optional
        Samples in one pass. It does not change the scores.
    precision : str
        As in `training.fit`.
    progress : bool
        Whether to show a progress bar.
    checkpoint : path, optional
        A file, written after every step. A search continues from an existing file, also
        with a larger budget.

    Returns
    -------
    Circuit
        Pairs (layer, head); for two towers (tower, layer, head).

    Raises
    ------
    ValueError
        If `budget` is below 1 or above the number of heads, if labels are out of range,
        if the network's layers do not run once each in their order, or if `checkpoint`
        is damaged or belongs to another search.

    References
    ----------
    Gabetni et al. 2025, Algorithm 1.
    """
    layers = attentions(model)
    between("budget", budget, 1, len(_places(layers)), ", the number of heads")
    one_of("score", score, ("acc", "ood", "avg"))
    task = _Task(model, score, id_inputs, id_labels, ood_inputs, batch_size)
    header = {"run": [score, precision, task.fingerprint()], "start": math.nan}
    tables = _read(checkpoint, header)
    bar = tqdm(
        desc=f"circuit ({score})", total=budget, initial=len(tables), unit="head",
        disable=not progress, leave=False,
    )  # fmt: skip
    with bar, arithmetic(precision, task.device):
        for start, table in task.steps(layers, tables, budget):
            header["start"] = header["start"] if tables else start
            tables.append(table)
            bar.update()
            if checkpoint is not None:
                save_tensors(checkpoint, {"scores": torch.stack(tables)}, header)
    return _circuit(layers, header["start"], tables[:budget])


def _circuit(layers: list[Attention], start: float, tables: list[Tensor]) -> Circuit:
    heads = addresses(layers, map(_best, tables))
    return Circuit(heads, start, torch.stack(tables))


def _places(layers: list[Attention]) -> list[Place]:
    """Return all heads of a network."""
    return [(n, h) for n, layer in enumerate(layers) for h in range(layer.heads)]


def _read(path: StrPath | None, header: dict[str, Any]) -> list[Tensor]:
    """Return the finished steps in a checkpoint, and note the score at its start."""
    if path is None or not os.path.exists(path):
        return []
    tensors, found = load_tensors(path)
    if found.get("run") != header["run"]:
        raise ValueError(
            f"checkpoint {path} is of another search; delete the file or name another"
        )
    header["start"] = found["start"]
    return [*tensors["scores"]]


def _best(table: Tensor) -> Place:
    """Return the head with the highest score [layers, heads], the first of equals."""
    return divmod(int(table.nan_to_num(-math.inf).argmax()), table.shape[1])


class CachedForward:
    """The forward of a layer. It returns `replay` instead of running, if that is set.

    A later layer may change its input in place, so that outputs are copied.
    """

    def __init__(self, module: nn.Module, calls: list[Any]):
        self.forward = module.forward
        self.calls = calls
        self.output: Any = None
        self.replay: Any = None
        module.forward = self

    def __call__(self, *args, **kwargs):
        if self.replay is not None:
            return _copied(self.replay)
        self.calls.append(self)
        output = self.forward(*args, **kwargs)
        self.output = _copied(output)
        return output


def _copied(output: Any) -> Any:
    states = first_of(output).clone()
    return (states, *output[1:]) if isinstance(output, tuple) else states


class CachedNetwork:
    """A copy of a network that runs again only what follows an ablated head.

    Weights are shared with the model, except those of the output projections.
    """

    def __init__(self, model: nn.Module):
        self.network: Any = frozen(model).eval()
        self.attentions = attentions(self.network)
        self.calls = []
        self.layers = []
        for attention in self.attentions:
            projection = self.network.get_submodule(attention.output.module)
            weight = projection.weight.clone()
            projection.weight = nn.Parameter(weight, requires_grad=False)
            layer = self.network.get_submodule(attention.layer)
            self.layers.append(CachedForward(layer, self.calls))

    @torch.no_grad()
    def logits(
        self, inputs: Inputs, removed: list[Place], heads: list[Place]
    ) -> Iterator[Tensor]:
        """Yield the logits [batch, classes] without the heads that are removed.

        Then those without each of `heads` as well.
        """
        for layer, head in removed:
            self.attentions[layer].output.of(self.network, head).zero_()
        self.calls.clear()
        yield run(self.network, inputs)
        self._check_calls()
        outputs = [layer.output for layer in self.layers]
        for layer, head in heads:
            block = self.attentions[layer].output.of(self.network, head)
            columns = block.clone()
            block.zero_()
            tower = self.attentions[layer].tower
            for n, attention in enumerate(self.attentions):
                follows = attention.tower == tower and n >= layer
                self.layers[n].replay = None if follows else outputs[n]
            yield run(self.network, inputs)
            block.copy_(columns)
            for cached in self.layers:
                cached.replay = None

    def _check_calls(self) -> None:
        """Raise ValueError unless the layers of each tower ran once, in their order."""
        order = [self.layers.index(layer) for layer in self.calls]
        order.sort(key=lambda n: self.attentions[n].tower)
        if order != [*range(len(self.layers))]:
            raise ValueError(
                f"{type(self.network).__name__} cannot be searched: a layer runs more "
                "than once in a pass, or not in its order"
            )


class _Task:
    """The data in and out of distribution, and the score of a network on them."""

    def __init__(
        self,
        model: nn.Module,
        score: str,
        id_inputs: Any,
        id_labels: Any,
        ood_inputs: Any,
        batch_size: int | None,
    ):
        id_inputs, labels = held(id_inputs, id_labels)
        needs = {"id_labels": labels} if score != "ood" else {}
        needs |= {"ood_inputs": ood_inputs} if score != "acc" else {}
        for name, value in needs.items():
            if value is None:
                raise ValueError(f'score="{score}" needs {name}, got None')
        sets = [id_inputs] if score == "acc" else [id_inputs, ood_inputs]
        self.model = frozen(model).eval()
        self.score = score
        self.sets = [as_inputs(inputs) for inputs in sets]
        self.labels = None
        if score != "ood":
            self.labels = check_labels(self.model, self.sets[0], labels)
        self.device = next(model.parameters()).device
        self.threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        self.batches = self._batches(batch_size)

    def _batches(self, batch_size: int | None) -> list[tuple[int, slice]]:
        """Return the number of a set, and rows of it, for every batch."""
        if batch_size is None:  # more samples do not stay in a CPU's cache
            most = 64 if self.device.type == "cpu" else 256
            batch_size = min(most, -(-sum(map(count, self.sets)) // self.threads))
        at_least("batch_size", batch_size)
        batches = []
        for number, inputs in enumerate(self.sets):
            for low in range(0, count(inputs), batch_size):
                batches.append((number, slice(low, low + batch_size)))
        return batches

    def fingerprint(self) -> str:
        """Return a digest of the network and the data."""
        return fingerprint(self.model, *self.sets, self.labels)

    def steps(
        self, layers: list[Attention], tables: list[Tensor], budget: int
    ) -> Iterator[tuple[float, Tensor]]:
        """Yield the score so far and the table [layers, heads] of each further step."""
        removed = [*map(_best, tables)]
        with self.in_threads() as results:
            while len(removed) < budget:
                left = [head for head in _places(layers) if head not in removed]
                answers = results(partial(self._answers, removed, left), self.batches)
                both = (torch.cat(t, 1) for t in zip(*answers, strict=True))
                start, *scores = map(self._score, *both)
                table = score_table(layers, dict(zip(left, scores, strict=True)))
                removed.append(_best(table))
                yield start, table

    def _score(self, uncertainty: Tensor, correct: Tensor) -> float:
        """Return the score, from uncertainty and correctness [samples]."""
        known = count(self.sets[0])
        accuracy = correct[:known].mean().item()
        if self.score == "acc":
            return accuracy
        auroc = ood_detection(uncertainty[:known], uncertainty[known:]).auroc
        return auroc if self.score == "ood" else (accuracy + auroc) / 2

    def _answers(
        self,
        removed: list[Place],
        heads: list[Place],
        network: CachedNetwork,
        batch: tuple[int, slice],
    ) -> tuple[Tensor, Tensor]:
        """Return uncertainty and correctness of a batch, [1 + heads, batch] each."""
        number, rows = batch
        inputs = take(self.model, self.sets[number], rows)
        logits = torch.stack([*network.logits(inputs, removed, heads)])
        uncertainty = -logits.double().log_softmax(2).amax(2)
        correct = torch.zeros_like(uncertainty)
        if number == 0 and self.labels is not None:
            correct += logits.argmax(2) == self.labels[rows]
        return uncertainty.cpu(), correct.cpu()

    @contextlib.contextmanager
    def in_threads(self) -> Iterator[Callable]:
        """Yield a function that computes a job for each batch.

        Batches in several threads are faster than products that are split over several
        cores: those wait for the slowest core.
        """
        if self.threads == 1:
            network = CachedNetwork(self.model)
            yield lambda job, items: (job(network, item) for item in items)
            return
        local = threading.local()

        def start():
            torch.set_num_threads(1)
            local.network = CachedNetwork(self.model)

        pool = futures.ThreadPoolExecutor(self.threads, initializer=start)
        try:
            yield lambda job, items: pool.map(
                lambda item: job(local.network, item), items
            )
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self.threads)
