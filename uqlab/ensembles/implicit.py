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
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.utils import (
    parametrize,
    prune,
    remove_spectral_norm,
    remove_weight_norm,
    skip_init,
)
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from uqlab import models
from uqlab.core.checks import Target, one_network, one_of, pattern_of
from uqlab.core.modules import frozen, unwrapped
from uqlab.ensembles.base import Ensemble, Members, Own, member_generators, member_range

Classifiers = Literal["independent", "shared"]
# What one member sees: of the site's weight, or of several tensors of its module.
Make = Callable[["_Site", torch.Generator], nn.Module | Mapping[str, nn.Module]]
Sees = dict[str, list[nn.Module]]  # tensor's name -> one module a member
# Modules that multiply by their own weights, or by those of modules inside them.
UNITS = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
# What computes a weight before every call, and what makes it a parameter again.
HOOKS: Any = {
    prune.BasePruningMethod: prune.remove,
    SpectralNorm: remove_spectral_norm,
    WeightNorm: remove_weight_norm,
}
STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


class _Site(NamedTuple):
    """A weight of a network that may be the members' own."""

    holder: str  # the name of the module that it is computed by
    parameter: str  # the weight's name in that module
    module: Any

    @property
    def name(self):
        """The weight's name, as targets see it."""
        return self.of(self.parameter).removesuffix(".weight")

    def of(self, name):
        """Return the full name of another tensor of the module."""
        return ".".join(filter(None, (self.holder, name)))

    @property
    def weight(self):
        """The weight."""
        return self.module.get_parameter(self.parameter)

    @property
    def bias_name(self):
        """The name of the bias that belongs to the weight."""
        before, _, last = self.parameter.rpartition("weight")
        return f"{before}bias{last}"

    @property
    def bias(self):
        """The bias that belongs to the weight."""
        return dict(self.module.named_parameters()).get(self.bias_name)

    def normal(self, shape, std, generator):
        """Draw Normal numbers of one member, on the device of the weight.

        In half precision a small update would be lost to rounding: members hold
        float32.
        """
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        drawn = torch.randn(shape, generator=generator)
        return std * drawn.to(self.weight.device, dtype)

    @property
    def attention(self):
        """Whether this is a projection of attention, by its name."""
        return re.search(models.ATTENTION, self.name) is not None

    @property
    def usual(self):
        """Whether the weight is taken without being named."""
        return self.parameter == "weight" or isinstance(self.module, UNITS)


def sites(network):
    """Find the weights of a network that multiply its features, in order.

    Weights of linear layers, convolutions, attention and recurrent layers; of any other
    module but embeddings that holds a matrix `weight`; and matrices of other names.
    """
    weights: dict[nn.Parameter, _Site] = {}  # a tied weight once, by its first name
    units = ()  # prefixes of names inside units
    for name, module in network.named_modules():
        embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if embedding or name.startswith(units):
            continue
        unit = isinstance(module, UNITS)
        if unit:
            units += (f"{name}." if name else "",)
        for key, p in module.named_parameters(recurse=unit):
            matrix = p.ndim == 2 and ("weight" in key or not unit)
            kernel = p.ndim > 2 and key == "weight"
            if p.numel() and (matrix or kernel):  # 0 where heads were cut out
                weights.setdefault(p, _Site(name, key, module))
    return list(weights.values())


def weights_of(network: nn.Module) -> dict[str, str]:
    """Return the weights that methods take: the name of targets -> the full name."""
    usual = [site for site in sites(network) if site.usual]
    return {site.name: site.of(site.parameter) for site in usual}


def plain(backbone: nn.Module, trained: bool = False) -> nn.Module:
    """Copy a network so that each of its weights is one parameter of one module.

    Parametrized weights, such as those of weight_norm, become what they are now, and
    those that are pruned; transformers' Conv1D, a linear layer whose weight is
    transposed, becomes that linear layer. Frozen weights share the backbone's memory.

    Parameters
    ----------
    backbone : nn.Module
        Any network.
    trained : bool
        Whether the copy has its own weights, which are trained.
    """
    one_network(backbone, "an ensemble of one network")
    backbone = unwrapped(backbone)
    held = [] if trained else backbone.parameters()
    memo: dict = {id(p): nn.Parameter(p.detach(), False) for p in held}
    for module in backbone.modules():
        for t in vars(module).values():
            # A weight that a hook computed has a graph, which torch does not copy.
            if isinstance(t, torch.Tensor) and not t.is_leaf:
                memo[id(t)] = t.detach()
    network: Any = copy.deepcopy(backbone, memo)
    for module in network.modules():
        _build(module)
    network.requires_grad_(trained)
    for name, module in list(network.named_modules()):
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            linear = skip_init(nn.Linear, *module.weight.shape).train(module.training)
            linear.weight = nn.Parameter(module.weight.detach().T, trained)
            linear.bias = nn.Parameter(module.bias.detach(), trained)
            put(network, name, linear)
    return network


def put(network, name, module):
    """Replace a module, in place, under every name that it has in the network."""
    before = network.get_submodule(name)
    for other, part in list(network.named_modules(remove_duplicate=False)):
        if part is before:
            network.set_submodule(other, module)


