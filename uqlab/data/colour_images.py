"""Fetched sets of colour images of 32 x 32 pixels: CIFAR and SVHN."""

import numpy as np
from scipy.io import loadmat

from uqlab.data.downloads import fetch
from uqlab.data.readers import DIGITS, checked, reading, source, unpacked

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
CIFAR10 = tuple(OBJECTS.split())
CIFAR100 = tuple(FINE.split())
CIFAR_IMAGES = {"train": 50_000, "test": 10_000}
SHAPE = (3, 32, 32)


def cifar(archive, members, coarse, classes, split, root):
    """Read binary batches: a row has `coarse` bytes to skip, label and pixels."""
    path, batches = unpacked(archive, members, root)
    data = b"".join(batches)
    images = CIFAR_IMAGES[split]
    width = coarse + 1 + 3072
    if len(data) != images * width:
        raise ValueError(
            f"{path}: {split} must hold {images} images, {images * width} bytes, "
            f"got {len(data)}"
        )
    rows = np.frombuffer(data, np.uint8).reshape(images, width)
    pixels = rows[:, coarse + 1 :].reshape(-1, *SHAPE)
    return checked(path, pixels, rows[:, coarse], SHAPE, classes)


# tensorflow-datasets url_checksums/cifar10.txt
@source(
    "cifar10",
    ["https://www.cs.toronto.edu/~kriz/"],
    {
        "cifar-10-binary.tar.gz": (
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
        )
    },
    folder="",
)
def cifar10(split, root):
    """Read CIFAR-10, the test split with soft labels where the file of them is there.

    CIFAR-10H holds people's judgements of each test image (Peterson et al. 2019).
    """
    train = [f"data_batch_{k}" for k in range(1, 6)]
    names = train if split == "train" else ["test_batch"]
    members = [f"cifar-10-batches-bin/{name}.bin" for name in names]
    items = cifar("cifar-10-binary.tar.gz", members, 0, CIFAR10, split, root)
    human = root / "cifar10h-counts.npy"  # as the authors publish them
    if split == "train" or not human.is_file():
        return items
    with reading(human):
        counts = np.load(human, allow_pickle=False)
    sums = counts.sum(-1, keepdims=True)
    wanted = (len(items.inputs), 10)
    if counts.shape != wanted or (counts < 0).any() or not (sums > 0).all():
        raise ValueError(
            f"{human}: counts must have shape {wanted}, no empty row and none below 0, "
            f"got {counts.shape}"
        )
    return items._replace(label_probs=(counts / sums).astype(np.float32))


# tensorflow-datasets url_checksums/cifar100.txt
@source(
    "cifar100",
    ["https://www.cs.toronto.edu/~kriz/"],
    {
        "cifar-100-binary.tar.gz": (
            "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
        )
    },
    folder="",
)
def cifar100(split, root):
    """Read CIFAR-100 with the fine labels; the byte before each is the coarse one."""
    members = [f"cifar-100-binary/{split}.bin"]
    return cifar("cifar-100-binary.tar.gz", members, 1, CIFAR100, split, root)


# tensorflow-datasets url_checksums/svhn_cropped.txt
@source(
    "svhn",
    ["http://ufldl.stanford.edu/housenumbers/"],
    {
        "train_32x32.mat": (
            "sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"
        ),
        "test_32x32.mat": (
            "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"
        ),
    },
    also=["."],
)
def svhn(split, root):
    """Read the cropped digits; the label 10 stands for the digit 0."""
    path = fetch(f"svhn/{split}_32x32.mat", root)
    with reading(path):
        arrays = loadmat(path)
    x = arrays["X"].transpose(3, 2, 0, 1)
    y = arrays["y"].reshape(-1) % 10
    return checked(path, x, y, SHAPE, DIGITS)
