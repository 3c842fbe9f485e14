"""How each fetched data set is read.

A file with a published checksum is verified at every use. Files without one (unpacked archives, subsets as .npz) are
read only from the folder, when the verified file is not there, and checked for shape and labels. Each reader takes
`(split, root)` and returns `(inputs, labels, classes, label_probs)`: images uint8 (or float32 in [0, 1]) [N, C, H, W]
or a list of texts, labels int64 [N] (-1: none).
"""

import csv
import gzip
import io
import math
import tarfile
import warnings
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from scipy.io import loadmat

from uqlab.data.downloads import fetch, places

DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
KUZUSHIJI = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
CIFAR100 = tuple(_CIFAR100.split())
CIFAR_IMAGES = {"train": 50_000, "test": 10_000}
NEWS = ("World", "Sports", "Business", "Sci/Tech")


@contextmanager
def reading(path: Path):
    """Turn whatever goes wrong while a file is read into one ValueError that names it."""
    try:
        yield
    except (ValueError, TypeError, KeyError, OSError, EOFError, zlib.error, zipfile.BadZipFile, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}. Delete or replace it.") from error


def _checked(path, images, labels, shape, classes):
    """Images and labels if they fit each other and the set, else a ValueError that names the file."""
    if images.shape[1:] != shape or images.dtype != np.uint8:
        raise ValueError(f"{path}: images must be uint8 of shape {shape}, got {images.dtype} {images.shape[1:]}")
    if labels.shape != images.shape[:1] or len(images) == 0:
        raise ValueError(f"{path}: {len(images)} images do not go with labels of shape {labels.shape}")
    labels = labels.astype(np.int64)
    if labels.min() < 0 or labels.max() >= len(classes):
        raise ValueError(f"{path}: labels must lie in 0..{len(classes) - 1}, got {labels.min()}..{labels.max()}")
    return images, labels, classes, None


def _idx(data: bytes) -> np.ndarray:
    """An uncompressed IDX file of unsigned bytes: 0, 0, 8, rank, big-endian sizes, data (LeCun et al. 1998)."""
    if data[:3] != b"\x00\x00\x08":
        raise ValueError(f"not an IDX file of unsigned bytes: starts with {data[:4]!r}")
    shape = np.frombuffer(data, ">i4", data[3], 4).tolist()
    if len(data) != 4 + 4 * len(shape) + math.prod(shape):
        raise ValueError(f"{len(data)} bytes do not hold an array of shape {shape}")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _idx_pair(images: Path, labels: Path, classes):
    """A set stored as MNIST is."""
    with reading(images):
        x = _idx(gzip.decompress(images.read_bytes()))[:, None]
    with reading(labels):
        y = _idx(gzip.decompress(labels.read_bytes()))
    return _checked(images, x, y, (1, 28, 28), classes)


def _idx_names(name, split):
    part = "train" if split == "train" else "t10k"
    return f"{name}/{part}-images-idx3-ubyte.gz", f"{name}/{part}-labels-idx1-ubyte.gz"


def npz(path: Path, *keys: str, optional: bool = False) -> dict[str, np.ndarray]:
    """The arrays of an .npz by these keys, in this order; all of them must be there unless they are optional."""
    with reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in keys if not optional or key in arrays}


def _mnist_like(name, classes):
    def read(split, root):
        images, labels = _idx_names(name, split)
        return _idx_pair(fetch(images, root), fetch(labels, root), classes)

    return read


def _kmnist(split, root):
    paths = [root / "kmnist" / f"kmnist-{split}-{kind}.npz" for kind in ("imgs", "labels")]
    if not places(_idx_names("kmnist", split)[0], root) and all(path.is_file() for path in paths):
        x, y = (npz(path, "arr_0")["arr_0"] for path in paths)
        return _checked(paths[0], x[:, None], y, (1, 28, 28), KUZUSHIJI)
    return _mnist_like("kmnist", KUZUSHIJI)(split, root)


def _notmnist(split, root):
    images, labels = (root / file for file in _idx_names("notmnist", split))
    if images.is_file() and labels.is_file():  # davidflanagan/notMNIST-to-MNIST
        return _idx_pair(images, labels, LETTERS[:10])
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
            if file.endswith(".png") and not file.startswith(".") and folder[-1:] in LETTERS[:10]:
                try:
                    x.append(np.asarray(Image.open(io.BytesIO(archive.read(member))).convert("L")))
                    y.append(LETTERS.index(folder[-1]))
                except UnidentifiedImageError:  # the original set holds two files that are not images
                    continue
        images = np.stack(x)[:, None]
    return _checked(path, images, np.array(y), (1, 28, 28), LETTERS[:10])


