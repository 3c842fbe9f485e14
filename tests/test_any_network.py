"""Every method on networks that nobody here wrote: it equals its separate members, or is refused in one sentence.

The table of the book (`book/guides/any_network.md`) says which; `tools/what_works.py` writes it.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from every_method import METHODS, check, moved, outcome, table_of_the_book
from networks import NETWORKS, logits
from same import near
from torch import nn
from torch.nn.utils import parametrize

from uqlab import ensembles, gradients, training
from uqlab.analysis import diversity, spectra

WORKS = table_of_the_book()


def test_the_table_has_every_network_and_method():
    assert {*WORKS} == {(network, method) for network in NETWORKS for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_method_is_its_separate_members_or_refused(network, method, tmp_path):
    if WORKS[network, method]:
        check(NETWORKS[network], method, tmp_path)
    else:
        assert outcome(NETWORKS[network], method, tmp_path)


@pytest.mark.parametrize("network", ["gru", "lstm", "torch attention"])
def test_an_ensemble_can_be_moved(network):
    """A recurrent layer makes a new list of its weights when it is moved."""
    x = NETWORKS[network].inputs(4)
    ensemble = METHODS["lora"].make(NETWORKS[network].make(), x, 3).eval()
    before = ensemble(x)
    near(ensemble.to(torch.float64).to(torch.float32)(x), before)


@pytest.mark.parametrize("method", ["lora", "masksembles", "dropout"])
@pytest.mark.parametrize(
    "network", ["torch encoder", "torch encoder, tokens first", "torch attention"]
)
def test_after_training_all_ways_to_ask_agree(network, method):
    """torch evaluates its encoder in one fused call, which would read weights past the members' layers."""
    x, y = NETWORKS[network].inputs(8), torch.arange(8) % 3
    ensemble = METHODS[method].make(NETWORKS[network].make(), x, 3)
    if method != "dropout":
        how = {"epochs": 2, "lr": 0.02, "batch_size": 4, "optimizer": "adam"}
        training.fit(ensemble, x, y, **how, progress=False)
    asked = training.predict(ensemble, x)
    apart = torch.stack([training.predict(ensemble.member(m), x)[0] for m in range(3)])
    near([asked, ensemble(x).detach()], [apart, apart])
    assert (asked[0] - asked[1]).abs().max() > 1e-4


@pytest.mark.parametrize("network", [n for n in NETWORKS if WORKS[n, "lora"]])
def test_spectra_and_diversity_ask_any_layer(network):
    """What a layer says of its members is what the members' own layers hold, by the same names."""
    net, x = NETWORKS[network].make(), NETWORKS[network].inputs(4)
    ensemble = moved(METHODS["lora"].make(net, x, 3))
    names = diversity.layer_names(ensemble, ".")
    apart = ensembles.from_members([ensemble.member(m) for m in range(3)])
    assert names == diversity.layer_names(apart, ".")
    weights = {name: diversity.member_weights(ensemble, name) for name in names}
    for name in names:
        near(weights[name], diversity.member_weights(apart, name))
    plain = ensembles.plain(net)  # of GPT-2 the linear layers
    full = ensembles.weights_of(plain)
    kinds = {n: ensemble.seen[full[n]].kind for n in names if full[n] in ensemble.seen}
    own = next(n for n, kind in kinds.items() if isinstance(kind, ensembles.LowRank))
    found = spectra.ensemble_spectra(ensemble, f"^{own}$", 1)
    near(found[own].values[1], torch.linalg.svdvals(weights[own][1])[:1])


@pytest.mark.parametrize("network", ["batch norm act", "own resnet", "resnet"])
def test_statistics_of_any_batch_norm_are_the_member_s_own(network):
    """In training mode a member is a plain network on its own rows, whatever its norm's class adds."""
    x = NETWORKS[network].inputs(6)
    ensemble = METHODS["film"].make(NETWORKS[network].make(), None, 2)
    plain = [ensemble.member(m).train() for m in range(2)]
    rows = torch.stack([x, 2 * x])
    together = ensemble.train().forward_each(rows)
    near([*together], [logits(net, r) for net, r in zip(plain, rows, strict=True)])
    for m, net in enumerate(plain):
        for name, buffer in ensemble.member(m).named_buffers():
            near(buffer, net.get_buffer(name))


