"""Simple rivals: what pixels or words alone can do, without any network. Every page shows them beside its methods."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Integer
from sklearn.covariance import ledoit_wolf
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from uqlab import metrics
from uqlab.core import door
from uqlab.core.checks import at_least, class_labels, count_samples, finite

WORD = r"\S+"

Inputs = Float[Tensor, "samples ..."] | list[str]
Others = Float[Tensor, "others ..."] | list[str]


def accuracies(
    train: Inputs,
    labels: Integer[Tensor, " samples"],
    test: Others,
    test_labels: Integer[Tensor, " others"],
) -> dict[str, float]:
    """Accuracy of a logistic regression on the pixels, and of the nearest training image's label.

    Of texts: on the counts of their words, where a word weighs less the more texts hold it (tf-idf).
    """
    strength = 10.0 if isinstance(train, list) else 0.1  # rows of tf-idf have length 1
    rivals = {
        "logistic regression": LogisticRegression(C=strength, tol=1e-3, max_iter=1000),
        "nearest neighbour": KNeighborsClassifier(1),
    }
    labels, test_labels = (
        class_labels(labels, _count(train)),
        class_labels(test_labels, _count(test)),
    )
    if _shape(train) != _shape(test) or labels.unique().numel() < 2:
        raise ValueError(
            "train and test must be inputs of one shape, and train of two classes, got "
            f"{_shape(train)}, {_shape(test)} and labels {labels.unique().tolist()[:5]}"
        )
    if isinstance(train, list) or isinstance(test, list):
        counts = TfidfVectorizer(token_pattern=WORD)
        x, at = counts.fit_transform(train), counts.transform(test)
    else:
        x, at = train.flatten(1).numpy(), test.flatten(1).numpy()
    return {
        name: float(rival.fit(x, labels).score(at, test_labels))
        for name, rival in rivals.items()
    }


def ood_scores(train: Inputs, inputs: Others, seed: int = 0) -> dict[str, np.ndarray]:
    """Two scores that know no class, higher = more unusual: distance of the pixels, and chance.

    The squared Mahalanobis distance is that to the mean of the training images with their Ledoit-Wolf covariance, which
    shrinks the many pixels that hardly vary. Of texts it is the rarity of the words: minus the mean logarithm of how
    frequent they are in the training texts, each counted once more. The random order is the floor of every table: its
    AUROC is near 1/2.
    """
    if _shape(inputs) != _shape(train):
        raise ValueError(
            f"inputs must be of one shape, got {_shape(inputs)} for training {_shape(train)}"
        )
    if isinstance(train, list) or isinstance(inputs, list):
        name, unusual = "rarity of words", _rarity(train, inputs)
    else:
        known = train.flatten(1).double()
        apart = whitened(inputs.flatten(1) - known.mean(0), shrunk_root(known))
        what = "pixels" if train.ndim > 2 else "features"
        name, unusual = f"Mahalanobis distance of {what}", apart.square().sum(1).numpy()
    return {
        name: unusual,
        "random order": np.random.default_rng(seed).random(len(inputs)),
    }


def _rarity(train, texts):
    words = CountVectorizer(token_pattern=WORD).build_analyzer()
    known = Counter(word for text in train for word in words(text))
    every = known.total() + len(known) + 1
    return np.array(
        [
            np.mean([np.log(every / (known[word] + 1)) for word in words(text) or [""]])
            for text in texts
        ]
    )


def _count(inputs):
    return (
        at_least("the number of texts", len(inputs))
        if isinstance(inputs, list)
        else count_samples(inputs)
    )


def _shape(inputs):
    return "texts" if isinstance(inputs, list) else list(inputs.shape[1:])


def aurocs(
    train: Inputs, test: Others, others: Mapping[str, Tensor | list[str]], seed: int = 0
) -> dict[str, dict[str, float]]:
    """How well these scores tell each of the other sets from the test set: name of the set -> name of the score."""
    inside, found = ood_scores(train, test, seed), {}
    for name, inputs in others.items():
        outside = ood_scores(train, inputs, seed + 1)
        found[name] = {
            score: metrics.ood_detection(inside[score], outside[score]).auroc
            for score in inside
        }
    return found


def shrunk_root(values: Float[Tensor, "samples width"]) -> Float[Tensor, "width width"]:
    """L of the Ledoit-Wolf covariance L L^T of float64 values: few samples do not make it singular."""
    at_least("the number of values", len(values))
    finite("values", values)
    values = values.double()
    root, failed = torch.linalg.cholesky_ex(
        torch.from_numpy(ledoit_wolf(values.numpy())[0])
    )
    if failed:
        raise ValueError(
            f"{len(values)} values do not vary enough for a covariance; give more, three of a class at least"
        )
    return root


def whitened(
    values: Float[Tensor, "samples width"], root: Float[Tensor, "width width"]
) -> Tensor:
    """Values whose squared length is their squared Mahalanobis length under the covariance L L^T."""
    finite("values", values)
    finite("root", root)
    if not root.diagonal().all():
        raise ValueError(
            "root must have no zero on its diagonal, as shrunk_root makes it; add values that vary"
        )
    if root.shape != (values.shape[1],) * 2:
        raise ValueError(
            f"root must be [width, width] for values {list(values.shape)}, got {list(root.shape)}"
        )
    return torch.linalg.solve_triangular(
        root.double(), values.double().mT, upper=False
    ).mT


door.room(__name__)
