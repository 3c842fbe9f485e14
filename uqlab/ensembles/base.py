"""What every ensemble can do, and its two kinds: members in one pass, or in turn."""

import copy
import operator
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from uqlab.core.modules import (
    Inputs,
    call,
    called_with,
    logits_of,
    map_tensors,
    rows_of,
    trainable,
)
from uqlab.models import check_classifier

Members = int | str | range  # what `member_range` reads


class Ensemble(nn.Module):
    """A callable from inputs [batch, ...] to logits [members, batch, classes].

    `member_ids` are the members' numbers in the whole ensemble: what a member learns
    depends on (seed, its number) alone, so an ensemble can be computed in shards.
    `recipe` says how a method made it, which `save` writes. Unless its class says
    otherwise, the members go through one network together and share all its parameters.
    """

    repeats = 1  # how often an input stands in its batch of a training
    began = ""  # with which weights, the fingerprint of them, a training has begun

    def __init__(self, member_ids: range):
        super().__init__()
        self.member_ids = member_ids
        self.recipe: dict[str, Any] | None = None
        self._checked = False  # whether the classifier is the one that was taken

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.member_ids)

    @property
    def took_last_linear(self) -> bool:
        """Whether nobody named the classifier, so the last linear layer was taken."""
        return (self.recipe or {}).get("classifier", "") is None

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any):
        """Load a state as torch does, also from a plain mapping as files hold it."""
        state: Any = OrderedDict(state_dict)
        # Without versions torch adds counts of batches, also where members have theirs.
        mine: Any = self.state_dict()
        state._metadata = mine._metadata
        return super().load_state_dict(state, *args, **kwargs)

    def about(self) -> dict[str, Any]:
        """Return kind, method and settings, members, and how much is trained."""
        tensors = [*self.parameters(), *self.buffers()]
        trained = [t for t in tensors if t.requires_grad]
        return {
            "kind": type(self).__name__,
            **(self.recipe or {}),
            "members": member_text(self.member_ids),
            "numbers trained": _numbers(trained),
            "of these shared by members": _numbers(self.shared_parameters()),
            "numbers frozen": _numbers(tensors) - _numbers(trained),
        }

    def _lines(self):
        """Return `about` as texts."""
        about = self.about().items()
        return {k: f"{v:,}" if type(v) is int else str(v) for k, v in about}

    def __repr__(self) -> str:
        kind, *lines = (f"{name}: {text}" for name, text in self._lines().items())
        return f"{kind.removeprefix('kind: ')}({', '.join(lines)})"

    def _repr_html_(self):
        rows = [
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in self._lines().items()
        ]
        return f"<table>{''.join(rows)}</table>"

    def forward(self, x: Inputs | None = None, **named: Tensor) -> Tensor:
        """Return logits of x [batch, ...], or of tensors by name."""
        inputs = named if x is None else x
        return self.forward_members(
            map_tensors(lambda t: t.expand(self.members, *t.shape), inputs)
        )

    def forward_members(self, x: Inputs) -> Tensor:
        """Return logits of x [members, batch, ...], a batch for each member."""
        if not torch.compiler.is_compiling():
            self._check_classifier((x,), {}, True)
        while True:
            try:
                passes = [self.run(rows_of(x, rows), rows) for rows in self.passes(x)]
                return torch.cat(passes)
            except torch.OutOfMemoryError:
                if not self.halve(x):
                    raise

    def passes(self, x: Inputs) -> list[slice]:
        """Return the members that go through together, for x [members, batch, ...]."""
        return [slice(None)]

    def run(self, x: Inputs, rows: slice) -> Tensor:
        """Return logits of some members on x [rows, batch, ...], in one pass."""
        raise NotImplementedError

    def member(self, index: int) -> nn.Module:
        """Return a plain module: inputs [batch, ...] -> logits [batch, classes]."""
        raise NotImplementedError

    def shard(self, rows: slice) -> "Ensemble":
        """Return the ensemble of some members; training it trains these."""
        raise NotImplementedError

    def can_shard(self) -> bool:
        """Return whether shards can be trained independently, but for their noise."""
        return False

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters that members share.

        The gradient of the sum of the members' losses is the mean of theirs for them.
        """
        return trainable(self)

    def mixed(self, rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Return which inputs members see, for those drawn [members, batch]."""
        return rows

    def halve(self, x: Inputs) -> bool:
        """Take fewer members in a pass, after memory ran out, if that is possible."""
        return False

    def with_recipe(self, recipe: Mapping[str, Any] | None) -> Any:
        """Note how a method made these members, and return the ensemble."""
        if recipe is not None:
            self.recipe = {**recipe, "members": member_text(self.member_ids)}
        return self

    def _check_classifier(self, args: tuple, named: Mapping, each: bool) -> None:
        """Raise ValueError at the first call if another layer is the classifier."""
        one = len(args) + bool(named) == 1
        if one and self.took_last_linear and not self._checked:
            x = args[0] if args else named
            some = rows_of(rows_of(x, 0) if each else x, slice(2))
            # A network that changes its input in place must not change the caller's.
            check_classifier(self.member(0), map_tensors(torch.clone, some))
            self._checked = True

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.members:
            raise IndexError(
                f"member {index} of an ensemble of {self.members}: "
                f"choose 0 to {self.members - 1}"
            )


