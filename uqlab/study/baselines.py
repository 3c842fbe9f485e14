"""Simple baselines of pixels or words, without any network."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from sklearn.covariance import LedoitWolf
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from uqlab import metrics
from uqlab.core.checks import ArrayLike, as_inputs, by_name
from uqlab.data import Dataset

Inputs = ArrayLike | list[str] | Dataset
_WORD = r"\S+"


def accuracies(
    train: Inputs, labels: ArrayLike, test: Inputs, test_labels: ArrayLike
) -> dict[str, float]:
    """Return the accuracy of a logistic regression and of the nearest neighbour.

    Images count as pixels. Texts count as words, which weigh less the more texts hold
    them (tf-idf).

    Parameters
    ----------
    train, test
        Images [samples, ...] or lists of texts.
    labels, test_labels
        [samples] each.
    """
    strength = 0.1
    if _is_texts(train):
        strength = 10.0  # rows of tf-idf have length 1
        words = TfidfVectorizer(token_pattern=_WORD).fit(train)
        x, at = words.transform(train), words.transform(test)
    else:
        x, at = _rows(train, test)
    baselines = {
        "logistic regression": LogisticRegression(C=strength, tol=1e-3, max_iter=1000),
        "nearest neighbour": KNeighborsClassifier(1),
    }
    return {
        name: float(baseline.fit(x, labels).score(at, test_labels))
        for name, baseline in baselines.items()
    }


def ood_scores(train: Inputs, inputs: Inputs, seed: int = 0) -> dict[str, np.ndarray]:
    """Return two scores [samples] that know no class, higher = more unusual.

    For images the first is the squared Mahalanobis distance to the mean of the training
    images, with their Ledoit-Wolf covariance. For texts it is the rarity of the words:
    minus the mean logarithm of their frequency in the training texts, each counted once
    more. The second is a random ranking, whose AUROC is near 1/2.

    Parameters
    ----------
    train, inputs
        Images [samples, ...] or lists of texts.
    seed
        Seed of the random ranking.
    """
    if _is_texts(train):
        name, unusual = "rarity of words", _rarity(train, inputs)
    else:
        measured = "pixels" if as_inputs(train).ndim > 2 else "inputs"
        name = f"Mahalanobis distance of {measured}"
        x, at = _rows(train, inputs)
        unusual = LedoitWolf().fit(x).mahalanobis(at)
    ranking = np.random.default_rng(seed).random(len(inputs))
    return {name: unusual, "random order": ranking}


def aurocs(
    train: Inputs, test: Inputs, others: Mapping[str, Inputs], seed: int = 0
) -> dict[str, dict[str, float]]:
    """Return the AUROC of `ood_scores` for sets by name: set -> score -> AUROC."""
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


def _is_texts(inputs):
    return isinstance(inputs, list) and isinstance(inputs[0], str)


def _rows(*sets):
    """Return images as rows of numbers; ValueError unless all have one shape."""
    images = list(map(as_inputs, sets))
    shapes = {x.shape[1:] for x in images}
    if len(shapes) > 1:
        raise ValueError(f"inputs must be of one shape, got {shapes}")
    return [x.flatten(1).detach().double().cpu().numpy() for x in images]


def _rarity(train, texts):
    words = CountVectorizer(token_pattern=_WORD).build_analyzer()
    known = Counter(word for text in train for word in words(text))
    every = known.total() + len(known) + 1
    rarities = []
    for text in texts:
        ratios = [every / (known[word] + 1) for word in words(text) or [""]]
        rarities.append(np.log(ratios).mean())
    return np.array(rarities)
