"""Networks that are written in a less usual way have the same members, or are refused in words."""

import pytest
import torch
from same import near
from torch import nn
from torch.nn.utils import prune

from uqlab import ensembles, extraction, training

S, L, R = nn.Sequential, nn.Linear, nn.ReLU


def inputs(rows=16):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))


# Half precision -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("additive", [False, True])
def test_batch_ensembles_of_half_precision_are_those_of_float32_rounded(
    dtype, additive
):
    torch.manual_seed(0)
    perceptron, x = S(L(6, 8), R(), L(8, 3)), inputs()
    kernel = S(nn.Conv1d(6, 8, 3), R(), nn.Flatten(), L(16, 3))
    for net, given in ((perceptron, x), (kernel, x[..., None] * torch.ones(4))):
        half = ensembles.batch(net.to(dtype), 3, additive=additive)
        whole = ensembles.batch(net.float(), 3, additive=additive)
        for mode in ("vmap", "loop"):
            half.mode = mode
            found = half(given.to(dtype))
            assert found.dtype == dtype
            assert (found.float() - whole(given)).abs().max() < 0.05


# Weights that hooks compute -------------------------------------------------------------------------------------------
HOOKS = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruned twice": lambda layer: prune.random_unstructured(
        prune.l1_unstructured(layer, "weight", 0.3), "weight", 0.3
    ),
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_that_hooks_compute_are_taken_as_they_are_now(kind, passed):
    torch.manual_seed(0)
    net, x = S(HOOKS[kind](L(6, 8)), R(), HOOKS[kind](L(8, 8)), R(), L(8, 3)), inputs()
    if passed:
        with torch.no_grad():
            net(x)
    net.eval()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    lora = ensembles.lora(net, 2, classifiers="shared")
    assert set(lora.seen) == {"0.weight", "2.weight"}
    for ensemble in (
        lora,
        ensembles.dropout(net, 2, 0.0),
        ensembles.masksembles(net, 2, 1.0),
    ):
        near(ensemble.eval()(x), net(x).expand(2, -1, -1))
    after = net.state_dict()
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert extraction.masks(net, 2)(x).shape == (2, 16, 3)


def test_layers_that_share_a_weight_are_no_layers_to_mask():
    net = S(L(6, 6), R(), L(6, 6), R(), L(6, 3))
    net[2].weight = net[0].weight
    with pytest.raises(ValueError, match=r"'2\.weight'.*first name"):
        extraction.masks(net, 3)
    net[0].gain = 2.0
    with pytest.raises(ValueError, match=r"'0\.gain'.*no parameter"):
        ensembles.Ensemble(net, 1, {"0.gain": [nn.Identity()]})


# Inputs ---------------------------------------------------------------------------------------------------------------
class HeadFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.body = L(8, 3), L(6, 8)

    def forward(self, x, y=None):
        return self.head(self.body(x if y is None else x + y).relu())


@pytest.mark.parametrize("give", [
    lambda e, x: e(x), lambda e, x: e(x, x), lambda e, x: e(x, y=x), lambda e, x: e(x=x, y=x),
    lambda e, x: e.forward_each(x.expand(2, -1, -1), x.expand(2, -1, -1)),
])  # fmt: skip
def test_a_wrong_classifier_or_first_layer_is_found_however_inputs_are_given(give):
    for make, named in (
        (ensembles.lora, "'head'"),
        (ensembles.dropout, "'body"),
        (ensembles.masksembles, "'body"),
    ):
        with pytest.raises(ValueError, match=named):
            give(make(HeadFirst(), 2), inputs())
    right = ensembles.lora(HeadFirst(), 2, classifier="head")
    assert give(right, inputs()).shape == (2, 16, 3)
    assert ensembles.masksembles(HeadFirst(), 2, target="head")(inputs()).shape == (
        2,
        16,
        3,
    )


def test_layers_that_are_not_called_first_but_stand_there_are_no_mistake():
    """The first of several that are used twice, or are never called."""
    net = S(L(6, 6), R(), L(6, 6), R(), L(6, 3))
    net.insert(0, net[2])  # called first, and again
    unused = S(L(6, 8), R(), L(8, 3))
    unused.forward = lambda x: unused[2](x @ unused[0].weight.T)
    for each in (net, unused):
        assert ensembles.dropout(each, 2)(inputs()).shape == (2, 16, 3)


@pytest.mark.parametrize("make", [
    ensembles.lora, ensembles.dropout, ensembles.mimo, ensembles.packed,
    lambda net, m: ensembles.deep(lambda: S(L(6, 3)), m), lambda net, m: ensembles.from_members([net] * m),
])  # fmt: skip
def test_an_ensemble_does_not_read_data_sets(make):
    data = torch.utils.data.TensorDataset(inputs())
    ensemble = make(S(L(6, 8), R(), L(8, 3)), 2)
    for given in (data, torch.utils.data.DataLoader(data, 4), inputs().numpy()):
        with pytest.raises(TypeError, match=r"training\.predict"):
            ensemble(given)


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = S(L(6, 8), R(), L(8, 3))

    def forward(self, x, y=0):
        return self.net(x) + y


def test_mimo_takes_its_input_by_name():
    x, y = inputs(), torch.arange(16) % 3
    ensemble = ensembles.mimo(ByName(), 2)
    near(ensemble({"x": x}), ensemble(x))
    each = torch.stack([x, x + 1])
    near(ensemble.forward_each(x=each), ensemble.forward_each(each))
    history = training.fit(ensemble, {"x": x}, y, epochs=2, lr=0.1, progress=False)
    assert history.loss.shape == (2, 2)
    with pytest.raises(ValueError, match="one tensor"):
        ensemble(x, x[:, :3])


