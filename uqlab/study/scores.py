"""How uncertain a network or an ensemble is about each input; higher = more uncertain.

    knn = SCORES["knn"].fit(model, train.inputs, train.labels)
    uncertain = knn(model, test.inputs)  # [samples], float64 on the CPU

What a score is of an ensemble: "entropy" and "msp" are of the mean prediction, "mi",
"reverse_mi", "pairwise_kl" and "variation_ratio" compare the members (of one network
they are 0), and all others are averaged over the members.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

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
    one_network,
    one_of,
    positive,
)
from uqlab.core.modules import evaluating, rows_of
from uqlab.core.reading import held
from uqlab.ensembles import Ensemble
from uqlab.metrics import log_prediction
from uqlab.study.baselines import shrunk_root, whitened

Logits = Float[Tensor, "members samples classes"]


# What scores see of a model and its inputs
def members(model: nn.Module) -> list[nn.Module]:
    """Return the networks of an ensemble, or the one network."""
    if isinstance(model, Ensemble):
        return [model.member(m) for m in range(model.members)]
    one_network(model, "a score")
    return [model]


def logits(model: nn.Module, inputs: Inputs) -> Logits:
    """Return what every member says."""
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
    """One score.

    Parameters
    ----------
    label
        In tables and legends.
    read
        (model, inputs) -> what it sees: `logits`, `features` or `networks` of this
        file, or a function of your own that returns a list with an entry a member.
    rate
        For `logits` (logits, temperature) -> [samples]; else (what one member shows) ->
        [samples], or with `learn` (what it shows, what was learned).
    learn
        (what one member shows on the training set, labels) -> what is learned.
    compares
        Whether it needs two members or more to say anything.
    """

    label: str
    read: Callable
    rate: Callable
    learn: Callable | None = None
    compares: bool = False
    # What was learned, as long as the model lives.
    known: WeakKeyDictionary = field(default_factory=WeakKeyDictionary, init=False)

    def fit(
        self, model: nn.Module, inputs: InputsLike, labels: ArrayLike | None = None
    ) -> "Score":
        """Learn the statistics of a model on its training set.

        After further training, do it again.
        """
        _fit([self], model, inputs, labels)
        return self

    def __call__(
        self, model: nn.Module, inputs: InputsLike, temperature: float = 1.0
    ) -> Float[Tensor, " samples"]:
        """Return the score of each input.

        Parameters
        ----------
        temperature
            Divides the members' logits, for scores of logits alone.
        """
        if temperature != 1 and self.read is not logits:
            raise ValueError(
                f"temperature is for scores of logits; {self.label} does not see them, "
                f"got {temperature}"
            )
        return self._of(model, self.read(model, as_inputs(inputs)), temperature)

    def _of(self, model: nn.Module, shown: Any, temperature: float = 1.0) -> Tensor:
        """Return the score of what was already read."""
        positive("temperature", temperature)
        if self.read is logits:
            return self.rate(shown, temperature).double()
        if self.learn is None:
            rated = [self.rate(each) for each in shown]
        elif model in self.known:
            rated = list(map(self.rate, shown, self.known[model]))
        else:
            raise ValueError(
                f"{self.label} needs the training set first: call "
                ".fit(model, inputs, labels)"
            )
        return torch.stack(rated).mean(0).double().cpu()


def fit(
    names: Iterable[str],
    model: nn.Module,
    inputs: InputsLike,
    labels: ArrayLike | None = None,
) -> None:
    """Fit several of SCORES; the model is asked once for what they share."""
    _fit(list(map(_named, names)), model, inputs, labels)


def _fit(
    scores: list[Score], model: nn.Module, inputs: InputsLike, labels: ArrayLike | None
) -> None:
    inputs, labels = held(inputs, labels)
    x = as_inputs(inputs)
    y = as_labels(labels, count(x)).cpu()
    for read in {score.read for score in scores if score.learn}:
        shown = read(model, x)
        for score in scores:
            if score.learn and score.read is read:
                score.known[model] = [score.learn(each, y) for each in shown]


def values(
    names: Iterable[str],
    model: nn.Module,
    inputs: InputsLike,
    temperature: float = 1.0,
    z: Logits | None = None,
) -> dict[str, Tensor]:
    """Return several of SCORES by name, each [samples].

    The model is asked once for what they share.

    Parameters
    ----------
    temperature
        Divides the members' logits, for scores of logits alone.
    z
        The model's logits of these inputs, where it was asked for them before.
    """
    inputs = as_inputs(inputs)
    shown = {} if z is None else {logits: z}
    rated = {}
    for name in names:
        score = _named(name)
        if score.read not in shown:
            shown[score.read] = score.read(model, inputs)
        rated[name] = score._of(model, shown[score.read], temperature)
    return rated


def refused(
    names: Iterable[str],
    model: nn.Module,
    inputs: InputsLike,
    labels: ArrayLike,
) -> dict[str, str]:
    """Return which of SCORES a model cannot give, and why.

    Parameters
    ----------
    inputs, labels
        Some of its training set.
    """
    reasons = {}
    several = len(members(model)) > 1
    x = as_inputs(inputs)
    for name in names:
        score = _named(name)
        if score.compares and not several:
            reasons[name] = "one network has no members to compare"
            continue
        try:
            score.fit(model, x, labels)(model, rows_of(x, slice(2)))
        except (ValueError, TypeError, RuntimeError) as error:
            reasons[name] = str(error)
    return reasons


def _named(name: str) -> Score:
    one_of("score", name, SCORES)
    return SCORES[name]


# Scores of logits: z [members, samples, classes] and the temperature t
def _energy(z, t):
    """Return the energy (Liu et al. 2020, arXiv 2010.03759)."""
    return -t * (z.double() / t).logsumexp(-1).mean(0)


def _reverse_mi(z, t):
    """Return the mean KL(q || p_m) from the mean prediction q to the members.

    Malinin and Gales 2021, arXiv 2002.07650.
    """
    log_q = log_prediction(z / t)
    log_p = (z.double() / t).log_softmax(-1)
    return (log_q.exp() * (log_q - log_p.mean(0))).sum(-1).clamp(min=0)


def _pairwise_kl(z, t):
    if len(z) == 1:
        return torch.zeros(z.shape[1])
    return uncertainty.expected_pairwise_kl(z / t)


# Scores of features: x [samples, width] and labels y [samples]
def _shared(x, y):
    """Return the mean of each class that occurs, and the root of their covariance."""
    classes, own = y.unique(return_inverse=True)
    means = torch.stack([x[y == c].mean(0) for c in classes])
    return means, shrunk_root(x - means[own])


def _mahalanobis(x, known):
    """Return the squared distance to the nearest mean (Lee et al. 2018, 1807.03888)."""
    means, root = known
    squares = [whitened(x - mean, root).square().sum(1) for mean in means]
    return torch.stack(squares).amin(0)


def _background(x, y):
    """Return the classes, and all of them as one Gaussian.

    The total covariance is that within classes plus that of the class means. Were it
    shrunk apart, the difference of the two distances would say which was shrunk more,
    and could change its sign.
    """
    means, root = _shared(x, y)
    if len(means) < 2:
        raise ValueError("labels must be of two classes or more: of one it is always 0")
    middle = x.mean(0)
    apart = means - middle
    shares = y.unique(return_counts=True)[1] / len(y)
    total = root @ root.mT + apart.mT @ (shares[:, None] * apart)
    return (means, root), (middle[None], torch.linalg.cholesky(total))


def _relative(x, known):
    """Return the same, minus the squared distance to all classes as one Gaussian.

    Ren et al. 2021, arXiv 2106.09022.
    """
    classes, everything = known
    return _mahalanobis(x, classes) - _mahalanobis(x, everything)


def _neighbours(x, y):
    return NearestNeighbors(n_neighbors=min(10, len(x))).fit(_of_length_one(x))


def _distance(x, known):
    """Return the distance to the tenth nearest of the training features.

    All have length 1 (Sun et al. 2022, arXiv 2204.06507).
    """
    distances, _ = known.kneighbors(_of_length_one(x))
    return torch.from_numpy(distances[:, -1])


def _of_length_one(x):
    return nn.functional.normalize(x).numpy()


def _gaussians(x, y):
    """Return for each class the log of its share, and the Gaussian of its features.

    A class of one or two inputs has no covariance of its own: it takes the one that all
    classes share.
    """
    gaussians = []
    for c in y.unique():
        rows = x[y == c]
        root = shrunk_root(rows) if len(rows) > 2 else _shared(x, y)[1]
        normal = MultivariateNormal(rows.mean(0), scale_tril=root)
        gaussians.append((math.log(len(rows) / len(x)), normal))
    return gaussians


def _no_density(x, known):
    """Return minus the mixture's log density (Mukhoti et al. 2023, 2102.11582)."""
    logs = [share + gaussian.log_prob(x) for share, gaussian in known]
    return -torch.stack(logs).logsumexp(0)


