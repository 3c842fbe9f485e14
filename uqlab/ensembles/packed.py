"""Packed-Ensembles: narrow networks side by side, as the groups of one wide network."""

import copy
import math

from torch import nn

from uqlab.core.checks import positive
from uqlab.ensembles.base import Ensemble, Members, member_range, recorded
from uqlab.ensembles.deep import deep
from uqlab.ensembles.implicit import plain, put
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

MISFIT = (
    "a narrow network of packed does not take these inputs; one with a skip from the "
    "inputs, a layer that is used at two places, or a map that is flattened may need "
    "the whole width: take ensembles.deep of a network that you narrow"
)


@recorded
def packed(
    backbone: nn.Module,
    members: Members,
    alpha: float = 2.0,
    *,
    total_members: int | None = None,
    classifier: str | None = None,
    seed: int = 0,
) -> Ensemble:
    """Make a Packed-Ensemble: M networks alpha / M times as wide, side by side.

    Parameters
    ----------
    backbone : nn.Module
        The architecture; its weights play no part. Inputs and classes stay. A network
        of transformers keeps the size of its heads and has fewer of them.
    members : int or range
        As in `lora`.
    alpha : float
        Every width but those of inputs and classes becomes alpha / M of it, rounded up.
    total_members : int, optional
        M, the members of the whole ensemble, which shards must give; None for as many
        as `members` counts.
    classifier : str, optional
        As in `lora`.
    seed : int
        Given its width, member m depends on (seed, m) alone: the ensemble equals `deep`
        of networks of that width.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError
        If `alpha` is not positive, and for a network of other layers.
    TypeError
        If `backbone` is not a network.

    References
    ----------
    Laurent et al., "Packed-Ensembles for efficient uncertainty estimation", 2023.
    """
    ids = member_range(members)
    positive("alpha", alpha)
    whole = total_members or ids[-1] + 1
    ensemble = deep(lambda: _narrow(backbone, alpha / whole, classifier), ids, seed)
    ensemble.misfit, ensemble.ordered = MISFIT, [""]  # a call of the network itself
    like = next(backbone.parameters())
    return ensemble.to(like.device, like.dtype).train(backbone.training)


def _narrow(backbone, share, named):
    """Return a fresh network of the same architecture, `share` times as wide inside."""
    whole = nn.Sequential(plain(backbone, trained=True))
    last = f"0.{classifier(whole[0], named)}".rstrip(".")
    widths: dict[int, int] = {}  # of the layers so far: old -> new
    inside = ()  # prefixes of names inside networks of transformers
    sizes = []  # all are read before one changes, for layers may share a weight
    for name, module in list(whole.named_modules()):
        if name.startswith(inside):
            continue
        if _with_heads(getattr(module, "config", None)):
            put(whole, name, _transformer(module, share, widths))
            inside += (f"{name}.",)
        elif list(module.parameters(recurse=False)):
            sizes.append((module, *_sizes(module, share, widths, name == last)))
    for each in sizes:
        _resize(*each)
    return whole[0].train(backbone.training)


def _scaled(width, share, unit=1):
    """Return a width's share, rounded up to a multiple of a unit."""
    return math.ceil(width * share / unit - 1e-9) * unit


def _sizes(layer, share, widths, last):
    """Return outputs, inputs and groups of a narrow layer, and note its width.

    A norm of the network's inputs keeps its width.
    """
    groups = getattr(layer, "groups", 1)
    product = isinstance(layer, PRODUCTS) and 1 in (groups, layer.weight.shape[1])
    norm = type(layer) is nn.LayerNorm or hasattr(layer, "num_features")
    if not (product or (norm and layer.weight.ndim == 1)):
        raise ValueError(
            "packed narrows linear layers, convolutions of one group or of single "
            "channels, BatchNorm, LayerNorm and networks of transformers; this "
            f"network has {type(layer).__name__}"
        )
    out, width = (*layer.weight.shape, 0)[:2]
    if groups > 1:
        groups = _before(groups, widths)
        return _before(out, widths), groups, groups
    width = _before(width, widths)
    if not last and (product or widths):
        out = widths.setdefault(out, _scaled(out, share))
    return out, width, 1


def _before(width, widths):
    """Return the new width of a layer's inputs, perhaps of a flattened map."""
    for old in (width, *reversed(widths)):
        if old in widths and not width % old:
            return widths[old] * (width // old)
    return width


def _transformer(model, share, widths):
    """Return a fresh network of transformers with fewer heads of the same size."""
    config = copy.deepcopy(model.config)
    for section in _with_heads(config):
        width = getattr(section, "hidden_size", None)
        # heads that share keys stay together
        keys = getattr(section, "num_key_value_heads", None)
        keys = keys or section.num_attention_heads
        if not (width and isinstance(keys, int)):
            raise ValueError(
                f"packed needs layers of one width, {type(model).__name__} has several"
            )
        for name in (*HEADS, *MLPS):
            if size := getattr(section, name, None):
                unit = size // keys if name in HEADS else 1
                setattr(section, name, _scaled(size, share, unit))
        widths[width] = section.hidden_size
    narrow = type(model)(config)
    for hook in model._forward_hooks.values():
        narrow.register_forward_hook(hook)
    return narrow


def _with_heads(config):
    """Return those configurations, of towers or the whole, that have heads."""
    towers = getattr(config, "sub_configs", ())
    parts = config, *(getattr(config, name) for name in towers)
    return [part for part in parts if hasattr(part, "num_attention_heads")]


def _resize(layer, out, width, groups):
    """Give a layer fresh weights of another size, in place."""
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
