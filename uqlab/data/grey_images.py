"""Fetched sets of grey images of 28 x 28 pixels: MNIST and its relatives."""

import gzip
import io
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from uqlab.data.downloads import fetch, places
from uqlab.data.readers import DIGITS, checked, npz, reading, source, unpacked

FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
KUZUSHIJI = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
SHAPE = (1, 28, 28)


def idx(data: bytes) -> np.ndarray:
    """The array of a compressed IDX file of bytes: 0, 0, 8, rank, big-endian sizes, data (LeCun et al. 1998)."""
    data = gzip.decompress(data)
    if data[:3] != b"\x00\x00\x08":
        raise ValueError(f"not an IDX file of unsigned bytes: starts with {data[:4]!r}")
    shape = np.frombuffer(data, ">i4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def idx_names(name, split):
    part = "train" if split == "train" else "t10k"
    return f"{name}/{part}-images-idx3-ubyte.gz", f"{name}/{part}-labels-idx1-ubyte.gz"


def idx_pair(images: Path, labels: Path, classes):
    with reading(images):
        x = idx(images.read_bytes())[:, None]
    with reading(labels):
        y = idx(labels.read_bytes())
    return checked(images, x, y, SHAPE, classes)


def like_mnist(name, classes, split, root):
    images, labels = idx_names(name, split)
    return idx_pair(fetch(images, root), fetch(labels, root), classes)


# checksums: tensorflow-datasets url_checksums/mnist.txt; mirrors of torchvision (first, last) and tensorflow-datasets
mnist = source(
    "mnist",
    [
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ],
    {
        "train-images-idx3-ubyte.gz": "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    also=["MNIST/raw", "."],
)(partial(like_mnist, "mnist", DIGITS))

# tensorflow-datasets url_checksums/fashion_mnist.txt; mirrors of torchvision, Keras and the authors' repository
source(
    "fashion-mnist",
    [
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ],
    {
        "train-images-idx3-ubyte.gz": "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    also=["FashionMNIST/raw", "fashion_mnist"],
)(partial(like_mnist, "fashion-mnist", FASHION))


@source(  # tensorflow-datasets url_checksums/kmnist.txt
    "kmnist",
    ["http://codh.rois.ac.jp/kmnist/dataset/kmnist/"],
    {
        "train-images-idx3-ubyte.gz": "sha256:51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
        "train-labels-idx1-ubyte.gz": "sha256:e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
        "t10k-images-idx3-ubyte.gz": "sha256:edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
        "t10k-labels-idx1-ubyte.gz": "sha256:20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
    },
    also=["KMNIST/raw"],
)
def kmnist(split, root):
    """The four IDX files, or the authors' .npz files where these are not there."""
    paths = [
        root / "kmnist" / f"kmnist-{split}-{kind}.npz" for kind in ("imgs", "labels")
    ]
    if not places(idx_names("kmnist", split)[0], root) and all(
        path.is_file() for path in paths
    ):
        x, y = (npz(path, "arr_0")["arr_0"] for path in paths)
        return checked(paths[0], x[:, None], y, SHAPE, KUZUSHIJI)
    return like_mnist("kmnist", KUZUSHIJI, split, root)


@source(  # MD5 only: torch-uncertainty datasets/classification/not_mnist.py
    "notmnist",
    ["https://zenodo.org/record/8274268/files/"],
    {"notMNIST_small.zip": "md5:3de91fb69221d9c2d5c57387101ebc6c"},
    also=["."],
)
def notmnist(split, root):
    """The IDX files of davidflanagan/notMNIST-to-MNIST where they are there, else the original archive (test only)."""
    images, labels = (root / file for file in idx_names("notmnist", split))
    if images.is_file() and labels.is_file():
        return idx_pair(images, labels, LETTERS[:10])
    if split == "train":
        raise FileNotFoundError(
            f"notmnist: no checksum of its training files is published, so they are not fetched; put {images.name} and "
            f"{labels.name} of https://github.com/davidflanagan/notMNIST-to-MNIST into {images.parent}"
        )
    path = fetch("notmnist/notMNIST_small.zip", root)
    x, y = [], []
    with reading(path), zipfile.ZipFile(path) as archive:
        for member in sorted(archive.namelist()):  # notMNIST_small/<letter>/<name>.png
            folder, _, file = member.rpartition("/")
            if (
                file.endswith(".png")
                and not file.startswith(".")
                and folder[-1:] in LETTERS[:10]
            ):
                with suppress(
                    UnidentifiedImageError
                ):  # the original set holds two files that are not images
                    x.append(
                        np.asarray(
                            Image.open(io.BytesIO(archive.read(member))).convert("L")
                        )
                    )
                    y.append(LETTERS.index(folder[-1]))
        images = np.stack(x)[:, None]
    return checked(path, images, np.array(y), SHAPE, LETTERS[:10])


@source(  # tensorflow-datasets url_checksums/emnist.txt; the addresses of torchvision (now, formerly)
    "emnist-letters",
    [
        "https://biometrics.nist.gov/cs_links/EMNIST/",
        "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/",
    ],
    {
        "gzip.zip": "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e"
    },
    also=["EMNIST/raw"],
    folder="emnist",
)
def emnist_letters(split, root):
    names = [
        f"gzip/emnist-letters-{split}-{kind}-ubyte.gz"
        for kind in ("images-idx3", "labels-idx1")
    ]
    path, contents = unpacked("emnist/gzip.zip", names, root)
    with reading(path):
        x, y = (idx(content) for content in contents)
    x = np.ascontiguousarray(x.transpose(0, 2, 1))[:, None]  # stored transposed
    return checked(path, x, y.astype(np.int64) - 1, SHAPE, LETTERS)  # stored as 1..26


@source(  # MD5 only: BlackHC/ddu_dirty_mnist dirty_mnist.py
    "ambiguous-mnist",
    ["https://github.com/BlackHC/ddu_dirty_mnist/releases/download/data-v1.0.0/"],
    {
        "amnist_samples.pt": "md5:4f7865093b1d28e34019847fab917722",
        "amnist_labels.pt": "md5:3bfc055a9f91a76d8d493e8b898c3c95",
    },
    also=["AmbiguousMNIST"],
)
def ambiguous_mnist(split, root):
    """In each split 6,000 images with 10 sampled labels each, every label an item (Mukhoti et al. 2023)."""
    samples, targets = (
        fetch(f"ambiguous-mnist/amnist_{kind}.pt", root)
        for kind in ("samples", "labels")
    )
    x, y = (
        torch.load(path, map_location="cpu", weights_only=True)
        for path in (samples, targets)
    )
    x, y = (
        x.numpy().reshape(-1, *SHAPE),
        y.numpy().astype(np.int64),
    )  # [12000, 1, 28, 28], [12000, 10]
    half = slice(len(x) // 2) if split == "train" else slice(len(x) // 2, None)
    x, y = x[half].astype(np.float32).clip(0, 1), y[half]
    probs = np.stack([(y == label).mean(1) for label in range(10)], axis=1).astype(
        np.float32
    )  # label frequencies
    copies = y.shape[1]
    return x.repeat(copies, axis=0), y.reshape(-1), DIGITS, probs.repeat(copies, axis=0)


@source("dirty-mnist")
def dirty_mnist(split, root):
    """MNIST followed by Ambiguous-MNIST (Mukhoti et al. 2023), neither normalised nor with noise."""
    x, y, classes, _ = mnist(split, root)
    ambiguous, sampled, _, probs = ambiguous_mnist(split, root)
    x = np.concatenate([x.astype(np.float32) / 255, ambiguous])
    return (
        x,
        np.concatenate([y, sampled]),
        classes,
        np.concatenate([np.eye(10, dtype=np.float32)[y], probs]),
    )
