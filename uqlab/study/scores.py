"""How uncertain one network or an ensemble is about each input: one list of scores, higher = more uncertain.

    knn = SCORES["knn"].fit(model, train.inputs, train.labels)  # statistics, kept as long as the model lives
    uncertain = knn(model, test.inputs)  # [samples], float64 on the CPU

What a score is of an ensemble: "entropy" and "msp" are of the mean prediction, "mi", "reverse_mi", "pairwise_kl" and
"variation_ratio" compare the members (of one network they are 0), and all others are averaged over the members.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

from uqlab import diversity, gradients, representations, training, uncertainty
from uqlab.core import door
from uqlab.core.checks import class_labels, one_of
from uqlab.core.modules import evaluating
from uqlab.ensembles import Ensemble
from uqlab.metrics import log_prediction
from uqlab.study.baselines import shrunk_root, whitened

Logits = Float[Tensor, "members samples classes"]


# What scores see of a model and its inputs ----------------------------------------------------------------------------
def members(model: nn.Module) -> list[nn.Module]:
    """The networks of an ensemble, or the one network."""
    return (
        [model.member(m) for m in range(model.members)]
        if isinstance(model, Ensemble)
        else [model]
    )


def logits(model: nn.Module, inputs: Tensor) -> Logits:
    return training.predict(model, inputs)


def features(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Each member's features before its last linear layer, [samples, width], float64."""
    return [
        representations.penultimate(network, inputs).double()
        for network in members(model)
    ]


def networks(model: nn.Module, inputs: Tensor) -> list[tuple[nn.Module, Tensor]]:
    return [(network, inputs) for network in members(model)]


