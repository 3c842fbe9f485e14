"""How each fetched data set is read, on tiny files."""

import gzip
import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from same import near
from scipy.io import savemat
from small_files import IMAGES, LABELS, MNIST, below, idx, same

from uqlab import data
from uqlab.data import colour_images
from uqlab.data.downloads import FILES


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


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
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


def saved(save, *given):
    """The bytes of what a function saves in a file."""
    buffer = io.BytesIO()
    save(buffer, *given)
    return buffer.getvalue()


def png(image):
    return saved(Image.fromarray(image).save, "png")


COLOUR = np.random.default_rng(1).integers(0, 256, (5, 3, 32, 32), np.uint8)


def test_kmnist_and_notmnist_and_emnist(place):
    root = place(
        {
            "kmnist/kmnist-test-imgs.npz": npz(arr_0=IMAGES),
            "kmnist/kmnist-test-labels.npz": npz(arr_0=LABELS),
            "notmnist/notMNIST_small.zip": packed(
                {
                    "notMNIST_small/B/one.png": png(IMAGES[0]),
                    "notMNIST_small/J/two.png": png(IMAGES[1]),
                    "notMNIST_small/A/bad.png": b"",
                    "notMNIST_small/A/.hidden.png": b"",
                },
                "zip",
            ),
            "emnist/gzip.zip": packed(
                {
                    "gzip/emnist-letters-test-images-idx3-ubyte.gz": idx(
                        IMAGES.transpose(0, 2, 1)
                    ),
                    "gzip/emnist-letters-test-labels-idx1-ubyte.gz": idx(LABELS + 1),
                },
                "zip",
            ),
        }
    )
    expected = torch.from_numpy(IMAGES)[:, None].float() / 255
    for name in ("kmnist", "emnist-letters"):
        d = data.load(name, root=root)
        assert torch.equal(d.inputs, expected)
        assert d.labels.tolist() == LABELS.tolist()
    letters = data.load("notmnist", root=root)
    assert torch.equal(letters.inputs, expected[:2])
    assert [letters.classes[label] for label in letters.labels] == ["B", "J"]
    with pytest.raises(FileNotFoundError, match="notMNIST-to-MNIST into"):
        data.load("notmnist", "train", root=root)
    shutil.rmtree(root / "notmnist")
    place({f"notmnist/{Path(file).name}": content for file, content in MNIST.items()})
    assert torch.equal(data.load("notmnist", root=root).inputs, expected)


def test_ambiguous_and_dirty_mnist(place):
    samples, labels = (
        torch.rand(4, 1, 28, 28),
        torch.tensor([[1, 1, 7], [2, 2, 2], [3, 4, 3], [9, 9, 4]]),
    )
    root = place(
        {
            f"ambiguous-mnist/amnist_{name}.pt": saved(
                lambda file, tensor=tensor: torch.save(tensor, file)
            )
            for name, tensor in {"samples": samples, "labels": labels}.items()
        }
    )
    d = data.load(
        "ambiguous-mnist", root=root
    )  # the second half; every label is an item
    assert torch.equal(d.inputs, samples[[2, 2, 2, 3, 3, 3]])
    assert d.labels.tolist() == [3, 4, 3, 9, 9, 4]
    near(d.label_probs[0], torch.eye(10)[[3, 4, 3]].mean(0))
    place(MNIST)
    dirty = data.load("dirty-mnist", root=root)
    assert same(dirty[5:], d)
    assert same(dirty[:5], data.load("mnist", root=root))
    assert torch.equal(dirty.label_probs[:5], torch.eye(10)[LABELS.tolist()])


