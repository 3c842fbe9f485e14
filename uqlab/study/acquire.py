"""Active learning: which inputs to label next, from an ensemble's logits.

The scores of single inputs are elsewhere: BALD (Houlsby et al. 2011) is `epistemic` of
`uncertainty.decompose`, the mutual information between a label and the member; entropy
is its `total`. Here is what makes a batch of them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.special import entr

from uqlab.core.checks import ArrayLike, as_logits, as_scores, at_least

_Rows = Int[Tensor, " count"]


def choose(
    scores: ArrayLike,
    count: int,
    *,
    seed: int = 0,
) -> _Rows:
    """Return the places of the largest scores, the largest first; ties are drawn.

    Parameters
    ----------
    scores
        [samples], higher = rather labelled.
    count
        How many, at most all.
    seed
        Of the order of equal scores.
    """
    scores = as_scores(scores)
    at_least("the number of samples", len(scores), at_least("count", count))
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(scores), generator=generator)
    order = scores.cpu()[shuffled].argsort(descending=True, stable=True)
    return shuffled[order[:count]]


def batch_bald(
    logits: ArrayLike,
    count: int,
    *,
    labelings: int = 1000,
    seed: int = 0,
) -> tuple[_Rows, Float[Tensor, " count"]]:
    """Choose inputs whose labels together tell most about the member, one by one.

    BALD's best inputs may all ask the same. Here each next input is the one whose label
    adds most to the joint mutual information I[y_1 .. y_k; member] of those before it,
    which is the mean of I[y_k; member | y_1 .. y_k-1] over their labels.

    Parameters
    ----------
    logits
        [members, samples, classes], computed in float64; temporaries hold labelings *
        samples * classes of them. Of many samples give those with the largest BALD: no
        input adds more than its BALD, so one that is left out would have been chosen
        only where its BALD exceeds an increment.
    count
        How many, at most all.
    labelings
        The most labels y_1 .. y_k-1 that the mean is taken over: all classes^(k-1)
        while these are no more; then so many drawn from the members' mean prediction,
        each of which is extended by one class an input.
    seed
        Of that sample.

    Returns
    -------
    tuple
        Places of the inputs in the order of choice, and the joint mutual information of
        the first, the first two, ... of them in nats: exact while all labels are taken,
        and never above log(members) but for the sample's error.

    References
    ----------
    Kirsch, van Amersfoort and Gal 2019, arXiv 1906.08158, algorithm 1.

    Examples
    --------
    Two members that are sure of different classes: one label tells all.

    >>> sure = torch.tensor([[[50.0, 0.0]], [[0.0, 50.0]]]).expand(2, 3, 2)
    >>> batch_bald(sure, 2)[1]  # log 2, and no more
    tensor([0.6931, 0.6931], dtype=torch.float64)
    """
    log_p = as_logits(logits).double().log_softmax(2)
    at_least("the number of samples", log_p.shape[1], at_least("count", count))
    at_least("labelings", labelings)
    generator = torch.Generator(log_p.device).manual_seed(seed)
    likelihood = log_p.new_zeros(1, len(log_p))  # log p_m(labels) [labelings, members]
    shares = log_p.new_ones(1)  # how probable each labeling is
    rows = []
    added = []
    for _ in range(count):
        gains = _conditional(likelihood, shares, log_p)
        gains[rows] = -1
        best = int(gains.argmax())
        rows.append(best)
        added.append(gains[best])
        likelihood, shares = _labelled(likelihood, shares, log_p[:, best])
        if len(shares) > labelings:
            drawn = shares.multinomial(labelings, True, generator=generator)
            likelihood = likelihood[drawn]
            shares = shares.new_full((labelings,), 1 / labelings)
    return torch.tensor(rows), torch.stack(added).cumsum(0)


def _conditional(
    likelihood: Tensor,
    shares: Tensor,
    log_p: Tensor,
) -> Tensor:
    """Return the mean over labelings of I[y; member | labels so far], each sample's."""
    p = log_p.exp()
    posterior = likelihood.softmax(1)  # of the members, given a labeling
    q = torch.tensordot(posterior, p, 1)  # [labelings, samples, classes]
    total = shares @ entr(q).sum(2)
    own = shares @ posterior @ entr(p).sum(2)
    return total - own


def _labelled(
    likelihood: Tensor,
    shares: Tensor,
    label: Tensor,
) -> tuple[Tensor, Tensor]:
    """Extend each labeling by every class of one more sample [members, classes]."""
    q = likelihood.softmax(1) @ label.exp()  # [labelings, classes]
    shares = shares[:, None] * q
    likelihood = likelihood[:, None] + label.T  # [labelings, classes, members]
    return likelihood.flatten(0, 1), shares.flatten()
