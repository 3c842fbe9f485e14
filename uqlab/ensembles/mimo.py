"""MIMO: one network that takes an input for each member, and answers for each (Havasi et al. 2021)."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.modules import call, logits_of, trained_like
from uqlab.ensembles.base import Ensemble, member_seed, member_text
from uqlab.ensembles.implicit import check_backbone, fresh_classifiers, plain
from uqlab.ensembles.layers import MemberDropout, own_dropout, plain_linear, with_layers
from uqlab.models import Standardize, classifier


class MIMOEnsemble(Ensemble):
    """A network whose channels are those of all members' inputs, and whose outputs are the classes of all members.

    first, head: the names of its first and of its last layer. The members have nothing else of their own, and go
    through the network together.
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
        super().__init__(member_ids)
        self.network, self.first, self.head, self.rho, self.repeats = (
            network,
            first,
            head,
            rho,
            repeats,
        )

    def run(self, x: Any, rows: slice) -> Tensor:
        first: Any = self.network.get_submodule(self.first)
        own = first.weight.shape[1] // self.members
        features = (
            isinstance(first, nn.Linear) and x.shape[-1] == own
        )  # else [batch, members * channels, ...]
        side_by_side = (
            x.movedim(0, -2).flatten(-2)
            if features
            else x.transpose(0, 1).flatten(1, 2)
        )
        return (
            logits_of(call(self.network, side_by_side))
            .unflatten(1, (self.members, -1))
            .transpose(0, 1)
        )

    def mixed(self, rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """The batch of member 0 `repeats` times, of which each member shuffles all but a share `rho` for itself."""
        again = rows[0].repeat(self.repeats)
        again = again[
            torch.randperm(len(again), generator=generators[0]).to(rows.device)
        ]
        own = round((1 - self.rho) * len(again))
        orders = [
            torch.randperm(own, generator=generator).to(rows.device)
            for generator in generators
        ]
        return torch.stack(
            [torch.cat([again[:own][order], again[own:]]) for order in orders]
        )

    def member(self, index: int) -> nn.Module:
        """Member `index` for one input, which stands in every member's place: the first layer's weights add up."""
        self._check_index(index)
        network = with_layers(self.network, lambda layer: layer.member(0))
        _count_channels(network, 1, self.members)
        first: Any = network.get_submodule(self.first)
        head: Any = network.get_submodule(self.head)
        summed = first.weight.detach().unflatten(1, (self.members, -1)).sum(1)
        own: dict[str, Any] = {
            name: p.detach().unflatten(0, (self.members, -1))
            for name, p in head.named_parameters()
        }
        bias = own["bias"][index] if "bias" in own else None
        network.set_submodule(self.first, trained_like(_like(first, summed), first))
        network.set_submodule(
            self.head, trained_like(plain_linear(own["weight"][index], bias), head)
        )
        return network

    def shard(self, rows: slice) -> Ensemble:
        raise ValueError(
            "the members of MIMO go through one network together; they cannot be taken apart"
        )

    def noise_layers(self) -> list[tuple[MemberDropout, int, Sequence[int]]]:
        layers = [
            part for part in self.network.modules() if isinstance(part, MemberDropout)
        ]
        return [(layer, number, [0]) for number, layer in enumerate(layers)]


def mimo(
    backbone: nn.Module,
    members: int | str | range,
    rho: float = 0.5,
    *,
    repeats: int = 4,
    seed: int = 0,
) -> MIMOEnsemble:
    """MIMO: one network takes an input for each member on its channels, and has a classifier for each (Havasi 2021).

    rho: in training the members see the same input with this probability, and independent ones otherwise.
    repeats: how often each input stands in its batch in training. In prediction all members see the same input.

    Everything is trained and, but for the classifiers and the first layer, shared. The first layer starts with the
    backbone's weights over the number of members, so at the start each member has the backbone's features; only the
    classifier of member m depends on (seed, m) alone. Like BatchEnsemble's shared weights, all parameters follow the
    members' mean loss.

    Raises ValueError for rho outside [0, 1], repeats < 1, members that are not counted from 0, and a network that does
    not begin with a linear layer or a convolution, such as one of token ids, or has no other layer; TypeError for what
    is no network.
    """
    ids = check_backbone(backbone, members)
    if ids != range(len(ids)):
        raise ValueError(
            f"the members of MIMO go through one network together; give their number, not {members!r}"
        )
    network = plain(backbone, trained=True)
    head = classifier(network)
    modules = dict(network.named_modules())
    products = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    layers = {
        name: part
        for name, part in modules.items()
        if isinstance(part, products) or not list(part.children())
    }
    begin = next(
        name for name, part in layers.items() if any(True for _ in part.parameters())
    )
    first: Any = modules[begin]
    last: Any = modules[head]
    whole = isinstance(first, products) and getattr(first, "groups", 1) == 1
    if head == begin or not whole:
        raise ValueError(
            "mimo needs a network that begins with a linear layer or a convolution and ends with another linear layer; "
            f"{type(backbone).__name__} begins with {type(first).__name__}"
        )
    spread = [1, len(ids), *[1] * (first.weight.ndim - 2)]
    network.set_submodule(
        begin, _like(first, first.weight.detach().repeat(spread) / len(ids))
    )
    generators = [
        torch.Generator().manual_seed(member_seed(seed, m, "adapter")) for m in ids
    ]
    fresh = {
        name: own.value.detach().flatten(0, 1)
        for name, own in fresh_classifiers(last, None, generators).items()
    }
    network.set_submodule(head, plain_linear(fresh["weight"], fresh.get("bias")))
    _count_channels(network, len(ids), 1)
    own_dropout(network, 1)
    ensemble = MIMOEnsemble(network, ids, begin, head, rho, repeats)
    settings = {"rho": rho, "repeats": repeats, "seed": seed}
    ensemble.recipe = {
        "method": "mimo",
        "backbone": "",
        **settings,
        "members": member_text(ids),
    }
    return ensemble.train(backbone.training)


def _like(layer: Any, weight: Tensor) -> nn.Module:
    """The same layer with this weight, for as many features as it has inputs."""
    made = copy.deepcopy(layer)
    made.weight = nn.Parameter(weight)
    setattr(
        made,
        "in_features" if isinstance(layer, nn.Linear) else "in_channels",
        weight.shape[1],
    )
    return made


def _count_channels(network: nn.Module, now: int, before: int) -> None:
    """Change, in place, what a network for the channels of `before` images knows of them, to that for `now` images."""
    for part in network.modules():
        counted: Any = part
        if isinstance(getattr(part, "num_channels", None), int):
            counted.num_channels = counted.num_channels // before * now
        if isinstance(part, Standardize):
            for name in ("mean", "std"):
                each = getattr(part, name)
                setattr(part, name, each[: len(each) // before].repeat(now, 1, 1))
