"""Ensembles: callables `inputs -> logits [members, batch, classes]`, however their members came to be."""

import copy
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from uqlab._ensemble import Ensemble, FoldedEnsemble, SeparateEnsemble, member_seed
from uqlab.adapters import BatchLinear, LoRALinear, SVDLinear
from uqlab.layers import MemberDropout, MemberLayer, MemberLinear, replace_layers

__all__ = [
    "Ensemble", "FoldedEnsemble", "SeparateEnsemble", "batch", "deep", "from_members", "lora", "member_seed",
    "singular_value",
]  # fmt: skip

Heads = Literal["independent", "shared"]
# The attention's projections in transformers (ViT, CLIP, BERT and its kin) and timm.
ATTENTION = r"(^|\.)(q_proj|k_proj|v_proj|o_proj|out_proj|query|key|value|attention\.output\.dense|attn\.(qkv|proj))$"

ELEMENTWISE = {
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish,
}  # fmt: skip
# Modules that treat every row of a batch alike, so that members can be folded into the batch.
_ROW_BY_ROW = ELEMENTWISE | {nn.Sequential, nn.Linear, nn.Flatten}


def deep(
    make_model: Callable[[], nn.Module], members: int | range, seed: int = 0, *, fold: bool | None = None
) -> Ensemble:
    """A deep ensemble: networks of one architecture from independent initialisations (Lakshminarayanan et al., 2017).

    `make_model()` returns a new network; member m's weights depend on (seed, m) alone, so `members=range(4, 10)` are
    the last six of `members=10`. Networks of linear layers are folded: all members train as one batched program.
    `fold=True` insists on that, `fold=False` runs the members one after the other; None folds where it is known to be
    right: linear layers and elementwise ones of torch.nn, which treat every row of a batch alike.

    Noise is a member's own where it is `nn.Dropout`; other random layers and functions draw from torch's global
    generator. Raises ValueError for members < 1, a `make_model` that returns one network twice, and `fold=True` with
    parameters outside linear layers; TypeError for members that are neither an integer nor a range.
    """
    if not isinstance(members, range):
        members = range(operator.index(members))
    if len(members) < 1:
        raise ValueError(f"an ensemble needs at least one member, got members={members}")
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    models = []
    for m in members:
        with torch.random.fork_rng(devices):
            torch.manual_seed(member_seed(seed, m, "weights"))
            models.append(make_model())
    if len({id(model) for model in models}) < len(models):
        raise ValueError("make_model returned the same network twice; it must build a new one in every call")
    if fold is None:
        fold = _stackable(models) and all(type(part) in _ROW_BY_ROW for part in models[0].modules())
        fold = fold and not any(part.start_dim != 1 for part in models[0].modules() if isinstance(part, nn.Flatten))
    if fold:
        return FoldedEnsemble(_stack(models), members)
    for model in models:
        if any(isinstance(part, nn.Dropout) for part in model.modules()):
            replace_layers(model, nn.Dropout, lambda _, layer: MemberDropout(1, layer.p))
    return SeparateEnsemble(models, members)


def from_members(models: Sequence[nn.Module]) -> Ensemble:
    """The ensemble of networks trained elsewhere; `ensemble(x)[m]` equals `models[m](x)`.

    The modules are used as they are, not copied; dropout of theirs draws from torch's global generator. Raises
    ValueError for an empty list, TypeError for what is no module.
    """
    if not models:
        raise ValueError("from_members needs at least one model, got an empty list")
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"from_members takes torch modules, got {type(model).__name__}")
    return SeparateEnsemble(models, range(len(models)))


def _stackable(models: Sequence[nn.Module]) -> bool:
    """All parameters belong to linear layers, equal in name and shape over the members, and nothing else has state."""
    if any(True for _ in models[0].buffers()):
        return False
    owners = [part for part in models[0].modules() if any(True for _ in part.parameters(recurse=False))]
    shapes = [[(name, weight.shape) for name, weight in model.named_parameters()] for model in models]
    return bool(owners) and all(type(part) is nn.Linear for part in owners) and all(s == shapes[0] for s in shapes)


