"""Training runs that survive: the state after every epoch in one file, checked before it is believed."""

import hashlib
import io
import os
import pathlib

import torch
from torch import Tensor

from uqlab.ensembles import Ensemble
from uqlab.training.steps import AutogradStep, ChainStep

Step = ChainStep | AutogradStep


def digest(ensemble: Ensemble) -> str:
    """A fingerprint of the initial weights: a checkpoint belongs to the ensemble that started it."""
    sample = [p.detach().flatten()[:1000].cpu().double() for p in ensemble.parameters()]
    return hashlib.sha256(torch.cat(sample).numpy().tobytes()).hexdigest()


class Checkpoint:
    """The state after an epoch in one file: a checksum, then what torch.save writes; read with weights_only=True."""

    def __init__(self, path: pathlib.Path | None, run: list, state: dict | None):
        self.path, self.run, self.state = path, run, state
        self.bounds: list[int] | None = state["bounds"] if state else None

    @classmethod
    def read(cls, path: str | os.PathLike | None, run: list) -> "Checkpoint":
        """The checkpoint at `path`, if there is one; ValueError if it is damaged or of another run."""
        if path is None or not pathlib.Path(path).exists():
            return cls(None if path is None else pathlib.Path(path), run, None)
        data = pathlib.Path(path).read_bytes()
        if data[:32] != hashlib.sha256(data[32:]).digest():
            raise ValueError(f"checkpoint {path} is damaged or none of ours; delete the file to start again")
        state = torch.load(io.BytesIO(data[32:]), weights_only=True, map_location="cpu")
        if state["run"] != run:
            raise ValueError(
                f"checkpoint {path} is of another run: {state['run']}, not {run}; delete the file or name another"
            )
        return cls(pathlib.Path(path), run, state)

    def restore(self, ensemble: Ensemble, steps: list[Step], losses: Tensor) -> int:
        """Put the state back and return the number of epochs done."""
        if self.state is None:
            return 0
        ensemble.load_state_dict(self.state["weights"])
        for step, saved in zip(steps, self.state["optimizer"], strict=True):
            step.load(saved)
        losses.copy_(self.state["losses"])
        return self.state["epoch"]

    def write(self, epoch: int, ensemble: Ensemble, bounds: list[int], steps: list[Step], losses: Tensor) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {"run": self.run, "bounds": bounds, "epoch": epoch, "losses": losses}
        state |= {"weights": ensemble.state_dict(), "optimizer": [step.state() for step in steps]}
        memory = io.BytesIO()
        torch.save(state, memory)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_bytes(hashlib.sha256(memory.getbuffer()).digest() + memory.getvalue())
        os.replace(temporary, self.path)
