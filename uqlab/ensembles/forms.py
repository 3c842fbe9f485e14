"""How members are folded into the inputs of torch's own modules, and when which way to compute is taken.

A form is made for one call. It unfolds inputs [members * batch, ...] into [members, batch, ...] and says what a linear
map, a scale and a shift are there, so that a `MemberParameter` serves linear layers and convolutions alike. Modules
of other classes, and subclasses that may do more, have no form and run in turn.
"""

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Building a weight costs so much of the multiply-adds that it takes, because it is also written and read: from .6 to 2
# were measured at widths 64 to 768 on two kinds of CPU.
BUILDING = 1.4


def saves(parameter: Any, weight: torch.Size, rows: int) -> bool:
    """Whether `product` takes less arithmetic than to build every member's weight.

    A backward pass needs a gradient by the inputs, and another by what is trained: by the members' own tensors in a
    product, by the whole weight if it is built. Four members of rank 8, sixteen images, forward and backward, two
    cores, product and built in ms: 16 -> 96 channels at 48 x 48: 140, 47; 96 -> 24 at 24 x 24: 22, 13; 144 -> 40 at
    12 x 12: 5.4, 6.0; 240 -> 80 at 6 x 6: 3.0, 4.5; 672 -> 192 at 3 x 3: 3.6, 7.2. The rule agrees with all of them.

    Parameters
    ----------
    parameter : MemberParameter
        It says what its product costs.
    weight : torch.Size
        Shape of the weight.
    rows : int
        How many rows of inputs, or places of maps, every member has.
    """
    if parameter.product is None:
        return False
    frozen, own = parameter.frozen_work, parameter.own_work
    whole, passes = weight.numel(), 1
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameter.parameters()):
        frozen, own, passes = 2 * frozen, 3 * own, 3
    return rows * (frozen + own) <= passes * whole * (BUILDING * parameter.depth + rows)


class Form:
    """One call of a module for the members that are in the pass."""

    def __init__(self, unit: Any, x: Tensor):
        self.unit, self.inner, self.count = unit, unit.inner, unit.count(x)

    @classmethod
    def takes(cls, inner: Any, names: Collection[str]) -> bool:
        """Whether it can be computed if these parameters are the members' own."""
        return True

    def seen(self, name: str) -> Tensor | None:
        """Return what the members in the pass see [members, ...], or [1, ...] if all see the same."""
        parameter = self.unit.own().get(name)
        if parameter is not None:
            return parameter.weights(self.unit.active)
        shared = getattr(self.inner, name)
        return None if shared is None else shared[None]

    def output(self, x: Tensor) -> Tensor:
        """Return the module's output for x [members * batch, ...]."""
        raise NotImplementedError


