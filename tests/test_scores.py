"""Every score against another way to the same number: scikit-learn, scipy, a closed form or a plain loop."""

import gc
import itertools
import math

import numpy as np
import pytest
import torch
from networks import NETWORKS
from same import near
from scipy import special, stats
from sklearn.covariance import LedoitWolf
from small_networks import MAKERS, images, moved, vit
from torch import nn

from uqlab import ensembles, gradients, metrics
from uqlab.study import scores
from uqlab.study.scores import SCORES

MEMBERS, CLASSES, WIDTH = 3, 4, 5


def network(seed=0):
    torch.manual_seed(seed)
    return (
        nn.Sequential(
            nn.Flatten(), nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )
        .double()
        .eval()
    )


@pytest.fixture(scope="module")
def case():
    """An ensemble and its networks, training inputs and labels, other inputs."""
    generator = torch.Generator().manual_seed(0)
    train, inputs = (
        torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (40, 9)
    )
    nets = [network(seed) for seed in range(MEMBERS)]
    return (
        ensembles.from_members(nets),
        nets,
        train,
        torch.arange(40) % CLASSES,
        2 * inputs,
    )


def found(name, case, model=None):
    model = case[0] if model is None else model
    result = SCORES[name].fit(model, *case[2:4])(model, case[4])
    assert result.shape == (9,)
    assert result.dtype == torch.float64
    return result.float().numpy()  # as the logits and features


def z_of(case):
    return np.stack([net(case[4]).detach().float().double().numpy() for net in case[1]])


def features_of(net, x):
    return net[:3](x).detach().float().double().numpy()


# Logits ---------------------------------------------------------------------------------------------------------------
OF_LOGITS = {
    "entropy": lambda p, z: stats.entropy(p.mean(0)),
    "msp": lambda p, z: -math.log(p.mean(0).max()),
    "mi": lambda p, z: (
        stats.entropy(p.mean(0)) - np.mean([stats.entropy(row) for row in p])
    ),
    "max_logit": lambda p, z: np.mean([-max(row) for row in z]),
    "energy": lambda p, z: np.mean([-special.logsumexp(row) for row in z]),
    "pairwise_kl": lambda p, z: np.mean(
        [stats.entropy(a, b) for a, b in itertools.permutations(p, 2)]
    ),
    "reverse_mi": lambda p, z: np.mean([stats.entropy(p.mean(0), row) for row in p]),
    "variation_ratio": lambda p, z: 1 - max(np.bincount(p.argmax(1))) / len(p),
}


@pytest.mark.parametrize("name", OF_LOGITS)
def test_scores_of_logits_are_their_definitions(name, case):
    z = z_of(case)
    expected = [OF_LOGITS[name](special.softmax(z[:, i], 1), z[:, i]) for i in range(9)]
    near(found(name, case), expected)


@pytest.mark.parametrize("name", OF_LOGITS)
def test_one_network_is_an_ensemble_of_one_and_disagrees_with_nobody(name, case):
    net = case[1][0]
    alone = found(name, case, net)
    near(found(name, case, ensembles.from_members([net])), alone, atol=1e-6)
    assert (np.abs(alone).max() < 1e-7) == SCORES[name].needs_members


def test_confident_inputs_do_not_tie():
    net = nn.Linear(1, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0], [0.0]]))
        net.bias.zero_()
    x = torch.tensor([[18.0], [20.0], [25.0]])
    assert len(net(x).softmax(-1)[:, 0].unique()) < 3
    near(SCORES["msp"](net, x).float(), (-x[:, 0]).exp().log1p())


# Features -------------------------------------------------------------------------------------------------------------
def apart(h, y):
    return h - np.stack([h[y == c].mean(0) for c in y])


def nearest(h, y, x):
    """Squared Mahalanobis distance to the nearest class mean, by scikit-learn's shared covariance."""
    shared = LedoitWolf(assume_centered=True).fit(apart(h, y))
    return np.min(
        [shared.mahalanobis(x - h[y == c].mean(0)) for c in range(y.max() + 1)], 0
    )