class Score:
    """One score.

    read: (model, inputs) -> what it sees: `logits`, `features` or `networks` of this file, or your own.
    rate: for `logits` (logits, temperature) -> [samples]; else (what one member shows) -> [samples], or with `learn`
        (what it shows, what was learned).
    learn: (what one member shows on the training set, labels) -> what is learned.
    compares: whether it needs two members or more to say anything.
    """

    def __init__(
        self,
        label: str,
        read: Callable,
        rate: Callable,
        learn: Callable | None = None,
        *,
        compares: bool = False,
    ):
        self.label, self.read, self.rate, self.learn, self.compares = (
            label,
            read,
            rate,
            learn,
            compares,
        )
        self.known: WeakKeyDictionary[nn.Module, list] = WeakKeyDictionary()

    def fit(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> "Score":
        """Learn the statistics of this model on its training set; after further training, do it again."""
        return (
            self.learned(model, self.read(model, inputs), labels)
            if self.learn
            else self
        )

    def __call__(
        self, model: nn.Module, inputs: Tensor, temperature: float = 1.0
    ) -> Float[Tensor, " samples"]:
        """temperature: divides the members' logits, for scores of logits alone."""
        return self.seen(model, self.read(model, inputs), temperature)

    def learned(self, model: nn.Module, shown: Any, labels: Tensor) -> "Score":
        """`fit` for what was already read."""
        if self.learn:
            self.known[model] = [
                self.learn(each, class_labels(labels.cpu(), len(each)))
                for each in shown
            ]
        return self

    def seen(
        self, model: nn.Module, shown: Any, temperature: float = 1.0
    ) -> Float[Tensor, " samples"]:
        """The score from what was already read."""
        if self.read is logits:
            return self.rate(shown, temperature).double()
        if temperature != 1:
            raise ValueError(
                f"temperature is for scores of logits; {self.label} does not see them, got {temperature}"
            )
        if self.learn and model not in self.known:
            raise ValueError(
                f"{self.label} needs the training set first: call .fit(model, inputs, labels)"
            )
        more = (
            [(each,) for each in self.known[model]] if self.learn else [()] * len(shown)
        )
        parts = [
            self.rate(each, *known) for each, known in zip(shown, more, strict=True)
        ]
        return torch.stack(parts).mean(0).double().cpu()


def fit(names: Iterable[str], model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """Fit several of SCORES; the model is asked once for what they share."""
    wanted = [score for score in map(_named, names) if score.learn]
    shown = {read: read(model, inputs) for read in {score.read for score in wanted}}
    for score in wanted:
        score.learned(model, shown[score.read], labels)


def values(
    names: Iterable[str],
    model: nn.Module,
    inputs: Tensor,
    temperature: float = 1.0,
    z: Logits | None = None,
) -> dict[str, Tensor]:
    """Several of SCORES by name, each [samples]; the model is asked once for what they share.

    z: the model's logits of these inputs, where it was asked for them before.
    """
    wanted = {name: _named(name) for name in names}
    shown: dict[Callable, Any] = {} if z is None else {logits: z}
    shown |= {
        read: read(model, inputs)
        for read in {score.read for score in wanted.values()} - shown.keys()
    }
    return {
        name: score.seen(
            model, shown[score.read], temperature if score.read is logits else 1.0
        )
        for name, score in wanted.items()
    }


def refused(
    names: Iterable[str], model: nn.Module, inputs: Tensor, labels: Tensor
) -> dict[str, str]:
    """Which of SCORES a model cannot give, and why; inputs, labels: some of its training set."""
    found, several = {}, isinstance(model, Ensemble) and model.members > 1
    for name in names:
        try:
            if _named(name).compares and not several:
                raise ValueError("one network has no members to compare")
            SCORES[name].fit(model, inputs, labels)(model, inputs[:2])
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    return found


def _named(name: str) -> Score:
    one_of("score", name, SCORES)
    return SCORES[name]


# Scores of logits -----------------------------------------------------------------------------------------------------
def _energy(z: Logits, t: float) -> Tensor:
    """Liu et al. 2020, arXiv 2010.03759."""
    return -t * (z.double() / t).logsumexp(-1).mean(0)


def _reverse_mi(z: Logits, t: float) -> Tensor:
    """Mean KL(q || p_m) from the mean prediction q to the members (Malinin and Gales 2021, arXiv 2002.07650)."""
    log_q, log_p = log_prediction(z / t), (z.double() / t).log_softmax(-1)
    return (log_q.exp() * (log_q - log_p.mean(0))).sum(-1).clamp(min=0)


def _pairwise_kl(z: Logits, t: float) -> Tensor:
    return (
        uncertainty.expected_pairwise_kl(z / t)
        if len(z) > 1
        else torch.zeros(z.shape[1])
    )


# Scores of features: x [samples, width] and labels [samples] ----------------------------------------------------------
def _class_means(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each class that occurs, and every sample's distance vector from its own."""
    classes, own = y.unique(return_inverse=True)
    means = torch.stack([x[y == c].mean(0) for c in classes])
    return means, x - means[own]


def _shared(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    means, apart = _class_means(x, y)
    return means, shrunk_root(apart)


def _mahalanobis(x: Tensor, known: tuple[Tensor, Tensor]) -> Tensor:
    """The squared distance to the nearest class mean (Lee et al. 2018, arXiv 1807.03888)."""
    means, root = known
    return torch.stack(
        [whitened(x - mean, root).square().sum(1) for mean in means]
    ).amin(0)


def _background(x: Tensor, y: Tensor) -> tuple:
    """The classes, and all of them as one Gaussian.

    The total covariance is that within classes plus that of the class means. Were it
    shrunk apart, the difference of the two distances would say which was shrunk more,
    and could change its sign.
    """
    means, root = _shared(x, y)
    middle = x.mean(0)
    shares = y.unique(return_counts=True)[1] / len(y)
    between = (means - middle).mT @ (shares[:, None] * (means - middle))
    total = torch.linalg.cholesky(root @ root.mT + between)
    return (means, root), (middle[None], total)


def _relative(x: Tensor, known: tuple) -> Tensor:
    """The same, minus the squared distance to all classes as one Gaussian (Ren et al. 2021, arXiv 2106.09022)."""
    classes, everything = known
    return _mahalanobis(x, classes) - _mahalanobis(x, everything)


def _nearest(x: Tensor, y: Tensor, k: int = 10) -> NearestNeighbors:
    return NearestNeighbors(n_neighbors=min(k, len(x))).fit(
        nn.functional.normalize(x).numpy()
    )


def _distance(x: Tensor, known: NearestNeighbors) -> Tensor:
    """To the k-th nearest of the training features, all of length 1 (Sun et al. 2022, arXiv 2204.06507)."""
    return torch.from_numpy(
        known.kneighbors(nn.functional.normalize(x).numpy())[0][:, -1]
    )


def _gaussians(
    x: Tensor, y: Tensor
) -> list[tuple[Tensor, torch.distributions.MultivariateNormal]]:
    """For each class the log of its share, and the Gaussian of its features.

    A class of one or two inputs has no covariance of its own: it takes the one that all classes share.
    """
    parts = [x[y == c] for c in y.unique()]
    shares = [torch.tensor(len(part) / len(x)).double().log() for part in parts]
    normal = torch.distributions.MultivariateNormal
    roots = [shrunk_root(part) if len(part) > 2 else _shared(x, y)[1] for part in parts]
    return [
        (s, normal(p.mean(0), scale_tril=root))
        for s, p, root in zip(shares, parts, roots, strict=True)
    ]


def _no_density(x: Tensor, known: list) -> Tensor:
    """Minus the log density of the mixture (Mukhoti et al. 2023, arXiv 2102.11582)."""
    return -torch.stack(
        [share + gaussian.log_prob(x) for share, gaussian in known]
    ).logsumexp(0)


# Scores of gradients --------------------------------------------------------------------------------------------------
def _gradient(score: Callable, **fixed: Any) -> Callable:
    def rate(shown: tuple[nn.Module, Tensor]) -> Tensor:
        network, inputs = shown
        with evaluating(network):
            return score(network, inputs, **fixed)

    return rate


def _regrad(network: nn.Module, inputs: Tensor) -> Tensor:
    """Tokens cannot be perturbed."""
    return gradients.regrad(
        network, inputs, perturbations=10 if inputs.is_floating_point() else 0
    )


door.room(__name__)  # before SCORES, which read by the functions that stand behind it

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
    "knn": Score("distance of neighbours", features, _distance, _nearest),
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
