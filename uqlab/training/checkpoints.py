"""Trainings that were stopped and go on: the state after every epoch in a folder."""

import contextlib
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from uqlab.core.files import StrPath, built, fingerprint, writing
from uqlab.training.workers import Workers

NAME = "training.pt"


class Checkpoint:
    """The state of a training, in a folder, which says what training it is of.

    Parameters
    ----------
    folder
        Where it is, or will be; None: nothing is written.
    ensemble
        What is trained, with its initial weights or those that the folder holds.
    depends_on
        What else the training follows from, by name: settings, data.
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
        ensemble: Any,
        depends_on: Mapping[str, Any],
        callbacks: Sequence[Any] = (),
    ):
        self.callbacks = [c for c in callbacks if hasattr(c, "load_state_dict")]
        self.path = None if folder is None else Path(folder).expanduser() / NAME
        self.state: dict[str, Any] = {}
        self.bounds, self.ended = None, False
        if self.path is None:
            return
        follows = {"network": built(ensemble), **depends_on}
        self.run = {name: fingerprint(value) for name, value in follows.items()}
        self.run["initial weights"] = fingerprint(dict(ensemble.state_dict()))
        if self.path.exists():
            self.state = read(self.path)
            self.bounds, self.ended = self.state["bounds"], self.state["ended"]
            self._check(self.state["run"])

    def _check(self, theirs):
        """Raise ValueError if the file is of another run."""
        reached = fingerprint(dict(self.state["weights"]))
        if self.run["initial weights"] == reached:
            self.run["initial weights"] = theirs["initial weights"]
        if other := [name for name in self.run if theirs.get(name) != self.run[name]]:
            raise ValueError(
                f"resume: {self.path} is of another run, with other "
                f"{', '.join(other)}; give it the same, or name another folder"
            )

    def restore(self, ensemble: Any, workers: Workers, losses: torch.Tensor) -> int:
        """Put the state back, if there is one; return the number of epochs done."""
        if not self.state:
            self.write(ensemble, workers, losses[:0], False)
            if self.path:  # what cannot be read again is found out now
                read(self.path)
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
            step.load_state_dict(states)
        known = zip(self.callbacks, self.state["callbacks"], strict=False)
        for callback, state in known:
            callback.load_state_dict(state)
        return len(before)

    @contextlib.contextmanager
    def kept(self, ensemble: Any) -> Iterator[None]:
        """Leave the ensemble as the file has it if the training is stopped.

        So the same call goes on, whatever an epoch had done.
        """
        try:
            yield
        except BaseException:
            if self.path:
                ensemble.load_state_dict(read(self.path)["weights"])
            raise

    def write(
        self, ensemble: Any, workers: Workers, losses: torch.Tensor, ended: bool
    ) -> None:
        """Write the state after an epoch in place of the last one."""
        if self.path is None:
            return
        state = {
            "run": self.run,
            "weights": ensemble.state_dict(),
            "steps": [step.state_dict() for step in workers.steps],
            "callbacks": [callback.state_dict() for callback in self.callbacks],
            "losses": losses.clone(),
            "bounds": workers.bounds,
            "ended": ended,
        }
        with writing(self.path) as temporary:
            try:
                torch.save(state, temporary)
            except RuntimeError as error:  # a full disk
                text = f"resume: {self.path} cannot be written: {error}; make room"
                raise OSError(text) from error


def read(path: Path) -> dict[str, Any]:
    """Return what a file holds; ValueError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip():
                raise RuntimeError("a wrong checksum")
        return torch.load(path, "cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"resume: {path} is damaged or not written by uqlab: {error}; copy it "
            "anew, or name another folder"
        ) from error
