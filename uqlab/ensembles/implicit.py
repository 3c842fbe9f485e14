"""How implicit ensembles are built: one backbone that all members share, and a little of every member's own.

    method                    the weight that member m sees     of member m's own
    LoRA-Ensemble             W + B_m A_m                       A_m [rank, in], B_m [out, rank]
    singular value ensemble   U diag(max(s_m, 0)) V^T           s_m [k], bias [out]
    BatchEnsemble             W * (r_m s_m^T)                   r_m [out], s_m [in], bias [out]
    BatchEnsemble++           W + r_m s_m^T                     the same
    mask extraction           W * (row_m col_m^T)               masks row_m [out], col_m [in]
    Masksembles               W diag(z_m), z_m fixed            nothing that is trained
    FiLM-Ensemble             W, after norms of its own         gamma_m, beta_m [features], batch statistics

W is the backbone's own tensor, never copied, unless it is trained. Of convolutions the same is said with kernels.
"""

import copy
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from uqlab.core.checks import one_network
from uqlab.core.files import fingerprint
from uqlab.core.modules import frozen
from uqlab.ensembles.base import FoldedEnsemble, member_range, member_seed, member_text
from uqlab.ensembles.layers import MemberLinear, own_dropout, replace_layers
from uqlab.ensembles.norms import own_statistics

Classifiers = Literal["independent", "shared"]
# The attention's projections in transformers (ViT, CLIP, BERT and its kin, DistilBERT, DeBERTa, ModernBERT) and timm.
ATTENTION = (
    r"(^|\.)([qkvo]_proj|out_proj|query|key|value|(query|key|value)_proj|[qkv]_lin|out_lin|attention\.output\.dense"
    r"|attn\.(qkv|proj|Wqkv|Wo))$"
)


def check_backbone(backbone: nn.Module, members: int | str | range) -> range:
    """The members' numbers; raises TypeError, ValueError for what is no backbone."""
    one_network(backbone, "an implicit ensemble")
    ids = member_range(members)
    where = sorted({str(tensor.device) for tensor in (*backbone.parameters(), *backbone.buffers())})
    if len(where) > 1:
        raise ValueError(f"the backbone lies on {' and '.join(where)}: move it to one, backbone.to(device)")
    return ids


def exactly(names: list[str]) -> str:
    """A regular expression that matches these module names alone."""
    return "|".join(f"^{re.escape(name)}$" for name in names)


def is_linear(part: nn.Module) -> bool:
    return type(part) is nn.Linear


def is_product(part: nn.Module) -> bool:
    """A linear layer, or a convolution that is one on every patch."""
    return is_linear(part) or (type(part) is nn.Conv2d and part.groups == 1 and part.padding_mode == "zeros")


def implicit(
    backbone: nn.Module,
    members: int | str | range,
    target: str | None,
    classifiers: str,
    seed: int,
    make: Callable[[str, Any, list[torch.Generator]], nn.Module],
    recipe: dict[str, Any],
    everywhere: bool = False,
    classifier_std: float | None = None,
    fits: Callable[[nn.Module], bool] = is_linear,
    called: str = "linear layer",
    train_backbone: bool = False,
) -> FoldedEnsemble:
    """The frozen backbone with `make(name, layer, the members' generators)` for each target layer, and classifiers.

    Without a target: every layer that `fits`, or, unless `everywhere`, those of the attention if there are any. The
    backbone's copy is trained by all members together if `train_backbone`; its batch statistics are then the members'
    own.
    """
    ids = check_backbone(backbone, members)
    network = copy.deepcopy(backbone).requires_grad_() if train_backbone else frozen(backbone)
    linear = [name for name, part in network.named_modules() if is_linear(part) and name]
    if not linear:
        raise ValueError(f"{type(backbone).__name__} has no nn.Linear layer inside; implicit ensembles change those")
    head = linear[-1]
    inner = [name for name, part in network.named_modules() if name and name != head and fits(part)]
    wanted = target if target is not None or everywhere else ATTENTION
    chosen = [name for name in inner if wanted is None or re.search(wanted, name)]
    if not chosen and target is None:
        chosen = inner
    if not chosen:
        raise ValueError(
            f"target {target!r} matches no {called} before the classifier {head!r}; there are "
            f"{', '.join(inner) or 'none'}"
        )
    weights = {name: p for name, p in network.named_parameters() if not (name.startswith(f"{head}.") or p.is_meta)}
    of_backbone = "" if train_backbone else fingerprint(weights)  # the classifier is fresh wherever one is loaded
    generators = [torch.Generator().manual_seed(member_seed(seed, m, "adapter")) for m in ids]
    replace_layers(network, exactly(chosen), lambda name, layer: make(name, layer, generators))
    classifier = network.get_submodule(head)
    assert isinstance(classifier, nn.Linear)
    if classifiers == "shared":
        for name, p in list(classifier.named_parameters()):
            setattr(classifier, name, nn.Parameter(p.detach().clone()))
    else:
        layer = fresh_classifiers(classifier, classifier_std, generators)
        replace_layers(network, exactly([head]), lambda *_: layer)
    if train_backbone:
        own_statistics(network, len(ids))
    own_dropout(network, len(ids))
    ensemble = FoldedEnsemble(network, ids)
    settings = {"members": member_text(ids), "target": target, "classifiers": classifiers, "seed": seed}
    ensemble.recipe = {"backbone": of_backbone, **recipe, **settings}
    return ensemble


def trained_together(network: nn.Module, ids: range, recipe: dict[str, Any]) -> FoldedEnsemble:
    """The ensemble of a network all of whose weights the members train; batch statistics and dropout are their own."""
    own_statistics(network, len(ids))
    own_dropout(network, len(ids))
    ensemble = FoldedEnsemble(network, ids)
    ensemble.recipe = {"backbone": "", **recipe, "members": member_text(ids)}
    return ensemble


def fresh_classifiers(head: nn.Linear, std: float | None, generators: list[torch.Generator]) -> MemberLinear:
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
