"""Files that appear whole or not at all, and fingerprints of what a result needs."""

import contextlib
import dis
import hashlib
import inspect
import json
import os
import re
import types
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

StrPath = str | os.PathLike  # what names a file
Values = dict[str, Any]  # by name: parameters, or an object of JSON

# The variable that names the folder of finished trainings; empty: none is kept.
TRAININGS = "UQLAB_CACHE"


@contextlib.contextmanager
def writing(path: StrPath) -> Iterator[Path]:
    """Yield a temporary path beside `path` that takes its place after the block.

    If the block fails, what `path` held before stays as it is. Behind a symbolic link
    the file is replaced, and the link stays.
    """
    if not Path(path).name:
        raise ValueError(f"{str(path)!r} does not name a file; give the path of one")
    path = Path(path).expanduser().resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{path.parent} is no folder: name another one") from error
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        temporary.touch()  # with the user's rights, which safetensors narrows
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: StrPath, text: str) -> None:
    """Write a text file so that it appears whole or not at all."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Values:
    """Read a JSON object; an absent or broken file is an empty one."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def existing(
    path: StrPath, hint: str = "relative paths start at the working folder"
) -> Path:
    """Return the path of a file; raise FileNotFoundError, with a hint, without it."""
    path = Path(path).expanduser()
    if not path.is_file():
        hint = "it is a folder; name a file in it" if path.is_dir() else hint
        raise FileNotFoundError(f"no file {path.absolute()}: {hint}")
    return path


def sha256(path: StrPath) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(*things: Any) -> str:
    """Return one SHA-256 of all things given.

    Tensors and arrays count with shape, type and every value, modules with how they
    are built and their state, classes with their name, functions with their code and
    what they are made with (defaults, values from outside; of a module's own names the
    functions and plain values), numbers and texts with their `repr`, and other objects
    with what pickle would keep. The items of lists, tuples and mappings count
    in their order; a list equals a tuple.
    """
    digest = hashlib.sha256()
    for thing in things:
        for part in _parts(thing):
            digest.update(part)
    return digest.hexdigest()


def _parts(thing: Any, inside: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield the bytes that tell a thing apart; what it is inside of is not repeated."""
    if any(thing is other for other in inside):
        thing = type(thing)
    inside = (*inside, thing)
    if isinstance(thing, type):
        yield _ended(f"{thing.__module__}.{thing.__qualname__}")
    elif hasattr(thing, "state_dict"):
        yield from _parts([built(thing), dict(thing.state_dict())], inside)
    elif hasattr(thing, "detach") or hasattr(thing, "tobytes"):
        yield from _numbers(thing)
    elif isinstance(thing, Mapping):
        yield _ended(f"{{{len(thing)}}}")
        for name, value in thing.items():
            yield _ended(repr(name))
            yield from _parts(value, inside)
    elif isinstance(thing, list | tuple):
        yield _ended(f"[{len(thing)}]")
        for value in thing:
            yield from _parts(value, inside)
    elif (reduced := _reduced(thing)) is not None:
        yield from _parts(reduced, inside)
    else:
        yield _ended(repr(thing))


def _numbers(thing: Any) -> Iterator[Any]:
    """Yield the bytes of a tensor, an array or an image."""
    if hasattr(thing, "detach"):
        import torch  # importing this module stays cheap

        tensor = thing.detach().cpu()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        yield _ended(f"{list(tensor.shape)} {tensor.dtype}")
        yield tensor.contiguous().flatten().view(torch.uint8).numpy().data
        return
    shape, kind = getattr(thing, "shape", ()), getattr(thing, "dtype", type(thing))
    yield _ended(f"{list(shape)} {kind}")
    yield thing.tobytes()


def _reduced(thing: Any) -> list[Any] | None:
    """Return what an object is made of; None where its `repr` says all."""
    if isinstance(thing, str | bytes | int | float | complex | types.NoneType):
        return None
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if isinstance(thing, types.FunctionType | types.MethodType | types.CodeType):
        return _code(thing)
    try:
        kept = thing.__reduce_ex__(2)
    except Exception:  # a lock, a pattern: whatever cannot be pickled
        return [type(thing), re.sub(" at 0x[0-9a-f]+", "", repr(thing))]
    code = _methods(type(thing)) if callable(thing) else []
    if isinstance(kept, str):
        return [type(thing), kept]
    return [type(thing), code, *kept[1:3], *map(list, filter(None, kept[3:5]))]


def _code(thing: Any) -> list[Any]:
    """Return what a function or a method computes."""
    if inspect.ismethod(thing):
        return [thing.__self__, thing.__func__]
    if inspect.iscode(thing):
        return [thing.co_code, thing.co_names, thing.co_consts]
    outside = dict(inspect.getclosurevars(thing).nonlocals)
    for name in sorted(_global_names(thing.__code__) & thing.__globals__.keys()):
        value = thing.__globals__[name]
        here = getattr(value, "__globals__", None) is thing.__globals__
        if here or type(value) in _PLAIN:
            outside[f"global {name}"] = value
    return [thing.__code__, thing.__defaults__, thing.__kwdefaults__, outside]


_OURS = "torch", "uqlab"
_PLAIN = bool, int, float, str, list, tuple, set, frozenset, dict


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of a module that a function reads, or one inside it."""
    steps = dis.get_instructions(code)
    names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    inner = filter(inspect.iscode, code.co_consts)
    return names.union(*map(_global_names, inner))


def _methods(kind: type) -> list[Any]:
    """Return the methods of a class that are neither torch's nor the package's."""
    every = (m for _, m in inspect.getmembers(kind, inspect.isfunction))
    return [m for m in every if str(m.__module__).split(".")[0] not in _OURS]


def built(module: Any) -> list[Any]:
    """Return how a module is built: its layers, what is frozen, code of the user's."""
    if not hasattr(module, "modules"):  # an optimiser
        return [type(module)]
    one = module.member(0) if hasattr(module, "member_ids") else module
    frozen = [p.requires_grad for p in module.parameters()]
    own = []
    for part in one.modules():
        if type(part).__module__.split(".")[0] not in _OURS:
            seen = {k: v for k, v in vars(part).items() if k[0] != "_"}
            own.append([_methods(type(part)), seen | {"training": None}])
    return [repr(one), getattr(module, "recipe", None), frozen, own]


def _ended(text: str) -> bytes:
    """Return a text with an end: 1, 23 is not 12, 3."""
    return f"{text}\0".encode()
