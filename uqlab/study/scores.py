"""How uncertain a network or an ensemble is about each input; higher = more uncertain.

    knn = SCORES["knn"].fit(model, train.inputs, train.labels)
    uncertain = knn(model, test.inputs)  # [samples], float64 on the CPU

For an ensemble "entropy" and "msp" take the mean prediction, "mi", "reverse_mi",
"pairwise_kl" and "variation_ratio" compare the members (0 for one network), and all
others are averaged over the members.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from scipy.spatial.distance import cdist
from scipy.stats import multivariate_normal
from sklearn.covariance import ledoit_wolf
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

from uqlab import gradients, training, uncertainty
from uqlab.analysis import diversity, representations
from uqlab.core.checks import (
    ArrayLike,
    InputsLike,
    as_inputs,
    as_labels,
    as_logits,
    count,
    first_tensor,
    held,
    one_network,
    one_of,
)
from uqlab.core.modules import rows_of
from uqlab.ensembles import Ensemble
from uqlab.metrics import log_prediction


def members(model: nn.Module) -> list[nn.Module]:
    """Return the networks of an ensemble, or the one network."""
    if isinstance(model, Ensemble):
        return [model.member(m) for m in range(model.members)]
    one_network(model, "a score")
    return [model]


def _seen(of, model, inputs):
    """Return what scores of a kind see of a model and inputs, a tuple a member.

    The logits of all members are one.
    """
    if of == "logits":
        return [(as_logits(training.predict(model, inputs)),)]
    given = [(network, inputs) for network in members(model)]
    if of == "network":
        return given
    return [(representations.penultimate(*each).double(),) for each in given]


@dataclass(eq=False)
class Score:
    """A score of uncertainty.

    Parameters
    ----------
    label
        Label in tables and legends.
    of
        What it sees: "logits" [members, samples, classes]; the "features" [samples,
        width] before a member's last linear layer; or a member's "network" and the
        inputs.
    score
        A function of the logits, else of one member's features or network, and of the
        member's statistics if there are any; it returns [samples].
    statistics
        A function of one member's features for the training set and of the labels.
    needs_members
        Whether the score compares members.
    """

    label: str
    of: Literal["logits", "features", "network"]
    score: Callable
    statistics: Callable | None = None
    needs_members: bool = False
    # model -> its members' statistics, as long as the model lives
    fitted: WeakKeyDictionary = field(default_factory=WeakKeyDictionary, init=False)

    def fit(
        self, model: nn.Module, inputs: InputsLike, labels: ArrayLike | None = None
    ) -> "Score":
        """Compute the statistics of a model on its training set.

        Call it again after further training.
        """
        if self.statistics:
            x, y = held(inputs, labels)
            x = as_inputs(x)
            self._fit(model, _seen(self.of, model, x), as_labels(y, count(x)).cpu())
        return self

    def _fit(self, model, seen, labels):
        statistics: Any = self.statistics
        self.fitted[model] = [(statistics(*each, labels),) for each in seen]

    def __call__(
        self, model: nn.Module, inputs: InputsLike
    ) -> Float[Tensor, " samples"]:
        """Return the score of each input."""
        return self._of(model, _seen(self.of, model, as_inputs(inputs)))

    def _of(self, model, seen):
        if self.statistics and model not in self.fitted:
            raise ValueError(
                f"{self.label} needs the training set first: call "
                ".fit(model, inputs, labels)"
            )
        fitted = self.fitted[model] if self.statistics else [()] * len(seen)
        by_member = [self.score(*a, *b) for a, b in zip(seen, fitted, strict=True)]
        return torch.stack(by_member).mean(0).double().cpu()


def fit(
    names: Iterable[str],
    model: nn.Module,
    inputs: InputsLike,
    labels: ArrayLike | None = None,
) -> dict[str, str]:
    """Fit several of SCORES; return those that the model cannot give, and why.

    Parameters
    ----------
    names
        Names in SCORES.
    model
        A network or an ensemble.
    inputs, labels
        Its training set.
    """
    reasons = {}
    several = len(members(model)) > 1
    inputs, labels = held(inputs, labels)
    x = as_inputs(inputs)
    two, seen = rows_of(x, slice(2)), {}
    for name in names:
        one_of("score", name, SCORES)
        score = SCORES[name]
        if score.needs_members and not several:
            reasons[name] = "one network has no members to compare"
            continue
        try:
            if score.statistics:
                y = as_labels(labels, count(x)).cpu()
                if score.of not in seen:
                    seen[score.of] = _seen(score.of, model, x)
                score._fit(model, seen[score.of], y)
            score(model, two)
        except (ValueError, TypeError, RuntimeError) as error:
            reasons[name] = str(error)
    return reasons


def values(
    names: Iterable[str], model: nn.Module, inputs: InputsLike
) -> dict[str, Tensor]:
    """Return several of SCORES by name, each [samples]; features are shared."""
    inputs = as_inputs(inputs)
    seen = {}
    found = {}
    for name in names:
        one_of("score", name, SCORES)
        of = SCORES[name].of
        if of not in seen:
            seen[of] = _seen(of, model, inputs)
        found[name] = SCORES[name]._of(model, seen[of])
    return found


# Scores of logits z [members, samples, classes]
def _reverse_mi(z):
    """Return the mean KL(q || p_m) from the mean prediction q to the members.

    Malinin and Gales 2021, arXiv 2002.07650.
    """
    log_q = log_prediction(z)
    log_p = z.double().log_softmax(-1)
    return (log_q.exp() * (log_q - log_p.mean(0))).sum(-1).clamp(min=0)


def _pairwise_kl(z):
    if len(z) == 1:
        return torch.zeros(z.shape[1])
    return uncertainty.expected_pairwise_kl(z)


# Scores of features x [samples, width] and labels y [samples]
def _covariance(x, means):
    """Return the Ledoit-Wolf covariance [width, width], which few samples allow.

    None where it has no inverse: where features do not vary, but for rounding.
    """
    covariance, _ = ledoit_wolf((x - means).numpy())
    least = 1e-12 * float(x.square().max())
    rank = np.linalg.matrix_rank(covariance, tol=least, hermitian=True)
    return covariance if rank == len(covariance) else None


def _class_gaussians(x, y):
    """Return the mean of each class that occurs, and their shared covariance."""
    classes, own = y.unique(return_inverse=True)
    means = torch.stack([x[y == c].mean(0) for c in classes])
    covariance = _covariance(x, means[own])
    if covariance is None:
        raise ValueError(
            f"the features of {len(x)} inputs do not vary within their {len(means)} "
            "classes, so they have no covariance: fit on more inputs of each class"
        )
    return means, covariance


def _mahalanobis(x, gaussians):
    """Return the squared distance to the nearest mean (Lee et al. 2018, 1807.03888)."""
    means, covariance = gaussians
    to_means = cdist(x, means, "mahalanobis", VI=np.linalg.inv(covariance))
    return torch.from_numpy(to_means.min(1) ** 2)


def _with_background(x, y):
    """Return the classes, and all of them as one Gaussian.

    The total covariance is that within classes plus that of the class means. Were it
    shrunk separately, the difference of the two distances would depend on the shrinkage
    and could change its sign.
    """
    means, covariance = _class_gaussians(x, y)
    if len(means) < 2:
        raise ValueError("labels must be of two classes or more")
    between = np.cov(means.T, bias=True, fweights=y.unique(return_counts=True)[1])
    return (means, covariance), (x.mean(0, keepdim=True), covariance + between)


def _relative(x, fitted):
    """Return the distance to the nearest class minus that to all as one Gaussian.

    Ren et al. 2021, arXiv 2106.09022.
    """
    classes, background = fitted
    return _mahalanobis(x, classes) - _mahalanobis(x, background)


def _neighbours(x, y):
    x = nn.functional.normalize(x)
    return NearestNeighbors(n_neighbors=min(10, len(x))).fit(x.numpy())


def _distance(x, neighbours):
    """Return the distance to the tenth nearest of the normalised training features.

    Sun et al. 2022, arXiv 2204.06507.
    """
    distances, _ = neighbours.kneighbors(nn.functional.normalize(x).numpy())
    return torch.from_numpy(distances[:, -1])


def _densities(x, y):
    """Return each class's log share and Gaussian.

    A class of one or two inputs, or of equal ones, takes the covariance that all share.
    """
    shared = _class_gaussians(x, y)[1]
    found = []
    for c in y.unique():
        rows = x[y == c]
        own = _covariance(rows, rows.mean(0)) if len(rows) > 2 else None
        gaussian = multivariate_normal(rows.mean(0), shared if own is None else own)
        found.append((math.log(len(rows) / len(x)), gaussian))
    return found


def _negative_density(x, densities):
    """Return minus the mixture's log density (Mukhoti et al. 2023, 2102.11582)."""
    logs = [log_share + gaussian.logpdf(x) for log_share, gaussian in densities]
    return -torch.tensor(np.array(logs)).logsumexp(0).reshape(len(x))


