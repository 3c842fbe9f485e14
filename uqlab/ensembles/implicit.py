"""How implicit ensembles are built: one backbone that all members share, and a little of every member's own.

    method                    the weight that member m sees     of member m's own
    LoRA-Ensemble             W + B_m A_m                       A_m [rank, in], B_m [out, rank]
    singular value ensemble   U diag(max(s_m, 0)) V^T           s_m [k], bias [out]
    BatchEnsemble             W * (r_m s_m^T), W trained        r_m [out], s_m [in], bias [out]
    BatchEnsemble++           W + r_m s_m^T, W trained          the same
    mask extraction           W * (row_m col_m^T)               masks row_m [out], col_m [in]
    Masksembles               W diag(z_m), z_m fixed            nothing that is trained
    FiLM-Ensemble             W, after norms of its own         gamma_m, beta_m [features], batch statistics

W is the backbone's own tensor, never copied, unless it is trained. A kernel is the matrix of its patches.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from uqlab.core.checks import one_network
from uqlab.core.files import fingerprint
from uqlab.core.modules import frozen
from uqlab.ensembles.base import FoldedEnsemble, member_range, member_seed, member_text
from uqlab.ensembles.layers import MemberLayer, own_dropout, plain_linear
from uqlab.ensembles.members import MemberModule, MemberParameter, Own, weight_name
from uqlab.models import ATTENTION, classifier

Classifiers = Literal["independent", "shared"]
Make = Callable[["Site", list[torch.Generator]], Mapping[str, MemberParameter]]
# Modules that multiply by weights of their own, or of modules inside them, in a way of their own.
UNITS = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Site(NamedTuple):
    """A weight of a network that may be the members' own."""

    holder: str  # the name of the module that it is computed by
    parameter: str  # the weight's name in that module
    module: Any

    @property
    def name(self) -> str:
        """The weight's name, as targets see it: that of its module, or of the parameter in a module with several."""
        return weight_name(self.holder, self.parameter)

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter(self.parameter)

    @property
    def bias_name(self) -> str:
        """The name of the bias that belongs to the weight."""
        before, _, last = self.parameter.rpartition("weight")
        return f"{before}bias{last}"

    @property
    def bias(self) -> nn.Parameter | None:
        return dict(self.module.named_parameters()).get(self.bias_name)


def sites(network: nn.Module) -> list[Site]:
    """Find the weights of a network that multiply its features, in the order of its modules.

    Weights of linear layers, convolutions, attention and recurrent layers; of any other module but embeddings that
    holds a matrix `weight`; and matrices of other names, which `named` tells apart.
    """
    found: list[Site] = []
    inside = ""
    for name, part in network.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(part, UNITS):
            inside = f"{name}." if name else ""
            named = [
                n for n, p in part.named_parameters() if p.ndim == 2 and "weight" in n
            ]
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag):
            continue
        else:
            own = part.named_parameters(recurse=False)
            named = [n for n, p in own if p.ndim == 2 or (p.ndim > 2 and n == "weight")]
        found += [Site(name, parameter, part) for parameter in named]
    return found


def weights_of(network: nn.Module) -> dict[str, Any]:
    """Return the weights of a network by the names that targets have, in its order.

    What members share is a tensor; what depends on the member says what each sees by `weight(m)`.
    """
    shared: dict[str, list[Site]] = {}
    for site in sites(network):
        if is_usual(site):
            shared.setdefault(site.holder, []).append(site)
    found: dict[str, Any] = {}
    for holder, part in network.named_modules():
        own = part.own() if isinstance(part, MemberLayer) else {}
        seen = {name: p for name, p in own.items() if len(p.shape) > 1}
        seen |= {
            site.parameter: site.weight.detach() for site in shared.get(holder, [])
        }
        for name, weight in seen.items():
            found[weight_name(holder.removesuffix("inner").rstrip("."), name)] = weight
    return found


def is_usual(site: Site) -> bool:
    """Whether a weight is taken without being named: a module's `weight`, or that of a unit of torch."""
    return site.parameter == "weight" or isinstance(site.module, UNITS)


def is_matrix(site: Site) -> bool:
    """Whether the weight is one matrix, not a kernel."""
    return site.weight.ndim == 2


