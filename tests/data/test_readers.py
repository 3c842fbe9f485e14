"""How each fetched data set is read, on tiny files."""

import gzip
import io
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from same import near
from scipy.io import savemat
from small_files import IMAGES, LABELS, MNIST, below, same

from uqlab import data
from uqlab.data import images
from uqlab.data.readers import FILES


@pytest.fixture
def place(tmp_path, register):
    """Put files below a folder, registered ones as if they were the published ones."""

    def place(files):
        for file, content in files.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_bytes(content)
        register({file: content for file, content in files.items() if file in FILES})
        return tmp_path

    return place


def saved(save, *given, **named):
    """The bytes of what a function saves in a file."""
    buffer = io.BytesIO()
    save(buffer, *given, **named)
    return buffer.getvalue()


def packed(members, kind):
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, content in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


COLOUR = np.random.default_rng(1).integers(0, 256, (5, 3, 32, 32), np.uint8)
EXPECTED = torch.from_numpy(COLOUR).float() / 255


def test_kmnist_as_its_authors_offer_it(place):
    paths = [f"kmnist/kmnist-test-{kind}.npz" for kind in ("imgs", "labels")]
    x, y = (saved(np.savez, arr_0=array) for array in (IMAGES, LABELS))
    root = place(dict(zip(paths, (x, y), strict=True)))
    d = data.load("kmnist", root=root)
    assert torch.equal(d.inputs, torch.from_numpy(IMAGES)[:, None].float() / 255)
    assert d.labels.tolist() == LABELS.tolist()
    place({paths[0]: x[:-9]})
    with pytest.raises(ValueError, match=r"kmnist-test-imgs\.npz cannot be read"):
        data.load("kmnist", root=root)


def test_ambiguous_and_dirty_mnist(place):
    samples = torch.rand(4, 1, 28, 28)
    labels = torch.tensor([[1, 1, 7], [2, 2, 2], [3, 4, 3], [9, 9, 4]])
    tensors = {"samples": samples, "labels": labels}
    files = {
        f"ambiguous-mnist/amnist_{name}.pt": saved(lambda f, t=t: torch.save(t, f))
        for name, t in tensors.items()
    }
    root = place(files | MNIST)
    d = data.load("ambiguous-mnist", root=root)  # the second half; a label is an item
    assert torch.equal(d.inputs, samples[[2, 2, 2, 3, 3, 3]])
    assert d.labels.tolist() == [3, 4, 3, 9, 9, 4]
    near(d.label_probs[0], torch.eye(10)[[3, 4, 3]].mean(0))
    dirty = data.load("dirty-mnist", root=root)
    assert same(dirty[5:], d)
    assert same(dirty[:5], data.load("mnist", root=root))
    assert torch.equal(dirty.label_probs[:5], torch.eye(10)[LABELS.tolist()])


def test_cifar10(place, monkeypatch):
    monkeypatch.setattr(images, "CIFAR_IMAGES", {"train": 5, "test": 2})
    rows = np.concatenate([LABELS[:, None], COLOUR.reshape(5, -1)], axis=1)
    folder = "cifar-10-batches-bin"
    batches = {f"{folder}/data_batch_{k + 1}.bin": rows[k].tobytes() for k in range(5)}
    test = f"{folder}/test_batch.bin"
    batches[test] = rows[3:].tobytes()
    root = place({"cifar-10-binary.tar.gz": packed(batches, "tar")})

    def check():
        train = data.load("cifar10", "train", root=root)
        assert torch.equal(train.inputs, EXPECTED)
        assert train.labels.tolist() == LABELS.tolist()
        assert torch.equal(data.load("cifar10", root=root).inputs, EXPECTED[3:])

    check()
    assert list(below(root)) == ["cifar-10-binary.tar.gz"]  # nothing unpacked
    (root / "cifar-10-binary.tar.gz").unlink()
    place(batches)
    check()
    counts = np.eye(10)[[1, 5]] * 50 + np.eye(10)[[2, 5]] * 50
    place({"cifar10h-counts.npy": saved(np.save, counts)})
    soft = data.load("cifar10", root=root).label_probs
    assert soft[0].tolist() == [0, 0.5, 0.5] + [0] * 7
    assert data.load("cifar10[1-2]", root=root).labels.tolist() == [0]
    (root / "cifar10h-counts.npy").unlink()
    place({test: rows.tobytes()})
    with pytest.raises(ValueError, match=r"test_batch\.bin cannot be read"):
        data.load("cifar10", root=root)


