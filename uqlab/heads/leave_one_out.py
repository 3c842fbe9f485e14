"""A network's logits without one head, for every head, at the cost of the layers that come after it.

Algorithm 1 of Hydra zeroes a head, runs the whole network on every input, and restores the head. Here a batch goes
through the network once, and every head is tried from what that pass left behind. The attention's output without the
head is its output minus the head's own contribution, because the output projection is linear. The layers before it are
not computed again; if the classifier reads the first token alone, the last layer is computed for that token only. Two
towers are searched one by one: without a head of the text tower no image is encoded again.
"""

import copy
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core import devices
from uqlab.core.checks import count_samples
from uqlab.core.modules import Inputs, frozen, hooked, sharing_copy
from uqlab.heads.attention import Place, run
from uqlab.heads.cutting import opened
from uqlab.heads.pruning import ablate
from uqlab.models import ZeroShot, attentions


class _Given:
    """Replaces the forward of a module: it returns the given value, alone or as the first of a tuple like `output`."""

    def __init__(self, module: nn.Module, output: Any):
        self.value = torch.empty(0)
        self.rest = (None,) * (len(output) - 1) if isinstance(output, tuple) else None
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value if self.rest is None else (self.value, *self.rest)


class _Trace(NamedTuple):
    """What one pass of a batch left behind in the network."""

    inputs: Inputs
    embedded: Any
    hidden: list[Tensor]  # the input of each layer [batch, tokens, width]
    rest: list[tuple[tuple, dict]]  # the other arguments of each layer
    heads: list[Tensor]  # the input of each output projection, all heads side by side
    attended: list[Tensor]  # the output of each output projection
    logits: Tensor


