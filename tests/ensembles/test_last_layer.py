"""Last-layer Laplace: the posterior against the full matrix, its prior against the evidence by hand."""

import pytest
import torch
from same import near
from small_networks import cnn, images, vit
from torch import nn
from torch.testing import assert_close

from uqlab import ensembles, training

EYE = torch.eye(12, dtype=torch.float64)


def small():
    """Three classes from three features of four numbers, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def classifiers(ensemble):
    """The members' weights and biases [members, classes, features + 1]."""
    held = {p.ndim: p.detach() for p in ensemble.parameters() if p.requires_grad}
    return torch.cat([held[3], held[2][..., None]], 2)


def full(network, x):
    """The generalised Gauss-Newton matrix of the classifier with its bias for one input, by autograd."""
    last = network[2]
    slopes = []
    for z in network(x[None])[0]:
        w, b = torch.autograd.grad(z, (last.weight, last.bias), retain_graph=True)
        slopes.append(torch.cat([w, b[:, None]], 1).flatten())
    j, p = torch.stack(slopes), network(x[None])[0].softmax(-1).detach()
    return j.T @ (p.diag() - p.outer(p)) @ j


@pytest.mark.parametrize("copies", [1, 5])
def test_for_one_input_draws_have_the_inverse_of_the_full_matrix(copies):
    network, x = small(), torch.rand(4, dtype=torch.float64)
    ensemble = ensembles.laplace(
        network, x.expand(copies, -1), 20_000, prior_variance=2.0, batch_size=2
    )
    drawn = classifiers(ensemble).flatten(1).detach()
    mean = torch.cat([network[2].weight, network[2].bias[:, None]], 1).detach()
    expected = torch.linalg.inv(copies * full(network, x) + EYE / 2)
    assert_close(drawn.T.cov(), expected, rtol=0.1, atol=0.06)
    assert_close(drawn.mean(0), mean.flatten(), rtol=0.0, atol=0.05)


def test_features_are_shared_and_with_little_variance_it_is_the_network():
    (x, y), backbone = images(12), cnn()
    one = ensembles.deep(lambda: backbone, 1)
    training.fit(one, x, y, epochs=2, lr=0.02, optimizer="adamw", progress=False)
    network = one.member(0)
    said = training.predict(network, x)[0]
    narrow = ensembles.laplace(network, x, 3, prior_variance=1e-14)
    near(training.predict(narrow, x), said.expand(3, -1, -1), atol=1e-4)
    ensemble = ensembles.laplace(network, x, 3, seed=1)
    own = sum(p.numel() for p in ensemble.parameters() if p.requires_grad)
    classifier = list(network.modules())[-1]
    assert own == 3 * sum(p.numel() for p in classifier.parameters())
    shards = [
        ensembles.laplace(network, x, part, seed=1)
        for part in (range(0, 1), range(1, 3))
    ]
    near(
        training.predict(ensembles.concatenate(shards), x),
        training.predict(ensemble, x),
    )


def test_the_prior_is_the_best_of_a_grid_by_the_evidence_of_the_whole_matrix():
    network, x = small(), 3 * torch.randn(40, 4, dtype=torch.float64)
    p, h = network(x).softmax(1).detach(), network[:2](x).detach()
    h = torch.cat([h, torch.ones(40, 1)], 1)
    whole = torch.kron(p.sum(0).diag() - p.T @ p, h.T @ h / 40)
    own = [t.detach() for t in network[2].parameters()]
    size = sum(t.square().sum() for t in own)

    def evidence(v):
        return -(size / v + torch.linalg.slogdet(EYE + v * whole)[1]) / 2

    best = max(torch.logspace(-6, 6, 121, dtype=torch.float64).tolist(), key=evidence)
    assert 1e-5 < best < 1e5
    found, expected = (
        classifiers(ensembles.laplace(network, x, 3, prior_variance=v))
        for v in (None, best)
    )
    near(found, expected)


class Tied(nn.Module):
    """The classifier's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, ids):
        return self.last(self.embed(ids).mean(1))


def test_a_tied_classifier_is_drawn_and_the_embedding_is_not():
    network, ids = Tied(), torch.randint(9, (12, 5))
    ensemble = ensembles.laplace(network, ids, 3)
    h = network.embed(ids).mean(1)
    for m in range(3):
        near(ensemble(ids)[m], h @ ensemble.member(m).last.weight.T)


def test_a_classifier_without_a_bias_and_a_transformer(tmp_path):
    (x, _), network = images(12), vit()
    network.classifier = nn.Linear(network.classifier.in_features, 3, bias=False)
    ensemble = ensembles.laplace(network, x, 3)
    apart = [training.predict(ensemble.member(m), x)[0] for m in range(3)]
    near(training.predict(ensemble, x), torch.stack(apart))
    ensemble.save_pretrained(tmp_path)
    again = ensembles.from_pretrained(tmp_path, network)
    near(training.predict(again, x), training.predict(ensemble, x))
