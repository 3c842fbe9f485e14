"""The optimiser's step for ensembles: inside the backward products where that is exact, by torch.optim elsewhere."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from uqlab.ensembles import Ensemble, FoldedEnsemble
from uqlab.layers import MemberLinear


class FusedSGD:
    """SGD inside the product that computes the gradient: W <- (1 - lr wd) W - lr grad^T x, one pass over the weights.

    With momentum the product accumulates into the velocity instead, as torch.optim.SGD does in separate passes.
    """

    def __init__(self, ensemble: Ensemble, weight_decay: float, momentum: float):
        self.layers = [layer for layer in ensemble.modules() if isinstance(layer, MemberLinear)]
        self.lr, self.weight_decay, self.momentum = 0.0, weight_decay, momentum
        self.velocity = {p: torch.zeros_like(p) for p in ensemble.parameters()} if momentum else {}

    def __enter__(self) -> "FusedSGD":
        for layer in self.layers:
            layer.fused_update = self.update
        return self

    def __exit__(self, *exc: object) -> None:
        for layer in self.layers:
            layer.fused_update = None

    def update(self, parameter: Tensor, grad: Tensor, x: Tensor | None) -> None:
        """One step on a weight from grad [members, out, rows] and x [members, rows, in], or on a bias (x is None)."""
        target = self.velocity[parameter] if self.momentum else parameter
        keep = self.momentum if self.momentum else 1 - self.lr * self.weight_decay
        scale = 1.0 if self.momentum else -self.lr
        if x is None:
            target.mul_(keep).add_(grad.sum(-1), alpha=scale)
        else:
            target.baddbmm_(grad, x, beta=keep, alpha=scale)
        if self.momentum:
            if self.weight_decay:
                target.add_(parameter, alpha=self.weight_decay)
            parameter.add_(target, alpha=-self.lr)

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass

    def state(self) -> dict:
        return {"velocity": list(self.velocity.values())}

    def load(self, state: dict) -> None:
        for mine, saved in zip(self.velocity.values(), state["velocity"], strict=True):
            mine.copy_(saved)


class TorchStepper:
    """torch.optim over all trainable parameters, with the gradient norm clipped member by member."""

    def __init__(
        self, ensemble: Ensemble, name: str, lr: float, weight_decay: float, momentum: float, clip: float | None
    ):
        parameters = [p for p in ensemble.parameters() if p.requires_grad]
        if name == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr, momentum, weight_decay=weight_decay, fused=True)
        else:
            kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
            self.optimizer = kind(parameters, lr, weight_decay=weight_decay, fused=True)
        self.ensemble, self.clip = ensemble, clip

    def __enter__(self) -> "TorchStepper":
        return self

    def __exit__(self, *exc: object) -> None:
        self.optimizer.zero_grad()  # the gradients' memory is not needed after training

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        if self.clip is not None:
            _clip_members(self.ensemble, self.clip)
        self.optimizer.step()

    def state(self) -> dict:
        return self.optimizer.state_dict()

    def load(self, state: dict) -> None:
        self.optimizer.load_state_dict(state)


Stepper = FusedSGD | TorchStepper


def make_stepper(
    ensemble: Ensemble, name: str, lr: float, weight_decay: float, momentum: float, clip: float | None
) -> Stepper:
    """The fastest exact stepper: fused SGD for folded chains of linear layers without clipping, else torch.optim."""
    if name not in ("sgd", "adam", "adamw"):
        raise ValueError(f'optimizer must be "sgd", "adam" or "adamw", got {name!r}')
    if lr <= 0 or weight_decay < 0 or not 0 <= momentum < 1 or (clip is not None and clip <= 0):
        raise ValueError(
            "lr and clip must be positive, weight_decay not negative and momentum in [0, 1), got "
            f"lr={lr}, clip={clip}, weight_decay={weight_decay}, momentum={momentum}"
        )
    if name == "sgd" and clip is None and _is_chain(ensemble) and next(ensemble.parameters()).device.type == "cpu":
        return FusedSGD(ensemble, weight_decay, momentum)
    return TorchStepper(ensemble, name, lr, weight_decay, momentum, clip)


def _is_chain(ensemble: Ensemble) -> bool:
    """Every parameter belongs to a member linear layer that is used once a pass, as in a Sequential of layers.

    Only then has the last use of a weight in the backward pass come when its gradient does.
    """
    network = ensemble.network if isinstance(ensemble, FoldedEnsemble) else None
    return (
        isinstance(network, nn.Sequential)
        and len(set(network)) == len(network)
        and all(isinstance(part, MemberLinear) or not list(part.parameters()) for part in network)
    )


def _clip_members(ensemble: Ensemble, limit: float) -> None:
    """Scale every member's gradient to at most `limit` in norm: one member's step never depends on another's."""
    if not isinstance(ensemble, FoldedEnsemble):
        for index in range(ensemble.members):
            nn.utils.clip_grad_norm_(ensemble.member(index).parameters(), limit)
        return
    grads = [p.grad for p in ensemble.parameters() if p.grad is not None]  # members first
    norms = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()  # [members]
    scale = (limit / (norms + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(scale.view(-1, *[1] * (g.ndim - 1)))


def lr_factor(
    schedule: str, epochs: int, steps_per_epoch: int, milestones: tuple[int, ...] | list[int], warmup: int
) -> Callable[[int], float]:
    """step -> factor of the learning rate: linear over `warmup` steps, then the schedule."""
    total = epochs * steps_per_epoch
    if schedule not in ("constant", "cosine", "step"):
        raise ValueError(f'schedule must be "constant", "cosine" or "step", got {schedule!r}')
    if schedule == "step" and not milestones:
        raise ValueError('schedule="step" needs milestones, the epochs at which the learning rate falls to a tenth')

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
        if schedule == "step":
            return 0.1 ** sum(step >= epoch * steps_per_epoch for epoch in milestones)
        return 1.0

    return factor
