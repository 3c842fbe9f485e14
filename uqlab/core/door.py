"""The door of a room: what a user gives to a public function is converted, or refused in words, by its annotations.

A signature says what a function takes, so nothing else has to say it again. NumPy
arrays and lists become tensors; numbers of other kinds become ints and floats. Whatever
does not fit is a TypeError or ValueError that says what was given, what is accepted and
what to do. What fits the signature, and a library underneath refuses (the shapes of a
product), is a ValueError that says what was given and what the library said.
"""

import collections.abc
import functools
import inspect
import numbers
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from uqlab.core.checks import at_least, is_ours, of_a_library, one_of, within

Reader = Callable[
    [str, Any], Any
]  # (a parameter's name, what was given) -> what the function gets

# What a parameter of that name must be, wherever it stands: counts, their least, and
# numbers in an interval.
COUNTS = dict.fromkeys(
    ("batch_size", "bins", "channels", "classes", "dimension", "epochs", "gamma", "groups", "in_features", "of",
     "out_features", "repeats", "size", "vectors", "width"), 1,
) | {"seed": 0, "perturbations": 0, "warmup": 0}  # fmt: skip
MOST = 10**7  # of a count; a seed may have 63 bits
INTERVALS = {
    "level": "(0, 1)", "lr": "(0, inf)", "weight_decay": "[0, inf)", "momentum": "[0, 1)", "clip": "(0, inf]",
    "coverage": "(0, 1]", "risk": "[0, 1]", "sigma": "[0, inf)", "depth": "(-inf, inf)", "dropout": "[0, 1)",
    "std": "[0, inf)", "init_std": "[0, inf)", "prior_variance": "(0, inf)", "rho": "[0, 1]", "alpha": "(0, inf)",
    "diversity": "[0, inf)", "temperature": "(0, inf)",
}  # fmt: skip
FLOATING = ("float16", "bfloat16", "float32", "float64")
HOLLOW = (
    "weight",
    "bias",
    "down",
    "up",
    "value",
    "w",
)  # a network may lie on the device "meta", without numbers
PLAIN = {bool: "True or False", int: "an integer", float: "a number", str: "text"}
TODO = {"Module": "one torch module", "Ensemble": "an ensemble; wrap models by ensembles.from_members",
        "MaskEnsemble": "the ensemble that extraction.masks(model) returns"}  # fmt: skip
RANKS = {  # what a reader of the message may have meant, by the axes that are wanted and how many were given
    ("members", 2): "; for a single model use logits[None]",
    ("members", 4): "; for groups use decompose_groups",
    ("groups", 3): "; from one ensemble use group_members(logits, size)",
}


def room(name: str, reads: bool = True) -> None:
    """Put the door before the public functions and classes of a room: `room(__name__)` at the end of its file.

    reads: False for a room that draws, and hands on what it is given: only what a
    library refuses is told in words.
    """
    module = sys.modules[name]
    listed = getattr(module, "__all__", None)
    for public, thing in list(vars(module).items()):
        own = (
            public in listed
            if listed
            else public[0] != "_" and getattr(thing, "__module__", "") == name
        )
        if own and inspect.isfunction(thing):
            setattr(module, public, guarded(thing, reads))
        elif (
            own
            and inspect.isclass(thing)
            and inspect.isfunction(make := vars(thing).get("__init__"))
        ):
            thing.__init__ = guarded(make, reads)


def guarded(function: Any, reads: bool = True) -> Any:
    """The function behind the door, if it is not there already."""
    if hasattr(function, "readers"):
        return function
    signature = inspect.signature(function)
    readers = {
        name: _of_parameter(name, p) if reads else None
        for name, p in signature.parameters.items()
    }

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return function(
                *args, **kwargs
            )  # Python itself says what is missing or unknown
        for name, value in given.arguments.items():
            if (read := readers[name]) is not None:
                given.arguments[name] = read(name, value)
        try:
            return function(*given.args, **given.kwargs)
        except Exception as error:
            if is_ours(error) or not of_a_library(error):
                raise
            what = ", ".join(
                f"{name}={shown(value)}"
                for name, value in given.arguments.items()
                if name != "self"
            )
            called = function.__qualname__.removesuffix(".__init__")
            raise ValueError(
                f"{called} cannot take {what}: {type(error).__name__}: {error}"
            ) from error

    door.readers = readers  # type: ignore[attr-defined]
    return door


