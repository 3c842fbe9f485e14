"""How ensembles are built: one backbone that all share, and a little of each member's.

    method                    what member m sees         of member m's own
    LoRA-Ensemble             W + B_m A_m                A_m [rank, in], B_m [out, rank]
    singular value ensemble   U diag(max(s_m, 0)) V^T    s_m [k], bias [out]
    BatchEnsemble             W * (r_m s_m^T), W trained r_m [out], s_m [in], bias [out]
    BatchEnsemble++           W + r_m s_m^T, W trained   the same
    mask extraction           W * (row_m col_m^T)        masks row_m [out], col_m [in]
    Masksembles               W diag(z_m), z_m fixed     nothing that is trained
    FiLM-Ensemble             W, after its own norms     gamma_m, beta_m [features]

W is the backbone's own tensor, never copied, unless it is trained. A kernel is the
matrix of its patches.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from uqlab import models
from uqlab.core.checks import one_network, one_of
from uqlab.core.modules import frozen
from uqlab.ensembles.base import (
    FoldedEnsemble,
    Members,
    member_generators,
    member_range,
)
from uqlab.ensembles.layers import MemberLayer, own_dropout, plain_linear, put
from uqlab.ensembles.members import MemberModule, MemberParameter, Own, weight_name

Classifiers = Literal["independent", "shared"]
Make = Callable[["Site", list[torch.Generator]], Mapping[str, MemberParameter]]
# Modules that multiply by weights of their own, or of modules inside them.
UNITS = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


class Site(NamedTuple):
    """A weight of a network that may be the members' own."""

    holder: str  # the name of the module that it is computed by
    parameter: str  # the weight's name in that module
    module: Any

    @property
    def name(self) -> str:
        """The weight's name, as targets see it."""
        return weight_name(self.holder, self.parameter)

    @property
    def weight(self) -> nn.Parameter:
        """The weight."""
        return self.module.get_parameter(self.parameter)

    @property
    def bias_name(self) -> str:
        """The name of the bias that belongs to the weight."""
        before, _, last = self.parameter.rpartition("weight")
        return f"{before}bias{last}"

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias that belongs to the weight."""
        return dict(self.module.named_parameters()).get(self.bias_name)

    @property
    def attention(self) -> bool:
        """Whether this is a projection of attention, by its name."""
        return re.search(models.ATTENTION, self.name) is not None

    @property
    def usual(self) -> bool:
        """Whether the weight is taken without being named."""
        return self.parameter == "weight" or isinstance(self.module, UNITS)


def sites(network: nn.Module) -> list[Site]:
    """Find the weights of a network that multiply its features, in order.

    Weights of linear layers, convolutions, attention and recurrent layers; of any other
    module but embeddings that holds a matrix `weight`; and matrices of other names.
    """
    weights: list[Site] = []
    units = ()  # prefixes of names inside units
    for name, module in network.named_modules():
        embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if embedding or name.startswith(units):
            continue
        if isinstance(module, UNITS):
            units += (f"{name}." if name else "",)
            parameters = module.named_parameters()
            names = [n for n, p in parameters if p.ndim == 2 and "weight" in n]
        else:
            parameters = module.named_parameters(recurse=False)
            names = [
                n
                for n, p in parameters
                if p.ndim == 2 or (p.ndim > 2 and n == "weight")
            ]
        found = [Site(name, parameter, module) for parameter in names]
        weights += [site for site in found if site.weight.numel()]  # heads cut out
    return weights


def weights_of(network: nn.Module) -> dict[str, Any]:
    """Return the weights of a network by the names that targets have, in its order.

    What members share is a tensor; what depends on the member says what each sees by
    `weight(m)`.
    """
    usual = [site for site in sites(network) if site.usual]
    weights = {}
    for holder, module in network.named_modules():
        seen = module.of_members() if isinstance(module, MemberLayer) else {}
        seen = {name: p for name, p in seen.items() if len(p.shape) > 1}
        seen |= {s.parameter: s.weight.detach() for s in usual if s.module is module}
        outer = holder.removesuffix("inner").rstrip(".")
        weights |= {weight_name(outer, name): weight for name, weight in seen.items()}
    return weights


def check_backbone(backbone: nn.Module, members: Members) -> range:
    """Return the members' numbers; raise for what is no backbone."""
    one_network(backbone, "an implicit ensemble")
    return member_range(members)


