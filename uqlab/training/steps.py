"""How weights follow their gradients: optimiser and steps."""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from uqlab.core.checks import at_least, first_tensor, one_of, positive, within
from uqlab.core.modules import rows_of, trainable
from uqlab.ensembles import Ensemble, Own, member_seed

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip
BY_BATCH = OneCycleLR, CyclicLR  # which torch moves after every batch
MADE = "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"


def check_settings(task: Any) -> None:
    """Raise for settings of optimiser and scheduler that `fit` does not take."""
    if task.lr is not None:
        positive("lr", task.lr)
    if task.max_grad_norm is not None:
        within("max_grad_norm", task.max_grad_norm, "(0, inf]")
    at_least("warmup", task.warmup, 0)
    for epoch in task.milestones:
        at_least("a milestone", epoch, 0)
    if not callable(task.optimizer):
        own = "; or what makes one, optimizer=torch.optim.Adam, lr=0.001"
        one_of("optimizer", task.optimizer, OPTIMIZERS, own)
    elif task.weight_decay or task.momentum:
        raise ValueError(
            "weight_decay and momentum are of the optimisers by name; give them to "
            "yours: lambda parameters: torch.optim.AdamW(parameters, ...)"
        )
    if not callable(task.scheduler):
        names = None, "constant", "cosine", "step"
        one_of("scheduler", task.scheduler, names, f"; or what makes one, {MADE}")
    elif task.warmup:
        raise ValueError("warmup is of the schedulers by name; put it into yours")
    if task.scheduler == "step" and not task.milestones:
        raise ValueError('scheduler="step" needs milestones, in epochs')


def _rate(task: Any, step: int, epoch: int) -> float:
    """Return the learning rate of a step of the run, over the highest."""
    if step < task.warmup:
        return (step + 1) / task.warmup
    if task.scheduler == "step":
        return 0.1 ** sum(epoch >= milestone for milestone in task.milestones)
    if task.scheduler != "cosine":
        return 1.0
    after = max(1, task.steps - task.warmup)
    return 0.5 * (1 + math.cos(math.pi * (step - task.warmup) / after))


