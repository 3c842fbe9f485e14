"""Gradient scores: closed forms, plain autograd for every kind of layer, and limits."""

import copy

import pytest
import torch
from same import near, unchanged
from torch import nn

from uqlab import gradients, models


class Unusual(nn.Module):
    """A linear layer that is called twice on tokens, an in-place ReLU on a view, a bare parameter, an unused layer."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.RMSNorm(6), nn.Linear(6, 3)
        self.gain, self.unused = nn.Parameter(torch.rand(6)), nn.Linear(2, 2)

    def forward(self, x):
        h = self.once(self.norm(self.twice(x.tanh()))).relu_()
        return self.head((self.twice(h) * self.gain).mean(1))


class Tied(nn.Module):
    """Two layers with the same weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.b(self.a(x).tanh()).tanh())


class TiedText(nn.Module):
    """Predicts a token: the embedding's weight is also the last layer, which has no module of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(12, 6, padding_idx=0), nn.Linear(6, 6)

    def forward(self, tokens):
        return self.hidden(self.embed(tokens).mean(1)).tanh() @ self.embed.weight.T


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)
    )  # fmt: skip


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


# name -> (model, shape of an input)
CASES = {
    "mlp": (lambda: models.mlp(16, (12, 8), 4), (1, 4, 4)),
    "conv": (conv_net, (2, 8, 8)),
    "unusual": (Unusual, (4, 6)),
    "tied": (Tied, (6,)),
    "attention": (encoder, (4, 8)),
}


def make(name, samples=4):
    torch.manual_seed(0)
    build, shape = CASES[name]
    model = build().double().eval()
    for p in model.parameters():
        p.data.add_(
            0.2 * torch.randn_like(p)
        )  # embeddings and norms start at zeros and ones
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
    return model, torch.randn(samples, *shape, dtype=torch.float64)


def loop(model, inputs, norm, noise=None):
    """Norms by autograd, for each sample and each class: {layer: [samples, classes]}."""
    layers = {}
    for name, p in model.named_parameters():
        layers.setdefault(name.rpartition(".")[0], []).append(p)
    rows = []
    for x in inputs:
        output = model(x[None] if noise is None else x + noise)
        log_p = getattr(output, "logits", output).log_softmax(1).mean(0)
        for value in log_p:
            for own in layers.values():
                found = torch.autograd.grad(
                    value, own, retain_graph=True, allow_unused=True
                )
                flat = [g.flatten() for g in found if g is not None] or [
                    torch.zeros(1, dtype=log_p.dtype)
                ]
                rows.append(torch.cat(flat).norm(norm))
    stacked = torch.stack(rows).unflatten(0, (len(inputs), -1, len(layers)))
    return dict(zip(layers, stacked.movedim(2, 0), strict=True))


def perturbed(inputs, count, sigma, seed=0):
    noise = torch.randn(
        count,
        *inputs.shape[1:],
        generator=torch.Generator().manual_seed(seed),
        dtype=inputs.dtype,
    )
    return torch.cat([torch.zeros_like(noise[:1]), sigma * noise])


class Sign(torch.autograd.Function):
    """A sign whose slope is one, by what torch.func does not run."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, slope):
        return slope


class ByAutograd(nn.Module):
    """A packed LSTM, which asks for the lengths' memory, and a function of one's own."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        length = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, length, batch_first=True)
        return self.head(Sign.apply(self.lstm(packed)[1][0][-1]))


def test_what_torch_func_does_not_run_has_the_norms_of_a_loop():
    model, x = ByAutograd(), torch.randn(3, 4, 6)
    found, names, _ = gradients.gradient_norms(model, x)
    expected = loop(model, x, 2)
    near(found, [expected[layer] for layer in names])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of jit
def test_a_compiled_model_is_the_one_inside():
    model, x = models.mlp(6, (8,), 3).eval(), torch.randn(4, 6)
    compiled = torch.compile(model, backend="eager")
    near(gradients.regrad(compiled, x), gradients.regrad(model, x))


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_norms_are_those_of_a_loop_over_samples_and_classes(name, norm):
    model, inputs = make(name)
    for count in (0, 2):
        noise = perturbed(inputs, count, 0.3) if count else None
        found, names, log_p = gradients.gradient_norms(
            model, inputs, norm=norm, perturbations=count, sigma=0.3
        )
        expected = loop(model, inputs, norm, noise)
        near(found, [expected[layer] for layer in names])
        assert all(
            expected[layer].abs().max() == 0 for layer in set(expected) - set(names)
        )  # not on the path
        logits = model(inputs)
        near(log_p, getattr(logits, "logits", logits).detach().log_softmax(1))


class Mixture(nn.Module):
    """Each input goes to one of two experts, so no expert sees the whole batch."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        first = x[:, 0] > 0
        h = torch.empty_like(x[:, :5])
        for chosen, expert in zip((first, ~first), self.experts, strict=True):
            h[chosen] = expert(x[chosen]).tanh()
        return self.head(h)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("build", [Mixture, encoder])
