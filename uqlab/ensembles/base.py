"""Ensembles: members of one network, networks in turn, one network for all."""

import contextlib
import copy
import functools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from uqlab.core.checks import at_least, one_of
from uqlab.core.files import StrPath
from uqlab.core.modules import (
    Counted,
    Inputs,
    aliases,
    called_with,
    layers_of,
    logits_of,
    map_tensors,
    rows_of,
    trainable,
)
from uqlab.ensembles.functional import (
    CONVOLUTIONS,
    GENERATOR,
    RECURRENT,
    SLOW_RULE,
    SMALL_WORK,
    Own,
    Seen,
    Unbuilt,
    alone,
    frozen_copy,
    holder_of,
    in_turn,
    put_tensor,
    refusal,
    standing,
    tensor_of,
    together,
)
from uqlab.models import check_classifier

Members = int | range


class Ensemble(nn.Module):
    """Members of one network: inputs [batch, ...] -> logits [members, batch, ...].

    Parameters
    ----------
    network : nn.Module
        What the members share. It is used as it is: give a copy.
    members : int or range
        How many, or the members' numbers in a larger ensemble, `range(8, 16)`.
    sees : mapping, optional
        The name of a parameter or buffer -> one module a member: `module(w)` is what
        the member sees in place of w. The modules become the ensemble's. All other
        tensors are the members' common ones.

    Attributes
    ----------
    member_ids : range
        The members' numbers. What a member learns depends on (seed, its number) alone,
        so an ensemble can be computed in shards.
    mode : {"auto", "vmap", "loop"}
        How members run: together by `torch.func.vmap`, or one after the other. "auto"
        takes vmap on a GPU and where there is little work (`SMALL_WORK`), and the loop
        for convolutions on a CPU, for recurrent layers, and for what vmap refuses.
    chunk_size : int or None
        Members in one pass of vmap; halved where memory runs out.
    recipe : dict
        How a method made the ensemble, which `save_pretrained` writes.

    Raises
    ------
    ValueError
        For members below 1, a name that the network has not, and another number of
        modules than of members.

    Examples
    --------
    >>> class Scale(nn.Module):
    ...     def __init__(self, factor):
    ...         super().__init__()
    ...         self.factor = nn.Parameter(torch.tensor(factor))
    ...     def forward(self, w):
    ...         return self.factor * w
    >>> network = nn.Linear(4, 3)
    >>> ensemble = Ensemble(network, 2, {"weight": [Scale(1.0), Scale(2.0)]})
    >>> ensemble(torch.rand(7, 4)).shape
    torch.Size([2, 7, 3])
    """

    repeats = 1  # how often an input stands in its batch of a training

    def __init__(
        self,
        network: nn.Module,
        members: Members,
        sees: Mapping[str, Sequence[nn.Module]] | None = None,
    ):
        super().__init__()
        self.member_ids = member_range(members)
        self.network = network
        self.recipe: dict[str, Any] = {"method": "own"}
        self.mode = "auto"
        self.chunk_size: int | None = None
        self.refused = ""  # why vmap cannot run the network
        if layers_of(network, *RECURRENT):
            self.refused = "recurrent layers have no batching rule"
        self.shares_most = False  # whether members differ at the end alone
        self._checked = False  # whether the classifier is the one that was taken
        self._work: dict[tuple, float] = {}  # multiply-adds for a number of the inputs
        self._tried: set[tuple] = set()
        self._see(sees or {})
        # How `models` made the network, and its frozen weights, by name: a folder
        # holds none of these.
        self.source: dict[str, Any] = getattr(network, "source", {})
        named = network.named_parameters()
        frozen = {name for name, p in named if not p.requires_grad}
        self.borrowed = frozen - self.replaced

    def _see(self, sees):
        """Take what members see, and note where all tensors stand."""
        # (module, key) under each of a tensor's names in the network.
        self._aliases = aliases(self.network)
        self._places = {
            name: [holder_of(self.network, alias) for alias in names]
            for name, names in self._aliases.items()
        }
        for name, each in sees.items():
            if name not in self._places or len(each) != self.members:
                raise ValueError(
                    "sees maps names of the network's parameters or buffers to one "
                    f"module a member ({self.members}); got {len(each)} for {name!r}"
                )
        parts: Any = nn.ModuleList(Seen(name, each) for name, each in sees.items())
        self.parts = parts
        self._held = {}
        for part in parts:
            for key in part.rows:
                self._held[f"{part.name} {key}"] = [holder_of(part.kind, key)]
            if isinstance(part.kind, Own):
                getattr(*self._places[part.name][0]).requires_grad_(False)

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.member_ids)

    @property
    def seen(self) -> dict[str, Seen]:
        """What members see in place of a tensor, by its name in the network."""
        return {part.name: part for part in self.parts}

    @property
    def replaced(self) -> set[str]:
        """Names of the network's tensors that no member reads: each has its own."""
        return {name for name, p in self.seen.items() if isinstance(p.kind, Own)}

    @property
    def took_last_linear(self) -> bool:
        """Whether nobody named the classifier, so the last linear layer was taken."""
        return self.recipe.get("classifier", "") is None

    def save_pretrained(self, folder: StrPath) -> None:
        """Write what the members own, and how they were made, to a folder.

        `ensembles.from_pretrained` reads it. The folder holds "ensemble.safetensors"
        and "uqlab.json", which is for people to read: the method, its settings, the
        version of uqlab, and the backbone's name and digest. Frozen weights of a
        backbone are not written; of members that hold all their parameters, all are.

        Parameters
        ----------
        folder : str or path
            Made if it is not there. Other files in it stay.

        Raises
        ------
        ValueError
            For members that hold tensors as plain attributes.
        """
        from uqlab.ensembles.folders import save

        save(self, folder)

    def __repr__(self) -> str:
        """Return the method, the trainable parameters and the mode in one line."""
        count = sum(p.numel() for p in trainable(self))
        mode = f"loop: {self.refused}" if self.refused else self.mode
        about = {**self.recipe, "members": self.members}
        about |= {"trainable parameters": f"{count:,}", "mode": mode}
        settings = ", ".join(f"{name}: {value}" for name, value in about.items())
        return f"{type(self).__name__}({settings})"

    def train(self, mode: bool = True) -> Any:
        """Change the mode; batch statistics that all members share stay frozen."""
        super().train(mode)
        if not self.parts:  # networks of the members' own
            return self
        for name, module in self.network.named_modules():
            statistics = getattr(module, "running_mean", None) is not None
            if statistics and f"{name}.running_mean".lstrip(".") not in self.seen:
                module.eval()
        return self

    # --- passes ----------------------------------------------------------------------

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Return logits [members, batch, ...] of inputs [batch, ...].

        As the network takes them; a mapping alone is inputs by name.
        """
        return self._logits(args, named, False)

    def forward_each(self, *args: Any, **named: Any) -> Tensor:
        """Return logits of inputs [members, batch, ...], a batch for each member."""
        return self._logits(args, named, True)

    def run(self, x: Inputs, rows: slice, each: bool = True) -> Tensor:
        """Return logits of some members on x [rows, batch, ...].

        Unless `each` has its own: on x [batch, ...].
        """
        return self._logits((x,), {}, each, rows)

    def _logits(self, args, named, each, members=slice(None)):
        if len(args) == 1 and isinstance(args[0], Mapping):
            args, named = (), {**args[0], **named}
        if not torch.compiler.is_compiling():
            self._check_classifier(args, named, each)
        return self._run(args, named, each, members)

    def _run(self, args, named, each, members):
        """Return logits of some members; `each`: inputs have their axis in front."""
        with alone(self.network):
            given = self._given(args, named, each, members)
            way = self._way(*given)
            while way == "vmap":
                try:
                    return together(*given, self.chunk_size)
                except torch.OutOfMemoryError:
                    # In training statistics would move twice: `fit` halves there.
                    if self.training or not self.halve():
                        raise
            return in_turn(*given, len(self.member_ids[members]))

    def _given(self, args, named, each, members):
        """Return a pass of one member, and what is given to those of all."""
        leaves, tree = tree_flatten((args, named))
        shared = self._shared()

        def call(row: dict, some: Sequence[Tensor]) -> Tensor:
            # A network that changes its input in place must not change the next one's.
            queue = iter([t.clone() for t in some])
            given = [next(queue) if isinstance(t, Tensor) else t for t in leaves]
            return self._one(row, shared, *tree_unflatten(given, tree))

        tensors = [t for t in leaves if isinstance(t, Tensor)]
        one = functools.partial(self.one_pass, call)
        return one, self.rows(members), tensors, each

    def one_pass(self, call: Any, row: dict, tensors: Sequence[Tensor]) -> Tensor:
        """Return the logits of one member: `call(row, tensors)`, its network's."""
        return call(row, tensors)

    def _one(self, row, shared, args, named):
        """Call the network with what one member sees, given what it holds."""
        with standing(self._places, shared), standing(self._held, row):
            state = {}
            for part in self.parts:
                layer, name = self._places[part.name][0]
                w = getattr(layer, name)
                factors = type(layer) is nn.Linear and hasattr(part.kind, "product")
                state[part.name] = Unbuilt.of(w, part) if factors else part.kind(w)
            with standing(self._places, state):
                return logits_of(self.network(*args, **named))

    def rows(self, members: slice = slice(None)) -> dict[str, Tensor]:
        """Return what some members hold, [members, ...] each."""
        rows = {name: getattr(*place) for name, [place] in self._held.items()}
        if not torch.is_grad_enabled():
            # Without gradients torch's views of parameters claim to have them.
            rows = {name: t.detach() for name, t in rows.items()}
        return {name: t[members] for name, t in rows.items()}

    def _way(self, one, rows, tensors, each):
        """Return "vmap" or "loop"; what vmap refuses is found before it counts."""
        one_of("mode", self.mode, ("auto", "vmap", "loop"))
        if self.mode != "auto":
            return self.mode
        kind = self.training, each, len(tensors)
        if not self.refused and self._is_for_vmap(kind, one, rows, tensors, each):
            if kind not in self._tried:
                self._try(one, rows, tensors, each)
                self._tried.add(kind)
            return "loop" if self.refused else "vmap"
        return "loop"

    def _is_for_vmap(self, kind, one, rows, tensors, each):
        """Return whether vmap is the faster way: the rule of "auto"."""
        if self.members == 1:
            return False
        if tensors[0].device.type != "cpu":
            return True
        changed = [self._places[part.name][0][0] for part in self.parts]
        if any(isinstance(layer, CONVOLUTIONS) for layer in changed):
            return False
        if self.shares_most and not each:
            return True
        some = [t[0] for t in tensors] if each else tensors
        if kind not in self._work:
            with torch.no_grad(), self.unmoved(), Counted() as counted:
                one({key: t[0] for key, t in rows.items()}, some)
            self._work[kind] = counted.multiply_adds / max(some[0].numel(), 1)
        return self._work[kind] * some[0].numel() <= SMALL_WORK

    def _try(self, one, rows, tensors, each):
        """Note why vmap cannot run the network, if it cannot."""
        with torch.no_grad(), self.unmoved(), warnings.catch_warnings():
            # vmap says where it would loop itself: slower than our loop.
            warnings.filterwarnings("error", SLOW_RULE)
            try:
                together(one, rows, tensors, each, self.chunk_size)
            except torch.OutOfMemoryError:
                return
            except (RuntimeError, UserWarning) as error:
                self.refused = refusal(error)

    @contextlib.contextmanager
    def unmoved(self) -> Iterator[None]:
        """Put buffers and random generators back at the end of the block."""
        before = [(t, t.clone()) for t in self.buffers()]
        devices = {t.device for t in self.parameters() if t.device.type != "cpu"}
        try:
            with GENERATOR, torch.random.fork_rng(list(devices), self.training):
                yield
        finally:
            for t, value in before:
                t.copy_(value)

    def _shared(self):
        """Return trained tensors that members share, whose gradient is the mean."""
        if not torch.is_grad_enabled():
            return {}
        named = self.network.named_parameters()
        return {
            name: MeanGradient.apply(p, self.members)
            for name, p in named
            if p.requires_grad
        }

    # --- members ---------------------------------------------------------------------

    def tensor(self, name: str, index: int) -> Tensor:
        """Return what one member sees of a tensor of the network."""
        w = tensor_of(self.network, name)
        return self.seen[name].one(index)(w) if name in self.seen else w

    def start(self, name: str) -> Tensor | None:
        """Return a tensor before training; None if it was trained, or is not known."""
        w = tensor_of(self.network, name)
        return None if name in self.replaced or w.requires_grad else w.detach()

    def update(self, name: str, index: int) -> Tensor | None:
        """Return what training added, if the method knows it without rounding."""
        part = self.seen.get(name)
        if part is None or self.start(name) is None or not hasattr(part.kind, "update"):
            return None
        return part.one(index).update().detach().clone()

    @torch.no_grad()
    def member(self, index: int) -> nn.Module:
        """Return one member as a plain network; frozen tensors share memory."""
        network = frozen_copy(self.network)
        for name, part in self.seen.items():
            value = self.tensor(name, index).detach().clone()
            if isinstance(tensor_of(network, name), nn.Parameter):
                value = nn.Parameter(value, part.trained)
            for alias in self._aliases[name]:
                put_tensor(network, alias, value)
        return network

    def shard(self, rows: slice) -> Any:
        """Return the ensemble of some members; training it trains these."""
        memo: dict[int, Any] = {}
        for p in self.network.parameters():
            memo[id(p)] = nn.Parameter(p.data, p.requires_grad)
        for part in self.parts:
            for t in part.stacked().values():
                some = t.data[rows]
                parameter = isinstance(t, nn.Parameter)
                memo[id(t)] = nn.Parameter(some, t.requires_grad) if parameter else some
        shard = copy.deepcopy(self, memo)
        shard.member_ids = self.member_ids[rows]
        return shard

    def can_shard(self) -> bool:
        """Return whether members share nothing that is trained."""
        return not self.shared_parameters()

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of the network; their gradient is the mean."""
        return trainable(self.network)

    def passes(self, x: Inputs, each: bool = True) -> list[slice]:
        """Return the members that go through together: in the loop one by one."""
        args, named = ((), {**x}) if isinstance(x, Mapping) else ((x,), {})
        with alone(self.network):
            way = self._way(*self._given(args, named, each, slice(None)))
        size = 1 if way == "loop" else self.chunk_size or self.members
        return [slice(low, low + size) for low in range(0, self.members, size)]

    def halve(self) -> bool:
        """Take half of the members in a pass from now on, if that is possible."""
        size = self.chunk_size or self.members
        self.chunk_size = -(-size // 2)
        return size > 1

    def mixed(self, rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Return which inputs members see, for those drawn [members, batch]."""
        return rows

    def with_recipe(self, recipe: Mapping[str, Any]) -> Any:
        """Note how a method made these members, and return the ensemble."""
        self.recipe = dict(recipe)
        return self

    def _check_classifier(self, args, named, each):
        """Raise ValueError at the first call if another layer is the classifier."""
        one = len(args) + bool(named) == 1
        if one and self.took_last_linear and not self._checked:
            x = args[0] if args else named
            some = rows_of(rows_of(x, 0) if each else x, slice(2))
            # A network that changes its input in place must not change the caller's.
            check_classifier(self.member(0), map_tensors(torch.clone, some))
            self._checked = True


