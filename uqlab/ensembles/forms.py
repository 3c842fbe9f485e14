"""How members are folded into the inputs of torch's own modules, and what is built.

A form is made for one call. It unfolds inputs [members * batch, ...] into
[members, batch, ...] and says what a linear map, a scale and a shift are there, so that
a `MemberParameter` serves linear layers and convolutions alike. Modules of other
classes, and subclasses that may do more, have no form and run in turn.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Building a weight costs so much of the multiply-adds that it takes, because it is also
# written and read: from .6 to 2 were measured at widths 64 to 768 on two kinds of CPU.
BUILDING = 1.4


def saves(parameter: Any, rows: int) -> bool:
    """Return whether `product` takes less arithmetic than to build every weight.

    A backward pass needs a gradient by the inputs, and another by what is trained: by
    the members' own tensors in a product, by the whole weight if it is built. Four
    members of rank 8, sixteen images, forward and backward, two cores, product and
    built in ms: 16 -> 96 channels at 48 x 48: 140, 47; 96 -> 24 at 24 x 24: 22, 13;
    144 -> 40 at 12 x 12: 5.4, 6.0; 240 -> 80 at 6 x 6: 3.0, 4.5; 672 -> 192 at 3 x 3:
    3.6, 7.2. The rule agrees with all of them.

    Parameters
    ----------
    parameter : MemberParameter
        It says what its product costs.
    rows : int
        How many rows of inputs, or places of maps, every member has.
    """
    if parameter.product is None:
        return False
    frozen, trained = parameter.frozen_work, parameter.own_work
    whole, passes = parameter.shape.numel(), 1
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameter.parameters()):
        frozen, trained, passes = 2 * frozen, 3 * trained, 3
    built = passes * whole * (BUILDING * parameter.depth + rows)
    return rows * (frozen + trained) <= built


class Form:
    """One call of a module for the members that are in the pass."""

    def __init__(self, unit: Any, x: Tensor):
        self.unit = unit
        self.inner = unit.inner
        self.active = unit.active
        self.parameters = unit.of_members()
        self.count = unit.count(x)

    @classmethod
    def takes(cls, inner: Any, names: Collection[str]) -> bool:
        """Return whether these parameters may be the members' own."""
        return True

    def seen(self, name: str) -> Any:
        """Return what the members in the pass see [members or 1, ...], or None."""
        parameter = self.parameters.get(name)
        if parameter is not None:
            return parameter.weights(self.active)
        shared = getattr(self.inner, name)
        return None if shared is None else shared[None]

    def output(self, x: Tensor) -> Tensor:
        """Return the module's output for x [members * batch, ...]."""
        raise NotImplementedError