# Narrow networks ------------------------------------------------------------------------------------------------------
class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = L(6, 6), L(6, 3)

    def forward(self, x):
        return self.head(x + self.body(x))


def test_networks_that_packed_cannot_narrow_are_refused():
    twice = L(6, 6)
    kernels = S(
        nn.Conv2d(1, 4, 3),
        R(),
        nn.Conv2d(4, 6, 3),
        R(),
        nn.Conv2d(6, 4, 3),
        nn.Flatten(),
        L(36, 3),
    )
    for net, x in (
        (S(twice, R(), twice, R(), L(6, 3)), inputs()),
        (Skip(), inputs()),
        (kernels, torch.rand(5, 1, 9, 9)),
    ):
        for name in (None, [*dict(net.named_modules())][-1]):
            with pytest.raises(ValueError, match="narrow network of packed"):
                ensembles.packed(net, 3, classifier=name)(x)


def test_layers_that_share_a_weight_are_narrowed_together():
    net = S(L(6, 8), R(), L(8, 8), R(), L(8, 8), R(), L(8, 3))
    net[4].weight = net[2].weight
    member = ensembles.packed(net, 4).member(0)
    assert [tuple(member[i].weight.shape) for i in (0, 2, 4, 6)] == [
        (4, 6),
        (4, 4),
        (4, 4),
        (3, 4),
    ]
    assert member[4].weight is member[2].weight
    assert ensembles.packed(net, 4)(inputs()).shape == (4, 16, 3)


# States ---------------------------------------------------------------------------------------------------------------
def test_a_singular_value_ensemble_takes_the_state_of_one_on_other_weights():
    x = inputs()
    a, b = (
        ensembles.singular_value(S(L(6, 8), R(), L(8, 3)), 2, share=s)
        for s in (0.5, 0.5)
    )
    assert (a(x) - b(x)).abs().max() > 1e-3
    b.load_state_dict(a.state_dict())
    near(b(x), a(x))


# Dropout --------------------------------------------------------------------------------------------------------------
class TwoWidths(nn.Module):
    """One module of dropout for features of several widths, one of them twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = L(6, 64), L(64, 32), L(32, 3), nn.Dropout(0.5)

    def forward(self, x):
        h = self.d(self.b(self.d(self.a(x).abs() + 1)).abs() + 1)
        return self.c(self.d(h))


def test_a_module_of_dropout_may_be_called_at_several_widths():
    torch.manual_seed(0)
    ensemble, x = ensembles.dropout(TwoWidths(), 4, 0.5), inputs()
    found = {}
    for mode in ("vmap", "loop"):
        ensemble.mode = mode
        found[mode] = ensemble(x)
    near(found["loop"], found["vmap"])
    assert found["loop"].std(0).mean() > 0.1
    for m in range(4):
        member = ensemble.member(m)
        near(member(x), found["loop"][m])
        near(member(x[:3]), found["loop"][m, :3])
    kept = ensembles.dropout(S(*[nn.Dropout(0.5)] * 2), 500, 0.5)(torch.ones(1, 64)) > 0
    assert kept.float().mean().item() == pytest.approx(0.25, abs=0.02)  # two masks


@pytest.mark.parametrize(("kind", "dims"), [
    (nn.Dropout1d, 1), (nn.Dropout2d, 2), (nn.Dropout3d, 3), (nn.AlphaDropout, 2), (nn.FeatureAlphaDropout, 2),
    (nn.Dropout, 2),
])  # fmt: skip
def test_layers_of_dropout_drop_what_their_kind_does(kind, dims):
    torch.manual_seed(0)
    x, p = 1 + torch.rand(2, 16, *[5] * dims), 0.3
    net = S(kind(0.9))
    ours = ensembles.dropout(net, 2000, p)(x)[:, 0]
    layer = kind(p)
    torchs = torch.stack([layer(x[:1])[0] for _ in range(2000)])
    assert (ours.mean(0) - torchs.mean(0)).abs().max() < 0.3
    assert ours.std(0).mean().item() == pytest.approx(
        torchs.std(0).mean().item(), rel=0.05
    )
    maps = [z.flatten(2).mean(-1).std(0).mean().item() for z in (ours, torchs)]
    assert maps[0] == pytest.approx(maps[1], rel=0.1)  # whole channels, or elements
    rounded = [z.unique().numel() for z in (ours[:50, 3], torchs[:50, 3])]
    assert rounded[0] == rounded[1]  # the same values
    trained = ensembles.place_dropout(net, lambda: nn.Dropout(p))
    assert type(trained[0]) is kind
    assert trained[0].p == p


def test_a_network_whose_calls_differ_from_pass_to_pass_is_refused():
    class Moody(nn.Module):
        passes = 0

        def __init__(self):
            super().__init__()
            self.body, self.head, self.drop = L(6, 8), L(8, 3), nn.Dropout()

        def forward(self, x):
            self.passes += 1
            h = self.body(x).relu()
            return self.head(
                self.drop(h) if self.passes == 1 else self.drop(self.drop(h))
            )

    with pytest.raises(ValueError, match="in the same way"):
        ensembles.dropout(Moody(), 3)(inputs())


def test_layers_beside_each_other_may_be_called_in_any_order():
    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.keys, self.queries, self.head = L(6, 8), L(6, 8), L(8, 3)

        def forward(self, x):
            q = self.queries(x)
            return self.head(q * self.keys(x))

    for make in (ensembles.dropout, ensembles.masksembles):
        assert make(Projections(), 2)(inputs()).shape == (2, 16, 3)
