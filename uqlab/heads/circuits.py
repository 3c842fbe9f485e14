"""Circuits: heads removed one after the other, always the one that is missed least (Hydra, Algorithm 1)."""

import functools
import hashlib
import itertools
import json
import math
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Literal, TypeVar

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core.modules import Inputs
from uqlab.heads.attention import Head, attentions, check_labels, length, take
from uqlab.heads.leave_one_out import Search
from uqlab.metrics import ood_detection
from uqlab.training import arithmetic

WRITE_EVERY = 60.0  # seconds within a step
Result = TypeVar("Result")


class Circuit(list[Head]):
    """Heads (layer, head) in the order of their removal, least useful first: a list that knows how it came to be.

    start: the score with all heads. scores [steps, layers, heads]: in each step, the score without the heads removed
    before and without that one, NaN for heads that were not tried; the head that is removed scores highest.
    """

    def __init__(self, heads: Iterable[Head], start: float, scores: Float[Tensor, "steps layers heads"]):
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
    order: Literal["global", "layerwise"] = "global",
    batch_size: int | None = None,
    precision: str = "float32",
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
) -> Circuit:
    """The first `budget` heads that a greedy search removes, least useful first (Hydra, Algorithm 1).

    In every step each remaining head is left out in turn, and the one without which the score is highest goes for good;
    of equal ones that of the lowest (layer, head). The heads that stay are the circuit: CircAcc, CircOOD or CircAvg.

    model: returns logits [batch, classes]; it is used in evaluation mode, and not changed.
    id_inputs [id, ...], id_labels [id], ood_inputs [ood, ...]: validation data in and out of distribution; tensors, or
        tensors by name. "acc" needs no ood_inputs and "ood" no id_labels: give None.
    score: "acc", accuracy; "ood", AUROC of the maximum softmax probability, ID against OOD; "avg", the mean of both.
    order: "global", Algorithm 1; "layerwise", the order of HeadMap (Wang et al. 2025) with these scores in place of its
        loss: from the first layer to the last every head is left out once, without the heads that earlier layers lost,
        and those without which the score is highest go together. The budget is spread over the layers evenly, the first
        losing one more where it does not divide. As many trials as heads, not as many in every step.
    batch_size: inputs at a time; None for as many as stay in a CPU's cache, 256 on a GPU. It changes no score.
    precision: of products, see `training.arithmetic`.
    checkpoint: a file written after every step, and every minute within one; a search that finds it goes on from there,
        also to a larger budget. It holds numbers alone.

    Memory: in each thread three tensors [batch, tokens, width] a layer, and a number for each head and input. A head of
    layer l costs what comes after its attention, the last layer only for the first token if the classifier reads no
    other.

    All heads of a layer may go: the residual connection carries its input past the attention. Raises ValueError for a
    budget below 1 or above the number of heads, unknown names, labels out of range, networks whose heads are not apart
    or whose layers do not run one after the other, and a checkpoint that is damaged or of another search; TypeError for
    inputs and labels that are no tensors.
    """
    found = attentions(model)
    total = sum(attention.heads for attention in found)
    if score not in ("acc", "ood", "avg") or order not in ("global", "layerwise"):
        given = f"{score!r} and {order!r}"
        raise ValueError(f'score must be "acc", "ood" or "avg" and order "global" or "layerwise", got {given}')
    if not 1 <= budget <= total:
        raise ValueError(f"budget must be 1 to {total}, the number of heads, got {budget}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1 or None, got {batch_size}")
    if (score != "ood" and id_labels is None) or (score != "acc" and ood_inputs is None):
        raise ValueError(f'score="{score}" needs {"id_labels" if id_labels is None else "ood_inputs"}, got None')
    sets = [id_inputs] if score == "acc" or ood_inputs is None else [id_inputs, ood_inputs]
    counts = [length(inputs) for inputs in sets]
    search = Search(model, take(model, id_inputs, slice(2)))
    labels = None if score == "ood" or id_labels is None else check_labels(search.network, id_inputs, id_labels)

    every = [[(layer, head) for head in range(attention.heads)] for layer, attention in enumerate(found)]
    steps = [(list(itertools.chain(*every)), 1)] * budget if order == "global" else _spread(every, budget)
    what = [score, order, precision, *([budget] if order == "layerwise" else [])]
    state = _State.read(checkpoint, [*what, _fingerprint(search.network, *sets, labels)])
    for head in state.order:
        search.remove(*head)
    trials = [len(heads) - (step if order == "global" else 0) for step, (heads, _) in enumerate(steps)]
    work = sum(counts) * sum(trials)
    before = sum(counts) * sum(trials[: len(state.scores)]) + state.done * sum(trials[len(state.scores) :][:1])
    bar = tqdm(
        total=work, initial=min(before, work), desc=f"circuit ({score})", unit="input", unit_scale=True,
        disable=not progress, leave=False,
    )  # fmt: skip
    where = next(search.network.parameters()).device
    with bar, arithmetic(precision, where), _Threads(search if where.type == "cpu" else None) as threads:
        size = batch_size or min(search.rows, -(-sum(counts) // threads.count))

        def tried(heads: list[Head], inputs: Inputs, rows: slice, one: Search) -> tuple[Tensor, Tensor]:
            """For the network and without each head: uncertainty [1 + heads, batch], right answers [1 + heads]."""
            uncertainty = torch.empty(1 + len(heads), rows.stop - rows.start, dtype=torch.float64)
            hits = torch.zeros(1 + len(heads), dtype=torch.int64)
            for i, logits in one.logits(take(search.network, inputs, rows), heads):
                uncertainty[i + 1] = -logits.double().log_softmax(1).amax(1)
                if labels is not None and inputs is id_inputs:
                    hits[i + 1] = (logits.argmax(1) == labels[rows]).sum()
            return uncertainty, hits

        for candidates, losing in steps[len(state.scores) :]:
            heads = [head for head in candidates if head not in state.order]
            state.begin(len(heads) + 1, sum(counts))
            batches = list(_batches(sets, counts, state.done, size))
            work = [functools.partial(tried, heads, inputs, rows) for inputs, rows, _ in batches]
            for (_, _, columns), (uncertainty, hits) in zip(batches, threads.run(work, search), strict=True):
                state.uncertainty[:, columns] = uncertainty
                state.hits += hits
                state.advance(columns.stop)
                bar.update(len(heads) * (columns.stop - columns.start))
            values = [_score(score, state, row, counts[0]) for row in range(len(heads) + 1)]
            best = sorted(range(len(heads)), key=lambda i: (-values[i + 1], heads[i]))[:losing]
            for i in best:
                search.remove(*heads[i])
            grid = torch.full((len(found), max(map(len, every))), math.nan, dtype=torch.float64)
            for (layer, head), value in zip(heads, values[1:], strict=True):
                grid[layer, head] = value
            state.end(values[0], grid, [heads[i] for i in best])
    return Circuit(state.order[:budget], state.start, torch.stack(state.scores[: len(steps)]))


class _Threads:
    """Batches in threads of their own, each with a view of the network: a product split over cores waits for the last.

    Without a search, on a GPU, in the calling thread.
    """

    def __init__(self, search: Search | None):
        self.before = torch.get_num_threads()
        self.count = 1 if search is None else self.before
        self.free: queue.SimpleQueue[Search] = queue.SimpleQueue()
        self.pool = None
        if search is not None:
            for one in (search, *(search.twin() for _ in range(self.count - 1))):
                self.free.put(one)

    def __enter__(self) -> "_Threads":
        if not self.free.empty():
            self.pool = futures.ThreadPoolExecutor(self.count, initializer=lambda: torch.set_num_threads(1))
        return self

    def __exit__(self, *exc: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self.before)

    def run(self, work: list[Callable[[Search], Result]], search: Search) -> Iterator[Result]:
        """The results of some work, in its order."""
        if self.pool is None:
            return (each(search) for each in work)

        def one(each: Callable[[Search], Result]) -> Result:
            search = self.free.get()
            try:
                return each(search)
            finally:
                self.free.put(search)

        return self.pool.map(one, work)


def _spread(every: list[list[Head]], budget: int) -> list[tuple[list[Head], int]]:
    """For each layer its heads and how many of them go: one a layer in turn, until the budget is spent."""
    losing = [0] * len(every)
    for layer in itertools.cycle(range(len(every))):
        if sum(losing) == budget:
            return [(heads, count) for heads, count in zip(every, losing, strict=True) if count]
        losing[layer] += losing[layer] < len(every[layer])
    raise AssertionError


def _score(score: str, state: "_State", row: int, count: int) -> float:
    """Accuracy on the first `count` inputs, AUROC of the first against the others, or the mean of both."""
    accuracy = int(state.hits[row]) / count
    if score == "acc":
        return accuracy
    auroc = ood_detection(state.uncertainty[row, :count], state.uncertainty[row, count:]).auroc
    return auroc if score == "ood" else (accuracy + auroc) / 2


def _batches(sets: list[Inputs], counts: list[int], done: int, size: int) -> Iterator[tuple[Inputs, slice, slice]]:
    """Inputs not done, the rows of a batch in them, and in all inputs one after the other."""
    before = 0
    for inputs, count in zip(sets, counts, strict=True):
        for low in range(max(0, done - before), count, size):
            high = min(low + size, count)
            yield inputs, slice(low, high), slice(before + low, before + high)
        before += count


def _fingerprint(network: nn.Module, *data: Inputs | None) -> str:
    """Of the sum and up to 1000 values of every weight and of the data."""
    tensors = [*network.state_dict().values()]
    for inputs in data:
        tensors += [] if inputs is None else [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
    digest = hashlib.sha256()
    for t in tensors:
        values = torch.cat([t.detach().double().sum().cpu()[None], t.detach().flatten()[:1000].cpu().double()])
        digest.update(str(list(t.shape)).encode() + values.numpy().tobytes())
    return digest.hexdigest()


class _State:
    """How far a search is: finished steps, and of the one in progress what the first `done` inputs gave."""

    def __init__(self, path: Path | None, run: list):
        self.path, self.run, self.written = path, run, time.monotonic()
        self.order: list[Head] = []
        self.scores: list[Tensor] = []
        self.start, self.done = math.nan, 0
        self.uncertainty, self.hits = torch.empty(0, 0), torch.empty(0, dtype=torch.int64)

    @classmethod
    def read(cls, path: str | os.PathLike | None, run: list) -> "_State":
        state = cls(None if path is None else Path(path), run)
        if state.path is None or not state.path.exists():
            return state
        try:
            with safe_open(state.path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["uqlab"])
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state.start, state.done = float(about["start"]), int(about["done"])
            state.order = [(layer, head) for layer, head in found["order"].tolist()]
            state.scores = list(found["scores"])
            state.uncertainty, state.hits = found["uncertainty"], found["hits"]
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"checkpoint {path} is damaged or none of ours; delete the file: {error}") from error
        if about["run"] != run:
            raise ValueError(f"checkpoint {path} is of another search; delete the file or name another")
        return state

    def begin(self, rows: int, columns: int) -> None:
        """A step, unless a checkpoint was written in the middle of it."""
        if self.done == 0:
            self.uncertainty = torch.zeros(rows, columns, dtype=torch.float64)
            self.hits = torch.zeros(rows, dtype=torch.int64)

    def advance(self, done: int) -> None:
        self.done = done
        if time.monotonic() - self.written > WRITE_EVERY:
            self.write()

    def end(self, before: float, scores: Tensor, removed: list[Head]) -> None:
        self.start = before if not self.scores else self.start
        self.order += removed
        self.scores.append(scores)
        self.done = 0
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            "order": torch.tensor(self.order, dtype=torch.int64).view(-1, 2),
            "scores": torch.stack(self.scores) if self.scores else torch.empty(0, 0, 0),
            "uncertainty": self.uncertainty,
            "hits": self.hits,
        }
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        save_file(tensors, temporary, {"uqlab": json.dumps({"run": self.run, "start": self.start, "done": self.done})})
        os.replace(temporary, self.path)
        self.written = time.monotonic()