class Linear(Form):
    """nn.Linear on [members * batch, ..., features]: a weight and a bias.

    Inside, x is [members, batch, ...], with the features in the last axis of a linear
    layer and in the third of a convolution.
    """

    mixes = True  # every input reaches every output: a weight is one matrix
    places = 0  # axes after the features

    def __init__(self, unit: Any, x: Tensor):
        super().__init__(unit, x)
        self.bias = self.seen("bias")

    def output(self, x):
        """Return the module's output; all rows of a member are one matrix."""
        y = self.product(x.reshape(self.count, -1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])  # an expert may have no rows at all

    def product(self, x: Tensor) -> Tensor:
        """Return the output for x in the way that takes less arithmetic."""
        parameter = self.parameters.get("weight")
        if parameter is None:
            y = self.shared(x, self.inner.weight)
        elif (self.mixes or not parameter.low_rank) and saves(parameter, self.rows(x)):
            y = parameter.product(x, self, self.active)
        else:
            return self.built(x, parameter.built(self.active))
        return y if self.bias is None else y + self.along(self.bias)

    def rows(self, x: Tensor) -> int:
        """Return how many rows, or places of maps, each member has."""
        return x.shape[1]

    def along(self, factor: Tensor) -> Tensor:
        """Return a factor [members, features] shaped as inputs and outputs are."""
        return factor.view(len(factor), 1, -1, *[1] * self.places)

    def scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return x with features times `factor` [members, features]."""
        return x * self.along(factor)

    def shared(self, x: Tensor, weight: Tensor, biased: bool = False) -> Tensor:
        """Multiply by a weight that all members share.

        With `biased` the bias is added here, if they share it too.
        """
        bias = None
        if biased and self.bias is not None and "bias" not in self.parameters:
            bias, self.bias = self.bias[0], None
        return self.multiplied(x, weight, bias)

    def multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by one weight and add one bias."""
        return F.linear(x, weight, bias)

    def apart(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply by a weight of each member's own [members, features, width]."""
        return torch.bmm(x, weight.mT)

    def mixed(
        self, x: Tensor, weight: Tensor, onto: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Multiply each row or place by `weight` [members or 1, out, features].

        With `onto` the product, times `scale`, is added to it.
        """
        if onto is not None:  # in a lower precision the weight takes that of the sum
            factors = x.to(onto.dtype), weight.mT.to(onto.dtype)
            return onto.baddbmm_(*factors, alpha=scale)
        return F.linear(x, weight[0]) if len(weight) == 1 else torch.bmm(x, weight.mT)

    def built(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply by every member's weight [members, ...] and add the bias."""
        if self.bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(self.bias[:, None], x, weight.mT)


class Convolution(Linear):
    """nn.Conv1d, 2d and 3d on [members * batch, channels, ...]."""

    def __init__(self, unit: Any, x: Tensor):
        super().__init__(unit, x)
        layer = self.inner
        self.mixes = layer.groups == 1
        self.places = len(layer.kernel_size)
        plain = {*layer.kernel_size, *layer.stride} == {1}
        unpadded = layer.padding in ("same", "valid", (0,) * self.places)
        self.pointwise = plain and self.mixes and unpadded

    def output(self, x):
        """Return the module's output for maps."""
        return self.product(x.unflatten(0, (self.count, -1))).flatten(0, 1)

    def rows(self, x):
        """Return how many places of maps each member has."""
        return x[:, :, 0].numel() // (self.count * math.prod(self.inner.stride))

    def multiplied(self, x, weight, bias):
        """Convolve the maps of all members with one kernel."""
        y = self.inner._conv_forward(x.flatten(0, 1), self._kernel(weight), bias)
        return y.unflatten(0, (self.count, -1))

    def apart(self, x, weight):
        """Convolve every member's maps with a matrix of patches of its own."""
        if self.pointwise:
            return self.mixed(x, weight)
        return self._each(x, map(self._kernel, weight), None)

    def mixed(self, x, weight, onto=None, scale=1.0):
        """Multiply each place by a weight of each member's own or of all."""
        y = (weight[:, None] @ x.flatten(3)).unflatten(3, x.shape[3:])
        return y if onto is None else torch.add(onto, y, alpha=scale)

    def built(self, x, weight):
        """Convolve every member's maps with its kernel and add the bias."""
        return self._each(x, weight, self.bias)

    def _each(self, x, kernels, bias):
        """Convolve every member's maps in turn; one member alone is not copied."""
        none = [None] * self.count
        biases = none if bias is None else bias.expand(self.count, -1)
        maps = list(map(self.inner._conv_forward, x, kernels, biases))
        return maps[0][None] if self.count == 1 else torch.stack(maps)

    def _kernel(self, weight):
        """Return a matrix of patches [out, width] as a kernel."""
        return weight.view(len(weight), -1, *self.inner.kernel_size)


class LayerNorm(Form):
    """nn.LayerNorm: all rows are normalised at once, then scaled and shifted."""

    def output(self, x):
        """Return the module's output."""
        shape = self.inner.normalized_shape
        normalised = F.layer_norm(x, shape, eps=self.inner.eps)
        rows = normalised.view(self.count, -1, math.prod(shape))
        return _affine(rows, self.seen("weight"), self.seen("bias")).view(x.shape)


class BatchNorm(Form):
    """nn.BatchNorm1d, 2d and 3d with statistics of each member's own.

    In training mode a member is normalised by its own rows of the batch, so no member
    depends on another.
    """

    @classmethod
    def takes(cls, inner, names):
        """Return whether the statistics are the members' own."""
        own = {"running_mean", "running_var"} <= set(names)
        return own and inner.momentum is not None

    def output(self, x):
        """Return the module's output."""
        mean, var = self.seen("running_mean"), self.seen("running_var")
        weight, bias = self.seen("weight"), self.seen("bias")
        rows = x.unflatten(0, (self.count, -1))  # [members, batch, features, ...]
        if self.unit.training:
            return self._by_batch(rows, mean, var, weight, bias)
        scale = (var + self.inner.eps).rsqrt() * (1 if weight is None else weight)
        shift = (0 if bias is None else bias) - mean * scale
        return _affine(rows, scale, shift).flatten(0, 1)

    def _by_batch(self, rows, mean, var, weight, bias):
        """Normalise by the statistics of the batch, and move the running ones."""
        if "num_batches_tracked" in self.parameters:
            self.parameters["num_batches_tracked"].value[self.active] += 1
        if weight is not None:
            weight, bias = (p.expand(self.count, -1).flatten() for p in (weight, bias))
        side_by_side = rows.transpose(0, 1).flatten(1, 2)  # [batch, members * features]
        settings = (weight, bias, True, self.inner.momentum, self.inner.eps)
        y = F.batch_norm(side_by_side, mean.view(-1), var.view(-1), *settings)
        return y.unflatten(1, (self.count, -1)).transpose(0, 1).flatten(0, 1)


def _affine(rows, scale, shift):
    """Scale and shift the features of rows [members, batch, features, ...]."""
    for axis in 1, *range(3, rows.ndim):
        scale = scale.unsqueeze(axis)
        shift = None if shift is None else shift.unsqueeze(axis)
    return rows * scale if shift is None else torch.addcmul(shift, rows, scale)


FORMS: dict[type[nn.Module], type[Form]] = {
    nn.Linear: Linear,
    nn.Conv1d: Convolution,
    nn.Conv2d: Convolution,
    nn.Conv3d: Convolution,
    nn.LayerNorm: LayerNorm,
    nn.BatchNorm1d: BatchNorm,
    nn.BatchNorm2d: BatchNorm,
    nn.BatchNorm3d: BatchNorm,
}
