"""How members run: one member in plain torch, all members by `torch.func`.

A method says in a small module what *one* member sees in place of a tensor of the
network. What the members hold is stacked; the network is called with what one member
sees standing in its modules, by `vmap` for all members or for one after the other.
"""

import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint
from torch.utils._pytree import tree_map

from uqlab.core.modules import Counted

# Up to here, multiply-adds of one member, `vmap` is the faster way on a CPU: the calls
# of small operations cost more than what they compute. benchmarks/ways.py has the
# measurements: 0.1 to 1.5 of the loop's time below, 0.9 to 2 above.
SMALL_WORK = 1.5e9
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


# Who sets torch's global generator and puts it back is alone meanwhile.
GENERATOR = threading.RLock()
# A pass changes the network meanwhile, which other threads must not see.
_LOCKS: Any = weakref.WeakKeyDictionary()


class Own(nn.Module):
    """A tensor of which every member has its own; `kept` in files, or made again."""

    def __init__(self, value: Tensor, trained: bool = True, kept: bool = True):
        super().__init__()
        if trained:
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value, persistent=kept)

    def forward(self, w: Tensor) -> Tensor:
        """Return the member's tensor, whatever the network's is."""
        value = self.value  # which vmap would convert even where nothing changes
        return value if value.dtype == w.dtype else value.to(w.dtype)


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
        for key, value in vars(self.kind).items():
            if isinstance(value, Tensor):
                raise ValueError(
                    f"{type(self.kind).__name__} holds the tensor {key!r} as a plain "
                    "attribute, which all members would share: make it a Parameter or "
                    "a buffer"
                )
        tensors = dict(self.kind.named_parameters()) | dict(self.kind.named_buffers())
        self.rows = [k for k in tensors if k not in getattr(self.kind, "shared", ())]
        for key in self.rows:
            first, theirs = tensors[key], [tensor_of(module, key) for module in each]
            stacked = torch.stack([t.detach() for t in theirs])
            if isinstance(first, nn.Parameter):
                stacked = nn.Parameter(stacked, first.requires_grad)
            put_tensor(self.kind, key, stacked)

    def stacked(self) -> dict[str, Tensor]:
        """Return what members hold, by its name in the module: [members, ...] each."""
        return {key: tensor_of(self.kind, key) for key in self.rows}

    @property
    def trained(self) -> bool:
        """Whether members train something of it."""
        return any(p.requires_grad for p in self.kind.parameters())


class Pass:
    """What one call computes: rows of members, and inputs for all or for each."""

    def __init__(self, call, rows: dict, tensors: list, members: int, each, tree: str):
        self.call, self.rows, self.tensors = call, rows, tensors
        self.members, self.each = members, each
        self.kind = each, tree  # of inputs

    def work(self) -> int:
        """Run the first member, and return its multiply-adds."""
        row = {key: t[0] for key, t in self.rows.items()}
        with Counted() as counted:
            self.call(row, [t[0] if self.each else t for t in self.tensors])
        return counted.multiply_adds

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


class Unbuilt(Tensor):
    """Stands for a weight: few rows are multiplied without it, else it is built."""

    part: Any
    plain: Tensor

    @classmethod
    def of(cls, w: Tensor, part: "Seen") -> "Unbuilt":
        """Return what stands for what a member sees of a weight."""
        unbuilt: Any = w.detach().as_subclass(cls)
        unbuilt.part, unbuilt.plain = part, w
        return unbuilt

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Call with the weight, but for a product of few rows."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and not kwargs and isinstance(args[1], cls):
                x, w, bias = args if len(args) == 3 else (*args, None)
                few = x.numel() <= w.plain.numel()  # less than to build the weight
                if few or w.plain.dtype in (torch.bfloat16, torch.float16):
                    return w.part.kind.product(x, w.plain, bias)

            def built(t):
                return t.part.kind(t.plain) if isinstance(t, cls) else t

            args, kwargs = tree_map(built, (args, kwargs or {}))
            return func(*args, **kwargs)


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


@contextlib.contextmanager
def alone(network: nn.Module) -> Iterator[None]:
    """Keep other threads from a network, which a pass changes meanwhile."""
    lock = _LOCKS.setdefault(network, threading.RLock())
    with lock, _pass_of_members():
        yield


def refusal(error: Exception) -> str:
    """Return why vmap cannot run a network; raise what has another reason."""
    if not any(text in str(error) for text in REFUSALS):
        raise error
    return str(error).splitlines()[0][:100]


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
def standing(places: Mapping[str, list[tuple[Any, str]]], tensors: Mapping):
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


def holder_of(module: nn.Module, name: str) -> tuple[Any, str]:
    """Return the module that holds a tensor, and the tensor's name there."""
    holder, _, last = name.rpartition(".")
    return module.get_submodule(holder), last


def tensor_of(module: nn.Module, name: str) -> Any:
    """Return a tensor by its full name."""
    return getattr(*holder_of(module, name))


def put_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a tensor by its full name."""
    holder, last = holder_of(module, name)
    setattr(holder, last, value)