# Scores of gradients
def _gradient(score):
    def rate(shown):
        network, inputs = shown
        with evaluating(network):
            return score(network, inputs)

    return rate


def _regrad(network, inputs):
    # Tokens cannot be perturbed.
    perturbations = 10 if first_tensor(inputs).is_floating_point() else 0
    return gradients.regrad(network, inputs, perturbations=perturbations)


SCORES: dict[str, Score] = {
    "entropy": Score(
        "entropy", logits, lambda z, t: uncertainty.entropy(log_prediction(z / t))
    ),
    "mi": Score(
        "mutual information",
        logits,
        lambda z, t: uncertainty.decompose(z / t).epistemic,
        compares=True,
    ),
    "msp": Score(
        "-log of the largest probability",
        logits,
        lambda z, t: -log_prediction(z / t).amax(-1),
    ),
    "max_logit": Score(
        "largest logit", logits, lambda z, t: -z.double().amax(-1).mean(0)
    ),
    "energy": Score("energy", logits, _energy),
    "mahalanobis": Score("Mahalanobis distance", features, _mahalanobis, _shared),
    "relative_mahalanobis": Score(
        "relative Mahalanobis distance", features, _relative, _background
    ),
    "knn": Score("distance of neighbours", features, _distance, _neighbours),
    "ddu": Score("density of features (DDU)", features, _no_density, _gaussians),
    "exgrad": Score("ExGrad", networks, _gradient(gradients.exgrad)),
    "gradnorm": Score("GradNorm", networks, _gradient(gradients.gradnorm)),
    "regrad": Score("REGrad-style", networks, _gradient(_regrad)),
    "pairwise_kl": Score("expected pairwise KL", logits, _pairwise_kl, compares=True),
    "reverse_mi": Score(
        "reverse mutual information", logits, _reverse_mi, compares=True
    ),
    "variation_ratio": Score(
        "variation ratio",
        logits,
        lambda z, t: diversity.variation_ratio(z),
        compares=True,
    ),
}
