"""Trainings: what `fit` learned, in a file whose name says everything that the training depends on.

The variable UQLAB_CACHE, which the runner sets, names the folder. If it is empty or absent, nothing is kept.
"""

import functools
import inspect
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from uqlab.core.files import TRAININGS, fingerprint, sha256, writing
from uqlab.ensembles import Ensemble
from uqlab.training.checkpoints import Checkpoint, described

ROOM = (
    2 * 10**9
)  # bytes of all files together, the least recently used go first; one may take a quarter of it
WORTH = 1.0  # seconds: what trains faster is not kept
EVERY = 60.0  # seconds between two states of a training that goes on
CODE = (
    "core",
    "ensembles",
    "extraction",
    "heads",
    "models",
    "training",
)  # rooms on which a training may depend
KNOWN = {
    "torch",
    "transformers",
    "uqlab",
}  # packages whose modules are what their code, or version, says


class Training:
    """The file of one training, and what its ensemble learns."""

    def __init__(self, path: Path, ensemble: Ensemble):
        self.path, self.noise = path, _noise()
        trained = {
            f"parameter {name}": p
            for name, p in ensemble.named_parameters()
            if p.requires_grad
        }
        self.state: dict[str, Tensor] = trained | {
            f"buffer {name}": b for name, b in ensemble.named_buffers()
        }

    @classmethod
    def of(
        cls, ensemble: Ensemble, depends: Any, *functions: str | Callable | None
    ) -> "Training | None":
        """The file of the training that `depends` describes; None if modules, hooks or functions of the user run."""
        folder = os.environ.get(TRAININGS)
        code = [type(part) for part in ensemble.modules()] + [
            f for f in functions if callable(f)
        ]
        if not folder or not all(map(_known, code)):
            return None
        settings = [
            (name, str(type(part)), _settings(part))
            for name, part in ensemble.named_modules()
        ]
        if " at 0x" in repr(settings):  # something that only its address tells apart
            return None
        weights = [
            (name, p.requires_grad, p) for name, p in ensemble.named_parameters()
        ]
        content = [
            depends,
            settings,
            weights,
            dict(ensemble.named_buffers()),
            torch.__version__,
            _code(),
        ]
        return cls(Path(folder, f"{fingerprint(content)}.safetensors"), ensemble)

    def load(self) -> tuple[Tensor, int, float] | None:
        """Put the learned weights into the ensemble: its losses, steps and seconds; None if they are not on file."""
        try:
            with safe_open(self.path, framework="pt") as file:
                about = json.loads(file.metadata()["uqlab"])
                found = {name: file.get_tensor(name) for name in sorted(file.keys())}
            losses = found.pop("losses")
            if found.keys() != self.state.keys() or about["sha256"] != fingerprint(
                losses, found
            ):
                return None
            os.utime(self.path)
        except (OSError, SafetensorError, LookupError, TypeError, ValueError):
            return None
        with torch.no_grad():
            for name, tensor in self.state.items():
                tensor.copy_(found[name])
        return losses, about["steps"], about["seconds"]

    def state_of(self, run: dict[str, Any], content: dict[str, Any]) -> Checkpoint:
        """The state that a process left which was stopped in this training; one that cannot be read counts as none."""
        path = self.path.with_suffix(".checkpoint")
        with suppress(OSError, ValueError):
            return Unfinished.read(path, run, content)
        path.unlink(missing_ok=True)
        return Unfinished.read(path, run, content)

    def save(self, losses: Tensor, steps: int, seconds: float) -> None:
        """Keep what was learned, if it is worth it and nothing but the ensemble's own generators was drawn from."""
        self.path.with_suffix(".checkpoint").unlink(missing_ok=True)
        size = sum(tensor.nbytes for tensor in self.state.values())
        if seconds < WORTH or size > ROOM / 4 or self.noise != _noise():
            return
        state = {
            name: t.detach().to("cpu", copy=True).contiguous()
            for name, t in sorted(self.state.items())
        }
        about = {
            "steps": steps,
            "seconds": seconds,
            "sha256": fingerprint(losses, state),
        }
        with suppress(OSError, SafetensorError):  # a full disk costs no training
            with writing(self.path) as temporary:
                save_file(
                    state | {"losses": losses}, temporary, {"uqlab": json.dumps(about)}
                )
            _make_room(self.path.parent)


class Unfinished(Checkpoint):
    """The state of a training that nobody asked to keep: written now and then, and not where it cannot be."""

    def __init__(self, *read: Any):
        super().__init__(*read)
        self.noise, self.written = _noise(), time.monotonic()

    def write(self, *state: Any) -> None:
        if (
            time.monotonic() - self.written >= EVERY and self.noise == _noise()
        ):  # no state holds the noise of others
            with suppress(OSError):
                super().write(*state)
            self.written = time.monotonic()


def _known(code: Any) -> bool:
    """Whether a class or a function is of a KNOWN package, of uqlab a room in CODE, and holds nothing but its code."""
    if (
        not isinstance(code, type)
        and getattr(inspect.unwrap(code), "__closure__", code) is not None
    ):
        return False
    package, room, *_ = f"{code.__module__}.".split(".")
    return package in KNOWN and (package != "uqlab" or room in CODE)


def _settings(part: nn.Module) -> dict[str, Any]:
    """What a module holds besides tensors and modules, hooks included, written alike in every process."""
    # What passes and seeds add is no setting.
    skipped = {
        "_parameters",
        "_buffers",
        "_modules",
        "_per_pass",
        "_parts",
        "training",
        "generators",
    }

    def written(value: Any) -> Any:
        if isinstance(value, set):
            return sorted(map(repr, value))
        if isinstance(value, OrderedDict):  # of hooks, by numbers that count up
            return [written(each) for each in value.values()]
        return (
            described(inspect.unwrap(value))
            if isinstance(value, FunctionType) and _known(value)
            else value
        )

    return {
        name: written(value)
        for name, value in vars(part).items()
        if name not in skipped
    }


def _noise() -> str:
    """The state of the generators that an ensemble does not own."""
    return fingerprint(
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    )


@functools.cache
def _code() -> str:
    """A digest of the code that a training runs."""
    package = Path(__file__).parents[1]
    return fingerprint(
        [
            (room, path.name, sha256(path))
            for room in CODE
            for path in sorted((package / room).glob("*.py"))
        ]
    )


def _make_room(folder: Path) -> None:
    """Remove the files that were not used for the longest time, and what killed processes left, beyond ROOM bytes."""
    used = 0
    for path in sorted(
        folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True
    ):
        used += path.stat().st_size
        if used > ROOM:
            path.unlink(missing_ok=True)