class SeparateEnsemble(Ensemble):
    """Members that run one after the other: networks without a member axis."""

    network: nn.ModuleList

    def __init__(self, models: Sequence[nn.Module], members: Members):
        super().__init__(nn.ModuleList(models), members)
        self.mode = "loop"
        self.source = getattr(self.network[0], "source", {})
        self.borrowed = set()
        self.recipe = {"method": "from_members"}

    def passes(self, x, each=True):
        """Return the members one by one."""
        return [slice(m, m + 1) for m in range(self.members)]

    def halve(self):
        """Return that no fewer than one can be taken."""
        return False

    def _run(self, args, named, each, members):
        counts = self._networks() if torch.is_grad_enabled() else {}
        logits = []
        for i, model in enumerate(list(self.network)[members]):

            def given(t, i=i):
                return (t[i] if each else t).clone()

            some, more = tree_map_only(Tensor, given, (args, named))
            means = {
                name: MeanGradient.apply(p, counts[p])
                for name, p in model.named_parameters()
                if counts.get(p, 1) > 1
            }
            if means:
                output = called_with(model, means, some, more)
            else:
                output = model(*some, **more)
            logits.append(logits_of(output))
        kinds = {(tuple(z.shape), z.dtype) for z in logits}
        if len(kinds) > 1:
            raise ValueError(
                "members of an ensemble give logits of one shape and type, these give "
                f"{sorted(map(str, kinds))}: leave out the others, or convert them"
            )
        return torch.stack(logits)

    def member(self, index):
        """Return one of the networks, not a copy."""
        return self.network[index]

    def shard(self, rows):
        """Return the ensemble of some members; training it trains these."""
        shard = type(self)(list(self.network)[rows], self.member_ids[rows])
        return shard.with_recipe(self.recipe)

    def can_shard(self):
        """Return whether members share no tensor that changes."""
        buffers = [b for model in self.network for b in model.buffers()]
        one_place = len(buffers) == len(list(self.buffers()))
        return one_place and not self.shared_parameters()

    def shared_parameters(self):
        """Return the trained parameters that stand in several networks."""
        return [p for p, n in self._networks().items() if n > 1 and p.requires_grad]

    def _networks(self):
        """Return in how many networks a parameter stands."""
        return Counter(p for model in self.network for p in model.parameters())


