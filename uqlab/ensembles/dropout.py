"""MC dropout as an ensemble: every member drops units of its own."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from uqlab.core.checks import one_of
from uqlab.core.modules import layers_of
from uqlab.ensembles.base import FoldedEnsemble, Members, member_seed
from uqlab.ensembles.implicit import check_backbone, plain
from uqlab.ensembles.layers import DROPOUT, SeededDropout, replace_layers
from uqlab.models import classifier

Kind = Literal["features", "attention"]
Network = TypeVar("Network", bound=nn.Module)


class FixedDropout(SeededDropout):
    """Dropout of the same features for all inputs of a member: x diag(z_m), always.

    What is dropped follows from the member's seed and the features, [batch, features]
    or [batch, tokens, features], or the whole map [batch, channels, height, width].
    """

    def reseed(self, seeds: Sequence[int]) -> None:
        """Choose other features, from one seed for each member."""
        super().reseed(seeds)
        self.mask = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Drop the members' features of x [members * batch, ...]."""
        shape = x.shape[-1:] if x.ndim == 3 else x.shape[1:]
        if self.mask.shape[1:] != shape or self.mask.device != x.device:
            generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
            drawn = torch.stack([torch.rand(shape, generator=g) for g in generators])
            self.mask = (drawn >= self.p).to(x.device)
        factor = self.mask[self.active].to(x.dtype) / (1 - self.p)
        rows = x.reshape(len(factor), -1, *shape)  # of inputs, or of their tokens
        return (rows * factor[:, None]).view(x.shape)

    def member(self, index):
        """Return the dropout of one member."""
        return FixedDropout(self.seeds[index : index + 1], self.p)


class DropoutEnsemble(FoldedEnsemble):
    """MC dropout: a member drops the same units for all inputs, until `resample`."""

    def resample(self, seed: int) -> "DropoutEnsemble":
        """Choose new units, from (seed, member) alone, and return the ensemble."""
        for number, layer in enumerate(layers_of(self.network, FixedDropout)):
            stream = "mc dropout", number
            layer.reseed([member_seed(seed, m, *stream) for m in self.member_ids])
        return self.with_recipe({**(self.recipe or {}), "seed": seed})


def dropout(
    model: nn.Module,
    members: Members,
    p: float = 0.2,
    *,
    kind: Kind = "features",
    seed: int = 0,
) -> DropoutEnsemble:
    """Make MC dropout an ensemble: member m keeps a fixed part of the units.

    Parameters
    ----------
    model : nn.Module
        A trained network, whose weights are shared, not copied, and frozen. Member m
        sees W diag(z_m).
    members : int, str or range
        As in `lora`.
    p : float
        The probability that a unit is dropped, in [0, 1), whatever the modules' own.
        Active in evaluation mode too.
    kind : {"features", "attention"}
        See `place_dropout`. What a member drops is the same for all its inputs; the "MC
        dropout" of Muhlematter et al. 2024 drops attention logits, others for every
        input.
    seed : int
        What member m drops depends on (seed, m) alone.

    Returns
    -------
    DropoutEnsemble

    Raises
    ------
    ValueError
        For members below 1, p outside [0, 1) and a network without a place for it.

    References
    ----------
    Gal, Ghahramani, "Dropout as a Bayesian approximation", 2016.
    """
    ids = check_backbone(model, members)
    network = place_dropout(plain(model), lambda: FixedDropout(ids, p), kind)
    ensemble = DropoutEnsemble(network, ids)
    ensemble.with_recipe({"method": "dropout", "p": p, "kind": kind})
    return ensemble.resample(seed).eval()


def place_dropout(
    network: Network, make: Callable[[], nn.Module], kind: Kind = "features"
) -> Network:
    """Put modules of dropout into a network, in place, and return it.

    Parameters
    ----------
    network : nn.Module
        A lone linear layer is put into a new network.
    make : callable
        Returns a new module of dropout.
    kind : {"features", "attention"}
        "features": instead of every nn.Dropout or, in a network without, before every
        linear layer but the first, or before the classifier where that is the only one.
        "attention": on the attention logits of a network of transformers (DropKey, Li
        et al. 2023); a logit that the module sets to 0 is left out of the softmax.

    Raises
    ------
    ValueError
        For a network without dropout and without a linear layer, or without such
        attention.
    """
    one_of("kind", kind, ("features", "attention"))
    if kind == "attention":
        _drop_attention(network, make)
        return network
    if replace_layers(network, DROPOUT, lambda *_: make()):
        return network
    head = classifier(network)
    if not head:
        return nn.Sequential(make(), network)  # type: ignore[return-value]
    linear = [n for n, part in network.named_modules() if type(part) is nn.Linear]
    for name in linear[1:] or [head]:
        behind = nn.Sequential(make(), network.get_submodule(name))
        network.set_submodule(name, behind)
    return network


def _drop_attention(network, make):
    """Give every attention of a network a module that drops its logits, in place."""
    changed = False
    for module in list(network.modules()):
        if isinstance(module, nn.MultiheadAttention):
            if not hasattr(module, "key_dropout"):  # else it only gets new ones
                module.register_forward_pre_hook(_mask_keys, with_kwargs=True)
        elif hasattr(module, "is_causal") and hasattr(module, "config"):
            module.config._attn_implementation = _drop_keys_by_name()
        else:
            continue
        module.key_dropout = make()
        changed = True
    if not changed:
        raise ValueError(
            f"{type(network).__name__} has no attention whose logits can be dropped: "
            "of transformers or torch's own; "
            'kind="features" drops features in any network'
        )


def _drop_keys_by_name():
    """Return the name by which transformers finds `_drop_keys`, with additive masks."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("uqlab_drop_keys", _drop_keys)
    AttentionMaskInterface.register("uqlab_drop_keys", eager_mask)
    return "uqlab_drop_keys"


def _mask_keys(attention: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Give torch's attention a mask of the logits that are dropped."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    inputs = dict(zip(names, args, strict=False)) | kwargs
    query, key = inputs["query"], inputs["key"]
    batch, places = (0, 1) if attention.batch_first else (1, 0)
    sizes = (
        query.shape[batch],
        attention.num_heads,
        query.shape[places],
        key.shape[places],
    )
    lowest = torch.finfo(query.dtype).min

    def added(mask) -> Any:
        """Return a mask that is added to the logits."""
        if mask is None or mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, lowest)

    dropped = added(attention.key_dropout(query.new_ones(sizes)) == 0).flatten(0, 1)
    for name in ("attn_mask", "key_padding_mask"):
        inputs[name] = added(inputs.get(name))
    if inputs["attn_mask"] is not None:
        dropped = (dropped + inputs["attn_mask"]).clamp(min=lowest)
    return (), inputs | {"attn_mask": dropped, "is_causal": False}


def _drop_keys(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attend without the logits that are dropped.

    A row that loses all of them attends to all keys alike.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    copies = query.shape[1] // key.shape[1]  # heads that share keys and values
    key, value = (t.repeat_interleave(copies, 1) for t in (key, value))
    logits = query @ key.mT * scale  # [batch, heads, tokens, tokens]
    logits = logits if mask is None else logits + mask
    dropped = module.key_dropout(torch.ones_like(logits)) == 0
    weights = logits.masked_fill(dropped, torch.finfo(logits.dtype).min).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights
