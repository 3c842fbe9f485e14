"""Fetched sets of images: MNIST and its relatives, CIFAR and SVHN."""

import gzip
from functools import partial

import numpy as np
import torch
from scipy.io import loadmat

from uqlab.data.readers import DIGITS, Items, fetch, npz, reading, unpacked

CLOTHES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
FASHION = tuple(CLOTHES.split(","))
KUZUSHIJI = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
OBJECTS = "airplane automobile bird cat deer dog frog horse ship truck"
FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge
bus butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud
cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox
girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR_IMAGES = {"train": 50_000, "test": 10_000}


def idx(data: bytes) -> np.ndarray:
    """Return the array of a compressed IDX file of bytes (LeCun et al. 1998).

    Its bytes are 0, 0, 8, rank, big-endian sizes, data.
    """
    data = gzip.decompress(data)
    shape = np.frombuffer(data, ">i4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _like_mnist(name, classes, split, root):
    """Read two IDX files, as MNIST is published."""
    half = "train" if split == "train" else "t10k"
    kinds = ("images-idx3", "labels-idx1")
    files = [fetch(f"{name}/{half}-{kind}-ubyte.gz", root) for kind in kinds]
    x, y = (idx(file.read_bytes()) for file in files)
    return Items(x[:, None], y, classes)


def _kmnist(split, root):
    """Read the four IDX files; without them, the .npz files that the authors offer."""
    paths = [root / f"kmnist/kmnist-{split}-{kind}.npz" for kind in ("imgs", "labels")]
    official = list(root.glob("kmnist/*-ubyte.gz"))
    if official or not all(path.is_file() for path in paths):
        return _like_mnist("kmnist", KUZUSHIJI, split, root)
    x, y = (npz(path, "arr_0")["arr_0"] for path in paths)
    return Items(x[:, None], y, KUZUSHIJI)


def _ambiguous_mnist(split, root):
    """Read 6,000 images with 10 sampled labels each (Mukhoti et al. 2023).

    Every label is an item, with the frequencies of the labels as its soft label.
    """
    files = [f"ambiguous-mnist/amnist_{kind}.pt" for kind in ("samples", "labels")]
    x, y = (torch.load(fetch(file, root), weights_only=True).numpy() for file in files)
    half = slice(len(x) // 2) if split == "train" else slice(len(x) // 2, None)
    x = x[half].reshape(-1, 1, 28, 28).astype(np.float32).clip(0, 1)
    y = y[half]  # [6000, 10]
    copies = y.shape[1]
    soft = np.eye(10)[y].mean(1).astype(np.float32)
    return Items(x.repeat(copies, 0), y.ravel(), DIGITS, soft.repeat(copies, 0))


def _dirty_mnist(split, root):
    """Read MNIST followed by Ambiguous-MNIST, neither normalised nor with noise.

    Mukhoti et al. 2023.
    """
    clean = _like_mnist("mnist", DIGITS, split, root)
    ambiguous = _ambiguous_mnist(split, root)
    certain = np.eye(10, dtype=np.float32)[clean.labels]
    return Items(
        np.concatenate([clean.inputs.astype(np.float32) / 255, ambiguous.inputs]),
        np.concatenate([clean.labels, ambiguous.labels]),
        DIGITS,
        np.concatenate([certain, ambiguous.label_probs]),  # type: ignore
    )


def _cifar(archive, members, coarse, classes, split, root):
    """Read binary batches: a row has `coarse` bytes to skip, label and pixels."""
    data = b"".join(unpacked(archive, members, root))
    with reading(root / members[0]):
        size = CIFAR_IMAGES[split], coarse + 1 + 3 * 32 * 32
        rows = np.frombuffer(data, np.uint8).reshape(size)
        pixels = rows[:, coarse + 1 :].reshape(-1, 3, 32, 32)
    return Items(pixels, rows[:, coarse], classes)


def _cifar10(split, root):
    """Read CIFAR-10, the test split with soft labels where the file of them is there.

    CIFAR-10H holds people's judgements of each test image (Peterson et al. 2019).
    """
    train = [f"data_batch_{k}" for k in range(1, 6)]
    names = train if split == "train" else ["test_batch"]
    members = [f"cifar-10-batches-bin/{name}.bin" for name in names]
    classes = tuple(OBJECTS.split())
    items = _cifar("cifar-10-binary.tar.gz", members, 0, classes, split, root)
    human = root / "cifar10h-counts.npy"  # as the authors publish them
    if split == "train" or not human.is_file():
        return items
    with reading(human):
        counts = np.load(human).reshape(len(items.labels), 10)
    soft = counts / counts.sum(1, keepdims=True)
    return items._replace(label_probs=soft.astype(np.float32))


def _cifar100(split, root):
    """Read CIFAR-100 with the fine labels; the byte before each is the coarse one."""
    members = [f"cifar-100-binary/{split}.bin"]
    classes = tuple(FINE.split())
    return _cifar("cifar-100-binary.tar.gz", members, 1, classes, split, root)


def _svhn(split, root):
    """Read the cropped digits; the label 10 stands for the digit 0."""
    arrays = loadmat(fetch(f"svhn/{split}_32x32.mat", root))
    x = arrays["X"].transpose(3, 2, 0, 1)
    return Items(x, arrays["y"].ravel() % 10, DIGITS)


IMAGES = {
    "mnist": partial(_like_mnist, "mnist", DIGITS),
    "fashion-mnist": partial(_like_mnist, "fashion-mnist", FASHION),
    "kmnist": _kmnist,
    "ambiguous-mnist": _ambiguous_mnist,
    "dirty-mnist": _dirty_mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": _svhn,
}
