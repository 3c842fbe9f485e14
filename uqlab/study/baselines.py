"""What pixels or words alone can do, without any network."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from sklearn.covariance import ledoit_wolf
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from uqlab import metrics
from uqlab.core.checks import ArrayLike, as_inputs, as_labels, by_name

WORD = r"\S+"

Inputs = ArrayLike | list[str]


def accuracies(
    train: Inputs, labels: ArrayLike, test: Inputs, test_labels: ArrayLike
) -> dict[str, float]:
    """Return the accuracy of a logistic regression and of the nearest neighbour.

    Of images both see the pixels; of texts the counts of their words, where a word
    weighs less the more texts hold it (tf-idf).
    """
    x, at = _alike(train, test)
    labels = as_labels(labels, len(x))
    test_labels = as_labels(test_labels, len(at))
    strength = 0.1
    if isinstance(x, list):
        strength = 10.0  # rows of tf-idf have length 1
        counts = TfidfVectorizer(token_pattern=WORD)
        x = counts.fit_transform(x)
        at = counts.transform(at)
    baselines = {
        "logistic regression": LogisticRegression(C=strength, tol=1e-3, max_iter=1000),
        "nearest neighbour": KNeighborsClassifier(1),
    }
    return {
        name: float(baseline.fit(x, labels).score(at, test_labels))
        for name, baseline in baselines.items()
    }


def ood_scores(
    train: Inputs, inputs: Inputs, seed: int = 0, *, measured: str = ""
) -> dict[str, np.ndarray]:
    """Return two scores that know no class, higher = more unusual.

    The first is the squared Mahalanobis distance to the mean of the training images
    with their Ledoit-Wolf covariance, which shrinks the many pixels that hardly vary.
    Of texts it is the rarity of the words: minus the mean logarithm of how frequent
    they are in the training texts, each counted once more. The second is a random
    order, the floor of every table: its AUROC is near 1/2.

    Parameters
    ----------
    measured
        What the numbers of an input are, in the score's name; by default "pixels" of
        images and "inputs" of what has one axis.
    """
    x, at = _alike(train, inputs)
    if isinstance(x, list):
        name = "rarity of words"
        unusual = _rarity(x, at)
    else:
        measured = measured or ("pixels" if np.ndim(train) > 2 else "inputs")
        name = f"Mahalanobis distance of {measured}"
        x = torch.from_numpy(x).double()
        at = torch.from_numpy(at)
        unusual = whitened(at - x.mean(0), shrunk_root(x)).square().sum(1).numpy()
    order = np.random.default_rng(seed).random(len(at))
    return {name: unusual, "random order": order}


def aurocs(
    train: Inputs, test: Inputs, others: Mapping[str, Inputs], seed: int = 0
) -> dict[str, dict[str, float]]:
    """Return how well these scores tell each of the other sets from the test set.

    Returns
    -------
    dict
        Name of the set -> name of the score -> AUROC.
    """
    by_name("others", others, '{"letters": letters}')
    inside = ood_scores(train, test, seed)
    by_set = {}
    for name, inputs in others.items():
        outside = ood_scores(train, inputs, seed + 1)
        by_set[name] = {
            score: metrics.ood_detection(inside[score], outside[score]).auroc
            for score in inside
        }
    return by_set


def _alike(train, inputs):
    """Return both as lists of texts, or both as arrays [inputs, numbers]."""
    x, at = (
        value if _is_texts(value) else as_inputs(value) for value in (train, inputs)
    )
    shapes = ["texts" if isinstance(v, list) else list(v.shape[1:]) for v in (x, at)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"inputs must be of one shape, got {shapes[1]} for training {shapes[0]}"
        )
    if isinstance(x, list):
        return x, at
    return x.flatten(1).numpy(), at.flatten(1).numpy()


def _is_texts(inputs):
    return isinstance(inputs, list) and all(isinstance(text, str) for text in inputs)


def _rarity(train, texts):
    words = CountVectorizer(token_pattern=WORD).build_analyzer()
    known = Counter()
    for text in train:
        known.update(words(text))
    every = known.total() + len(known) + 1
    rarities = []
    for text in texts:
        ratios = [every / (known[word] + 1) for word in words(text) or [""]]
        rarities.append(np.log(ratios).mean())
    return np.array(rarities)


def shrunk_root(values: Float[Tensor, "samples width"]) -> Float[Tensor, "width width"]:
    """Return L of the Ledoit-Wolf covariance L L^T, float64.

    Few samples do not make it singular.
    """
    covariance, _ = ledoit_wolf(values.double().numpy())
    root, failed = torch.linalg.cholesky_ex(torch.from_numpy(covariance))
    if failed:
        raise ValueError(
            f"{len(values)} values do not vary enough for a covariance; give more, "
            "three of a class at least"
        )
    return root


def whitened(
    values: Float[Tensor, "samples width"], root: Float[Tensor, "width width"]
) -> Float[Tensor, "samples width"]:
    """Return values whose length is their Mahalanobis length under L L^T.

    Parameters
    ----------
    root
        L, as `shrunk_root` returns it.
    """
    columns = torch.as_tensor(values, dtype=torch.float64).mT
    return torch.linalg.solve_triangular(root, columns, upper=False).mT
