"""Which heads matter: Taylor scores, a greedy search, and draws from a ranking."""

import contextlib
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core.checks import (
    ArrayLike,
    as_inputs,
    as_labels,
    at_least,
    between,
    count,
    held,
    one_of,
    representable,
)
from uqlab.core.modules import (
    Inputs,
    arithmetic,
    batches,
    call,
    frozen,
    like_parameters,
    logits_of,
)
from uqlab.ensembles import member_generators
from uqlab.heads.pruning import (
    Head,
    Place,
    ablate,
    addresses,
)
from uqlab.metrics import ood_detection
from uqlab.models import Attention, attentions


def _score_table(layers: list[Attention], scores: Mapping[Place, float]) -> Tensor:
    """Return scores of heads as a table [layers, heads], float64.

    Parameters
    ----------
    layers : list of Attention
        The attention of every layer, from `attentions`.
    scores : mapping
        The score of each place. The table has NaN elsewhere.
    """
    most = max(layer.heads for layer in layers)
    table = torch.full((len(layers), most), torch.nan, dtype=torch.float64)
    for place, score in scores.items():
        table[place] = score
    return table


def _classify(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits [batch, classes]; raise ValueError for other outputs.

    Parameters
    ----------
    model : nn.Module
        A classifier.
    inputs
        A batch, on the device and in the precision of the model.
    """
    logits = logits_of(call(model, inputs))
    if logits.ndim != 2:
        raise ValueError(
            f"{type(model).__name__} must return logits [batch, classes], got "
            f"{list(logits.shape)}"
        )
    return logits


def _check_labels(model: nn.Module, inputs: Inputs, labels: Any) -> Tensor:
    """Return the labels as int64 on the model's device, one for each input.

    Parameters
    ----------
    model : nn.Module
        A classifier, whose logits give the number of classes.
    inputs
        A tensor [samples, ...], or tensors by name.
    labels
        Classes [samples].
    """
    with torch.no_grad():
        classes = _classify(model, like_parameters(model, inputs, slice(1))).shape[1]
    labels = as_labels(labels, count(inputs), classes)
    return labels.to(next(model.parameters()).device)


def taylor_scores(
    model: nn.Module,
    inputs: Any,
    labels: ArrayLike | None = None,
    *,
    batch_size: int = 128,
) -> Float[Tensor, "layers heads"]:
    """Compute the importance of every head by a first-order Taylor expansion.

    The score is the mean of |W * dL/dW| over the head's rows of the query, key and
    value weights. L is the mean cross-entropy in evaluation mode (nats). Biases and the
    output projection do not count. Heads that share a key and value all count its rows.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts and that returns logits [batch, classes].
    inputs
        A tensor [samples, ...], or tensors by name.
    labels : Tensor
        Classes [samples].
    batch_size : int
        Samples in one pass.

    Returns
    -------
    Tensor
        Float64 [layers, heads], on the CPU; NaN where a layer has fewer heads.

    References
    ----------
    Gabetni et al. 2025, D.1.1; Molchanov et al. 2019.
    """
    inputs, labels = held(inputs, labels)
    inputs = as_inputs(inputs)
    network = frozen(model).eval()
    labels = _check_labels(network, inputs, labels)
    layers = attentions(network)
    names = {part.parameter for layer in layers for part in layer.projections[:3]}
    weights = {name: network.get_parameter(name).requires_grad_() for name in names}
    with torch.enable_grad():
        for rows, batch in batches(network, inputs, batch_size):
            logits = _classify(network, batch)
            loss = F.cross_entropy(logits, labels[rows], reduction="sum")
            (loss / count(inputs)).backward()
    return _by_head(layers, weights)


def _by_head(layers: list[Attention], weights: dict[str, Tensor]) -> Tensor:
    """Return the mean of |W * dL/dW| over each head's rows, [layers, heads]."""
    scores = {}
    for row, head in addresses(layers).values():
        parts = []
        for projection, index in layers[row].inputs(head):
            weight: Any = weights[projection.parameter]
            product = (weight.detach() * weight.grad).abs().double()
            parts.append(projection.of_head(product, index))
        scores[row, head] = torch.stack(parts).mean().item()
    representable("gradients", torch.tensor([*scores.values()]))
    return _score_table(layers, scores)


def taylor_heads(
    model: nn.Module,
    inputs: Any,
    labels: ArrayLike | None,
    remove: Any,
    *,
    scope: Literal["layer", "model"] = "layer",
    batch_size: int = 128,
) -> list[Head]:
    """Find the heads that Taylor pruning removes, the least important head first.

    Of heads with equal scores, the lowest (layer, head) goes first.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts and that returns logits [batch, classes].
    inputs
        A tensor [samples, ...], or tensors by name.
    labels
        Classes [samples].
    remove : int or sequence of int
        Number of heads that each layer loses: one number, or one for each layer, text
        before vision. With `scope="model"`, the number for the whole model.
    scope : str
        "layer" prunes the layers from first to last, and recomputes the scores without
        the heads that earlier layers lost (D.1.1). "model" computes the scores once
        (B.2; the paper does not say whether it recomputes them there).
    batch_size : int
        Samples in one pass.

    Returns
    -------
    list
        Pairs (layer, head); for two towers (tower, layer, head).

    Raises
    ------
    ValueError
        If `remove` is negative or larger than the number of heads.

    References
    ----------
    Gabetni et al. 2025, B.2 and D.1.1.
    """
    one_of("scope", scope, ("layer", "model"))
    layers = attentions(model)
    table = addresses(layers)
    inputs, labels = held(inputs, labels)
    score = partial(taylor_scores, model, inputs, labels, batch_size=batch_size)
    if scope == "model":
        between("remove", remove, 0, len(table))
        scores = score()
        return sorted(table, key=lambda head: scores[table[head]])[:remove]
    numbers = remove if isinstance(remove, Sequence) else [remove] * len(layers)
    removed = []
    for row, number in zip(range(len(layers)), numbers, strict=True):
        own = [head for head, place in table.items() if place[0] == row]
        between("remove", number, 0, len(own))
        if number:
            with ablate(model, removed):
                scores = score()
            removed += sorted(own, key=lambda head: scores[table[head]])[:number]
    return removed


def sample_heads(
    ranking: Sequence[Head], remove: int, members: int, *, seed: int = 0
) -> list[list[Head]]:
    """Draw the heads that each member loses from one ranking.

    A draw keeps the order of the ranking. Member m's draw depends only on (seed, m).

    Parameters
    ----------
    ranking : sequence
        Heads, such as the first heads of a circuit.
    remove : int
        Number of heads that each member loses.
    members : int
        Number of draws.
    seed : int
        Seed of all draws.

    Returns
    -------
    list of list
        The heads of each member.

    Raises
    ------
    ValueError
        If `remove` is larger than the length of the ranking.

    References
    ----------
    Gabetni et al. 2025, B.5: 48 of the first 100.
    """
    between("remove", remove, 0, len(ranking))
    drawn = []
    ids = range(at_least("members", members))
    for generator in member_generators(seed, ids, "pruned heads"):
        chosen = torch.randperm(len(ranking), generator=generator)[:remove]
        drawn.append([ranking[i] for i in sorted(chosen.tolist())])
    return drawn


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
    batch_size: int = 64,
    precision: str = "float32",
    progress: bool = True,
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
    batch_size : int
        Samples in one pass. It does not change the scores. More do not stay in a CPU's
        cache; a GPU takes more.
    precision : str
        As in `training.fit`.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    Circuit
        Pairs (layer, head); for two towers (tower, layer, head).

    Raises
    ------
    ValueError
        If `budget` is below 1 or above the number of heads, if labels are out of range,
        or if the network's layers do not run once each in their order.

    References
    ----------
    Gabetni et al. 2025, Algorithm 1.
    """
    layers = attentions(model)
    left = addresses(layers)
    between("budget", budget, 1, len(left))
    data = _checked(model, score, id_inputs, id_labels, ood_inputs)
    removed, tables, starts = {}, [], []
    bar = tqdm(total=budget, desc="circuit", disable=not progress, leave=False)
    with bar, _predictor(model, at_least("batch_size", batch_size), precision) as run:
        while len(removed) < budget:
            places = [*left.values()]
            whole, *without = _scores(partial(run, [*removed.values()], places), *data)
            starts.append(whole)
            scores = dict(zip(places, without, strict=True))
            tables.append(_score_table(layers, scores))
            least = max(
                left, key=lambda head: scores[left[head]]
            )  # the first of equals
            removed[least] = left.pop(least)
            bar.update()
    return Circuit(removed, starts[0], torch.stack(tables))


def _checked(
    model: nn.Module, score: str, id_inputs: Any, id_labels: Any, ood_inputs: Any
) -> tuple[Any, Any, Any]:
    """Return inputs, labels or None, and OOD inputs or None, as `score` needs them."""
    one_of("score", score, ("acc", "ood", "avg"))
    inputs, labels = held(id_inputs, id_labels)
    known = as_inputs(inputs)
    labels = None if score == "ood" else _check_labels(model, known, labels).cpu()
    return known, labels, None if score == "acc" else as_inputs(ood_inputs)


def _scores(
    predict: Callable[[Inputs], Any], known: Inputs, labels: Any, unknown: Any
) -> list[float]:
    """Return accuracy where there are labels, AUROC where there are OOD inputs.

    Or the mean of both; one for every prediction of all inputs.
    """
    confidence, classes = predict(known)
    results = []
    if labels is not None:
        results.append((classes == labels).double().mean(1))
    if unknown is not None:
        pairs = zip(-confidence, -predict(unknown)[0], strict=True)
        aurocs = [ood_detection(*pair).auroc for pair in pairs]
        results.append(torch.tensor(aurocs, dtype=torch.float64))
    return torch.stack(results).mean(0).tolist()


@contextlib.contextmanager
def _predictor(model: nn.Module, batch_size: int, precision: str) -> Iterator[Callable]:
    """Yield a function that predicts without some heads: `_CachedNetwork.logits`.

    It returns confidence and classes [1 + heads, samples]. On a CPU, batches in several
    threads are faster than products that are split over several cores: those wait for
    the slowest core.
    """
    device = next(model.parameters()).device
    threads = torch.get_num_threads()
    workers = threads if device.type == "cpu" else 1
    networks = queue.SimpleQueue()
    for _ in range(workers):
        networks.put(_CachedNetwork(model))

    def predict(removed, heads, inputs):
        def job(low):
            batch = like_parameters(model, inputs, slice(low, low + batch_size))
            network = networks.get()
            try:
                logits = network.logits(batch, removed, heads)
            finally:
                networks.put(network)
            return logits.double().log_softmax(2).max(2)

        lows = range(0, count(inputs), batch_size)
        parts = pool.map(job, lows) if workers > 1 else map(job, lows)
        confidence, classes = zip(*parts, strict=True)
        return torch.cat(confidence, 1).cpu(), torch.cat(classes, 1).cpu()

    with arithmetic(precision, device), ThreadPoolExecutor(workers) as pool:
        torch.set_num_threads(threads if workers == 1 else 1)
        try:
            yield predict
        finally:
            torch.set_num_threads(threads)


class _CachedForward:
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
    if isinstance(output, tuple):
        return (output[0].clone(), *output[1:])
    return output.clone()


class _CachedNetwork:
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
            self.layers.append(_CachedForward(layer, self.calls))

    @torch.no_grad()
    def logits(
        self, inputs: Inputs, removed: list[Place], heads: list[Place]
    ) -> Tensor:
        """Return logits [1 + heads, batch, classes] without the heads in `removed`.

        The first are without these, the others without each of `heads` as well.
        """
        for layer, head in removed:
            self.attentions[layer].output.of(self.network, head).zero_()
        self.calls.clear()
        logits = [_classify(self.network, inputs)]
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
            logits.append(_classify(self.network, inputs))
            block.copy_(columns)
        for cached in self.layers:
            cached.replay = None
        return torch.stack(logits)

    def _check_calls(self) -> None:
        """Raise ValueError unless the layers of each tower ran once, in their order."""
        order = [self.layers.index(layer) for layer in self.calls]
        order.sort(key=lambda n: self.attentions[n].tower)
        if order != [*range(len(self.layers))]:
            raise ValueError(
                f"{type(self.network).__name__} cannot be searched: a layer runs more "
                "than once in a pass, or not in its order"
            )