class SeparateEnsemble(Ensemble):
    """Members that run one after the other: networks without a member axis."""

    def __init__(self, models: Sequence[nn.Module], member_ids: range):
        super().__init__(member_ids)
        self.models = nn.ModuleList(models)

    def passes(self, x):
        """Return the members one by one."""
        return [slice(m, m + 1) for m in range(self.members)]

    def run(self, x, rows):
        """Return logits of some members on x [rows, batch, ...]."""
        logits, counts = [], self._networks() if torch.is_grad_enabled() else {}
        for i, model in enumerate(list(self.models)[rows]):
            means = {
                name: MeanGradient.apply(p, counts[p])
                for name, p in model.named_parameters()
                if counts.get(p, 1) > 1
            }
            some = rows_of(x, i)
            output = called_with(model, means, some) if means else call(model, some)
            logits.append(logits_of(output))
        return torch.stack(logits)

    def member(self, index):
        """Return one of the networks, not a copy."""
        self._check_index(index)
        return self.models[index]

    def shard(self, rows):
        """Return the ensemble of some members; training it trains these."""
        models = list(self.models)[rows]
        shard = SeparateEnsemble(models, self.member_ids[rows])
        return shard.with_recipe(self.recipe)

    def can_shard(self):
        """Return whether members share no tensor that changes."""
        buffers = []
        for model in self.models:
            buffers += model.buffers()
        return not (
            self.shared_parameters() or len(buffers) > len(list(self.buffers()))
        )

    def shared_parameters(self):
        """Return the trained parameters that stand in several networks."""
        return [p for p, n in self._networks().items() if n > 1 and p.requires_grad]

    def _networks(self):
        """Return in how many networks a parameter stands."""
        networks = Counter()
        for model in self.models:
            networks.update(model.parameters())
        return networks


class MeanGradient(torch.autograd.Function):
    """What members share as it is, whose gradient is divided by their number."""

    @staticmethod
    def forward(ctx, p, members):
        ctx.members = members
        return p.view_as(p)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.members, None


def member_range(members: Members) -> range:
    """Return the members' numbers.

    10 means 0 to 9; range(8, 16) or its text "8:16" is a shard of a larger ensemble.
    """
    if isinstance(members, str):
        if not re.fullmatch(r"\d+:\d+(:[1-9]\d*)?", members):
            raise ValueError(
                "members must be a number, a range or its text such as "
                f'"0:8", got {members!r}'
            )
        ids = range(*map(int, members.split(":")))
    else:
        ids = members if isinstance(members, range) else range(operator.index(members))
    if len(ids) < 1:
        raise ValueError(f"an ensemble needs at least one member, got {members=}")
    return ids


def member_text(ids: range) -> int | str:
    """Return what `member_range` reads as these numbers, and JSON can hold."""
    if ids == range(len(ids)):
        return len(ids)
    return f"{ids.start}:{ids.stop}:{ids.step}".removesuffix(":1")


def member_seed(seed: int, member: int, stream: str, *more: int) -> int:
    """Return a 63-bit seed for one stream ("weights", "order") of one member."""
    sequence = np.random.SeedSequence([seed, member, *stream.encode(), *more])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def member_generators(
    seed: int, ids: Iterable[int], stream: str, *more: int
) -> list[torch.Generator]:
    """Return a generator on the CPU for each member, seeded by `member_seed`."""
    seeds = [member_seed(seed, m, stream, *more) for m in ids]
    return [torch.Generator().manual_seed(s) for s in seeds]


def _numbers(tensors):
    return sum(t.numel() for t in tensors)


def draws_noise(network: nn.Module, x: Inputs) -> bool:
    """Return whether a network draws from torch's generator in training, on a CPU."""
    tried = copy.deepcopy(network).train()
    with torch.no_grad(), torch.random.fork_rng([]):
        before = torch.get_rng_state()
        call(tried, x)
        return not torch.equal(before, torch.get_rng_state())
