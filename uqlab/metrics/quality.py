"""How good predictions are: accuracy, likelihood, Brier score, F1.

The prediction is the mean of the members' probabilities. For the mean of the logits, as
in some papers, give `log_prediction(logits, "logits")[None]` as logits. Everything is
computed in float64; losses are in nats. One logit z of a sigmoid is the two classes
`torch.stack([torch.zeros_like(z), z], -1)`; of several labels each is such a pair.
Pixels are samples: `logits.movedim(2, -1).flatten(1, -2)`, `labels.flatten()`.
"""

from typing import Literal

import torch
from jaxtyping import Float
from sklearn.metrics import f1_score
from torch import Tensor
from torch.nn.functional import one_hot

from uqlab.core.checks import ArrayLike, as_labels, as_logits, one_of
from uqlab.uncertainty import classes_first

Pool = Literal["probabilities", "logits"]


def log_prediction(
    logits: ArrayLike, pool: Pool = "probabilities"
) -> Float[Tensor, "samples classes"]:
    """Return the logarithm of the ensemble's predicted probabilities.

    Parameters
    ----------
    logits
        Of the members, [members, samples, classes].
    pool
        "probabilities": the mean of the members' probabilities; "logits": softmax of
        the mean logits.

    Returns
    -------
    Tensor
        [samples, classes], float64. `log_prediction(logits)[None] / temperature` are
        again logits: those of a calibrated ensemble of one.

    Raises
    ------
    ValueError
        For logits of another shape, that are empty or not finite, and for another pool.
    """
    logits = as_logits(logits)
    one_of("pool", pool, ("probabilities", "logits"))
    chunks = []
    for _, z in classes_first(logits, torch.float64):  # z [classes, members, n]
        mean = z.mean(1) if pool == "logits" else z.log_softmax(0).logsumexp(1)
        chunks.append(mean.log_softmax(0))
    return torch.cat(chunks, 1).T.contiguous()


def accuracy(logits: ArrayLike, labels: ArrayLike) -> float:
    """Return the fraction of samples whose most probable class is the label."""
    return hits(logits, labels).mean().item()


def nll(logits: ArrayLike, labels: ArrayLike) -> float:
    """Return the mean negative log-likelihood of the labels, in nats."""
    return losses(logits, labels).mean().item()


def brier(logits: ArrayLike, labels: ArrayLike) -> float:
    """Return the Brier score in [0, 2], the mean sum of squared errors."""
    return squared_errors(logits, labels).mean().item()


def macro_f1(logits: ArrayLike, labels: ArrayLike) -> float:
    """Return F1 averaged over the classes among labels or predictions."""
    log_p, labels = predict(logits, labels)
    return float(f1_score(labels.cpu(), log_p.argmax(1).cpu(), average="macro"))


# By sample ----------------------------------------------------------------------------
def predict(logits: ArrayLike, labels: ArrayLike) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [samples, classes] and labels on their device."""
    log_p = log_prediction(logits)
    return log_p, as_labels(labels, *log_p.shape).to(log_p.device)


def hits(logits: ArrayLike, labels: ArrayLike) -> Float[Tensor, " samples"]:
    """Return 1 where the most probable class is the label, else 0."""
    log_p, labels = predict(logits, labels)
    return (log_p.argmax(1) == labels).double()


def losses(logits: ArrayLike, labels: ArrayLike) -> Float[Tensor, " samples"]:
    """Return the negative log-likelihood of every sample's label, in nats."""
    log_p, labels = predict(logits, labels)
    return -log_p.gather(1, labels[:, None])[:, 0]


def residuals(logits: ArrayLike, labels: ArrayLike) -> tuple[Tensor, Tensor]:
    """Return probabilities [samples, classes], and those minus one-hot labels."""
    log_p, labels = predict(logits, labels)
    p = log_p.exp()
    return p, p - one_hot(labels, p.shape[1])


def squared_errors(logits: ArrayLike, labels: ArrayLike) -> Float[Tensor, " samples"]:
    """Return the squared errors of the probabilities, summed over classes."""
    return residuals(logits, labels)[1].square().sum(1)


def disagreements(logits: ArrayLike) -> Float[Tensor, " samples"]:
    """Return the share of pairs of members that predict different classes."""
    logits = as_logits(logits)
    members = len(logits)
    votes = one_hot(logits.argmax(-1), logits.shape[-1]).sum(0).double()
    return (votes * (members - votes)).sum(1) / max(1, members * (members - 1))
