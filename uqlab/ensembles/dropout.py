"""MC dropout as an ensemble: every member drops units of its own (Gal & Ghahramani 2016)."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from uqlab.core.checks import within
from uqlab.core.files import fingerprint
from uqlab.ensembles.base import FoldedEnsemble, member_seed, member_text
from uqlab.ensembles.implicit import check_backbone, plain
from uqlab.ensembles.layers import MemberDropout, MemberLayer, replace_layers
from uqlab.models import classifier

Kind = Literal["features", "attention"]
Network = TypeVar("Network", bound=nn.Module)


class FixedDropout(MemberLayer):
    """Dropout of the same features for all inputs of a member: x diag(z_m), in training and evaluation mode.

    What is dropped follows from the member's seed and the features [batch, features] or [batch, tokens, features], or
    the whole map [batch, channels, height, width], alone.
    """

    def __init__(self, seeds: Sequence[int], p: float):
        super().__init__()
        within("dropout probability", p, "[0, 1)")
        self.members, self.p = len(seeds), p
        self.reseed(seeds)

    def reseed(self, seeds: Sequence[int]) -> None:
        """Choose other features, from one seed for each member."""
        self.seeds, self.mask = list(seeds), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[-1:] if x.ndim == 3 else x.shape[1:]
        if self.mask.shape[1:] != shape or self.mask.device != x.device:
            kept = [
                torch.rand(shape, generator=torch.Generator().manual_seed(seed))
                >= self.p
                for seed in self.seeds
            ]
            self.mask = torch.stack(kept).to(x.device)
        factor = self.mask[self.active].to(x.dtype) / (1 - self.p)
        folded = x.unflatten(0, (len(factor), -1))
        return (
            folded
            * factor.view(len(factor), *[1] * (folded.ndim - factor.ndim), *shape)
        ).flatten(0, 1)

    def member(self, index: int) -> "FixedDropout":
        return self.shard(slice(index, index + 1))

    def shard(self, rows: slice) -> "FixedDropout":
        return FixedDropout(self.seeds[rows], self.p)

    def join(self, others: Sequence["FixedDropout"]) -> "FixedDropout":
        return FixedDropout(
            [seed for layer in (self, *others) for seed in layer.seeds], self.p
        )


class DropoutEnsemble(FoldedEnsemble):
    """MC dropout: every member drops the same units for all inputs, until `resample` is called."""

    def resample(self, seed: int) -> "DropoutEnsemble":
        """New units for every member, a function of (seed, member) alone. Returns the ensemble."""
        layers = [
            part for part in self.network.modules() if isinstance(part, FixedDropout)
        ]
        for number, layer in enumerate(layers):
            layer.reseed(
                [member_seed(seed, m, "mc dropout", number) for m in self.member_ids]
            )
        self.recipe = self.recipe and self.recipe | {"seed": seed}
        return self


def dropout(
    model: nn.Module,
    members: int | str | range,
    p: float = 0.2,
    *,
    kind: Kind = "features",
    seed: int = 0,
) -> DropoutEnsemble:
    """MC dropout as an ensemble: member m keeps a fixed part of the units, W diag(z_m) (Gal & Ghahramani 2016).

    model: a trained network, whose weights are shared, not copied, and frozen.
    p: the probability that a unit is dropped, in [0, 1), whatever the modules' own. Active in evaluation mode too.
    kind: "features" or "attention", see `place_dropout`. What a member drops is the same for all its inputs; the
        "MC dropout" of Muhlematter et al. 2024 drops attention logits, others for every input.

    Raises ValueError for members < 1, p outside [0, 1) and a network without a place for it.
    """
    ids = check_backbone(model, members)
    network = place_dropout(plain(model), lambda: FixedDropout(ids, p), kind)
    ensemble, weights = (
        DropoutEnsemble(network, ids),
        fingerprint(dict(model.named_parameters())),
    )
    ensemble.recipe = {
        "method": "dropout",
        "backbone": weights,
        "members": member_text(ids),
        "p": p,
        "kind": kind,
    }
    return ensemble.resample(seed).eval()


def place_dropout(
    network: Network, make: Callable[[], nn.Module], kind: Kind = "features"
) -> Network:
    """Put modules of dropout into a network, in place, and return it; before a lone linear layer, in a new one.

    kind: "features", instead of every nn.Dropout or, in a network without, before every linear layer but the first, or
        before the classifier where that is the only one;
        "attention", on the attention logits of a network of transformers (DropKey, Li et al. 2023): a logit that the
        module sets to 0 is left out of the softmax.

    Raises ValueError for a network without dropout and without a linear layer, or without such attention.
    """
    name, kinds = (
        type(network).__name__,
        (nn.Dropout, MemberDropout),
    )  # members of a deep ensemble may hold the latter
    if kind == "attention":
        modules: list[Any] = list(network.modules())
        found = [
            part
            for part in modules
            if hasattr(part, "is_causal") and hasattr(part, "config")
        ]
        of_torch = [part for part in modules if isinstance(part, nn.MultiheadAttention)]
        if not found and not of_torch:
            raise ValueError(
                f"{name} has no attention whose logits can be dropped: of transformers or torch's own; "
                'kind="features" drops features in any network'
            )
        for part in found:
            part.key_dropout, part.config._attn_implementation = (
                make(),
                _drop_keys_by_name(),
            )
        for part in of_torch:
            if not hasattr(part, "key_dropout"):  # else it only gets new ones
                part.register_forward_pre_hook(_mask_keys, with_kwargs=True)
            part.key_dropout = make()
    elif any(isinstance(part, kinds) for part in network.modules()):
        replace_layers(network, kinds, lambda *_: make())
    else:
        head = classifier(network)
        if not head:
            return nn.Sequential(make(), network)  # type: ignore[return-value]
        names = [
            name for name, part in network.named_modules() if type(part) is nn.Linear
        ]
        for name in names[1:] or [head]:
            network.set_submodule(
                name, nn.Sequential(make(), network.get_submodule(name))
            )
    return network


def _drop_keys_by_name() -> str:
    """The name by which transformers finds `_drop_keys`, with masks that are added to the logits."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("uqlab_drop_keys", _drop_keys)
    AttentionMaskInterface.register("uqlab_drop_keys", eager_mask)
    return "uqlab_drop_keys"


