"""How weights follow their gradients: the optimiser, its learning rate, clipping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from uqlab.core.checks import at_least, one_of, positive, several, within
from uqlab.ensembles import Ensemble


@dataclass(frozen=True)
class Optimisation:
    """The settings of an optimiser, as `fit` takes them.

    Parameters
    ----------
    lr
        The learning rate at its highest.
    optimizer
        "sgd", "adam" or "adamw".
    weight_decay, momentum
        As in `torch.optim`; the momentum is that of SGD.
    schedule
        "constant", "cosine" (to zero at the end) or "step" (a tenth at each of
        `milestones`).
    milestones
        Epochs.
    warmup
        Steps in which the learning rate rises linearly, before the schedule.
    clip
        The largest norm of one member's gradient.

    Raises
    ------
    ValueError
        For unknown names and numbers out of range.
    """

    lr: float
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    momentum: float = 0.0
    schedule: str = "constant"
    milestones: Sequence[int] = ()
    warmup: int = 0
    clip: float | None = None

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        one_of("optimizer", self.optimizer, ("sgd", "adam", "adamw"))
        within("weight_decay", self.weight_decay, "[0, inf)")
        within("momentum", self.momentum, "[0, 1)")
        one_of("schedule", self.schedule, ("constant", "cosine", "step"))
        at_least("warmup", self.warmup, 0)
        if self.schedule == "step" and not self.milestones:
            raise ValueError(
                'schedule="step" needs milestones, the epochs at which the learning '
                "rate falls to a tenth"
            )
        for epoch in several("milestones", self.milestones, "[30, 60]"):
            at_least("a milestone", epoch, 0)
        if self.clip is not None:
            within("clip", self.clip, "(0, inf]")

    def lr_at(self, step: int, steps_per_epoch: int, epochs: int) -> float:
        """Return the learning rate of a step, counted from the first of the run."""
        factor = 1.0
        if step < self.warmup:
            factor = (step + 1) / self.warmup
        elif self.schedule == "cosine":
            after = max(1, epochs * steps_per_epoch - self.warmup)
            factor = 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / after))
        elif self.schedule == "step":
            epoch = step // steps_per_epoch
            factor = 0.1 ** sum(epoch >= milestone for milestone in self.milestones)
        return self.lr * factor

    def of(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's optimiser; its learning rate is set before every step."""
        decay = {"weight_decay": self.weight_decay, "fused": True}
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, 1.0, self.momentum, **decay)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, 1.0, **decay)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_members(ensemble: Ensemble, limit: float) -> None:
    """Scale each member's gradient to a norm of at most `limit`, apart from others'.

    The gradient of the parameters that members share is a group of its own.
    """
    nn.utils.clip_grad_norm_(ensemble.shared_parameters(), limit)
    shared = set(ensemble.shared_parameters())
    trained = (p for p in ensemble.parameters() if p.grad is not None)
    of_members = [p for p in trained if p not in shared]
    if not of_members:
        return
    if not ensemble.seen:
        for index in range(ensemble.members):
            member = ensemble.member(index).parameters()
            nn.utils.clip_grad_norm_([p for p in member if p not in shared], limit)
        return
    grads: list = [p.grad for p in of_members]  # [members, ...] each
    squares = [g.reshape(len(g), -1).square().sum(1) for g in grads]
    norms = torch.stack(squares).sum(0).sqrt()
    scale = (limit / (norms + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(scale.view(-1, *[1] * (g.ndim - 1)))
