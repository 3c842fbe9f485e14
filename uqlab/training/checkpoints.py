"""Trainings that were stopped and go on: the state after every epoch in a folder."""

import functools
import inspect
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uqlab.core.files import StrPath, fingerprint, writing
from uqlab.ensembles import Ensemble
from uqlab.training.workers import Workers

WEIGHTS = "initial weights"
NAME = "training.pt"


class Checkpoint:
    """The state of a training, in a folder, which says what training it is of.

    Parameters
    ----------
    folder
        Where it is, or will be; None: nothing is written.
    depends_on
        What the training follows from, by name: settings, data, initial weights.

    Raises
    ------
    ValueError
        If the file in it is damaged or of another training.
    """

    def __init__(self, folder: StrPath | None, depends_on: Mapping[str, Any]):
        self.path = None if folder is None else Path(folder).expanduser() / NAME
        self.state: dict[str, Any] = {}
        ensemble = depends_on[WEIGHTS]
        began, ensemble.began = ensemble.began, ""
        if self.path is None:
            return
        self.run = {name: fingerprint(value) for name, value in depends_on.items()}
        if self.path.exists():
            self.state = _read(self.path)
            self._check(ensemble, began)
        ensemble.began = self.run[WEIGHTS]

    def _check(self, ensemble: Ensemble, began: str) -> None:
        """Raise ValueError if the file is of another run.

        The ensemble may be the one whose training was stopped, which has `began` with
        other weights, or have the weights that the file holds.
        """
        theirs = self.state["run"]
        weights = self.state["weights"]
        reached = fingerprint(
            {name: weights.get(name) for name in ensemble.state_dict()}
        )
        if theirs[WEIGHTS] == began or reached == self.run[WEIGHTS]:
            self.run[WEIGHTS] = theirs[WEIGHTS]
        if other := [name for name in self.run if theirs.get(name) != self.run[name]]:
            cosine = " (the cosine depends on their number)" * (other == ["epochs"])
            raise ValueError(
                f"resume: {self.path} is of another run, with other "
                f"{', '.join(other)}{cosine}; give it the same, or name another folder"
            )

    def restore(
        self, ensemble: Ensemble, workers: Workers, data: Any, losses: Tensor
    ) -> int:
        """Put the state back, if there is one; return the number of epochs done."""
        if not self.state:
            return 0
        done = self.state["losses"]
        if len(done) > len(losses):
            raise ValueError(
                f"resume: {self.path} has done {len(done)} epochs; "
                f"epochs must be at least as many, got {len(losses)}"
            )
        losses[: len(done)] = done
        ensemble.load_state_dict(self.state["weights"])
        data.go_on(self.state["data"])
        for step, state in zip(workers.steps, self.state["steps"], strict=True):
            step.load_state_dict(state)
        return len(done)

    def write(
        self, ensemble: Ensemble, workers: Workers, data: Any, losses: Tensor, end: bool
    ) -> None:
        """Write the state after an epoch in place of the last one."""
        if self.path is None:
            return
        state = {
            "run": self.run, "losses": losses.clone(), "ended": end, "bounds": workers.bounds,
            "weights": ensemble.state_dict(), "data": data.place(),
            "steps": [step.state_dict() for step in workers.steps],
        }  # fmt: skip
        with writing(self.path) as temporary:
            torch.save(state, temporary)


def _read(path: Path) -> dict[str, Any]:
    """Return what a file holds; ValueError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as parts:
            if bad := parts.testzip():
                raise ValueError(f"the checksum of {bad} is wrong")
        state = torch.load(path, "cpu", weights_only=True)
        return {**state, "run": {**state["run"]}}
    except (
        zipfile.BadZipFile,
        RuntimeError,
        ValueError,
        LookupError,
        TypeError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(
            f"resume: {path} is damaged or none of ours: {error}; copy it anew, or name "
            "another folder"
        ) from error


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
