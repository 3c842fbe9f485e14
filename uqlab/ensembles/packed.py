"""Packed-Ensembles: narrow networks side by side, as the groups of one wide network."""

import copy
import math
from typing import Any

from torch import nn

from uqlab.core.checks import at_least, positive
from uqlab.ensembles.base import Ensemble, Members
from uqlab.ensembles.deep import deep
from uqlab.ensembles.implicit import check_backbone, plain, put
from uqlab.models import classifier

CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d
MLPS = (
    "intermediate_size",
    "hidden_dim",
    "n_inner",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)


class GroupedLinear(nn.Conv1d):
    """A linear layer whose features are apart in groups, on [..., features]."""

    def __init__(
        self, in_features: int, out_features: int, groups: int, bias: bool = True
    ):
        super().__init__(in_features, out_features, 1, groups=groups, bias=bias)

    def forward(self, x):
        """Multiply each group's features by its own weight."""
        rows = x.reshape(-1, self.in_channels, 1)
        return super().forward(rows).view(*x.shape[:-1], -1)


def packed(
    backbone: nn.Module,
    members: Members,
    alpha: float = 2.0,
    gamma: int = 1,
    *,
    of: int | None = None,
    classifier: str | None = None,
    seed: int = 0,
) -> Ensemble:
    """Make a Packed-Ensemble: M networks alpha / M times as wide, side by side.

    Parameters
    ----------
    backbone : nn.Module
        The architecture; its weights play no part. Inputs and classes stay. A network
        of transformers keeps the size of its heads and has fewer of them.
    members : int, str or range
        As in `lora`.
    alpha : float
        Every width but those of inputs and classes becomes alpha / M of it, rounded up.
    gamma : int
        Each member's own layers, but the first and the last, have so many groups again.
    of : int, optional
        M, the members of the whole ensemble, which shards must give; None for as many
        as `members` counts.
    classifier : str, optional
        As in `lora`.
    seed : int
        Given its width, member m depends on (seed, m) alone: with gamma = 1 the
        ensemble equals `deep` of networks of that width.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError
        For alpha that is not positive, gamma below 1 or more than 1 in a network of
        transformers, and a network of other layers.
    TypeError
        For what is no network.

    References
    ----------
    Laurent et al., "Packed-Ensembles for efficient uncertainty estimation", 2023.
    """
    ids = check_backbone(backbone, members)
    positive("alpha", alpha)
    at_least("gamma", gamma)
    whole = ids[-1] + 1 if of is None else of
    ensemble = deep(
        lambda: _Narrow(alpha / whole, gamma).network(backbone, classifier), ids, seed
    )
    settings = {"alpha": alpha, "gamma": gamma, "of": whole, "classifier": classifier}
    like = next(backbone.parameters())
    ensemble.to(like.device, like.dtype).train(backbone.training)
    return ensemble.with_recipe({"method": "packed", **settings, "seed": seed})