def test_a_parametrized_backbone_keeps_its_class():
    net, x = NETWORKS["weight norm"].make(), NETWORKS["weight norm"].inputs(4)
    before = net(x)
    for method in METHODS:
        if WORKS["weight norm", method]:
            METHODS[method].make(net, x, 3)
    assert torch.equal(net(x), before)
    parts = net.modules()
    assert any(nn.utils.parametrize.is_parametrized(part) for part in parts)


def test_threads_may_use_one_ensemble_whose_layers_run_in_turn():
    ensemble = moved(METHODS["lora"].make(NETWORKS["gru"].make(), None, 3))
    inputs = [NETWORKS["gru"].inputs(16, seed) for seed in range(8)]

    def asked(x):
        with torch.no_grad():
            return ensemble(x)

    expected = [asked(x) for x in inputs]
    assert "loop" in str(ensemble)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            near([*pool.map(asked, inputs)], expected)


def test_a_batch_that_is_counted_on_goes_member_by_member():
    """A network that normalises by its batch's first input would mix members that share a pass."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = self.inner(x)
            return self.outer(torch.tanh(h - h[:1]))

    ensemble, x = ensembles.lora(First(), 3, 2), torch.rand(5, 4)
    near(ensemble(x), torch.stack([ensemble.member(m)(x) for m in range(3)]))


# The networks themselves, and gradient scores on each ----------------------------------

EVERY = pytest.mark.parametrize("name", NETWORKS)


@EVERY
def test_logits_repeat_and_differ_by_input(name):
    network = NETWORKS[name]
    found = logits(network.make(), network.inputs(5)).detach()
    assert found.isfinite().all()
    assert torch.pdist(found, float("inf")).min() > 1e-3
    assert torch.equal(logits(network.make(), network.inputs(5)), found)


class OfOneTensor(nn.Module):
    """A network of transformers that is given token ids alone makes its own mask."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        by_name = {"input_ids": x, "attention_mask": (x != 0).long()}
        return logits(self.inner, by_name)


def of_one_tensor(name, count=2):
    network = NETWORKS[name]
    model, inputs = network.make(), network.inputs(count)
    model.requires_grad_()  # frozen parameters count too
    if isinstance(inputs, dict):
        return OfOneTensor(model).double().eval(), inputs["input_ids"]
    return model.double(), inputs.double() if inputs.is_floating_point() else inputs


def loop(model, inputs, names):
    """Gradients of each log-probability of each input by plain autograd: their norms [layers, inputs, classes]."""
    owned = {name: [] for name in names}
    for key, p in model.named_parameters():
        owned.get(key.rpartition(".")[0], []).append(p)
    rows = []
    for x in inputs:
        for value in logits(model, x[None]).log_softmax(1)[0]:
            for own in owned.values():
                how = {"retain_graph": True, "allow_unused": True}
                found = torch.autograd.grad(value, own, **how)
                flat = [g.flatten() for g in found if g is not None]
                rows.append(torch.cat([*flat, torch.zeros(1).double()]))
    norms = (torch.stack([row.norm(q) for row in rows]) for q in (1, 2))
    return [n.view(len(inputs), 3, len(names)).movedim(2, 0) for n in norms]


@EVERY
def test_gradient_scores_are_those_of_a_loop(name):
    model, inputs = of_one_tensor(name)
    p = logits(model, inputs).detach().softmax(1)
    one, names, _ = gradients.gradient_norms(model, inputs, norm=1)
    two, _, _ = gradients.gradient_norms(model, inputs, norm=2)
    expected = loop(model, inputs, names)
    near([one, two], expected)
    near(gradients.exgrad(model, inputs), (p * expected[0][-1]).sum(1))
    depths = torch.linspace(0, 1, len(names), dtype=torch.float64)
    by_class = torch.tensordot((3 * depths).softmax(0), expected[1], 1)
    found = gradients.regrad(model, inputs, perturbations=0)
    near(found, (p.sqrt() * by_class).sum(1))


@EVERY
def test_gradnorm_is_the_norm_of_a_gradient(name):
    model, inputs = of_one_tensor(name)
    found = gradients.gradnorm(model, inputs)
    linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
    with parametrize.cached():  # a weight that is computed stays the same tensor
        for x, score in zip(inputs, found, strict=True):
            uniform = -logits(model, x[None]).log_softmax(1).mean()
            (gradient,) = torch.autograd.grad(uniform, linear[-1].weight)
            near(score, -gradient.abs().sum())