def _stack(models: Sequence[nn.Module]) -> nn.Module:
    """One network whose linear layers hold the weights of all `models`."""
    if not _stackable(models):
        raise ValueError(
            "fold=True needs networks whose parameters all belong to nn.Linear layers of equal shapes; "
            "use fold=False, which runs the members one after the other"
        )
    network = copy.deepcopy(models[0])
    if isinstance(network, nn.Linear):  # logistic regression
        return nn.Sequential(MemberLinear.stack([cast(nn.Linear, model) for model in models]))

    def stack(name: str, _: nn.Linear) -> MemberLinear:
        return MemberLinear.stack([cast(nn.Linear, model.get_submodule(name)) for model in models])

    replace_layers(network, nn.Linear, stack)
    if any(isinstance(part, nn.Dropout) for part in network.modules()):
        replace_layers(network, nn.Dropout, lambda _, layer: MemberDropout(len(models), layer.p))
    return network


# Implicit ensembles: one backbone, a little of every member's own ----------------------------------------------------
def lora(
    backbone: nn.Module,
    members: int,
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

    Member m depends on (seed, m) alone. Raises ValueError for a target that matches no linear layer, members < 1, a
    rank below 1 or above the size of a layer, an unknown `heads`; TypeError for what is no network.
    """

    def make(name: str, layer: nn.Linear, generators: list[torch.Generator]) -> LoRALinear:
        if not 1 <= rank <= min(layer.weight.shape):
            out_features, in_features = layer.weight.shape
            raise ValueError(
                f"rank must be 1 to {min(layer.weight.shape)} for {name} [{out_features}, {in_features}], got {rank}"
            )
        return LoRALinear.start(layer, rank, gain, generators)

    return _implicit(backbone, members, target or ATTENTION, heads, seed, make)


def singular_value(
    backbone: nn.Module,
    members: int,
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
    return _implicit(backbone, members, target, heads, seed, make, head_std=0.01)


def batch(
    backbone: nn.Module,
    members: int,
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

    return _implicit(backbone, members, target or ATTENTION, heads, seed, make)


def _implicit(
    backbone: nn.Module,
    members: int,
    target: str | None,
    heads: str,
    seed: int,
    make: Callable[[str, nn.Linear, list[torch.Generator]], MemberLayer],
    head_std: float | None = None,
) -> FoldedEnsemble:
    """The frozen backbone with `make(name, layer, the members' generators)` for each target layer, and heads."""
    if not isinstance(backbone, nn.Module) or isinstance(backbone, Ensemble):
        raise TypeError(f"the backbone must be one torch module, got {type(backbone).__name__}")
    if heads not in ("independent", "shared"):
        raise ValueError(f'heads must be "independent" or "shared", got {heads!r}')
    if operator.index(members) < 1:
        raise ValueError(f"an ensemble needs at least one member, got members={members}")
    network = frozen(backbone)
    linear = [name for name, part in network.named_modules() if type(part) is nn.Linear and name]
    if not linear:
        raise ValueError(f"{type(backbone).__name__} has no nn.Linear layer inside; implicit ensembles change those")
    *inner, head = linear
    chosen = [name for name in inner if target is None or re.search(target, name)]
    if not chosen and target == ATTENTION:
        chosen = inner
    if not chosen:
        raise ValueError(
            f"target {target!r} matches no linear layer before the classifier {head!r}; there are "
            f"{', '.join(inner) or 'none'}"
        )
    generators = [torch.Generator().manual_seed(member_seed(seed, m, "adapter")) for m in range(members)]
    exactly = "|".join(f"^{re.escape(name)}$" for name in chosen)
    replace_layers(network, exactly, lambda name, layer: make(name, layer, generators))
    classifier = network.get_submodule(head)
    assert isinstance(classifier, nn.Linear)
    if heads == "shared":
        for name, p in list(classifier.named_parameters()):
            setattr(classifier, name, nn.Parameter(p.detach().clone()))
    else:
        layer = _heads(classifier, head_std, generators)
        replace_layers(network, f"^{re.escape(head)}$", lambda *_: layer)
    if any(isinstance(part, nn.Dropout) for part in network.modules()):
        replace_layers(network, nn.Dropout, lambda _, layer: MemberDropout(members, layer.p))
    return FoldedEnsemble(network, range(members))


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
