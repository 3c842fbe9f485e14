"""One training step of an ensemble: written out for chains of linear layers, by autograd for other networks."""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from uqlab.core.checks import within
from uqlab.ensembles import Ensemble, FoldedEnsemble, MemberDropout, MemberModule, Own

Loss = Callable[
    [Tensor, Tensor], Tensor
]  # outputs [members, batch, ...], labels [members, batch, ...] -> [members]


class Optimizer(NamedTuple):
    """What the optimiser is; the learning rate is set before every step."""

    name: str = "sgd"
    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float | None = None


def make_step(
    ensemble: Ensemble,
    loss: str | Loss,
    class_weights: Tensor | None,
    optimizer: Optimizer,
    precision: str,
    flat: bool = False,
) -> "ChainStep | AutogradStep":
    """The fastest exact step for this ensemble, loss and optimiser; `flat`: the inputs are [samples, features]."""
    clip = optimizer.clip
    autocast = (
        precision != "float32" and next(ensemble.parameters()).device.type == "cuda"
    )
    plain = (
        not callable(loss) and class_weights is None and clip is None and not autocast
    )
    blocks = linear_chain(ensemble, flat) if plain else None
    if blocks is None:
        return AutogradStep(ensemble, loss, class_weights, optimizer)
    return ChainStep(blocks, str(loss), optimizer)


class Block(NamedTuple):
    """A linear layer and what follows it before the next linear layer."""

    weight: nn.Parameter  # [members, out, in]
    bias: nn.Parameter | None  # [members, out]
    relu: bool
    dropout: MemberDropout | None


def linear_chain(ensemble: Ensemble, flat: bool) -> list[Block] | None:
    """The blocks linear [ReLU [dropout]] of a plain Sequential of trainable layers, each used once, else None."""
    network = ensemble.network if isinstance(ensemble, FoldedEnsemble) else None
    if type(network) is not nn.Sequential or len(set(network)) < len(network):
        return None
    if not all(p.requires_grad for p in network.parameters()) or not (
        flat or isinstance(network[0], nn.Flatten)
    ):
        return None
    if any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
        for m in network.modules()
    ):
        return None
    blocks: list[Block] = []
    for i, part in enumerate(network):
        match part:
            case nn.Flatten(start_dim=1, end_dim=-1) if i == 0:
                continue
            case MemberModule() if type(part.inner) is nn.Linear and isinstance(
                part.own().get("weight"), Own
            ):
                stacked: Any = {name: p.value for name, p in part.own().items()}
                blocks.append(
                    Block(stacked["weight"], stacked.get("bias"), False, None)
                )
            case nn.ReLU() if type(part) is nn.ReLU and blocks and not blocks[-1].relu:
                blocks[-1] = blocks[-1]._replace(relu=True)
            case MemberDropout() if (
                blocks and blocks[-1].relu and not blocks[-1].dropout
            ):
                blocks[-1] = blocks[-1]._replace(dropout=part)
            case _:
                return None
    return blocks if blocks and not blocks[-1].relu else None


