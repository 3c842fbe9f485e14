"""Trainings that were stopped and go on: the state after every epoch in one file."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uqlab.core.files import fingerprint
from uqlab.core.tensors import load_tensors, save_tensors
from uqlab.ensembles import Ensemble


class Checkpoint:
    """The state of a training, in a file that says what training it is of.

    Parameters
    ----------
    path
        The file, which may be there already; None: nothing is written.
    settings
        What the training is, by name; each as text.
    content
        Tensors and modules that it depends on: data, initial weights.

    Raises
    ------
    ValueError
        If the file is damaged or of another training.
    """

    def __init__(
        self,
        path: str | os.PathLike | None,
        settings: Mapping[str, Any],
        content: Mapping[str, Any],
    ):
        self.path = path
        self.tensors: dict[str, Tensor] = {}
        self.header: dict[str, Any] = {}
        if path is None:
            return
        self.run = {name: str(value) for name, value in settings.items()}
        self.run |= {name: fingerprint(value) for name, value in content.items()}
        if not Path(path).exists():
            return
        self.tensors, self.header = load_tensors(path)
        theirs = self.header.get("run") or {}
        if other := [name for name in self.run if theirs.get(name) != self.run[name]]:
            raise ValueError(
                f"checkpoint {path} is of another run, with other {', '.join(other)}; "
                "delete the file or name another"
            )

    def restore(
        self,
        ensemble: Ensemble,
        optimizers: Sequence[torch.optim.Optimizer],
        losses: Tensor,
    ) -> int:
        """Put the state back, if there is one; return the number of epochs done."""
        if not self.tensors:
            return 0
        losses.copy_(self.tensors["losses"])
        ensemble.load_state_dict(self._named("weights"))
        for number, optimizer in enumerate(optimizers):
            state = optimizer.state_dict()
            for name, tensor in self._named(f"optimizer {number}").items():
                parameter, key = name.split(maxsplit=1)
                # A copy: where a file's tensors lie in memory, products may round
                # otherwise.
                state["state"].setdefault(int(parameter), {})[key] = tensor.clone()
            optimizer.load_state_dict(state)
        return self.header["epoch"]

    def write(
        self,
        epoch: int,
        losses: Tensor,
        bounds: Sequence[int],
        ensemble: Ensemble,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Write the state after an epoch in place of the last one."""
        if self.path is None:
            return
        tensors = {"losses": losses}
        tensors |= {f"weights {k}": t for k, t in ensemble.state_dict().items()}
        for number, optimizer in enumerate(optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                for key, tensor in state.items():
                    tensors[f"optimizer {number} {parameter} {key}"] = tensor
        header = {"run": self.run, "epoch": epoch, "bounds": list(bounds)}
        save_tensors(self.path, tensors, header)

    def _named(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of one kind, by the rest of their names."""
        start = f"{kind} "
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }


def described(function: str | Callable | None) -> str:
    """Return what tells a function from others: its name, code and arguments."""
    if isinstance(function, functools.partial):
        name = described(function.func)
        return f"{name} {function.args} {function.keywords}"
    if not callable(function):
        return str(function)
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__qualname__
    constants = [c for c in code.co_consts if isinstance(c, int | float | str)]
    return f"{function.__qualname__} {fingerprint(code.co_code, constants)}"
