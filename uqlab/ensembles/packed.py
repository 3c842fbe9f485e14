"""Packed-Ensembles: narrow networks side by side, as the groups of one wide network (Laurent et al. 2023)."""

import copy
import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from uqlab.ensembles.base import Ensemble, FoldedEnsemble, SeparateEnsemble, member_text
from uqlab.ensembles.deep import deep, stacked
from uqlab.ensembles.implicit import check_backbone, has_statistics, plain
from uqlab.ensembles.layers import MemberDropout, replace_layers
from uqlab.models import classifier


class GroupedLinear(nn.Module):
    """A linear layer whose features are apart in groups: weight [groups, out / groups, in / groups], bias [out]."""

    def __init__(
        self, in_features: int, out_features: int, groups: int, bias: bool = True
    ):
        super().__init__()
        parts = [
            nn.Linear(in_features // groups, out_features // groups, bias)
            for _ in range(groups)
        ]
        self.weight = nn.Parameter(
            torch.stack([part.weight.detach() for part in parts])
        )
        self.bias = (
            nn.Parameter(torch.cat([part.bias.detach() for part in parts]))
            if bias
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum(
            "...gi,goi->...go", x.unflatten(-1, (len(self.weight), -1)), self.weight
        ).flatten(-2)
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
    ensemble = deep(
        lambda: _Narrow(backbone, alpha / whole, gamma).network, ids, seed, fold=False
    )
    models = list(cast(SeparateEnsemble, ensemble).models)
    if all(
        type(part) in _STACKED
        for part in models[0].modules()
        if any(True for _ in part.parameters(recurse=False))
    ):
        network = stacked(models, _STACKED)
        replace_layers(
            network, MemberDropout, lambda _, layer: MemberDropout(len(ids), layer.p)
        )
        ensemble = FoldedEnsemble(network, ids)
    settings = {"alpha": alpha, "gamma": gamma, "of": whole, "seed": seed}
    ensemble.recipe = {
        "method": "packed",
        "backbone": "",
        **settings,
        "members": member_text(ids),
    }
    like = next(backbone.parameters(), torch.empty(0))
    return ensemble.to(like.device, like.dtype).train(backbone.training)


_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d
_STACKED = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.LayerNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)


class _Narrow:
    """A fresh network of the same architecture, `share` times as wide but for its inputs and classes."""

    def __init__(self, backbone: nn.Module, share: float, gamma: int):
        self.share, self.gamma = share, gamma
        self.widths: dict[
            int, int
        ] = {}  # those before the layer that is looked at: old -> new
        self.network: Any = nn.Sequential(plain(backbone, trained=True))
        found: dict[str, Any] = dict(self.network.named_modules())
        inside = [name for name, part in found.items() if _is_transformer(part)]
        inside = [
            name
            for name in inside
            if not any(name.startswith(f"{other}.") for other in inside)
        ]
        if inside and gamma > 1:
            raise ValueError(
                f"gamma must be 1 in a network of transformers, got {gamma}"
            )
        rest = {
            n: p
            for n, p in found.items()
            if not any(f"{n}.".startswith(f"{above}.") for above in inside)
        }
        products = [
            name
            for name, part in rest.items()
            if isinstance(part, nn.Linear | _CONVOLUTIONS)
        ]
        last = classifier(self.network)
        for name, part in found.items():
            if name in inside:
                self.network.set_submodule(name, self.transformer(part))
            elif name in products:
                first = name == products[0] and not inside
                self.network.set_submodule(
                    name, self.product(part, first, name == last)
                )
            elif name in rest and (own := list(part.named_parameters(recurse=False))):
                self.network.set_submodule(name, self.norm(part, [p for _, p in own]))
        self.network = self.network[0].train(backbone.training)

    def scaled(self, width: int) -> int:
        if width not in self.widths:
            self.widths[width] = (
                math.ceil(width * self.share / self.gamma - 1e-9) * self.gamma
            )
        return self.widths[width]

    def before(self, width: int) -> int:
        """The new width of what a layer takes: a layer's, or that of a map that is flattened."""
        if width in self.widths:
            return self.widths[width]
        maps = [old for old in reversed(self.widths) if not width % old]
        return self.widths[maps[0]] * (width // maps[0]) if maps else width

    def product(self, part: Any, first: bool, last: bool) -> nn.Module:
        out, width = part.weight.shape[:2]
        convolves = isinstance(part, _CONVOLUTIONS)
        if convolves and part.groups > 1:
            return self.depthwise(part)
        groups = 1 if first or last else self.gamma
        width = width if first else self.before(width)
        out = out if last else self.scaled(out)
        if not convolves and groups > 1:
            return GroupedLinear(width, out, groups, bias=part.bias is not None)
        return _resized(part, width, out, groups)

    def depthwise(self, part: Any) -> nn.Module:
        """A convolution that keeps its channels apart, for fewer channels."""
        if part.groups != part.in_channels:
            raise ValueError(
                f"packed narrows convolutions of one group or of single channels, got {part}"
            )
        width = self.before(part.in_channels)
        out = width * (part.out_channels // part.in_channels)
        self.widths[part.out_channels] = out
        return _resized(part, width, out, width)

    def norm(self, part: Any, own: list[Tensor]) -> nn.Module:
        width = (
            self.scaled(len(own[0])) if self.widths else len(own[0])
        )  # a norm of the inputs keeps them
        if type(part) is nn.LayerNorm and len(part.normalized_shape) == 1:
            return nn.LayerNorm(width, part.eps)
        if has_statistics(part):
            made: Any = copy.deepcopy(part)
            made.num_features = width
            for name, tensor in (
                *part.named_parameters(recurse=False),
                *part.named_buffers(recurse=False),
            ):
                if tensor.ndim:
                    new = tensor.detach().new_ones(width)
                    setattr(
                        made,
                        name,
                        nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new,
                    )
            made.reset_parameters()
            return made
        raise ValueError(
            "packed narrows linear layers, convolutions, BatchNorm, LayerNorm and networks of transformers; "
            f"this network has {type(part).__name__}"
        )

    def transformer(self, model: Any) -> nn.Module:
        config = copy.deepcopy(model.config)
        parts = [
            getattr(config, name, None) for name in ("vision_config", "text_config")
        ]
        for each in (*filter(None, parts), config):
            if not all(
                isinstance(getattr(each, n, None), int)
                for n in ("num_attention_heads", "hidden_size")
            ):
                continue
            heads = each.num_attention_heads
            groups = (
                getattr(each, "num_key_value_heads", None) or heads
            )  # heads that share keys stay together
            kept = math.ceil(groups * self.share - 1e-9)
            if groups < heads:
                each.num_key_value_heads = kept
            size = each.hidden_size // heads
            each.num_attention_heads = kept * (heads // groups)
            self.widths[each.hidden_size] = size * each.num_attention_heads
            each.hidden_size = size * each.num_attention_heads
            for name in (
                "intermediate_size",
                "hidden_dim",
                "n_inner",
                "encoder_ffn_dim",
                "decoder_ffn_dim",
            ):
                if isinstance(getattr(each, name, None), int):
                    setattr(
                        each, name, math.ceil(getattr(each, name) * self.share - 1e-9)
                    )
        if not self.widths:
            raise ValueError(
                f"packed finds no width in the configuration of {type(model).__name__}"
            )
        made = type(model)(config)
        for hook in model._forward_hooks.values():
            made.register_forward_hook(hook)
        return made


def _is_transformer(part: nn.Module) -> bool:
    config = getattr(part, "config", None)
    parts = (
        config,
        getattr(config, "vision_config", None),
        getattr(config, "text_config", None),
    )
    return hasattr(config, "model_type") and any(
        hasattr(each, "num_attention_heads") for each in parts
    )


def _resized(part: Any, width: int, out: int, groups: int) -> nn.Module:
    """A fresh layer of the same class and settings for other numbers of features."""
    made = copy.deepcopy(part)
    if isinstance(part, nn.Linear):
        made.in_features, made.out_features = width, out
    else:
        made.in_channels, made.out_channels, made.groups = width, out, groups
    made.weight = nn.Parameter(
        part.weight.detach().new_empty(out, width // groups, *part.weight.shape[2:])
    )
    made.bias = (
        None if part.bias is None else nn.Parameter(part.bias.detach().new_empty(out))
    )
    made.reset_parameters()
    return made
