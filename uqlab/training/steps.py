"""One training step of an ensemble: by autograd, or written out for perceptrons."""

import re
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from uqlab.core.modules import rows_of, trainable
from uqlab.ensembles import Ensemble, Own, member_seed
from uqlab.training.losses import Loss, cross_entropy, mean_square
from uqlab.training.optimisation import Optimisation, clip_members


def make_step(ensemble, loss, settings: Optimisation, precision, flat):
    """Return the fastest exact step; `flat`: the inputs are [samples, features]."""
    limited = settings.max_grad_norm is not None or precision != "float32"
    plain = settings.by_name and not limited
    layers = linear_chain(ensemble, flat) if plain else []
    if layers:
        return ChainStep(layers, ensemble.member_ids, loss, settings)
    return AutogradStep(ensemble, loss, settings, precision)


BY_BATCH = OneCycleLR, CyclicLR  # which torch moves after every batch


class Step:
    """A step of training, with the optimiser and what belongs to it."""

    # x and labels [members, batch, ...], or [1, batch, ...] of all -> losses [members]
    __call__: Any

    def __init__(self, ids, parameters: list, loss: Loss, settings, precision):
        self.ids, self.loss, self.settings, self.done = ids, loss, settings, 0
        self.optimizer = settings.of(parameters)
        where, scaled = parameters[0].device.type, precision == "float16"
        self.scaler = torch.amp.GradScaler(where, enabled=scaled)
        self.parts = {"optimizer": self.optimizer, "scaler": self.scaler}
        if callable(settings.scheduler):
            self.parts["scheduler"] = scheduler = settings.scheduler(self.optimizer)
            if not hasattr(scheduler, "step"):
                kind = type(scheduler).__name__
                raise TypeError(f"scheduler must return one of torch's, got {kind}")

    def start(self, seed, epoch):
        """Start what is drawn from torch in an epoch, by a network or a data set."""
        torch.manual_seed(member_seed(seed, self.ids[0], "noise", epoch))

    def next(self, epoch, steps):
        """Set the learning rate of the next step; `steps` has the whole run."""
        if not callable(self.settings.scheduler):
            factor = self.settings.factor(self.done, epoch, steps)
            for group in self.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        elif self.done and isinstance(self.parts["scheduler"], BY_BATCH):
            self.parts["scheduler"].step()
        self.done += 1

    def end_epoch(self, losses):
        """Move a scheduler of the user's on."""
        scheduler = self.parts.get("scheduler")
        if scheduler and not isinstance(scheduler, BY_BATCH):
            plateau = isinstance(scheduler, ReduceLROnPlateau)
            scheduler.step(*[losses.mean().item()] * plateau)


class AutogradStep(Step):
    """Any network, loss and optimiser: gradients by autograd, updates by torch.optim.

    A parameter of one member follows the gradient of that member's loss, one that
    members share the gradient of their mean loss.
    """

    def __init__(self, ensemble: Ensemble, loss, settings, precision):
        ids = ensemble.member_ids
        super().__init__(ids, trainable(ensemble), loss, settings, precision)
        self.ensemble = ensemble

    def __call__(self, x, labels):
        """Take one step, and return the members' losses."""
        values = None
        while values is None:
            self.ensemble.zero_grad()  # also what the optimiser was not given
            try:
                values = self._backward(x, labels)
            except torch.OutOfMemoryError:
                if not self.ensemble.halve():
                    raise
        limit = self.settings.max_grad_norm
        if limit is not None:
            self.scaler.unscale_(self.optimizer)
            clip_members(self.ensemble, limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return values

    def _backward(self, x, labels):
        """Add up the gradients, some members at a time where memory asks for it."""
        values = []
        members = self.ensemble.members
        each = len(labels) == members
        x = x if each else rows_of(x, 0)
        labels = labels.expand(members, *labels.shape[1:])
        for rows in self.ensemble.passes(x, each):
            some = rows_of(x, rows) if each else x
            value = self.loss(self.ensemble.run(some, rows, each), labels[rows])
            self.scaler.scale(value.sum()).backward()
            values.append(value.detach())
        return torch.cat(values)


class Layer(NamedTuple):
    """A linear layer of all members and what follows it before the next one."""

    weight: nn.Parameter  # [members, out, in]
    bias: nn.Parameter | None  # [members, out]
    relu: bool = False
    dropout: float | None = None


LETTERS = {nn.Linear: "L", nn.ReLU: "R", nn.Dropout: "D"}


def linear_chain(ensemble: Ensemble, flat: bool) -> list[Layer]:
    """Return the layers of a plain Sequential of linear [ReLU [dropout]], each once.

    The list is empty for any other network, and where a weight is frozen or shared.
    """
    own: dict[str, Any] = {
        name: part.stacked()["value"]
        for name, part in ensemble.seen.items()
        if isinstance(part.kind, Own) and part.trained
    }
    names = {module: name for name, module in ensemble.network.named_modules()}
    layers = []
    for module in _modules(ensemble.network, flat):
        if isinstance(module, nn.Linear):
            weight, bias = (own.get(f"{names[module]}.{n}") for n in ("weight", "bias"))
            if weight is None or (bias is None) != (module.bias is None):
                return []
            layers.append(Layer(weight, bias))
        elif isinstance(module, nn.ReLU):
            layers[-1] = layers[-1]._replace(relu=True)
        else:
            layers[-1] = layers[-1]._replace(dropout=module.p)
    return layers


def _modules(network, flat):
    """Return the modules of a plain Sequential that see [samples, features], or []."""
    modules = [*network] if type(network) is nn.Sequential else []
    match modules:
        case [nn.Flatten(start_dim=1, end_dim=-1), *rest]:
            modules, flat = rest, True
    letters = "".join(LETTERS.get(type(module), "?") for module in modules)
    hooked = any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
        for m in network.modules()
    )
    once = len({*modules}) == len(modules) and not hooked
    return modules if flat and once and re.fullmatch("(L(RD?)?)*L", letters) else []


