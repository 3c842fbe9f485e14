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
LEARNED = [
    (network, method)
    for network in ("vit", "resnet", "gru")
    for method in ("deep", "lora", "singular_value", "batch_additive", "film")
]


@pytest.fixture(autouse=True)
def _in_float32():
    """Convolutions round their factors to TF32 unless told not to."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def on_gpu(thing):
    if isinstance(thing, dict):
        return {name: values.to(GPU) for name, values in thing.items()}
    return copy.deepcopy(thing).to(GPU)


def near(there, here, tolerance=1e-3):
    assert_close(there.cpu(), here, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("network", "method"), PAIRS)
def test_members_say_the_same(network, method):
    x = NETWORKS[network].inputs(8)
    ensemble = METHODS[method].make(NETWORKS[network].make(), x, 3).eval()
    here = asked(ensemble, x)
    near(asked(ensemble.to(GPU), on_gpu(x)), here)


@pytest.mark.parametrize(("network", "method"), set(LEARNED) & {*PAIRS})
def test_members_learn_the_same(network, method):
    x, y = NETWORKS[network].inputs(16), torch.arange(16) % 3
    how = {"epochs": 3, "lr": 0.01, "batch_size": 8, "progress": False}
    here, there = (
        training.fit(
            METHODS[method].make(NETWORKS[network].make(), x, 3).to(where),
            *(x, y),
            optimizer="adam",
            **how,
        ).loss
        for where in ("cpu", GPU)
    )
    near(there, here.cpu(), 2e-3)


@pytest.mark.parametrize("network", ["vit", "resnet", "gru"])
def test_gradient_scores(network):
    net, x = NETWORKS[network].make(), NETWORKS[network].inputs(6)
    for score in (gradients.exgrad, gradients.gradnorm, gradients.regrad):
        near(score(on_gpu(net), x.to(GPU)), score(net, x))


def test_heads_are_scored_pruned_fused_and_searched():
    net, x = NETWORKS["vit"].make(), NETWORKS["vit"].inputs(24)
    y, found = torch.arange(24) % 3, []
    for move in (copy.deepcopy, on_gpu):
        moved, inputs, labels = move(net), move(x), move(y)
        scores = heads.taylor_scores(moved, inputs, labels)
        fused = heads.fuse([heads.prune(moved, [(1, h)]) for h in range(2)])
        how = {"budget": 1, "batch_size": 8, "progress": False}
        circuit = heads.greedy_circuit(moved, inputs, labels, inputs.flip(0) * 2, **how)
        found.append((scores, training.predict(fused, x), [*circuit]))
    near(found[1][0], found[0][0])
    near(found[1][1], found[0][1])
    assert found[1][2] == found[0][2]


def test_weights_spectra_and_folders(tmp_path):
    net, x = NETWORKS["vit"].make(), NETWORKS["vit"].inputs(4)
    ensemble = ensembles.lora(net, 3, 2, seed=5)
    for p in ensemble.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.3)
    there = on_gpu(ensemble)
    near(diversity.weight_cosine(there), diversity.weight_cosine(ensemble))
    found, moved = (
        spectra.ensemble_spectra(each, k=2, progress=False)
        for each in (ensemble, there)
    )
    for name, values in found.items():
        near(moved[name].values, values.values)
    there.save_pretrained(tmp_path)
    back = ensembles.from_pretrained(tmp_path, NETWORKS["vit"].make())
    near(training.predict(there, x), training.predict(back, x))


@pytest.mark.parametrize("correct", [None, "jackknife"])
def test_measures_stay_on_the_device(correct):
    logits = 3 * torch.randn(4, 100, 3, generator=torch.Generator().manual_seed(0))
    here = uncertainty.decompose(logits, correct=correct)
    there = uncertainty.decompose(logits.to(GPU), correct=correct)
    assert {part.device.type for part in there} == {GPU}
    for one, other in zip(there, here, strict=True):
        near(one, other, 1e-4)
