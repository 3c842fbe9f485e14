"""One training step of an ensemble: by autograd, or written out for perceptrons."""

import re
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from uqlab.core.modules import rows_of, trainable
from uqlab.ensembles import Ensemble, Own, member_seed
from uqlab.training.losses import Loss
from uqlab.training.optimisation import Optimisation, clip_members


def make_step(
    ensemble: Ensemble, loss: Loss, settings: Optimisation, precision: str, flat: bool
):
    """Return the fastest exact step; `flat`: the inputs are [samples, features]."""
    layers = linear_chain(ensemble, flat) if precision == "float32" else []
    if layers:
        return ChainStep(ensemble, loss, settings, layers)
    return Step(ensemble, loss, settings, precision)


BY_BATCH = OneCycleLR, CyclicLR  # which torch moves after every batch


class Step:
    """Any network, loss and optimiser: gradients by autograd, updates by torch.optim.

    A parameter of one member follows the gradient of that member's loss, one that
    members share the gradient of their mean loss.
    """

    def __init__(
        self, ensemble: Ensemble, loss: Loss, settings: Optimisation, precision: str
    ):
        self.ensemble, self.loss, self.settings, self.done = ensemble, loss, settings, 0
        parameters = trainable(ensemble)
        self.optimizer = settings.of(parameters)
        where, scaled = parameters[0].device.type, precision == "float16"
        self.scaler = torch.amp.GradScaler(where, enabled=scaled)
        self.parts = {"optimizer": self.optimizer, "scaler": self.scaler}
        if callable(settings.scheduler):
            self.parts["scheduler"] = settings.scheduler(self.optimizer)

    def state_dict(self):
        """Return what the next steps depend on."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {"done": self.done, **parts}

    def load_state_dict(self, state):
        """Go on from there."""
        self.done = state["done"]
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def start(self, seed, epoch):
        """Start what is drawn from torch in an epoch, by a network or a data set."""
        first = self.ensemble.member_ids[0]
        torch.manual_seed(member_seed(seed, first, "noise", epoch))

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
        if callable(self.settings.scheduler):
            scheduler = self.parts["scheduler"]
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(losses.mean().item())
            elif not isinstance(scheduler, BY_BATCH):
                scheduler.step()

    def __call__(self, x, labels):
        """Take one step, and return the members' losses."""
        values = self.gradients(x, labels)
        if self.settings.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_members(self.ensemble, self.settings.max_grad_norm)
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
    own = {
        name: part.kind.value
        for name, part in ensemble.seen.items()
        if isinstance(part.kind, Own) and part.trained
    }
    layers = []
    for name, module in _chained(ensemble.network, flat).items():
        if isinstance(module, nn.ReLU):
            layers[-1] = layers[-1]._replace(relu=True)
        elif isinstance(module, nn.Dropout):
            layers[-1] = layers[-1]._replace(dropout=module.p)
        else:
            weight, bias = (own.get(f"{name}.{n}") for n in ("weight", "bias"))
            if weight is None or (bias is None) != (module.bias is None):
                return []
            layers.append(Layer(weight, bias))
    return layers


def _chained(network, flat):
    """Return by name the modules of a plain Sequential that see [samples, features]."""
    if type(network) is not nn.Sequential or len({*network}) < len(network):
        return {}
    named = dict(network.named_children())
    match [*network]:
        case [nn.Flatten(start_dim=1, end_dim=-1), *_]:
            del named[next(iter(named))]
            flat = True
    letters = "".join(LETTERS.get(type(module), "?") for module in named.values())
    hooked = any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
        for m in network.modules()
    )
    plain = flat and not hooked and re.fullmatch("(L(RD?)?)*L", letters)
    return named if plain else {}


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
    """Gradients of all members of a multi-layer perceptron, written out."""

    def __init__(self, ensemble, loss, settings, layers):
        super().__init__(ensemble, loss, settings, "float32")
        self.layers = layers
        for p in trainable(ensemble):
            p.grad = torch.zeros_like(p)

    def start(self, seed, epoch):
        """Start the noise of an epoch, each member's from its own generators."""
        super().start(seed, epoch)
        device = self.layers[0].weight.device
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
        values = self.loss(outputs, labels.expand(members, *labels.shape[1:]))
        (g,) = torch.autograd.grad(values.sum(), outputs)
        with torch.no_grad():
            self._back(g, inputs)
        return values.detach()

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

    def _back(self, g, inputs):
        """Compute the gradients of all layers, from that of the outputs on down."""
        factor = 1.0  # the gradient is factor * g
        for number in reversed(range(len(self.layers))):
            weight, bias, *_ = self.layers[number]
            h, scale = inputs[number]
            weight.grad.baddbmm_(g.mT, h, beta=0, alpha=factor * scale)
            if bias is not None:
                torch.sum(g, 1, out=bias.grad).mul_(factor)
            if number:
                g = g @ weight
                factor *= scale
                if self.layers[number - 1].relu:
                    # h > 0 where the unit was active, and not dropped.
                    torch.ops.aten.threshold_backward.grad_input(g, h, 0, grad_input=g)