def test_whatever_a_layer_sees_and_whether_it_is_frozen(build, frozen):
    torch.manual_seed(0)
    model = build().double().eval()
    shape = (6,) if build is Mixture else (4, 8)
    inputs = torch.randn(6, *shape).double()
    inputs[[0, -1]] = inputs[[0, -1]].abs()  # those that are compared: one expert
    expected = loop(model, inputs, 2)
    model.requires_grad_(not frozen)
    found, names, _ = gradients.gradient_norms(model, inputs)
    near(found, [expected[layer] for layer in names])
    on_path = {layer for layer, norms in expected.items() if norms[-1].any()}
    assert on_path <= set(names)


@pytest.mark.parametrize("norm", [1, 2])
def test_a_text_model_whose_embedding_is_its_classifier(norm):
    torch.manual_seed(0)
    tokens = torch.tensor([[3, 5, 3, 0, 0], [1, 2, 7, 7, 7], [4, 9, 1, 4, 4]])
    model = TiedText().double()
    found, names, _ = gradients.gradient_norms(model, tokens, norm=norm)
    assert names == ["embed", "hidden"]
    expected = loop(model, tokens, norm)
    near(found, [expected[layer] for layer in names])
    with pytest.raises(ValueError, match="cannot be perturbed"):
        gradients.regrad(model, tokens)


class Kinds(nn.Module):
    """Takes numbers and, by another name, a kind of each sample."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 6), nn.Linear(6, 3)

    def forward(self, x, kind):
        return self.head((x + self.embed(kind)).tanh())


def test_tensors_by_name():
    torch.manual_seed(0)
    model, kind = Kinds().double(), torch.tensor([0, 3, 3, 1])
    x = torch.randn(4, 6, dtype=torch.float64)
    by_name = {"x": x, "kind": kind}
    noise = perturbed(x, 3, 0.2)
    for count in (0, 3):
        found, names, _ = gradients.gradient_norms(
            model, by_name, perturbations=count, sigma=0.2
        )
        assert names == ["embed", "head"]
        for i, (one, its) in enumerate(zip(x, kind, strict=True)):
            copies = one + noise[: 1 + count]
            log_p = model(copies, its.expand(1 + count)).log_softmax(1).mean(0)
            for layer, norms in zip((model.embed, model.head), found, strict=True):
                for c in range(3):
                    own = torch.autograd.grad(
                        log_p[c], [*layer.parameters()], retain_graph=True
                    )
                    near(norms[i, c], torch.cat([g.flatten() for g in own]).norm())
    p = model(**by_name).softmax(1)
    h = (x + model.embed(kind)).tanh().abs().sum(1)
    near(gradients.gradnorm(model, by_name), -h * (p - 1 / 3).abs().sum(1))


@pytest.mark.parametrize("norm", [1, 2])
def test_scores_are_their_definitions(norm):
    model, inputs = make("mlp", 3)
    noise = perturbed(inputs, 2, 0.1, seed=5)
    settings = {"norm": norm, "perturbations": 2, "sigma": 0.1, "seed": 5}
    norms = torch.stack([*loop(model, inputs, norm, noise).values()])
    log_p = model(inputs).detach().log_softmax(1)
    p = log_p.exp()
    weights = {
        "p": p,
        "sqrt_p": p.sqrt(),
        "uniform": torch.full_like(p, 1 / 4),
        "predicted": p == p.amax(1)[:, None],
    }
    for depth in (0.0, 3.0):
        w = (depth * torch.arange(3, dtype=p.dtype) / 2).exp()
        n = torch.tensordot(w / w.sum(), norms, 1)
        for name, weight in weights.items():
            switches = {"class_weight": name, "depth": depth}
            expected = (weight * n).sum(1)
            near(gradients.regrad(model, inputs, **settings, **switches), expected)
            near(gradients.reduce_norms(norms, log_p, **switches), expected)
        for reduction, expected in {
            "A": (p.sqrt() * n).sum(1),
            "B": (p * n.square()).sum(1).sqrt(),
            "C": (p * n.sqrt()).sum(1),
        }.items():
            found = gradients.reduce_norms(
                norms, log_p, reduction=reduction, depth=depth
            )
            near(found, expected)
    shares = (p * norms).sum(2)
    found = gradients.layer_shares(norms, log_p, class_weight="p")
    near(found, shares / shares.sum(0))
    plain, names, _ = gradients.gradient_norms(model, inputs, norm=norm)
    near(
        gradients.exgrad(model, inputs, layers="all", norm=norm),
        (p * plain).sum(2).mean(0),
    )
    last, name, _ = gradients.gradient_norms(model, inputs, norm=norm, layers="last")
    assert name == names[-1:]
    near(last, plain[-1:])


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_a_score_depends_on_its_input_and_the_seed_alone(name):
    model, inputs = make(name, 7)
    plain = gradients.regrad(model, inputs, perturbations=0)
    near(gradients.regrad(model, inputs, sigma=0.0), plain)
    whole = gradients.regrad(model, inputs, seed=2)
    near(gradients.regrad(model, inputs[[4, 2]], seed=2), whole[[4, 2]])
    for other in (plain, gradients.regrad(model, inputs, seed=3)):
        assert not torch.allclose(other, whole, rtol=1e-6)


def test_digits_kept_near_certainty():
    for gap in (5.0, 20.0, 60.0):  # 1 - p from 1e-2 to 1e-26
        head = nn.Linear(3, 3).double()
        head.weight.data.zero_()
        head.bias.data = torch.tensor([gap, 0.0, -1.0], dtype=torch.float64)
        norms, _, log_p = gradients.gradient_norms(
            head, torch.ones(1, 3, dtype=torch.float64), norm=1
        )
        rest = log_p[0, 1:].exp().sum()
        near(norms[0, 0, 0], 4 * 2 * rest)  # ||[h; 1]||_1 = 4


def test_a_module_with_two_names_stays_as_it_was():
    """Its parameters are still parameters, of the same bits."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model.insert(2, model[0])
    with unchanged(model):
        gradients.gradient_norms(model, torch.rand(3, 4), layers="all")
    assert isinstance(model[0].weight, nn.Parameter)
    assert len(list(model.parameters())) == 4


