"""The engine: one member in plain torch, all members by `torch.func`.

A method says in a small module what *one* member sees in place of a parameter:
`module(w)` returns it. The engine stacks what the members hold, calls the network with
`functional_call`, and runs the members by `vmap` or one after the other.
"""

import contextlib
import copy
import functools
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten

from uqlab.core.checks import one_of
from uqlab.core.modules import Inputs, aliases, layers_of, logits_of, trainable
from uqlab.ensembles.base import Ensemble, MeanGradient

# Up to here, inputs times parameters of the network, `vmap` is the faster way on a CPU:
# the calls of small operations cost more than what they compute.
# benchmarks/implicit_ensembles.py and methods.py have the measurements.
SMALL_WORK = 1e8
# Up to here, rows that one member gives a linear layer, `product` is the faster way.
FEW_ROWS = 1024
# Layers that run one member after the other: convolutions are slow under vmap on a CPU,
# and recurrent layers have no batching rule.
CONVOLUTIONS = (nn.modules.conv._ConvNd,)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
SLOW_RULE = "There is a performance drop"
# How torch says that vmap cannot run a network. Other errors are never caught.
REFUSALS = (
    SLOW_RULE, "vmap: ", "Batching rule not implemented",
    "accessing the data under vmap", "data-dependent control flow", "functorch",
    "inplace arithmetic(self, *extra_args)",
)  # fmt: skip


# `functional_call` changes the network meanwhile, which threads must not see.
_LOCKS: Any = weakref.WeakKeyDictionary()


class Own(nn.Module):
    """A tensor of which every member has its own."""

    def __init__(self, value: Tensor, trained: bool = True):
        super().__init__()
        if trained:
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value)

    def forward(self, w: Tensor) -> Tensor:
        """Return the member's tensor, whatever the network's is."""
        return self.value.to(w.dtype)


class Seen(nn.Module):
    """What the members see in place of one tensor of the network.

    Parameters
    ----------
    name : str
        The name of the parameter or buffer in the network.
    each : sequence of nn.Module
        One module a member, of one class: `module(w)` is what the member sees of w. A
        module for the weight of a linear layer may also have `product(x, w, bias)`,
        which is `linear(x, module(w), bias)` computed without building the weight.
        Buffers that its class names in `shared` are equal for all members; what else
        it holds is stacked.
    """

    kind: Any

    def __init__(self, name: str, each: Sequence[nn.Module]):
        super().__init__()
        self.name = name
        self.kind = each[0]
        tensors = dict(self.kind.named_parameters()) | dict(self.kind.named_buffers())
        self.rows = [k for k in tensors if k not in getattr(self.kind, "shared", ())]
        for key in self.rows:
            first, theirs = tensors[key], [_tensor(module, key) for module in each]
            stacked = torch.stack([t.detach() for t in theirs])
            if isinstance(first, nn.Parameter):
                stacked = nn.Parameter(stacked, first.requires_grad)
            _put(self.kind, key, stacked)

    def stacked(self) -> dict[str, Tensor]:
        """Return what members hold, by its name in the module: [members, ...] each."""
        return {key: _tensor(self.kind, key) for key in self.rows}

    @property
    def trained(self) -> bool:
        """Whether members train something of it."""
        return any(p.requires_grad for p in self.kind.parameters())


class _OneMember(nn.Module):
    """One member, given a row of what members hold: the network with what it sees."""

    def __init__(self, network: nn.Module, seen: Sequence[Seen]):
        super().__init__()
        self.network = network
        self.seen: Any = nn.ModuleList(seen)
        self.aliases = aliases(network)
        # Where the network's tensors stand, and what members hold.
        self.places = {
            name: [_holder(network, alias) for alias in names]
            for name, names in self.aliases.items()
        }
        self.held = {}
        # Linear layers that may multiply without building their weight.
        self.factored = {}
        for part in seen:
            for key in part.rows:
                self.held[f"{part.name} {key}"] = [_holder(part.kind, key)]
            (layer, last), *others = self.places[part.name]
            linear = type(layer) is nn.Linear and last == "weight"
            if linear and not others and hasattr(part.kind, "product"):
                self.factored[part.name] = layer
        self.products = bool(self.factored)

    def forward(self, row: dict, shared: dict, args: tuple, named: dict) -> Tensor:
        with _standing(self.places, shared), _standing(self.held, row):
            state, factored = {}, []
            for part in self.seen:
                w = _at(self.places[part.name][0])
                if self.products and part.name in self.factored:
                    factored.append((self.factored[part.name], part.kind, w))
                    state[part.name] = w.detach().as_subclass(_Unread)
                else:
                    state[part.name] = part.kind(w)
            with _standing(self.places, state), _multiplying(factored):
                return logits_of(self.network(*args, **named))