# Scores of gradients
def _regrad(network, inputs):
    # tokens cannot be perturbed
    perturbations = 10 if first_tensor(inputs).is_floating_point() else 0
    return gradients.regrad(network, inputs, perturbations=perturbations)


SCORES: dict[str, Score] = {
    "entropy": Score(
        "entropy", "logits", lambda z: uncertainty.entropy(log_prediction(z))
    ),
    "mi": Score(
        "mutual information",
        "logits",
        lambda z: uncertainty.decompose(z).epistemic,
        needs_members=True,
    ),
    "msp": Score(
        "-log of the largest probability",
        "logits",
        lambda z: -log_prediction(z).amax(-1),
    ),
    "max_logit": Score(
        "largest logit", "logits", lambda z: -z.double().amax(-1).mean(0)
    ),
    "energy": Score(  # Liu et al. 2020, arXiv 2010.03759
        "energy", "logits", lambda z: -z.double().logsumexp(-1).mean(0)
    ),
    "mahalanobis": Score(
        "Mahalanobis distance", "features", _mahalanobis, _class_gaussians
    ),
    "relative_mahalanobis": Score(
        "relative Mahalanobis distance", "features", _relative, _with_background
    ),
    "knn": Score("distance of neighbours", "features", _distance, _neighbours),
    "ddu": Score(
        "density of features (DDU)", "features", _negative_density, _densities
    ),
    "exgrad": Score("ExGrad", "network", gradients.exgrad),
    "gradnorm": Score("GradNorm", "network", gradients.gradnorm),
    "regrad": Score("REGrad-style", "network", _regrad),
    "pairwise_kl": Score(
        "expected pairwise KL", "logits", _pairwise_kl, needs_members=True
    ),
    "reverse_mi": Score(
        "reverse mutual information", "logits", _reverse_mi, needs_members=True
    ),
    "variation_ratio": Score(
        "variation ratio", "logits", diversity.variation_ratio, needs_members=True
    ),
}