class OneNetwork(Ensemble):
    """One network that answers for all members, which share all that it trains."""

    def passes(self, x, each=True):
        """Return all members."""
        return [slice(None)]

    def halve(self):
        """Return that fewer members cannot be taken."""
        return False

    def can_shard(self):
        """Return that members cannot be trained apart."""
        return False


class MeanGradient(torch.autograd.Function):
    """What members share as it is, whose gradient is divided by their number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p, members):
        return p.view_as(p)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.members = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.members, None


def member_range(members: Members) -> range:
    """Return the members' numbers: 10 means 0 to 9, a range stands for itself."""
    if not isinstance(members, range | int | np.integer):
        raise TypeError(f"members must be a whole number or a range, got {members!r}")
    ids = members if isinstance(members, range) else range(members)
    if len(ids) < 1:
        raise ValueError(f"an ensemble needs at least one member, got {members=}")
    return ids


def member_seed(seed: int, member: int, stream: str, *more: int) -> int:
    """Return a 63-bit seed for one stream ("weights", "order") of one member."""
    at_least("seed", seed, 0)
    sequence = np.random.SeedSequence([seed, member, *stream.encode(), *more])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def member_generators(
    seed: int, ids: Iterable[int], stream: str, *more: int
) -> list[torch.Generator]:
    """Return a generator on the CPU for each member, seeded by `member_seed`."""
    seeds = [member_seed(seed, m, stream, *more) for m in ids]
    return [torch.Generator().manual_seed(s) for s in seeds]