def _mask_keys(part: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments of torch's attention with a mask of the logits that are dropped, in training and evaluation."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key = given["query"], given["key"]
    batch, sequence = (0, 1) if part.batch_first else (1, 0)
    logits = query.new_ones(
        query.shape[batch], part.num_heads, query.shape[sequence], key.shape[sequence]
    )
    lowest = torch.finfo(query.dtype).min
    dropped = (
        torch.zeros_like(logits)
        .masked_fill(part.key_dropout(logits) == 0, lowest)
        .flatten(0, 1)
    )
    for name in ("attn_mask", "key_padding_mask"):
        mask = given.get(name)
        if mask is not None and mask.dtype == torch.bool:
            given[name] = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
                mask, lowest
            )
    mask = given.get("attn_mask")
    given["attn_mask"] = dropped if mask is None else (dropped + mask).clamp(min=lowest)
    return (), given | {"is_causal": False}


def _drop_keys(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention without the logits that are dropped; a row that loses all of them attends to all keys alike."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (
        copies := query.shape[1] // key.shape[1]
    ) > 1:  # heads that share keys and values
        key, value = (t.repeat_interleave(copies, 1) for t in (key, value))
    logits = query @ key.mT * scale  # [batch, heads, tokens, tokens]
    logits = logits if mask is None else logits + mask
    dropped = module.key_dropout(torch.ones_like(logits)) == 0
    weights = logits.masked_fill(dropped, torch.finfo(logits.dtype).min).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights
