"""Packed-Ensembles: narrow networks side by side, as the groups of one wide network (Laurent et al. 2023)."""

import copy
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.modules import trained_like
from uqlab.ensembles.base import Ensemble, FoldedEnsemble, SeparateEnsemble, member_text
from uqlab.ensembles.deep import deep, stacked
from uqlab.ensembles.implicit import check_backbone, is_linear, is_product
from uqlab.ensembles.layers import MemberDropout, MemberLayer, MemberLinear, conv_settings, plain_conv
from uqlab.ensembles.norms import MemberBatchNorm, MemberLayerNorm, has_statistics


class MemberConv2d(MemberLayer):
    """A convolution of every member's own, all of them one grouped convolution: member m is `layers[m]`.

    weight [members, out, in, height, width], bias [members, out].
    """

    def __init__(self, layers: Sequence[nn.Conv2d]):
        super().__init__()
        self.members, self.settings = len(layers), conv_settings(layers[0])
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(torch.stack(biases)) if biases else None
        trained_like(self, layers[0])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight[self.active]
        bias = None if self.bias is None else self.bias[self.active].flatten()
        side_by_side = x.unflatten(0, (len(weight), -1)).transpose(0, 1).flatten(1, 2)  # [batch, members * in, ...]
        settings = self.settings | {"groups": len(weight) * self.settings["groups"]}
        y = F.conv2d(side_by_side, weight.flatten(0, 1), bias, **settings)
        return y.unflatten(1, (len(weight), -1)).transpose(0, 1).flatten(0, 1)

    def member(self, index: int) -> nn.Conv2d:
        bias = self.member_bias(index)
        made = plain_conv(self.weight.detach()[index].clone(), None if bias is None else bias.clone(), self.settings)
        return trained_like(made, self)


class GroupedLinear(nn.Module):
    """A linear layer whose features are apart in groups: weight [groups, out / groups, in / groups], bias [out]."""

    def __init__(self, in_features: int, out_features: int, groups: int, bias: bool = True):
        super().__init__()
        parts = [nn.Linear(in_features // groups, out_features // groups, bias) for _ in range(groups)]
        self.weight = nn.Parameter(torch.stack([part.weight.detach() for part in parts]))
        self.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts])) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("...gi,goi->...go", x.unflatten(-1, (len(self.weight), -1)), self.weight).flatten(-2)
        return y if self.bias is None else y + self.bias


def packed(
    backbone: nn.Module,
    members: int | str | range,
    alpha: float = 2.0,
    gamma: int = 1,
    *,
    of: int | None = None,
    seed: int = 0,
) -> Ensemble:
    """Packed-Ensembles: M networks alpha / M times as wide, side by side as groups of one (Laurent et al. 2023).

    backbone: the architecture; its weights play no part. Inputs and classes stay, every other width becomes alpha / M
        of it, rounded up. A network of transformers keeps the size of its heads and has fewer of them.
    gamma: each member's own layers, but the first and the last, have so many groups again.
    of: M, the members of the whole ensemble, which shards must give; None for as many as `members` counts.

    Given its width, member m depends on (seed, m) alone: with gamma = 1 the ensemble equals `deep` of networks of that
    width. Linear layers, convolutions and their norms are computed for all members at once, other networks one after
    the other. Raises ValueError for alpha that is not positive, gamma < 1 or more than 1 in a network of transformers,
    and a network of other layers; TypeError for what is no network.
    """
    ids = check_backbone(backbone, members)
    whole = ids[-1] + 1 if of is None else of
    ensemble = deep(lambda: _Narrow(backbone, alpha / whole, gamma).network, ids, seed, fold=False)
    models = list(cast(SeparateEnsemble, ensemble).models)
    if all(type(part) in _STACKED for part in models[0].modules() if any(True for _ in part.parameters(recurse=False))):
        ensemble = FoldedEnsemble(stacked(models, _STACKED), ids)
    settings = {"alpha": alpha, "gamma": gamma, "of": whole, "seed": seed}
    ensemble.recipe = {"method": "packed", "backbone": "", **settings, "members": member_text(ids)}
    like = next(backbone.parameters(), torch.empty(0))
    return ensemble.to(like.device, like.dtype).train(backbone.training)