def _emnist_letters(split, root):
    subset = sorted((root / "emnist").glob(f"emnist_letters_{split}*.npz"))  # images upright
    if subset and not places("emnist/gzip.zip", root):
        x, y = npz(subset[0], "x", "y").values()
        return _checked(subset[0], x[:, None], y.astype(np.int64) - 1, (1, 28, 28), LETTERS)
    path = fetch("emnist/gzip.zip", root)
    with reading(path), zipfile.ZipFile(path) as archive:
        names = (f"gzip/emnist-letters-{split}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
        x, y = (_idx(gzip.decompress(archive.read(name))) for name in names)
    x = np.ascontiguousarray(x.transpose(0, 2, 1))[:, None]  # stored transposed
    return _checked(path, x, y.astype(np.int64) - 1, (1, 28, 28), LETTERS)  # stored as 1..26


def _ambiguous_mnist(split, root):
    """Per split 6,000 images with 10 sampled labels each, every label an item (Mukhoti et al. 2023)."""
    samples, targets = (fetch(f"ambiguous-mnist/amnist_{kind}.pt", root) for kind in ("samples", "labels"))
    x, y = (torch.load(path, map_location="cpu", weights_only=True) for path in (samples, targets))
    x, y = x.numpy().reshape(-1, 1, 28, 28), y.numpy().astype(np.int64)  # [12000, 1, 28, 28], [12000, 10]
    half = slice(len(x) // 2) if split == "train" else slice(len(x) // 2, None)
    x, y = x[half].astype(np.float32).clip(0, 1), y[half]
    probs = np.stack([(y == label).mean(1) for label in range(10)], axis=1).astype(np.float32)  # label frequencies
    copies = y.shape[1]
    return x.repeat(copies, axis=0), y.reshape(-1), DIGITS, probs.repeat(copies, axis=0)


def _dirty_mnist(split, root):
    """MNIST followed by Ambiguous-MNIST (Mukhoti et al. 2023); neither normalised nor noised here."""
    x, y, classes, _ = _mnist_like("mnist", DIGITS)(split, root)
    ambiguous, sampled, _, probs = _ambiguous_mnist(split, root)
    x = np.concatenate([x.astype(np.float32) / 255, ambiguous])
    return x, np.concatenate([y, sampled]), classes, np.concatenate([np.eye(10, dtype=np.float32)[y], probs])


def _cifar_rows(archive, members, header, split, root):
    """Rows uint8 [N, header + 3072] of binary batches, from the verified archive or else the unpacked folder."""
    unpacked = [root / member for member in members]
    if not places(archive, root) and all(path.is_file() for path in unpacked):
        path, data = unpacked[0].parent, b"".join(file.read_bytes() for file in unpacked)
    else:
        path = fetch(archive, root)
        with reading(path), tarfile.open(path, "r|gz") as tar:  # one pass, nothing is written
            batches = {entry.name: tar.extractfile(entry).read() for entry in tar if entry.name in members}  # type: ignore
            data = b"".join(batches[member] for member in members)
    images, width = CIFAR_IMAGES[split], header + 3072
    if len(data) != images * width:
        raise ValueError(f"{path}: {split} must hold {images} images, {images * width} bytes, got {len(data)}")
    return path, np.frombuffer(data, np.uint8).reshape(images, width)


def _cifar10(split, root):
    names = [f"data_batch_{k}" for k in range(1, 6)] if split == "train" else ["test_batch"]
    members = [f"cifar-10-batches-bin/{name}.bin" for name in names]
    path, rows = _cifar_rows("cifar-10-binary.tar.gz", members, 1, split, root)
    x, y, classes, _ = _checked(path, rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0], (3, 32, 32), CIFAR10)
    # CIFAR-10H, Peterson et al. 2019: judgements per test image and class; as published, or compressed
    humans = [root / name for name in ("cifar10h-counts.npy", "cifar10h_counts.npz")]
    human = next((path for path in humans if path.is_file()), None)
    if split == "train" or human is None:
        return x, y, classes, None
    with reading(human):
        counts = npz(human, "counts")["counts"] if human.suffix == ".npz" else np.load(human, allow_pickle=False)
    if counts.shape != (len(x), 10) or (counts < 0).any() or not (counts.sum(1) > 0).all():
        raise ValueError(
            f"{human}: counts must have shape {(len(x), 10)}, no empty row and none below 0, got {counts.shape}"
        )
    return x, y, classes, (counts / counts.sum(1, keepdims=True)).astype(np.float32)


def _cifar100(split, root):
    """Fine labels."""
    archive, member, plain = "cifar-100-binary.tar.gz", f"cifar-100-binary/{split}.bin", root / f"cifar100-{split}.npz"
    if plain.is_file() and not (root / member).is_file() and not places(archive, root):
        x, y = npz(plain, "x", "y").values()
        return _checked(plain, np.moveaxis(x, -1, 1), y, (3, 32, 32), CIFAR100)
    path, rows = _cifar_rows(archive, [member], 2, split, root)  # coarse label, fine label, pixels
    return _checked(path, rows[:, 2:].reshape(-1, 3, 32, 32), rows[:, 1], (3, 32, 32), CIFAR100)


def _svhn(split, root):
    part = root / "svhn-1083.npz"
    if part.is_file() and not places(f"svhn/{split}_32x32.mat", root):
        warnings.warn(
            f"svhn: {part} holds the first 1083 training images without labels (they are -1); for the whole "
            f"{split} split put {split}_32x32.mat into {root / 'svhn'}",
            stacklevel=3,
        )
        x = npz(part, "x")["x"]
        x, _, classes, _ = _checked(part, np.moveaxis(x, -1, 1), np.zeros(len(x)), (3, 32, 32), DIGITS)
        return x, np.full(len(x), -1), classes, None
    path = fetch(f"svhn/{split}_32x32.mat", root)
    with reading(path):
        arrays = loadmat(path)
        x, y = arrays["X"].transpose(3, 2, 0, 1), arrays["y"].reshape(-1) % 10  # label 10 stands for the digit 0
    return _checked(path, x, y, (3, 32, 32), DIGITS)


def _sst2(split, root):
    """GLUE's training split; its development split serves as test, since the labels of its own are not public."""
    parts = ("train", "heldout") if split == "train" else ("dev",)
    local = [root / "text" / f"sst2_{part}.tsv.gz" for part in parts]
    if not places("sst2/SST-2.zip", root) and all(path.is_file() for path in local):
        return _texts(local[0], [row for path in local for row in _tsv_gz(path)], ("0", "1"), ("negative", "positive"))
    path = fetch("sst2/SST-2.zip", root)
    with reading(path), zipfile.ZipFile(path) as archive:
        rows = _tsv(archive.read("SST-2/train.tsv" if split == "train" else "SST-2/dev.tsv"))
    return _texts(path, rows, ("0", "1"), ("negative", "positive"))


def _agnews(split, root):
    local = root / "text" / f"agnews_{split}.tsv.gz"  # descriptions only
    if local.is_file() and not places(f"agnews/{split}.csv", root):
        return _texts(local, _tsv_gz(local), NEWS, NEWS)
    path = fetch(f"agnews/{split}.csv", root)
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        rows = [(" ".join(fields), label) for label, *fields in csv.reader(file)]  # title and description
    return _texts(path, rows, ("1", "2", "3", "4"), NEWS)


def _tsv(data: bytes):
    """Rows of a tab-separated table without quoting, less its header."""
    return [line.split("\t") for line in data.decode().split("\n")[1:] if line]


def _tsv_gz(path):
    with reading(path):
        return _tsv(gzip.decompress(path.read_bytes()))


def _texts(path, rows, values, classes):
    """Texts and labels from rows of (text, label), where class k is written as values[k]."""
    with reading(path):
        texts, labels = zip(*((text.strip(), values.index(label.strip())) for text, label in rows), strict=True)
    return list(texts), np.array(labels, np.int64), classes, None


SOURCES = {
    "mnist": _mnist_like("mnist", DIGITS),
    "fashion-mnist": _mnist_like("fashion-mnist", FASHION),
    "kmnist": _kmnist,
    "notmnist": _notmnist,
    "emnist-letters": _emnist_letters,
    "ambiguous-mnist": _ambiguous_mnist,
    "dirty-mnist": _dirty_mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": _svhn,
    "sst2": _sst2,
    "agnews": _agnews,
}
