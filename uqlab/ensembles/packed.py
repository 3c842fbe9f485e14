"""Packed-Ensembles: narrow networks side by side, as the groups of one wide network."""

import copy
import math
from typing import Any

from torch import nn

from uqlab.core.checks import at_least, positive
from uqlab.ensembles.base import Ensemble, Members
from uqlab.ensembles.deep import deep
from uqlab.ensembles.implicit import check_backbone, plain, put
from uqlab.ensembles.recipes import recorded
from uqlab.models import classifier

PRODUCTS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
# In a transformer's configuration: what grows with the heads, and the widths of MLPs.
HEADS = "num_attention_heads", "num_key_value_heads", "hidden_size"
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


@recorded
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
    like = next(backbone.parameters())
    return ensemble.to(like.device, like.dtype).train(backbone.training)


class _Narrow:
    """The widths of a fresh network, `share` times as wide inside."""

    def __init__(self, share: float, gamma: int):
        self.share, self.gamma = share, gamma
        # of the layers before the one that is looked at: old -> new
        self.widths: dict[int, int] = {}

    def network(self, backbone: nn.Module, named: str | None = None) -> nn.Module:
        """Return a fresh narrow network of the same architecture."""
        whole = nn.Sequential(plain(backbone, trained=True))
        last = f"0.{classifier(whole[0], named)}".rstrip(".")
        inside = ()  # prefixes of names inside networks of transformers
        for name, module in list(whole.named_modules()):
            if name.startswith(inside):
                continue
            if _with_heads(getattr(module, "config", None)):
                put(whole, name, self.transformer(module))
                inside += (f"{name}.",)
            elif list(module.parameters(recurse=False)):
                put(whole, name, self.layer(module, name == last))
        return whole[0].train(backbone.training)

    def scaled(self, width: int, groups: int = 1) -> int:
        """Return a width's share, rounded up to a multiple of groups."""
        return math.ceil(width * self.share / groups - 1e-9) * groups

    def after(self, width: int) -> int:
        """Return the new width of a layer's outputs."""
        return self.widths.setdefault(width, self.scaled(width, self.gamma))

    def before(self, width: int) -> int:
        """Return the new width of a layer's inputs, perhaps of a flattened map."""
        for old in (width, *reversed(self.widths)):
            if old in self.widths and not width % old:
                return self.widths[old] * (width // old)
        return width

    def layer(self, layer: Any, last: bool) -> nn.Module:
        """Return a narrow layer; a norm of the network's inputs keeps its width."""
        apart = getattr(layer, "groups", 1)
        product = isinstance(layer, PRODUCTS) and 1 in (apart, layer.weight.shape[1])
        norm = type(layer) is nn.LayerNorm or hasattr(layer, "num_features")
        if not (product or (norm and layer.weight.ndim == 1)):
            raise ValueError(
                "packed narrows linear layers, convolutions of one group or of single "
                "channels, BatchNorm, LayerNorm and networks of transformers; this "
                f"network has {type(layer).__name__}"
            )
        out, width = (*layer.weight.shape, 0)[:2]
        groups = self.gamma if product and self.widths and not last else 1
        if apart > 1:
            groups = width = self.before(apart)
            out = self.before(out)
        elif product:
            width, out = self.before(width), out if last else self.after(out)
        elif self.widths:
            out = self.after(out)
        if groups > 1 and isinstance(layer, nn.Linear):
            return GroupedLinear(width, out, groups, bias=layer.bias is not None)
        return _resized(layer, out, width, groups)

    def transformer(self, model: Any) -> nn.Module:
        """Return a fresh network of transformers with fewer heads of the same size."""
        config = copy.deepcopy(model.config)
        for section in _with_heads(config):
            width = getattr(section, "hidden_size", None)
            # heads that share keys stay together
            keys = getattr(section, "num_key_value_heads", None)
            keys = keys or section.num_attention_heads
            if self.gamma > 1 or not (width and isinstance(keys, int)):
                raise ValueError(
                    "gamma must be 1 in a network of transformers, whose layers must "
                    f"have one width: got {self.gamma} and {type(model).__name__}"
                )
            for name in (*HEADS, *MLPS):
                if size := getattr(section, name, None):
                    unit = size // keys if name in HEADS else 1
                    setattr(section, name, self.scaled(size, unit))
            self.widths[width] = section.hidden_size
        narrow = type(model)(config)
        for hook in model._forward_hooks.values():
            narrow.register_forward_hook(hook)
        return narrow


def _with_heads(config: Any) -> list[Any]:
    """Return those configurations, of towers or the whole, that have heads."""
    towers = getattr(config, "sub_configs", ())
    parts = config, *(getattr(config, name) for name in towers)
    return [part for part in parts if hasattr(part, "num_attention_heads")]


def _resized(layer: Any, out: int, width: int = 0, groups: int = 1) -> Any:
    """Give a layer fresh weights of another size, and return it."""
    sizes = {
        "in_features": width,
        "out_features": out,
        "in_channels": width,
        "out_channels": out,
        "groups": groups,
        "num_features": out,
        "normalized_shape": (out,),
    }
    for name in sizes.keys() & vars(layer).keys():
        setattr(layer, name, sizes[name])
    for tensor in layer.state_dict(keep_vars=True).values():
        shape = out, width // groups, *tensor.shape[2:]
        tensor.data = tensor.data.new_empty(shape[: tensor.ndim])
    layer.reset_parameters()
    return layer