def plain(backbone: nn.Module, trained: bool = False) -> nn.Module:
    """Copy a network so that each of its weights is one parameter of one module.

    Parametrized weights, such as those of weight_norm, become what they are now;
    transformers' Conv1D, a linear layer whose weight is transposed, becomes that linear
    layer. Frozen weights share the backbone's memory.

    Parameters
    ----------
    backbone : nn.Module
        Any network.
    trained : bool
        Whether the copy has weights of its own, which are trained.
    """
    network: Any = copy.deepcopy(backbone) if trained else frozen(backbone)
    for module in network.modules():
        if parametrize.is_parametrized(module):
            _build(module)
    network.requires_grad_(trained)
    for name, module in list(network.named_modules()):
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            linear = plain_linear(module.weight.detach().T, module.bias.detach())
            linear.requires_grad_(trained).train(module.training)
            network.set_submodule(name, linear)
    return network


def _build(module: Any):
    """Make plain parameters of a module's parametrized tensors, in place.

    torch's own remove_parametrizations changes the class, which the module that this
    one was copied from has too.
    """
    names = module.parametrizations
    values = {name: getattr(module, name).detach().clone() for name in names}
    del module.parametrizations
    module.__class__ = type(module).__base__
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))


def place(
    network: Any, parameters: Mapping[str, Mapping[str, MemberParameter]]
) -> None:
    """Give modules, in place, members' parameters: module name -> name -> parameter."""
    modules = dict(network.named_modules())
    for holder in reversed(list(parameters)):  # modules inside others first
        if parameters[holder]:
            put(network, holder, MemberModule(modules[holder], parameters[holder]))


def named(candidates: Sequence[Site], target: str, called: str) -> list[Site]:
    """Return the sites whose names match a target; ValueError if there are none."""
    matching = [site for site in candidates if re.search(target, site.name)]
    if not matching:
        names = ", ".join(site.name for site in candidates) or "none"
        raise ValueError(
            f"target {target!r} matches no {called} before the classifier; "
            f"there are {names}"
        )
    return matching


_OWN = {"method": "own"}  # of users


def implicit(
    backbone: nn.Module,
    members: Members,
    make: Make,
    *,
    target: str | None = None,
    classifiers: Classifiers = "independent",
    classifier: str | None = None,
    seed: int = 0,
    recipe: Mapping[str, Any] = _OWN,
    find: Callable[[nn.Module], list[Site]] = sites,
    everywhere: bool = False,
    called: str = "linear layer or convolution",
    classifier_std: float | None = None,
    train_backbone: bool = False,
) -> FoldedEnsemble:
    """Make an implicit ensemble of any network from what its members see of a weight.

    Parameters
    ----------
    backbone, members, target, classifiers, classifier, seed, train_backbone
        As in `lora`.
    make : callable
        (site, generators) -> what the members see, by the names of parameters in
        `site.module`: of the weight `site.weight` as a `MemberParameter` under
        `site.parameter`, perhaps of its bias under `site.bias_name`. There is a
        generator for each member.
    recipe : mapping, optional
        What the ensemble says of how it was made; only methods of `uqlab` can be saved.
    find : callable
        network -> the sites among which the target chooses.
    everywhere : bool
        Whether, without a target, all matrices are taken and not those of the
        attention alone.
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
    ...         factors = [torch.rand((), generator=g) for g in generators]
    ...         self.factor = nn.Parameter(torch.stack(factors))
    ...     def weight(self, m):
    ...         return self.w * self.factor[m]
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> made = implicit(network, 5, lambda site, g: {"weight": Scale(site.weight, g)})
    >>> made(torch.rand(7, 4)).shape
    torch.Size([5, 7, 3])
    """
    ids = check_backbone(backbone, members)
    one_of("classifiers", classifiers, ("independent", "shared"))
    network = plain(backbone, train_backbone)
    chosen, head = _chosen(network, classifier, find, target, everywhere, called)
    generators = member_generators(seed, ids, "adapter")
    parameters = {}
    for site in chosen:
        parameters.setdefault(site.holder, {}).update(make(site, generators))
    last: Any = network.get_submodule(head)
    if classifiers == "independent":
        parameters[head] = fresh_classifiers(last, classifier_std, generators)
    else:
        put(network, head, copy.deepcopy(last).requires_grad_())
    place(network, parameters)
    if train_backbone:
        own_statistics(network, len(ids))
    how = {"classifiers": classifiers, "classifier": classifier, "seed": seed}
    return folded(network, ids, {"target": target, **recipe, **how})


