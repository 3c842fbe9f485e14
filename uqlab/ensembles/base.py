"""How members run: one member in plain torch, all members by `torch.func`.

A method says in a small module what *one* member sees in place of a tensor of the
network. What the members hold is stacked; the network is called with what one member
sees standing in its modules, by `vmap` for all members or for one after the other.

One training step of `lora(network, 8)`, as an example. `lora` makes eight `LowRank(A_m,
B_m)` for every target weight W, and `_Seen` stacks them as parameters A [8, rank, in]
and B [8, out, rank]; W is frozen and shares its memory with the user's network. The
ensemble is called by `training.fit`; `_run` takes row m of A and B, puts W + B_m A_m
(for few rows: the product with x) into the modules, and calls the network, for all m in
one pass of `vmap` or for one after the other. The loss is the sum of the members' mean
losses, so A_m and B_m get the gradient of member m's loss alone. What members share, if
it is trained, goes through `MeanGradient` and gets the mean.
"""

import contextlib
import copy
import functools
import inspect
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from uqlab.core.checks import at_least, one_of
from uqlab.core.files import StrPath
from uqlab.core.modules import (
    Counted,
    Inputs,
    aliases,
    call,
    called_with,
    evaluating,
    frozen,
    hooked,
    layers_of,
    logits_of,
    map_tensors,
    rows_of,
    trainable,
)
from uqlab.models import check_classifier

Members = int | range
Method = TypeVar("Method")
# The factory that `from_pretrained` calls, by the method's name in a folder.
LOADERS: dict[str, Any] = {}

# Up to here, multiply-adds of one member, `vmap` is the faster way on a CPU: the calls
# of small operations cost more than what they compute. benchmarks/ways.py has the
# measurements: 0.1 to 1.5 of the loop's time below, 0.9 to 2 above.
SMALL_WORK = 1.5e9
SLOW_RULE = "There is a performance drop"
# How torch says that vmap cannot run a network. Other errors are never caught.
REFUSALS = (
    SLOW_RULE, "vmap: ", "Batching rule not implemented",
    "accessing the data under vmap", "data-dependent control flow", "functorch",
    "inplace arithmetic(self, *extra_args)", "doesn't match the broadcast shape",
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
_PASS = threading.local()  # `learns`: whether this thread is in a pass with gradients


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


class _Seen(nn.Module):
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

    def __init__(self, name: str, each: Sequence[nn.Module]):
        super().__init__()
        self.name = name
        # Its parameters become those of all members, stacked: call it through `one`.
        self.kind: Any = each[0]
        for key, value in vars(self.kind).items():
            if isinstance(value, Tensor):
                raise ValueError(
                    f"{type(self.kind).__name__} holds the tensor {key!r} as a plain "
                    "attribute, which all members would share: make it a Parameter or "
                    "a buffer"
                )
        held = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in each]
        self.rows = [k for k in held[0] if k not in getattr(self.kind, "shared", ())]
        for key in self.rows:
            stacked = torch.stack([tensors[key].detach() for tensors in held])
            if isinstance(held[0][key], nn.Parameter):
                stacked = nn.Parameter(stacked, held[0][key].requires_grad)
            _put_tensor(self.kind, key, stacked)

    def stacked(self) -> dict[str, Tensor]:
        """Return what members hold, by its name in the module: [members, ...] each."""
        return {key: _tensor_of(self.kind, key) for key in self.rows}

    @property
    def trained(self) -> bool:
        """Whether members train something of it."""
        return bool(trainable(self.kind))


class _Unbuilt(Tensor):
    """Stands for a weight: few rows are multiplied without it, else it is built.

    A tensor, because the network's code gives its weight to torch's functions; they
    ask the tensor first (`__torch_function__`), and a linear layer gets `product`.
    """

    kind: Any
    plain: Tensor

    @classmethod
    def of(cls, w, kind):
        """Return what stands for what a member sees of a weight."""
        unbuilt: Any = w.detach().as_subclass(cls)
        unbuilt.kind, unbuilt.plain = kind, w
        return unbuilt

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Call with the weight, but for a product of few rows."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and not kwargs and isinstance(args[1], cls):
                x, w, bias = args if len(args) == 3 else (*args, None)
                few = x.numel() <= w.plain.numel()  # less than to build the weight
                if few or w.plain.dtype in (torch.bfloat16, torch.float16):
                    return w.kind.product(x, w.plain, bias)

            def built(t):
                return t.kind(t.plain) if isinstance(t, cls) else t

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