class ChainStep:
    """Forward, backward and update of all members of a multi-layer perceptron, written out.

    With SGD the update is taken inside the product that computes the gradient, W <- (1 - lr wd) W - lr g^T h: at width
    x16 the weights of ten members leave the cache, and writing the gradient, reading it back and reading and writing
    the weights would cost as much as the products. With momentum the product accumulates into the velocity, for Adam it
    writes the gradient. Dropout's 1 / (1 - p) and the loss's 1 / batch are folded into the products' alpha.
    """

    def __init__(self, blocks: list[Block], loss: str, optimizer: Optimizer):
        self.blocks, self.loss, self.optimizer = blocks, loss, optimizer
        self.weights = [block.weight for block in blocks]
        self.biases = [block.bias for block in blocks]
        parameters = [p for p in self.weights + self.biases if p is not None]
        self.velocity: dict[Tensor, Tensor] = {}
        self.adam: torch.optim.Optimizer | None = None
        if optimizer.name != "sgd":
            self.adam = _torch_optimizer(optimizer, parameters)
            for p in parameters:
                p.grad = torch.zeros_like(p)
        elif optimizer.momentum:
            self.velocity.update({p: torch.zeros_like(p) for p in parameters})
        self.memory: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def __call__(
        self, x: Tensor, labels: Tensor, lr: float
    ) -> Float[Tensor, " members"]:
        members, batch = x.shape[:2]
        h, scale = x.flatten(2), 1.0  # the true activation is scale * h
        inputs = []
        for i, (weight, bias, relu, dropout) in enumerate(self.blocks):
            inputs.append((h, scale))
            z = self._buffer(i, members, batch, weight)
            if bias is None:
                h = torch.baddbmm(z, h, weight.mT, beta=0, alpha=scale, out=z)
            else:
                h = torch.baddbmm(bias.unsqueeze(1), h, weight.mT, alpha=scale, out=z)
            scale = 1.0
            if relu:
                h.relu_()
            if dropout is not None and dropout.p:
                h.mul_(dropout.keep_mask(h))
                scale = 1 / (1 - dropout.p)
        values, g, factor = self._output_gradient(
            h, labels
        )  # the true gradient is factor * g
        for i in reversed(range(len(self.blocks))):
            h, scale = inputs[i]
            before = (
                torch.bmm(g, self.weights[i]) if i else None
            )  # before the weights move
            self._update(self.weights[i], g.mT, h, factor * scale, lr)
            if (bias := self.biases[i]) is not None:
                self._update(bias, g.mT, None, factor, lr)
            if before is not None:
                g = before
                if (
                    self.blocks[i - 1].relu
                ):  # h = ReLU(z) * mask is positive where the unit was active and kept
                    torch.ops.aten.threshold_backward.grad_input(g, h, 0, grad_input=g)
                factor *= scale
        if self.adam is not None:
            _set_lr(self.adam, lr)
            self.adam.step()
        return values

    def _update(
        self, parameter: Tensor, g: Tensor, h: Tensor | None, factor: float, lr: float
    ) -> None:
        """One step on a weight from g [members, out, batch] and h [members, batch, in], or on a bias (h is None).

        For Adam only the gradient is written; torch.optim takes the step.
        """
        if self.adam is not None:
            assert parameter.grad is not None
            if h is None:
                torch.sum(g, -1, out=parameter.grad).mul_(factor)
            else:
                parameter.grad.baddbmm_(g, h, beta=0, alpha=factor)
            return
        momentum, decay = self.optimizer.momentum, self.optimizer.weight_decay
        target = self.velocity[parameter] if momentum else parameter
        keep, alpha = (momentum, factor) if momentum else (1 - lr * decay, -lr * factor)
        if h is None:
            target.mul_(keep).add_(g.sum(-1), alpha=alpha)
        else:
            target.baddbmm_(g, h, beta=keep, alpha=alpha)
        if momentum:
            if decay:
                target.add_(parameter, alpha=decay)
            parameter.add_(target, alpha=-lr)

    def _output_gradient(
        self, outputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, float]:
        """Loss of each member [members], and its gradient as (tensor like outputs, factor)."""
        batch = outputs.shape[1]
        if (
            self.loss == "cross_entropy"
        ):  # classes in front: a softmax over ten of them is four times as fast there
            p = outputs.permute(2, 0, 1).contiguous()
            p -= p.amax(0)
            chosen = p.gather(0, labels[None])[0]
            total = p.exp_().sum(0)
            p /= total
            p.scatter_add_(
                0, labels[None], p.new_full((1, 1, 1), -1.0).expand(1, *labels.shape)
            )
            return (
                total.log_().sub_(chosen).mean(1),
                p.permute(1, 2, 0).contiguous(),
                1 / batch,
            )
        error = outputs - labels.reshape(outputs.shape)
        return (
            error.square().flatten(1).mean(1),
            error,
            2 / math.prod(outputs.shape[1:]),
        )

    def _buffer(self, layer: int, members: int, batch: int, weight: Tensor) -> Tensor:
        """Fresh memory in every step would cost as much as writing to it: the pages have to be mapped again."""
        if (layer, batch) not in self.memory:
            self.memory[layer, batch] = weight.new_empty(
                members, batch, weight.shape[1]
            )
        return self.memory[layer, batch]

    def state(self) -> dict:
        return (
            {"velocity": list(self.velocity.values())}
            if self.adam is None
            else self.adam.state_dict()
        )

    def load(self, state: dict) -> None:
        if self.adam is not None:
            self.adam.load_state_dict(state)
            return
        for mine, saved in zip(self.velocity.values(), state["velocity"], strict=True):
            mine.copy_(saved)