def _chosen(network, given: str | None, find, target, everywhere: bool, called: str):
    """Return the weights that are to be the members' own, and the classifier's name."""
    head = models.classifier(network, given)
    candidates = [site for site in find(network) if site.holder != head]
    if target is None:
        chosen = _usual(candidates, everywhere)
    else:
        chosen = named(candidates, target, called)
    if not chosen or not head:
        raise ValueError(
            f"{type(network).__name__} has no {called} before its classifier "
            f"{head!r}, which is the last linear layer"
        )
    return chosen, head


def _usual(candidates, everywhere: bool):
    """Return the weights that are taken without a target: the attention's, or all."""
    usual = [site for site in candidates if site.usual]
    if not any(site.attention for site in candidates):
        return usual
    return [s for s in usual if s.attention or (everywhere and s.weight.ndim == 2)]


def folded(network: nn.Module, ids: range, recipe: Mapping) -> FoldedEnsemble:
    """Return the ensemble of a network of members, whose dropout is made their own."""
    own_dropout(network, len(ids))
    return FoldedEnsemble(network, ids).with_recipe(recipe)


def normal(
    like: Tensor, shape: Sequence[int], std: float, generators: list[torch.Generator]
) -> Tensor:
    """Draw Normal numbers of each member's own, [members, *shape]."""
    drawn = [torch.randn(shape, generator=generator) for generator in generators]
    return std * torch.stack(drawn).to(like)


def repeated_statistics(module: nn.Module, members: int) -> dict[str, MemberParameter]:
    """Return the running statistics of a norm, once for every member."""
    buffers = module.named_buffers(recurse=False)
    return {n: Own(torch.stack([b] * members)) for n, b in buffers if n in STATISTICS}


def own_statistics(network: nn.Module, members: int) -> None:
    """Give every member, in place, batch statistics of its own."""
    modules = network.named_modules()
    place(
        network,
        {name: repeated_statistics(module, members) for name, module in modules},
    )


def fresh_classifiers(
    head: nn.Linear, std: float | None, generators: list[torch.Generator]
) -> dict[str, Own]:
    """Return a fresh classifier for every member.

    Its weights are Normal and its bias zero or, if `std` is None, both are torch's
    uniform default.
    """
    bound = 1 / math.sqrt(head.weight.shape[1])

    def drawn(p, generator):
        if std is None:
            return torch.empty(p.shape).uniform_(-bound, bound, generator=generator)
        if p.ndim == 1:
            return torch.zeros(p.shape)
        return std * torch.randn(p.shape, generator=generator)

    parameters = {}
    for name, p in head.named_parameters():
        value = torch.stack([drawn(p, generator) for generator in generators])
        parameters[name] = Own(nn.Parameter(value.to(p)))
    return parameters
