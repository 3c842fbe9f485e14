"""What every ensemble can do, and its two kinds: all members in one pass, or one after the other."""

import contextlib
import operator
import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from uqlab.core import devices
from uqlab.core.modules import (
    Inputs,
    call,
    evaluating,
    first_tensor,
    hooked,
    logits_of,
    map_tensors,
)
from uqlab.ensembles.layers import (
    MemberDropout,
    MemberLayer,
    active_members,
    with_layers,
)
from uqlab.ensembles.members import MemberModule

# Modules that draw from torch's global generator, whose order threads would scramble.
_GLOBAL_NOISE = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU
)  # fmt: skip


class Ensemble(nn.Module):
    """Calling it with inputs [batch, ...] gives logits [members, batch, classes].

    `member_ids` are the members' numbers in the whole ensemble: what a member learns depends on (seed, its number)
    alone, so an ensemble can be computed in shards. Unless its class says otherwise, the members go through one network
    together and share all its parameters.
    """

    repeats = 1  # how often an input stands in its batch of a training

    def __init__(self, member_ids: range):
        super().__init__()
        self.member_ids = member_ids
        self.recipe: dict[str, Any] | None = (
            None  # how a method made it, which `save` writes
        )

    @property
    def members(self) -> int:
        return len(self.member_ids)

    def about(self) -> dict[str, Any]:
        """What a reader wants to know first: kind, method and settings, members, trained and frozen numbers."""
        settings = {
            name: value
            for name, value in (self.recipe or {}).items()
            if name not in ("backbone", "members")
        }
        own, shared = (
            [p for p in self.parameters() if p.requires_grad],
            self.shared_parameters(),
        )
        frozen = [
            *(p for p in self.parameters() if not p.requires_grad),
            *self.buffers(),
        ]
        count = lambda tensors: sum(t.numel() for t in tensors)  # noqa: E731
        return {
            "kind": type(self).__name__,
            **settings,
            "members": member_text(self.member_ids),
            "numbers trained": count(own),
            "of these shared by members": count(p for p in own if p in shared),
            "numbers frozen": count(frozen),
        }

    def __repr__(self) -> str:
        kind, *lines = self.about().items()
        return f"{kind[1]}({', '.join(f'{name}: {_shown(value)}' for name, value in lines)})"

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(_shown(value))}</td></tr>"
            for name, value in self.about().items()
        )
        return f"<table>{''.join(rows)}</table>"

    def forward(self, x: Inputs | None = None, **named: Tensor) -> Tensor:
        """x [batch, ...], or several tensors by name -> logits [members, batch, classes]."""
        given = named if x is None else x
        self._check_device(given)
        return self.forward_members(
            map_tensors(lambda t: t.expand(self.members, *t.shape), given)
        )

    def forward_members(self, x: Inputs) -> Tensor:
        """Each member on a batch of its own: [members, batch, ...] -> [members, batch, classes]."""
        while True:
            try:
                return torch.cat(
                    [
                        self.run(map_tensors(lambda t, r=rows: t[r], x), rows)
                        for rows in self.passes(x)
                    ]
                )
            except torch.OutOfMemoryError:
                if not self.halve(x):
                    raise

    def passes(self, x: Inputs) -> list[slice]:
        """The members that go through together, pass by pass, for inputs like x [members, batch, ...]."""
        return [slice(None)]

    def run(self, x: Inputs, rows: slice) -> Tensor:
        """One pass: some members on x [rows, batch, ...] -> logits [rows, batch, classes]."""
        raise NotImplementedError

    def member(self, index: int) -> nn.Module:
        """Member `index` as a plain module: inputs [batch, ...] -> logits [batch, classes]."""
        raise NotImplementedError

    def shard(self, rows: slice) -> "Ensemble":
        """The ensemble of some of the members, sharing their weights' memory: training it trains them."""
        raise NotImplementedError

    def can_shard(self) -> bool:
        """Whether no two members share a trainable parameter, so that shards can be trained independently."""
        return False

    def shared_parameters(self) -> dict[nn.Parameter, int]:
        """The trainable parameters that several members share, and how many do: they follow the mean loss."""
        return {p: self.members for p in self.parameters() if p.requires_grad}

    def mixed(self, rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """A training batch: the inputs' numbers as every member draws them [members, batch] -> as members see them."""
        return rows

    def halve(self, x: Inputs) -> bool:
        """After memory ran out on inputs like x: take fewer members in a pass; returns whether that is possible."""
        return False

    def noise_layers(self) -> list[tuple[MemberDropout, int, Sequence[int]]]:
        """(dropout layer, its number within a member, the members it serves)."""
        return []

    def reseed(self, seed: int, epoch: int = 0) -> None:
        """Start every member's dropout noise anew from (seed, member, layer, epoch)."""
        device = next(self.parameters()).device
        for layer, number, members in self.noise_layers():
            if layer.p:
                layer.reseed(
                    [member_seed(seed, m, "dropout", number, epoch) for m in members],
                    device,
                )

    def _with_recipe(self, other: Any) -> Any:
        """An ensemble of the same recipe with members of its own."""
        other.recipe = self.recipe and self.recipe | {
            "members": member_text(other.member_ids)
        }
        return other

    def _check_device(self, x: Inputs) -> None:
        own = next(self.parameters(), None)
        if own is None or torch.compiler.is_compiling():
            return
        for tensor in (x,) if isinstance(x, Tensor) else x.values():
            if tensor.device != own.device:
                raise ValueError(
                    f"the ensemble is on {own.device}, its inputs on {tensor.device}: move one of them with .to(device)"
                )

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.members:
            raise IndexError(
                f"member {index} of an ensemble of {self.members}: choose 0 to {self.members - 1}"
            )


class FoldedEnsemble(Ensemble):
    """One network whose member layers take all members at once, folded into the batch.

    `chunk` is the largest number of members in one pass; if it is None, `members_per_pass` chooses.
    """

    def __init__(self, network: nn.Module, member_ids: range):
        super().__init__(member_ids)
        self.network = network
        self.chunk: int | None = None
        self._per_pass: dict[tuple, int] = {}
        self._folds: bool | None = None  # not known yet
        _walk_in_python(network)

    def about(self) -> dict[str, Any]:
        """As of any ensemble, with the number of layers that the members see in a way of their own."""
        units = [
            part for part in self.network.modules() if isinstance(part, MemberModule)
        ]
        ways = Counter(unit.way() for unit in units)
        more = (
            {
                "layers of members": ", ".join(
                    f"{n} {way}" for way, n in sorted(ways.items())
                )
            }
            if ways
            else {}
        )
        more |= (
            {"members in a pass": "one: its layers do not see the batch first"}
            if self._folds is False
            else {}
        )
        return super().about() | more

    def train(self, mode: bool = True) -> Any:
        """Batch statistics of the network stay as they are: all members share them, so they are frozen."""
        super().train(mode)
        for part in self.network.modules():
            if getattr(part, "running_mean", None) is not None and not isinstance(
                part, MemberLayer
            ):
                part.eval()
        return self

    def members_per_pass(self, x: Inputs) -> int:
        """How many members go through the network at once, for inputs like x [members, batch, ...].

        On a GPU they are as many as fit into half of the free memory. On a CPU they are all members; of an implicit
        ensemble so many that what one layer reads and writes stays in the cache (IMPLICIT_CACHE bytes): the weights are
        shared, so that more members at once save little. It is found once for each shape of the inputs.
        """
        first = first_tensor(x)
        key, on_cpu = (
            (tuple(first.shape), torch.is_grad_enabled()),
            first.device.type == "cpu",
        )
        if torch.compiler.is_compiling() or (
            on_cpu and self.recipe is None and key not in self._per_pass
        ):
            return self.members
        if key not in self._per_pass:
            one = self._bytes_of_one(x) if on_cpu else self._memory_of_one(x)
            room = (
                devices.IMPLICIT_CACHE
                if on_cpu
                else devices.free_memory(first.device) / 2
            )
            self._per_pass[key] = max(1, min(self.members, int(room / max(1, one))))
        return self._per_pass[key]

    def folds(self, x: Inputs) -> bool:
        """Whether several members may share a pass; it is found on the first call, from two inputs.

        They may where every member layer is given the batch along its first axis, the rows of one member after those of
        another. A network that turns its axes round inside, or counts on the size of its batch, fails this, and its
        members go through one by one: then every layer has one member at a time, which is right wherever the batch is.
        """
        if self._folds is None:
            if torch.compiler.is_compiling():
                return True
            self._folds = self._compare(x)
        return self._folds

    @torch.no_grad()
    def _compare(self, x: Inputs) -> bool:
        """Whether two members in one pass are given, layer by layer, what each is given alone."""
        last = first_tensor(x).shape[1] - 1
        pair = [
            map_tensors(lambda t, i=i: t[None, i, min(i, last), None], x)
            for i in range(2)
        ]
        both = (
            torch.cat(pair)
            if isinstance(x, Tensor)
            else {name: torch.cat([p[name] for p in pair]) for name in x}
        )
        layers = [
            part for part in self.network.modules() if isinstance(part, MemberLayer)
        ]
        seen: list[Tensor] = []

        def note(_, args: tuple, kwargs: dict) -> None:
            seen.extend(
                [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][:1]
            )

        def noted(inputs: Inputs, rows: slice) -> list[Tensor]:
            seen.clear()
            logits = self.run(inputs, rows)
            return [*seen, logits.flatten(0, 1)]

        hooks = (
            layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers
        )
        try:
            with evaluating(self.network), hooked(hooks):
                apart = [noted(pair[m], slice(m, m + 1)) for m in range(2)]
                together = noted(both, slice(0, 2))
        except (
            Exception
        ):  # whatever the network makes of such a batch: the pass that follows tells it
            return False
        return len(together) == len(apart[0]) and all(map(_alike, together, *apart))

    def halve(self, x: Inputs) -> bool:
        size = self.chunk or self.members_per_pass(x)
        if size == 1:
            return False
        self._per_pass[tuple(first_tensor(x).shape), torch.is_grad_enabled()] = (
            half
        ) = -(-size // 2)
        self.chunk = self.chunk and half
        return True

    @torch.no_grad()
    def _bytes_of_one(self, x: Inputs, kind: type[nn.Module] = MemberLayer) -> int:
        """The most bytes that a layer of this kind reads and writes for one member."""
        found = [0]

        def note(_, args: tuple, output: Any) -> None:
            tensors = [*args, *(output if isinstance(output, tuple) else (output,))]
            found.append(sum(t.nbytes for t in tensors if isinstance(t, Tensor)))

        layers = [part for part in self.network.modules() if isinstance(part, kind)]
        with (
            evaluating(self.network),
            hooked(layer.register_forward_hook(note) for layer in layers),
        ):  # no noise
            self.run(map_tensors(lambda t: t[:1], x), slice(1))
        return max(found)

    def _memory_of_one(self, x: Inputs) -> int:
        """What a pass of one member adds to a GPU's memory, with what is kept for its backward pass."""
        device = first_tensor(x).device
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with evaluating(self.network):
            self.run(map_tensors(lambda t: t[:1], x), slice(1))
        return torch.cuda.max_memory_allocated(device) - before

    def passes(self, x: Inputs) -> list[slice]:
        if self.members == 1 or torch.compiler.is_compiling():
            return [slice(None)]
        size = (self.chunk or self.members_per_pass(x)) if self.folds(x) else 1
        if size >= self.members:
            return [slice(None)]
        return [
            slice(low, min(low + size, self.members))
            for low in range(0, self.members, size)
        ]

    def run(self, x: Inputs, rows: slice) -> Tensor:
        first = first_tensor(x)
        with contextlib.nullcontext() if rows == slice(None) else active_members(rows):
            logits = logits_of(
                call(self.network, map_tensors(lambda t: t.flatten(0, 1), x))
            )
        given = first.shape[0] * first.shape[1]
        if not isinstance(logits, Tensor) or logits.shape[:1] != (given,):
            kind = type(self.network).__name__
            found = (
                list(logits.shape)
                if isinstance(logits, Tensor)
                else type(logits).__name__
            )
            raise ValueError(
                f"{kind} returned {found} for a batch of {given} rows: members are folded into the batch, so it must "
                "return a row of logits for each row of its input; reshape by the input's own batch size in it"
            )
        return logits.unflatten(0, first.shape[:2])

    def member(self, index: int) -> nn.Module:
        self._check_index(index)
        return with_layers(self.network, lambda layer: layer.member(index))

    def shard(self, rows: slice) -> "FoldedEnsemble":
        shard = type(self)(
            with_layers(self.network, lambda layer: layer.shard(rows)),
            self.member_ids[rows],
        )
        shard.chunk, shard._folds = self.chunk, self._folds
        return self._with_recipe(shard)

    def can_shard(self) -> bool:
        return not self.shared_parameters() and not _drops_globally(self)

    def shared_parameters(self) -> dict[nn.Parameter, int]:
        own = {
            p
            for layer in self.network.modules()
            if isinstance(layer, MemberLayer)
            for p in layer.own_parameters()
        }
        return {
            p: self.members
            for p in self.network.parameters()
            if p.requires_grad and p not in own
        }

    def noise_layers(self) -> list[tuple[MemberDropout, int, Sequence[int]]]:
        return [
            (layer, number, self.member_ids)
            for number, layer in enumerate(_dropouts(self.network))
        ]


class SeparateEnsemble(Ensemble):
    """Members that run one after the other: networks whose layers have no member axis."""

    def __init__(self, models: Sequence[nn.Module], member_ids: range):
        super().__init__(member_ids)
        self.models = nn.ModuleList(models)

    def passes(self, x: Inputs) -> list[slice]:
        return [slice(m, m + 1) for m in range(self.members)]

    def run(self, x: Inputs, rows: slice) -> Tensor:
        each = enumerate(list(self.models)[rows])
        return torch.stack(
            [
                logits_of(call(model, map_tensors(lambda t, m=m: t[m], x)))
                for m, model in each
            ]
        )

    def member(self, index: int) -> nn.Module:
        self._check_index(index)
        return self.models[index]

    def shard(self, rows: slice) -> "SeparateEnsemble":
        return self._with_recipe(
            SeparateEnsemble(list(self.models)[rows], self.member_ids[rows])
        )

    def can_shard(self) -> bool:
        shared = len({id(b) for b in self.buffers()}) < sum(
            1 for model in self.models for _ in model.buffers()
        )
        noisy = any(isinstance(part, _GLOBAL_NOISE) for part in self.modules())
        return not (
            shared or self.shared_parameters() or noisy or _drops_globally(self)
        )

    def shared_parameters(self) -> dict[nn.Parameter, int]:
        members = Counter(
            p for model in self.models for p in model.parameters() if p.requires_grad
        )
        return {p: count for p, count in members.items() if count > 1}

    def noise_layers(self) -> list[tuple[MemberDropout, int, Sequence[int]]]:
        each = zip(self.member_ids, self.models, strict=True)
        return [
            (layer, number, [m])
            for m, model in each
            for number, layer in enumerate(_dropouts(model))
        ]


def _shown(value: Any) -> str:
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )


def member_range(members: int | str | range) -> range:
    """The members' numbers: 10 means 0 to 9; range(8, 16) or its text "8:16" is a shard of a larger ensemble."""
    if isinstance(members, str):
        if not re.fullmatch(r"\d+:\d+(:[1-9]\d*)?", members):
            raise ValueError(
                f'members must be a number, a range or its text such as "0:8", got {members!r}'
            )
        ids = range(*map(int, members.split(":")))
    else:
        ids = members if isinstance(members, range) else range(operator.index(members))
    if len(ids) < 1:
        raise ValueError(
            f"an ensemble needs at least one member, got members={members}"
        )
    return ids


def member_text(ids: range) -> int | str:
    """What `member_range` reads as these numbers, and JSON can hold."""
    if ids == range(len(ids)):
        return len(ids)
    return f"{ids.start}:{ids.stop}" + (f":{ids.step}" if ids.step != 1 else "")


def member_seed(seed: int, member: int, stream: str, *more: int) -> int:
    """A 63-bit seed for one stream of randomness ("weights", "order", "dropout") of one member."""
    words = np.random.SeedSequence(
        [seed, member, *stream.encode(), *more]
    ).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def _drops_globally(model: nn.Module) -> bool:
    """Whether there is dropout inside modules, which draws from torch's global generator, as in transformers."""
    configs = [
        vars(part.config)
        for part in model.modules()
        if hasattr(getattr(part, "config", None), "model_type")
    ]
    inside = [
        part.dropout
        for part in model.modules()
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase)
    ]
    named = [
        p
        for config in configs
        for name, p in config.items()
        if "drop" in name and isinstance(p, float)
    ]
    return any(p > 0 for p in (*inside, *named))


def _dropouts(model: nn.Module) -> list[MemberDropout]:
    return [layer for layer in model.modules() if isinstance(layer, MemberDropout)]


def _alike(together: Tensor, *apart: Tensor) -> bool:
    """Whether a tensor of two members is one of theirs after the other, up to rounding."""
    if any(t.shape != apart[0].shape for t in apart) or not apart[0].ndim:
        return False
    expected = torch.cat(apart)
    if together.shape != expected.shape or not expected.is_floating_point():
        return torch.equal(together, expected)
    return torch.allclose(
        together,
        expected,
        rtol=0,
        atol=0.02 * float(expected.abs().amax()),
        equal_nan=True,
    )


def _walk_in_python(network: nn.Module) -> None:
    """Keep torch from evaluating its encoder layers in one fused call, which reads weights past the members' layers."""
    for part in network.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
