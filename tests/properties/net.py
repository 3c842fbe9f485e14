"""The net: one call with bad arguments, and what must hold after it, whatever came of it."""

import contextlib
import gc
import inspect
import math
import os
import random
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from beartype.door import is_bearable
from huggingface_hub import constants as hub
from recipes import CHANGED, DRAWS, valid
from torch import nn

import uqlab
from uqlab.core.files import fingerprint

PACKAGE = str(Path(uqlab.__file__).parent)
BUGS = (AttributeError, KeyError, IndexError, AssertionError, UnboundLocalError)
MAY_BE_NAN = (  # of weights that are NaN (`fit` says so), of features that do not vary, of what is only handed on, of rows without an interval
    "metrics.by_quantile", "training.cross_entropy", "training.crop_flip", "representations.cka",
    "representations.minibatch_cka", "representations.cka_matrix", "scores.members",
    "scoreboard.", "gradients.reduce_norms", "evaluation.evaluate",
)  # fmt: skip

# What may stand in the place of any argument.
BAD: list[Any] = [
    None, True, math.nan, math.inf, -1, 0, 1, 1.5, 1e30, 2**70, -(2**70), "nope", "(", "", "name" * 200, b"bytes", [],
    {}, (), [[1], [2, 3]], {"a": 1}, {1: 2}, [None], [math.nan], ["a", "b"], object(), lambda *_: 0, range(3), int, 1j,
    Fraction(1, 2), Path("nowhere"), np.float32(0.5), np.int64(2), np.array(["a", "b"]), np.array([object()]),
    np.zeros((2, 2)), torch.tensor(2.0), torch.tensor(2), torch.zeros(0), torch.zeros(0, 3), torch.ones(3, 2, 2, 2, 2),
    nn.Linear(3, 2),
]  # fmt: skip
TYPES = ["float16", "float64", "bfloat16", "int64", "uint8", "bool", "complex64"]


def spoiled(value: Any) -> list[Any]:
    """What comes near a valid value, or is as good."""
    match value:
        case nn.Module():
            mlp = uqlab.models.mlp(8, (6,), 4, dropout=0.0)
            others = nn.Linear(3, 2), nn.Identity(), nn.Sequential()
            return [*others, mlp.to("meta"), uqlab.models.mlp(8, (6,), 4).half()]
        case torch.Tensor():
            x, n = value, value.numpy()
            whole = [x[None], x[:0], torch.cat([x, x])] if x.ndim else []
            whole += [x[0], x[..., :1], x.mT if x.ndim > 1 else x] if x.ndim else []
            arrays = [x.tolist(), n, n.astype(">f4"), n.astype(str), n.astype(object)]
            kinds = [x.to(getattr(torch, name)) for name in TYPES]
            kinds += [x.to("meta"), x.to_sparse(), torch.zeros_like(x)]
            return [*whole, *arrays, *kinds, x * math.nan, x.double() * 1e30, -x]
        case bool() | str() | None:
            return []
        case int() | float():
            return [-value, value + 1000, value + 0.5, str(value), [value]]
        case list() | tuple() if value:
            return [value[:0], [*value, *value], [*value, None], [value], value[0]]
        case Mapping() if value:
            return [{**value, "more": None}, dict.fromkeys(value), list(value)]
    return []


