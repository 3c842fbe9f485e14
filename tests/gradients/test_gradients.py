"""Gradient scores: closed forms, plain autograd for every kind of layer, and limits."""

import copy
import itertools

import pytest
import torch
from same import near, unchanged
from small_networks import bert, vit
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


class Branching(nn.Module):
    """Its Python code depends on the values of its inputs, so vmap cannot run it."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        rows = [self.norm(row) * (2 if row.sum() > 0 else 1) for row in x]
        return self.head(torch.stack(rows))


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, 2, padding=1, groups=2, bias=False),
        nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, padding="same", dilation=2, padding_mode="circular"),
        nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 12, 1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 3),
    )  # fmt: skip


def conv1d_net():
    return nn.Sequential(
        nn.Conv1d(2, 24, 5, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(96, 4)
    )


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
    "conv1d": (conv1d_net, (2, 9)),
    "vit": (vit, (1, 8, 8)),
    "unusual": (Unusual, (4, 6)),
    "tied": (Tied, (6,)),
    "branching": (Branching, (6,)),
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


def head_norms(model, inputs, q):
    """(||[h; 1]||_q, p) of a Sequential that ends in a linear layer."""
    h = model[:-1](inputs).detach()
    return torch.cat([h, torch.ones_like(h[:, :1])], 1).norm(q, 1), model(
        inputs
    ).detach().softmax(1)


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


def test_text_models():
    torch.manual_seed(0)
    tokens = torch.tensor([[3, 5, 3, 0, 0], [1, 2, 7, 7, 7], [4, 9, 1, 4, 4]])
    for model, norm in itertools.product(
        (TiedText().double(), bert().double()), (1, 2)
    ):
        found, names, _ = gradients.gradient_norms(model, tokens, norm=norm)
        expected = loop(model, tokens, norm)
        assert set(names) == set(expected)
        near(found, [expected[layer] for layer in names])
    assert names[:3] == [
        f"bert.embeddings.{part}_embeddings"
        for part in ("word", "token_type", "position")
    ]
    assert names[-2:] == ["bert.pooler.dense", "classifier"]
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


def test_float32_and_large_maps():
    torch.manual_seed(0)
    model, inputs = (
        models.wide_resnet(10, 1, classes=3, channels=1).eval(),
        torch.rand(2, 1, 16, 16),
    )
    for norm in (1, 2):
        found, names, _ = gradients.gradient_norms(model, inputs, norm=norm)
        expected = loop(model, inputs, norm)
        near(found, [expected[layer] for layer in names])


def test_closed_forms_of_the_last_layer():
    model, inputs = make("mlp", 9)
    for q in (1, 2):
        size, p = head_norms(model, inputs, q)
        expected = (
            2 * (1 - p)
            if q == 1
            else (1 - 2 * p + p.square().sum(1, keepdim=True)).sqrt()
        )
        norms, names, _ = gradients.gradient_norms(model, inputs, norm=q, layers="last")
        assert names == ["7"]
        near(norms[0], size[:, None] * expected)
    one, two = head_norms(model, inputs, 1)[0], head_norms(model, inputs, 2)[0]
    near(gradients.exgrad(model, inputs), 2 * one * (p * (1 - p)).sum(1))
    fisher = gradients.regrad(
        model, inputs, reduction="B", layers="last", perturbations=0
    ).square()
    near(fisher, two.square() * (1 - p.square().sum(1)))
    weightless = one - 1
    near(gradients.gradnorm(model, inputs), -weightless * (p - 1 / 4).abs().sum(1))


def test_shares_of_layers_sum_to_one():
    model, inputs = make("conv", 1)
    shares = gradients.layer_shares(*gradients.gradient_norms(model, inputs)[::2])
    near(shares.sum(0), torch.ones_like(shares[0]))


@pytest.mark.parametrize("norm", [1, 2])
def test_scores_are_their_definitions(norm):
    model, inputs = make("conv1d", 3)
    noise = perturbed(inputs, 2, 0.1, seed=5)
    norms = torch.stack(
        [
            loop(model, inputs, norm, noise)[n]
            for n in gradients.gradient_norms(model, inputs)[1]
        ]
    )
    log_p = model(inputs).detach().log_softmax(1)
    p, layers = log_p.exp(), len(norms)
    settings = {"norm": norm, "perturbations": 2, "sigma": 0.1, "seed": 5}
    for depth in (0.0, 3.0):
        w = (depth * torch.arange(layers, dtype=p.dtype) / (layers - 1)).exp()
        n = torch.tensordot(w / w.sum(), norms, 1)
        weights = {
            "p": p,
            "sqrt_p": p.sqrt(),
            "uniform": torch.full_like(p, 1 / 4),
            "predicted": p == p.amax(1)[:, None],
        }
        expected = {
            ("A", name): (weight * n).sum(1) for name, weight in weights.items()
        }
        expected["B", "sqrt_p"] = (p * n.square()).sum(1).sqrt()
        expected["C", "sqrt_p"] = (p * n.sqrt()).sum(1)
        for (reduction, weight), value in expected.items():
            switches = {"reduction": reduction, "class_weight": weight, "depth": depth}
            near(gradients.regrad(model, inputs, **settings, **switches), value)
            near(gradients.reduce_norms(norms, log_p, **switches), value)
    plain, _, log_p = gradients.gradient_norms(model, inputs, norm=norm)
    expected = gradients.reduce_norms(plain, log_p, class_weight="p", depth=0.0)
    near(gradients.exgrad(model, inputs, layers="all", norm=norm), expected)


@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_no_perturbation_batches_and_order(name):
    model, inputs = make(name, 7)
    plain = gradients.regrad(model, inputs, perturbations=0)
    near(gradients.regrad(model, inputs, sigma=0.0), plain)
    assert not torch.allclose(gradients.regrad(model, inputs), plain, rtol=1e-6)
    whole = gradients.regrad(model, inputs, seed=2)
    for batch_size in (1, 3):
        near(gradients.regrad(model, inputs, seed=2, batch_size=batch_size), whole)
    # A score depends on its input and the seed alone.
    near(gradients.regrad(model, inputs[[4, 2]], seed=2), whole[[4, 2]])
    assert not torch.allclose(gradients.regrad(model, inputs, seed=3), whole, rtol=1e-6)


def test_limits():
    model, inputs = make("mlp", 6)
    scores = {
        "exgrad": lambda m: gradients.exgrad(m, inputs, layers="all"),
        **{r: lambda m, r=r: gradients.regrad(m, inputs, reduction=r) for r in "ABC"},
    }
    uniform = lambda m: gradients.regrad(m, inputs, class_weight="uniform")  # noqa: E731
    sharp = copy.deepcopy(model)
    for p in sharp[-1].parameters():
        p.data.mul_(5000)  # one-hot to far below the resolution of 1 - p
    for score in scores.values():
        assert (score(sharp) < 1e-4 * score(model)).all()
    assert (uniform(sharp) > uniform(model)).all()
    shifted = copy.deepcopy(model)
    shifted[-1].bias.data.add_(7.0)  # log p does not change
    for score in scores.values():
        near(score(shifted), score(model))


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


def test_a_thousand_classes_by_the_closed_form():
    torch.manual_seed(0)
    model, inputs = models.mlp(8, (16,), 1000), torch.randn(64, 8)
    model.eval()
    size, p = head_norms(model, inputs, 1)
    near(gradients.exgrad(model, inputs), 2 * size * (p * (1 - p)).sum(1))
    norms = gradients.gradient_norms(model, inputs, layers="last", perturbations=2)[0]
    every = gradients.gradient_norms(model, inputs[:2], perturbations=2)[0]
    near(norms[:, :2], every[-1:])


def test_layers_are_chosen_by_name():
    model, inputs = make("mlp")
    every, names, _ = gradients.gradient_norms(model, inputs)
    for layers, chosen in (
        ("all", names),
        ("last", names[-1:]),
        (r"^[14]$", ["1", "4"]),
        (["7", "1"], ["1", "7"]),
    ):
        norms, found, _ = gradients.gradient_norms(model, inputs, layers=layers)
        assert found == chosen
        near(norms, every[[names.index(name) for name in chosen]])


def test_a_module_with_two_names_stays_as_it_was():
    """Its parameters are still parameters, of the same bits."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model.insert(2, model[0])
    with unchanged(model):
        gradients.gradient_norms(model, torch.rand(3, 4), layers="all")
    assert isinstance(model[0].weight, nn.Parameter)
    assert len(list(model.parameters())) == 4
