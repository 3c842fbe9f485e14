"""Normalisation of every member's own: LayerNorms by their weights, BatchNorms by their statistics too."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from uqlab.core.modules import trained_like
from uqlab.ensembles.layers import MemberLayer, replace_layers


class MemberLayerNorm(MemberLayer):
    """A LayerNorm in which every member has its own weight and bias [members, 1, features]: member m is `norms[m]`."""

    def __init__(self, norms: Sequence[Any]):
        super().__init__()
        self.members, self.eps = len(norms), norms[0].eps
        biases = [torch.zeros_like(norm.weight) if norm.bias is None else norm.bias.detach() for norm in norms]
        self.weight = nn.Parameter(torch.stack([norm.weight.detach() for norm in norms]).unsqueeze(1))
        self.bias = nn.Parameter(torch.stack(biases).unsqueeze(1))
        trained_like(self, norms[0])

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, active = self.weight, self.bias, self.active
        if active != slice(None):  # small batches would notice the calls
            weight, bias = weight[active], bias[active]
        rows = F.layer_norm(x, x.shape[-1:], eps=self.eps).view(len(weight), -1, x.shape[-1])
        return torch.addcmul(bias, rows, weight).view(x.shape)

    def member(self, index: int) -> nn.LayerNorm:
        norm = nn.LayerNorm(self.weight.shape[2:], self.eps, device=self.weight.device, dtype=self.weight.dtype)
        norm.weight.data, norm.bias.data = self.weight.data[index, 0].clone(), self.bias.data[index, 0].clone()
        return trained_like(norm, self)


class MemberBatchNorm(MemberLayer):
    """A BatchNorm in which every member has running statistics of its own [members, features]: member m is `norms[m]`.

    weight and bias [members, features] are the members' own too or, if `shared`, the first norm's, [features], for all.
    In training mode a member is normalised by its own rows of the batch, so no member depends on another.
    """

    running_mean: Tensor
    running_var: Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    member_buffers = ("running_mean", "running_var")

    def __init__(self, norms: Sequence[Any], shared: bool = False):
        super().__init__()
        first = norms[0]
        self.members, self.shared, self.kind = len(norms), shared, type(first)
        self.eps, self.momentum = first.eps, 0.1 if first.momentum is None else first.momentum
        for name in self.member_buffers:
            self.register_buffer(name, torch.stack([getattr(norm, name) for norm in norms]))
        for name in ("weight", "bias"):
            each = [getattr(norm, name) for norm in norms]
            own = None if each[0] is None else nn.Parameter(torch.stack([p.detach() for p in each]))
            setattr(self, name, each[0] if shared else own)
        trained_like(self, first)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean[self.active], self.running_var[self.active]
        weight, bias = (self._rows(p, len(mean)) for p in (self.weight, self.bias))
        each = x.unflatten(0, (len(mean), -1))  # [members, batch, features, ...]
        if not self.training:
            shape = (len(mean), 1, -1, *[1] * (x.ndim - 2))
            scale = (var + self.eps).rsqrt() if weight is None else (var + self.eps).rsqrt() * weight
            shift = -mean * scale if bias is None else bias - mean * scale
            return torch.addcmul(shift.view(shape), each, scale.view(shape)).flatten(0, 1)
        side_by_side = each.transpose(0, 1).flatten(1, 2)  # [batch, members * features, ...]
        weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
        y = F.batch_norm(side_by_side, mean.view(-1), var.view(-1), weight, bias, True, self.momentum, self.eps)
        return y.unflatten(1, (len(mean), -1)).transpose(0, 1).flatten(0, 1)

    def _rows(self, p: Tensor | None, count: int) -> Tensor | None:
        """The active members' weights [members, features]."""
        return p if p is None else p.expand(count, -1) if self.shared else p[self.active]

    def own_parameters(self) -> list[nn.Parameter]:
        return [] if self.shared else [p for p in (self.weight, self.bias) if p is not None]

    def member(self, index: int) -> nn.Module:
        made: Any = self.kind
        like = {"device": self.running_mean.device, "dtype": self.running_mean.dtype}
        norm = made(self.running_mean.shape[1], self.eps, self.momentum, self.weight is not None, **like)
        for name in self.member_buffers:
            getattr(norm, name).copy_(getattr(self, name)[index])
        for name, p in norm.named_parameters():
            own = getattr(self, name).detach()
            p.data = (own if self.shared else own[index]).clone()
        return trained_like(norm, self)


def has_statistics(part: nn.Module) -> bool:
    """Whether this is a BatchNorm with running statistics, of one network."""
    return isinstance(part, _BatchNorm) and part.running_mean is not None


def own_statistics(network: nn.Module, members: int) -> None:
    """Give every member, in place, batch statistics of its own; weights and biases stay shared."""
    if any(has_statistics(part) for part in network.modules()):
        kinds = tuple({type(part) for part in network.modules() if has_statistics(part)})
        replace_layers(network, kinds, lambda _, norm: MemberBatchNorm([norm] * members, shared=True))