def test_cifar(place, monkeypatch):
    monkeypatch.setattr(colour_images, "CIFAR_IMAGES", {"train": 5, "test": 2})
    rows = np.concatenate([LABELS[:, None], COLOUR.reshape(5, -1)], axis=1)
    batches = {
        f"cifar-10-batches-bin/data_batch_{k + 1}.bin": row.tobytes()
        for k, row in enumerate(rows)
    }
    batches["cifar-10-batches-bin/test_batch.bin"] = rows[3:].tobytes()
    root = place(
        {
            "cifar-10-binary.tar.gz": packed(
                {"cifar-10-batches-bin/readme.html": b"", **batches}, "tar"
            )
        }
    )
    expected = torch.from_numpy(COLOUR).float() / 255

    def check():
        train = data.load("cifar10", "train", root=root)
        assert torch.equal(train.inputs, expected)
        assert train.labels.tolist() == LABELS.tolist()
        assert torch.equal(data.load("cifar10", root=root).inputs, expected[3:])

    check()
    assert list(below(root)) == ["cifar-10-binary.tar.gz"]  # nothing unpacked
    (root / "cifar-10-binary.tar.gz").unlink()
    place(batches)
    check()
    counts = (
        np.eye(10, dtype=np.uint8)[[1, 5]] * 50
        + np.eye(10, dtype=np.uint8)[[2, 5]] * 50
    )
    content = saved(np.save, counts.astype(float))
    place({"cifar10h-counts.npy": content})
    assert (
        data.load("cifar10", root=root).label_probs[0].tolist()
        == [0, 0.5, 0.5] + [0] * 7
    )
    assert data.load("cifar10[1-2]", root=root).labels.tolist() == [0]
    place({"cifar10h-counts.npy": content[:-9]})
    with pytest.raises(ValueError, match=r"cifar10h-counts\.npy cannot be read"):
        data.load("cifar10", root=root)
    (root / "cifar10h-counts.npy").unlink()
    place({"cifar-10-batches-bin/test_batch.bin": rows.tobytes()})
    with pytest.raises(
        ValueError, match="cifar-10-batches-bin: test must hold 2 images"
    ):
        data.load("cifar10", root=root)
    place(
        {
            "cifar-10-batches-bin/test_batch.bin": (
                rows[:2] + np.eye(1, 3073, dtype=np.uint8) * 9
            ).tobytes()
        }
    )
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.9, got 10\.\.12"):
        data.load("cifar10", root=root)


def test_cifar100(place, monkeypatch):
    monkeypatch.setattr(colour_images, "CIFAR_IMAGES", {"train": 5, "test": 5})
    fine = np.array([0, 99, 40, 7, 7], np.uint8)
    rows = np.concatenate(
        [LABELS[:, None], fine[:, None], COLOUR.reshape(5, -1)], axis=1
    ).tobytes()
    root = place(
        {"cifar-100-binary.tar.gz": packed({"cifar-100-binary/train.bin": rows}, "tar")}
    )
    train = data.load("cifar100", "train", root=root)
    assert torch.equal(train.inputs, torch.from_numpy(COLOUR).float() / 255)
    assert [train.classes[label] for label in train.labels[:3]] == [
        "apple",
        "worm",
        "lamp",
    ]
    (root / "cifar-100-binary.tar.gz").unlink()
    place({"cifar-100-binary/test.bin": rows})
    assert same(data.load("cifar100", root=root), train)


def test_svhn(place):
    labels = np.array([[10], [1], [2], [9], [10]], np.uint8)
    arrays = {"X": COLOUR.transpose(2, 3, 1, 0), "y": labels}
    root = place({"svhn/test_32x32.mat": saved(savemat, arrays)})
    d = data.load("svhn", root=root)
    assert torch.equal(d.inputs, torch.from_numpy(COLOUR).float() / 255)
    assert d.labels.tolist() == [0, 1, 2, 9, 0]  # 10 stands for 0


