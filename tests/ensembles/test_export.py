"""Exported ensembles: the file gives the logits of `predict`, and needs neither uqlab nor torch."""

import subprocess
import sys
import zipfile

import numpy as np
import onnxruntime
import pytest
import torch
from networks import NETWORKS
from same import near, unchanged
from small_networks import cnn, images, mlp, moved, vit
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


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_one_row_leaves_the_batch_axis_free(suffix, tmp_path):
    ensemble, path = ENSEMBLES["deep, mlp"](), tmp_path / f"one{suffix}"
    ensembles.export(ensemble, path, drawn(1))
    x = drawn(5)
    load = torch.export.load
    logits = run(path, x) if suffix == ".onnx" else load(path).module()(x)
    near(logits, training.predict(ensemble, x))


def test_a_batch_that_is_counted_stays_that_of_the_example(tmp_path):
    network, path = NETWORKS["torch decoder"], tmp_path / "fixed.onnx"
    ensemble = ensembles.from_members([network.make()])
    ensembles.export(ensemble, path, network.inputs(3))
    assert onnxruntime.InferenceSession(path).get_inputs()[0].shape[0] == 3
    x = network.inputs(3, seed=9)
    expected = training.predict(ensemble, x)
    near(run(path, x), expected)


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


def test_the_file_holds_no_data_and_no_paths_and_the_ensemble_stays(tmp_path):
    ensemble, path = ENSEMBLES["lora, models.vit"](), tmp_path / "model.pt2"
    ensemble.train()
    with unchanged(ensemble):
        ensembles.export(ensemble, path, drawn(3))
    assert ensemble.training
    assert all(p.grad is None for p in ensemble.parameters())
    content = b"".join(
        map(zipfile.ZipFile(path).read, zipfile.ZipFile(path).namelist())
    )
    assert drawn(3).numpy().tobytes() not in content
    assert models.__file__.encode() not in content
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]


class Random(nn.Module):
    """It drops in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(nn.functional.dropout(x.flatten(1), 0.5, training=True))


class Branches(Random):
    """What it does depends on a value, which no graph can hold."""

    def forward(self, x):
        return self.head(x.flatten(1)) * (2 if float(x.sum()) > 0 else 3)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("kind", [Random, Branches])
def test_networks_that_no_file_can_hold_are_refused(kind, suffix, tmp_path):
    path = tmp_path / f"model{suffix}"
    path.write_text("what was there before")
    ensemble = ensembles.from_members([kind(), kind()])
    with pytest.raises(ValueError):  # noqa: PT011
        ensembles.export(ensemble, path, drawn(3))
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_refused(tmp_path, monkeypatch):
    ensemble, x = ENSEMBLES["deep, mlp"](), drawn(3)
    drop = ensembles.dropout(mlp(), 2)
    with pytest.raises(TypeError):
        ensembles.export(drop, tmp_path / "a.onnx", x)
    with pytest.raises(TypeError):
        ensembles.export(mlp(), tmp_path / "a.onnx", x)
    for name in ("a.bin", "a", "a.onnx.gz"):
        with pytest.raises(ValueError):  # noqa: PT011
            ensembles.export(ensemble, tmp_path / name, x)
    with pytest.raises(ValueError):  # noqa: PT011
        ensembles.export(ensemble, tmp_path / "a.onnx", x[:0])
    with pytest.raises(RuntimeError):  # torch's own, of the layer
        ensembles.export(ensemble, tmp_path / "a.onnx", torch.rand(3, 5))
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as if not installed
    with pytest.raises(ImportError, match=r"'\.\[onnx\]'"):
        ensembles.export(ensemble, tmp_path / "a.onnx", x)
    assert list(tmp_path.iterdir()) == []


def test_one_draw_of_mc_dropout_is_exported_by_its_members(tmp_path):
    drop, x = ensembles.dropout(mlp(), 3, 0.3), images(5)[0]
    members = ensembles.from_members([drop.member(m) for m in range(drop.members)])
    ensembles.export(members, tmp_path / "a.pt2", x[:3])
    logits = torch.export.load(tmp_path / "a.pt2").module()(x)
    near(logits, training.predict(drop, x))


@pytest.mark.release
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", ["deep", "lora"])
def test_networks_as_people_have_them(method, name, tmp_path):
    network, path = NETWORKS[name], tmp_path / "model.onnx"
    if (method, name) == ("lora", "logistic regression"):
        pytest.skip("LoRA has no layer there before the classifier")
    if method == "lora":
        ensemble = moved(ensembles.lora(network.make(), MEMBERS, rank=2))
    else:
        ensemble = ensembles.from_members([network.make() for _ in range(MEMBERS)])
        moved(ensemble)
    ensembles.export(ensemble, path, network.inputs(3))
    x = network.inputs(3, seed=9)
    with torch.no_grad():
        expected = ensemble(x)
    assert expected.std(0).max() > 1e-4
    near(run(path, x), expected)


@pytest.mark.release
def test_a_lora_ensemble_of_an_imagenet_network(tmp_path):
    lite0 = models.pretrained("efficientnet-lite0", classes=10)
    ensemble = ensembles.lora(lite0, members=4, rank=8)
    photographs = torch.rand(6, 3, 96, 96)
    training.fit(
        ensemble, photographs, torch.arange(6), epochs=2, lr=1e-3, optimizer="adamw"
    )  # fmt: skip
    path = tmp_path / "lite0.onnx"
    ensembles.export(ensemble, path, photographs[:2])
    x = torch.rand(5, 3, 96, 96)
    expected = training.predict(ensemble, x)
    near(run(path, x), expected)