def _refused(run):
    """Return one of torch's checkpoints that raises in a pass of members."""

    def call(*args, **named):
        if getattr(_PASS, "learns", False):
            raise RuntimeError(CHECKPOINTS)
        return run(*args, **named)

    return call


_PLAIN = checkpoint._checkpoint_without_reentrant_generator
checkpoint._checkpoint_without_reentrant_generator = _refused(_PLAIN)
_REENTRANT = _refused(checkpoint.CheckpointFunction.apply)
checkpoint.CheckpointFunction.apply = staticmethod(_REENTRANT)  # type: ignore


@contextlib.contextmanager
def _alone(network):
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


def _holder_of(module, name):
    """Return the module that holds a tensor."""
    return module.get_submodule(name.rpartition(".")[0])


def _tensor_of(module, name):
    """Return a tensor by its full name."""
    return getattr(_holder_of(module, name), name.rpartition(".")[2])


def _put_tensor(module, name, value):
    """Set a tensor by its full name."""
    setattr(_holder_of(module, name), name.rpartition(".")[2], value)


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
        tensors are the members' common ones; buffers among them that the network
        changes in training follow one member after the other.

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
    shares_most = False  # whether members differ at the end alone
    mode = "auto"
    chunk_size: int | None = None
    refused = ""  # why vmap cannot run the network
    ordered: Sequence[str] = []  # layers, the first of which was taken to be so
    misfit = ""  # why the network may not take its inputs
    _swaps = True  # whether a pass changes the network meanwhile

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
        if layers_of(network, nn.RNNBase, nn.RNNCellBase):
            self.refused = "recurrent layers have no batching rule"
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
        """Take what members see."""
        self.parts: Any = nn.ModuleList()
        names = aliases(self)
        for name, each in sees.items():
            if f"network.{name}" not in names:
                raise ValueError(
                    f"sees names {name!r}, which is no parameter or buffer of the "
                    "network: a weight that layers share goes by its first name, and "
                    "ensembles.plain makes parameters of weights that are computed; "
                    "to part them: layer.weight = nn.Parameter(layer.weight.clone())"
                )
            if len(each) != self.members:
                raise ValueError(
                    "sees maps names of the network's parameters or buffers to one "
                    f"module a member ({self.members}); got {len(each)} for {name!r}"
                )
            self.parts.append(_Seen(name, each))
        # (module, key) under each name that a tensor has.
        self._places = {
            name: [(_holder_of(self, n), n.rpartition(".")[2]) for n in each]
            for name, each in aliases(self).items()
        }
        for name in self.replaced:
            _tensor_of(self.network, name).requires_grad_(False)

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.member_ids)

    @property
    def seen(self) -> dict[str, Any]:
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
        inside = torch.is_inference_mode_enabled()
        if mode and not inside and any(p.is_inference() for p in self.parameters()):
            raise RuntimeError(
                "an ensemble made under torch.inference_mode cannot be trained: make "
                "it outside"
            )
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
            self._check_call(args, named, each)
        own = _alone(self.network) if self._swaps else contextlib.nullcontext()
        with own:
            return self._run(args, named, each, members)

    def _run(self, args, named, each, members):
        """Return logits of some members; `each`: inputs have their axis in front."""
        given = self._given(args, named, members)
        while self._way(*given, each) == "vmap":
            try:
                return self._together(*given, each)
            except torch.OutOfMemoryError:
                # In training statistics would move twice: `fit` halves there.
                if self.training or not self.halve():
                    raise
        one, rows, tensors = given
        # By unbind: the gradients of `t[m]` would be as large as t, for each member.
        apart = {key: t.unbind() for key, t in rows.items()}
        logits = []
        for m in range(len(self.member_ids[members])):
            row = {key: t[m] for key, t in apart.items()}
            logits.append(one(row, [t[m] if each else t for t in tensors]))
        return torch.stack(logits)

    def _given(self, args, named, members):
        """Return a pass of one member, and what is given to those of all."""
        leaves, tree = tree_flatten((args, named))
        shared = self._shared()

        def call(row, some):
            # A network that changes its input in place must not change the next one's.
            queue = iter([t.clone() for t in some])
            given = [next(queue) if isinstance(t, Tensor) else t for t in leaves]
            return self._one(shared | row, *tree_unflatten(given, tree))

        one = functools.partial(self.one_pass, call)
        return one, self.rows(members), [t for t in leaves if isinstance(t, Tensor)]

    def _one(self, held, args, named):
        """Call the network with what one member sees, given what it holds."""
        changing = self.network.named_buffers() if self.training else ()
        buffers = {f"network.{name}": t for name, t in changing}
        with self._standing(buffers | held):
            state = {}
            for part in self.parts:
                layer, key = self._places[f"network.{part.name}"][0]
                w, linear = getattr(layer, key), type(layer) is nn.Linear
                product = linear and hasattr(part.kind, "product")
                seen = _Unbuilt.of(w, part.kind) if product else part.kind(w)
                state[f"network.{part.name}"] = seen
            with self._standing(state):
                return logits_of(self.network(*args, **named))

    @contextlib.contextmanager
    def _standing(self, tensors):
        """Let tensors stand in modules, each in all its places, inside the block."""
        before = []
        try:
            for name, t in tensors.items():
                for module, key in self._places[name]:
                    table = module._parameters
                    table = table if key in table else module._buffers
                    before.append((table, key, table[key], t))
                    table[key] = t
            yield
        finally:
            found = [(table[key], t) for table, key, _, t in before]
            for table, key, other, _ in before:
                table[key] = other
        for now, t in found:  # some networks set their statistics anew, not in place
            if now is not t and getattr(now, "shape", None) == t.shape:
                t.copy_(now.detach())

    def one_pass(self, call, row, tensors):
        """Return the logits of one member: `call(row, tensors)`, its network's."""
        return call(row, tensors)

    def _together(self, one, rows, tensors, each):
        """Return the logits of all members by vmap."""
        dims, size = (0, 0 if each else None), self.chunk_size
        with PLAIN_ATTENTION:
            return vmap(one, dims, randomness="different", chunk_size=size)(
                rows, tensors
            )

    def rows(self, members: slice = slice(None)) -> dict[str, Tensor]:
        """Return what some members hold, [members, ...] each."""
        learns = torch.is_grad_enabled()
        rows = {}
        for number, part in enumerate(self.parts):
            for key, t in part.stacked().items():
                # Without gradients torch's views of parameters claim to have them.
                rows[f"parts.{number}.kind.{key}"] = (t if learns else t.detach())[
                    members
                ]
        return rows

    def _way(self, one, rows, tensors, each):
        """Return "vmap" or "loop"; what vmap refuses is found before it counts."""
        one_of("mode", self.mode, ("auto", "vmap", "loop"))
        if self.mode != "auto":
            return self.mode
        kind = self.training, each, len(tensors)
        if self.refused or not self._is_for_vmap(kind, one, rows, tensors, each):
            return "loop"
        if kind not in self._tried:
            self._try(one, rows, tensors, each)
            self._tried.add(kind)
        return "loop" if self.refused else "vmap"

    def _is_for_vmap(self, kind, one, rows, tensors, each):
        """Return whether vmap is the faster way: the rule of "auto"."""
        if self.members == 1:
            return False
        if tensors[0].device.type != "cpu":
            return True
        changed = [_holder_of(self.network, part.name) for part in self.parts]
        if any(isinstance(layer, nn.modules.conv._ConvNd) for layer in changed):
            return False
        if self.shares_most and not each:
            return True
        some = [t[0] for t in tensors] if each else tensors
        if kind not in self._work:
            with torch.no_grad(), self._unmoved(), Counted() as counted:
                one({key: t[0] for key, t in rows.items()}, some)
            self._work[kind] = counted.multiply_adds / max(some[0].numel(), 1)
        return self._work[kind] * some[0].numel() <= SMALL_WORK

    def _try(self, *given):
        """Note why vmap cannot run the network, if it cannot."""
        with torch.no_grad(), self._unmoved(), warnings.catch_warnings():
            # vmap says where it would loop itself: slower than our loop.
            warnings.filterwarnings("error", SLOW_RULE)
            try:
                self._together(*given)
            except torch.OutOfMemoryError:
                return
            except (RuntimeError, UserWarning) as error:
                if not any(text in str(error) for text in REFUSALS):
                    raise
                self.refused = str(error).splitlines()[0][:100]

    @contextlib.contextmanager
    def _unmoved(self):
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
        trained = {f"network.{name}": p for name, p in named if p.requires_grad}
        return {n: MeanGradient.apply(p, self.members) for n, p in trained.items()}

    # --- members ---------------------------------------------------------------------

    def tensor(self, name: str, index: int) -> Tensor:
        """Return what one member sees of a tensor of the network."""
        w = _tensor_of(self.network, name)
        if name not in self.seen:
            return w
        part = self.seen[name]
        row = {key: t[index] for key, t in part.stacked().items()}
        return functional_call(part.kind, row, (w,))

    def start(self, name: str) -> Tensor | None:
        """Return a tensor before training; None if it was trained, or is not known."""
        w = _tensor_of(self.network, name)
        return None if name in self.replaced or w.requires_grad else w.detach()

    def update(self, name: str, index: int) -> Tensor:
        """Return what a member adds to a tensor of the network: B A of LoRA."""
        return (self.tensor(name, index) - _tensor_of(self.network, name)).detach()

    @torch.no_grad()
    def member(self, index: int) -> nn.Module:
        """Return one member as a plain network; frozen tensors share memory."""
        shared = [p for p in self.network.parameters() if not p.requires_grad]
        memo = {}
        for p in shared:  # no comprehension, which torch.compile cannot trace here
            memo[id(p)] = nn.Parameter(p.detach(), False)
        network, names = copy.deepcopy(self.network, memo), aliases(self.network)
        for name, part in self.seen.items():
            value = self.tensor(name, index).detach().clone()
            if isinstance(_tensor_of(network, name), nn.Parameter):
                value = nn.Parameter(value, part.trained)
            for alias in names[name]:
                _put_tensor(network, alias, value)
        return network

    def shard(self, rows: Any) -> Any:
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
        way = self.mode
        if way == "auto":
            args, named = ((), {**x}) if isinstance(x, Mapping) else ((x,), {})
            with _alone(self.network):
                way = self._way(*self._given(args, named, slice(None)), each)
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

    def _check_call(self, args, named, each):
        """Raise unless inputs are tensors.

        ValueError at the first call if another layer is the classifier, or another one
        the first, than was taken.
        """
        tensors = [t for t in tree_leaves((args, named)) if isinstance(t, Tensor)]
        if not tensors:
            kinds = [type(t).__name__ for t in (*args, *named.values())]
            raise TypeError(
                f"an ensemble takes tensors [batch, ...], got {kinds}; data sets, "
                "loaders and arrays go to training.predict(ensemble, data)"
            )
        empty = any(t.numel() == 0 for t in tensors)
        if self._checked or empty or not (self.took_last_linear or self.ordered):
            return
        network = frozen(self.member(0))
        given: Any = named
        if args:
            single = not named and len(args) == 1 and isinstance(args[0], Tensor)
            given = args[0] if single else _by_name(network, args, named)
        some = rows_of(rows_of(given, 0) if each else given, slice(2))
        # A network that changes its input in place must not change the caller's.
        some = map_tensors(torch.clone, some)
        try:
            if self.took_last_linear:
                check_classifier(network, some)
            if self.ordered:
                self._check_first(network, some)
        except RuntimeError as error:
            if not self.misfit:
                raise
            raise ValueError(f"{self.misfit}: {error}") from error
        self._checked = True

    @torch.no_grad()
    def _check_first(self, network, inputs):
        """Raise ValueError if the first layer in order does not see what is seen first.

        Layers beside each other, such as projections of attention, see the same.
        """
        seen: dict[str, tuple] = {}  # in the order of the calls
        notes = []
        for name in self.ordered:

            def note(_, args, name=name):
                seen.setdefault(name, args)

            layer = network.get_submodule(name)
            notes.append(layer.register_forward_pre_hook(note))
        with evaluating(network), hooked(notes):
            call(network, inputs)
        taken, found = self.ordered[0], next(iter(seen), "")
        if found == taken or taken not in seen:
            return
        if not torch.equal(*seen[taken], *seen[found]):
            raise ValueError(
                f"{taken!r} was taken for the layer of {type(network).__name__} that "
                f"sees the inputs, but {found!r} is called before it: define layers in "
                "the order of their calls, or say where members differ, by layers of "
                "dropout or a target"
            )


