"""Heads of every family of networks: what is removed, what is refused, and why."""

import pytest
import torch
import torch.nn.functional as F
from networks import (
    CLASSES,
    NETWORKS,
    SIZES,
    WIDTH,
    Encoder,
    Network,
    logits,
)
from same import near, unchanged
from test_circuits import algorithm_1
from torch import nn

from uqlab import heads
from uqlab.models import attentions

FOUR = SIZES | {"num_attention_heads": 4}
# --- networks --------------------------------------------------------------------------


class Own(nn.Module):
    """Fused attention as people write it: four query heads share two key heads."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 4, WIDTH // 4
        self.qkv = nn.Linear(WIDTH, 8 * self.head_dim)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).split([count * self.head_dim for count in (4, 2, 2)], -1)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts
        )
        z = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.proj(z.transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Own()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.attn(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


OWN = {"own": Network(Stack, NETWORKS["torch encoder, no mask"].draw)}
REFUSED = ("albert", "torch decoder", "own matrices")
FAMILIES = OWN | {
    name: network
    for name, network in NETWORKS.items()
    if network.attention and name not in REFUSED
}
# Those whose attention keeps its heads: pruned ones become zeros.
WHOLE = {"own", "swin", "gpt2", "modernbert", "timm vit"}
WHOLE |= {name for name in FAMILIES if name.startswith("torch")}
EVERY = pytest.mark.parametrize("name", FAMILIES)


def make(name):
    return FAMILIES[name].make().double()


def inputs(name, count=6, seed=1):
    x = FAMILIES[name].inputs(count, seed)
    floating = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.double() if floating else x


@torch.no_grad()
def answer(model, x):
    return logits(model, x)


def sizes(model):
    return sum(p.numel() for p in model.parameters())


# --- ablation and pruning --------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("some", ["a group", "a layer"])
def test_pruned_is_ablated(name, some):
    model, x = make(name), inputs(name)
    counts = heads.count_heads(model)
    last = len(counts) - 1
    gone = {
        "a group": [(0, 0), (0, 1)],
        "a layer": [(last, head) for head in range(counts[last])],
    }[some]
    with unchanged(model):
        small = heads.prune(model, gone)
        with heads.ablate(model, gone):
            expected = answer(model, x)
    near(answer(small, x), expected)
    assert (expected - answer(model, x)).abs().max() > 1e-3
    layer = gone[0][0]
    if name in WHOLE:
        assert heads.count_heads(small) == counts
    elif name != "llama":
        assert sizes(small) < sizes(model)
        assert heads.count_heads(small)[layer] == counts[layer] - len(gone)


@EVERY
def test_pruned_twice_and_trained(name):
    model, x = make(name), inputs(name)
    heads_of_first = range(heads.count_heads(model)[0])
    once = heads.prune(model, [(0, head) for head in heads_of_first])
    twice = heads.prune(once, [(1, 0)]) if len(heads.count_heads(model)) > 1 else once
    answer(twice, x)
    logits(twice.train(), x).sum().backward()
    assert any(p.grad is not None for p in twice.parameters())


def test_whole_groups_are_cut():
    """Two queries share a key: one of them leaves zeros, both take the key along."""
    model, x = make("llama"), inputs("llama")
    assert [(each.heads, each.groups) for each in attentions(model)] == [(4, 2)] * 2
    half = heads.prune(model, [(0, 2)])
    assert sizes(half) == sizes(model)
    small = heads.prune(model, [(0, 2), (0, 3), (1, 0)])
    assert [(each.heads, each.groups) for each in attentions(small)] == [(2, 1), (4, 2)]
    with heads.ablate(model, [(0, 2), (0, 3), (1, 0)]):
        near(answer(small, x), answer(model, x))


# --- scores, features and circuits -----------------------------------------------------


def stacked(part, attribute):
    """Query, key and value of an attention as three matrices [rows, width]."""
    fused = ("in_proj_weight", "qkv", "Wqkv", "c_attn")
    separate = ("q_proj", "query", "query_proj", "q_lin")
    for own in fused:
        if hasattr(part, own):
            matrix = getattr(part, own)
            matrix = attribute(getattr(matrix, "weight", matrix))
            matrix = matrix.T if own == "c_attn" else matrix
            size = part.head_dim
            queries = (
                part.num_heads * size
                if hasattr(part, "num_heads")
                else len(matrix) // 3
            )
            shared = (len(matrix) - queries) // 2
            return matrix.split([queries, shared, shared])
    for own in separate:
        if hasattr(part, own):
            names = [own, own.replace("q", "k", 1), own.replace("q", "v", 1)]
            if "query" in own:
                names = [
                    own,
                    own.replace("query", "key"),
                    own.replace("query", "value"),
                ]
            return [attribute(getattr(part, each).weight) for each in names]
    raise LookupError


@EVERY
def test_taylor_scores_by_a_plain_loop(name):
    model, x = make(name), inputs(name)
    y = torch.arange(6) % CLASSES
    found = heads.taylor_scores(model, x, y, batch_size=4)
    assert all(p.grad is None for p in model.parameters())
    F.cross_entropy(logits(model, x), y).backward()
    for layer, attention in enumerate(attentions(model)):
        core = model.get_submodule(attention.name)
        total = torch.zeros(attention.heads, dtype=torch.float64)
        weights = stacked(core, lambda p: p.detach())
        slopes = stacked(core, lambda p: p.grad)
        for weight, slope in zip(weights, slopes, strict=True):
            product = (weight * slope).abs()
            heads_here = len(product) // attention.size
            each = product.reshape(heads_here, -1).mean(1)
            total += each.repeat_interleave(attention.heads // heads_here) / 3
        near(found[layer, : attention.heads], total)


# What has no class token: windows, and texts whose first token sees no other. The
# output projection of torch's attention is not called.
NO_CLASS_TOKEN = {"swin", "gpt2", "llama"}
NO_CLASS_TOKEN |= {name for name in FAMILIES if name.startswith("torch")}


@pytest.mark.parametrize("name", sorted(NO_CLASS_TOKEN & {*FAMILIES}))
def test_features_need_a_class_token(name):
    with pytest.raises(ValueError, match="no class token"):
        heads.head_features(make(name), inputs(name, 4))


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in NO_CLASS_TOKEN])
def test_features_are_before_the_output_projection(name):
    model, x = make(name), inputs(name, 4)
    features = heads.head_features(model, x, batch_size=3)
    for attention, each in zip(attentions(model), features, strict=True):
        assert each.shape == (4, attention.heads, attention.size)
        assert each.abs().max() > 0
    with heads.ablate(model, [(0, h) for h in range(heads.count_heads(model)[0])]):
        near(heads.head_features(model, x)[0], features[0])


@EVERY
def test_circuits_by_brute_force(name):
    """Hydra, Algorithm 1, line by line."""
    model, x, ood = make(name), inputs(name, 20, 5), inputs(name, 10, 6)
    y = torch.arange(20) % CLASSES
    every = [
        (layer, head)
        for layer, count in enumerate(heads.count_heads(model))
        for head in range(count)
    ]
    expected, _ = algorithm_1(model, x, y, ood, "avg", 2, every)
    found = heads.greedy_circuit(model, x, y, ood, budget=2, progress=False)
    assert found == expected


# --- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("albert", "uses the layer albert.* at several depths"),
        ("torch decoder", "has layers with several attentions"),
        ("own matrices", "has no attention whose heads can be separated"),
    ],
)
def test_networks_whose_heads_cannot_be_told_apart(name, message):
    with pytest.raises(ValueError, match=message):
        heads.shape(NETWORKS[name].make())


def test_a_layer_at_several_depths_is_refused():
    layer = Layer()
    with pytest.raises(
        ValueError, match="Sequential uses the layer 0 at several depths"
    ):
        heads.shape(nn.Sequential(layer, layer))


@EVERY
def test_members_of_every_family_fuse(name):
    model, x = make(name), inputs(name)
    members = [heads.prune(model, [(0, 0), (0, 1)]), heads.prune(model, [(0, 1)])]
    fused = heads.fuse(members)
    expected = torch.stack([answer(member, x) for member in members])
    with torch.no_grad():
        near(fused(x), expected)
    near(answer(fused.member(0), x), expected[0])


def test_a_pooling_attention_is_no_layer():
    model = nn.ModuleDict(
        {"encoder": Encoder(True), "pool": nn.MultiheadAttention(8, 4)}
    )
    assert [each.layer for each in attentions(model)] == [
        "encoder.encoder.layers.0",
        "encoder.encoder.layers.1",
    ]
