"""A network's logits without one head, for every head, at the cost of what comes after.

A batch goes through the network once. Without a head it goes through again, but the
layers before the head's replay what they gave, and the head's attention replays what
its heads gave, with zeros for this one. If the classifier reads the first token alone,
the last layer computes after its attention nothing for the others.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from uqlab.core import devices
from uqlab.core.checks import count
from uqlab.core.modules import Inputs, first_of, frozen
from uqlab.heads.attention import Place, run
from uqlab.heads.cutting import opened
from uqlab.heads.pruning import ablate
from uqlab.models import ZeroShot, attentions


class _Reached(Exception):
    """The last attention has run, and the pass ends there."""


class _Tape:
    """The forward of a module: it keeps what went in and out, or replays an output."""

    def __init__(self, module: nn.Module):
        self.forward = module.forward
        self.replay: Any = None
        self.arguments: Any = None
        self.output: Any = None
        self.ends = False
        module.forward = self

    def __call__(self, *args, **kwargs):
        if self.replay is not None:
            return self.replay
        self.arguments = args
        self.output = self.forward(*args, **kwargs)
        if self.ends:
            raise _Reached
        return self.output


class _FirstQuery(TorchFunctionMode):
    """Attention answers the first token's query alone, and repeats that answer."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, *others = args
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.shape[-2] > 1:
            kwargs["attn_mask"] = mask[..., :1, :]
        first = func(query[..., :1, :], *others, **kwargs)
        return first.expand(*query.shape[:-1], -1)


class _LastLayer(_Tape):
    """A layer that can go on after its attention `core` with the first token alone."""

    def __init__(self, module: nn.Module, core: _Tape):
        super().__init__(module)
        self.core = core
        self.first_only = False

    def __call__(self, *args, **kwargs):
        if self.replay is not None or not self.first_only:
            return super().__call__(*args, **kwargs)
        core = self.core
        attended = core.replay
        if attended is None:
            core.ends = True
            with contextlib.suppress(_Reached), _FirstQuery():
                self.forward(*args, **kwargs)
            core.ends = False
            attended = core.output
        core.replay = _like(attended, first_of(attended)[:, :1])
        if args:
            args = (args[0][:, :1], *args[1:])
        else:
            kwargs["hidden_states"] = kwargs["hidden_states"][:, :1]
        try:
            return self.forward(*args, **kwargs)
        finally:
            core.replay = None


class Search:
    """The network without the heads removed so far, and its logits without one more.

    The model is not changed: the search has a copy that shares all weights but those of
    the output projections.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts and that returns logits [batch, classes].
    example
        A few inputs, on which the logits are compared with those of ablated networks.

    Raises
    ------
    ValueError
        If the logits differ: a layer runs more than once in a pass, or takes tokens
        before the batch.
    """

    def __init__(self, model: nn.Module, example: Inputs):
        self.network: Any = opened(frozen(model).eval())
        self.attentions = attentions(self.network)
        self.cores = []
        self.projections = []
        for attention in self.attentions:
            projection = self.network.get_submodule(attention.output.module)
            weight = projection.weight.clone()
            projection.weight = nn.Parameter(weight, requires_grad=False)
            self.projections.append(_Tape(projection))
            self.cores.append(_Tape(self.network.get_submodule(attention.name)))
        names = [attention.layer for attention in self.attentions]
        *layers, last = map(self.network.get_submodule, names)
        self.last = _LastLayer(last, self.cores[-1])
        self.layers = [*map(_Tape, layers), self.last]
        self._learn(example)

    @torch.no_grad()
    def _learn(self, example: Inputs) -> None:
        """Find out how much of the last layer the logits need, and compare them."""
        run(self.network, example)
        self.rows = 256
        output = self.projections[-1].output
        if output.device.type == "cpu":  # MLPs are mostly four times as wide
            bytes_of_one = 5 * output.nbytes / count(example)
            self.rows = max(8, int(devices.CIRCUIT_CACHE / bytes_of_one))
        self.last.first_only = self._reads_first(example)
        if self._agrees(example):
            return
        self.last.first_only = False
        if not self._agrees(example):
            raise ValueError(
                f"{type(self.network).__name__} cannot be searched: a layer runs more "
                "than once in a pass, or takes tokens before the batch"
            )

    def twin(self) -> "Search":
        """Another search in the same weights, for another thread."""
        shared = (*self.network.parameters(), *self.network.buffers())
        return copy.deepcopy(self, {id(tensor): tensor for tensor in shared})

    def remove(self, layer: int, head: int) -> None:
        """Remove a head for good: its columns of the output projection become 0."""
        self.attentions[layer].output.of(self.network, head).zero_()

    def prepare(self, heads: Sequence[Place]) -> None:
        """Nothing is the same for all batches."""

    @torch.no_grad()
    def logits(self, inputs: Inputs, heads: Sequence[Place]) -> Iterator[Tensor]:
        """Yield the network's logits [batch, classes], then those without each head."""
        yield run(self.network, inputs)
        outputs = [layer.output for layer in self.layers]
        features = [projection.arguments[0] for projection in self.projections]
        forms = [core.output for core in self.cores]
        if self.last.first_only:
            features[-1] = features[-1][:, :1]
        for layer, head in heads:
            attended = features[layer].clone()
            attended[..., self.attentions[layer].output.rows(head)] = 0
            if self.attentions[layer].inside:
                attended = self.projections[layer].forward(attended)
            tapes = [*self.layers[:layer], self.cores[layer]]
            given = [*outputs[:layer], _like(forms[layer], attended)]
            yield self._replayed(inputs, tapes, given)

    def _replayed(
        self, inputs: Inputs, tapes: Sequence[_Tape], outputs: Sequence[Any]
    ) -> Tensor:
        """Return the logits where these modules give these outputs."""
        for tape, output in zip(tapes, outputs, strict=True):
            tape.replay = output
        try:
            return run(self.network, inputs)
        finally:
            for tape in tapes:
                tape.replay = None

    def _reads_first(self, example: Inputs) -> bool:
        """Whether the logits depend on the last layer's first token alone."""
        output = self.last.output
        states = first_of(output).clone()
        states[:, 1:] = torch.nan  # it spreads to whatever is computed from these
        logits = self._replayed(example, [self.last], [_like(output, states)])
        return bool(logits.isfinite().all())

    def _agrees(self, example: Inputs) -> bool:
        """Whether the logits are those of the whole network without a head."""
        heads = [
            (i, 0) for i, attention in enumerate(self.attentions) if attention.heads
        ]
        try:
            _, *ablated = self.logits(example, heads)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
            return False  # such as a layer that does not take the first token alone
        for head, logits in zip(heads, ablated, strict=True):
            with ablate(self.network, [head]):
                expected = run(self.network, example)
            largest = max(1.0, expected.abs().max().item())
            tolerance = torch.finfo(logits.dtype).eps ** 0.5 * largest
            if not torch.allclose(logits, expected, rtol=0, atol=tolerance):
                return False
        return True


