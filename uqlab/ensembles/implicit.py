"""Implicit ensembles: one backbone that all members share, and a little of every member's own."""

import copy
import hashlib
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from uqlab.ensembles.adapters import BatchLinear, LoRALinear, SVDLinear
from uqlab.ensembles.base import Ensemble, FoldedEnsemble, member_range, member_seed, member_text
from uqlab.ensembles.layers import FixedDropout, MemberDropout, MemberLayer, MemberLinear, replace_layers

Heads = Literal["independent", "shared"]
# The attention's projections in transformers (ViT, CLIP, BERT and its kin, DistilBERT, DeBERTa, ModernBERT) and timm.
ATTENTION = (
    r"(^|\.)([qkvo]_proj|out_proj|query|key|value|(query|key|value)_proj|[qkv]_lin|out_lin|attention\.output\.dense"
    r"|attn\.(qkv|proj|Wqkv|Wo))$"
)


def lora(
    backbone: nn.Module,
    members: int | str | range,
    rank: int = 8,
    *,
    target: str | None = None,
    gain: float = 10.0,
    heads: Heads = "independent",
    seed: int = 0,
) -> FoldedEnsemble:
    """LoRA-Ensemble: W + B_m A_m in every target layer, W frozen (Muhlematter et al. 2024).

    backbone: the pretrained network, a model of transformers or any module whose last linear layer gives the classes.
        Its weights are shared, not copied, and never change.
    rank: of the update. A is xavier-uniform with `gain`, B zero, and there is no factor alpha / rank.
    target: a regular expression on module names; None for the attention's projections, or in a network without
        attention every linear layer but the last.
    heads: "independent", a classifier of its own for each member, freshly initialised; "shared", the backbone's
        classifier, trained by all.

    members: how many, or the numbers of a shard, "8:16"; see `concatenate`.

    Member m depends on (seed, m) alone. Raises ValueError for a target that matches no linear layer, members < 1, a
    rank below 1 or above the size of a layer, an unknown `heads`, a backbone on several devices; TypeError for what is
    no network.
    """

    def make(name: str, layer: nn.Linear, generators: list[torch.Generator]) -> LoRALinear:
        if not 1 <= rank <= min(layer.weight.shape):
            out_features, in_features = layer.weight.shape
            raise ValueError(
                f"rank must be 1 to {min(layer.weight.shape)} for {name} [{out_features}, {in_features}], got {rank}"
            )
        return LoRALinear.start(layer, rank, gain, generators)

    recipe = {"method": "lora", "rank": rank, "gain": gain}
    return _implicit(backbone, members, target, heads, seed, make, recipe)


def singular_value(
    backbone: nn.Module,
    members: int | str | range,
    *,
    target: str | None = None,
    init_std: float = 0.01,
    heads: Heads = "independent",
    seed: int = 0,
) -> FoldedEnsemble:
    """Singular value ensemble: U diag(s_m) V^T in every target layer, U and V frozen (Turkoglu et al. 2026).

    init_std: the members start from s_m = S (1 + init_std * noise) and biases b + init_std * noise; their own
        classifiers from Normal weights of standard deviation 0.01 and zero biases.
    target: a regular expression on module names; None for every linear layer but the classifier.

    The rest as in `lora`. Raises ValueError for init_std < 0, and as `lora`.
    """
    if not 0 <= init_std < math.inf:
        raise ValueError(f"init_std must be 0 or positive, got {init_std}")
    make = lambda _, layer, generators: SVDLinear.start(layer, init_std, generators)  # noqa: E731
    recipe = {"method": "singular_value", "init_std": init_std}
    return _implicit(backbone, members, target, heads, seed, make, recipe, everywhere=True, head_std=0.01)


def batch(
    backbone: nn.Module,
    members: int | str | range,
    *,
    target: str | None = None,
    std: float = math.sqrt(0.02),
    additive: bool = False,
    heads: Heads = "independent",
    seed: int = 0,
) -> FoldedEnsemble:
    """BatchEnsemble: W * (r_m s_m^T) in every target layer, with one W for all that is trained too (Wen et al. 2020).

    std: of r and s, which are Normal around 1 (Muhlematter et al. 2024, I.1).
    additive: W + r_m s_m^T instead, with W frozen and r and s Normal around 0: BatchEnsemble++ (I.2, eq. 12).

    What is trained of the backbone's, the target layers' W, is copied. The rest as in `lora`.
    """
    if not 0 <= std < math.inf:
        raise ValueError(f"std must be 0 or positive, got {std}")

    def make(_: str, layer: nn.Linear, generators: list[torch.Generator]) -> BatchLinear:
        if not additive:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
        return BatchLinear.start(layer, std, additive, generators)

    recipe = {"method": "batch", "std": std, "additive": additive}
    return _implicit(backbone, members, target, heads, seed, make, recipe)


class DropoutEnsemble(FoldedEnsemble):
    """MC dropout: every member drops the same units for all inputs, until `resample` is called."""

    def resample(self, seed: int) -> "DropoutEnsemble":
        """New units for every member, a function of (seed, member) alone. Returns the ensemble."""
        layers = [part for part in self.network.modules() if isinstance(part, FixedDropout)]
        for number, layer in enumerate(layers):
            layer.reseed([member_seed(seed, m, "mc dropout", number) for m in self.member_ids])
        return self


