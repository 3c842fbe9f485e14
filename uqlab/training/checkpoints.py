"""Trainings that were stopped and go on: the state after every epoch in one file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from uqlab.core.files import StrPath, built, fingerprint
from uqlab.core.tensors import load_tensors, save_tensors
from uqlab.ensembles import Ensemble
from uqlab.training.workers import Workers

WEIGHTS = "initial weights"
described = fingerprint  # of a function: by its source, and what it is made with


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
        whole = {WEIGHTS: dict(ensemble.state_dict()), "network": built(ensemble)}
        whole = dict(depends_on) | whole
        self.run = {name: fingerprint(value) for name, value in whole.items()}
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
