"""Files that appear whole or not at all, and fingerprints of what a result depends on."""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

COMPARED: set[Path] = (
    set()
)  # files whose checksums this process has compared with known ones
TRAININGS = "UQLAB_CACHE"  # the variable that names the folder of finished trainings; empty or absent: none is kept
TUNE = "UQLAB_TUNE"  # the variable that turns choices by measurement off with 0; `uqlab.core.tuning`


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path beside `path` to write to; renamed to `path` at the end of the block, removed if that fails."""
    path = Path(path)
    if not path.name:
        raise ValueError(f"{str(path)!r} is no name of a file; give the path of one")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: str | os.PathLike, text: str) -> None:
    """Write a text file so that it appears whole or not at all."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent or broken file is an empty one."""
    with suppress(OSError, ValueError, RecursionError):
        text = path.read_text(encoding="utf-8")
        read = json.loads(text)
        if (
            r"\ud" in text.lower()
        ):  # half a surrogate pair is no text that could be written again
            json.dumps(read, ensure_ascii=False).encode()
        return read if isinstance(read, dict) else {}
    return {}


def sha256(path: str | os.PathLike) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(*things: Any) -> str:
    """The SHA-256 of tensors and arrays (shape, type and every value), of modules (their state), of classes (their
    name), and of what `repr` tells apart. The items of lists, tuples and mappings are
    fingerprinted in their order; a list equals a tuple.
    """
    digest = hashlib.sha256()

    def say(text: str) -> None:
        digest.update(f"{text}\0".encode())  # an end to each: 1, 23 is not 12, 3

    def add(thing: Any) -> None:
        if isinstance(
            thing, type
        ):  # a class has the methods of its objects, but nothing to read
            return say(f"{thing.__module__}.{thing.__qualname__}")
        if hasattr(thing, "state_dict"):
            thing = dict(thing.state_dict())
        if hasattr(thing, "detach"):
            import torch  # where there is a tensor it is loaded; importing this module stays cheap

            value = thing.detach().cpu().contiguous()
            say(f"{list(value.shape)} {value.dtype}")
            digest.update(value.flatten().view(torch.uint8).numpy().data)
        elif hasattr(thing, "tobytes") and hasattr(thing, "dtype"):  # NumPy
            say(f"{list(thing.shape)} {thing.dtype}")
            digest.update(thing.tobytes())
        elif isinstance(thing, Mapping):
            say(f"{{{len(thing)}}}")
            for name, each in thing.items():
                say(repr(name))
                add(each)
        elif isinstance(thing, list | tuple):
            say(f"[{len(thing)}]")
            for each in thing:
                add(each)
        else:
            say(repr(thing))

    for thing in things:
        add(thing)
    return digest.hexdigest()
