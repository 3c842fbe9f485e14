"""What pixels or words alone can do: equal to scikit-learn's own, and to the definition."""

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf
from sklearn.neighbors import NearestNeighbors

from uqlab import data, metrics
from uqlab.study import baselines


def test_accuracies_of_digits():
    train, test = (data.load("digits", split) for split in ("train", "test"))
    found = baselines.accuracies(train.inputs, train.labels, test.inputs, test.labels)
    assert list(found) == ["logistic regression", "nearest neighbour"]
    nearest = (
        NearestNeighbors(n_neighbors=1)
        .fit(train.inputs.flatten(1))
        .kneighbors(test.inputs.flatten(1))[1][:, 0]
    )
    assert found["nearest neighbour"] == np.mean(
        train.labels.numpy()[nearest] == test.labels.numpy()
    )
    assert 0.93 < found["logistic regression"] < 1


def test_distance_is_mahalanobis_with_the_shrunk_covariance():
    train, test = torch.randn(50, 1, 3, 4), torch.randn(20, 1, 3, 4) + 1
    scores = baselines.ood_scores(train, test)
    expected = (
        LedoitWolf()
        .fit(train.flatten(1).double().numpy())
        .mahalanobis(test.flatten(1).double().numpy())
    )
    np.testing.assert_allclose(scores["Mahalanobis distance of pixels"], expected)


def test_aurocs_of_several_sets():
    train, test, far = (
        torch.randn(50, 1, 3, 4),
        torch.randn(40, 1, 3, 4),
        torch.randn(30, 1, 3, 4) + 3,
    )
    found = baselines.aurocs(
        train, test, {"near": torch.randn(30, 1, 3, 4), "far": far}
    )
    pixels = (
        baselines.ood_scores(train, x)["Mahalanobis distance of pixels"]
        for x in (test, far)
    )
    assert (
        found["far"]["Mahalanobis distance of pixels"]
        == metrics.ood_detection(*pixels).auroc
        > 0.99
    )
    assert 0.3 < found["near"]["Mahalanobis distance of pixels"] < 0.7
    sets = map(data.read, (train.requires_grad_(), test, far))
    train, test, far = sets
    assert baselines.aurocs(train, test, {"far": far})["far"] == found["far"]
    assert found["near"]["random order"] == found["far"]["random order"] != 0.5


def test_pixels_that_never_vary_are_no_obstacle_and_chance_repeats():
    train, test = torch.zeros(30, 1, 2, 2), torch.zeros(9, 1, 2, 2)
    train[:, 0, 0, 0], test[4, 0, 0, 0] = torch.randn(30), 9.0
    scores = baselines.ood_scores(train, test, seed=1)
    assert scores["Mahalanobis distance of pixels"].argmax() == 4
    assert (
        scores["random order"]
        == baselines.ood_scores(train, test, seed=1)["random order"]
    ).all()
    assert len(set(scores["random order"])) == 9
    for call in (baselines.ood_scores, lambda x, y: baselines.accuracies(x, y, y, y)):
        with pytest.raises(ValueError, match="must be of one shape"):
            call(torch.zeros(9, 3, 2, 2), torch.zeros(9, 2, 2, 3))


def test_words_alone():
    good, bad = (
        ["a good film", "so good , so fine", "fine work"],
        ["a bad film", "so bad , so dull", "dull work"],
    )
    found = baselines.accuracies(
        good + bad,
        torch.tensor([0] * 3 + [1] * 3),
        ["good work", "dull , bad"],
        torch.tensor([0, 1]),
    )
    assert found == {"logistic regression": 1.0, "nearest neighbour": 1.0}
    rare = baselines.ood_scores(good + bad, ["so good", "so strange", "", "SO  good"])[
        "rarity of words"
    ]
    every = (
        20 + 9 + 1
    )  # words, different ones, and one for all that never came; four are "so", two "good"
    assert (
        rare[0]
        == np.mean([np.log(every / (4 + 1)), np.log(every / (2 + 1))])
        == rare[3]
    )
    assert rare[0] < rare[1] < rare[2] == np.log(every)
    near, away = good + bad, ["shares fell on Tuesday", "Who invented it ?"]
    assert (
        baselines.aurocs(good + bad, near, {"news": away})["news"]["rarity of words"]
        == 1
    )
