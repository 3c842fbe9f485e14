"""Exported ensembles: the file gives the logits of `predict`, and needs neither uqlab nor torch."""

import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from networks import NETWORKS
from same import near
from small_networks import cnn, mlp, moved, vit
from torch import nn

from uqlab import ensembles, heads, models, training

MEMBERS = 2


def lora_vit():
    network = models.vit(8, 4, width=16, layers=1, heads=2, classes=3)
    return moved(ensembles.lora(network, MEMBERS, rank=2))


def hydra():
    """Members with different numbers of heads."""
    pruned = [heads.prune(vit(), cut) for cut in ([(0, 0)], [(0, 1), (1, 0)])]
    return heads.fuse(pruned).eval()


ENSEMBLES = {
    "deep, mlp": lambda: ensembles.deep(
        lambda: models.mlp(64, (12,), 3, dropout=0.1), MEMBERS
    ),
    "deep, small_cnn": lambda: ensembles.deep(
        lambda: models.small_cnn(3, width=4), MEMBERS
    ),
    "lora, models.vit": lora_vit,
    "lora, transformers": lambda: moved(ensembles.lora(vit(1), MEMBERS, rank=2)),
    "lora, convolutions": lambda: moved(ensembles.lora(cnn(), MEMBERS, rank=2)),
    "singular values": lambda: moved(ensembles.singular_value(vit(1), MEMBERS)),
    "batch": lambda: moved(ensembles.batch(vit(1), MEMBERS)),
    "hydra": hydra,
}


def drawn(count, seed=3):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def run(path, inputs):
    """The file's logits of a tensor, or of tensors by name."""
    given = {"inputs": inputs} if isinstance(inputs, torch.Tensor) else inputs
    session = onnxruntime.InferenceSession(path)
    assert [value.name for value in session.get_outputs()] == ["logits"]
    arrays = {name: t.numpy() for name, t in given.items()}
    return torch.as_tensor(session.run(["logits"], arrays)[0])


@pytest.mark.parametrize("name", ENSEMBLES)
def test_onnx_gives_the_logits_of_predict(name, tmp_path):
    ensemble, path = ENSEMBLES[name](), tmp_path / "model.onnx"
    ensembles.export(ensemble, path, drawn(4))
    for count in (1, 4, 7):  # the batch axis is free
        x = drawn(count, seed=5)
        expected = training.predict(ensemble, x)
        near(run(path, x), expected)
    assert expected.std(0).max() > 1e-3  # members differ, or the test would see nothing


def test_names_of_inputs_and_free_axes(tmp_path):
    network, path = NETWORKS["bert"], tmp_path / "bert.onnx"
    ensemble = ensembles.from_members([network.make()])
    ensembles.export(ensemble, path, network.inputs(3))
    session = onnxruntime.InferenceSession(path)
    taken = {value.name: value.shape for value in session.get_inputs()}
    assert list(taken) == ["input_ids", "attention_mask"]
    for batch, length in taken.values():
        assert not batch.isdecimal()  # the name of a free axis
        assert length == 7
    x = network.inputs(5, seed=9)
    with torch.no_grad():
        near(run(path, x), ensemble(x))


ALONE = """import sys
sys.modules.update(dict.fromkeys(("torch", "uqlab", "onnx", "onnxscript")))  # not installed
import numpy, onnxruntime
logits = onnxruntime.InferenceSession(sys.argv[1]).run(None, {"inputs": numpy.load(sys.argv[2])})[0]
numpy.save(sys.argv[3], logits)
"""


def test_the_file_runs_without_torch(tmp_path):
    ensemble, x = ENSEMBLES["deep, mlp"](), drawn(6)
    files = [str(tmp_path / name) for name in ("model.onnx", "x.npy", "logits.npy")]
    ensembles.export(ensemble, files[0], drawn(2))
    np.save(files[1], x.numpy())
    subprocess.run([sys.executable, "-c", ALONE, *files], check=True)
    expected = training.predict(ensemble, x).numpy()
    near(np.load(files[2]), expected)


OTHERS = {
    "masksembles": lambda: moved(ensembles.masksembles(mlp(), MEMBERS)),
    "film": lambda: moved(ensembles.film(cnn(), MEMBERS)),
    "packed": lambda: ensembles.packed(mlp(), MEMBERS).eval(),
    "mimo": lambda: moved(ensembles.mimo(mlp(), MEMBERS)),
    "double": lambda: ensembles.deep(lambda: mlp().double(), MEMBERS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_program_of_torch_gives_the_logits_of_predict(name, tmp_path):
    ensemble, path = OTHERS[name](), tmp_path / "model.pt2"
    ensembles.export(ensemble, path, drawn(3))
    x = drawn(5).to(next(ensemble.parameters()).dtype)
    logits = torch.export.load(path).module()(x)
    near(logits, training.predict(ensemble, x))


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_shared_weight_is_stored_once(suffix, tmp_path):
    """LoRA on one layer: the wide one beside it is in the file once."""
    wide = [nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 20)]
    network = nn.Sequential(nn.Flatten(), *wide, nn.ReLU(), nn.Linear(20, 3))
    ensemble = ensembles.lora(network, 8, rank=2, target="3")
    path = tmp_path / f"model{suffix}"
    ensembles.export(ensemble, path, drawn(2))
    once, each = 64 * 500, 500 * 20 + 20 * 3
    size = path.stat().st_size
    assert 4 * (once + 8 * each) < size < 4 * (2 * once + 8 * each) + 100_000