def state() -> dict[str, Any]:
    """What no call may change, besides its arguments; torch itself sets a variable of its own."""
    return {
        "torch's generator": hash(torch.get_rng_state().numpy().tobytes()),
        "NumPy's generator": hash(str(np.random.get_state())),  # noqa: NPY002  (the global one is what is looked at)
        "Python's generator": hash(random.getstate()), "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(), "threads": torch.get_num_threads(), "folder": os.getcwd(),
        "environment": hash(frozenset(v for v in os.environ.items() if "TORCH" not in v[0])),
        "style": hash(str(sorted(mpl.rcParams.items()))), "hooks": len(nn.modules.module._global_forward_hooks),
        "determinism": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip


def content(thing: Any) -> Any:
    """A fingerprint of an argument: values, modes and hooks."""
    match thing:
        case nn.Module():
            hooks = [
                len(m._forward_hooks) + len(m._forward_pre_hooks)
                for m in thing.modules()
            ]
            modes = [m.training for m in thing.modules()]
            grads = [(p.requires_grad, p.grad is None) for p in thing.parameters()]
            held = [(n, content(p)) for n, p in thing.state_dict().items()]
            return hooks, modes, grads, held
        case torch.Tensor():
            dense = not thing.is_meta and thing.layout is torch.strided
            return fingerprint(thing) if dense else (thing.shape, thing.dtype)
        case np.ndarray():
            return thing.tobytes(), thing.dtype, thing.shape
        case list() | tuple():
            return [content(each) for each in thing]
        case Mapping():
            return [(repr(key), content(each)) for key, each in thing.items()]
        case int() | float() | str():
            return repr(thing)
    return None


def called(thing: Any, given: dict[str, Any]) -> Any:
    """Call a function with arguments by name; of one that takes any number by position, `given` names the tuple."""
    parameters = inspect.signature(thing).parameters.values()
    args: list[Any] = []
    several = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    if several:
        first = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        args = [given.pop(name) for name in [*first, *several] if name in given]
    result = thing(*args, **given)
    if isinstance(result, contextlib.AbstractContextManager):
        with result:
            pass
    return result


def faults(name: str, thing: Any, change: dict[str, Any]) -> list[str]:
    """What is wrong with a call of `name` with some arguments changed: an empty list if nothing is."""
    given = valid(name, thing) | change
    before = {parameter: content(value) for parameter, value in given.items()}
    found = []
    with (
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(None),
        inside(),
    ):
        warnings.simplefilter("always")
        around = state()
        try:
            result = called(thing, dict(given))
            said = any("NaN" in str(each.message) for each in warned)
            if not said and not name.startswith(MAY_BE_NAN) and has_nan(result):
                found.append("a result is NaN")
        except Exception as error:
            now = state()  # the check of annotations draws random numbers
            found += bug(error, thing, change)
        else:
            now = state()
        drawn = "torch's generator" if name.startswith(DRAWS) else ""
        found += [f"{k} is changed" for k in now if now[k] != around[k] and k != drawn]
    plt.close("all")
    for parameter in given.keys() - CHANGED.get(name, set()):
        if content(given[parameter]) != before[parameter]:
            found.append(f"the argument {parameter} is changed")
    return found


@contextlib.contextmanager
def inside():
    """A folder of its own, in which a call may write, and no net."""
    before, offline = os.getcwd(), hub.HF_HUB_OFFLINE
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        hub.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            os.chdir(before)
            hub.HF_HUB_OFFLINE = offline
            gc.collect(0)


def bug(error: Exception, thing: Any, change: dict[str, Any]) -> list[str]:
    """What is a bug of the package in an error: one of BUGS raised by its own line.

    Only of a call whose arguments fit the signature: what a type checker refuses may end anyhow. Where arrays of
    users come in, the signature takes anything that could be one (`core.checks.ArrayLike`).
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if "jaxtyping" not in frame.filename][-1]
    if not isinstance(error, BUGS) or not last.filename.startswith(PACKAGE):
        return []
    parameters = inspect.signature(thing).parameters
    for name, value in change.items():
        if name not in parameters or not fits(value, parameters[name].annotation):
            return []
    place = f"{Path(last.filename).name}:{last.lineno}"
    return [f"a bug: {type(error).__name__} at {place}: {str(error)[:150]}"]


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of the annotated kind; a tensor's shape is none of it."""
    if annotation is inspect.Parameter.empty:
        return True
    with contextlib.suppress(Exception):
        return is_bearable(value, annotation)
    return False


def has_nan(result: Any) -> bool:
    match result:
        case torch.Tensor():
            whole = result.is_meta or not result.is_floating_point()
            return not whole and bool(result.isnan().any())
        case float():
            return math.isnan(result)
        case tuple() | list():
            return any(map(has_nan, result))
        case Mapping():
            return any(map(has_nan, result.values()))
    return False