def check_backbone(backbone: nn.Module, members: int | str | range) -> range:
    """The members' numbers; raises TypeError, ValueError for what is no backbone."""
    one_network(backbone, "an implicit ensemble")
    ids = member_range(members)
    where = sorted(
        {str(tensor.device) for tensor in (*backbone.parameters(), *backbone.buffers())}
    )
    if len(where) > 1:
        raise ValueError(
            f"the backbone lies on {' and '.join(where)}: move it to one, backbone.to(device)"
        )
    return ids


def plain(backbone: nn.Module, trained: bool = False) -> nn.Module:
    """Copy a network so that each of its weights is one parameter of one module.

    Parametrized weights, such as those of weight_norm, become what they are now; transformers' Conv1D, a linear layer
    whose weight is transposed, becomes that linear layer. Frozen weights share the backbone's memory.

    Parameters
    ----------
    backbone : nn.Module
        Any network.
    trained : bool
        Whether the copy has weights of its own, which are trained.
    """
    built = [part for part in backbone.modules() if parametrize.is_parametrized(part)]
    network: Any = copy.deepcopy(backbone) if built or trained else backbone
    for part in network.modules():
        if parametrize.is_parametrized(part):
            _build(part)
    network = network.requires_grad_() if trained else frozen(network)
    for name, part in list(network.named_modules()):
        if type(part).__name__ == "Conv1D" and hasattr(part, "nf"):
            made = plain_linear(
                part.weight.detach().T, part.bias.detach()
            ).requires_grad_(trained)
            network.set_submodule(name, made.train(part.training))
    return network


def _build(part: Any) -> None:
    """Make plain parameters of a module's parametrized tensors, in place.

    torch's own remove_parametrizations changes the class, which the module that this one was copied from has too.
    """
    values = {
        name: getattr(part, name).detach().clone() for name in part.parametrizations
    }
    del part.parametrizations
    part.__class__ = type(part).__base__
    for name, value in values.items():
        part.register_parameter(name, nn.Parameter(value))


def place(network: Any, own: Mapping[str, Mapping[str, MemberParameter]]) -> None:
    """Give the modules of these names, in place, members' parameters by their names in the module."""
    modules = dict(network.named_modules())
    for holder in reversed(list(own)):  # modules inside others first
        if own[holder]:
            network.set_submodule(holder, MemberModule(modules[holder], own[holder]))


def chosen(
    found: Sequence[Site],
    target: str | None,
    default: Callable[[Site], bool],
    called: str,
) -> list[Site]:
    """Return the sites that a target names, or without a target those of `default`.

    Raises
    ------
    ValueError
        If there are none.
    """
    if target is None:
        return [site for site in found if default(site)]
    named = [site for site in found if re.search(target, site.name)]
    if not named:
        names = ", ".join(site.name for site in found) or "none"
        raise ValueError(
            f"target {target!r} matches no {called} before the classifier; there are {names}"
        )
    return named