def relative(h, y, x):
    """Minus the distance to the mean of all, where class means add their covariance."""
    shared = LedoitWolf(assume_centered=True).fit(apart(h, y)).covariance_
    centred = np.stack([h[y == c].mean(0) for c in y]) - h.mean(0)
    total = shared + centred.T @ centred / len(h)
    away = x - h.mean(0)
    return nearest(h, y, x) - (away @ np.linalg.inv(total) * away).sum(1)


def density(h, y, x):
    each = [
        stats.multivariate_normal(
            h[y == c].mean(0), LedoitWolf().fit(h[y == c]).covariance_
        )
        for c in range(4)
    ]
    return np.log(
        sum(np.mean(y == c) * gaussian.pdf(x) for c, gaussian in enumerate(each))
    )


def tenth(h, y, x):
    h, x = (values / np.linalg.norm(values, axis=1, keepdims=True) for values in (h, x))
    return np.sort(np.linalg.norm(x[:, None] - h, axis=2), 1)[:, 9]


OF_FEATURES = {
    "mahalanobis": nearest,
    "relative_mahalanobis": relative,
    "knn": tenth,
    "ddu": lambda h, y, x: -density(h, y, x),
}


@pytest.mark.parametrize("name", OF_FEATURES)
def test_scores_of_features_are_their_definitions(name, case):
    _, nets, train, y, x = case
    each = [
        OF_FEATURES[name](features_of(net, train), y.numpy(), features_of(net, x))
        for net in nets
    ]
    near(found(name, case, nets[1]), each[1])
    near(found(name, case), np.mean(each, 0))