def _build(module):
    """Make plain parameters of the tensors that a module computes, in place.

    torch's own remove_parametrizations changes the class, which the module that this
    one was copied from has too.
    """
    for hook in list(module._forward_pre_hooks.values()):
        for kind, remove in HOOKS.items():
            if isinstance(hook, kind):
                remove(module, vars(hook).get("name") or hook._tensor_name)
    if not parametrize.is_parametrized(module):
        return
    names = module.parametrizations
    values = {name: getattr(module, name).detach().clone() for name in names}
    del module.parametrizations
    module.__class__ = type(module).__base__
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))


def _choose(candidates, target, everywhere=False):
    """Return the weights that a target names; ValueError if there are none.

    Without a target they are the attention's or, `everywhere` or in a network without
    attention, all.
    """
    if target is not None:
        pattern = pattern_of(target)
        chosen = [site for site in candidates if re.search(pattern, site.name)]
    else:
        chosen = [site for site in candidates if site.usual]
        if any(site.attention for site in candidates):
            taken = (everywhere and s.weight.ndim == 2 for s in chosen)
            chosen = [s for s, t in zip(chosen, taken, strict=True) if t or s.attention]
    if not chosen:
        names = ", ".join(site.name for site in candidates) or "none"
        raise ValueError(
            f"target {target!r} matches no layer before the classifier; there are "
            f"{names}"
        )
    return chosen


def implicit(
    backbone: nn.Module,
    members: Members,
    make: Make,
    *,
    target: Target | None = None,
    classifiers: Classifiers = "independent",
    classifier: str | None = None,
    seed: int = 0,
    kind: Callable[[nn.Module], bool] | None = None,
    everywhere: bool = False,
    called: str = "linear layer or convolution",
    classifier_std: float | None = None,
    train_backbone: bool = False,
) -> Ensemble:
    """Make an implicit ensemble of any network from what one member sees of a weight.

    Parameters
    ----------
    backbone, members, target, classifiers, classifier, seed, train_backbone
        As in `lora`.
    make : callable
        (site, generator) -> a module for one member: `module(w)` is what it sees of the
        weight w, `site.weight`. Or such modules for several tensors of `site.module`,
        by their names in it. The generator is the member's.
    kind : callable, optional
        module -> whether its weight is among those that the target chooses from. None
        for weights that multiply features.
    everywhere : bool
        Whether, without a target, all matrices are taken and not those of the
        attention alone.
    called : str
        What is changed, in a message.
    classifier_std : float, optional
        Deviation of fresh classifiers; None for torch's uniform numbers.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError, TypeError
        As `lora`.

    Examples
    --------
    >>> class Scale(nn.Module):
    ...     def __init__(self, w, generator):
    ...         super().__init__()
    ...         self.factor = nn.Parameter(torch.rand((), generator=generator))
    ...     def forward(self, w):
    ...         return self.factor * w
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> made = implicit(network, 5, lambda site, g: Scale(site.weight, g))
    >>> made(torch.rand(7, 4)).shape
    torch.Size([5, 7, 3])
    """
    ids = member_range(members)
    one_of("classifiers", classifiers, ("independent", "shared"))
    network = plain(backbone, train_backbone)
    head = models.classifier(network, classifier)
    candidates = _candidates(network, kind, head, called)
    generators = member_generators(seed, ids, "adapter")
    sees = _seen(_choose(candidates, target, everywhere), make, generators)
    # A separate module, also where its weight is tied to another's.
    last = network.get_submodule(head)
    if classifiers == "independent":
        put(network, head, frozen(last))
        sees |= fresh_classifiers(network, head, classifier_std, generators)
    else:
        put(network, head, copy.deepcopy(last).requires_grad_())
    if train_backbone:
        sees = own_statistics(network, len(ids)) | sees
    ensemble = Ensemble(network, ids, sees)
    return ensemble.with_recipe({"method": "own", "classifier": classifier})


def _candidates(network, kind, head, called):
    """Return the weights before the classifier; ValueError if there are none."""
    found = sites(network)
    if kind is not None:
        named = network.named_modules()
        found = [_Site(name, "weight", m) for name, m in named if name and kind(m)]
    found = [site for site in found if head and site.holder != head]
    if not found:
        raise ValueError(
            f"{type(network).__name__} has no {called} before its classifier "
            f"{head!r}, which is the last linear layer"
        )
    return found


def _seen(chosen, make, generators):
    """Return what members see of the chosen weights."""
    sees: Sees = {}
    for site in chosen:
        for generator in generators:
            made = make(site, generator)
            parts = made if isinstance(made, Mapping) else {site.parameter: made}
            for name, module in parts.items():
                sees.setdefault(site.of(name), []).append(module)
    return sees


def own_statistics(module, members):
    """Return the running statistics of norms, once for every member."""
    return {
        name: [Own(buffer.clone(), trained=False) for _ in range(members)]
        for name, buffer in module.named_buffers()
        if name.rpartition(".")[2] in STATISTICS
    }


def fresh_classifiers(network, head, std, generators):
    """Return a fresh classifier for every member.

    Its weights are Normal and its bias zero or, if `std` is None, both are torch's
    uniform default.
    """
    last = network.get_submodule(head)
    bound = last.get_parameter("weight").shape[1] ** -0.5
    sees: Sees = {}
    for name, p in last.named_parameters():
        for generator in generators:
            if std is None:
                drawn = torch.empty(p.shape).uniform_(
                    -bound, bound, generator=generator
                )
            elif p.ndim > 1:
                drawn = std * torch.randn(p.shape, generator=generator)
            else:
                drawn = torch.zeros(p.shape)
            sees.setdefault(f"{head}.{name}", []).append(Own(drawn.to(p)))
    return sees