def test_texts(place):
    table = 'sentence\tlabel\n a "fine" film \t1\nnext\x85line\t0\n'
    root = place(
        {
            "sst2/SST-2.zip": packed(
                {"SST-2/dev.tsv": table, "SST-2/train.tsv": table}, "zip"
            ),
            "agnews/test.csv": b'"3","Oil, up","It ""rose""."\n"4","Chips","New."\n',
        }
    )
    film = data.load("sst2", root=root)
    assert film.inputs == ['a "fine" film', "next\x85line"]
    assert film.labels.tolist() == [1, 0]
    assert film.classes == ("negative", "positive")
    news = data.load("agnews", root=root)
    assert news.inputs == ['Oil, up It "rose".', "Chips New."]
    assert [news.classes[label] for label in news.labels] == ["Business", "Sci/Tech"]
    (root / "sst2" / "SST-2.zip").unlink()
    place({"SST-2/train.tsv": b"sentence\tlabel\none\t1\n"})  # the unpacked archive
    train = data.load("sst2", "train", root=root)
    assert (train.inputs, train.labels.tolist()) == (["one"], [1])
    place({"SST-2/train.tsv": b"sentence\tlabel\none\tSports\n"})
    with pytest.raises(ValueError, match="SST-2 cannot be read"):
        data.load("sst2", "train", root=root)
    questions = place(
        {
            "trec/TREC_10.label": "NUM:dist How far is it ?\nHUM:ind Who was Galilée ?\n".encode(
                "latin-1"
            )
        }
    )
    asked = data.load("trec", root=questions)
    assert asked.inputs == ["How far is it ?", "Who was Galilée ?"]
    assert [asked.classes[label] for label in asked.labels] == ["NUM", "HUM"]


def test_samples_of_texts(place):
    pairs = "".join(f"one {i}\ttwo\t{'ny'[i % 2]}\n" for i in range(10)).encode()
    news = "".join(
        f"about {i}\t{('Sports', 'Business', 'World', 'Sci/Tech')[i % 4]}\n"
        for i in range(40)
    ).encode()
    tables = {
        "rte_all": b"sentence1\tsentence2\tlabel\n" + pairs,
        "agnews_test": b"sentence\tlabel\n" + news,
    }
    root = place(
        {f"text/{name}.tsv.gz": gzip.compress(table) for name, table in tables.items()}
    )
    parts = [data.load("rte", split, root=root) for split in ("train", "test")]
    assert [part.labels.bincount().tolist() for part in parts] == [[3, 4], [2, 1]]
    assert sorted(parts[0].inputs + parts[1].inputs) == [
        f"one {i} two" for i in range(10)
    ]
    found = data.load("agnews", root=root)  # the official files are not there
    assert found.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert found.labels.bincount().tolist() == [3] * 4
    for text, label in zip(found.inputs, found.labels, strict=True):
        assert (2, 0, 1, 3)[label] == int(text.split()[1]) % 4
    with pytest.raises(FileNotFoundError, match=r"yelp_1k\.tsv\.gz: it is not fetched"):
        data.load("yelp", root=root)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b"no IDX"),
        idx(IMAGES)[:-9],
        gzip.compress(gzip.decompress(idx(IMAGES))[:-1]),
    ],
    ids=[
        "empty",
        "no gzip",
        "no IDX",
        "cut off",
        "a byte short",
    ],  # not of the contents: gzip writes the time
)
def test_broken_files_without_a_checksum_are_refused(content, place):
    images, labels = (f"notmnist/{Path(file).name}" for file in MNIST)
    root = place({images: content, labels: idx(LABELS)})
    with pytest.raises(ValueError, match=f"{images} cannot be read"):
        data.load("notmnist", root=root)


def test_images_and_labels_that_do_not_fit_are_refused(place):
    images, labels = (f"notmnist/{Path(file).name}" for file in MNIST)
    for x, y, message in (
        (IMAGES, LABELS[:4], "one for each label"),
        (IMAGES[:, :9], LABELS, "must be uint8 of shape"),
    ):
        root = place({images: idx(x), labels: idx(y)})
        with pytest.raises(ValueError, match=message):
            data.load("notmnist", root=root)