class _Narrow:
    """The widths of a fresh network, `share` times as wide inside."""

    def __init__(self, share: float, gamma: int):
        self.share, self.gamma = share, gamma
        # of the layers before the one that is looked at: old -> new
        self.widths: dict[int, int] = {}

    def network(self, backbone: nn.Module, named: str | None = None) -> nn.Module:
        """Return a fresh narrow network of the same architecture."""
        network = nn.Sequential(plain(backbone, trained=True))
        last = f"0.{classifier(network[0], named)}".rstrip(".")
        inside = ()  # prefixes of names inside networks of transformers
        for name, module in list(network.named_modules()):
            if not name or name.startswith(inside):
                continue
            if _is_transformer(module):
                narrow = self.transformer(module)
                inside += (f"{name}.",)
            elif isinstance(module, nn.Linear | CONVOLUTIONS):
                narrow = self.product(module, name == last)
            elif list(module.parameters(recurse=False)):
                narrow = self.norm(module)
            else:
                continue
            put(network, name, narrow)
        return network[0].train(backbone.training)

    def scaled(self, width: int, groups: int = 1) -> int:
        """Return a width's share, rounded up to a multiple of groups."""
        return math.ceil(width * self.share / groups - 1e-9) * groups

    def after(self, width: int) -> int:
        """Return the new width of a layer's outputs."""
        return self.widths.setdefault(width, self.scaled(width, self.gamma))

    def before(self, width: int) -> int:
        """Return the new width of a layer's inputs, perhaps of a flattened map."""
        if width in self.widths:
            return self.widths[width]
        maps = [old for old in reversed(self.widths) if not width % old]
        return self.widths[maps[0]] * (width // maps[0]) if maps else width

    def product(self, layer: Any, last: bool) -> nn.Module:
        """Return a narrow linear layer or convolution."""
        out, width, *kernel = layer.weight.shape
        groups = 1 if last or not self.widths else self.gamma
        if getattr(layer, "groups", 1) > 1:  # each channel alone
            if layer.groups != layer.in_channels:
                raise ValueError(
                    "packed narrows convolutions of one group or of single channels, "
                    f"got {layer}"
                )
            groups = width = self.before(layer.in_channels)
            self.widths[out] = out = width * (out // layer.in_channels)
        else:
            width = self.before(width)
            out = out if last else self.after(out)
        if isinstance(layer, CONVOLUTIONS):
            shape = out, width // groups, *kernel
            channels = {"in_channels": width, "out_channels": out}
            return _resized(layer, shape, **channels, groups=groups)
        if groups > 1:
            return GroupedLinear(width, out, groups, bias=layer.bias is not None)
        return _resized(layer, (out, width), in_features=width, out_features=out)

    def norm(self, layer: Any) -> nn.Module:
        """Return a narrow norm; one of the network's inputs keeps its width."""
        width = len(next(layer.parameters(recurse=False)))
        width = self.after(width) if self.widths else width
        if type(layer) is nn.LayerNorm and len(layer.normalized_shape) == 1:
            return _resized(layer, (width,), normalized_shape=(width,))
        if hasattr(layer, "num_features"):
            return _resized(layer, (width,), num_features=width)
        raise ValueError(
            "packed narrows linear layers, convolutions, BatchNorm, LayerNorm and "
            f"networks of transformers; this network has {type(layer).__name__}"
        )

    def transformer(self, model: Any) -> nn.Module:
        """Return a fresh network of transformers with fewer heads of the same size."""
        if self.gamma > 1:
            raise ValueError(
                f"gamma must be 1 in a network of transformers, got {self.gamma}"
            )
        config = copy.deepcopy(model.config)
        for section in _parts(config):
            sizes = section.num_attention_heads, getattr(section, "hidden_size", None)
            if all(isinstance(size, int) for size in sizes):  # else one for each stage
                self.fewer_heads(section)
        if not self.widths:
            raise ValueError(
                f"packed finds no width in the configuration of {type(model).__name__}"
            )
        narrow = type(model)(config)
        for hook in model._forward_hooks.values():
            narrow.register_forward_hook(hook)
        return narrow

    def fewer_heads(self, config: Any) -> None:
        """Change, in place, the widths in a configuration."""
        heads = config.num_attention_heads
        # heads that share keys stay together
        groups = getattr(config, "num_key_value_heads", None) or heads
        if groups < heads:
            config.num_key_value_heads = self.scaled(groups)
        size = config.hidden_size // heads
        config.num_attention_heads = self.scaled(groups) * (heads // groups)
        width = size * config.num_attention_heads
        self.widths[config.hidden_size] = config.hidden_size = width
        for name in MLPS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, self.scaled(getattr(config, name)))


def _parts(config: Any) -> list[Any]:
    """Return those configurations, of CLIP's towers or the whole, that have heads."""
    towers = [getattr(config, n, None) for n in ("vision_config", "text_config")]
    return [
        section
        for section in (*towers, config)
        if hasattr(section, "num_attention_heads")
    ]


def _is_transformer(module):
    config = getattr(module, "config", None)
    return hasattr(config, "model_type") and bool(_parts(config))


def _resized(layer: Any, shape, **sizes):
    """Return a fresh layer of the same class and settings, of other sizes."""
    narrow = copy.deepcopy(layer)
    vars(narrow).update(sizes)
    for name, tensor in narrow.state_dict(keep_vars=True).items():
        if tensor.ndim:  # else it counts batches
            size = shape if name == "weight" else shape[:1]
            tensor.data = tensor.data.new_empty(size)
    narrow.reset_parameters()
    return narrow
