"""The official files where they are: read, cut to the embedded sets, and never used when one byte differs."""

import shutil

import make_embedded
import numpy as np
import pytest
from small_files import FOLDER, needs

from uqlab import data
from uqlab.data.readers import FILES, asset

IDX = "mnist/t10k-images-idx3-ubyte.gz", "mnist/t10k-labels-idx1-ubyte.gz"


@pytest.mark.parametrize(
    ("name", "split", "size", "mean", "labels"),
    [
        pytest.param(name, *case, marks=needs(file))
        for name, file, *case in [
            ("mnist", IDX[0], "train", 60000, 0.1307, [5, 0, 4, 1, 9]),
            ("mnist", IDX[0], "test", 10000, 0.1325, [7, 2, 1, 0, 4]),
            ("fashion-mnist", "fashion-mnist", "test", 10000, 0.2868, [9, 2, 1, 1, 6]),
            ("kmnist", "kmnist/kmnist-test-imgs.npz", "test", 10000, 0.1846, [2, 9, 3]),
            (
                FOLDER / "emnist/letters.npz", "emnist/letters.npz", "test", 10400,
                0.1714, [0] * 5,
            ),
            ("cifar10", "cifar-10-batches-bin", "test", 10000, 0.4766, [3, 8, 8, 0]),
            ("cifar100", "cifar-100-binary/test.bin", "test", 10000, 0.4794, [0, 0]),
            (FOLDER / "svhn-1083.npz", "svhn-1083.npz", "test", 1083, 0.4635, [-1]),
        ]
    ],
)  # fmt: skip
def test_real_images(name, split, size, mean, labels):
    d = data.load(name, split)
    assert len(d) == size
    assert d.inputs.mean().item() == pytest.approx(mean, abs=1e-3)
    assert d.labels[: len(labels)].tolist() == labels


@needs("mnist", "fashion-mnist", "kmnist/kmnist-test-imgs.npz", "sounds/fsdd.npz")
def test_embedded_sets_are_made_again_alike():
    minis = ("mnist-mini", "fashion-mini", "kmnist-mini")
    made = {name: make_embedded.mini(name, FOLDER) for name in minis}
    spoken = made["spoken-digits"] = make_embedded.spoken_digits(FOLDER)
    lengths = spoken["lengths_train"]
    made["everyday-sounds"] = make_embedded.everyday_sounds(FOLDER, lengths)
    for name, arrays in made.items():
        kept = asset(name)
        assert list(arrays) == list(kept)
        assert all(np.array_equal(arrays[key], kept[key]) for key in kept)


@needs("SST-2/train.tsv", "SST-2/dev.tsv", "trec/TREC_10.label", "text")
def test_real_texts():
    counts = {"sst2": [428, 444], "agnews": [570] * 4, "trec": [9, 138, 94, 65, 81, 113]}  # fmt: skip
    for name, expected in counts.items():
        assert data.load(name).labels.bincount().tolist() == expected
    dev = data.load("sst2")
    assert dev[0] == ("it 's a charming and often affecting journey .", 1)
    assert data.load("sst2", "train").labels.bincount().tolist() == [29780, 37569]
    assert all(data.load("rte").inputs)


@needs(*IDX)
def test_real_files_are_never_used_when_one_byte_differs(tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    for file in IDX:
        shutil.copyfile(FOLDER / file, tmp_path / file)
    assert len(data.load("mnist", root=tmp_path)) == 10000
    with (tmp_path / file).open("r+b") as labels:
        labels.seek(1000)
        labels.write(bytes([labels.read(1)[0] ^ 1]))
    remote = FILES[file]._replace(urls=["http://127.0.0.1:9/nothing"])
    monkeypatch.setitem(FILES, file, remote)
    with pytest.raises(ValueError, match="is corrupted"):
        data.load("mnist", root=tmp_path)