class Product(Form):
    """A module that multiplies by a weight and adds a bias; x is [members, batch, ...] from here on."""

    mixes = True  # every input reaches every output: a weight is one matrix

    def __init__(self, unit: Any, x: Tensor):
        super().__init__(unit, x)
        self.bias = self.seen("bias")

    def rows(self, x: Tensor) -> int:
        """Return how many rows each member has."""
        raise NotImplementedError

    def scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return x with features times `factor` [members, features]."""
        raise NotImplementedError

    def shared(self, x: Tensor, weight: Tensor, biased: bool = False) -> Tensor:
        """Multiply by a weight that all members share; with `biased` add the bias here if they share it too."""
        bias = None
        if biased and self.bias is not None and "bias" not in self.unit.names:
            bias, self.bias = self.bias[0], None
        return self.multiplied(x, weight, bias)

    def multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def own(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply by a weight of each member's own [members, features, width]."""
        raise NotImplementedError

    def mixed(
        self, x: Tensor, weight: Tensor, onto: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Multiply each row or place by `weight` [members or 1, out, features], times `scale`, and add it to `onto`."""
        raise NotImplementedError

    def built(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply by every member's weight [members, ...] and add the bias."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """Return the output for x [members, batch, ...] in the way that takes less arithmetic."""
        parameter = self.unit.own().get("weight")
        if parameter is None:
            y = self.shared(x, self.inner.weight)
        elif (self.mixes or not parameter.low_rank) and saves(
            parameter, parameter.shape, self.rows(x)
        ):
            y = parameter.product(x, self, self.unit.active)
        else:
            return self.built(x, parameter.built(self.unit.active))
        return y if self.bias is None else self.shifted(y, self.bias)

    def shifted(self, y: Tensor, bias: Tensor) -> Tensor:
        raise NotImplementedError


class Linear(Product):
    """nn.Linear on [members * batch, ..., features]."""

    def output(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(self.count, -1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)

    def rows(self, x: Tensor) -> int:
        return x.shape[1]

    def scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        return x * factor[:, None]

    def multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def own(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x, weight.mT)

    def mixed(
        self, x: Tensor, weight: Tensor, onto: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        if onto is not None:  # of products in a lower precision the weight takes theirs
            return onto.baddbmm_(
                x.to(onto.dtype), weight.mT.to(onto.dtype), alpha=scale
            )
        return F.linear(x, weight[0]) if len(weight) == 1 else torch.bmm(x, weight.mT)

    def shifted(self, y: Tensor, bias: Tensor) -> Tensor:
        return y + bias[:, None]

    def built(self, x: Tensor, weight: Tensor) -> Tensor:
        return (
            torch.bmm(x, weight.mT)
            if self.bias is None
            else torch.baddbmm(self.bias[:, None], x, weight.mT)
        )


class Convolution(Product):
    """nn.Conv1d, Conv2d and Conv3d with zeros around the map, on [members * batch, channels, ...]."""

    def __init__(self, unit: Any, x: Tensor):
        super().__init__(unit, x)
        layer = self.inner
        self.mixes = layer.groups == 1
        self.settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
        self.places = len(layer.kernel_size)
        self.convolve = (F.conv1d, F.conv2d, F.conv3d)[self.places - 1]
        plain = {*layer.kernel_size, *layer.stride} == {1}
        self.pointwise = (
            plain
            and self.mixes
            and layer.padding in ("same", "valid", (0,) * self.places)
        )

    @classmethod
    def takes(cls, inner: Any, names: Collection[str]) -> bool:
        return inner.padding_mode == "zeros"

    def output(self, x: Tensor) -> Tensor:
        return self.product(x.unflatten(0, (self.count, -1))).flatten(0, 1)

    def rows(self, x: Tensor) -> int:
        return x[:, :, 0].numel() // (self.count * math.prod(self.inner.stride))

    def scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        return x * factor.view(len(factor), 1, -1, *[1] * self.places)

    def multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.convolve(x.flatten(0, 1), self._kernel(weight), bias, *self.settings)
        return y.unflatten(0, (self.count, -1))

    def own(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.pointwise:
            return self.mixed(x, weight)
        return self._each(x, [self._kernel(w) for w in weight], [None] * self.count)

    def mixed(
        self, x: Tensor, weight: Tensor, onto: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        y = weight[:, None] @ x.flatten(3)  # [members, batch, out, places]
        y = y.unflatten(3, x.shape[3:])
        return y if onto is None else torch.add(onto, y, alpha=scale)

    def shifted(self, y: Tensor, bias: Tensor) -> Tensor:
        return y + bias.view(len(bias), 1, -1, *[1] * self.places)

    def built(self, x: Tensor, weight: Tensor) -> Tensor:
        biases = (
            [None] * self.count
            if self.bias is None
            else self.bias.expand(self.count, -1)
        )
        return self._each(x, weight, biases)

    def _each(
        self, x: Tensor, kernels: Iterable[Tensor], biases: Iterable[Tensor | None]
    ) -> Tensor:
        """Convolve every member's maps with its own kernel; one member alone is not copied."""
        each = zip(x, kernels, biases, strict=True)
        maps = [self.convolve(rows, w, b, *self.settings) for rows, w, b in each]
        return maps[0][None] if self.count == 1 else torch.stack(maps)

    def _kernel(self, weight: Tensor) -> Tensor:
        """Return a matrix of patches [out, width] as a kernel."""
        return weight.view(len(weight), -1, *self.inner.kernel_size)


class LayerNorm(Form):
    """nn.LayerNorm: one normalisation of all rows, then a scale and a shift of each member's own."""

    @classmethod
    def takes(cls, inner: Any, names: Collection[str]) -> bool:
        return inner.weight is not None or "weight" in names

    def output(self, x: Tensor) -> Tensor:
        shape = self.inner.normalized_shape
        weight, bias = self.seen("weight"), self.seen("bias")
        assert weight is not None
        normalised = F.layer_norm(x, shape, eps=self.inner.eps)
        rows = normalised.view(self.count, -1, math.prod(shape))
        weight = weight.view(len(weight), 1, -1)
        y = (
            rows * weight
            if bias is None
            else torch.addcmul(bias.view(len(bias), 1, -1), rows, weight)
        )
        return y.view(x.shape)


class BatchNorm(Form):
    """nn.BatchNorm1d, 2d and 3d with statistics of each member's own.

    In training mode a member is normalised by its own rows of the batch, so no member depends on another.
    """

    @classmethod
    def takes(cls, inner: Any, names: Collection[str]) -> bool:
        return {"running_mean", "running_var"} <= set(
            names
        ) and inner.momentum is not None

    def output(self, x: Tensor) -> Tensor:
        mean, var = self.seen("running_mean"), self.seen("running_var")
        weight, bias = self.seen("weight"), self.seen("bias")
        assert mean is not None
        assert var is not None
        each = x.unflatten(0, (self.count, -1))  # [members, batch, features, ...]
        if not self.unit.training:
            shape = (self.count, 1, -1, *[1] * (x.ndim - 2))
            scale = (var + self.inner.eps).rsqrt()
            scale = scale if weight is None else scale * weight
            shift = -mean * scale if bias is None else bias - mean * scale
            return torch.addcmul(shift.view(shape), each, scale.view(shape)).flatten(
                0, 1
            )
        if "num_batches_tracked" in self.unit.names:
            self.unit.num_batches_tracked.value[self.unit.active] += 1
        side_by_side = each.transpose(0, 1).flatten(
            1, 2
        )  # [batch, members * features, ...]
        weight, bias = (
            None if p is None else p.expand(self.count, -1).flatten()
            for p in (weight, bias)
        )
        settings = (weight, bias, True, self.inner.momentum, self.inner.eps)
        y = F.batch_norm(side_by_side, mean.view(-1), var.view(-1), *settings)
        return y.unflatten(1, (self.count, -1)).transpose(0, 1).flatten(0, 1)


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
