"""Heads of every family of networks: what is removed, what is refused, and why."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from networks import (
    CLASSES,
    IMAGE,
    NETWORKS,
    PIXELS,
    SIZES,
    TEXT,
    WIDTH,
    Encoder,
    Network,
    logits,
    tokenized,
)
from same import near, unchanged
from test_circuits import algorithm_1
from torch import nn

from uqlab import heads
from uqlab.models import attentions

FOUR = SIZES | {"num_attention_heads": 4}
RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 4,
    "max_relative_positions": 8,
}


# --- networks --------------------------------------------------------------------------


def deberta(share: bool) -> nn.Module:
    config = transformers.DebertaV2Config(
        **FOUR, **TEXT, **RELATIVE, share_att_key=share
    )
    return transformers.DebertaV2ForSequenceClassification(config)


def beit() -> nn.Module:
    config = transformers.BeitConfig(**FOUR, **PIXELS, use_relative_position_bias=True)
    return transformers.BeitForImageClassification(config)


class Own(nn.Module):
    """Fused attention as people write it.

    Parameters
    ----------
    groups
        Key and value heads; there are four query heads.
    fixed
        Whether it reshapes to a number of its own, not to the width of its input.
    normed
        Whether queries and keys are normed before they meet.
    """

    def __init__(self, groups: int = 4, fixed: bool = True, normed: bool = False):
        super().__init__()
        self.num_heads, self.groups, self.inner = 4, groups, WIDTH
        size = WIDTH // self.num_heads
        self.head_dim = size
        self.qkv = nn.Linear(WIDTH, (4 + 2 * groups) * size)
        self.norm = nn.LayerNorm(size) if normed else nn.Identity()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.fixed = fixed
        self.num_key_value_heads = groups

    def forward(self, x):
        counts = [self.num_heads, self.num_key_value_heads, self.num_key_value_heads]
        parts = self.qkv(x).split([count * self.head_dim for count in counts], -1)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts
        )
        z = F.scaled_dot_product_attention(
            self.norm(q), self.norm(k), v, enable_gqa=True
        )
        width = self.inner if self.fixed else x.shape[-1]
        return self.proj(z.transpose(1, 2).reshape(*x.shape[:2], width))


class Layer(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.attn = Own(**settings)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.attn(x))


class Stack(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList([Layer(**settings) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


SEQUENCE = NETWORKS["torch encoder, no mask"].draw
MORE = {
    "deberta": Network(lambda: deberta(True), tokenized, tokens=True),
    "deberta, own positions": Network(lambda: deberta(False), tokenized, tokens=True),
    "beit": Network(beit, IMAGE),
    "own": Network(Stack, SEQUENCE),
    "own, grouped": Network(lambda: Stack(groups=2), SEQUENCE),
    "own, as wide as its input": Network(lambda: Stack(fixed=False), SEQUENCE),
    "own, normed": Network(lambda: Stack(fixed=False, normed=True), SEQUENCE),
}
REFUSED = ("albert", "torch decoder", "own matrices")
FAMILIES = MORE | {
    name: network
    for name, network in NETWORKS.items()
    if network.attention and name not in REFUSED
}
# Those whose attention keeps its heads: pruned ones become zeros.
WHOLE = {*MORE, "swin", "gpt2", "modernbert", "timm vit"}
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
@pytest.mark.parametrize("some", ["one", "a group", "a layer", "all but one"])
def test_pruned_is_ablated(name, some):
    model, x = make(name), inputs(name)
    counts = heads.count_heads(model)
    last = len(counts) - 1
    gone = {
        "one": [(last, 1)],
        "a group": [(0, 0), (0, 1)],
        "a layer": [(last, head) for head in range(counts[last])],
        "all but one": [(0, head) for head in range(1, counts[0])],
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


@pytest.mark.parametrize("batch_first", [True, False])
def test_an_attention_alone(batch_first):
    torch.manual_seed(0)
    core = nn.MultiheadAttention(8, 4, batch_first=batch_first).double().eval()
    assert heads.shape(core) == (1, 4)
    x = torch.randn(3, 5, 8).double()
    tokens = 5 if batch_first else 3
    causal = torch.ones(tokens, tokens).triu(1).bool()
    small = heads.prune(core, [(0, 1), (0, 2)])
    for mask in (None, causal):
        with heads.ablate(core, [(0, 1), (0, 2)]):
            expected, _ = core(x, x, x, attn_mask=mask)
        found, _ = small(x, x, x, attn_mask=mask)
        near(found, expected)


@pytest.mark.parametrize("extra", ["add_zero_attn", "add_bias_kv"])
def test_torch_attention_with_more_than_heads_keeps_its_size(extra):
    torch.manual_seed(0)
    core = nn.MultiheadAttention(8, 4, batch_first=True, **{extra: True}).double()
    x = torch.randn(3, 5, 8).double()
    small = heads.prune(core.eval(), [(0, 1)])
    assert sizes(small) == sizes(core)
    with heads.ablate(core, [(0, 1)]):
        near(small(x, x, x)[0], core(x, x, x)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay_with_torch():
    """A pruned torch encoder gives the same where its tokens are not padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    small = heads.prune(model, [(0, 1), (1, 0)])
    x = torch.randn(2, 4, 16).double()
    empty = torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad(), heads.ablate(model, [(0, 1), (1, 0)]):
        expected = model(x, src_key_padding_mask=empty)
        found = small(x, src_key_padding_mask=empty)
    near(found[~empty], expected[~empty])


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