def shown(value: Any) -> str:
    """What was given, in a few words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{'x'.join(map(str, value.shape)) or 'a scalar'} of {value.dtype}"
    if value is None or isinstance(value, bool | int | float | complex | str):
        text = repr(value)
        return (
            text
            if len(text) < 60
            else f"{text[:56]}...{text[0] if isinstance(value, str) else ''}"
        )
    return type(value).__name__


def _of_parameter(name: str, parameter: inspect.Parameter) -> Reader | None:
    read, default = _reader(parameter.annotation), parameter.default
    if read is None:
        return None
    if parameter.kind is parameter.VAR_POSITIONAL:
        return lambda name, values: tuple(
            read(f"{name}[{i}]", value) for i, value in enumerate(values)
        )
    if parameter.kind is parameter.VAR_KEYWORD:
        return lambda _, values: {
            name: read(name, value) for name, value in values.items()
        }

    def checked(name: str, value: Any) -> Any:
        if value is default:
            return value
        value = read(name, value)
        if value is not None and name in COUNTS and type(value) is int:
            at_least(name, value, COUNTS[name])
            if value > MOST and name != "seed":
                raise ValueError(f"{name} must be at most {MOST:,}, got {value}")
        elif name in ("target", "default") and isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(
                    f"{name} must be a regular expression, got {shown(value)}: {error}"
                ) from error
        elif isinstance(value, int | float) and name in INTERVALS:
            within(name, value, INTERVALS[name])
        return value

    return checked


def _reader(kind: Any) -> Reader | None:
    """What reads a value of a kind; None where everything passes."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, typing.TypeVar):
        return _reader(kind.__bound__)
    if kind in PLAIN:
        return functools.partial(_plain, kind)
    if kind is types.NoneType or kind is None:
        return _none
    if origin is typing.Literal:
        return functools.partial(_literal, parts)
    if origin in (typing.Union, types.UnionType):
        return _union(parts)
    if hasattr(kind, "dim_str"):
        return functools.partial(_tensor, kind)
    if getattr(kind, "__qualname__", "") == "Tensor":
        return functools.partial(_tensor, None)
    if kind is collections.abc.Callable or origin is collections.abc.Callable:
        return functools.partial(_instance, collections.abc.Callable, "a function")
    if origin in (
        collections.abc.Sequence,
        collections.abc.Iterable,
        collections.abc.Collection,
        list,
    ):
        read = functools.partial(_items, _reader(parts[0]) if parts else None)
        names = origin in (collections.abc.Iterable, collections.abc.Collection)
        return (
            (
                lambda name, given: read(
                    name, list(given) if isinstance(given, Mapping) else given
                )
            )
            if names
            else read
        )
    if origin is tuple and parts and parts[-1] is not Ellipsis:
        return functools.partial(_tuple, [_reader(part) for part in parts])
    if origin is tuple:
        return functools.partial(_items, _reader(parts[0]) if parts else None)
    if origin is collections.abc.Mapping or origin is dict:
        return functools.partial(_mapping, _reader(parts[1]))
    if origin is type:
        return functools.partial(_instance, type, "a class")
    if (
        inspect.isclass(kind)
        and kind not in (object, Any, inspect.Parameter.empty)
        and origin is None
    ):
        return functools.partial(
            _instance, kind, TODO.get(kind.__name__, f"of type {kind.__name__}")
        )
    return None  # Any, forward references


def _none(name: str, value: Any) -> None:
    if value is not None:
        raise TypeError(f"{name} must be None, got {shown(value)}")


def _plain(kind: type, name: str, value: Any) -> Any:
    read: Any
    if (
        getattr(value, "ndim", None) == 0
        and hasattr(value, "item")
        and kind is not str
        and not _meta(value)
    ):
        value = value.item()  # a scalar of NumPy or torch
    if type(value) is kind:
        read = value
    elif kind is int and hasattr(value, "__index__") and not hasattr(value, "shape"):
        read = operator.index(value)
    elif (kind is float and isinstance(value, numbers.Real)) or (
        isinstance(value, kind) and kind is str
    ):
        read = value
    else:
        raise TypeError(f"{name} must be {PLAIN[kind]}, got {shown(value)}")
    if kind is int and abs(read) >= 2**63:
        raise ValueError(f"{name} must be an integer of 64 bits, got {shown(read)}")
    if (
        kind is float and read != read and name not in INTERVALS and name[-1] != "]"
    ):  # in lists nan is a gap
        raise ValueError(f"{name} must be a number, got nan")
    return read


def _literal(accepted: tuple, name: str, value: Any) -> Any:
    one_of(
        name,
        value if isinstance(value, str | int | float | None) else shown(value),
        accepted,
    )
    return value


