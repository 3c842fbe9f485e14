"""Files that appear whole or not at all, and fingerprints of what a result needs."""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

StrPath = str | os.PathLike  # what names a file
Values = dict[str, Any]  # by name: parameters, or an object of JSON

# Files whose checksums this process has compared with known ones.
COMPARED: set[Path] = set()
# The variable that names the folder of finished trainings; empty: none is kept.
TRAININGS = "UQLAB_CACHE"


@contextlib.contextmanager
def writing(path: StrPath) -> Iterator[Path]:
    """Yield a temporary path beside `path` that takes its place after the block.

    If the block fails, what `path` held before stays as it is. Behind a symbolic link
    the file is replaced, and the link stays.
    """
    if not Path(path).name:
        raise ValueError(f"{str(path)!r} is no name of a file; give the path of one")
    path = Path(path).expanduser().resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
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
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if r"\ud" in text.lower():  # half a surrogate pair could not be written again
            json.dumps(content, ensure_ascii=False).encode()
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

    Tensors and arrays count with shape, type and every value, modules with their
    state, classes with their name, and other things with their `repr`. The items of
    lists, tuples and mappings count in their order; a list equals a tuple.
    """
    digest = hashlib.sha256()
    for thing in things:
        for part in _parts(thing):
            digest.update(part)
    return digest.hexdigest()


def _parts(thing: Any) -> Iterator[Any]:
    """Yield the bytes that tell a thing apart from others."""
    if isinstance(thing, type):
        yield _said(f"{thing.__module__}.{thing.__qualname__}")
        return
    if hasattr(thing, "state_dict"):
        thing = dict(thing.state_dict())
    if hasattr(thing, "detach"):
        import torch  # importing this module stays cheap

        tensor = thing.detach().cpu().contiguous()
        yield _said(f"{list(tensor.shape)} {tensor.dtype}")
        yield tensor.flatten().view(torch.uint8).numpy().data
    elif hasattr(thing, "tobytes") and hasattr(thing, "dtype"):  # NumPy
        yield _said(f"{list(thing.shape)} {thing.dtype}")
        yield thing.tobytes()
    elif isinstance(thing, Mapping):
        yield _said(f"{{{len(thing)}}}")
        for name, value in thing.items():
            yield _said(repr(name))
            yield from _parts(value)
    elif isinstance(thing, list | tuple):
        yield _said(f"[{len(thing)}]")
        for value in thing:
            yield from _parts(value)
    else:
        yield _said(repr(thing))


def _said(text: str) -> bytes:
    """Return a text with an end: 1, 23 is not 12, 3."""
    return f"{text}\0".encode()