class TowerSearch:
    """As `Search` for both towers: without a head of one, the other is not run again.

    Heads of the text tower come first. `prepare` must know the heads that are tried.
    """

    def __init__(self, model: ZeroShot, example: Inputs):
        self.text = Search(model.text, model.prompts[:2])
        self.vision = Search(model.vision, example)
        self.network = frozen(model).eval()
        self.rows = self.vision.rows
        self.prompts: dict[Place | None, Tensor] = {}  # encoded without a head

    def twin(self) -> "TowerSearch":
        """Another search in the same weights, for another thread."""
        twin = copy.copy(self)
        twin.vision = self.vision.twin()
        return twin

    def remove(self, layer: int, head: int) -> None:
        """Remove a head for good."""
        text = len(self.text.attentions)
        tower, layer = (
            (self.text, layer) if layer < text else (self.vision, layer - text)
        )
        tower.remove(layer, head)

    def prepare(self, heads: Sequence[Place]) -> None:
        """Encode the prompts, with all heads and without each of the text tower's."""
        places = [place for place in heads if place[0] < len(self.text.attentions)]
        encoded = []
        for ids in self.network.prompts.split(self.text.rows):
            encoded.append(torch.stack([*self.text.logits(ids, places)]))
        prompts = torch.cat(encoded, 1)
        self.prompts.update(zip([None, *places], prompts, strict=True))

    @torch.no_grad()
    def logits(self, images: Tensor, heads: Sequence[Place]) -> Iterator[Tensor]:
        """Yield the network's logits [batch, prompts], then those without each head."""
        text = len(self.text.attentions)
        of_vision = [(layer - text, head) for layer, head in heads if layer >= text]
        features = self.vision.logits(images, of_vision)
        whole = next(features)
        for place in (None, *heads):
            if place is None or place[0] < text:
                yield self.network.compare(whole, self.prompts[place])
            else:
                yield self.network.compare(next(features), self.prompts[None])


def search_of(model: nn.Module, example: Inputs) -> Search | TowerSearch:
    """Return the search in one network, or in both towers of one.

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts and that returns logits [batch, classes].
    example
        A few inputs, as `Search` takes them.
    """
    towers = isinstance(model, ZeroShot)
    return TowerSearch(model, example) if towers else Search(model, example)


def _like(output: Any, states: Tensor) -> Any:
    """Return these states, with what else a module returned."""
    return (states, *output[1:]) if isinstance(output, tuple) else states
