"""Optimiser, schedule, clipping."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from uqlab.core.checks import at_least, one_of, positive, within
from uqlab.core.modules import trainable

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip


@dataclass(frozen=True)
class Optimisation:
    """The settings of an optimiser, as `fit` takes them."""

    lr: float | None
    optimizer: str | Callable
    scheduler: str | Callable | None
    max_grad_norm: float | None
    weight_decay: float
    momentum: float
    milestones: Sequence[int]
    warmup: int

    def __post_init__(self) -> None:
        if self.lr is not None:
            positive("lr", self.lr)
        if not callable(self.optimizer):
            one_of("optimizer", self.optimizer, OPTIMIZERS)
        elif self.weight_decay or self.momentum:
            raise ValueError(
                "weight_decay and momentum are of the optimisers by name; give them to "
                "yours: lambda parameters: torch.optim.AdamW(parameters, ...)"
            )
        at_least("warmup", self.warmup, 0)
        for epoch in self.milestones:
            at_least("a milestone", epoch, 0)
        if not callable(self.scheduler):
            known = ("constant", "cosine", "step")
            one_of("scheduler", self.scheduler or "constant", known)
        elif self.warmup:
            raise ValueError("warmup is of the schedulers by name; put it into yours")
        if self.scheduler == "step" and not self.milestones:
            raise ValueError(
                'scheduler="step" needs milestones, the epochs at which the learning '
                "rate falls to a tenth"
            )
        if self.max_grad_norm is not None:
            within("max_grad_norm", self.max_grad_norm, "(0, inf]")

    @property
    def by_name(self) -> bool:
        """Whether neither optimiser nor scheduler is the user's."""
        return isinstance(self.optimizer, str) and not callable(self.scheduler)

    def factor(self, step: int, epoch: int, steps: int | None) -> float:
        """Return the learning rate of a step of the run's `steps`, over the highest."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.scheduler == "step":
            return 0.1 ** sum(epoch >= milestone for milestone in self.milestones)
        if self.scheduler != "cosine":
            return 1.0
        if steps is None:
            raise ValueError(
                'scheduler="cosine" needs the number of batches, which this loader '
                "does not know; give a function of the optimiser"
            )
        after = max(1, steps - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / after))

    def of(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return torch's optimiser."""
        how: dict[str, Any] = {} if self.lr is None else {"lr": self.lr}
        if isinstance(self.optimizer, str):
            how |= {"weight_decay": self.weight_decay, "fused": True}
            if self.optimizer == "sgd":
                how["momentum"] = self.momentum
            return OPTIMIZERS[self.optimizer](parameters, **how)
        if how and not isinstance(self.optimizer, type):
            raise ValueError(
                "lr is of the optimisers by name and of classes; a function of the "
                "parameters sets its own"
            )
        made = self.optimizer(parameters, **how)
        held = {id(p) for group in made.param_groups for p in group["params"]}
        if not held <= set(map(id, parameters)):
            raise ValueError(
                "optimizer must hold parameters that it is given, and no others: "
                "lambda parameters: torch.optim.AdamW(parameters, ...)"
            )
        return made


def clip_members(ensemble: Any, limit: float) -> None:
    """Scale each member's gradient to a norm of at most `limit`, apart from others'.

    The gradient of the parameters that members share is a separate group.
    """
    shared = ensemble.shared_parameters()
    nn.utils.clip_grad_norm_(shared, limit)
    shared = set(shared)
    if not ensemble.seen:  # networks of the members' own, or one network
        for network in ensemble.network.children():
            mine = [p for p in network.parameters() if p not in shared]
            nn.utils.clip_grad_norm_(mine, limit)
        return
    own = [p for p in trainable(ensemble) if p not in shared]
    grads: list = [p.grad for p in own if p.grad is not None]  # [members, ...] each
    if not grads:
        return
    squares = [g.reshape(len(g), -1).square().sum(1) for g in grads]
    norms = torch.stack(squares).sum(0).sqrt()
    scale = (limit / (norms + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(scale.view(-1, *[1] * (g.ndim - 1)))
