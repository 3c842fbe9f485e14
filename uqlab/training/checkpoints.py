"""Training runs that survive: the state after every epoch in one file, checked before it is believed."""

import functools
import hashlib
import inspect
import io
import os
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from uqlab.core.files import fingerprint, writing
from uqlab.ensembles import Ensemble
from uqlab.training.steps import AutogradStep, ChainStep

Step = ChainStep | AutogradStep
PARTS = {
    "run",
    "bounds",
    "epoch",
    "losses",
    "weights",
    "optimizer",
}  # what a checkpoint holds


def described(function: str | Callable | None) -> str:
    """What distinguishes a loss or an augmentation from others: its name, its code and the arguments bound to it."""
    if isinstance(function, functools.partial):
        return f"{described(function.func)} {function.args} {function.keywords}"
    function = (
        inspect.unwrap(function) if callable(function) else function
    )  # behind the door
    code = getattr(function, "__code__", None)
    name = getattr(
        function,
        "__qualname__",
        str(function) if isinstance(function, str) else type(function).__name__,
    )
    plain = (
        []
        if code is None
        else [each for each in code.co_consts if isinstance(each, int | float | str)]
    )
    return name if code is None else f"{name} {fingerprint(code.co_code, plain)[:16]}"


class Checkpoint:
    """The state after an epoch in one file: a checksum, then what torch.save writes; read with weights_only=True."""

    def __init__(
        self, path: pathlib.Path | None, run: dict[str, Any], state: dict | None
    ):
        self.path, self.run, self.state = path, run, state
        self.bounds: list[int] | None = state["bounds"] if state else None

    @classmethod
    def read(
        cls,
        path: str | os.PathLike | None,
        settings: dict[str, Any],
        content: dict[str, Any],
    ) -> "Checkpoint":
        """The checkpoint at `path`, if there is one; ValueError if it is damaged or of another run.

        A run is what its settings say and what its content (data, initial weights) holds.
        """
        if path is None:
            return cls(None, {}, None)
        path = pathlib.Path(path)
        run = {
            name: value if isinstance(value, str) else repr(value)
            for name, value in settings.items()
        }
        run |= {name: fingerprint(value) for name, value in content.items()}
        if not path.exists():
            return cls(path, run, None)
        data = path.read_bytes()
        try:
            if data[:32] != hashlib.sha256(data[32:]).digest():
                raise ValueError("its checksum is wrong")
            state = torch.load(
                io.BytesIO(data[32:]), weights_only=True, map_location="cpu"
            )
            if (
                not isinstance(state, dict)
                or not isinstance(state.get("run"), dict)
                or not state.keys() >= PARTS
            ):
                raise ValueError(f"it must hold {', '.join(sorted(PARTS))}")
        except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"checkpoint {path} is damaged or none of ours: {error}; delete the file to start again"
            ) from error
        if state["run"] != run:
            other = [name for name in run if state["run"].get(name) != run[name]]
            raise ValueError(
                f"checkpoint {path} is of another run, with other {', '.join(other)}; delete the file or name another"
            )
        return cls(path, run, state)

    def restore(self, ensemble: Ensemble, steps: list[Step], losses: Tensor) -> int:
        """Put the state back and return the number of epochs done."""
        if self.state is None:
            return 0
        try:
            ensemble.load_state_dict(self.state["weights"])
            for step, saved in zip(steps, self.state["optimizer"], strict=True):
                step.load(saved)
            losses.copy_(self.state["losses"])
            return range(len(losses) + 1)[self.state["epoch"]]
        except (
            RuntimeError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise ValueError(
                f"checkpoint {self.path} does not fit its own run: {error}; delete the file"
            ) from error

    def write(
        self,
        epoch: int,
        ensemble: Ensemble,
        bounds: list[int],
        steps: list[Step],
        losses: Tensor,
    ) -> None:
        if self.path is None:
            return
        state = {"run": self.run, "bounds": bounds, "epoch": epoch, "losses": losses}
        state |= {
            "weights": ensemble.state_dict(),
            "optimizer": [step.state() for step in steps],
        }
        memory = io.BytesIO()
        torch.save(state, memory)
        with writing(self.path) as temporary:
            temporary.write_bytes(
                hashlib.sha256(memory.getbuffer()).digest() + memory.getvalue()
            )
