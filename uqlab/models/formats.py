"""Weights in the files of other programs: CTranslate2 and GGUF."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# How numbers of a GGUF file are stored, by its code: blocks of 32 weights with a scale
# and, in the second, a shift.
FLOAT, Q8_0, Q4_1 = 0, 8, 3
BLOCKS = {
    FLOAT: np.dtype("<f4"),
    Q8_0: np.dtype([("scale", "<f2"), ("q", "i1", 32)]),
    Q4_1: np.dtype([("scale", "<f2"), ("shift", "<f2"), ("q", "u1", 16)]),
}
VALUES = dict(zip(range(13), "BbHhIif?__Qqd", strict=True))
TEXT, LIST = 8, 9


class _Bytes:
    """Bytes that are read one value after the other, little-endian."""

    def __init__(self, path: Path):
        self.all, self.at = path.read_bytes(), 0

    def take(self, form: str) -> Any:
        """Return the next value, or values, of a `struct` format."""
        values = struct.unpack_from(f"<{form}", self.all, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values[0] if len(values) == 1 else values

    def text(self, length: str) -> str:
        """Return a text after its length, a number of that format."""
        size = self.take(length)
        self.at += size
        return self.all[self.at - size : self.at].rstrip(b"\0").decode()

    def array(self, kind: Any, count: int, at: int) -> np.ndarray:
        """Return an array that starts at a byte."""
        return np.frombuffer(self.all, kind, count, at)


def ctranslate2(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and float arrays of a model of CTranslate2, format 6."""
    data = _Bytes(path)
    _, _, _ = data.take("I"), data.text("H"), data.take("I")  # of format and model
    for _ in range(data.take("I")):
        name = data.text("H")
        shape = [data.take("I") for _ in range(data.take("B"))]
        kind, size = data.take("B"), data.take("I")
        if kind == 4:  # float16
            values = data.array("<f2", math.prod(shape), data.at)
            yield name, torch.from_numpy(values.astype(np.float32).reshape(shape))
        data.at += size


def gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors of a GGUF file of version 3."""
    data = _Bytes(path)
    data.take("4sI")
    tensors, settings = data.take("QQ")
    about = {data.text("Q"): _value(data, data.take("I")) for _ in range(settings)}
    places = []
    for _ in range(tensors):
        name, axes = data.text("Q"), data.take("I")
        shape = [data.take("Q") for _ in range(axes)][::-1]
        places.append((name, shape, *data.take("IQ")))
    start = -(-data.at // 32) * 32
    stored = {}
    for name, shape, kind, at in places:
        count = math.prod(shape) // (1 if kind == FLOAT else 32)
        values = _numbers(data.array(BLOCKS[kind], count, start + at), kind)
        stored[name] = torch.from_numpy(values.reshape(shape))
    return about, stored


def _value(data: _Bytes, kind: int) -> Any:
    """Return a setting of this kind, the next in a GGUF file."""
    if kind == TEXT:
        return data.text("Q")
    if kind == LIST:
        kind, count = data.take("IQ")
        return [_value(data, kind) for _ in range(count)]
    return data.take(VALUES[kind])


def _numbers(blocks: np.ndarray, kind: int) -> np.ndarray:
    """Return the numbers of blocks as float32."""
    if kind == FLOAT:
        return blocks.copy()
    scale, q = blocks["scale"][:, None].astype(np.float32), blocks["q"]
    if kind == Q8_0:
        return scale * q
    q = np.concatenate([q & 15, q >> 4], 1)  # the first sixteen weights are low
    return scale * q + blocks["shift"][:, None].astype(np.float32)