@pytest.mark.parametrize("separation", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_relative_distance_keeps_its_sign_in_many_dimensions(separation, decay):
    """384 decaying features of 600 inputs of 4 classes, and strangers twice as far."""
    width, count = 384, 600
    generator = torch.Generator().manual_seed(0)

    def draw(rows):
        deviations = torch.arange(1, width + 1, dtype=torch.float64) ** -decay
        return deviations * torch.randn(rows, width, generator=generator).double()

    centres, y = separation * draw(4), torch.arange(count) % 4
    train, test = centres[y] + draw(count), centres[y] + draw(count)
    strangers = 2 * (centres[y] + draw(count))
    aurocs = {}
    for name in ("mahalanobis", "relative_mahalanobis"):
        score = SCORES[name]
        learned = score.statistics(train, y)
        rated = [score.score(x, learned).numpy() for x in (test, strangers)]
        aurocs[name] = metrics.ood_detection(*rated).auroc
    assert aurocs["mahalanobis"] > 0.99
    assert aurocs["relative_mahalanobis"] > aurocs["mahalanobis"] - 0.15


def test_a_class_of_two_takes_the_covariance_of_all(case):
    _, (net, *_), train, _, x = case
    y = torch.tensor([0] * 20 + [1] * 18 + [2] * 2)
    h, at, labels = features_of(net, train), features_of(net, x), y.numpy()
    own = [LedoitWolf().fit(h[labels == c]).covariance_ for c in (0, 1)]
    own.append(LedoitWolf(assume_centered=True).fit(apart(h, labels)).covariance_)
    pdf = sum(
        np.mean(y.numpy() == c)
        * stats.multivariate_normal(h[y == c].mean(0), own[c]).pdf(at)
        for c in range(3)
    )
    near(SCORES["ddu"].fit(net, train, y)(net, x), -np.log(pdf))


@pytest.mark.parametrize("name", ["mahalanobis", "relative_mahalanobis", "ddu"])
@pytest.mark.parametrize("given", ["two", "equal", "dead", "one difference"])
def test_features_that_do_not_vary_have_no_distance(name, given, case):
    net, train, y = network(), case[2], case[3]
    if given == "two":
        train, y = train[:2], y[:2]
    elif given == "equal":
        train = train[:CLASSES].repeat(10, 1)  # of a class
    elif given == "dead":
        net[2] = nn.ReLU()
        nn.init.constant_(net[1].bias, -100)
    else:
        train, y = train[:2], y[:1].expand(2)  # two inputs of one class
    with pytest.raises(ValueError, match="do not vary within"):
        SCORES[name].fit(net, train, y)


def test_a_class_of_equal_inputs_takes_the_covariance_of_all(case):
    _, (net, *_), train, y, x = case
    train = torch.where((y == 1)[:, None], train[1], train)
    h, at, labels = features_of(net, train), features_of(net, x), y.numpy()
    own = [LedoitWolf().fit(h[labels == c]).covariance_ for c in range(CLASSES)]
    own[1] = LedoitWolf(assume_centered=True).fit(apart(h, labels)).covariance_
    pdf = sum(
        stats.multivariate_normal(h[labels == c].mean(0), own[c]).pdf(at) / CLASSES
        for c in range(CLASSES)
    )
    near(SCORES["ddu"].fit(net, train, y)(net, x), -np.log(pdf))


def test_statistics_belong_to_a_model_and_go_with_it(case):
    _, (one, other, _), train, y, x = case
    score = SCORES["knn"]
    before = score.fit(one, train, y)(one, x)
    score.fit(other, train, y)
    assert torch.equal(score(one, x), before)
    assert not torch.equal(score(other, x), before)
    third = network(9)
    with pytest.raises(
        ValueError, match=r"neighbours needs the training set first: call \.fit"
    ):
        score(third, x)
    score.fit(third, train, y)
    gc.collect()  # of what other tests have left
    count = len(score.fitted)
    del third
    gc.collect()
    assert len(score.fitted) == count - 1


# Gradients ------------------------------------------------------------------------------------------------------------
def expected_norm(h, p):
    """Of the last layer, weight and bias: row k of the gradient of log p_c is (1[k = c] - p_k) (h, 1)."""
    size = np.abs(h).sum() + 1
    return sum(p[c] * size * np.abs(np.eye(len(p))[c] - p).sum() for c in range(len(p)))


OF_GRADIENTS = {
    "exgrad": expected_norm,
    "gradnorm": lambda h, p: -np.abs(h).sum() * np.abs(p - 1 / len(p)).sum(),
}


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_scores_of_gradients_have_their_closed_forms(name, case):
    h, p = (
        [features_of(net, case[4]) for net in case[1]],
        special.softmax(z_of(case), -1),
    )
    each = [
        [OF_GRADIENTS[name](h[m][i], p[m, i]) for i in range(9)] for m in range(MEMBERS)
    ]
    near(found(name, case), np.mean(each, 0))


def test_regrad_is_that_of_the_members_in_any_mode(case):
    expected = torch.stack([gradients.regrad(net, case[4]) for net in case[1]]).mean(0)
    try:
        near(found("regrad", case, case[0].train()), expected)
        assert case[0].training
    finally:
        case[0].eval()


# All ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [MAKERS["lora"], None], ids=["lora", "network"])
def test_every_score_takes_implicit_ensembles_and_transformers(make):
    x, y = images(12)
    model = moved(make(vit(), 2)) if make else vit()
    left_out = scores.fit(SCORES, model, x, y)
    assert set(left_out) <= {n for n in SCORES if SCORES[n].needs_members}
    assert bool(left_out) == (make is None)
    together = scores.values(SCORES, model, x[:5])
    for name, score in SCORES.items():
        assert torch.equal(score(model, x[:5]), together[name])
        assert together[name].isfinite().all()
        assert (
            len(together[name].unique()) > 1
            or name == "variation_ratio"
            or (score.needs_members and make is None)
        )


def test_errors_say_what_to_do(case):
    ensemble, _, train, y, x = case
    with pytest.raises(ValueError, match="score must be one of 'entropy', 'mi', "):
        scores.values(["margin"], ensemble, x)
    with pytest.raises(ValueError, match=r"labels must be \[samples\] = \[40\]"):
        SCORES["knn"].fit(ensemble, train, y[:9])


@pytest.mark.usefixtures("unchecked")  # annotations are no refusals
def test_scores_of_a_network_that_takes_tensors_by_name():
    network, x = NETWORKS["bert"].make(), NETWORKS["bert"].inputs(12)
    names = ["entropy", "knn", "exgrad", "gradnorm", "regrad"]
    assert scores.fit(names, network, x, torch.arange(12) % 3) == {}
