"""Representations: identities of CKA, plain NumPy, streams, embeddings, features of layers."""

import math
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from same import near
from scipy.spatial.distance import pdist, squareform
from sklearn.decomposition import PCA
from small_networks import bert, images, vit
from torch import nn

from uqlab import ensembles, models
from uqlab.analysis.representations import (
    cka,
    cka_matrix,
    embed,
    head_cka,
    layer_features,
    minibatch_cka,
    penultimate,
)
from uqlab.heads import head_features

EVERY = pytest.mark.parametrize(
    ("kernel", "unbiased"),
    [("linear", True), ("linear", False), ("rbf", True), ("rbf", False)],
)


def normal(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def related(samples, p=12, q=9, noise=1.0, seed=0):
    """Two representations that share a part."""
    x = normal(samples, p, seed=seed)
    return x, x @ normal(p, q, seed=100) + noise * p**0.5 * normal(
        samples, q, seed=seed + 1
    )


def kernel_matrix(x, kernel):
    if kernel == "linear":
        return x @ x.T
    squares = squareform(pdist(x)) ** 2
    return np.exp(-squares / (2 * np.median(squares)))


def hsic(k, l, unbiased):  # noqa: E741
    n = len(k)
    if not unbiased:
        centre = np.eye(n) - 1 / n
        return np.trace(k @ centre @ l @ centre) / (n - 1) ** 2
    k, l, one = k - np.diag(np.diag(k)), l - np.diag(np.diag(l)), np.ones(n)  # noqa: E741
    first, second = (
        np.trace(k @ l),
        (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2)),
    )
    return (first + second - 2 / (n - 2) * (one @ k @ l @ one)) / (n * (n - 3))


def plain_sums(x, y, kernel="linear", unbiased=True):
    k, l = (kernel_matrix(z.double().numpy(), kernel) for z in (x, y))  # noqa: E741
    return np.array([hsic(k, l, unbiased), hsic(k, k, unbiased), hsic(l, l, unbiased)])


def ratio(sums):
    return sums[0] / math.sqrt(sums[1] * sums[2])


# CKA -----------------------------------------------------------------------------------------------------------------
@EVERY
@pytest.mark.parametrize(
    ("samples", "p", "q"),
    [(40, 12, 9), (20, 50, 60), (4, 3, 2), (31, 1, 1)],
)
def test_cka_equals_numpy(kernel, unbiased, samples, p, q):
    x, y = related(samples, p, q)
    x = x + 5
    assert cka(x, y, kernel, unbiased) == pytest.approx(
        ratio(plain_sums(x, y, kernel, unbiased)), rel=1e-9
    )
    assert cka(x.float(), y.float(), kernel, unbiased) == pytest.approx(
        cka(x, y, kernel, unbiased), abs=1e-5
    )


@EVERY
def test_cka_sees_neither_rotation_nor_scale_nor_shift(kernel, unbiased):
    x, y = related(30)
    assert cka(x, x, kernel, unbiased) == pytest.approx(1)
    turned = 7 * x @ torch.linalg.qr(normal(12, 12, seed=5)).Q + normal(12)
    assert cka(x, turned, kernel, unbiased) == pytest.approx(1)
    assert cka(turned, y, kernel, unbiased) == pytest.approx(
        cka(x, y, kernel, unbiased)
    )
    assert cka(x, y, kernel, unbiased) == pytest.approx(cka(y, x, kernel, unbiased))
    order = torch.randperm(30)
    assert cka(x[order], y[order], kernel, unbiased) == pytest.approx(
        cka(x, y, kernel, unbiased)
    )
    assert cka(x, y[order], kernel, unbiased) < cka(x, y, kernel, unbiased)
    assert (
        cka(x, x @ normal(12, 12, seed=5), kernel, unbiased) < 0.97
    )  # but it sees other linear maps


def test_independent_features_are_alike_only_to_the_biased_estimate():
    seeds = [
        (normal(64, 100, seed=s), normal(64, 100, seed=1000 + s)) for s in range(20)
    ]
    biased, unbiased = (
        [cka(x, y, unbiased=u) for x, y in seeds] for u in (False, True)
    )
    assert min(biased) > 0.55
    assert abs(np.mean(unbiased)) < 0.01
    assert min(unbiased) < 0 < max(unbiased) < 0.1


