"""Outputs that are no [members, batch, classes]: one logit, several labels, pixels, means with variances."""

import functools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from same import near
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from uqlab import ensembles, metrics, training
from uqlab.core import modules
from uqlab.uncertainty import decompose, decompose_gaussian

WEIGHTS = {"no": None, "[M]": (4,), "[M, N]": (4, 6)}


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(*shape, generator=generator, dtype=dtype)


def pair(z):
    """The two classes of a sigmoid."""
    return torch.stack([torch.zeros_like(z), z], -1)


# Decompositions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_one_logit_is_two_classes_of_which_one_is_zero(weights):
    z = draw(4, 6)
    weights = weights and torch.rand(weights) + 0.1
    expected = decompose(pair(z), weights)
    near(decompose(z, weights, outputs="binary"), expected)
    near(decompose(z[..., None], weights, outputs="binary"), expected)
    dense = z[:, :, None, None, None].expand(4, 6, 1, 2, 3)
    found = decompose(dense, weights, outputs="binary", class_axis=2)
    wide = [part[:, None, None].expand(6, 2, 3) for part in expected]
    near([*found], wide)


@pytest.mark.parametrize("correct", [None, "jackknife"])
def test_several_labels_are_decomposed_one_by_one(correct):
    z = draw(4, 6, 3)
    found = decompose(z, correct=correct, outputs="multilabel")
    for label in range(3):
        alone = decompose(z[..., label], correct=correct, outputs="binary")
        near([part[:, label] for part in found], [*alone])


@pytest.mark.parametrize("correct", [None, "jackknife"])
@pytest.mark.parametrize("axis", [2, 3, 4, -1, -3])
def test_dense_logits_are_those_of_their_pixels(axis, correct, monkeypatch):
    z = draw(4, 6, 5, 3, 2)  # classes third
    flat = decompose(z.movedim(2, -1).flatten(1, -2), correct=correct)
    at = axis % 5 if axis != -1 else 4
    given = z.movedim(2, at)
    for elements in (2**19, 4 * 5 * 4, 1):  # several inputs, some pixels, one at a time
        monkeypatch.setitem(modules.TEMPORARY, "cpu", elements)
        found = decompose(given, correct=correct, class_axis=axis if axis != -1 else 4)
        near([part.flatten() for part in found], [*flat])
        assert found.total.shape == (6, 3, 2)
    assert torch.equal(found.total, found.aleatoric + found.epistemic)


def test_the_epistemic_part_of_a_pixel_is_its_mutual_information():
    z = draw(4, 2, 5, 3, 2)
    joint = z.softmax(2) / 4  # p(member, class) of each pixel
    apart = joint.sum(0, keepdim=True) / 4  # p(member) p(class)
    found = decompose(z, class_axis=2).epistemic
    near(found, (joint * (joint / apart).log()).sum((0, 2)))


@pytest.mark.parametrize("weights", [(4,), (4, 6)])
def test_weights_are_those_of_every_pixel_of_an_input(weights):
    z, w = draw(4, 6, 5, 3, 2), torch.rand(weights) + 0.1
    found = decompose(z, w, class_axis=2)
    for row in range(3):
        near([p[:, row, 1] for p in found], [*decompose(z[..., row, 1], w)])


def test_the_terms_of_classes_sum_to_the_parts():
    z = draw(4, 6, 5, 3, 2)
    terms = decompose(z, class_axis=2, by="class")
    assert terms.total.shape == (6, 5, 3, 2)
    near([t.sum(1) for t in terms], [*decompose(z, class_axis=2)])
    both = decompose(z[..., 0, 0], outputs="multilabel", by="class")
    whole = decompose(z[..., 0, 0], outputs="multilabel")
    near([t.sum(1) for t in both], [*whole])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "how", [{"outputs": "binary"}, {"outputs": "multilabel"}, {"class_axis": 2}]
)
def test_half_precision_is_computed_in_float32(dtype, how):
    z = draw(4, 6, 1 if "binary" in how.values() else 5, 3).to(dtype)
    z = z[..., 0] if how.get("outputs") == "binary" else z
    found = decompose(z, **how)
    assert found.total.dtype == torch.float32
    near([*found], [*decompose(z.float(), **how)])


def test_it_has_a_gradient_whatever_the_outputs():
    z = draw(3, 2, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: decompose(z, class_axis=2), z)
    assert torch.autograd.gradcheck(lambda z: decompose(z, outputs="multilabel"), z)


