"""Trainings that were stopped and go on: the state after every epoch in a folder."""

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from uqlab.core.files import StrPath, built, fingerprint, writing
from uqlab.training.workers import Workers

WEIGHTS = "initial weights"
NAME = "training.pt"
described = fingerprint  # of a function: by its source, and what it is made with


class Checkpoint:
    """The state of a training, in a folder, which says what training it is of.

    Parameters
    ----------
    folder
        Where it is, or will be; None: nothing is written.
    depends_on
        What the training follows from, by name: settings, data, initial weights.
    callbacks
        Those with `state_dict` and `load_state_dict` go on from their state too.

    Raises
    ------
    ValueError
        If the file in it is damaged or of another training.
    """

    def __init__(
        self,
        folder: StrPath | None,
        depends_on: Mapping[str, Any],
        callbacks: Sequence[Any] = (),
    ):
        self.callbacks = {
            f"{i} {type(callback).__name__}": callback
            for i, callback in enumerate(callbacks)
            if hasattr(callback, "load_state_dict")
        }
        self.path = None if folder is None else Path(folder).expanduser() / NAME
        self.state: dict[str, Any] = {}
        ensemble = depends_on[WEIGHTS]
        began, ensemble.began = ensemble.began, ""
        if self.path is None:
            return
        whole = {WEIGHTS: dict(ensemble.state_dict()), "network": built(ensemble)}
        whole = dict(depends_on) | whole
        self.run = {name: fingerprint(value) for name, value in whole.items()}
        if self.path.exists():
            self.state = _read(self.path)
            self._check(ensemble, began)
        ensemble.began = self.run[WEIGHTS]

    def _check(self, ensemble, began):
        """Raise ValueError if the file is of another run.

        The ensemble may be the one whose training was stopped, which has `began` with
        other weights, or have the weights that the file holds.
        """
        theirs, weights = self.state["run"], self.state["weights"]
        reached = {name: weights.get(name) for name in ensemble.state_dict()}
        if theirs[WEIGHTS] == began or fingerprint(reached) == self.run[WEIGHTS]:
            self.run[WEIGHTS] = theirs[WEIGHTS]
        if other := [name for name in self.run if theirs.get(name) != self.run[name]]:
            raise ValueError(
                f"resume: {self.path} is of another run, with other "
                f"{', '.join(other)}; give it the same, or name another folder"
            )

    def restore(self, ensemble, workers: Workers, data: Any, losses) -> int:
        """Put the state back, if there is one; return the number of epochs done."""
        if not self.state:  # a folder that cannot be written to is no news later
            self.write(ensemble, workers, data, losses[:0], False)
            if self.path:  # nor is a state of classes that are not read for safety
                _read(self.path)
            return 0
        before = self.state["losses"]
        if len(before) > len(losses):
            raise ValueError(
                f"resume: {self.path} has done {len(before)} epochs; "
                f"epochs must be at least as many, got {len(losses)}"
            )
        losses[: len(before)] = before
        ensemble.load_state_dict(self.state["weights"])
        for step, states in zip(workers.steps, self.state["steps"], strict=True):
            step.done = states["done"]
            for name, part in step.parts.items():
                part.load_state_dict(states[name])
        for name, known in self.state["callbacks"].items():
            if name in self.callbacks:
                self.callbacks[name].load_state_dict(known)
        if len(before):
            data.place = self.state["place"]
        return len(before)

    def write(self, ensemble, workers: Workers, data: Any, losses, ended):
        """Write the state after an epoch in place of the last one."""
        if self.path is None:
            return
        steps = [
            {
                "done": step.done,
                **{k: part.state_dict() for k, part in step.parts.items()},
            }
            for step in workers.steps
        ]
        state = {"run": self.run, "weights": ensemble.state_dict(), "steps": steps}
        state |= {"losses": losses.clone(), "bounds": workers.bounds}
        state |= {"place": data.place, "ended": ended}
        state["callbacks"] = {k: c.state_dict() for k, c in self.callbacks.items()}
        with writing(self.path) as temporary:
            try:
                torch.save(state, temporary)
            except RuntimeError as error:  # a full disk
                text = f"resume: {self.path} cannot be written: {error}; make room"
                raise OSError(text) from error


def _read(path):
    """Return what a file holds; ValueError if it is damaged."""
    wrong: Any = "a wrong checksum, or no state of a training"
    try:
        with zipfile.ZipFile(path) as file:
            bad = file.testzip()
        state = {} if bad else torch.load(path, "cpu", weights_only=True)
        if "run" in state:
            return state
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError) as error:
        wrong = error
    raise ValueError(
        f"resume: {path} is damaged or none of ours: {wrong}; copy it anew, or name "
        "another folder"
    )