# What has no class token: windows, and texts whose first token sees no other.
NO_CLASS_TOKEN = {"swin", "gpt2", "llama"}


@pytest.mark.parametrize("name", sorted(NO_CLASS_TOKEN & {*FAMILIES}))
def test_features_need_a_class_token(name):
    with pytest.raises(ValueError, match="no class token"):
        heads.head_features(make(name), inputs(name, 4))


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in NO_CLASS_TOKEN])
def test_features_make_the_attention(name):
    """Features times the output projection are what the attention gives one token."""
    model, x = make(name), inputs(name, 4)
    features = heads.head_features(model, x, batch_size=3)
    for attention, each in zip(attentions(model), features, strict=True):
        assert each.shape == (4, attention.heads, attention.size)
        assert each.abs().max() > 0
    changed = copy.deepcopy(model)
    last = attentions(model)[0].output
    with torch.no_grad():
        changed.get_parameter(last.parameter).zero_()
    after = heads.head_features(changed, x)
    near(after[0], features[0])  # before the output projection


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


def test_windows_have_no_class_token():
    with pytest.raises(
        ValueError, match="attends to windows, which have no class token"
    ):
        heads.head_features(make("swin"), inputs("swin"))


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "modernbert", "torch encoder", "timm vit"]
)
def test_fused_projections_do_not_fuse_members(name):
    model = make(name)
    with pytest.raises(ValueError, match=r"no separate query.*it cannot be fused"):
        heads.fuse([model, heads.prune(model, [(0, 0)])])


@pytest.mark.parametrize(
    "name", ["deit", "whisper", "ast", "vit", "bert", "distilbert"]
)
def test_members_of_these_families_fuse(name):
    model, x = make(name), inputs(name)
    members = [heads.prune(model, [(0, 0)]), heads.prune(model, [(0, 1), (1, 0)])]
    fused = heads.fuse(members)
    expected = torch.stack([answer(member, x) for member in members])
    with torch.no_grad():
        found = fused(x)
    near(found, expected)


def test_a_pooling_attention_is_no_layer():
    model = nn.ModuleDict(
        {"encoder": Encoder(True), "pool": nn.MultiheadAttention(8, 4)}
    )
    assert [each.layer for each in attentions(model)] == [
        "encoder.encoder.layers.0",
        "encoder.encoder.layers.1",
    ]
