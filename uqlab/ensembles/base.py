"""What every ensemble can do, and its two kinds: members in one pass, or in turn."""

import operator
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uqlab.core import devices
from uqlab.core.checks import first_tensor
from uqlab.core.modules import (
    Inputs,
    call,
    evaluating,
    hooked,
    layers_of,
    logits_of,
    map_tensors,
    rows_of,
)
from uqlab.ensembles.layers import (
    MemberDropout,
    MemberLayer,
    active_members,
    sharded,
    with_layers,
)
from uqlab.ensembles.members import MemberModule
from uqlab.models import check_classifier

Members = int | str | range  # what `member_range` reads
# Modules that draw from torch's global generator.
_GLOBAL_NOISE = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout, nn.RReLU,
)  # fmt: skip


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
            self._check_classifier(x)
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
        """Return whether shards can be trained independently."""
        return False

    def shared_parameters(self) -> dict[nn.Parameter, int]:
        """Return the trained parameters that members share, and how many do.

        They follow the members' mean loss.
        """
        return {p: self.members for p in self.parameters() if p.requires_grad}

    def mixed(self, rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Return which inputs members see, for those drawn [members, batch]."""
        return rows

    def halve(self, x: Inputs) -> bool:
        """Take fewer members in a pass, after memory ran out, if that is possible."""
        return False

    def noise_layers(self) -> list[tuple[MemberDropout, int, Sequence[int]]]:
        """Return dropout layers, their number in a member, and whom they serve."""
        return []

    def reseed(self, seed: int, epoch: int = 0) -> None:
        """Start all dropout noise anew from (seed, member, layer, epoch)."""
        device = next(self.parameters()).device
        for layer, number, members in self.noise_layers():
            if layer.p:
                stream = "dropout", number, epoch
                layer.reseed([member_seed(seed, m, *stream) for m in members], device)

    def with_recipe(self, recipe: Mapping[str, Any] | None) -> Any:
        """Note how a method made these members, and return the ensemble."""
        if recipe is not None:
            self.recipe = {**recipe, "members": member_text(self.member_ids)}
        return self

    def _check_classifier(self, x: Inputs) -> None:
        """Raise ValueError at the first call if another layer is the classifier."""
        if self.took_last_linear and not self._checked:
            check_classifier(self.member(0), rows_of(x, 0))
            self._checked = True

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.members:
            raise IndexError(
                f"member {index} of an ensemble of {self.members}: "
                f"choose 0 to {self.members - 1}"
            )


class FoldedEnsemble(Ensemble):
    """One network whose member layers take all members at once, folded into the batch.

    `chunk` is the largest number of members in one pass; if it is None,
    `members_per_pass` chooses.
    """

    def __init__(self, network: nn.Module, member_ids: range):
        super().__init__(member_ids)
        self.network = network
        self.chunk: int | None = None
        self._bytes: dict[Any, int] = {}
        self._folds: bool | None = None  # not known yet
        # torch's fused evaluation reads weights past the members' layers.
        for layer in layers_of(network, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        for encoder in layers_of(network, nn.TransformerEncoder):
            encoder.use_nested_tensor = False

    def about(self):
        """Return that of any ensemble, and how the members' layers run."""
        about = super().about()
        units = layers_of(self.network, MemberModule)
        ways = Counter(unit.way() for unit in units)
        if ways:
            texts = [f"{count} {way}" for way, count in sorted(ways.items())]
            about["layers of members"] = ", ".join(texts)
        if self._folds is False:
            about["members in a pass"] = "one: its layers do not see the batch first"
        return about

    def train(self, mode: bool = True) -> Any:
        """Change the mode; batch statistics that all members share stay frozen."""
        super().train(mode)
        for module in self.network.modules():
            statistics = getattr(module, "running_mean", None) is not None
            if statistics and not isinstance(module, MemberLayer):
                module.eval()
        return self

    def members_per_pass(self, x: Inputs) -> int:
        """Return how many members go at once for inputs like x [members, batch, ...].

        On a GPU all members do, and of a deep ensemble. On a CPU so many of an
        implicit one that what a layer reads and writes stays in the cache
        (IMPLICIT_CACHE bytes): the weights are shared, so that more members at once
        save little.
        """
        if first_tensor(x).device.type != "cpu" or self.recipe is None:
            return self.members
        fitting = int(devices.IMPLICIT_CACHE / max(1, self._bytes_of_one(x)))
        return max(1, min(self.members, fitting))

    def _bytes_of_one(self, x: Inputs, kind: type[nn.Module] = MemberLayer) -> int:
        """Return the most bytes that a layer reads and writes for one member."""
        _, batch, *shape = first_tensor(x).shape
        key = (kind, *shape)
        if key not in self._bytes:
            one = map_tensors(lambda t: t[:1, :1], x)
            most = 0
            for tensors in self._tensors_of_layers(one, slice(1), kind):
                most = max(most, sum(tensor.nbytes for tensor in tensors))
            self._bytes[key] = most
        return batch * self._bytes[key]

    def folds(self, x: Inputs) -> bool:
        """Return whether members may share a pass; found on the first call.

        They may where every member layer is given the batch along its first axis, the
        rows of one member after those of another. A network that turns its axes round
        inside, counts on the size of its batch, or sends tokens where their values say
        (a mixture of experts), fails this, and its members go through one by one, which
        is right wherever the batch is.
        """
        if self._folds is None:
            self._folds = self._is_given_members_in_order(x)
        return self._folds

    @torch.no_grad()
    def _is_given_members_in_order(self, x):
        """Compare what layers are given for two members together, and for each."""
        # Two inputs for both, so that texts are cut to one length; in an order that is
        # another one if members or axes change places.
        order = torch.tensor([[0, 1, 0], [1, 0, 1]])
        both = map_tensors(lambda t: torch.cat([t[0, :1], t[1, -1:]])[order], x)
        seen = []
        try:
            with _ShapesByValues() as shapes:
                for rows in (slice(2), slice(0, 1), slice(1, 2)):
                    layers = self._tensors_of_layers(
                        rows_of(both, rows), rows, MemberLayer
                    )
                    seen.append([layer[0] for layer in layers])
            together, *apart = seen
            same = len(together) == len(apart[0]) and not shapes.by_values
            return same and all(map(_alike, together, *apart))
        except Exception:  # the pass that follows says what the network makes of it
            return False

    @torch.no_grad()
    def _tensors_of_layers(self, x, rows, kind):
        """Return what layers of a kind read and write in a pass; last the logits."""
        seen: list[list[Tensor]] = []

        def note(_, args, kwargs, output):
            tensors = tree_leaves((args, kwargs, output))
            seen.append([t for t in tensors if isinstance(t, Tensor)])

        layers = layers_of(self.network, kind)
        hooks = (m.register_forward_hook(note, with_kwargs=True) for m in layers)
        with evaluating(self.network), hooked(hooks):
            logits = self.run(x, rows)
        return [*seen, [logits.flatten(0, 1)]]

    def halve(self, x):
        """Take half of the members in a pass from now on."""
        size = self.chunk or self.members_per_pass(x)
        self.chunk = -(-size // 2)
        return size > 1

    def passes(self, x):
        """Return the members that go through together, for x [members, batch, ...]."""
        if self.members == 1 or torch.compiler.is_compiling():
            return [slice(None)]
        size = (self.chunk or self.members_per_pass(x)) if self.folds(x) else 1
        if size >= self.members:
            return [slice(None)]
        return [slice(low, low + size) for low in range(0, self.members, size)]

    def run(self, x, rows):
        """Return logits of some members on x [rows, batch, ...], in one pass."""
        shape = first_tensor(x).shape[:2]
        with active_members(rows):
            folded = map_tensors(lambda t: t.flatten(0, 1), x)
            logits = logits_of(call(self.network, folded))
        returned = getattr(logits, "shape", [type(logits).__name__])
        if returned[:1] != (shape.numel(),):
            raise ValueError(
                f"{type(self.network).__name__} returned {list(returned)} for a batch "
                f"of {shape.numel()} rows: members are folded into the batch, so it "
                "must return a row of logits for each row of its input; reshape by the "
                "input's own batch size in it"
            )
        return logits.unflatten(0, shape)

    def member(self, index):
        """Return the network with the weights of one member."""
        self._check_index(index)
        return with_layers(self.network, lambda layer: layer.member(index))

    def shard(self, rows):
        """Return the ensemble of some members; training it trains these."""
        shard = type(self)(sharded(self.network, rows), self.member_ids[rows])
        shard.chunk, shard._folds = self.chunk, self._folds
        shard._checked = self._checked
        return shard.with_recipe(self.recipe)

    def can_shard(self):
        """Return whether members share nothing that is trained, and no generator."""
        return not self.shared_parameters() and not _draws_globally(self)

    def shared_parameters(self):
        """Return the trained parameters of the network that are no member's own."""
        per_member = set()
        for layer in layers_of(self.network, MemberLayer):
            per_member.update(layer.own_parameters())
        shared = super().shared_parameters()
        return {p: count for p, count in shared.items() if p not in per_member}

    def noise_layers(self):
        """Return dropout layers, their number in a member, and whom they serve."""
        return numbered_dropouts(self.network, self.member_ids)


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
        logits = []
        for i, model in enumerate(list(self.models)[rows]):
            logits.append(logits_of(call(model, rows_of(x, i))))
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
        """Return whether members share no tensor that changes, and no generator."""
        buffers = []
        for model in self.models:
            buffers += model.buffers()
        shared = self.shared_parameters() or len(buffers) > len(list(self.buffers()))
        return not shared and not _draws_globally(self)

    def shared_parameters(self):
        """Return the trained parameters that stand in several networks."""
        networks = Counter()
        for model in self.models:
            networks.update(model.parameters())
        return {p: n for p, n in networks.items() if n > 1 and p.requires_grad}

    def noise_layers(self):
        """Return dropout layers, their number in a member, and whom they serve."""
        layers = []
        for m, model in zip(self.member_ids, self.models, strict=True):
            layers += numbered_dropouts(model, [m])
        return layers


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


def _draws_globally(ensemble):
    """Return whether noise comes from torch's global generator.

    Threads would scramble its order. Besides modules of noise there is dropout inside
    modules, as in attention, recurrent layers and transformers.
    """
    for module in ensemble.modules():
        settings = vars(module) | getattr(
            getattr(module, "config", None), "__dict__", {}
        )
        inside = any(
            p for name, p in settings.items() if "drop" in name and isinstance(p, float)
        )
        if inside or (isinstance(module, _GLOBAL_NOISE) and settings.get("p", 1)):
            return True
    return False


def numbered_dropouts(network: nn.Module, ids: Sequence[int]) -> list:
    """Return the layers of dropout, their number in a member, and whom they serve."""
    layers = layers_of(network, MemberDropout)
    return [(layer, number, ids) for number, layer in enumerate(layers)]


class _ShapesByValues(TorchDispatchMode):
    """Note whether a pass takes rows by a condition: how many, no shape can say."""

    by_values = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.dynamic_output_shape in func.tags:
            chosen = [t.dtype for t in tree_leaves(args[1:]) if isinstance(t, Tensor)]
            self.by_values |= not chosen or torch.bool in chosen  # no index by numbers
        return func(*args, **kwargs or {})


def _alike(together, *apart):
    """Return whether a tensor of two members is one of theirs after the other."""
    expected = torch.cat(apart)
    if together.shape != expected.shape or not expected.is_floating_point():
        return torch.equal(together, expected)
    tolerance = 0.02 * float(expected.abs().amax())  # for rounding
    return torch.allclose(together, expected, 0, tolerance, equal_nan=True)