# streams -------------------------------------------------------------------------------------------------------------
@EVERY
def test_minibatch_cka_is_the_ratio_of_sums(kernel, unbiased):
    x, y = related(60)
    assert minibatch_cka([(x, y)], kernel, unbiased) == pytest.approx(
        cka(x, y, kernel, unbiased)
    )
    pairs = list(zip(x.split(20), y.split(20), strict=True))
    sums = [plain_sums(*pair, kernel, unbiased) for pair in pairs]
    found = minibatch_cka(iter(pairs), kernel, unbiased)
    assert found == pytest.approx(ratio(sum(sums)), rel=1e-9)
    assert abs(found - np.mean([ratio(s) for s in sums])) > 1e-5


def test_streams_are_never_held():
    alive, most = [], 0

    def stream():
        nonlocal most
        for seed in range(300):
            pair = related(16, seed=2 * seed)
            alive.extend(map(weakref.ref, pair))
            most = max(most, sum(ref() is not None for ref in alive))
            yield pair

    assert 0 < minibatch_cka(stream()) < 1
    assert most <= 4  # this batch and the last


# matrices ------------------------------------------------------------------------------------------------------------
@EVERY
def test_matrices_equal_loops(kernel, unbiased):
    a = [normal(25, 4), normal(25, 30, seed=1), related(25)[1]]
    b = [related(25)[0], normal(25, 2, seed=3)]
    plain = [[cka(x, y, kernel, unbiased) for y in b] for x in a]
    near(cka_matrix(a, b, kernel, unbiased), plain)
    own = cka_matrix(a, None, kernel, unbiased)
    assert torch.equal(own, cka_matrix(a, kernel=kernel, unbiased=unbiased))
    near(own, own.T)
    near(own.diagonal(), torch.ones(3, dtype=torch.float64))
    heads = normal(25, 3, 6)  # [samples, heads, d_head]
    near(cka_matrix(heads.unbind(1)), cka_matrix(heads.transpose(0, 1)))


@EVERY
def test_what_does_not_vary_is_nan_and_counted(kernel, unbiased):
    constant, noisy = torch.full((20, 5), 0.1), 1 + 1e-7 * normal(20, 5).float()
    varied = [normal(20, 5, seed=s).float() for s in range(3)]
    with pytest.warns(UserWarning, match="do not vary"):
        found = cka_matrix(
            [varied[0], constant, varied[1], noisy, varied[2]],
            kernel=kernel,
            unbiased=unbiased,
        )
    expected = torch.zeros(5, 5, dtype=torch.bool)
    expected[[1, 3]], expected[:, [1, 3]] = True, True
    assert torch.equal(found.isnan(), expected)
    with pytest.warns(UserWarning, match="do not vary"):
        assert math.isnan(cka(varied[0], constant, kernel, unbiased))
    batches = [
        (varied[0], varied[1]),
        (varied[1], constant),
        (varied[2], varied[0]),
    ]  # constant in one batch only
    assert math.isfinite(minibatch_cka(batches, kernel, unbiased))
    with pytest.warns(UserWarning, match="do not vary"):
        assert math.isnan(
            minibatch_cka([(x, constant) for x in varied], kernel, unbiased)
        )


def test_one_sample_apart_is_no_similarity():
    """Without the diagonal nothing is left of it: 0/0, not a large number."""
    lonely = torch.zeros(20, 3)
    lonely[4] = 2
    with pytest.warns(UserWarning, match="do not vary"):
        assert math.isnan(cka(lonely, normal(20, 3)))


# embeddings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("samples", "width"), [(60, 8), (9, 500)])
def test_pca_equals_scikit_learn(samples, width):
    x = normal(samples, width) * torch.linspace(3, 1, width)
    found = embed(x, components=3)
    plain = PCA(3, svd_solver="full").fit_transform(x.numpy())
    near(found.abs(), np.abs(plain))
    assert embed(x.float()).dtype == torch.float32


def test_tsne_keeps_clusters_and_follows_its_seed():
    x = torch.cat([normal(12, 2000).float() + 5 * i for i in range(2)])
    found = embed(x, "tsne", seed=3)
    first, second = found[:12], found[12:]
    assert torch.cdist(first, second).min() > torch.cdist(first, first).max()
    assert torch.equal(found, embed(x, "tsne", seed=3))
    assert embed(x[:4], "tsne").shape == (4, 2)


