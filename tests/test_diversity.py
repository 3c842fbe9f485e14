"""Members compared: identities, plain loops, known matrices, bad input."""

import math
import re

import head_networks
import numpy as np
import pytest
import torch
from same import near
from scipy.spatial.distance import jensenshannon
from torch import nn

from uqlab import ensembles, heads, metrics, models
from uqlab.analysis import diversity


def make_logits(members=5, batch=40, classes=4, seed=0):
    return 2 * torch.randn(
        members, batch, classes, generator=torch.Generator().manual_seed(seed)
    )


def off_diagonal(pairs):
    return pairs[~torch.eye(len(pairs), dtype=torch.bool)]


# predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [diversity.disagreement, diversity.js_divergence])
def test_distances_between_members(measure):
    z = make_logits().double()
    pairs = measure(z)
    assert torch.equal(pairs, pairs.T)
    assert (pairs.diagonal() == 0).all()
    assert (off_diagonal(pairs) > 0).all()
    near(measure(z + 3 * torch.randn(5, 40, 1)), pairs)  # a constant changes no softmax
    order = torch.randperm(5)
    near(measure(z[order]), pairs[order][:, order])
    assert measure(z[:1].expand(3, -1, -1)).max() < 1e-12


def test_disagreement_equals_a_loop():
    z = make_logits()
    votes = z.argmax(-1).numpy()
    plain = np.array(
        [[np.mean(votes[i] != votes[j]) for j in range(5)] for i in range(5)]
    )
    near(diversity.disagreement(z), plain)
    mean = np.mean([plain[i, j] for i in range(5) for j in range(5) if i != j])
    assert diversity.mean_pair(diversity.disagreement(z)) == pytest.approx(mean)
    assert metrics.interval(
        [z], torch.zeros(40, dtype=torch.long), "disagreement", repeats=9
    ).mean == pytest.approx(mean)
    assert metrics.interval(
        [z[:1]], torch.zeros(40, dtype=torch.long), "disagreement", repeats=9
    ) == (0, 0, 0)


def test_js_divergence_equals_scipy_and_its_bounds():
    z = make_logits()
    p = z.double().softmax(-1).numpy()
    plain = [
        [np.mean(jensenshannon(p[i], p[j], axis=-1) ** 2) for j in range(5)]
        for i in range(5)
    ]
    near(diversity.js_divergence(z), plain)
    opposite = 1e3 * torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert diversity.js_divergence(opposite)[0, 1].item() == pytest.approx(math.log(2))
    together = (
        torch.from_numpy(p).mean(1, keepdim=True).log()
    )  # the paper's variant: of mean predictions
    assert (
        off_diagonal(diversity.js_divergence(together))
        <= off_diagonal(diversity.js_divergence(z))
    ).all()


def test_variation_ratio():
    z = nn.functional.one_hot(
        torch.tensor([[0, 1], [0, 2], [0, 1], [0, 0]]), 3
    ).float()  # four members, two inputs
    assert diversity.variation_ratio(z).tolist() == [0, 0.5]
    two = make_logits(members=2)  # of two members one half, where they disagree
    assert diversity.variation_ratio(two).mean().item() == pytest.approx(
        diversity.disagreement(two)[0, 1].item() / 2
    )


@pytest.mark.parametrize(
    "measure",
    [diversity.disagreement, diversity.js_divergence, diversity.variation_ratio],
)
def test_refuses_what_are_not_finite_logits(measure, unchecked):
    with pytest.raises(ValueError, match=r"logits must be \[members, batch, classes\]"):
        measure(torch.zeros(3, 4))
    z = make_logits()
    z[1, 2, 3] = math.nan
    with pytest.raises(ValueError, match="logits must be finite"):
        measure(z)


# weights ---------------------------------------------------------------------------------------------------------


def vit():
    torch.manual_seed(0)
    return models.vit(8, 4, width=8, layers=2, heads=2)


def flat(ensemble, names):
    return [
        [ensemble.member(m).get_submodule(n).weight.detach().flatten() for n in names]
        for m in range(3)
    ]


def moved_lora():
    ensemble = ensembles.lora(vit(), 3, rank=2)
    for p in ensemble.parameters():
        if p.requires_grad:
            nn.init.normal_(
                p, std=0.3, generator=torch.Generator().manual_seed(p.numel())
            )
    return ensemble


def test_members_that_start_from_one_backbone_are_parallel():
    backbone = vit()
    for ensemble in (
        ensembles.lora(backbone, 3),
        ensembles.dropout(backbone, 3),
        ensembles.from_members([vit()] * 3),
    ):
        near(diversity.weight_cosine(ensemble), torch.ones(3, 3, dtype=torch.float64))
        assert diversity.diversity_score(ensemble) == pytest.approx(0, abs=1e-6)


