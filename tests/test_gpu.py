"""What a GPU computes is what a CPU computes, up to rounding."""

import copy

import pytest
import torch
from every_method import METHODS, asked, table_of_the_book
from networks import NETWORKS
from torch.testing import assert_close

from uqlab import ensembles, gradients, heads, training, uncertainty
from uqlab.analysis import diversity, spectra

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

GPU = "cuda"
PAIRS = [pair for pair, works in table_of_the_book().items() if works]


@pytest.fixture(autouse=True)
def _in_float32():
    """Convolutions round their factors to TF32 unless told not to."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def on_gpu(inputs):
    if isinstance(inputs, torch.Tensor):
        return inputs.to(GPU)
    return {name: values.to(GPU) for name, values in inputs.items()}


def near(there, here):
    assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("network", "method"), PAIRS)
def test_members_say_the_same(network, method):
    x = NETWORKS[network].inputs(8)
    ensemble = METHODS[method].make(NETWORKS[network].make(), x, 3).eval()
    here = asked(ensemble, x)
    near(asked(ensemble.to(GPU), on_gpu(x)), here)


@pytest.mark.parametrize(
    ("network", "method"),
    [
        pair
        for pair in PAIRS
        if pair[0] in {"vit", "resnet", "gru"}
        and pair[1] in {"deep", "lora", "singular_value", "batch_additive", "film"}
    ],
)
def test_members_learn_the_same(network, method):
    x, y = NETWORKS[network].inputs(16), torch.arange(16) % 3
    losses = []
    for where in ("cpu", GPU):
        net = NETWORKS[network].make()
        ensemble = METHODS[method].make(net, x, 3).to(where)
        how = {"epochs": 3, "lr": 0.01, "batch_size": 8, "progress": False}
        losses.append(training.fit(ensemble, x, y, optimizer="adam", **how).loss.cpu())
    assert_close(losses[1], losses[0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("network", ["vit", "resnet", "gru"])
def test_gradient_scores(network):
    net, x = NETWORKS[network].make(), NETWORKS[network].inputs(6)
    moved = copy.deepcopy(net).to(GPU)
    for score in (gradients.exgrad, gradients.gradnorm, gradients.regrad):
        assert_close(score(moved, x.to(GPU)).cpu(), score(net, x), rtol=1e-3, atol=1e-3)


def test_heads_are_scored_pruned_and_fused():
    net, x = NETWORKS["vit"].make(), NETWORKS["vit"].inputs(12)
    y = torch.arange(12) % 3
    moved = copy.deepcopy(net).to(GPU)
    here = heads.taylor_scores(net, x, y)
    assert_close(
        heads.taylor_scores(moved, x.to(GPU), y.to(GPU)).cpu(),
        here,
        rtol=1e-3,
        atol=1e-4,
    )
    pruned = [[heads.prune(n, [(1, h)]) for h in range(2)] for n in (net, moved)]
    near(
        training.predict(heads.fuse(pruned[1]), x),
        training.predict(heads.fuse(pruned[0]), x),
    )


def test_a_circuit_is_the_same():
    net, x = NETWORKS["vit"].make(), NETWORKS["vit"].inputs(24)
    y = torch.arange(24) % 3
    how = {"budget": 1, "batch_size": 8}
    here = heads.greedy_circuit(net, x, y, x.flip(0) * 2, **how)
    there = heads.greedy_circuit(
        copy.deepcopy(net).to(GPU), x.to(GPU), y.to(GPU), x.flip(0).to(GPU) * 2, **how
    )
    assert [*there] == [*here]


def test_weights_and_spectra():
    net = NETWORKS["vit"].make()
    ensemble = ensembles.lora(net, 3, 2, seed=5)
    for p in ensemble.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.3)
    cosines, found = (
        diversity.weight_cosine(ensemble),
        spectra.ensemble_spectra(ensemble, k=2),
    )
    ensemble = ensemble.to(GPU)
    assert_close(diversity.weight_cosine(ensemble).cpu(), cosines, rtol=1e-3, atol=1e-3)
    there = spectra.ensemble_spectra(ensemble, k=2)
    for name, values in found.items():
        assert_close(there[name].values.cpu(), values.values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("correct", [None, "jackknife"])
def test_measures_stay_on_the_device(correct):
    logits = 3 * torch.randn(4, 100, 3, generator=torch.Generator().manual_seed(0))
    here = uncertainty.decompose(logits, correct=correct)
    there = uncertainty.decompose(logits.to(GPU), correct=correct)
    for one, other in zip(there, here, strict=True):
        assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
        assert one.device.type == GPU


def test_saved_on_one_device_and_loaded_on_the_other(tmp_path):
    net, x = NETWORKS["vit"].make(), NETWORKS["vit"].inputs(4)
    ensemble = ensembles.lora(net, 3, 2, seed=5).to(GPU)
    ensemble.save_pretrained(tmp_path)
    back = ensembles.from_pretrained(tmp_path, NETWORKS["vit"].make())
    assert_close(
        training.predict(back, x),
        training.predict(ensemble, x).cpu(),
        rtol=1e-3,
        atol=1e-3,
    )
