"""The official files where they are: read, cut to the embedded sets, and never used when one byte differs."""

import shutil

import make_embedded
import numpy as np
import pytest
import torch
from same import near
from small_files import FOLDER, needs

from uqlab import data
from uqlab.data.downloads import FILES, Remote
from uqlab.data.readers import asset


def idx_names(name, *parts):
    return [
        f"{name}/{p}-{k}-ubyte.gz"
        for p in parts
        for k in ("images-idx3", "labels-idx1")
    ]


@pytest.mark.parametrize(
    ("name", "split", "size", "mean", "labels"),
    [
        pytest.param(*case, marks=needs(*files))
        for *case, files in [
            (
                "mnist",
                "train",
                60000,
                0.1307,
                [5, 0, 4, 1, 9],
                idx_names("mnist", "train"),
            ),
            (
                "mnist",
                "test",
                10000,
                0.1325,
                [7, 2, 1, 0, 4],
                idx_names("mnist", "t10k"),
            ),
            (
                "fashion-mnist",
                "train",
                60000,
                0.2860,
                [9, 0, 0, 3, 0],
                idx_names("fashion-mnist", "train"),
            ),
            (
                "fashion-mnist",
                "test",
                10000,
                0.2868,
                [9, 2, 1, 1, 6],
                idx_names("fashion-mnist", "t10k"),
            ),
            (
                "kmnist",
                "test",
                10000,
                0.1846,
                [2, 9, 3, 8, 3],
                ["kmnist/kmnist-test-imgs.npz"],
            ),
            (
                "notmnist",
                "test",
                10000,
                0.4266,
                [3, 5, 9, 2, 7],
                idx_names("notmnist", "t10k"),
            ),
            (
                FOLDER / "emnist/letters.npz",
                "test",
                10400,
                0.1714,
                [0] * 5,
                ["emnist/letters.npz"],
            ),
        ]
    ],
)
def test_real_grey_images(name, split, size, mean, labels):
    d = data.load(name, split)
    assert d.inputs.shape == (size, 1, 28, 28)
    assert d.inputs.mean().item() == pytest.approx(mean, abs=6e-5)
    assert d.labels[:5].tolist() == labels
    counts = d.labels.bincount()
    assert name == "mnist" or (counts == size // len(d.classes)).all()


@needs(
    "mnist/train-images-idx3-ubyte.gz",
    "fashion-mnist/train-images-idx3-ubyte.gz",
    "kmnist/kmnist-test-imgs.npz",
)
def test_minis_are_made_again_alike():
    for name in ("mnist-mini", "fashion-mini", "kmnist-mini"):
        arrays, kept = make_embedded.mini(name, FOLDER), asset(name)
        assert list(arrays) == list(kept)
        assert all(np.array_equal(arrays[key], kept[key]) for key in kept)


@needs("sounds/fsdd.npz", "sounds/esc10.npz")
def test_recordings_are_made_again_alike():
    spoken = make_embedded.spoken_digits(FOLDER)
    everyday = make_embedded.everyday_sounds(FOLDER, spoken["lengths_train"])
    for name, arrays in {"spoken-digits": spoken, "everyday-sounds": everyday}.items():
        kept = asset(name)
        assert list(arrays) == list(kept)
        assert all(np.array_equal(arrays[key], kept[key]) for key in kept)


@needs("cifar-10-batches-bin/test_batch.bin", "cifar10h-counts.npy")
def test_real_cifar10():
    d = data.load("cifar10")
    assert d.inputs.shape == (10000, 3, 32, 32)
    assert torch.allclose(
        d.inputs.mean((0, 2, 3)), torch.tensor([0.4942, 0.4851, 0.4504]), atol=1e-4
    )
    assert [d.classes[label] for label in d.labels[:4]] == [
        "cat",
        "ship",
        "ship",
        "airplane",
    ]
    near(d.label_probs.sum(1), torch.ones(10000))
    assert (d.label_probs.argmax(1) == d.labels).float().mean().item() == pytest.approx(
        0.9921, abs=2e-3
    )
    assert (
        data.load("cifar10[0,1,8,9]").inputs.shape[0] < 4000
    )  # people were not always sure


@needs("cifar-10-batches-bin/data_batch_5.bin")
def test_real_cifar10_train():
    d = data.load("cifar10", "train", limit=5000)
    assert torch.allclose(
        d.inputs.mean((0, 2, 3)), torch.tensor([0.4914, 0.4822, 0.4465]), atol=0.01
    )
    assert d.labels.bincount().min() > 400


@needs("cifar-100-binary/test.bin")
def test_real_cifar100():
    d = data.load("cifar100")
    assert torch.allclose(
        d.inputs.mean((0, 2, 3)), torch.tensor([0.5088, 0.4874, 0.4419]), atol=1e-4
    )
    assert (d.labels.bincount() == 100).all()
    assert len(d.classes) == 100


@needs("svhn-1083.npz")
def test_real_svhn():
    d = data.load(FOLDER / "svhn-1083.npz")  # a user's own images without labels
    assert d.inputs.shape == (1083, 3, 32, 32)
    assert torch.allclose(
        d.inputs.mean((0, 2, 3)), torch.tensor([0.4524, 0.4564, 0.4817]), atol=1e-4
    )
    assert d.labels.unique().tolist() == [-1]


@needs("SST-2/train.tsv", "SST-2/dev.tsv")
def test_real_sst2():
    train = data.load("sst2", "train")
    assert train.labels.bincount().tolist() == [29780, 37569]
    dev = data.load("sst2")
    assert len(dev) == 872
    assert dev[0] == ("it 's a charming and often affecting journey .", 1)


@needs(
    "trec/TREC_10.label",
    *(f"text/{name}.tsv.gz" for name in ("agnews_test", "subj", "imdb_1k", "rte_all")),
)
def test_real_texts():
    parts = [data.load("agnews", split) for split in ("train", "test")]
    assert [part.labels.bincount().tolist() for part in parts] == [
        [1330] * 4,
        [570] * 4,
    ]
    assert data.load("trec").labels.bincount().tolist() == [
        9,
        138,
        94,
        65,
        81,
        113,
    ]  # ABBR, DESC, ENTY, HUM, LOC, NUM
    for name, least in (("subj", 2999), ("imdb", 299), ("rte", 829)):
        found = data.load(name)
        assert len(found) >= least
        assert all(found.inputs)


@needs(*idx_names("mnist", "t10k"))
def test_real_files_are_never_used_when_one_byte_differs(tmp_path, monkeypatch):
    for file in idx_names("mnist", "t10k"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(FOLDER / file, tmp_path / file)
        monkeypatch.setitem(FILES, file, Remote(FILES[file].checksum, ()))  # no mirror
    assert len(data.load("mnist", root=tmp_path)) == 10000
    with (tmp_path / file).open("r+b") as labels:
        labels.seek(1000)
        labels.write(bytes([labels.read(1)[0] ^ 1]))
    with pytest.raises(ValueError, match="corrupted file, not used"):
        data.load("mnist", root=tmp_path)