class Search:
    """The network without the heads removed so far, and the logits that it would give without one more.

    The model itself is never changed: the search has a copy that shares all weights but the output projections.
    """

    def __init__(self, model: nn.Module, example: Inputs):
        self.network: Any = opened(frozen(model).eval())
        self.found = attentions(self.network)
        for attention in self.found:
            projection: Any = self.network.get_submodule(attention.output.module)
            weight = projection.weight.clone()
            projection.weight = nn.Parameter(weight, requires_grad=False)
        self.layers = [
            self.network.get_submodule(attention.layer) for attention in self.found
        ]
        self.embedding = _embedding(self.network, self.found[0].layer)
        self.norm: nn.Module | None = None  # of the last layer, before its attention
        self.first_only = False  # whether the first token is enough in the last layer
        self.rows = 0  # inputs in a batch
        self._learn(example)

    def twin(self) -> "Search":
        """Another search on the same weights, for another thread; a head removed from one is removed from both."""
        return copy.deepcopy(
            self,
            {id(t): t for t in (*self.network.parameters(), *self.network.buffers())},
        )

    def remove(self, layer: int, head: int) -> None:
        """Remove a head for good: its columns of the output projection become 0."""
        self._weight(layer, head).zero_()

    def _weight(self, layer: int, head: int) -> Tensor:
        """A head's part of the output projection [size, width]."""
        return self.found[layer].output.of(self.network, head)

    @torch.no_grad()
    def logits(
        self, inputs: Inputs, heads: Sequence[Place]
    ) -> Iterator[tuple[int, Tensor]]:
        """The logits [batch, classes] of a batch: (-1, the network's), then (i, those without heads[i]) for every i."""
        trace = self.trace(inputs)
        yield -1, trace.logits
        batch, tokens = trace.hidden[0].shape[:2]
        numbers = {head: i for i, head in enumerate(heads)}
        for layer, group in itertools.groupby(sorted(heads), key=lambda pair: pair[0]):
            short = self.first_only and layer == len(self.layers) - 1
            together = max(1, self.rows * tokens // (batch * (1 if short else tokens)))
            pairs = list(group)
            for low in range(0, len(pairs), together):
                some = pairs[low : low + together]
                hidden = self._through(trace, layer, [head for _, head in some], short)
                for pair, states in zip(some, hidden.split(batch), strict=True):
                    yield numbers[pair], self._classify(trace, states)

    @torch.no_grad()
    def trace(self, inputs: Inputs) -> _Trace:
        """One pass through the network that records what each layer was given and what its attention gave."""
        hidden, rest, heads, attended, embedded = [], [], [], [], []

        def enters(_: nn.Module, args: tuple, kwargs: dict) -> None:
            named = {name: _uncached(value) for name, value in kwargs.items()}
            hidden.append(args[0] if args else named.pop("hidden_states"))
            rest.append((tuple(_uncached(value) for value in args[1:]), named))

        def projected(_: nn.Module, args: tuple, output: Tensor) -> None:
            heads.append(args[0])
            attended.append(output)

        handles = [
            layer.register_forward_pre_hook(enters, with_kwargs=True)
            for layer in self.layers
        ]
        for attention in self.found:
            projection = self.network.get_submodule(attention.output.module)
            handles.append(projection.register_forward_hook(projected))
        if self.embedding is not None:
            part = self.network.get_submodule(self.embedding)
            handles.append(
                part.register_forward_hook(
                    lambda _, args, output: embedded.append(output)
                )
            )
        with hooked(handles):
            logits = run(self.network, inputs)
        if not len(hidden) == len(attended) == len(self.layers):
            kind, count = type(self.network).__name__, len(self.layers)
            raise ValueError(
                f"{kind} must use each of its {count} layers once in a pass; it made {len(hidden)} calls"
            )
        return _Trace(
            inputs,
            embedded[0] if embedded else None,
            hidden,
            rest,
            heads,
            attended,
            logits,
        )

    def _through(
        self, trace: _Trace, layer: int, heads: list[int], short: bool
    ) -> Tensor:
        """The last layer's output [heads * batch, tokens, width] without each of these heads of one layer.

        short: the layer is the last one, and only its first token is computed: [heads * batch, 1, width].
        """
        attention, copies, last = self.found[layer], len(heads), len(self.layers) - 1
        tokens = slice(1) if short else slice(None)
        z, whole = trace.heads[layer][:, tokens], trace.attended[layer][:, tokens]
        hidden = trace.hidden[layer][:, tokens].repeat(copies, 1, 1)
        without = whole.new_empty(
            copies, whole.shape[0] * whole.shape[1], whole.shape[2]
        )
        for one, head in zip(without, heads, strict=True):
            own = z[..., attention.output.rows(head)].flatten(
                0, 1
            )  # [batch * tokens, size]
            weight = self._weight(layer, head).to(
                own.dtype
            )  # autocast does not convert where `out` is given
            torch.addmm(whole.flatten(0, 1), own, weight, alpha=-1, out=one)
        hidden = self._given(
            layer,
            hidden,
            without.view(hidden.shape),
            _repeated(trace.rest[layer], copies),
        )
        for later in range(layer + 1, last + 1):
            args, kwargs = _repeated(trace.rest[later], copies)
            if later == last and self.first_only:
                hidden = self._given(
                    last,
                    hidden[:, :1],
                    self._first(hidden, args, kwargs),
                    (args, kwargs),
                )
            else:
                output = self.layers[later](hidden, *args, **kwargs)
                hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def _given(
        self, layer: int, hidden: Tensor, attended: Tensor, rest: tuple[tuple, dict]
    ) -> Tensor:
        """The output of a layer if its attention, with its output projection, gives `attended`."""
        for part in self.attended[layer]:
            part.value = attended
        output = self.after[layer](hidden, *rest[0], **rest[1])
        return output[0] if isinstance(output, tuple) else output

    def _first(self, hidden: Tensor, args: tuple, kwargs: dict) -> Tensor:
        """What the last layer's attention gives for the first token [batch, 1, width]."""
        attention = self.found[-1]
        hidden = hidden if self.norm is None else self.norm(hidden)
        inputs = (attention.query, attention.key, attention.value)
        q, k, v = (self.network.get_submodule(each.module) for each in inputs)
        each = [
            p.unflatten(-1, (-1, attention.size)).transpose(1, 2)
            for p in (q(hidden[:, :1]), k(hidden), v(hidden))
        ]
        masks = [
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, Tensor) and value.ndim == 4
        ]
        z = F.scaled_dot_product_attention(
            *each, attn_mask=masks[0][:, :, :1] if masks else None
        )
        projection = self.network.get_submodule(attention.output.module)
        return projection(z.transpose(1, 2).flatten(2))

    def _classify(self, trace: _Trace, hidden: Tensor) -> Tensor:
        """The logits from the last layer's output."""
        for part in self.states:
            part.value = hidden
        if self.embedded is not None:
            self.embedded.value = trace.embedded
        return run(self.tail, trace.inputs)

    @torch.no_grad()
    def _learn(self, example: Inputs) -> None:
        """Find out how the network is put together, and check the shortcuts, on an example."""
        network, calls = self.network, {}

        def note(part: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            calls[part] = args[0] if args else kwargs.get("hidden_states"), output

        with hooked(
            [
                part.register_forward_hook(note, with_kwargs=True)
                for part in network.modules()
            ]
        ):
            trace = self.trace(example)
        entered, _ = calls[network.get_submodule(self.found[-1].name)]
        norms = [
            part
            for part in self.layers[-1].modules()
            if isinstance(part, nn.LayerNorm) and part in calls
        ]
        self.norm = next((part for part in norms if calls[part][1] is entered), None)
        plain = self.norm is not None or entered is trace.hidden[-1]
        linears = [
            each
            for part, call in calls.items()
            if isinstance(part, nn.Linear)
            for each in call
        ]
        widest = max(each.nbytes for each in linears)
        on_cpu = trace.logits.device.type == "cpu"
        self.rows = (
            max(8, int(devices.CIRCUIT_CACHE * count_samples(example) / widest))
            if on_cpu
            else 256
        )

        # Two views of the network: in one the attention's output is given, in the other the layers' output is.
        def given(view: nn.Module, name: str) -> _Given:
            return _Given(
                view.get_submodule(name), calls[network.get_submodule(name)][1]
            )

        parted, self.tail = sharing_copy(network), sharing_copy(network)
        self.after = [parted.get_submodule(attention.layer) for attention in self.found]
        self.attended = [
            [given(parted, name) for name in (each.output.module, each.name)]
            for each in self.found
        ]
        self.states = [given(self.tail, attention.layer) for attention in self.found]
        self.embedded = (
            None
            if self.embedding is None
            else _Given(self.tail.get_submodule(self.embedding), None)
        )
        poisoned = trace.hidden[-1].clone()
        poisoned[:, 1:] = (
            math.nan
        )  # NaN spreads to whatever is computed from these tokens
        separate = (
            not self.found[-1].fused and self.found[-1].heads == self.found[-1].groups
        )
        plain = plain and separate
        self.first_only = plain and bool(
            self._classify(trace, poisoned).isfinite().all()
        )
        firsts = [
            (layer, 0) for layer, attention in enumerate(self.found) if attention.heads
        ]
        if not self._agrees(example, firsts):
            self.first_only = False
            if not self._agrees(example, firsts):
                raise ValueError(
                    f"{type(self.network).__name__} does more than run its layers one after the other on hidden states "
                    "[batch, tokens, width], each of them attention and what follows: its heads cannot be searched"
                )

    def _agrees(self, example: Inputs, heads: list[Place]) -> bool:
        """Whether the shortcuts give the logits that the whole network gives without a head."""
        try:
            found = [logits for _, logits in self.logits(example, heads)]
        except (RuntimeError, TypeError, LookupError, AttributeError):
            return False  # a layer does not take what the one before it gives
        for head, logits in zip(heads, found[1:], strict=True):
            with ablate(self.network, [head]):
                expected = run(self.network, example)
            scale = max(1.0, expected.abs().max().item())
            if (
                not (logits - expected).abs().max().item()
                <= torch.finfo(logits.dtype).eps ** 0.5 * scale
            ):
                return False
        return True


class TowerSearch:
    """A `Search` in each tower of a `ZeroShot`, joined as its logits join the towers.

    What the text tower makes of the prompts, with all its heads and without each, is computed once until a head goes.
    """

    def __init__(self, model: ZeroShot, example: Inputs):
        self.network = frozen(model).eval()
        self.text, self.vision = (
            Search(self.network.text, self.network.prompts),
            Search(self.network.vision, example),
        )
        self.network.text, self.network.vision = self.text.network, self.vision.network
        self.rows = self.vision.rows
        self.encoded: dict[
            Place | None, Tensor
        ] = {}  # prompts without a head, or with all
        self.lock = threading.Lock()

    def twin(self) -> "TowerSearch":
        """Another search of images; it shares the encoded prompts."""
        twin = copy.copy(self)
        twin.vision = self.vision.twin()
        return twin

    def remove(self, layer: int, head: int) -> None:
        """Remove a head for good; the layers of the text tower are the first."""
        text = len(self.text.found)
        search, layer = (
            (self.text, layer) if layer < text else (self.vision, layer - text)
        )
        search.remove(layer, head)
        self.encoded.clear()

    @torch.no_grad()
    def logits(
        self, inputs: Inputs, heads: Sequence[Place]
    ) -> Iterator[tuple[int, Tensor]]:
        """As `Search.logits`."""
        text = len(self.text.found)
        own = [i for i, (layer, _) in enumerate(heads) if layer >= text]
        prompts = self._prompts([place for place in heads if place[0] < text])
        whole = torch.empty(0)
        for i, images in self.vision.logits(
            inputs, [(heads[k][0] - text, heads[k][1]) for k in own]
        ):
            whole = images if i < 0 else whole
            yield -1 if i < 0 else own[i], self.network.compare(images, prompts[None])
        for i, place in enumerate(heads):
            if place[0] < text:
                yield i, self.network.compare(whole, prompts[place])

    def _prompts(self, heads: list[Place]) -> dict[Place | None, Tensor]:
        with self.lock:
            if not {None, *heads} <= self.encoded.keys():
                parts = [
                    dict(self.text.logits(ids, heads))
                    for ids in self.network.prompts.split(self.text.rows)
                ]
                self.encoded[None] = torch.cat([part[-1] for part in parts])
                for i, place in enumerate(heads):
                    self.encoded[place] = torch.cat([part[i] for part in parts])
            return self.encoded


def search_of(model: nn.Module, example: Inputs) -> Search | TowerSearch:
    """The search in one network, or in both towers of one."""
    return (
        TowerSearch(model, example)
        if isinstance(model, ZeroShot)
        else Search(model, example)
    )


def _embedding(network: nn.Module, layer: str) -> str | None:
    """The name of the module `embeddings` of the encoder that holds this layer, if it has one."""
    above, modules = layer.split("."), dict(network.named_modules())
    names = (".".join([*above[:i], "embeddings"]) for i in reversed(range(len(above))))
    return next((name for name in names if name in modules), None)


def _repeated(rest: tuple[tuple, dict], copies: int) -> tuple[tuple, dict]:
    """A layer's other arguments for a batch that is repeated this often.

    Masks are repeated too, unless one mask serves all samples.
    """
    args, named = rest
    each = tuple(_again(value, copies) for value in args)
    return each, {name: _again(value, copies) for name, value in named.items()}


def _again(value: Any, copies: int) -> Any:
    if isinstance(value, tuple):  # the cosines and sines of rotated positions
        return tuple(_again(part, copies) for part in value)
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] == 1:
        return value
    return value if copies == 1 else value.repeat(copies, *[1] * (value.ndim - 1))


def _uncached(value: Any) -> Any:
    """None for transformers' cache of keys and values: a layer must not fill it again."""
    return None if hasattr(value, "get_seq_length") else value
