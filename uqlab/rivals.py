"""Simple rivals: what the pixels alone can do, without any network. Every page shows them beside its methods."""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Integer
from sklearn.covariance import ledoit_wolf
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from uqlab import metrics
from uqlab.core import door
from uqlab.core.checks import at_least, class_labels, count_samples, finite

Inputs = Float[Tensor, "samples ..."]


def accuracies(
    train: Inputs, labels: Integer[Tensor, " samples"], test: Float[Tensor, "others ..."],
    test_labels: Integer[Tensor, " others"],
) -> dict[str, float]:  # fmt: skip
    """Accuracy of a logistic regression on the pixels, and of the nearest training image's label."""
    rivals = {
        "logistic regression": LogisticRegression(C=0.1, tol=1e-3, max_iter=1000),
        "nearest neighbour": KNeighborsClassifier(1),
    }
    labels, test_labels = class_labels(labels, count_samples(train)), class_labels(test_labels, count_samples(test))
    if train[0].shape != test[0].shape or labels.unique().numel() < 2:
        raise ValueError(
            "train and test must be inputs of one shape, and train of two classes, got "
            f"{list(train.shape)}, {list(test.shape)} and labels {labels.unique().tolist()[:5]}"
        )
    x, at = train.flatten(1).numpy(), test.flatten(1).numpy()
    return {name: float(rival.fit(x, labels).score(at, test_labels)) for name, rival in rivals.items()}


def ood_scores(train: Inputs, inputs: Float[Tensor, "others ..."], seed: int = 0) -> dict[str, np.ndarray]:
    """Two scores that know no class, higher = more unusual: distance of the pixels, and chance.

    The squared Mahalanobis distance is that to the mean of the training images with their Ledoit-Wolf covariance, which
    shrinks the many pixels that hardly vary. The random order is the floor of every table: its AUROC is near 1/2.
    """
    if inputs.shape[1:] != train.shape[1:]:
        raise ValueError(f"inputs must be of one shape, got {list(inputs.shape)} for training {list(train.shape)}")
    known = train.flatten(1).double()
    apart = whitened(inputs.flatten(1) - known.mean(0), shrunk_root(known))
    return {
        "Mahalanobis distance of pixels": apart.square().sum(1).numpy(),
        "random order": np.random.default_rng(seed).random(len(inputs)),
    }


def aurocs(
    train: Inputs, test: Float[Tensor, "others ..."], others: Mapping[str, Tensor], seed: int = 0
) -> dict[str, dict[str, float]]:
    """How well these scores tell each of the other sets from the test set: name of the set -> name of the score."""
    inside, found = ood_scores(train, test, seed), {}
    for name, inputs in others.items():
        outside = ood_scores(train, inputs, seed + 1)
        found[name] = {score: metrics.ood_detection(inside[score], outside[score]).auroc for score in inside}
    return found


def shrunk_root(values: Float[Tensor, "samples width"]) -> Float[Tensor, "width width"]:
    """L of the Ledoit-Wolf covariance L L^T of float64 values: few samples do not make it singular."""
    at_least("the number of values", len(values))
    finite("values", values)
    values = values.double()
    root, failed = torch.linalg.cholesky_ex(torch.from_numpy(ledoit_wolf(values.numpy())[0]))
    if failed:
        raise ValueError(
            f"{len(values)} values do not vary enough for a covariance; give more, three of a class at least"
        )
    return root


def whitened(values: Float[Tensor, "samples width"], root: Float[Tensor, "width width"]) -> Tensor:
    """Values whose squared length is their squared Mahalanobis length under the covariance L L^T."""
    finite("values", values)
    finite("root", root)
    if root.shape != (values.shape[1],) * 2:
        raise ValueError(f"root must be [width, width] for values {list(values.shape)}, got {list(root.shape)}")
    return torch.linalg.solve_triangular(root.double(), values.double().mT, upper=False).mT


door.room(__name__)
