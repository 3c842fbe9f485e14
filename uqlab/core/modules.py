"""Networks looked at, copied and saved without a change; devices and precision."""

import argparse
import contextlib
import copy
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from torch.utils.hooks import RemovableHandle

from uqlab.core.checks import Inputs, at_least, count, one_of, representable
from uqlab.core.files import StrPath, Values, existing, fingerprint, writing

# Multiply-adds of the outputs in a training step: below, one thread beats shards in
# several, for perceptrons, convolutional networks and transformers alike.
ONE_THREAD = 1e8
# Elements of a temporary: 2 MiB of float32 stay in a core's cache; a GPU pays for
# launches.
TEMPORARY = {"cpu": 2**19, "cuda": 2**25}


# Networks -----------------------------------------------------------------------------


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep the model in evaluation mode inside the block, then restore every mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the block.

    `with hooked(layer.register_forward_hook(note) for layer in layers): ...`
    """
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def frozen(model: Any) -> Any:
    """Return a copy whose frozen parameters share the model's memory.

    Its buffers are its own.
    Nothing that happens to the copy changes the model, not even training in training
    mode.
    """
    memo = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def unwrapped(network: Any) -> Any:
    """Return the network inside torch.compile's and DataParallel's wrappers."""
    network = getattr(network, "_orig_mod", network)
    parallel = nn.DataParallel | nn.parallel.DistributedDataParallel
    return network.module if isinstance(network, parallel) else network


def trainable(network: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained, in their order in the network."""
    return [p for p in network.parameters() if p.requires_grad]


def layers_of(network: nn.Module, *kinds: type[nn.Module]) -> list[Any]:
    """Return the modules of some kinds, in their order in the network."""
    return [module for module in network.modules() if isinstance(module, kinds)]


def logits_of(output: Any) -> Any:
    """Return the logits of a network's output.

    They are its "logits" or `.logits`, torchvision's "out", or the first of several
    outputs that has rows, which a loss before it has not. Raises TypeError where names
    do not say which of several tensors they are.
    """
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", output)  # of transformers, torchvision
    names = [*found] if isinstance(found, Mapping) else []
    if names:
        found = found.get("logits", found.get("out", [*found.values()]))
    several = found if isinstance(found, tuple | list) else [found]
    tensors = [t for t in several if isinstance(t, Tensor)]
    rows = [t for t in tensors if t.ndim > 1] or tensors
    if not rows or (names and len(rows) > 1):
        raise TypeError(
            'a network must return logits, or have them as "logits" or as the first of '
            f"its outputs with rows, got {type(output).__name__} of {', '.join(names)}"
        )
    return rows[0]


def map_tensors(change: Callable[[Tensor], Any], inputs: Inputs) -> Any:
    """Return `inputs` with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    return {k: change(t) if isinstance(t, Tensor) else t for k, t in inputs.items()}


def rows_of(inputs: Inputs, rows: slice | int) -> Any:
    """Return some rows of `inputs`, along the first axis of every tensor."""
    return map_tensors(lambda t: t[rows], inputs)


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Return what a network makes of one tensor or of tensors by name.

    It is given copies: one that changes its input in place must not change the data.
    """
    given = map_tensors(torch.clone, inputs)
    return model(given) if isinstance(given, Tensor) else model(**given)