class FunctionalEnsemble(Ensemble):
    """Members of one network: inputs [batch, ...] -> logits [members, batch, ...].

    Parameters
    ----------
    network : nn.Module
        What the members share. It is used as it is: give a copy.
    sees : mapping
        The name of a parameter or buffer -> one module a member, see `Seen`.
    member_ids : range
        The members' numbers.

    Attributes
    ----------
    mode : {"auto", "vmap", "loop"}
        How members run: together by `torch.func.vmap`, or one after the other. "auto"
        takes vmap on a GPU and where there is little work (`SMALL_WORK`), and the loop
        for convolutions on a CPU, for recurrent layers, and for what vmap refuses.
    chunk_size : int or None
        Members in one pass of vmap; halved where memory runs out.
    """

    def __init__(
        self,
        network: nn.Module,
        sees: Mapping[str, Sequence[nn.Module]],
        member_ids: range,
    ):
        super().__init__(member_ids)
        self.one = _OneMember(network, [Seen(n, each) for n, each in sees.items()])
        for part in self.seen.values():
            if isinstance(part.kind, Own):  # the network's own is read by none
                _tensor(network, part.name).requires_grad_(False)
        self.mode = "auto"
        self.chunk_size: int | None = None
        self.refused = ""  # what vmap said
        self.shares_most = False  # whether members differ at the end alone
        self._tried: set[tuple] = set()
        # What the rule of "auto" asks for.
        self._recurrent = bool(layers_of(network, *RECURRENT))
        seen = [layer for name in sees for layer, _ in self.one.places[name]]
        self._kernels = any(isinstance(layer, CONVOLUTIONS) for layer in seen)
        self._size = sum(t.numel() for t in network.parameters())
        self._size += sum(t[0].numel() for t in self.rows().values())

    @property
    def network(self) -> nn.Module:
        """What the members share; its own tensors stand where members see others."""
        return self.one.network

    @property
    def seen(self) -> dict[str, Seen]:
        """What members see in place of a tensor, by its name in the network."""
        return {part.name: part for part in self.one.seen}

    @property
    def replaced(self) -> set[str]:
        """Names of the network's tensors that no member reads: each has its own."""
        return {name for name, p in self.seen.items() if isinstance(p.kind, Own)}

    def about(self):
        """Return what any ensemble says, and how its members run."""
        way = f"loop, for vmap says: {self.refused}" if self.refused else self.mode
        if self.mode == "auto" and self._recurrent:
            way = "loop, for recurrent layers"
        return super().about() | {"mode": way}

    def train(self, mode: bool = True) -> Any:
        """Change the mode; batch statistics that all members share stay frozen."""
        super().train(mode)
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
        return self._run(args, named, False, slice(None))

    def forward_members(self, *args: Any, **named: Any) -> Tensor:
        """Return logits of inputs [members, batch, ...], a batch for each member."""
        return self._run(args, named, True, slice(None))

    def run(self, x: Inputs, rows: slice) -> Tensor:
        """Return logits of some members on x [rows, batch, ...]."""
        return self._run((x,), {}, True, rows)

    def rows(self, members: slice = slice(None)) -> dict[str, Tensor]:
        """Return what some members hold, [members, ...] each."""
        rows = {name: _at(*place) for name, place in self.one.held.items()}
        if not torch.is_grad_enabled():
            # Without gradients torch's views of parameters claim to have them.
            rows = {name: t.detach() for name, t in rows.items()}
        return {name: t[members] for name, t in rows.items()}

    def _run(self, args: tuple, named: dict, each: bool, members: slice) -> Tensor:
        if len(args) == 1 and isinstance(args[0], Mapping):
            args, named = (), {**args[0], **named}
        if not torch.compiler.is_compiling():
            self._check_classifier(args, named, each)
        with self._alone():
            one_pass = self._pass(args, named, each, members)
            return self._by(self._way(one_pass), one_pass)

    def _pass(self, args: tuple, named: dict, each: bool, members: slice) -> "_Pass":
        """Return what a call computes."""
        leaves, tree = tree_flatten((args, named))
        shared = self._shared()

        def call(row: dict, some: Sequence[Tensor]) -> Tensor:
            # A network that changes its input in place must not change the next one's.
            queue = iter([t.clone() for t in some])
            given = [next(queue) if isinstance(t, Tensor) else t for t in leaves]
            return self.one(row, shared, *tree_unflatten(given, tree))

        one = functools.partial(self.one_pass, call)
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        return _Pass(one, self.rows(members), tensors, each, str(tree))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from the network, which a pass changes meanwhile."""
        lock = _LOCKS.setdefault(self.network, threading.RLock())
        with lock, _pass_of_members():
            yield

    def one_pass(self, call: Any, row: dict, tensors: Sequence[Tensor]) -> Tensor:
        """Return the logits of one member: `call(row, tensors)`, its network's."""
        return call(row, tensors)

    def _by(self, way: str, one_pass: "_Pass") -> Tensor:
        while True:
            moved = self._statistics()
            try:
                if way == "loop":
                    return one_pass.in_turn()
                return one_pass.together(self.chunk_size)
            except _Read:  # a linear layer's weight is read, not its layer called
                self.one.products = False
            except torch.OutOfMemoryError:
                if way == "loop" or not self.halve():
                    raise
            for t, value in moved:  # by the members that were through
                t.copy_(value)

    def _way(self, one_pass: "_Pass") -> str:
        """Return "vmap" or "loop"; what vmap refuses is found before it counts."""
        one_of("mode", self.mode, ("auto", "vmap", "loop"))
        if self.mode != "auto":
            return self.mode
        if self.refused or one_pass.members == 1 or not self._is_for_vmap(one_pass):
            return "loop"
        kind = self.training, *one_pass.kind
        if kind not in self._tried:
            with torch.no_grad(), self._unmoved(), warnings.catch_warnings():
                # vmap says where it would loop itself: slower than our loop.
                warnings.filterwarnings("error", SLOW_RULE)
                try:
                    self._by("vmap", one_pass)
                except (RuntimeError, UserWarning) as error:
                    if not any(text in str(error) for text in REFUSALS):
                        raise
                    self.refused = str(error).splitlines()[0][:100]
            self._tried.add(kind)
        return "loop" if self.refused else "vmap"

    def _is_for_vmap(self, one_pass: "_Pass") -> bool:
        """Return whether vmap is the faster way: the rule of "auto"."""
        first = one_pass.tensors[0]
        if self._recurrent or first.device.type != "cpu":
            return not self._recurrent
        if self.shares_most and not one_pass.each:
            return True
        batch = first.shape[1 if one_pass.each else 0]
        return batch * self._size <= SMALL_WORK and not self._kernels

    def _statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Return what a pass in training may move, and what it is."""
        if not self.training:
            return []
        own = [part.kind for part in self.one.seen if isinstance(part.kind, Own)]
        return [(t, t.clone()) for kind in own for t in kind.buffers()]

    @contextlib.contextmanager
    def _unmoved(self) -> Iterator[None]:
        """Put buffers and random generators back at the end of the block."""
        before = [(t, t.clone()) for t in self.buffers()]
        devices = {t.device for t in self.parameters() if t.device.type != "cpu"}
        with torch.random.fork_rng(list(devices)):
            yield
        for t, value in before:
            t.copy_(value)

    def _shared(self) -> dict[str, Tensor]:
        """Return trained tensors that members share, whose gradient is the mean."""
        if not torch.is_grad_enabled():
            return {}
        state = {}
        for name, p in self.network.named_parameters():
            if p.requires_grad:
                state[name] = MeanGradient.apply(p, self.members)
        return state

    # --- members ---------------------------------------------------------------------

    def tensor(self, name: str, index: int) -> Tensor:
        """Return what one member sees of a tensor of the network."""
        w = _tensor(self.network, name)
        if name not in self.seen:
            return w
        with self._holding(name, index) as kind:
            return kind(w)

    @contextlib.contextmanager
    def _holding(self, name: str, index: int) -> Iterator[Any]:
        """Yield what members see of a tensor, with what one of them holds."""
        part = self.seen[name]
        held = {f"{name} {key}": t[index] for key, t in part.stacked().items()}
        with _standing(self.one.held, held):
            yield part.kind

    def start(self, name: str) -> Tensor | None:
        """Return a tensor before training; None if it was trained, or is not known."""
        w = _tensor(self.network, name)
        return None if name in self.replaced or w.requires_grad else w.detach()

    def update(self, name: str, index: int) -> Tensor | None:
        """Return what training added, if the method knows it without rounding."""
        knows = name in self.seen and hasattr(self.seen[name].kind, "update")
        if self.start(name) is None or not knows:
            return None
        with torch.no_grad(), self._holding(name, index) as kind:
            return kind.update().clone()

    @torch.no_grad()
    def member(self, index: int) -> nn.Module:
        """Return one member as a plain network; frozen tensors share memory."""
        self._check_index(index)
        return self.put(frozen_copy(self.network), index)

    def put(self, network: Any, index: int) -> Any:
        """Put what one member sees into a copy of the network, and return it."""
        for name, part in self.seen.items():
            value = self.tensor(name, index).detach().clone()
            if isinstance(_tensor(network, name), nn.Parameter):
                value = nn.Parameter(value, part.trained)
            for alias in self.one.aliases[name]:
                _put(network, alias, value)
        return network

    def shard(self, rows: slice) -> Any:
        """Return the ensemble of some members; training it trains these."""
        memo: dict[int, Any] = {}
        for p in self.network.parameters():
            memo[id(p)] = nn.Parameter(p.data, p.requires_grad)
        for part in self.one.seen:
            for t in part.stacked().values():
                some = t.data[rows]
                parameter = isinstance(t, nn.Parameter)
                memo[id(t)] = nn.Parameter(some, t.requires_grad) if parameter else some
        shard = copy.deepcopy(self, memo)
        shard.member_ids = self.member_ids[rows]
        return shard.with_recipe(self.recipe)

    def can_shard(self) -> bool:
        """Return whether members share nothing that is trained."""
        return not self.shared_parameters()

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of the network; their gradient is the mean."""
        return trainable(self.network)

    def passes(self, x: Inputs) -> list[slice]:
        """Return the members that go through together: in the loop one by one."""
        args, named = ((), {**x}) if isinstance(x, Mapping) else ((x,), {})
        with self._alone():
            way = self._way(self._pass(args, named, True, slice(None)))
        size = 1 if way == "loop" else self.chunk_size or self.members
        return [slice(low, low + size) for low in range(0, self.members, size)]

    def halve(self, x: Inputs | None = None) -> bool:
        """Take half of the members in a pass from now on, if that is possible."""
        size = self.chunk_size or self.members
        self.chunk_size = -(-size // 2)
        return size > 1


class _Pass:
    """What one call computes: rows of members, and inputs for all or for each."""

    def __init__(self, call, rows: dict, tensors: list[Tensor], each: bool, tree: str):
        self.call, self.rows, self.tensors, self.each = call, rows, tensors, each
        self.kind = each, tree  # of inputs
        self.members = len(next(iter(rows.values())))

    def together(self, chunk_size: int | None) -> Tensor:
        """Run all members by vmap."""
        dims = 0, 0 if self.each else None
        run = vmap(self.call, dims, randomness="different", chunk_size=chunk_size)
        with _MATH:
            return run(self.rows, self.tensors)

    def in_turn(self) -> Tensor:
        """Run one member after the other."""
        logits = []
        # By unbind: the gradients of `t[m]` would be as large as t, for each member.
        apart = {key: t.unbind() for key, t in self.rows.items()}
        for m in range(self.members):
            row = {key: each[m] for key, each in apart.items()}
            some = [t[m] if self.each else t for t in self.tensors]
            logits.append(self.call(row, some))
        return torch.stack(logits)


class _Read(Exception):
    """The weight of a linear layer was read elsewhere than in the layer's call."""


class _Unread(Tensor):
    """Stands for a weight that is not built; only its shape and type can be read."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        raise _Read(func.__name__)


_HARMLESS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout",
    )),
}  # fmt: skip


@contextlib.contextmanager
def _multiplying(factored: Sequence[tuple[Any, Any, Tensor]]) -> Iterator[None]:
    """Let linear layers multiply by what a member sees, without building it."""

    def forward_of(layer, kind, w):
        def forward(x):
            few = x.numel() <= FEW_ROWS * x.shape[-1]
            if few or w.dtype in (torch.bfloat16, torch.float16):
                return kind.product(x, w, layer.bias)
            return F.linear(x, kind(w), layer.bias)

        return forward

    try:
        for layer, kind, w in factored:
            layer.forward = forward_of(layer, kind, w)
        yield
    finally:
        for layer, *_ in factored:
            layer.__dict__.pop("forward", None)


class _Meanwhile:
    """A setting of all threads, while any of them is inside."""

    def __init__(self, setting):
        self.setting, self.lock = setting, threading.Lock()
        self.inside, self.stack = 0, contextlib.ExitStack()

    def __enter__(self):
        with self.lock:
            if not self.inside:
                self.stack.enter_context(self.setting())
            self.inside += 1

    def __exit__(self, *_):
        # Not as each found it: one that came later would leave the setting for good.
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.stack.close()


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    """Keep torch's attention from a fused form that has neither rule nor derivative."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_HERE = threading.local()  # `members`: whether this thread is in a pass with gradients


@contextlib.contextmanager
def _no_checkpoints() -> Iterator[None]:
    """Refuse gradient checkpointing inside the network.

    It computes a part of the network again when gradients are taken, and by then the
    network holds no member's weights: the gradients would be wrong in silence.
    """

    def guarded(run):
        def call(*args, **named):
            if getattr(_HERE, "members", False):
                raise ValueError(
                    "gradient checkpointing inside the network would compute it again "
                    "with other weights than the member's: switch it off in the "
                    "network, and set chunk_size or train fewer members at once to "
                    "save memory"
                )
            return run(*args, **named)

        return call

    generator = checkpoint._checkpoint_without_reentrant_generator
    function = checkpoint.CheckpointFunction
    checkpoint._checkpoint_without_reentrant_generator = guarded(generator)
    guard: Any = type("Guarded", (), {"apply": staticmethod(guarded(function.apply))})
    checkpoint.CheckpointFunction = guard
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = generator
        checkpoint.CheckpointFunction = function


@contextlib.contextmanager
def _pass_of_members() -> Iterator[None]:
    before = getattr(_HERE, "members", False)
    _HERE.members = torch.is_grad_enabled()
    try:
        with _FAST_PATH, _CHECKPOINTS:
            yield
    finally:
        _HERE.members = before


_FAST_PATH = _Meanwhile(_no_fast_path)
_CHECKPOINTS = _Meanwhile(_no_checkpoints)
# The mathematical form of attention has a batching rule everywhere.
_MATH = _Meanwhile(lambda: sdpa_kernel(SDPBackend.MATH))


def unwrapped(network: Any) -> Any:
    """Return the network inside torch.compile's and DataParallel's wrappers."""
    for wrapped in ("_orig_mod", "module"):
        parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
        if wrapped == "_orig_mod" or isinstance(network, parallel):
            network = getattr(network, wrapped, network)
    return network


def frozen_copy(network: Any) -> Any:
    """Copy a network; frozen parameters share memory, all else is its own."""
    memo = {
        id(p): nn.Parameter(p.detach(), False)
        for p in network.parameters()
        if not p.requires_grad
    }
    return copy.deepcopy(network, memo)


@contextlib.contextmanager
def _standing(places: Mapping[str, list[tuple[Any, str]]], tensors: Mapping):
    """Let tensors stand in modules, each in all its places, inside the block."""
    before = []
    try:
        for name, t in tensors.items():
            for module, key in places[name]:
                table = module._parameters
                table = table if key in table else module._buffers
                before.append((table, key, table[key]))
                table[key] = t
        yield
    finally:
        for table, key, t in before:
            table[key] = t


def _holder(module: nn.Module, name: str) -> tuple[Any, str]:
    """Return the module that holds a tensor, and the tensor's name there."""
    holder, _, last = name.rpartition(".")
    return module.get_submodule(holder), last


def _at(place: tuple[Any, str]) -> Any:
    return getattr(*place)


def _tensor(module: nn.Module, name: str) -> Any:
    return _at(_holder(module, name))


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    holder, last = _holder(module, name)
    setattr(holder, last, value)
