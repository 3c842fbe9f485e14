"""Fetched sets of grey images of 28 x 28 pixels: MNIST and its relatives."""

import gzip
import io
import string
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from uqlab.core.extras import extra
from uqlab.data.downloads import fetch, places
from uqlab.data.readers import DIGITS, Items, checked, npz, reading, source, unpacked

CLOTHES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
FASHION = tuple(CLOTHES.split(","))
KUZUSHIJI = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
LETTERS = tuple(string.ascii_uppercase)
SHAPE = (1, 28, 28)


def idx(data: bytes) -> np.ndarray:
    """Return the array of a compressed IDX file of bytes (LeCun et al. 1998).

    Its bytes are 0, 0, 8, rank, big-endian sizes, data.
    """
    data = gzip.decompress(data)
    if data[:3] != b"\x00\x00\x08":
        raise ValueError(f"not an IDX file of unsigned bytes: starts with {data[:4]!r}")
    shape = np.frombuffer(data, ">i4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def idx_names(name, split):
    """Return the files of images and labels, below the root."""
    half = "train" if split == "train" else "t10k"
    return [f"{name}/{half}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]


def idx_pair(images, labels, classes):
    """Return the items of a file of images and a file of labels."""
    with reading(images):
        x = idx(images.read_bytes())[:, None]
    with reading(labels):
        y = idx(labels.read_bytes())
    return checked(images, x, y, SHAPE, classes)


def like_mnist(name, classes, split, root):
    """Read a set that is published as MNIST is."""
    images, labels = (fetch(file, root) for file in idx_names(name, split))
    return idx_pair(images, labels, classes)


# Checksums: tensorflow-datasets url_checksums/mnist.txt; mirrors of torchvision (first,
# last) and tensorflow-datasets
mnist = source(
    "mnist",
    [
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ],
    {
        "train-images-idx3-ubyte.gz": (
            "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
        ),
        "train-labels-idx1-ubyte.gz": (
            "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        "t10k-images-idx3-ubyte.gz": (
            "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        "t10k-labels-idx1-ubyte.gz": (
            "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
        ),
    },
    also=["MNIST/raw", "."],
)(partial(like_mnist, "mnist", DIGITS))

# tensorflow-datasets url_checksums/fashion_mnist.txt; mirrors of torchvision, Keras and
# the authors' repository
source(
    "fashion-mnist",
    [
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/"
        "data/fashion/",
    ],
    {
        "train-images-idx3-ubyte.gz": (
            "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
        ),
        "train-labels-idx1-ubyte.gz": (
            "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
        ),
        "t10k-images-idx3-ubyte.gz": (
            "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
        ),
        "t10k-labels-idx1-ubyte.gz": (
            "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
        ),
    },
    also=["FashionMNIST/raw", "fashion_mnist"],
)(partial(like_mnist, "fashion-mnist", FASHION))


# tensorflow-datasets url_checksums/kmnist.txt
@source(
    "kmnist",
    ["http://codh.rois.ac.jp/kmnist/dataset/kmnist/"],
    {
        "train-images-idx3-ubyte.gz": (
            "sha256:51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4"
        ),
        "train-labels-idx1-ubyte.gz": (
            "sha256:e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17"
        ),
        "t10k-images-idx3-ubyte.gz": (
            "sha256:edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5"
        ),
        "t10k-labels-idx1-ubyte.gz": (
            "sha256:20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c"
        ),
    },
    also=["KMNIST/raw"],
)
def kmnist(split, root):
    """Read the four IDX files, or the authors' .npz files where these are not there."""
    authors = [
        root / f"kmnist/kmnist-{split}-{kind}.npz" for kind in ("imgs", "labels")
    ]
    official = places(idx_names("kmnist", split)[0], root)
    if official or not all(path.is_file() for path in authors):
        return like_mnist("kmnist", KUZUSHIJI, split, root)
    x, y = (npz(path, "arr_0")["arr_0"] for path in authors)
    return checked(authors[0], x[:, None], y, SHAPE, KUZUSHIJI)


# MD5 only: torch-uncertainty datasets/classification/not_mnist.py
@source(
    "notmnist",
    ["https://zenodo.org/record/8274268/files/"],
    {"notMNIST_small.zip": "md5:3de91fb69221d9c2d5c57387101ebc6c"},
    also=["."],
)
def notmnist(split, root):
    """Read the IDX files of davidflanagan/notMNIST-to-MNIST where they are there.

    Else the original archive is the test split.
    """
    images, labels = (root / file for file in idx_names("notmnist", split))
    if images.is_file() and labels.is_file():
        return idx_pair(images, labels, LETTERS[:10])
    if split == "train":
        raise FileNotFoundError(
            "notmnist: no checksum of its training files is published, so they are not "
            f"fetched; put {images.name} and {labels.name} of "
            f"https://github.com/davidflanagan/notMNIST-to-MNIST into {images.parent}"
        )
    path = fetch("notmnist/notMNIST_small.zip", root)
    with reading(path), zipfile.ZipFile(path) as archive:
        images, labels = _pngs(archive)
    return checked(path, images, labels, SHAPE, LETTERS[:10])


def _pngs(archive):
    """Return the images of notMNIST_small/<letter>/<name>.png and their labels."""
    with extra("notebooks"):
        from PIL import Image, UnidentifiedImageError
    x = []
    y = []
    for member in map(Path, sorted(archive.namelist())):
        if member.suffix == ".png" and not member.name.startswith("."):
            # The original set holds two files that are no images.
            with suppress(UnidentifiedImageError):
                image = Image.open(io.BytesIO(archive.read(member.as_posix())))
                x.append(np.asarray(image.convert("L")))
                y.append(LETTERS.index(member.parent.name))
    return np.stack(x)[:, None], np.array(y)


# tensorflow-datasets url_checksums/emnist.txt; the addresses of torchvision (now,
# formerly)
@source(
    "emnist-letters",
    [
        "https://biometrics.nist.gov/cs_links/EMNIST/",
        "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/",
    ],
    {
        "gzip.zip": (
            "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e"
        ),
    },
    also=["EMNIST/raw"],
    folder="emnist",
)
def emnist_letters(split, root):
    """Read EMNIST's letters; images are stored transposed, labels as 1 to 26."""
    kinds = ("images-idx3", "labels-idx1")
    names = [f"gzip/emnist-letters-{split}-{kind}-ubyte.gz" for kind in kinds]
    path, contents = unpacked("emnist/gzip.zip", names, root)
    with reading(path):
        x, y = map(idx, contents)
    x = np.ascontiguousarray(x.transpose(0, 2, 1))[:, None]
    return checked(path, x, y - 1, SHAPE, LETTERS)


# MD5 only: BlackHC/ddu_dirty_mnist dirty_mnist.py
@source(
    "ambiguous-mnist",
    ["https://github.com/BlackHC/ddu_dirty_mnist/releases/download/data-v1.0.0/"],
    {
        "amnist_samples.pt": "md5:4f7865093b1d28e34019847fab917722",
        "amnist_labels.pt": "md5:3bfc055a9f91a76d8d493e8b898c3c95",
    },
    also=["AmbiguousMNIST"],
)
def ambiguous_mnist(split, root):
    """Read 6,000 images with 10 sampled labels each (Mukhoti et al. 2023).

    Every label is an item, with the frequencies of the labels as its soft label.
    """
    files = [f"ambiguous-mnist/amnist_{kind}.pt" for kind in ("samples", "labels")]
    images, labels = (
        torch.load(fetch(file, root), map_location="cpu", weights_only=True)
        for file in files
    )
    x = images.numpy().reshape(-1, *SHAPE)  # [12000, 1, 28, 28]
    y = labels.numpy()  # [12000, 10]
    half = slice(len(x) // 2) if split == "train" else slice(len(x) // 2, None)
    x = x[half].astype(np.float32).clip(0, 1)
    y = y[half]
    copies = y.shape[1]
    frequencies = np.eye(10)[y].mean(1).astype(np.float32)
    return Items(
        x.repeat(copies, axis=0),
        y.reshape(-1),
        DIGITS,
        frequencies.repeat(copies, axis=0),
    )


@source("dirty-mnist")
def dirty_mnist(split, root):
    """Read MNIST followed by Ambiguous-MNIST, neither normalised nor with noise.

    Mukhoti et al. 2023.
    """
    clean = mnist(split, root)
    ambiguous = ambiguous_mnist(split, root)
    certain = np.eye(10, dtype=np.float32)[clean.labels]
    return Items(
        np.concatenate([clean.inputs.astype(np.float32) / 255, ambiguous.inputs]),
        np.concatenate([clean.labels, ambiguous.labels]),
        DIGITS,
        np.concatenate([certain, ambiguous.label_probs]),  # type: ignore
    )