class Counted(TorchDispatchMode):
    """Counts the multiply-adds of matrix products, convolutions and attention.

    torch's own counter puts hooks on the modules of all threads.
    """

    def __init__(self):
        super().__init__()
        self.multiply_adds = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call, and count."""
        output = func(*args, **kwargs or {})
        count = _FLOPS.get(func._overloadpacket)
        if count:
            self.multiply_adds += count(*args, **kwargs or {}, out_val=output) // 2
        return output


def _attention_flops(q, k, v, *_, **__):
    return sdpa_flop_count(q.shape, k.shape, v.shape)


# torch does not count its attention on a CPU.
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLOPS: Any = flop_registry | {_ATTENTION: _attention_flops}


def like_parameters(model: nn.Module, inputs: Inputs, rows: slice = slice(None)) -> Any:
    """Return `inputs`, or some rows, on the model's device and in its precision.

    Raises ValueError for floating inputs that are too large for it.
    """
    real = (p for p in model.parameters() if p.is_floating_point())
    p = next(real, torch.empty(0))

    def like(t):
        given = t[rows]
        converted = given.to(p.device, p.dtype if t.is_floating_point() else None)
        if converted.dtype != t.dtype:
            representable("inputs", converted)
        return converted

    return map_tensors(like, inputs)


def batches(
    model: nn.Module, inputs: Inputs, batch_size: int
) -> Iterator[tuple[slice, Any]]:
    """Return the inputs in batches: their rows, and what the network is given.

    Parameters
    ----------
    model : nn.Module
        The network, whose device and precision they get.
    inputs
        A tensor [samples, ...], or tensors by name.
    batch_size : int
        Samples in one batch.
    """
    at_least("batch_size", batch_size)
    for low in range(0, count(inputs), batch_size):
        rows = slice(low, low + batch_size)
        yield rows, like_parameters(model, inputs, rows)


def aliases(network: nn.Module) -> dict[str, list[str]]:
    """Return the names of every tensor of a network, by the first of them.

    One for each module that holds it: a module with two names is swapped once.
    """
    names: dict[int, list[str]] = {}
    for name, module in network.named_modules():
        for table in (module.named_parameters, module.named_buffers):
            for key, tensor in table(name, recurse=False, remove_duplicate=False):
                names.setdefault(id(tensor), []).append(key)
    return {each[0]: each for each in names.values()}


def called_with(
    network: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any = None
) -> Any:
    """Call a network with other tensors, under the first name of each.

    By default torch would leave them in a module that has two names. `args` are a tuple
    of what comes first, or inputs as `call` takes them.
    """
    every = aliases(network)
    state = {name: t for n, t in tensors.items() for name in every.get(n, [n])}
    if isinstance(args, Mapping):
        args, kwargs = (), args
    args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
    return functional_call(network, state, args, kwargs, tie_weights=False)


@torch.no_grad()
def classifier_of(network: nn.Module, inputs: Inputs) -> str:
    """Find the linear layer whose output is the logits, by one pass of two inputs.

    A log_softmax behind it changes nothing.

    Returns
    -------
    str
        The layer's name; empty if the network itself is a linear layer.

    Raises
    ------
    ValueError
        If the logits are no layer's output, as with a mean of several heads.
    """
    modules = network.named_modules()
    linear = {name: part for name, part in modules if isinstance(part, nn.Linear)}
    with evaluating(network):
        two = like_parameters(network, inputs, slice(2))
        found = given_for_logits(network, linear, two)
        if len(found) != 1:
            shape = list(logits_of(call(network, two)).shape)
            raise ValueError(
                f"{type(network).__name__} calls no linear layer whose output is the "
                f"logits [samples, classes], here {shape} (its last: "
                f"{', '.join([*linear][-3:])}): return those of one, not squeezed, no "
                'mean of several, or, where it can be given, name one: classifier="..."'
            )
    return next(iter(found))


def given_for_logits(
    network: nn.Module, layers: Mapping[str, nn.Module], inputs: Inputs
) -> dict[str, Tensor]:
    """Return what layers are given, [samples, width], whose outputs are the logits.

    For this pass each of the layers returns random numbers instead: whichever of its
    rows the network returns, perhaps those of each text's last token, are the logits.
    Where numbers are few or coarse there are further passes, until chance tells no two
    rows apart from their places.
    """
    z, given, drawn = _answered(network, layers, inputs)
    found = {}
    for name, layer in layers.items():
        noise = drawn.get(layer, [])
        if len(noise) == len(z) and _passes(noise[0], z[0]):
            near = _near(z, [part.flatten(0, -2) for part in noise])
            if (near.sum(1) == 1).all():
                places = near.int().argmax(1).to(given[layer].device)
                found[name] = given[layer].flatten(0, -2)[places]
    return found


def _answered(network, layers, inputs):
    """Return the logits of passes, what layers were given, and what they returned."""
    generator = torch.Generator().manual_seed(0)
    z, given, drawn = [], {}, {}

    def answer(layer, args, y):
        noise = torch.randn(y.shape, generator=generator).to(y)
        given[layer] = args[0]
        # A layer's last call in a pass counts.
        drawn[layer] = [*drawn.get(layer, [])[: len(z)], noise]
        return noise

    with hooked(part.register_forward_hook(answer) for part in layers.values()):
        wanted = 1
        while len(z) < wanted:
            z.append(logits_of(call(network, inputs)))
            wanted = max([1, *(_passes(noise[0], z[0]) for noise in drawn.values())])
    return z, given, drawn


def _passes(noise: Tensor, logits: Tensor) -> int:
    """Return how many passes tell all rows of noise apart; none if it is no logits."""
    if logits.ndim != 2 or logits.shape[1] != noise.shape[-1]:
        return 0
    pairs = noise.numel() / noise.shape[-1] * len(logits)
    bits = math.log2(max(pairs, 1)) + 20  # for one in a million to be alike
    each = -math.log2(8 * torch.finfo(noise.dtype).eps)  # of two numbers, see _near
    return math.ceil(bits / each / max(1, noise.shape[-1] - 1))


def _near(logits: list[Tensor], noise: list[Tensor]) -> Tensor:
    """Return which rows of noise the logits are, in all passes, [samples, rows].

    What all classes have in common does not count.
    """
    z, others = (torch.stack([*parts]).cpu().double() for parts in (logits, noise))
    if z.shape[-1] > 1:
        z, others = z - z[..., :1], others - others[..., :1]
    z, others = (part.movedim(0, 1).flatten(1) for part in (z, others))
    gaps = torch.cdist(z, others, p=math.inf)
    # What a log_softmax rounds, in the network's precision.
    return gaps <= 4 * torch.finfo(noise[0].dtype).eps * z.abs().max()


# Devices ------------------------------------------------------------------------------


def elements_of_temporary(device: torch.device) -> int:
    """Return the number of elements that a temporary should have on a device."""
    return TEMPORARY.get(device.type, TEMPORARY["cuda"])


def device(name: str = "auto") -> torch.device:
    """Return the torch device of that name; "auto" is the GPU if there is one.

    "mps", the GPU of a Mac, has no float64 and is taken by its name alone. Raises
    ValueError for a device that cannot compute here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (AssertionError, RuntimeError) as error:  # the first: no CUDA in this build
        raise ValueError(
            'device must be "auto", "cpu", on a Mac "mps", or with a GPU and a CUDA '
            f'build of torch "cuda" or one like "cuda:1", got {name!r}'
        ) from error