def keep_mask(x, p, generators):
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
    """Forward, backward and update of all members of a multi-layer perceptron.

    With SGD the update is taken inside the product that computes the gradient,
    W <- (1 - lr decay) W - lr g^T h: wide weights leave the cache, and writing the
    gradient and reading it back would cost as much as the products. With momentum the
    product is added to the velocity. For Adam it writes the gradient.
    """

    def __init__(self, layers: list[Layer], ids, loss, settings):
        parameters = []
        for layer in layers:
            parameters += [p for p in layer[:2] if p is not None]
        super().__init__(ids, parameters, loss, settings, "float32")
        self.layers = layers
        self.adam = settings.optimizer != "sgd"
        for p in parameters:
            if self.adam:
                p.grad = torch.zeros_like(p)
            elif settings.momentum:
                self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)

    def start(self, seed, epoch):
        """Start the noise of an epoch, each member's from generators of its own."""
        super().start(seed, epoch)
        device = self.layers[0].weight.device
        dropping = [layer for layer in self.layers if layer.dropout is not None]
        self.noise = {}
        for number, layer in enumerate(dropping):
            seeds = [member_seed(seed, m, "dropout", number, epoch) for m in self.ids]
            of_layer = [torch.Generator(device).manual_seed(s) for s in seeds]
            self.noise[id(layer)] = of_layer

    @torch.no_grad()
    def __call__(self, x, labels):
        """Take one step, and return the members' losses."""
        members = len(self.ids)
        labels = labels.expand(members, *labels.shape[1:])
        h, inputs = self._forward(x.flatten(2).expand(members, -1, -1))
        values, g = self._output_gradient(h, labels)
        self._backward(g, inputs, self.optimizer.param_groups[0]["lr"])
        if self.adam:
            self.optimizer.step()
        return values

    def _forward(self, h):
        """Return the outputs, and every layer's input as (h, scale): scale * h."""
        scale = 1.0
        inputs = []
        for layer in self.layers:
            weight, bias, relu, dropout = layer
            inputs.append((h, scale))
            if bias is None:
                h = scale * (h @ weight.mT)
            else:
                h = torch.baddbmm(bias.unsqueeze(1), h, weight.mT, alpha=scale)
            scale = 1.0
            if relu:
                h.relu_()
            if dropout:
                h.mul_(keep_mask(h, dropout, self.noise[id(layer)]))
                scale = 1 / (1 - dropout)
        return h, inputs

    def _backward(self, g, inputs, lr):
        """Update all layers, from the gradient of the outputs on down."""
        factor = 1.0  # the gradient is factor * g
        for number in reversed(range(len(self.layers))):
            weight, bias, *_ = self.layers[number]
            h, scale = inputs[number]
            below = g @ weight if number else g  # before the weight moves
            self._update(weight, g.mT, h, factor * scale, lr)
            if bias is not None:
                self._update(bias, g.mT, None, factor, lr)
            g = below
            factor *= scale
            if number and self.layers[number - 1].relu:
                # h > 0 where the unit was active, and not dropped.
                torch.ops.aten.threshold_backward.grad_input(g, h, 0, grad_input=g)

    def _output_gradient(self, outputs, labels):
        """Return the members' losses and the gradient of their sum."""
        if self.loss is cross_entropy:  # a third of the time, with classes in front
            log_p = outputs.permute(2, 0, 1).contiguous().log_softmax(0)
            values = -log_p.gather(0, labels[None])[0].mean(1)
            g = log_p.exp_().scatter_(0, labels[None], -1.0, reduce="add")
            return values, g.div_(outputs.shape[1]).permute(1, 2, 0).contiguous()
        if self.loss is mean_square:
            error = outputs - labels.reshape(outputs.shape)
            values = error.square().flatten(1).mean(1)
            return values, error.mul_(2 / error[0].numel())
        with torch.enable_grad():
            outputs = outputs.detach().requires_grad_()
            values = self.loss(outputs, labels)
            (g,) = torch.autograd.grad(values.sum(), outputs)
        return values.detach(), g

    def _update(self, p, g, h, factor, lr):
        """Follow the gradient, factor * g @ h of a weight and factor * g of a bias."""
        momentum = self.settings.momentum
        decay = self.settings.weight_decay
        moving = momentum and not self.adam
        target: Any
        if self.adam:
            target = p.grad
            keep = 0.0
        elif moving:
            target = self.optimizer.state[p]["momentum_buffer"]
            keep = momentum
        else:
            target = p
            keep = 1 - lr * decay
            factor = -lr * factor
        if h is None:
            target.mul_(keep).add_(g.sum(-1), alpha=factor)
        else:
            target.baddbmm_(g, h, beta=keep, alpha=factor)
        if moving:
            target.add_(p, alpha=decay)
            p.add_(target, alpha=-lr)