def test_independent_members_are_orthogonal_and_diverse():
    ensemble = ensembles.deep(lambda: models.mlp(64, (128, 128)), 3)
    pairs = diversity.weight_cosine(ensemble)
    near(pairs.diagonal(), torch.ones(3, dtype=torch.float64))
    assert off_diagonal(pairs).abs().max() < 0.05  # standard error 1 / sqrt(24576)
    assert diversity.diversity_score(ensemble) == pytest.approx(1, abs=0.05)


def test_weights_of_lora_equal_plain_references():
    ensemble = moved_lora()
    names = [
        n
        for n, part in ensemble.member(0).named_modules()
        if isinstance(part, nn.Linear)
    ]
    projections = [
        n
        for n in names
        if n.endswith(("_proj", "query", "key", "value", "attention.output.dense"))
    ]
    vectors = torch.stack([torch.cat(layers) for layers in flat(ensemble, projections)])
    plain = nn.functional.cosine_similarity(vectors[:, None], vectors, dim=-1)
    near(diversity.weight_cosine(ensemble).float(), plain)
    values = [n for n in projections if n.endswith(("v_proj", "value"))]
    assert len(values) == 2
    correlations = [
        np.corrcoef(np.stack(layer))[np.triu_indices(3, 1)].mean()
        for layer in zip(*flat(ensemble, values), strict=True)
    ]
    assert diversity.diversity_score(ensemble) == pytest.approx(
        1 - np.mean(correlations), abs=1e-6
    )


def pruned(*removed):
    """Members of one network, each without some heads."""
    torch.manual_seed(0)
    backbone = models.vit(8, 4, width=16, layers=2, heads=4)
    return [heads.prune(backbone, each) for each in removed]


@pytest.mark.parametrize("make", ["vit", "clip", "bert", "distilbert"])
def test_fused_members_are_compared_by_their_own_heads(make):
    kept = [[(0, 0), (1, 1)], [(0, 1), (1, 2)], [(0, 3), (1, 1)]]
    members = [heads.prune(head_networks.make(make), each) for each in kept]
    fused = heads.fuse(members)
    found = diversity.weight_cosine(fused)
    vectors = []
    for m in range(3):
        plain = [
            part
            for name, part in fused.member(m).named_modules()
            if re.search(ensembles.ATTENTION, name)
        ]
        vectors.append(torch.cat([layer.weight.detach().flatten() for layer in plain]))
    assert len(plain) == 4 * head_networks.LAYERS
    expected = nn.functional.cosine_similarity(
        torch.stack(vectors)[:, None], torch.stack(vectors), dim=-1
    )
    near(found, expected)
    assert (off_diagonal(found) < 0.99).all()
    near(diversity.weight_cosine(ensembles.from_members(members)), found)
    assert 0 < diversity.diversity_score(fused) < 1


def test_members_of_different_shapes_are_refused():
    fused = heads.fuse(pruned([(0, 0), (1, 0)], [(0, 1), (0, 2), (1, 1)]))
    for measure in (diversity.weight_cosine, diversity.diversity_score):
        with pytest.raises(ValueError, match=r"different shapes.*js_divergence"):
            measure(fused)


def test_weights_refuse(unchecked):
    with pytest.raises(ValueError, match="at least two members"):
        diversity.diversity_score(ensembles.lora(vit(), 1))
    with pytest.raises(ValueError, match=r"'mlp_9' matches no linear .*classifier"):
        diversity.weight_cosine(ensembles.lora(vit(), 2), target="mlp_9")
    with pytest.raises(TypeError, match="from_members"):
        diversity.weight_cosine(vit())


def test_a_mean_of_n_independent_members_has_a_variance_of_one_nth():
    generator = torch.Generator().manual_seed(0)
    centre = 2 * torch.randn(400, 10, generator=generator)
    members = centre + torch.randn(2000, 400, 10, generator=generator)
    one = diversity.logit_spread(members)
    of_four = diversity.logit_spread(members.unflatten(0, (-1, 4)).mean(1))
    assert one.variance == pytest.approx(0.9, rel=0.01)  # centred: 1 - 1 / classes
    assert one.variance / of_four.variance == pytest.approx(4, rel=0.01)
    near(one.square, of_four.square)
    shifted = members + torch.randn(2000, 400, 1, generator=generator)
    near(diversity.logit_spread(shifted), one)
    with pytest.raises(ValueError, match="two or more"):
        diversity.logit_spread(members[:1])