@contextlib.contextmanager
def arithmetic(precision: str, where: torch.device) -> Iterator[None]:
    """Compute products inside the block in "float32", "bfloat16" or "float16".

    Weights, sums and the optimiser stay float32.
    On a GPU it is autocast; a CPU has no float16. A CPU with matrix units for bfloat16
    (AMX) rounds the factors of a product to it. On other CPUs it was measured to be up
    to twice as slow: they use float32, with a warning.
    """
    one_of("precision", precision, ("float32", "bfloat16", "float16"))
    if precision == "float32":
        yield
    elif where.type != "cpu":
        with torch.autocast(where.type, getattr(torch, precision)):
            yield
    elif precision == "float16":
        raise ValueError(
            'precision="float16" is for GPUs; on a CPU take "bfloat16" or "float32"'
        )
    elif torch.cpu.get_capabilities().get("amx_bf16", False):
        backend: Any = torch.backends.mkldnn
        before = backend.matmul.fp32_precision, backend.conv.fp32_precision
        backend.matmul.fp32_precision = backend.conv.fp32_precision = "bf16"
        try:
            yield
        finally:
            backend.matmul.fp32_precision, backend.conv.fp32_precision = before
    else:
        warnings.warn(
            "this CPU has no bfloat16 matrix units: products stay float32 (faster)",
            stacklevel=5,
        )
        yield


# Files of tensors ---------------------------------------------------------------------

# What checkpoints hold besides tensors, and torch may read: it runs no code.
_SCALAR, _ARRAY = np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]
_PLAIN = [argparse.Namespace, np.ndarray, np.dtype, _SCALAR, _ARRAY]
_PLAIN += [(_SCALAR, "numpy.core.multiarray.scalar")]
_PLAIN += [(_ARRAY, "numpy.core.multiarray._reconstruct")]
_PLAIN += [type(np.dtype(kind)) for kind in "fdelqB?"]


def load_plain(path: StrPath) -> Any:
    """Return what a file of torch.save holds: tensors, numbers, arrays, on the CPU."""
    with torch.serialization.safe_globals(_PLAIN):
        return torch.load(path, "cpu", weights_only=True)


def save_tensors(
    path: StrPath, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors and a header to a .safetensors file, whole or not at all.

    Parameters
    ----------
    path
        The file; missing folders are made.
    tensors
        By name. They may share memory; each is written in full.
    header
        What JSON can hold; "sha256" is taken for the checksum.

    Raises
    ------
    OSError
        Where it cannot be written; what `path` held before stays.
    TypeError
        If a value is not a tensor.
    """
    copies = {
        name: torch.as_tensor(t).detach().to("cpu", copy=True).contiguous()
        for name, t in tensors.items()
    }
    text = json.dumps({**header, "sha256": _checksum(copies, header)})
    with writing(path) as temporary:
        try:
            save_file(copies, temporary, {"uqlab": text})
        except SafetensorError as error:  # a full disk
            raise OSError(f"{path} cannot be written: {error}; make room") from error


def load_tensors(path: StrPath) -> tuple[dict[str, Tensor], Values]:
    """Read the tensors and the header that `save_tensors` wrote.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        For a file that `save_tensors` did not write, or that was changed since.
    """
    path = existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["uqlab"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if header.pop("sha256") != _checksum(tensors, header):
            raise ValueError("its checksum is wrong")
    except (SafetensorError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged or not written by uqlab ({error}); copy it anew"
        ) from error
    return tensors, header


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """Return a fingerprint of what a file holds."""
    ordered = dict(sorted(tensors.items()))
    return fingerprint(ordered, json.dumps(header, sort_keys=True))