def test_cka_of_the_heads_of_a_layer():
    (x, _), network = images(), vit()
    found = head_cka(network, x, 0)
    near(found.diagonal(), torch.ones(len(found), dtype=found.dtype))
    one, other = head_features(network, x)[0].unbind(1)[:2]
    near(found[0, 1], torch.tensor(cka(one, other), dtype=found.dtype))


def test_two_samples_are_too_few_for_umap():
    with pytest.raises(ValueError, match="pca takes two"):
        embed(normal(2, 5), "umap", 1)
    assert embed(normal(2, 5), "pca", 1).shape == (2, 1)


def test_umap_is_called_with_its_seed_and_few_neighbours(monkeypatch):
    """Compiling UMAP takes half a minute, which the notebooks spend."""
    given = {}

    class UMAP:
        def __init__(self, **settings):
            given.update(settings)

        def fit_transform(self, x):
            return x[:, : given["n_components"]].astype(np.float32)

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=UMAP))
    found = embed(normal(8, 40), "umap", 3, seed=5)
    assert found.shape == (8, 3)
    assert found.dtype == torch.float64
    assert (given["random_state"], given["n_neighbors"]) == (5, 7)


# features of layers --------------------------------------------------------------------------------------------------
def test_blocks_of_a_transformer():
    model, (x, _) = vit().train(), images(6)
    found = layer_features(model, x, r"layers\.\d$", batch_size=4)
    assert model.training
    hidden = model.eval()(x, output_hidden_states=True).hidden_states
    assert list(found) == ["vit.layers.0", "vit.layers.1"]
    for features, states in zip(found.values(), hidden[1:], strict=True):
        assert not features.requires_grad
        near(features, states.detach())


def test_layers_of_other_networks():
    texts = torch.randint(50, (5, 7))
    assert len(layer_features(bert(), texts, r"layer\.\d$")) == 2
    [hidden] = layer_features(bert(), texts, r"encoder$").values()
    assert hidden.ndim == 3
    mlp, x = models.mlp(8, (6, 4), 3).eval(), torch.rand(5, 8)
    found = layer_features(mlp, x, ["1", "7"])
    assert {name: f.shape[1] for name, f in found.items()} == {"1": 6, "7": 3}
    near(found["7"], mlp(x).detach())
    near(nn.functional.linear(penultimate(mlp, x), mlp[7].weight, mlp[7].bias), mlp(x))


def test_an_activation_in_place_leaves_the_layer_s_output():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True)), torch.randn(5, 4)
    near(layer_features(model, x, "0")["0"], model[0](x).detach())


# bad input -----------------------------------------------------------------------------------------------------------
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(self.layer(x))


TABLE = normal(9, 2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cka(TABLE, normal(8, 2)), "same 4 or more samples"),
        (lambda: cka(normal(3, 2), normal(3, 2)), "same 4 or more samples"),
        (lambda: cka(normal(9), normal(9)), r"\[samples, features\], got \[9\]"),
        (lambda: cka(TABLE / 0, TABLE), "NaN or an infinite"),
        (lambda: cka(TABLE, TABLE, "cosine"), "kernel must be"),
        (lambda: minibatch_cka([]), "empty stream"),
        (lambda: cka_matrix([]), "got no samples"),
        (lambda: embed(TABLE, "lda"), "method must be"),
        (lambda: layer_features(vit(), images()[0], "mlp_9"), "matches no module"),
        (lambda: layer_features(Twice(), torch.rand(4, 3), "layer"), "run once"),
        (lambda: layer_features(vit(), images()[0], "layers$"), "run once"),  # a list
        (
            lambda: layer_features(ensembles.lora(vit(), 2), images()[0], "layer"),
            r"ensemble.member\(0\)",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("batch_size", [1.5, 0])
def test_a_refused_batch_size_leaves_no_hooks(batch_size, unchecked):
    network = models.mlp(4, (3,), 2)
    with pytest.raises((TypeError, ValueError), match="batch_size must be"):
        layer_features(network, torch.rand(5, 4), "1", batch_size=batch_size)
    assert not any(part._forward_hooks for part in network.modules())