def implicit(
    backbone: nn.Module,
    members: int | str | range,
    make: Make,
    *,
    target: str | None = None,
    classifiers: str = "independent",
    seed: int = 0,
    recipe: Mapping[str, Any] | None = None,
    find: Callable[[nn.Module], list[Site]] = sites,
    everywhere: bool = False,
    called: str = "linear layer or convolution",
    classifier_std: float | None = None,
    train_backbone: bool = False,
) -> FoldedEnsemble:
    """Make an implicit ensemble of any network from what its members see in place of a weight.

    Parameters
    ----------
    backbone, members, target, classifiers, seed, train_backbone
        As in `lora`.
    make : callable
        (site, generators) -> what the members see, by the names of parameters in `site.module`: of the weight
        `site.weight` as a `MemberParameter` under `site.parameter`, perhaps of its bias under `site.bias_name`. There
        is a generator for each member.
    recipe : mapping, optional
        What the ensemble says of how it was made; only methods of `uqlab` can be saved.
    find : callable
        network -> the sites among which the target chooses.
    everywhere : bool
        Whether, without a target, all matrices are taken and not those of the attention alone.
    called : str
        What is changed, in messages.
    classifier_std : float, optional
        Deviation of fresh classifiers; None for torch's uniform numbers.

    Returns
    -------
    FoldedEnsemble

    Raises
    ------
    ValueError, TypeError
        As `lora`.

    Examples
    --------
    >>> class Scale(MemberParameter):
    ...     def __init__(self, w, generators):
    ...         super().__init__(w, len(generators))
    ...         self.factor = nn.Parameter(torch.stack([torch.rand((), generator=g) for g in generators]))
    ...     def weight(self, m):
    ...         return self.w * self.factor[m]
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> made = implicit(network, 5, lambda site, generators: {site.parameter: Scale(site.weight, generators)})
    >>> made(torch.rand(7, 4)).shape
    torch.Size([5, 7, 3])
    """
    ids = check_backbone(backbone, members)
    network = plain(backbone, train_backbone)
    head = classifier(network)
    found = [site for site in find(network) if site.holder != head]
    attention = {site.name for site in found if re.search(ATTENTION, site.name)}

    def usual(site: Site) -> bool:
        return is_usual(site) and (
            site.name in attention or not attention or (everywhere and is_matrix(site))
        )

    where = chosen(found, target, usual if find is sites else lambda _: True, called)
    if not where or not head:
        raise ValueError(
            f"{type(backbone).__name__} has no {called} before its classifier {head!r}, which is the last linear layer"
        )
    weights = {
        name: p
        for name, p in network.named_parameters()
        if not (name.startswith(f"{head}.") or p.is_meta)
    }
    of_backbone = (
        "" if train_backbone else fingerprint(weights)
    )  # the classifier is fresh wherever one is loaded
    generators = [
        torch.Generator().manual_seed(member_seed(seed, m, "adapter")) for m in ids
    ]
    own: dict[str, Any] = {}
    for site in where:
        own.setdefault(site.holder, {}).update(make(site, generators))
    last: Any = network.get_submodule(head)
    if classifiers == "shared":
        for name, p in list(last.named_parameters()):
            setattr(last, name, nn.Parameter(p.detach().clone()))
    else:
        own[head] = fresh_classifiers(last, classifier_std, generators)
    place(network, own)
    settings = {
        **(recipe or {"method": "own"}),
        "target": target,
        "classifiers": classifiers,
        "seed": seed,
    }
    if train_backbone:
        return trained_together(network, ids, settings)
    own_dropout(network, len(ids))
    ensemble = FoldedEnsemble(network, ids)
    ensemble.recipe = {"backbone": of_backbone, **settings, "members": member_text(ids)}
    return ensemble


def trained_together(
    network: nn.Module, ids: range, recipe: dict[str, Any]
) -> FoldedEnsemble:
    """The ensemble of a network all of whose weights the members train; batch statistics and dropout are their own."""
    own_statistics(network, len(ids))
    own_dropout(network, len(ids))
    ensemble = FoldedEnsemble(network, ids)
    ensemble.recipe = {"backbone": "", **recipe, "members": member_text(ids)}
    return ensemble


def has_statistics(part: nn.Module) -> bool:
    """Whether this is a norm with running statistics, of one network."""
    return not isinstance(part, MemberModule) and isinstance(
        getattr(part, "running_mean", None), Tensor
    )


def repeated_statistics(norm: nn.Module, members: int) -> dict[str, MemberParameter]:
    """A norm's running statistics, once for every member."""
    buffers = dict(norm.named_buffers(recurse=False))
    return {
        name: Own(torch.stack([buffers[name]] * members))
        for name in STATISTICS
        if name in buffers
    }


def own_statistics(network: nn.Module, members: int) -> None:
    """Give every member, in place, batch statistics of its own; weights and biases stay shared."""
    inside = [
        part.inner for part in network.modules() if isinstance(part, MemberModule)
    ]
    norms = {
        name: part
        for name, part in network.named_modules()
        if has_statistics(part) and part not in inside
    }
    place(
        network,
        {name: repeated_statistics(norm, members) for name, norm in norms.items()},
    )


def fresh_classifiers(
    head: nn.Linear, std: float | None, generators: list[torch.Generator]
) -> dict[str, Own]:
    """A fresh classifier for every member: Normal weights and no bias, or torch's uniform default if `std` is None."""
    out_features, in_features = head.weight.shape
    bound = 1 / math.sqrt(in_features)

    def drawn(*shape: int) -> Own:
        if std is None:
            each = [
                torch.empty(shape).uniform_(-bound, bound, generator=g)
                for g in generators
            ]
        elif len(shape) > 1:
            each = [std * torch.randn(shape, generator=g) for g in generators]
        else:
            each = [torch.zeros(shape)] * len(generators)
        return Own(nn.Parameter(torch.stack(each).to(head.weight)))

    made = {"weight": drawn(out_features, in_features)}
    return made if head.bias is None else made | {"bias": drawn(out_features)}