class SeparateEnsemble(Ensemble):
    """Members that run one after the other: networks without a member axis."""

    mode = "loop"
    _swaps = False
    network: nn.ModuleList

    def __init__(self, models: Sequence[nn.Module], members: Members):
        super().__init__(nn.ModuleList(models), members)
        self.source = getattr(self.network[0], "source", {})
        self.borrowed = set()
        self.recipe = {"method": "from_members"}

    def _run(self, args, named, each, members):
        counts = self._networks()
        logits = []
        for i, model in enumerate(list(self.network)[members]):

            def given(t, i=i):
                return (t[i] if each else t).clone()

            some, more = tree_map_only(Tensor, given, (args, named))
            means = {
                name: MeanGradient.apply(p, counts[p])
                for name, p in model.named_parameters()
                if counts[p] > 1
            }
            if means:
                output = called_with(model, means, some, more)
            else:
                output = model(*some, **more)
            logits.append(logits_of(output))
        return torch.stack(logits)

    def member(self, index):
        """Return one of the networks, not a copy."""
        return self.network[index]

    def shard(self, rows):
        """Return the ensemble of some members; training it trains these."""
        shard = type(self)(list(self.network)[rows], self.member_ids[rows])
        return shard.with_recipe(self.recipe)

    def halve(self):
        """Return that no fewer than one can be taken."""
        return False

    def can_shard(self):
        """Return whether members share no tensor that changes."""
        buffers = [b for model in self.network for b in model.buffers()]
        one_place = len(buffers) == len(list(self.buffers()))
        return one_place and not self.shared_parameters()

    def shared_parameters(self):
        """Return the trained parameters that stand in several networks."""
        return [p for p, n in self._networks().items() if n > 1 and p.requires_grad]

    @staticmethod
    def plain_tensors(model):
        """Return the tensors that a network holds as plain attributes."""
        registered = "_parameters", "_buffers", "_modules", "_flat_weights"
        found = []
        for module in model.modules():
            for key, value in vars(module).items():
                found += [] if key in registered else tree_leaves(value)
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def _networks(self):
        """Return in how many networks a parameter stands."""
        return Counter(p for model in self.network for p in model.parameters())


