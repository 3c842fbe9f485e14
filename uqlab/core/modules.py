"""Ways to look at a network and to copy it that leave the network as it was."""

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from uqlab.core.checks import representable

Inputs = (
    Tensor | Mapping[str, Tensor]
)  # one tensor, or several by name, as tokenizers make them


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode inside the block; afterwards every module has its former mode.

    An error in one of its layers gets a note that names the layer; its type stays.
    """
    modes = {module: module.training for module in model.modules()}
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} must hold its numbers, got weights on meta; load them first"
        )
    try:
        model.eval()
        yield
    except Exception as error:
        if where := _where(model, error):
            error.add_note(
                f"in layer {where}: check the inputs' shape, type and device"
            )
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode


def _where(model: nn.Module, error: Exception) -> str:
    """The innermost layer of the model in which an error was raised; empty if outside of it."""
    names = {layer: name for name, layer in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames]
    layers = [m for m in owners if isinstance(m, nn.Module) and m in names]
    return f"{names[layers[-1]]!r}, {type(layers[-1]).__name__}" if layers else ""


@contextlib.contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that end with the block: `with hooked(layer.register_forward_hook(note) for layer in layers):`."""
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def sharing_copy(model: Any, replaced: Mapping[nn.Module, Any] | None = None) -> Any:
    """A copy that shares all parameters and buffers, in which `replaced[part]` stands in the place of each `part`."""
    memo: dict[int, Any] = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
    }
    memo |= {id(old): new for old, new in (replaced or {}).items()}
    return copy.deepcopy(model, memo)  # deepcopy takes what `memo` already holds


def frozen(model: Any) -> Any:
    """A copy with buffers of its own, whose frozen parameters share the model's memory.

    Nothing that happens to the copy changes the model, not even training in training
    mode.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def logits_of(output: Any) -> Any:
    """The logits of a network's output: models of transformers return an object that holds them."""
    return getattr(output, "logits", output)


def map_tensors(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Any:
    """`inputs` with every tensor changed."""
    return (
        change(inputs)
        if isinstance(inputs, Tensor)
        else {name: change(t) for name, t in inputs.items()}
    )


def first_tensor(inputs: Inputs) -> Tensor:
    """The tensor, or the first of several."""
    return inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))


def call(model: nn.Module, inputs: Inputs) -> Any:
    """What a network returns for one tensor or for tensors by name."""
    return model(inputs) if isinstance(inputs, Tensor) else model(**inputs)


def like_parameters(model: nn.Module, inputs: Inputs) -> Any:
    """`inputs` on the model's device; floating-point inputs also get its precision, in which they must be finite."""
    p = next(model.parameters(), torch.empty(0))

    def like(t: Tensor) -> Tensor:
        made = t.to(p.device, p.dtype if t.is_floating_point() else None)
        if made.dtype != t.dtype:
            representable("inputs", made)
        return made

    return map_tensors(like, inputs)


def trained_like(made: Any, part: nn.Module) -> Any:
    """`made` in the mode of `part`; each parameter is trained if the parameter of that name in `part` is."""
    wanted = {name: p.requires_grad for name, p in part.named_parameters()}
    for name, p in made.named_parameters():
        p.requires_grad_(wanted.get(name, False))
    return made.train(part.training)
