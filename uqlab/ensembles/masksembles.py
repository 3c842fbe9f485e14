"""Masksembles: every member sees its own fixed part of the features (Durasov et al. 2021)."""

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.checks import within
from uqlab.ensembles.base import FoldedEnsemble, member_seed
from uqlab.ensembles.implicit import ATTENTION, check_backbone, exactly, is_product, trained_together
from uqlab.ensembles.layers import MemberLayer, conv_settings, plain_conv, plain_linear, replace_layers


class MaskedInputs(MemberLayer):
    """W diag(z_m): a linear layer or a convolution that sees the features of a member's mask alone.

    mask [members, features] is 1 or 0 and never changes; W and the bias are all members'.
    """

    mask: Tensor
    member_buffers = ("mask",)

    def __init__(self, layer: Any, mask: Tensor):
        super().__init__()
        self.members, self.weight, self.bias = len(mask), layer.weight, layer.bias
        self.conv = conv_settings(layer) if isinstance(layer, nn.Conv2d) else None
        self.register_buffer("mask", mask.to(layer.weight))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask[self.active]
        each = x.unflatten(0, (len(mask), -1))
        if self.conv is None:
            seen = each * mask.view(len(mask), *[1] * (each.ndim - 2), -1)
            return F.linear(seen.flatten(0, 1), self.weight, self.bias)
        return F.conv2d((each * mask[:, None, :, None, None]).flatten(0, 1), self.weight, self.bias, **self.conv)

    def own_parameters(self) -> list[nn.Parameter]:
        return []

    def member_weight(self, index: int) -> Tensor | None:
        return None if self.conv else self.weight.detach() * self.mask[index]

    def member(self, index: int) -> nn.Module:
        bias = None if self.bias is None else self.bias.detach().clone()
        if self.conv is None:
            return plain_linear(self.weight.detach() * self.mask[index], bias)
        return plain_conv(self.weight.detach() * self.mask[index, :, None, None], bias, self.conv)


def masksembles(
    backbone: nn.Module, members: int | str | range, scale: float = 2.0, *, target: str | None = None, seed: int = 0
) -> FoldedEnsemble:
    """Masksembles: member m sees a fixed 1 / scale of the features after each activation (Durasov et al. 2021).

    scale: S, at least 1. Each member keeps 1 / S of the features. S = 1 is one network; with S = members the masks are
        disjoint, where S divides the features.
    target: a regular expression on the names of linear layers and convolutions, whose inputs are masked; None for all
        but the first or, in a transformer, for the second layer of each MLP, because only those follow an activation.

    All weights, the classifier's too, are trained by all members, so they are copied; batch statistics are the members'
    own. The paper draws the masks anew until every feature is in one of them. Here ceil(S) members take turns in one
    random order of the features, so every feature is in a mask of theirs, and the mask of member m depends on (seed, m)
    alone.

    Raises ValueError for a scale below 1 and a network without such layers, and as `lora`.
    """
    ids = check_backbone(backbone, members)
    within("scale", scale, "[1, inf)")
    network = copy.deepcopy(backbone).requires_grad_()
    products = [name for name, part in network.named_modules() if name and is_product(part)]
    names = _after_activations(network, products) if target is None else [n for n in products if re.search(target, n)]
    if not names:
        raise ValueError(
            f"masksembles masks the inputs of linear layers and convolutions; of {', '.join(products) or 'none'} "
            + ("none follows an activation" if target is None else f"none matches target {target!r}")
        )

    def make(name: str, layer: Any) -> MaskedInputs:
        return MaskedInputs(layer, _masks(layer.weight.shape[1], scale, ids, seed, names.index(name)))

    replace_layers(network, exactly(names), make)
    recipe = {"method": "masksembles", "scale": scale, "target": target, "seed": seed}
    return trained_together(network, ids, recipe)


def _after_activations(network: nn.Module, products: list[str]) -> list[str]:
    """The layers whose inputs are masked: all but the first; in a transformer those that narrow the MLP's features."""
    if not any(re.search(ATTENTION, name) for name in products):
        return products[1:]
    weights: Any = {name: network.get_submodule(name).weight for name in products[:-1]}
    narrow = [name for name, weight in weights.items() if weight.ndim == 2 and weight.shape[1] > weight.shape[0]]
    return [name for name in narrow if not re.search(ATTENTION, name)]


def _masks(features: int, scale: float, ids: Sequence[int], seed: int, number: int) -> Tensor:
    """The masks [members, features] of one layer: ceil(scale) members take turns in one order of the features."""
    kept, turns = math.ceil(features / scale - 1e-9), math.ceil(scale)
    masks = torch.zeros(len(ids), features)
    for mask, m in zip(masks, ids, strict=True):
        order = torch.Generator().manual_seed(member_seed(seed, m // turns, "masks", number))
        start = (m % turns) * features // turns
        mask[torch.randperm(features, generator=order).roll(-start)[:kept]] = 1
    return masks