def dropout(model: nn.Module, members: int | str | range, p: float = 0.2, *, seed: int = 0) -> DropoutEnsemble:
    """MC dropout as an ensemble: member m keeps a fixed part of the units, W diag(z_m) (Gal & Ghahramani 2016).

    model: a trained network, whose weights are shared, not copied, and frozen. Its `nn.Dropout` modules are replaced;
        in a network without, one is put before every linear layer but the first.
    p: the probability that a unit is dropped, in [0, 1), whatever the modules' own. Active in evaluation mode too.

    Raises ValueError for members < 1, p outside [0, 1) and a network with neither dropout nor two linear layers.
    """
    ids = _check_backbone(model, members)
    network = frozen(model)
    kinds = (nn.Dropout, MemberDropout)  # members of a deep ensemble may hold the latter
    if any(isinstance(part, kinds) for part in network.modules()):
        replace_layers(network, kinds, lambda *_: FixedDropout(len(ids), p))
    else:
        names = [name for name, part in network.named_modules() if type(part) is nn.Linear][1:]
        if not names:
            raise ValueError(f"{type(model).__name__} has neither nn.Dropout nor a second nn.Linear to put it before")
        put = lambda _, layer: nn.Sequential(FixedDropout(len(ids), p), layer)  # noqa: E731
        replace_layers(network, _exactly(names), put)
    return DropoutEnsemble(network, ids).resample(seed).eval()


def _check_backbone(backbone: nn.Module, members: int | str | range) -> range:
    if not isinstance(backbone, nn.Module) or isinstance(backbone, Ensemble):
        raise TypeError(f"the backbone must be one torch module, got {type(backbone).__name__}")
    ids = member_range(members)
    devices = sorted({str(tensor.device) for tensor in (*backbone.parameters(), *backbone.buffers())})
    if len(devices) > 1:
        raise ValueError(f"the backbone lies on {' and '.join(devices)}: move it to one, backbone.to(device)")
    return ids


def _exactly(names: list[str]) -> str:
    return "|".join(f"^{re.escape(name)}$" for name in names)


def _implicit(
    backbone: nn.Module,
    members: int | str | range,
    target: str | None,
    heads: str,
    seed: int,
    make: Callable[[str, nn.Linear, list[torch.Generator]], MemberLayer],
    recipe: dict[str, Any],
    everywhere: bool = False,
    head_std: float | None = None,
) -> FoldedEnsemble:
    """The frozen backbone with `make(name, layer, the members' generators)` for each target layer, and heads.

    Without a target: every linear layer, or, unless `everywhere`, those of the attention if there are any.
    """
    ids = _check_backbone(backbone, members)
    if heads not in ("independent", "shared"):
        raise ValueError(f'heads must be "independent" or "shared", got {heads!r}')
    network = frozen(backbone)
    linear = [name for name, part in network.named_modules() if type(part) is nn.Linear and name]
    if not linear:
        raise ValueError(f"{type(backbone).__name__} has no nn.Linear layer inside; implicit ensembles change those")
    *inner, head = linear
    wanted = target if target is not None or everywhere else ATTENTION
    chosen = [name for name in inner if wanted is None or re.search(wanted, name)]
    if not chosen and target is None:
        chosen = inner
    if not chosen:
        raise ValueError(
            f"target {target!r} matches no linear layer before the classifier {head!r}; there are "
            f"{', '.join(inner) or 'none'}"
        )
    fingerprint = _fingerprint(network, head)
    generators = [torch.Generator().manual_seed(member_seed(seed, m, "adapter")) for m in ids]
    replace_layers(network, _exactly(chosen), lambda name, layer: make(name, layer, generators))
    classifier = network.get_submodule(head)
    assert isinstance(classifier, nn.Linear)
    if heads == "shared":
        for name, p in list(classifier.named_parameters()):
            setattr(classifier, name, nn.Parameter(p.detach().clone()))
    else:
        layer = _heads(classifier, head_std, generators)
        replace_layers(network, _exactly([head]), lambda *_: layer)
    if any(isinstance(part, nn.Dropout) for part in network.modules()):
        replace_layers(network, nn.Dropout, lambda _, layer: MemberDropout(len(ids), layer.p))
    ensemble = FoldedEnsemble(network, ids)
    settings = {"members": member_text(ids), "target": target, "heads": heads, "seed": seed}
    ensemble.recipe = {"backbone": fingerprint, **recipe, **settings}
    return ensemble


def _fingerprint(network: nn.Module, head: str) -> str:
    """Of up to 1000 values of every weight but the classifier's, which is fresh wherever a backbone is loaded."""
    digest = hashlib.sha256()
    for name, p in network.named_parameters():
        if not name.startswith(f"{head}.") and not p.is_meta:
            digest.update(p.detach().flatten()[:1000].cpu().double().numpy().tobytes())
    return digest.hexdigest()


def _heads(head: nn.Linear, std: float | None, generators: list[torch.Generator]) -> MemberLinear:
    """A fresh classifier for every member: Normal weights and no bias, or torch's uniform default if `std` is None."""
    out_features, in_features = head.weight.shape
    weight = head.weight.new_zeros(len(generators), out_features, in_features)
    bias = None if head.bias is None else head.bias.new_zeros(len(generators), out_features)
    bound = 1 / math.sqrt(in_features)
    for m, generator in enumerate(generators):
        if std is not None:
            weight[m] = std * torch.randn(out_features, in_features, generator=generator)
            continue
        weight[m] = torch.empty(out_features, in_features).uniform_(-bound, bound, generator=generator)
        if bias is not None:
            bias[m] = torch.empty(out_features).uniform_(-bound, bound, generator=generator)
    return MemberLinear(weight, bias)


def frozen(model: nn.Module) -> Any:
    """A copy whose parameters and buffers are the model's memory, and whose parameters are frozen."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo)