# Means and log-variances ----------------------------------------------------------------------------------------------
def test_means_and_log_variances_follow_the_law_of_total_variance():
    z = draw(4, 6, 2)
    found = decompose_gaussian(z[..., 0], z[..., 1].exp())
    samples = z[..., 0] + torch.randn(100_000, 4, 6).double() * (z[..., 1] / 2).exp()
    assert_close(found.total, samples.flatten(0, 1).var(0), rtol=0.05, atol=0.0)
    several = draw(4, 6, 4)
    both = decompose_gaussian(several[..., :2], several[..., 2:].exp())
    for k in range(2):
        one = decompose_gaussian(several[..., k], several[..., 2 + k].exp())
        near([part[:, k] for part in both], [*one])


# Losses of fit --------------------------------------------------------------------------------------------------------
X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))


def mlp(outputs):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def perceptron(outputs):  # which has written out derivatives
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


class Pixels(nn.Module):
    """A small segmentation network: [batch, 1, height, width] -> [batch, classes, height, width]."""

    def __init__(self, classes=3):
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, 2, 1)
        self.up = nn.ConvTranspose2d(6, classes, 2, 2)

    def forward(self, x):
        return self.up(self.down(x).relu())


def pixels(members=3):
    """Discs and squares on a ground of noise, and which pixel is which."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.zeros(24, 8, 8).long()
    labels[:, 1:4, 1:4], labels[::2, 5:7, 3:7] = 1, 2
    noise = 0.1 * torch.randn(24, 1, 8, 8, generator=generator)
    return (labels[:, None] / 2 + noise), labels


def reference(loss, outputs, y):
    match loss:
        case "binary_cross_entropy":
            y = y.reshape(outputs.shape).to(outputs.dtype)
            return F.binary_cross_entropy_with_logits(outputs, y)
        case "gaussian_nll":
            mean, log_variance = outputs.chunk(2, -1)
            y = y.reshape(mean.shape)
            return F.gaussian_nll_loss(mean, y, log_variance.exp(), eps=1e-30)
    return F.cross_entropy(outputs, y)


BINARY = (X[:, 0] > 0).long()
LABELLED = {
    "one logit": (1, "binary_cross_entropy", BINARY),
    "truths": (1, "binary_cross_entropy", BINARY.bool()),
    "soft": (1, "binary_cross_entropy", X[:, :1].sigmoid()),
    "labels": (3, "binary_cross_entropy", (X[:, :3] > 0).float()),
    "mean": (2, "gaussian_nll", X[:, 0].sin()),
    "means": (4, "gaussian_nll", X[:, :2].sin()),
}


@pytest.mark.parametrize("make", [mlp, perceptron])
@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("name", LABELLED)
def test_a_loss_by_name_is_a_plain_loop_with_torchs(name, loader, make):
    outputs, loss, y = LABELLED[name]
    ensemble = ensembles.deep(lambda: make(outputs), 2)
    alone = [ensemble.member(m) for m in range(2)]
    before = [reference(loss, net(X), y).item() for net in alone]
    data = DataLoader(TensorDataset(X, y), 60) if loader else (X, y)
    how = {"epochs": 5, "lr": 0.1, "batch_size": 60, "progress": False}
    history = training.fit(ensemble, data, loss=loss, **how)
    near(history.loss[0], torch.tensor(before))
    for m, net in enumerate(alone):
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            sgd.zero_grad()
            reference(loss, net(X), y).backward()
            sgd.step()
        near(ensemble.member(m)(X), net(X), atol=1e-5)


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 2.0, 0.5])])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_cross_entropy_of_pixels_is_torchs(weights, smoothing):
    z, y = (
        draw(2, 5, 3, 4, 4, dtype=torch.float32),
        torch.arange(160).view(2, 5, 4, 4) % 3,
    )
    y[0, :, 0], y[1, 2:4] = -100, -100  # without a label
    z.requires_grad_()
    found = training.cross_entropy(z, y, weights, smoothing)
    how = {"weight": weights, "label_smoothing": smoothing}
    expected = torch.stack(
        [F.cross_entropy(*pair, **how) for pair in zip(z, y, strict=True)]
    )
    near(found, expected)
    slopes = (torch.autograd.grad(each.sum(), z)[0] for each in (found, expected))
    near(*slopes)


def test_a_batch_without_any_label_moves_nothing():
    z = draw(2, 5, 3, 4, 4, dtype=torch.float32).requires_grad_()
    loss = training.cross_entropy(z, torch.full((2, 5, 4, 4), -100))
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0]
    assert not z.grad.any()


def test_a_segmentation_network_learns_and_is_decomposed_by_pixel():
    x, y = pixels()
    y[:, 0] = -100  # the first row has no labels
    ensemble = ensembles.deep(Pixels, 3)
    how = {"epochs": 30, "lr": 0.02, "optimizer": "adam", "batch_size": 8}
    training.fit(ensemble, x, y, **how, progress=False)
    logits = training.predict(ensemble, x)
    by_pixel = functools.partial(decompose, class_axis=2)
    kept = training.predict(ensemble, x, reduce=by_pixel, batch_size=5)
    near(kept, tuple(by_pixel(logits)))
    p = logits.softmax(2)
    near(kept[0], torch.special.entr(p.mean(0)).sum(1))
    near(kept[1], torch.special.entr(p).sum(2).mean(0))
    flat, truth = logits.movedim(2, -1).flatten(1, -2), y.flatten()
    known = truth != -100
    assert metrics.accuracy(flat[:, known], truth[known]) > 0.85


def test_beta_weights_each_term_by_a_power_of_its_variance():
    z, y = draw(2, 5, 2).requires_grad_(), draw(2, 5, seed=1)
    for beta in (0.0, 0.5, 1.0):  # 1: that of a squared error
        loss = training.gaussian_nll(z, y, beta=beta)
        (slopes,) = torch.autograd.grad(loss.sum(), z)
        variance = z[..., 1].exp()
        near(slopes[..., 0], (z[..., 0] - y) / 5 * variance ** (beta - 1))


def fit(outputs, loss, labels):
    ensemble = ensembles.deep(lambda: mlp(outputs), 2)
    training.fit(ensemble, X, labels, epochs=1, lr=0.1, loss=loss, progress=False)


def turned(loss):
    """Labels with as many numbers as the outputs, in another order of the axes."""
    shape = (3, 5, 8 if loss == "gaussian_nll" else 4)
    make = lambda: nn.Sequential(nn.Linear(6, math.prod(shape)), nn.Unflatten(1, shape))  # noqa: E731
    how = {"epochs": 1, "loss": loss, "progress": False}
    training.fit(ensembles.deep(make, 2), X[:20], torch.rand(20, 5, 4, 3), **how)


def segment(change):
    x, y = pixels()
    training.fit(ensembles.deep(Pixels, 2), x, change(y), epochs=1, progress=False)


def laplace(x=X.double(), **how):  # noqa: B008
    ensembles.laplace(trunk(2), x, 2, **how)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decompose(draw(4, 6, 5, 3, 2)), r"movedim\(2, -1\)"),
        (lambda: decompose(draw(4, 6, 5), class_axis=1), "class_axis=1"),
        (lambda: decompose(draw(4, 6, 5), outputs="binary"), 'outputs="multilabel"'),
        (lambda: decompose(draw(4, 6, 1)), "sigmoid"),
        (lambda: decompose(draw(4, 6) / 0, outputs="binary"), "finite"),
        (lambda: decompose(draw(4, 6, 5, 3).softmax(2), class_axis=2), "probabilities"),
        (lambda: metrics.nll(draw(4, 6, 5, 3), torch.zeros(6, 3)), "flatten pixels"),
        (lambda: fit(1, "cross_entropy", BINARY), 'loss="binary_cross_entropy"'),
        (lambda: fit(1, "binary_cross_entropy", BINARY + 1), "0 to 1"),
        (lambda: fit(3, "binary_cross_entropy", BINARY), r"\[3\] a sample"),
        (lambda: fit(1, "binary_cross_entropy", X[:, 0] / 0), "finite"),
        (lambda: fit(3, "gaussian_nll", X[:, 0]), "k log-variances"),
        (lambda: fit(2, "gaussian_nll", X[:, :2]), r"\[1\] a sample"),
        *[
            (lambda n=n: turned(n), r"got \[20, 5, 4, 3\]")
            for n in ("mse", "binary_cross_entropy", "gaussian_nll")
        ],
        (lambda: training.gaussian_nll(draw(2, 5, 3, 4), draw(2, 2, 5, 3)), "permute"),
        (lambda: segment(lambda y: y[:, 0]), r"\[24, 8, 8\] .*got \[24, 8\]"),
        (lambda: segment(lambda y: y + 1), "0 to 2"),
        (lambda: laplace(outputs="gaussian"), "noise_variance"),
        (lambda: laplace(outputs="gaussian", noise_variance=0.0), "noise_variance"),
        (lambda: laplace(noise_variance=1.0), "noise_variance"),
        (lambda: laplace(torch.rand(5, 7, 6).double()), "no linear layer whose output"),
    ],
)
def test_other_shapes_labels_and_outputs_are_refused(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# Laplace --------------------------------------------------------------------------------------------------------------
def trunk(outputs):
    torch.manual_seed(0)
    layers = nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, outputs)
    return nn.Sequential(*layers).double()


def features(network, x):
    h = network[:2](x).detach()
    return torch.cat([h, torch.ones(len(h), 1)], 1).double()


def classifiers(ensemble):
    """The members' weights and biases [members, outputs, features + 1]."""
    held = {p.ndim: p.detach() for p in ensemble.parameters() if p.requires_grad}
    return torch.cat([held[3], held[2][..., None]], 2)


