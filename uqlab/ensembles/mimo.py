"""MIMO: one network that takes an input for each member, and answers for each."""

from typing import Any

import torch
from torch import nn

from uqlab import models
from uqlab.core.checks import at_least, within
from uqlab.core.modules import call, logits_of
from uqlab.ensembles.base import (
    MeanGradient,
    Members,
    OneNetwork,
    member_generators,
)
from uqlab.ensembles.functional import frozen_copy
from uqlab.ensembles.implicit import check_backbone, fresh_classifiers, plain

PRODUCTS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


class MIMOEnsemble(OneNetwork):
    """A network for the channels of all members' inputs and the classes of all members.

    first, head: the names of its first and of its last layer. The members have nothing
    else of their own, and go through the network together.
    """

    def __init__(
        self,
        network: nn.Module,
        member_ids: range,
        first: str,
        head: str,
        rho: float,
        repeats: int,
    ):
        super().__init__(network, member_ids)
        self.first, self.head = first, head
        self.rho, self.repeats = rho, repeats

    def _run(self, args, named, each, members):
        (x,) = args
        x = x if each else x.expand(self.members, *x.shape)
        first: Any = self.network.get_submodule(self.first)
        own = first.weight.shape[1] // self.members
        if isinstance(first, nn.Linear) and x.shape[-1] == own:
            side_by_side = x.movedim(0, -2).flatten(-2)  # [..., members * features]
        else:
            side_by_side = x.transpose(0, 1).flatten(1, 2)  # along the channels
        logits = logits_of(call(self.network, side_by_side))
        logits = MeanGradient.apply(logits, self.members)
        return logits.unflatten(1, (self.members, -1)).transpose(0, 1)

    def mixed(self, rows, generators):
        """Return which inputs members see: those of member 0, `repeats` times.

        Each member shuffles all but a share `rho` for itself.
        """
        again = rows[0].repeat(self.repeats)
        shuffled = torch.randperm(len(again), generator=generators[0])
        again = again[shuffled.to(rows.device)]
        own = round((1 - self.rho) * len(again))
        orders = [torch.randperm(own, generator=g).to(rows.device) for g in generators]
        return torch.stack([torch.cat([again[o], again[own:]]) for o in orders])

    def member(self, index):
        """Return a plain network, whose input stands in every member's place.

        The first layer's weights add up.
        """
        self._check_index(index)
        network = frozen_copy(self.network)
        _count_channels(network, 1, self.members)
        first = network.get_submodule(self.first)
        _put(first, "weight", first.weight.unflatten(1, (self.members, -1)).sum(1))
        head = network.get_submodule(self.head)
        for name, p in list(head.named_parameters()):
            _put(head, name, p.chunk(self.members)[index])
        return network

    def shard(self, rows):
        """Refuse: the members cannot be taken apart."""
        raise ValueError(
            "the members of MIMO go through one network together; they cannot be taken "
            "apart"
        )


def mimo(
    backbone: nn.Module,
    members: Members,
    rho: float = 0.5,
    *,
    repeats: int = 4,
    classifier: str | None = None,
    seed: int = 0,
) -> MIMOEnsemble:
    """Make a MIMO network: it takes an input for each member, and answers for each.

    Parameters
    ----------
    backbone : nn.Module
        A network that begins with a linear layer or a convolution.
    members : int
        How many; they cannot be taken apart.
    rho : float
        In training the members see the same input with this probability, and
        independent ones otherwise.
    repeats : int
        How often each input stands in its batch in training. In prediction all members
        see the same input.
    classifier : str, optional
        As in `lora`.
    seed : int
        The classifier of member m depends on (seed, m) alone.

    Returns
    -------
    MIMOEnsemble

    Raises
    ------
    ValueError
        For rho outside [0, 1], repeats below 1, members that are not counted from 0,
        and a network that does not begin with a linear layer or a convolution, such as
        one of token ids, or has no other layer.
    TypeError
        For what is no network.

    Notes
    -----
    Everything is trained and, but for the classifiers and the first layer, shared. The
    first layer starts with the backbone's weights over the number of members, so at the
    start each member has the backbone's features. Like BatchEnsemble's shared weights,
    all parameters follow the members' mean loss.

    References
    ----------
    Havasi et al., "Training independent subnetworks for robust prediction", 2021.
    """
    ids = check_backbone(backbone, members)
    within("rho", rho, "[0, 1]")
    at_least("repeats", repeats)
    count = len(ids)
    if ids != range(count):
        raise ValueError(
            "the members of MIMO go through one network together; give their number, "
            f"not {members!r}"
        )
    network = plain(backbone, trained=True)
    begin, head = _ends(network, classifier)
    first: Any = network.get_submodule(begin)
    _put(first, "weight", torch.cat([first.weight / count] * count, 1))
    _count_channels(network, count, 1)
    last: Any = network.get_submodule(head)
    generators = member_generators(seed, ids, "adapter")
    for name, own in fresh_classifiers(network, head, None, generators).items():
        each = [module.get_parameter("value") for module in own]
        _put(last, name.rpartition(".")[2], torch.cat(each))
    ensemble = MIMOEnsemble(network, ids, begin, head, rho, repeats)
    how = {"rho": rho, "repeats": repeats, "classifier": classifier, "seed": seed}
    return ensemble.train(backbone.training).with_recipe({"method": "mimo", **how})


def _ends(network, named: str | None):
    """Return the names of the first layer and of the last, or raise ValueError."""
    head, begin, first = models.classifier(network, named), "", network
    for name, layer in network.named_modules():
        inner = isinstance(layer, PRODUCTS) or not list(layer.children())
        if inner and list(layer.parameters()):
            begin, first = name, layer
            break
    whole = isinstance(first, PRODUCTS) and getattr(first, "groups", 1) == 1
    if head == begin or not whole:
        raise ValueError(
            "mimo needs a network that begins with a linear layer or a convolution and "
            f"ends with another linear layer; {type(network).__name__} begins with "
            f"{type(first).__name__}"
        )
    return begin, head


def _put(layer: Any, name: str, value):
    """Give a layer another weight or bias, in place, of another number of features."""
    trained = layer.get_parameter(name).requires_grad
    setattr(layer, name, nn.Parameter(value.detach(), trained))
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    else:
        layer.in_channels = layer.weight.shape[1]


def _count_channels(network, now: int, before: int):
    """Change what a network knows of the channels of its images."""
    for layer in network.modules():
        if isinstance(getattr(layer, "num_channels", None), int):
            layer.num_channels = layer.num_channels // before * now
        if isinstance(layer, models.Standardize):
            for name in ("mean", "std"):
                one = getattr(layer, name).chunk(before)[0]
                setattr(layer, name, one.repeat(now, 1, 1))