class OneNetwork(Ensemble):
    """One network that answers for all members, which share all that it trains."""

    mode = "vmap"
    _swaps = False

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


def _by_name(network, args, named):
    """Return inputs all by name; the network takes them so from now on."""
    run, places = network.forward, [str(i) for i in range(len(args))]

    def forward(**by):
        return run(*[by.pop(place) for place in places], **by)

    network.forward = forward
    return dict(zip(places, args, strict=True)) | named


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
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1


def member_generators(
    seed: int, ids: Iterable[int], stream: str, *more: int
) -> list[torch.Generator]:
    """Return a generator on the CPU for each member, seeded by `member_seed`."""
    seeds = [member_seed(seed, m, stream, *more) for m in ids]
    return [torch.Generator().manual_seed(s) for s in seeds]


def recorded(make: Method) -> Method:
    """Let ensembles note how `make(network, ...)` was called.

    `from_pretrained` calls it again: decorate a method of your own to load its
    ensembles by `from_pretrained(folder, network)`.
    """
    method: Any = make
    signature = inspect.signature(method)

    @functools.wraps(method)
    def made(*args, **named):
        ensemble = method(*args, **named)
        call = signature.bind(*args, **named)
        call.apply_defaults()
        (_, network), *settings = call.arguments.items()
        ensemble.source = getattr(network, "source", {})
        recipe = {"method": method.__name__, **dict(settings)}
        recipe.pop("members", None)
        return ensemble.with_recipe(recipe)

    LOADERS[method.__name__] = made
    return made  # type: ignore
