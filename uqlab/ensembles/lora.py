"""LoRA-Ensemble: every member adds a matrix of low rank to frozen weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.checks import Target, at_least, within
from uqlab.ensembles.base import Ensemble, Members, recorded
from uqlab.ensembles.implicit import Classifiers, implicit


class LowRank(nn.Module):
    """W + scale B A, what one member sees of W (Muhlematter et al. 2024, scale 1).

    lora_A [rank, in] and lora_B [out, rank]. A kernel is the matrix of its patches, so
    that A is a convolution of the same size to `rank` channels and B one of 1 x 1
    (appendix H).
    """

    def __init__(self, lora_A: Tensor, lora_B: Tensor, scale: float = 1.0):
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(lora_A), nn.Parameter(lora_B)
        self.scale = scale

    def forward(self, w):
        """Return the sum, computed in the precision of A and B."""
        return (w + (self.scale * self.lora_B @ self.lora_A).view(w.shape)).to(w.dtype)

    def product(self, x, w, bias):
        """Multiply x by W, by A and by B, without building the sum."""
        low = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        return F.linear(x, w, bias) + (self.scale * low).to(x.dtype)


@recorded
def lora(
    backbone: nn.Module,
    members: Members,
    rank: int = 8,
    *,
    target: Target | None = None,
    gain: float = 10.0,
    scale: float = 1.0,
    std: float | None = None,
    classifiers: Classifiers = "independent",
    classifier: str | None = None,
    seed: int = 0,
    train_backbone: bool = False,
) -> Ensemble:
    """Make a LoRA-Ensemble: W + scale B_m A_m for every target weight, W frozen.

    Parameters
    ----------
    backbone : nn.Module
        The pretrained network: any module in which a linear layer gives the classes.
        Its weights are shared, not copied, and never change; batch statistics are
        frozen too.
    members : int or range
        How many, or the numbers of a shard, `range(8, 16)`; see `concatenate`. Member m
        depends on (seed, m) alone.
    rank : int
        Of the added matrices, capped at the weight's rank.
    target : str or sequence of str, optional
        A regular expression on the names of modules, or a list of how they end, as in
        PEFT; on names of parameters where a module holds several weights
        (`self_attn.in_proj_weight`, `rnn.weight_hh_l0`). None for the attention's
        projections, or in a network without attention every layer that is linear, a
        convolution or recurrent before the classifier.
    gain, scale : float
        A starts xavier-uniform with `gain` and B at zero; other papers write the scale
        as alpha / rank.
    std : float, optional
        Start A and B from Normal numbers of this deviation instead, so that members
        differ from the beginning.
    classifiers : {"independent", "shared"}
        A new classifier for each member, freshly initialised, or the backbone's,
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
    Ensemble
        A callable from inputs [batch, ...] to logits [members, batch, classes].

    Raises
    ------
    ValueError
        For a target that matches no weight, members or rank below 1, and a network
        without a linear layer for its classes or without a weight before it.
    TypeError
        If `backbone` is not a network.

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

    def make(site, generator):
        w = site.weight.detach()
        size = min(rank, *w.flatten(1).shape)
        if std is not None:
            up = site.normal((len(w), size), std, generator)
            return LowRank(site.normal((size, w[0].numel()), std, generator), up, scale)
        down = torch.empty(size, *w.shape[1:])
        nn.init.xavier_uniform_(down, gain, generator)
        like = torch.promote_types(w.dtype, torch.float32)
        up = w.new_zeros(len(w), size, dtype=like)
        return LowRank(down.flatten(1).to(up), up, scale)

    return implicit(
        backbone,
        members,
        make,
        target=target,
        classifiers=classifiers,
        classifier=classifier,
        seed=seed,
        train_backbone=train_backbone,
    )
