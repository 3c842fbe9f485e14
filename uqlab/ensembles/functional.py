"""How members run: one member in plain torch, all members by `torch.func`.

A method says in a small module what *one* member sees in place of a tensor of the
network. What the members hold is stacked; the network is called with what one member
sees standing in its modules, by `vmap` for all members or for one after the other.
"""

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint
from torch.utils._pytree import tree_map

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
CHECKPOINTS = (
    "gradient checkpointing inside the network would compute it again with other "
    "weights than the member's: switch it off in the network, and set chunk_size or "
    "train fewer members at once to save memory"
)

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
            stacked = torch.stack([tensor_of(module, key).detach() for module in each])
            if isinstance(tensors[key], nn.Parameter):
                stacked = nn.Parameter(stacked, tensors[key].requires_grad)
            put_tensor(self.kind, key, stacked)

    def stacked(self) -> dict[str, Tensor]:
        """Return what members hold, by its name in the module: [members, ...] each."""
        return {key: tensor_of(self.kind, key) for key in self.rows}

    def one(self, index: int) -> Any:
        """Return the module of one member; its tensors share memory."""
        memo: dict[int, Any] = {id(t): t for t in self.kind.buffers()}
        for t in self.stacked().values():
            row = t.detach()[index]
            parameter = isinstance(t, nn.Parameter)
            memo[id(t)] = nn.Parameter(row, t.requires_grad) if parameter else row
        return copy.deepcopy(self.kind, memo)

    @property
    def trained(self) -> bool:
        """Whether members train something of it."""
        return any(p.requires_grad for p in self.kind.parameters())


class Unbuilt(Tensor):
    """Stands for a weight: few rows are multiplied without it, else it is built."""

    part: Any
    plain: Tensor

    @classmethod
    def of(cls, w: Tensor, part: Seen) -> "Unbuilt":
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


class _PlainAttention:
    """torch's settings under which attention has batching rules and derivatives.

    They are all threads', while any of them is inside: not as each found them, for one
    that came later would leave them for good.
    """

    def __init__(self):
        self.lock, self.inside = threading.Lock(), 0

    def __enter__(self):
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self.stack = contextlib.ExitStack()
                self.stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
                self.stack.callback(torch.backends.mha.set_fastpath_enabled, before)

    def __exit__(self, *_):
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.stack.close()


PLAIN_ATTENTION = _PlainAttention()


def together(
    call: Callable, rows: dict, tensors: list, each: bool, chunk_size: int | None
) -> Tensor:
    """Return the logits of all members by vmap; `each`: inputs have their axis."""
    dims = 0, 0 if each else None
    run = vmap(call, dims, randomness="different", chunk_size=chunk_size)
    with PLAIN_ATTENTION:
        return run(rows, tensors)


def in_turn(
    call: Callable, rows: dict, tensors: list, each: bool, members: int
) -> Tensor:
    """Return the logits of one member after the other."""
    # By unbind: the gradients of `t[m]` would be as large as t, for each member.
    apart = {key: t.unbind() for key, t in rows.items()}
    logits = []
    for m in range(members):
        row = {key: t[m] for key, t in apart.items()}
        logits.append(call(row, [t[m] if each else t for t in tensors]))
    return torch.stack(logits)


_PASS = threading.local()  # `learns`: whether this thread is in a pass with gradients


def _outside(run):
    """Refuse a way of torch's to checkpoint in a pass of members; around it is fine."""

    def call(*args, **kwargs):
        if getattr(_PASS, "learns", False):
            raise RuntimeError(CHECKPOINTS)
        return run(*args, **kwargs)

    return call


_FUNCTION: Any = checkpoint.CheckpointFunction
_FUNCTION.apply = _outside(_FUNCTION.apply)
checkpoint._checkpoint_without_reentrant_generator = _outside(
    checkpoint._checkpoint_without_reentrant_generator
)


@contextlib.contextmanager
def alone(network: nn.Module) -> Iterator[None]:
    """Keep other threads from a network, which a pass changes meanwhile.

    Gradient checkpointing inside it would compute a part of it again when gradients are
    taken, and by then the network holds no member's weights: it is refused.
    """
    before = getattr(_PASS, "learns", False)
    _PASS.learns = torch.is_grad_enabled()
    try:
        with _LOCKS.setdefault(network, threading.RLock()):
            yield
    finally:
        _PASS.learns = before


def refusal(error: Exception) -> str:
    """Return why vmap cannot run a network; raise what has another reason."""
    if not any(text in str(error) for text in REFUSALS):
        raise error
    return str(error).splitlines()[0][:100]


def unwrapped(network: Any) -> Any:
    """Return the network inside torch.compile's and DataParallel's wrappers."""
    network = getattr(network, "_orig_mod", network)
    parallel = nn.DataParallel | nn.parallel.DistributedDataParallel
    return network.module if isinstance(network, parallel) else network


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
