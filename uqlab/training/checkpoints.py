"""Trainings that were stopped and go on: the state after every epoch in one file."""

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from uqlab.core.files import StrPath, fingerprint
from uqlab.core.tensors import load_tensors, save_tensors
from uqlab.ensembles import Ensemble
from uqlab.training.workers import Workers

WEIGHTS = "initial weights"


class Checkpoint:
    """The state of a training, in a file that says what training it is of.

    Parameters
    ----------
    path
        The file, which may be there already; None: nothing is written.
    depends_on
        What the training follows from, by name: settings, data, initial weights.

    Raises
    ------
    ValueError
        If the file is damaged or of another training.
    """

    def __init__(self, path: StrPath | None, depends_on: Mapping[str, Any]):
        self.path = None if path is None else Path(path).expanduser()
        self.bounds = None
        self.epoch = 0
        self.tensors = {}
        ensemble = depends_on[WEIGHTS]
        began, ensemble.began = ensemble.began, ""
        if self.path is None:
            return
        self.run = {name: fingerprint(value) for name, value in depends_on.items()}
        if self.path.exists():
            self._read(self.path, ensemble, began)
        ensemble.began = self.run[WEIGHTS]

    def _read(self, path: Path, ensemble: Ensemble, began: str) -> None:
        """Read the file; ValueError if it is of another training.

        The ensemble may be the one whose training was stopped, which has `began` with
        other weights, or have the weights that the file holds.
        """
        self.tensors, header = load_tensors(path)
        theirs = header.get("run") or {}
        weights = self._named("weights")
        reached = fingerprint(
            {name: weights.get(name) for name in ensemble.state_dict()}
        )
        if theirs.get(WEIGHTS) == began or reached == self.run[WEIGHTS]:
            self.run[WEIGHTS] = theirs.get(WEIGHTS, "")
        if other := [name for name in self.run if theirs.get(name) != self.run[name]]:
            cosine = " (the cosine depends on their number)" * (other == ["epochs"])
            raise ValueError(
                f"checkpoint {path} is of another run, with other "
                f"{', '.join(other)}{cosine}; give it the same, or name another file"
            )
        self.bounds = header["bounds"]
        self.epoch = header["epoch"]

    def restore(self, ensemble: Ensemble, workers: Workers, losses: Tensor) -> int:
        """Put the state back, if there is one; return the number of epochs done."""
        if not self.tensors:
            return 0
        if self.epoch > len(losses):
            raise ValueError(
                f"checkpoint {self.path} has done {self.epoch} epochs; "
                f"epochs must be at least as many, got {len(losses)}"
            )
        losses[: self.epoch] = self.tensors["losses"][: self.epoch]
        ensemble.load_state_dict(self._named("weights"))
        for number, step in enumerate(workers.steps):
            state = step.optimizer.state_dict()
            for name, tensor in self._named(f"optimizer {number}").items():
                parameter, key = name.split(maxsplit=1)
                # A copy: where a file's tensors lie in memory, products may round
                # otherwise.
                state["state"].setdefault(int(parameter), {})[key] = tensor.clone()
            step.optimizer.load_state_dict(state)
        return self.epoch

    def write(
        self, epoch: int, ensemble: Ensemble, workers: Workers, losses: Tensor
    ) -> None:
        """Write the state after an epoch in place of the last one."""
        if self.path is None:
            return
        tensors = {"losses": losses}
        tensors |= {f"weights {k}": t for k, t in ensemble.state_dict().items()}
        for number, step in enumerate(workers.steps):
            for parameter, state in step.optimizer.state_dict()["state"].items():
                for key, tensor in state.items():
                    tensors[f"optimizer {number} {parameter} {key}"] = tensor
        header = {"run": self.run, "epoch": epoch, "bounds": workers.bounds}
        save_tensors(self.path, tensors, header)

    def _named(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of one kind, by the rest of their names."""
        start = f"{kind} "
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }


def described(function: Any, inside: tuple[Any, ...] = ()) -> str:
    """Return what tells a function from others: its source, and what it is made with.

    That is bound arguments, defaults, an object's attributes, and values from outside
    but those that are lists, sets or mappings, in which functions note things. What
    it is `inside` of is not described again.
    """
    if any(function is other for other in inside):
        return "itself"
    if not callable(function):
        return str(function)
    code = function if inspect.isroutine(function) else type(function)
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):  # typed in where no file or cell keeps it
        source = code.__qualname__
    values = _made_with(_values(function), (*inside, function))
    return f"{source} {fingerprint(values)}"


def _values(function: Any) -> list[Any]:
    """Return what a function or an object is made with."""
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
    if inspect.ismethod(function):
        return [function.__self__, function.__func__]
    if not inspect.isfunction(function):
        return [*getattr(function, "__dict__", {}).items()]
    outside = inspect.getclosurevars(function).nonlocals.items()
    outside = [kv for kv in outside if not isinstance(kv[1], list | set | dict)]
    return [function.__defaults__, function.__kwdefaults__, *outside]


def _made_with(value: Any, inside: tuple[Any, ...]) -> Any:
    """Return a value as a fingerprint can take it, whatever its place in memory."""
    if isinstance(value, tuple | list):
        return [_made_with(v, inside) for v in value]
    if isinstance(value, Mapping):
        return {name: _made_with(v, inside) for name, v in value.items()}
    if hasattr(value, "state_dict") or isinstance(value, type):
        return value
    plain = type(value).__repr__ is object.__repr__  # which has its place in memory
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return described(value, inside)
    return [f"{type(value)}", _made_with(_values(value), inside)] if plain else value