class AutogradStep:
    """Any network, loss and optimiser: gradients by autograd, torch.optim, gradient norms clipped member by member."""

    def __init__(
        self,
        ensemble: Ensemble,
        loss: str | Loss,
        class_weights: Tensor | None,
        optimizer: Optimizer,
    ):
        self.optimizer = _torch_optimizer(
            optimizer, [p for p in ensemble.parameters() if p.requires_grad]
        )
        self.ensemble, self.clip = ensemble, optimizer.clip
        self.shared = ensemble.shared_parameters()
        known = {
            "mse": mean_square,
            "cross_entropy": functools.partial(
                cross_entropy, class_weights=class_weights
            ),
        }
        self.loss = loss if callable(loss) else known[loss]

    def __call__(
        self, x: Tensor, labels: Tensor, lr: float
    ) -> Float[Tensor, " members"]:
        _set_lr(self.optimizer, lr)
        self.optimizer.zero_grad()
        while True:
            try:
                values = self._gradients(x, labels)
                break
            except torch.OutOfMemoryError:
                if not self.ensemble.halve(x):
                    raise
                self.optimizer.zero_grad()
        for (
            p,
            members,
        ) in (
            self.shared.items()
        ):  # these parameters receive the gradient of the members' mean loss
            p.grad = None if p.grad is None else p.grad.div_(members)
        if self.clip is not None:
            _clip_members(self.ensemble, self.shared, self.clip)
        self.optimizer.step()
        return values

    def _gradients(self, x: Tensor, labels: Tensor) -> Float[Tensor, " members"]:
        """The members' losses; a parameter of a member's own receives the gradient of that member's loss."""
        values = []
        for rows in self.ensemble.passes(x):
            value = self.loss(
                self.ensemble.run(x[rows], rows), labels[rows]
            )  # [members of this pass]
            value.sum().backward()
            values.append(value.detach())
        return torch.cat(values)

    def state(self) -> dict:
        return self.optimizer.state_dict()

    def load(self, state: dict) -> None:
        self.optimizer.load_state_dict(state)


def _torch_optimizer(
    optimizer: Optimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    decay = optimizer.weight_decay
    if optimizer.name == "sgd":
        return torch.optim.SGD(
            parameters, 1.0, optimizer.momentum, weight_decay=decay, fused=True
        )
    kind = torch.optim.Adam if optimizer.name == "adam" else torch.optim.AdamW
    return kind(parameters, 1.0, weight_decay=decay, fused=True)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _clip_members(
    ensemble: Ensemble, shared: Collection[nn.Parameter], limit: float
) -> None:
    """Scale every member's gradient to at most `limit` in norm: one member's step never depends on another's.

    The gradient of parameters that members share is a group of its own.
    """
    if shared:
        nn.utils.clip_grad_norm_(shared, limit)
    grads = [
        p.grad for p in ensemble.parameters() if p.grad is not None and p not in shared
    ]  # folded: members first
    if not grads:
        return
    if not isinstance(ensemble, FoldedEnsemble):
        for index in range(ensemble.members):
            nn.utils.clip_grad_norm_(
                [p for p in ensemble.member(index).parameters() if p not in shared],
                limit,
            )
        return
    norms = (
        torch.stack([g.reshape(len(g), -1).square().sum(1) for g in grads])
        .sum(0)
        .sqrt()
    )  # [members]
    scale = (limit / (norms + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(scale.view(-1, *[1] * (g.ndim - 1)))


def cross_entropy(
    logits: Float[Tensor, "members batch classes"],
    labels: Int[Tensor, "members batch"],
    class_weights: Float[Tensor, " classes"] | None = None,
    smoothing: float = 0.0,
) -> Float[Tensor, " members"]:
    """Mean cross-entropy of every member on its own labels, nats; with weights the weighted mean, as in torch.

    smoothing: the share of every label that is spread over all classes alike.
    """
    weight = (
        None
        if class_weights is None
        else class_weights.to(logits.device, torch.float32)
    )
    how = {"weight": weight, "reduction": "none", "label_smoothing": smoothing}
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), **how).view(
        labels.shape
    )
    return each.mean(1) if weight is None else each.sum(1) / weight[labels].sum(1)


def mean_square(outputs: Tensor, targets: Tensor) -> Float[Tensor, " members"]:
    return (outputs - targets.reshape(outputs.shape)).square().flatten(1).mean(1)


def lr_factor(
    schedule: str,
    epochs: int,
    steps_per_epoch: int,
    milestones: tuple[int, ...] | list[int],
    warmup: int,
) -> Callable[[int], float]:
    """step -> factor of the learning rate: linear over `warmup` steps, then the schedule."""
    total = epochs * steps_per_epoch
    if schedule == "step" and not milestones:
        raise ValueError(
            'schedule="step" needs milestones, the epochs at which the learning rate falls to a tenth'
        )
    for epoch in milestones:
        within("a milestone", epoch, "[0, inf)")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "cosine":
            return 0.5 * (
                1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))
            )
        if schedule == "step":
            return 0.1 ** sum(step >= epoch * steps_per_epoch for epoch in milestones)
        return 1.0

    return factor