@pytest.mark.parametrize("targets", [1, 2])
def test_gaussian_outputs_have_the_posterior_of_bayesian_linear_regression(targets):
    """Bishop 2006, eqs 3.53-3.54 and 3.59, in NumPy: its covariance, and the variance of what is predicted."""
    x, network, prior, noise = X.double(), trunk(targets), 2.0, 0.3
    h = features(network, x).numpy()
    covariance = np.linalg.inv(h.T @ h / noise + np.eye(5) / prior)
    y = np.sin(x[:, :targets].numpy())
    mean = (covariance @ h.T @ y / noise).T  # [targets, features]
    network[2].weight.data = torch.tensor(mean[:, :-1])
    network[2].bias.data = torch.tensor(mean[:, -1])
    how = {"prior_variance": prior, "outputs": "gaussian", "noise_variance": noise}
    ensemble = ensembles.laplace(network, x, 4_000, **how, batch_size=7)
    drawn = classifiers(ensemble)
    assert_close(drawn.mean(0), torch.tensor(mean), rtol=0.0, atol=0.05)
    for k in range(targets):
        assert_close(drawn[:, k].T.cov().numpy(), covariance, rtol=0.15, atol=0.01)
    if targets == 2:
        assert abs(np.corrcoef(drawn[:, :, 0].T.numpy())[0, 1]) < 0.06
    told = decompose_gaussian(
        drawn[:, 0] @ features(network, x).T, torch.full((4_000, 60), noise)
    )
    expected = noise + np.einsum("nf,fg,ng->n", h, covariance, h)
    assert_close(told.total.numpy(), expected, rtol=0.05, atol=0.0)


