"""LoRA-Ensemble: every member adds a matrix of low rank to frozen weights."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from uqlab.core.checks import at_least, within
from uqlab.ensembles.base import FoldedEnsemble, Members
from uqlab.ensembles.implicit import Classifiers, implicit, normal
from uqlab.ensembles.members import MemberParameter


class LowRank(MemberParameter):
    """W + scale B_m A_m, with W frozen (Muhlematter et al. 2024, whose scale is 1).

    down A [members, rank, width]; up B [members, out, rank]. A kernel is the matrix of
    its patches, so that A_m is a convolution of the same size to `rank` channels and
    B_m one of 1 x 1 (appendix H).

    Which way a pass takes, by `weights` or by `product`, `forms` decides from the work
    that `frozen_work` and `own_work` tell.
    """

    low_rank = True  # of one matrix: `product` is not for kernels in groups

    def __init__(self, w: nn.Parameter, down: Tensor, up: Tensor, scale: float = 1.0):
        super().__init__(w, len(down))
        self.down, self.up, self.scale = nn.Parameter(down), nn.Parameter(up), scale
        self.depth = down.shape[1]
        self.frozen_work = w.numel()
        self.own_work = self.depth * sum(self.matrix().shape)

    def weights(self, rows=slice(None)):
        """Return the sums of some members [members, ...]."""
        up, down = self.up[rows], self.down[rows]
        matrix = self.matrix().expand(len(up), -1, -1)
        sums = torch.baddbmm(matrix, up, down, alpha=self.scale)
        return sums.view(len(up), *self.w.shape)

    def product(self, x, form, rows):
        """Multiply x by W once for all members, then by A_m and B_m, and add.

        `form` knows how the module multiplies, as a linear layer or as a convolution:
        `shared` by one weight for all members, `apart` by one of each, and `mixed`,
        onto a result, by one of each that acts on the features alone.
        """
        y = form.shared(x, self.w, biased=True)
        low = form.apart(x, self.down[rows])
        return form.mixed(low, self.up[rows], onto=y, scale=self.scale)

    def update(self, m):
        """Return what was added to a frozen W, without the rounding of the sum."""
        if self.w.requires_grad:
            return None
        update = self.scale * self.up.detach()[m] @ self.down.detach()[m]
        return update.view(self.w.shape)


def start_of_lora(
    w: Tensor, rank: int, gain: float, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Return A, xavier-uniform, and B, zero: members begin as the frozen layer."""
    empty = [torch.empty(rank, *w.shape[1:]) for _ in generators]
    for kernel, generator in zip(empty, generators, strict=True):
        nn.init.xavier_uniform_(kernel, gain, generator)
    down = torch.stack(empty).flatten(2).to(w)
    return down, w.new_zeros(len(down), len(w), rank)


def start_normal(
    w: Tensor, rank: int, std: float, generators: list[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Return A and B, both Normal with deviation `std`."""
    up = normal(w, (len(w), rank), std, generators)
    return normal(w, (rank, w[0].numel()), std, generators), up


def lora(
    backbone: nn.Module,
    members: Members,
    rank: int = 8,
    *,
    target: str | None = None,
    gain: float = 10.0,
    scale: float = 1.0,
    std: float | None = None,
    classifiers: Classifiers = "independent",
    classifier: str | None = None,
    seed: int = 0,
    train_backbone: bool = False,
) -> FoldedEnsemble:
    """Make a LoRA-Ensemble: W + scale B_m A_m for every target weight, W frozen.

    Parameters
    ----------
    backbone : nn.Module
        The pretrained network: any module in which a linear layer gives the classes.
        Its weights are shared, not copied, and never change; batch statistics are
        frozen too.
    members : int, str or range
        How many, or the numbers of a shard, "8:16"; see `concatenate`. Member m depends
        on (seed, m) alone.
    rank : int
        Of the added matrices. A weight that allows less gets what it allows, with a
        warning.
    target : str, optional
        A regular expression on the names of modules, or of parameters where a module
        holds several weights (`self_attn.in_proj_weight`, `rnn.weight_hh_l0`). None for
        the attention's projections, or in a network without attention every layer that
        is linear, a convolution or recurrent before the classifier.
    gain, scale : float
        A starts xavier-uniform with `gain` and B at zero; other papers write the scale
        as alpha / rank.
    std : float, optional
        Start A and B from Normal numbers of this deviation instead, so that members
        differ from the beginning.
    classifiers : {"independent", "shared"}
        A classifier of its own for each member, freshly initialised, or the backbone's,
        trained by all members.
    classifier : str, optional
        The name of the layer whose output is the logits. None for the last linear layer
        of the network, and the ensemble's first call raises ValueError if it is not
        this one.
    seed : int
        Of what the members start from.
    train_backbone : bool
        Whether all members together train the rest too, which is then copied, as in
        the convolutional network of appendix H; batch statistics are then each member's
        own.

    Returns
    -------
    FoldedEnsemble
        A callable from inputs [batch, ...] to logits [members, batch, classes].

    Raises
    ------
    ValueError
        For a target that matches no weight, members or rank below 1, and a network
        without a linear layer for its classes or without a weight before it.
    TypeError
        For what is no network.

    References
    ----------
    Muhlematter et al., "LoRA-Ensemble: Efficient uncertainty modelling for
    self-attention networks", 2024.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> lora(network, 5, rank=2)(torch.rand(7, 4)).shape
    torch.Size([5, 7, 3])
    """
    at_least("rank", rank)
    within("scale", scale, "(-inf, inf)")
    cut: list[str] = []

    def make(site, generators):  # of one weight: {its name: what the members see}
        w = site.weight
        most = min(w.flatten(1).shape)
        if rank > most:
            cut.append(f"{site.name} {most}")
        size = min(rank, most)
        if std is None:
            start = start_of_lora(w, size, gain, generators)
        else:
            start = start_normal(w, size, std, generators)
        return {site.parameter: LowRank(w, *start, scale)}

    recipe = {"method": "lora", "rank": rank, "gain": gain, "scale": scale, "std": std}
    ensemble = implicit(
        backbone,
        members,
        make,
        target=target,
        classifiers=classifiers,
        classifier=classifier,
        seed=seed,
        recipe=recipe | {"train_backbone": train_backbone},
        train_backbone=train_backbone,
    )
    if cut:
        warnings.warn(
            f"rank {rank} is more than some weights allow, and cut to the largest "
            f"possible: {', '.join(cut)}",
            stacklevel=2,
        )
    return ensemble