def _optimizer(task: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimiser of the settings."""
    how: dict[str, Any] = {} if task.lr is None else {"lr": task.lr}
    if isinstance(task.optimizer, str):
        # On a CPU torch's fused SGD leaves most half-precision weights as they are.
        fused = all(p.is_floating_point() and p.dtype.itemsize > 2 for p in parameters)
        how |= {"weight_decay": task.weight_decay, "fused": fused}
        if task.optimizer == "sgd":
            how["momentum"] = task.momentum
        return OPTIMIZERS[task.optimizer](parameters, **how)
    if how and not isinstance(task.optimizer, type):
        raise ValueError(
            "lr is of the optimisers by name and of classes; a function of the "
            "parameters sets its own"
        )
    made = task.optimizer(parameters, **how)
    held = {p for group in made.param_groups for p in group["params"]}
    if not held <= {*parameters} or isinstance(made, torch.optim.LBFGS):
        raise ValueError(
            "optimizer must hold parameters that it is given, and no others, and step "
            "once a batch, unlike LBFGS: "
            "lambda parameters: torch.optim.AdamW(parameters, ...)"
        )
    return made


class Step:
    """Any network, loss and optimiser: gradients by autograd, updates by torch.optim.

    A parameter of one member follows the gradient of that member's loss, one that
    members share the gradient of their mean loss.
    """

    def __init__(self, ensemble: Ensemble, task: Any):
        self.ensemble, self.task, self.done = ensemble, task, 0
        self.optimizer = _optimizer(task, trainable(ensemble))
        scaled = task.precision == "float16"
        self.scaler = torch.amp.GradScaler(task.device.type, enabled=scaled)
        self.parts = {"optimizer": self.optimizer, "scaler": self.scaler}
        if callable(task.scheduler):
            try:
                self.parts["scheduler"] = task.scheduler(self.optimizer)
            except TypeError as error:
                error.add_note(f"scheduler is called with the optimiser alone: {MADE}")
                raise

    def state_dict(self):
        """Return what the next steps depend on."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {"done": self.done, **parts}

    def load_state_dict(self, state):
        """Go on from there."""
        self.done = state["done"]
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def start(self, epoch):
        """Start what is drawn from torch in an epoch, by a network or a data set."""
        self.epoch, first = epoch, self.ensemble.member_ids[0]
        torch.manual_seed(member_seed(self.task.seed, first, "noise", epoch))

    def end_epoch(self, losses):
        """Move a scheduler of the user's on."""
        scheduler = self.parts.get("scheduler")
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(losses.mean().item())
        elif scheduler and not isinstance(scheduler, BY_BATCH):
            scheduler.step()

    def __call__(self, x, labels):
        """Take the run's next step, and return the members' losses."""
        scheduler = self.parts.get("scheduler")
        if not scheduler:
            factor = _rate(self.task, self.done, self.epoch)
            for group in self.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        elif self.done and isinstance(scheduler, BY_BATCH):
            scheduler.step()
        self.done += 1
        values = self.gradients(x, labels)
        if self.task.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            _clip(self.ensemble, self.task.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return values

    def gradients(self, x, labels):
        """Compute gradients, fewer members at a time where memory runs out."""
        while True:
            self.ensemble.zero_grad()  # also what the optimiser was not given
            try:
                return self._backward(x, labels)
            except torch.OutOfMemoryError:
                if not self.ensemble.halve():
                    raise

    def _backward(self, x, labels):
        values = []
        members = self.ensemble.members
        each = len(labels) == members  # else all see one batch; of one member both hold
        x = x if each else rows_of(x, 0)
        labels = labels.expand(members, *labels.shape[1:])
        for rows in self.ensemble.passes(x, each):
            some = rows_of(x, rows) if each else x
            value = self.task.loss(self.ensemble.run(some, rows, each), labels[rows])
            self.scaler.scale(value.sum()).backward()
            values.append(value.detach())
        return torch.cat(values)


def _clip(ensemble: Any, limit: float) -> None:
    """Scale each member's gradient to a norm of at most `limit`, apart from others'.

    The gradient of the parameters that members share is a separate group.
    """
    shared = ensemble.shared_parameters()
    nn.utils.clip_grad_norm_(shared, limit)
    shared = set(shared)
    if not ensemble.seen:  # networks of the members' own, or one network
        for network in ensemble.network.children():
            nn.utils.clip_grad_norm_({*network.parameters()} - shared, limit)
        return
    own = [p for p in trainable(ensemble) if p not in shared]
    grads: list = [p.grad for p in own if p.grad is not None]  # [members, ...] each
    squares = [g.reshape(len(g), -1).square().sum(1) for g in grads]
    for g in grads:
        norms = torch.stack(squares).sum(0).sqrt()
        scale = (limit / (norms + 1e-6)).clamp(max=1)
        g.mul_(scale.view(-1, *[1] * (g.ndim - 1)))


# Perceptrons --------------------------------------------------------------------------


@dataclass
class _Layer:
    """A linear layer of all members and what follows it before the next one."""

    weight: nn.Parameter  # [members, out, in]
    bias: nn.Parameter  # [members, out]
    relu: bool = False
    dropout: float | None = None


_LETTERS = {nn.Flatten: "F", nn.Linear: "L", nn.ReLU: "R", nn.Dropout: "D"}


def linear_chain(ensemble: Ensemble, flat: bool) -> list[_Layer]:
    """Return the layers of a plain Sequential of linear [ReLU [dropout]], each once.

    The list is empty for any other network, without biases, where a weight is frozen or
    shared, and unless the first layer is given [samples, features], as it is if inputs
    are `flat`.
    """
    network = ensemble.network
    if type(network) is not nn.Sequential or not _is_chain(network, flat):
        return []
    own = {
        name: part.kind.value
        for name, part in ensemble.seen.items()
        if isinstance(part.kind, Own) and part.trained
    }
    layers = []
    for name, module in network.named_children():
        if isinstance(module, nn.ReLU):
            layers[-1].relu = True
        elif isinstance(module, nn.Dropout):
            layers[-1].dropout = module.p
        elif isinstance(module, nn.Linear):
            weight, bias = (own.get(f"{name}.{n}") for n in ("weight", "bias"))
            if weight is None or bias is None:
                return []
            layers.append(_Layer(weight, bias))
    return layers


def _is_chain(network, flat):
    """Whether a Sequential's modules are in such an order, once, without hooks."""
    letters = "".join(_LETTERS.get(type(part), "?") for part in network)
    if not re.fullmatch("F?(L(RD?)?)*L", letters):
        return False
    hooked = any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
        for m in network.modules()
    )
    flattened = isinstance(network[0], nn.Flatten) and network[0].start_dim == 1
    finite = all(getattr(part, "p", 0) < 1 for part in network)  # scales of dropout
    once = finite and len({*network}) == len(network)
    return (flat or flattened) and not hooked and once


def _keep_mask(x, p, generators):
    """Return 0 where dropped and 1 where kept, like x [members, ...].

    Sixteen random bits an element (p to 1/65536) are 5 times as fast as bernoulli_ on a
    CPU, and a comparison written as float 4 times as fast as a boolean mask.
    """
    count = x.numel() // len(generators)
    shape = len(generators), -(-count // 4)
    words = torch.empty(shape, dtype=torch.int64, device=x.device)
    for row, generator in zip(words, generators, strict=True):
        row.random_(-(2**63), None, generator=generator)
    bits = words.view(torch.int16)[:, :count].reshape(x.shape)
    return torch.ge(bits, round(p * 65536) - 32768, out=torch.empty_like(x))


class ChainStep(Step):
    """Gradients of all members of a multi-layer perceptron, written out.

    It takes half of autograd's time at the widths of lesson 03 (512 and 256), and two
    thirds at 64.
    """

    def __init__(self, ensemble, task, layers):
        super().__init__(ensemble, task)
        self.layers = layers
        for p in trainable(ensemble):
            p.grad = torch.zeros_like(p)

    def start(self, epoch):
        """Start the noise of an epoch, each member's from its own generators."""
        super().start(epoch)
        seed, device = self.task.seed, self.task.device
        dropping = [layer for layer in self.layers if layer.dropout is not None]
        self.noise = {}
        for number, layer in enumerate(dropping):
            ids = self.ensemble.member_ids
            seeds = [member_seed(seed, m, "dropout", number, epoch) for m in ids]
            of_layer = [torch.Generator(device).manual_seed(s) for s in seeds]
            self.noise[id(layer)] = of_layer

    def gradients(self, x, labels):
        """Go through all layers and back."""
        members = self.ensemble.members
        with torch.no_grad():
            h = x.flatten(2).expand(members, -1, -1)
            outputs, inputs = self._forward(h)
        outputs.requires_grad_()
        values = self.task.loss(outputs, labels.expand(members, *labels.shape[1:]))
        (g,) = torch.autograd.grad(values.sum(), outputs)
        with torch.no_grad():
            self._back(g, inputs)
        return values.detach()

    def _forward(self, h):
        """Return the outputs, and every layer's input as (h, scale): scale * h."""
        scale = 1.0
        inputs = []
        for layer in self.layers:
            inputs.append((h, scale))
            bias = layer.bias.unsqueeze(1)
            h = torch.baddbmm(bias, h, layer.weight.mT, alpha=scale)
            scale = 1.0
            if layer.relu:
                h.relu_()
            if layer.dropout:
                h.mul_(_keep_mask(h, layer.dropout, self.noise[id(layer)]))
                scale = 1 / (1 - layer.dropout)
        return h, inputs

    def _back(self, g, inputs):
        """Compute the gradients of all layers, from that of the outputs on down."""
        factor = 1.0  # the gradient is factor * g
        for number in reversed(range(len(self.layers))):
            layer, (h, scale) = self.layers[number], inputs[number]
            layer.weight.grad.baddbmm_(g.mT, h, beta=0, alpha=factor * scale)
            torch.sum(g, 1, out=layer.bias.grad).mul_(factor)
            if number:
                g = g @ layer.weight
                factor *= scale
                if self.layers[number - 1].relu:
                    # h > 0 where the unit was active, and not dropped.
                    torch.ops.aten.threshold_backward.grad_input(g, h, 0, grad_input=g)


def make_step(ensemble: Ensemble, task: Any) -> Step:
    """Return the fastest exact step."""
    flat = first_tensor(task.source.two).ndim == 2
    full = task.precision == "float32" or task.device.type == "cpu"
    if layers := linear_chain(ensemble, flat) if full else []:
        return ChainStep(ensemble, task, layers)
    return Step(ensemble, task)
