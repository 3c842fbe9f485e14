"""MIMO: one network that takes an input for each member, and answers for each."""

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from uqlab import models
from uqlab.core.checks import at_least, within
from uqlab.core.modules import hooked, logits_of
from uqlab.ensembles.base import (
    MeanGradient,
    Members,
    OneNetwork,
    member_generators,
    member_range,
    recorded,
)
from uqlab.ensembles.implicit import fresh_classifiers, plain
from uqlab.ensembles.packed import PRODUCTS


class _MIMOEnsemble(OneNetwork):
    """A network whose first layer sees the inputs of all members side by side.

    Its classifier gives the classes of all members. first, head: the names of the two
    layers, of which each member has a part; all else is shared.
    """

    _swaps = True  # by hooks
    network: Any

    def __init__(self, network, member_ids, first, head, rho, repeats):
        super().__init__(network, member_ids)
        self.first, self.head = first, head
        self.rho, self.repeats = rho, repeats

    def _run(self, args, named, each, members):
        # What comes before the first layer is computed for each member.
        several = len([t for t in tree_leaves((args, named)) if isinstance(t, Tensor)])
        if several > 1:
            raise ValueError(
                "mimo sets the members' inputs side by side, those of one tensor, got "
                f"{several} tensors: give a network that takes one"
            )

        def logits(of_members):
            def given(x):
                return of_members([*x] if each else [x] * self.members)

            some, more = tree_map_only(Tensor, given, (args, named))
            return logits_of(self.network(*some, **more))

        seen = []

        def gather(layer, given):
            seen.append(given[0])
            if len(seen) < self.members:
                raise _Seen
            return torch.cat(seen, -1 if isinstance(layer, nn.Linear) else 1)

        first = self.network.get_submodule(self.first)
        try:
            with hooked([first.register_forward_pre_hook(gather)]):
                for m in range(self.members):
                    with contextlib.suppress(_Seen):
                        z = logits(lambda x, m=m: x[m].clone())
        except RuntimeError:
            if seen:
                raise
            # The layer is not called: a module around it reads its weight.
            z = logits(lambda x: torch.cat(x, 1))
        z = MeanGradient.apply(z, self.members)
        return z.unflatten(1, (self.members, -1)).transpose(0, 1)

    def mixed(self, rows, generators):
        """Return which inputs members see: those of member 0, `repeats` times.

        Each member shuffles all but a share `rho` for itself.
        """
        again = rows[0].repeat(self.repeats)
        again = again[torch.randperm(len(again), generator=generators[0])]
        mixed = again.repeat(self.members, 1)
        own = round((1 - self.rho) * len(again))
        for row, generator in zip(mixed, generators, strict=True):
            row[:own] = again[torch.randperm(own, generator=generator)]
        return mixed

    def member(self, index):
        """Return a plain network, whose input stands in every member's place.

        The first layer's weights add up.
        """
        network = copy.deepcopy(self.network)
        w = network.get_submodule(self.first).weight
        w.data = w.data.unflatten(1, (self.members, -1)).sum(1)
        for p in network.get_submodule(self.head).parameters():
            p.data = p.data.chunk(self.members)[index]
        return network

    def shard(self, rows):
        """Refuse: the members cannot be taken apart."""
        raise ValueError(
            "the members of MIMO go through one network together; they cannot be taken "
            "apart"
        )


class _Seen(Exception):
    """What one member's first layer is given is known; the rest waits for the last."""


@recorded
def mimo(
    backbone: nn.Module,
    members: Members,
    rho: float = 0.5,
    *,
    repeats: int = 4,
    classifier: str | None = None,
    seed: int = 0,
) -> Any:
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
    Ensemble

    Raises
    ------
    ValueError
        For rho outside [0, 1], repeats below 1, members that are not counted from 0,
        and a network that does not begin with a linear layer or a convolution, such as
        one of token ids, or has no other layer.
    TypeError
        If `backbone` is not a network.

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
    ids = member_range(members)
    within("rho", rho, "[0, 1]")
    at_least("repeats", repeats)
    if ids.start or ids.step > 1:
        raise ValueError(
            "the members of MIMO go through one network together; give their number, "
            f"not {members!r}"
        )
    network = plain(backbone, trained=True)
    begin, head = _ends(network, classifier)
    w: Any = network.get_submodule(begin).weight
    w.data = torch.cat([w.data / len(ids)] * len(ids), 1)
    generators = member_generators(seed, ids, "adapter")
    for name, own in fresh_classifiers(network, head, None, generators).items():
        each = [module.get_parameter("value").data for module in own]
        network.get_parameter(name).data = torch.cat(each)
    ensemble = _MIMOEnsemble(network, ids, begin, head, rho, repeats)
    return ensemble.train(backbone.training)


def _ends(network, named):
    """Return the names of the first layer and of the last, or raise ValueError."""
    head = models.classifier(network, named)
    for name, first in network.named_modules():
        inner = isinstance(first, PRODUCTS) or not list(first.children())
        if inner and list(first.parameters()):
            begin = name
            break
    whole = isinstance(first, PRODUCTS) and getattr(first, "groups", 1) == 1
    if head == begin or not whole:
        raise ValueError(
            "mimo needs a network that begins with a linear layer or a convolution and "
            f"ends with another linear layer; {type(network).__name__} begins with "
            f"{type(first).__name__}"
        )
    return begin, head