def factors(network, x):
    """The curvature by the logits, and the second moment of features and a one."""
    z, h = network(x).detach(), features(network, x)
    if z.shape[1] == 1:
        p = z.sigmoid()
        return (p * (1 - p)).sum(0).diag(), h.T @ h / len(h)
    p = z.softmax(1)
    each = p.diag_embed() - p[:, :, None] * p[:, None]
    return each.sum(0), h.T @ h / len(h)


@pytest.mark.parametrize("outputs", [1, 3])
def test_draws_have_the_inverse_of_the_gauss_newton_matrix(outputs):
    """One logit is of a sigmoid, several are of a softmax."""
    network, x = trunk(outputs), X.double()
    ensemble = ensembles.laplace(network, x, 8_000, prior_variance=2.0, batch_size=7)
    whole = torch.kron(*factors(network, x))
    expected = torch.linalg.inv(whole + torch.eye(len(whole)).double() / 2)
    found = classifiers(ensemble).flatten(1).T.cov()
    assert_close(found, expected, rtol=0.15, atol=0.1)


def test_many_classes_have_a_diagonal_and_say_so(monkeypatch):
    network, x = trunk(3), X.double()
    by_logits, by_features = factors(network, x)
    monkeypatch.setattr(sys.modules["uqlab.ensembles.laplace"], "WHOLE", 2)
    with pytest.warns(UserWarning, match="diagonal"):
        ensemble = ensembles.laplace(network, x, 4_000, prior_variance=2.0)
    h = torch.kron(by_logits.diag().diag(), by_features)
    expected = torch.linalg.inv(h + torch.eye(15).double() / 2)
    found = classifiers(ensemble).flatten(1).T.cov()
    assert_close(found, expected, rtol=0.15, atol=0.1)
    with pytest.warns(UserWarning, match="diagonal"):
        ensembles.laplace(network, x, 2)  # the likeliest variance


@pytest.mark.slow
def test_ten_thousand_classes_fit_into_two_gigabytes():
    code = """
import re, warnings, torch
from torch import nn
from uqlab import ensembles
network = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10_000))
warnings.simplefilter("ignore")
ensemble = ensembles.laplace(network, torch.randn(500, 32), 5)
print(ensemble(torch.randn(4, 32)).shape, flush=True)
status = open("/proc/self/status").read()  # rusage would begin with the parent's peak
print(int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    shape, peak = done.stdout.splitlines()
    assert shape == "torch.Size([5, 4, 10000])", done.stderr
    assert int(peak) < 2e9