def _instance(kind: Any, what: str, name: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {what}, got {shown(value)}")
    return value


def _union(parts: tuple) -> Reader | None:
    readers: list[Any] = [_reader(part) for part in parts]
    if None in readers or {typing.get_origin(part) for part in parts} == {
        tuple
    }:  # what takes tuples tells them apart
        return None

    if (
        set(map(typing.get_origin, parts)) == {None, typing.Literal}
        and types.NoneType in parts
    ):
        return functools.partial(
            _literal,
            (None, *(value for part in parts for value in typing.get_args(part))),
        )

    def read(name: str, value: Any) -> Any:
        errors = []
        same = [type(value) is getattr(part, "array_type", part) for part in parts]
        for each in [
            each for each, at_once in zip(readers, same, strict=True) if at_once
        ]:
            with suppress(TypeError, ValueError):
                return each(name, value)
        for each in readers:
            try:
                return each(name, value)
            except (TypeError, ValueError) as error:
                errors.append(error)
        told = [
            e
            for part, e in zip(parts, errors, strict=True)
            if part is not types.NoneType
        ]
        if isinstance(value, torch.Tensor):  # it was not meant as a list
            told = [
                e
                for part, e in zip(parts, errors, strict=True)
                if hasattr(part, "dim_str")
            ] or told
        values = [
            e
            for e in told
            if isinstance(e, ValueError) or str(e).startswith(f"{name}[")
        ]
        if len(told) == 1 or values:
            raise (values or told)[0] from None
        said = [str(e).partition(" must be ")[2].rpartition(", got ")[0] for e in told]
        raise TypeError(
            f"{name} must be {' or '.join(dict.fromkeys(said))}, got {shown(value)}"
        ) from None

    return read


def _items(read: Reader | None, name: str, values: Any) -> Any:
    if isinstance(values, str | bytes | Mapping) or not isinstance(
        values, collections.abc.Iterable
    ):
        raise TypeError(f"{name} must be a list, got {shown(values)}")
    if getattr(values, "ndim", 1) == 0:
        raise TypeError(f"{name} must be a list, got a scalar")
    if isinstance(values, range) or read is None:
        return values
    if isinstance(values, collections.abc.Iterator):  # a stream is not held
        return (read(f"{name}[{i}]", value) for i, value in enumerate(values))
    items = [read(f"{name}[{i}]", value) for i, value in enumerate(values)]
    kept = isinstance(values, list | tuple) and all(
        a is b for a, b in zip(items, values, strict=True)
    )
    return values if kept else items


def _tuple(readers: list[Reader | None], name: str, values: Any) -> Any:
    if not isinstance(values, list | tuple) or len(values) != len(readers):
        count = f" of length {len(values)}" if isinstance(values, list | tuple) else ""
        raise TypeError(
            f"{name} must be a tuple of {len(readers)} values, got {shown(values)}{count}"
        )
    pairs = enumerate(zip(readers, values, strict=True))
    return tuple(
        value if read is None else read(f"{name}[{i}]", value)
        for i, (read, value) in pairs
    )


def _mapping(read: Reader | None, name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} must be a dictionary, got {shown(values)}")
    if read is None:
        return values
    items = {key: read(f"{name}[{key!r}]", value) for key, value in values.items()}
    return values if all(items[key] is values[key] for key in items) else items


def _meta(value: Any) -> bool:
    return str(getattr(value, "device", "")) == "meta"


def _tensor(kind: Any, name: str, value: Any) -> Any:
    """A tensor of a jaxtyping kind (None: any), made of arrays, lists and numbers."""
    wanted = getattr(kind, "dtypes", None)
    wanted = (
        None
        if not isinstance(wanted, list | tuple)
        or not all(isinstance(d, str) for d in wanted)
        else wanted
    )
    floats = wanted is not None and all("float" in dtype for dtype in wanted)
    axes = kind.dim_str.split() if kind else ["..."]
    given = value
    if not isinstance(value, torch.Tensor):
        value = _from_array(name, value, floats, axes)
    if (
        value.device.type == "meta" and name not in HOLLOW
    ) or value.layout is not torch.strided:
        raise TypeError(
            f"{name} must hold its numbers, got a {value.layout} tensor on {value.device}; make it dense"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if floats and dtype not in FLOATING:
        raise TypeError(
            f"{name} must be a floating tensor, got {value.dtype}; use torch.as_tensor(...).float()"
        )
    if dtype.startswith("complex") or (
        wanted is not None and not floats and dtype not in wanted
    ):
        whole = wanted is not None and not any("float" in each for each in wanted)
        kinds, todo = ("integers", "long") if whole else ("real numbers", "float")
        raise TypeError(
            f"{name} must be a tensor of {kinds}, got {value.dtype}; use {name}.{todo}()"
        )
    if value.ndim != len(axes) and not any(axis[0] in "*." for axis in axes):
        hint = RANKS.get((axes[0], value.ndim), "")
        raise ValueError(
            f"{name} must be [{', '.join(axes)}], got {list(value.shape)}{hint}"
        )
    return given if kind and kind.array_type is np.ndarray else value


def _from_array(name: str, value: Any, floats: bool, axes: list[str]) -> Any:
    todo = f"{name} must be a tensor, an array or a list of numbers [{', '.join(axes)}], got {shown(value)}"
    if value is None or isinstance(value, str | bytes | Mapping) or callable(value):
        raise TypeError(todo)
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(each, torch.Tensor) for each in value)
    ):
        if len({each.shape for each in value}) > 1:
            raise ValueError(f"{name} must be of one shape, got tensors of several")
        return torch.stack(list(value))
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{todo}, whose rows are not equally long") from error
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{todo} {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    tensor = torch.from_numpy(
        np.array(array, dtype=array.dtype.newbyteorder("="))
    )  # a copy: it may be read-only
    return tensor.double() if floats and array.dtype.kind != "f" else tensor