_STACKED: dict[type, Any] = {
    nn.Linear: lambda parts: trained_like(MemberLinear.stack(parts), parts[0]),
    nn.Conv2d: MemberConv2d,
    nn.LayerNorm: MemberLayerNorm,
    nn.BatchNorm1d: MemberBatchNorm,
    nn.BatchNorm2d: MemberBatchNorm,
    MemberDropout: lambda parts: MemberDropout(len(parts), parts[0].p),
}


class _Narrow:
    """A fresh network of the same architecture, `share` times as wide but for its inputs and classes."""

    def __init__(self, backbone: nn.Module, share: float, gamma: int):
        self.share, self.gamma = share, gamma
        self.widths: dict[int, int] = {}  # those before the layer that is looked at: old -> new
        self.network: Any = nn.Sequential(copy.deepcopy(backbone))
        found: dict[str, Any] = dict(self.network.named_modules())
        inside = [name for name, part in found.items() if _is_transformer(part)]
        inside = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
        if inside and gamma > 1:
            raise ValueError(f"gamma must be 1 in a network of transformers, got {gamma}")
        rest = {n: p for n, p in found.items() if not any(f"{n}.".startswith(f"{above}.") for above in inside)}
        products = [name for name, part in rest.items() if is_product(part)]
        for name, part in found.items():
            if name in inside:
                self.network.set_submodule(name, self.transformer(part))
            elif name in products:
                first = name == products[0] and not inside
                self.network.set_submodule(name, self.product(part, first, name == products[-1]))
            elif name in rest and (own := list(part.named_parameters(recurse=False))):
                self.network.set_submodule(name, self.norm(part, [p for _, p in own]))
        self.network = self.network[0].train(backbone.training)

    def scaled(self, width: int) -> int:
        if width not in self.widths:
            self.widths[width] = math.ceil(width * self.share / self.gamma - 1e-9) * self.gamma
        return self.widths[width]

    def before(self, width: int) -> int:
        """The new width of what a layer takes: a layer's, or that of a map that is flattened."""
        if width in self.widths:
            return self.widths[width]
        maps = [old for old in reversed(self.widths) if not width % old]
        return self.widths[maps[0]] * (width // maps[0]) if maps else width

    def product(self, part: Any, first: bool, last: bool) -> nn.Module:
        groups = 1 if first or last else self.gamma
        out, width = part.weight.shape[:2]
        width = width if first else self.before(width)
        out = out if last else self.scaled(out)
        if is_linear(part):
            made = nn.Linear if groups == 1 else GroupedLinear
            extra = () if groups == 1 else (groups,)
            return made(width, out, *extra, bias=part.bias is not None)
        settings: dict[str, Any] = conv_settings(part) | {"groups": groups}
        return nn.Conv2d(width, out, part.kernel_size, bias=part.bias is not None, **settings)

    def norm(self, part: Any, own: list[Tensor]) -> nn.Module:
        width = self.scaled(len(own[0])) if self.widths else len(own[0])  # a norm of the inputs keeps them
        if isinstance(part, nn.LayerNorm) and len(part.normalized_shape) == 1:
            return nn.LayerNorm(width, part.eps)
        if has_statistics(part):
            made: Any = type(part)
            return made(width, part.eps, part.momentum)
        raise ValueError(
            "packed narrows linear layers, convolutions without groups, BatchNorm, LayerNorm and networks of "
            f"transformers; this network has {type(part).__name__}"
        )

    def transformer(self, model: Any) -> nn.Module:
        config = copy.deepcopy(model.config)
        parts = [getattr(config, name, None) for name in ("vision_config", "text_config")]
        for each in (*filter(None, parts), config):
            if not hasattr(each, "num_attention_heads") or not hasattr(each, "hidden_size"):
                continue
            size = each.hidden_size // each.num_attention_heads
            each.num_attention_heads = math.ceil(each.num_attention_heads * self.share - 1e-9)
            self.widths[each.hidden_size] = size * each.num_attention_heads
            each.hidden_size = size * each.num_attention_heads
            each.intermediate_size = math.ceil(each.intermediate_size * self.share - 1e-9)
        if not self.widths:
            raise ValueError(f"packed finds no width in the configuration of {type(model).__name__}")
        made = type(model)(config)
        for hook in model._forward_hooks.values():
            made.register_forward_hook(hook)
        return made


def _is_transformer(part: nn.Module) -> bool:
    return hasattr(getattr(part, "config", None), "model_type")
