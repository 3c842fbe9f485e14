"""Files of tensors with a header: safetensors with a checksum, which run no code."""

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from uqlab.core.files import StrPath, Values, existing, fingerprint, writing


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
    if other := [name for name, t in tensors.items() if not isinstance(t, Tensor)]:
        raise TypeError(
            f"{path} can hold tensors alone, got {other[0]!r}; make the layer's state "
            "(get_extra_state) a tensor, or keep no such file"
        )
    copies = {k: t.detach().to("cpu", copy=True) for k, t in tensors.items()}
    copies = {k: t.contiguous() for k, t in copies.items()}
    text = json.dumps({**header, "sha256": _checksum(copies, header)})
    with writing(path) as temporary:
        try:
            save_file(copies, temporary, {"uqlab": text})
        except SafetensorError as error:  # a full disk
            todo = "make room, or name another file"
            raise OSError(f"{path} cannot be written: {error}; {todo}") from error


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
        lacks = "it has no " if isinstance(error, KeyError) else ""
        raise ValueError(
            f"{path} is damaged or none of ours: {lacks}{error}; copy it anew, or "
            "name another file"
        ) from error
    return tensors, header


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """Return a fingerprint of what a file holds."""
    ordered = dict(sorted(tensors.items()))
    return fingerprint(ordered, json.dumps(header, sort_keys=True))