def test_the_model_is_left_as_it_was():
    model, inputs = make("conv")
    model.train()
    model[0].eval()
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    modes = [part.training for part in model.modules()]
    rng = torch.get_rng_state()
    with unchanged(model):
        with torch.no_grad():
            switched = gradients.regrad(model, inputs)
        with pytest.raises(RuntimeError, match="to have 2 channels"):
            gradients.regrad(model, inputs[:, :1])
    assert [part.training for part in model.modules()] == modes
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        "0.weight"
    ]
    assert torch.equal(model[4].weight.grad, torch.ones_like(model[4].weight))
    assert sum(p.grad is not None for p in model.parameters()) == 1
    assert not any(
        part._forward_hooks or part._forward_pre_hooks for part in model.modules()
    )
    assert torch.equal(rng, torch.get_rng_state())
    near(gradients.regrad(copy.deepcopy(model).eval(), inputs), switched)


class Returns(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(4, 3).double(), change

    def forward(self, x):
        return self.change(self.linear(x))


INPUTS = torch.linspace(0, 1, 20).double().reshape(5, 4)


def test_samples_that_meet_in_a_batch_are_scored_alone():
    model = Returns(lambda y: y - 3 * y.mean(0))
    alone = Returns(lambda y: -2 * y)
    alone.load_state_dict(model.state_dict())
    near(gradients.exgrad(model, INPUTS), gradients.exgrad(alone, INPUTS))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda y: y[:, 0], ValueError, "must return logits"),
        (lambda y: y[:, :1], ValueError, "C >= 2"),
        (lambda y: y[None], ValueError, r"ensemble\.member"),
        (lambda y: {"logits": y.tolist()}, TypeError, "must return logits"),
        (lambda y: y.detach(), ValueError, "no gradient path"),
        (lambda y: y * torch.nan, ValueError, "must be finite"),
    ],
)
def test_models_that_are_refused(change, error, match):
    with pytest.raises(error, match=match):
        gradients.regrad(Returns(change), INPUTS)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": INPUTS / 0}, "must be finite"),
        ({"inputs": INPUTS[:0]}, "at least one"),
        ({"norm": 3}, "norm must be"),
        ({"class_weight": "log_p"}, "class_weight must be"),
        ({"perturbations": -1}, "perturbations must be at least 0"),
        ({"sigma": float("nan")}, "sigma must be in"),
        ({"sigma": 1e300}, "too large"),
        ({"depth": float("inf")}, "depth must be in"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        gradients.regrad(nn.Linear(4, 3).double(), **{"inputs": INPUTS} | settings)


def test_gradnorm_needs_a_linear_layer():
    with pytest.raises(ValueError, match="whose output is the logits"):
        gradients.gradnorm(Returns(lambda y: 2 * y), INPUTS)
