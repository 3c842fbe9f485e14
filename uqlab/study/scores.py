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
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from sklearn.covariance import ledoit_wolf
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

from uqlab import gradients, training, uncertainty
from uqlab.analysis import diversity, representations
from uqlab.core.checks import (
    ArrayLike,
    Inputs,
    InputsLike,
    as_inputs,
    as_labels,
    count,
    first_tensor,
    held,
    one_network,
    one_of,
)
from uqlab.core.modules import evaluating, rows_of
from uqlab.ensembles import Ensemble
from uqlab.metrics import log_prediction


# Inputs of scores
def members(model: nn.Module) -> list[nn.Module]:
    """Return the networks of an ensemble, or the one network."""
    if isinstance(model, Ensemble):
        return [model.member(m) for m in range(model.members)]
    one_network(model, "a score")
    return [model]


def logits(
    model: nn.Module, inputs: Inputs
) -> Float[Tensor, "members samples classes"]:
    """Return the logits of every member."""
    return training.predict(model, inputs)


def features(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return each member's features [samples, width] before its last linear layer."""
    penultimate = representations.penultimate
    return [penultimate(network, inputs).double() for network in members(model)]


def networks(model: nn.Module, inputs: Inputs) -> list[tuple[nn.Module, Inputs]]:
    """Return each member with the inputs."""
    return [(network, inputs) for network in members(model)]


@dataclass(eq=False)
class Score:
    """A score of uncertainty.

    Parameters
    ----------
    label
        Label in tables and legends.
    inputs
        `logits`, `features` or `networks` of this file, or a function (model, inputs)
        that returns a list with an entry a member.
    score
        For `logits` a function of the logits, else of one member's entry, or of the
        entry and the member's statistics; it returns [samples].
    statistics
        A function of one member's entry for the training set and the labels.
    needs_members
        Whether the score compares members.
    """

    label: str
    inputs: Callable
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
            y = as_labels(y, count(x)).cpu()
            given = self.inputs(model, x)
            self.fitted[model] = [self.statistics(each, y) for each in given]
        return self

    def __call__(
        self, model: nn.Module, inputs: InputsLike
    ) -> Float[Tensor, " samples"]:
        """Return the score of each input."""
        return self._of(model, self.inputs(model, as_inputs(inputs)))

    def _of(self, model: nn.Module, given: Any) -> Tensor:
        if self.inputs is logits:
            return self.score(given).double()
        if not self.statistics:
            by_member = map(self.score, given)
        elif model in self.fitted:
            by_member = map(self.score, given, self.fitted[model])
        else:
            raise ValueError(
                f"{self.label} needs the training set first: call "
                ".fit(model, inputs, labels)"
            )
        return torch.stack(list(by_member)).mean(0).double().cpu()


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
    two = rows_of(as_inputs(inputs), slice(2))
    for name in names:
        score = _named(name)
        if score.needs_members and not several:
            reasons[name] = "one network has no members to compare"
            continue
        try:
            score.fit(model, inputs, labels)(model, two)
        except (ValueError, TypeError, RuntimeError) as error:
            reasons[name] = str(error)
    return reasons


def values(
    names: Iterable[str], model: nn.Module, inputs: InputsLike
) -> dict[str, Tensor]:
    """Return several of SCORES by name, each [samples]; features are shared."""
    inputs = as_inputs(inputs)
    given = {}
    found = {}
    for name in names:
        score = _named(name)
        if score.inputs not in given:
            given[score.inputs] = score.inputs(model, inputs)
        found[name] = score._of(model, given[score.inputs])
    return found


def _named(name: str) -> Score:
    one_of("score", name, SCORES)
    return SCORES[name]


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
def _covariance(x):
    """Return the Ledoit-Wolf covariance [width, width], which few samples allow."""
    return torch.from_numpy(ledoit_wolf(x.numpy())[0])


def _squares(x, mean, covariance):
    """Return squared Mahalanobis distances [samples]."""
    root = torch.linalg.cholesky(covariance)
    columns = torch.linalg.solve_triangular(root, (x - mean).mT, upper=False)
    return columns.square().sum(0)


def _class_gaussians(x, y):
    """Return the mean of each class that occurs, and their shared covariance."""
    classes, own = y.unique(return_inverse=True)
    means = torch.stack([x[y == c].mean(0) for c in classes])
    return means, _covariance(x - means[own])


def _mahalanobis(x, gaussians):
    """Return the squared distance to the nearest mean (Lee et al. 2018, 1807.03888)."""
    means, covariance = gaussians
    return torch.stack([_squares(x, mean, covariance) for mean in means]).amin(0)


def _with_background(x, y):
    """Return the classes, and all of them as one Gaussian.

    The total covariance is that within classes plus that of the class means. Were it
    shrunk separately, the difference of the two distances would depend on the shrinkage
    and could change its sign.
    """
    means, covariance = _class_gaussians(x, y)
    if len(means) < 2:
        raise ValueError("labels must be of two classes or more")
    centred = means - x.mean(0)
    shares = y.unique(return_counts=True)[1] / len(y)
    total = covariance + centred.mT @ (shares[:, None] * centred)
    return (means, covariance), (x.mean(0, keepdim=True), total)


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
    """Return each class's log share, mean and covariance.

    A class of one or two inputs takes the covariance that all classes share.
    """
    shared = _class_gaussians(x, y)[1]
    found = []
    for c in y.unique():
        rows = x[y == c]
        covariance = _covariance(rows) if len(rows) > 2 else shared
        found.append((math.log(len(rows) / len(x)), rows.mean(0), covariance))
    return found


def _negative_density(x, densities):
    """Return minus the mixture's log density (Mukhoti et al. 2023, 2102.11582)."""
    logs = []
    for log_share, mean, covariance in densities:
        size = covariance.logdet() + x.shape[1] * math.log(2 * math.pi)
        logs.append(log_share - (_squares(x, mean, covariance) + size) / 2)
    return -torch.stack(logs).logsumexp(0)


# Scores of gradients
def _gradient(score):
    def of_member(given):
        network, inputs = given
        with evaluating(network):
            return score(network, inputs)

    return of_member


def _regrad(network, inputs):
    # tokens cannot be perturbed
    perturbations = 10 if first_tensor(inputs).is_floating_point() else 0
    return gradients.regrad(network, inputs, perturbations=perturbations)


def _of_logits(label, score, needs_members=False):
    return Score(label, logits, score, needs_members=needs_members)


SCORES: dict[str, Score] = {
    "entropy": _of_logits("entropy", lambda z: uncertainty.entropy(log_prediction(z))),
    "mi": _of_logits(
        "mutual information", lambda z: uncertainty.decompose(z).epistemic, True
    ),
    "msp": _of_logits(
        "-log of the largest probability", lambda z: -log_prediction(z).amax(-1)
    ),
    "max_logit": _of_logits("largest logit", lambda z: -z.double().amax(-1).mean(0)),
    "energy": _of_logits(  # Liu et al. 2020, arXiv 2010.03759
        "energy", lambda z: -z.double().logsumexp(-1).mean(0)
    ),
    "mahalanobis": Score(
        "Mahalanobis distance", features, _mahalanobis, _class_gaussians
    ),
    "relative_mahalanobis": Score(
        "relative Mahalanobis distance", features, _relative, _with_background
    ),
    "knn": Score("distance of neighbours", features, _distance, _neighbours),
    "ddu": Score("density of features (DDU)", features, _negative_density, _densities),
    "exgrad": Score("ExGrad", networks, _gradient(gradients.exgrad)),
    "gradnorm": Score("GradNorm", networks, _gradient(gradients.gradnorm)),
    "regrad": Score("REGrad-style", networks, _gradient(_regrad)),
    "pairwise_kl": _of_logits("expected pairwise KL", _pairwise_kl, True),
    "reverse_mi": _of_logits("reverse mutual information", _reverse_mi, True),
    "variation_ratio": _of_logits("variation ratio", diversity.variation_ratio, True),
}
