"""Ensembles: callables `inputs -> logits [members, batch, classes]`, however their members came to be."""

import copy
import operator
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from uqlab.layers import MemberDropout, MemberLayer, MemberLinear, replace_layers, with_layers

ELEMENTWISE = {
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish,
}  # fmt: skip
# Modules that treat every row of a batch alike, so that members can be folded into the batch.
_ROW_BY_ROW = ELEMENTWISE | {nn.Sequential, nn.Linear, nn.Flatten}
# Modules that draw from torch's global generator, whose order threads would scramble.
_GLOBAL_NOISE = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU
)  # fmt: skip


class Ensemble(nn.Module):
    """Calling it with inputs [batch, ...] gives logits [members, batch, classes].

    `member_ids` are the members' numbers in the whole ensemble: what a member learns depends on (seed, its number)
    alone, so an ensemble can be computed in shards.
    """

    def __init__(self, member_ids: range):
        super().__init__()
        self.member_ids = member_ids

    @property
    def members(self) -> int:
        return len(self.member_ids)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_members(x.expand(self.members, *x.shape))

    def forward_members(self, x: Tensor) -> Tensor:
        """Each member on a batch of its own: [members, batch, ...] -> [members, batch, classes]."""
        raise NotImplementedError

    def member(self, index: int) -> nn.Module:
        """Member `index` as a plain module: inputs [batch, ...] -> logits [batch, classes]."""
        raise NotImplementedError

    def parts(self) -> list[tuple[slice, Callable[[Tensor], Tensor]]]:
        """The passes that a training step takes: (members in it, their inputs [members, batch, ...] -> logits)."""
        raise NotImplementedError

    def shard(self, rows: slice) -> "Ensemble":
        """The ensemble of some of the members, sharing their weights' memory: training it trains them."""
        raise NotImplementedError

    def can_shard(self) -> bool:
        """Whether no two members share a parameter, so that shards can be trained independently."""
        raise NotImplementedError

    def noise_layers(self) -> list[tuple[MemberDropout, int, Sequence[int]]]:
        """(dropout layer, its number within a member, the members it serves)."""
        raise NotImplementedError

    def reseed(self, seed: int, epoch: int = 0) -> None:
        """Start every member's dropout noise anew from (seed, member, layer, epoch)."""
        device = next(self.parameters()).device
        for layer, number, members in self.noise_layers():
            if layer.p:
                layer.reseed([member_seed(seed, m, "dropout", number, epoch) for m in members], device)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.members:
            raise IndexError(f"member {index} of an ensemble of {self.members}: choose 0 to {self.members - 1}")


class FoldedEnsemble(Ensemble):
    """One network whose member layers take all members at once, folded into the batch."""

    def __init__(self, network: nn.Module, member_ids: range):
        super().__init__(member_ids)
        self.network = network

    def forward_members(self, x: Tensor) -> Tensor:
        return self.network(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def parts(self) -> list[tuple[slice, Callable[[Tensor], Tensor]]]:
        return [(slice(None), self.forward_members)]

    def member(self, index: int) -> nn.Module:
        self._check_index(index)
        return with_layers(self.network, lambda layer: layer.member(index))

    def shard(self, rows: slice) -> "FoldedEnsemble":
        return FoldedEnsemble(with_layers(self.network, lambda layer: layer.shard(rows)), self.member_ids[rows])

    def can_shard(self) -> bool:
        return all(
            isinstance(part, MemberLayer) or not any(p.requires_grad for p in part.parameters(recurse=False))
            for part in self.network.modules()
        )

    def noise_layers(self) -> list[tuple[MemberDropout, int, Sequence[int]]]:
        return [(layer, number, self.member_ids) for number, layer in enumerate(_dropouts(self.network))]


class SeparateEnsemble(Ensemble):
    """Members that share nothing and run one after the other: networks whose layers have no member axis."""

    def __init__(self, models: Sequence[nn.Module], member_ids: range):
        super().__init__(member_ids)
        self.models = nn.ModuleList(models)

    def forward_members(self, x: Tensor) -> Tensor:
        return torch.stack([model(mine) for model, mine in zip(self.models, x, strict=True)])

    def parts(self) -> list[tuple[slice, Callable[[Tensor], Tensor]]]:
        return [(slice(m, m + 1), lambda x, model=model: model(x[0])[None]) for m, model in enumerate(self.models)]

    def member(self, index: int) -> nn.Module:
        self._check_index(index)
        return self.models[index]

    def shard(self, rows: slice) -> "SeparateEnsemble":
        return SeparateEnsemble(list(self.models)[rows], self.member_ids[rows])

    def can_shard(self) -> bool:
        shared = len({id(p) for p in self.parameters()}) < sum(1 for m in self.models for _ in m.parameters())
        return not shared and not any(isinstance(part, _GLOBAL_NOISE) for part in self.modules())

    def noise_layers(self) -> list[tuple[MemberDropout, int, Sequence[int]]]:
        return [
            (layer, number, [m])
            for m, model in zip(self.member_ids, self.models, strict=True)
            for number, layer in enumerate(_dropouts(model))
        ]


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


def member_seed(seed: int, member: int, stream: str, *more: int) -> int:
    """A 63-bit seed for one stream of randomness ("weights", "order", "dropout") of one member."""
    words = np.random.SeedSequence([seed, member, *stream.encode(), *more]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def _dropouts(model: nn.Module) -> list[MemberDropout]:
    return [layer for layer in model.modules() if isinstance(layer, MemberDropout)]


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