def test_cifar100(place, monkeypatch):
    monkeypatch.setattr(images, "CIFAR_IMAGES", {"train": 5})
    fine = np.array([0, 99, 40, 7, 7], np.uint8)
    columns = [LABELS[:, None], fine[:, None], COLOUR.reshape(5, -1)]
    rows = np.concatenate(columns, axis=1).tobytes()
    archive = packed({"cifar-100-binary/train.bin": rows}, "tar")
    train = data.load("cifar100", "train", root=place({"cifar-100-binary.tar.gz": archive}))  # fmt: skip
    assert torch.equal(train.inputs, EXPECTED)
    names = [train.classes[label] for label in train.labels[:3]]
    assert names == ["apple", "worm", "lamp"]


def test_svhn(place):
    labels = np.array([[10], [1], [2], [9], [10]], np.uint8)
    arrays = {"X": COLOUR.transpose(2, 3, 1, 0), "y": labels}
    d = data.load("svhn", root=place({"svhn/test_32x32.mat": saved(savemat, arrays)}))
    assert torch.equal(d.inputs, EXPECTED)
    assert d.labels.tolist() == [0, 1, 2, 9, 0]  # 10 stands for 0


def test_texts(place):
    table = 'sentence\tlabel\n a "fine" film \t1\nnull\t0\n'
    members = {"SST-2/dev.tsv": table, "SST-2/train.tsv": table}
    questions = "NUM:dist How far is it ?\nHUM:ind Who was Galilée ?\n"
    root = place(
        {
            "sst2/SST-2.zip": packed(members, "zip"),
            "agnews/test.csv": b'"3","Oil, up","It ""rose""."\n"4","Chips","New."\n',
            "trec/TREC_10.label": questions.encode("latin-1"),
        }
    )
    film = data.load("sst2", root=root)
    assert film.inputs == ['a "fine" film', "null"]
    assert film.labels.tolist() == [1, 0]
    assert film.classes == ("negative", "positive")
    news = data.load("agnews", root=root)
    assert news.inputs == ['Oil, up It "rose".', "Chips New."]
    assert [news.classes[label] for label in news.labels] == ["Business", "Sci/Tech"]
    asked = data.load("trec", root=root)
    assert asked.inputs == ["How far is it ?", "Who was Galilée ?"]
    assert [asked.classes[label] for label in asked.labels] == ["NUM", "HUM"]
    (root / "sst2" / "SST-2.zip").unlink()
    place({"SST-2/train.tsv": b"sentence\tlabel\none\t1\n"})  # the unpacked archive
    train = data.load("sst2", "train", root=root)
    assert (train.inputs, train.labels.tolist()) == (["one"], [1])


def test_samples_of_texts(place):
    pairs = "".join(f"one {i}\ttwo\t{'ny'[i % 2]}\n" for i in range(10))
    topics = ("Sports", "Business", "World", "Sci/Tech")
    news = "".join(f"about {i}\t{topics[i % 4]}\n" for i in range(40))
    tables = {
        "rte_all": f"sentence1\tsentence2\tlabel\n{pairs}",
        "agnews_test": f"sentence\tlabel\n{news}",
    }
    files = {f"text/{k}.tsv.gz": gzip.compress(t.encode()) for k, t in tables.items()}
    root = place(files)
    parts = [data.load("rte", split, root=root) for split in ("train", "test")]
    assert [part.labels.bincount().tolist() for part in parts] == [[3, 4], [2, 1]]
    found = sorted(parts[0].inputs + parts[1].inputs)
    assert found == [f"one {i} two" for i in range(10)]
    found = data.load("agnews", root=root)  # the official files are not there
    assert found.classes == ("World", "Sports", "Business", "Sci/Tech")
    for text, label in zip(found.inputs, found.labels, strict=True):
        assert (2, 0, 1, 3)[label] == int(text.split()[1]) % 4
    with pytest.raises(FileNotFoundError, match=r"yelp_1k\.tsv\.gz: it is not fetched"):
        data.load("yelp", root=root)
