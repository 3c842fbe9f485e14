"""Where each fetched file comes from, and how it is checked and kept."""

from dataclasses import dataclass
from pathlib import Path

import pooch


@dataclass(frozen=True)
class Remote:
    checksum: str  # "sha256:..." or "md5:...", published or used by the loader named beside the entry
    urls: tuple[str, ...]  # mirrors, tried in this order
    also: tuple[str, ...] = ()  # other places below root where the file may lie


def _idx_files(name, places, mirrors, checksums):
    """The four files of a set distributed like MNIST; `places` are the other folders where loaders put them."""
    kinds = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
    files = [f"{part}-{kind}" for part in ("train", "t10k") for kind in kinds]
    return {
        f"{name}/{file}": Remote(
            f"sha256:{checksum}",
            tuple(mirror + file for mirror in mirrors),
            tuple(f"{place}/{file}" for place in places),
        )
        for file, checksum in zip(files, checksums, strict=True)
    }


FILES = {
    # tensorflow-datasets url_checksums/mnist.txt; mirrors of torchvision (first, last) and tensorflow-datasets
    **_idx_files(
        "mnist",
        ("MNIST/raw", "."),
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    # tensorflow-datasets url_checksums/fashion_mnist.txt, Keras datasets/fashion_mnist.py; mirrors of torchvision,
    # Keras and the authors' repository
    **_idx_files(
        "fashion-mnist",
        ("FashionMNIST/raw", "fashion_mnist"),
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    # tensorflow-datasets url_checksums/kmnist.txt
    **_idx_files(
        "kmnist",
        ("KMNIST/raw",),
        ("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
        (
            "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
            "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
            "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
            "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
        ),
    ),
    # MD5 only: torch-uncertainty datasets/classification/not_mnist.py
    "notmnist/notMNIST_small.zip": Remote(
        "md5:3de91fb69221d9c2d5c57387101ebc6c",
        ("https://zenodo.org/record/8274268/files/notMNIST_small.zip",),
        ("notMNIST_small.zip",),
    ),
    # tensorflow-datasets url_checksums/emnist.txt; the addresses of torchvision (now, formerly)
    "emnist/gzip.zip": Remote(
        "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
        (
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
        ),
        ("EMNIST/raw/gzip.zip",),
    ),
    # MD5 only: BlackHC/ddu_dirty_mnist dirty_mnist.py
    "ambiguous-mnist/amnist_samples.pt": Remote(
        "md5:4f7865093b1d28e34019847fab917722",
        ("https://github.com/BlackHC/ddu_dirty_mnist/releases/download/data-v1.0.0/amnist_samples.pt",),
        ("AmbiguousMNIST/amnist_samples.pt",),
    ),
    "ambiguous-mnist/amnist_labels.pt": Remote(
        "md5:3bfc055a9f91a76d8d493e8b898c3c95",
        ("https://github.com/BlackHC/ddu_dirty_mnist/releases/download/data-v1.0.0/amnist_labels.pt",),
        ("AmbiguousMNIST/amnist_labels.pt",),
    ),
    # tensorflow-datasets url_checksums/cifar10.txt, cifar100.txt
    "cifar-10-binary.tar.gz": Remote(
        "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    ),
    "cifar-100-binary.tar.gz": Remote(
        "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
    ),
    # tensorflow-datasets url_checksums/svhn_cropped.txt
    "svhn/train_32x32.mat": Remote(
        "sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        ("http://ufldl.stanford.edu/housenumbers/train_32x32.mat",),
        ("train_32x32.mat",),
    ),
    "svhn/test_32x32.mat": Remote(
        "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
        ("http://ufldl.stanford.edu/housenumbers/test_32x32.mat",),
        ("test_32x32.mat",),
    ),
    # tensorflow-datasets url_checksums/glue.txt, huggingface/datasets sst2/dataset_infos.json; torchtext's address
    "sst2/SST-2.zip": Remote(
        "sha256:d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
        ("https://dl.fbaipublicfiles.com/glue/data/SST-2.zip",),
        ("SST-2.zip",),
    ),
    # huggingface/datasets ag_news/dataset_infos.json; the address of torchtext
    "agnews/train.csv": Remote(
        "sha256:76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
        ("https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/train.csv",),
    ),
    "agnews/test.csv": Remote(
        "sha256:521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
        ("https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/test.csv",),
    ),
}


def places(file: str, root: Path) -> list[Path]:
    """Where below root a registered file lies."""
    return [path for place in (file, *FILES[file].also) if (path := root / place).is_file()]


def fetch(file: str, root: Path) -> Path:
    """The path of a registered file whose checksum is right: one that lies below root, else downloaded to root/file.

    Raises FileNotFoundError if there is none and no mirror delivers it, ValueError if what is there is corrupted and
    no mirror delivers a right one.
    """
    remote = FILES[file]
    method, expected = remote.checksum.split(":")
    wrong = {}
    for path in places(file, root):
        if (found := pooch.file_hash(path, alg=method)) == expected:
            return path
        wrong[path] = found
    failures = []
    for url in remote.urls:
        try:  # pooch downloads to a temporary name, checks, then renames
            target = root / file
            return Path(pooch.retrieve(url, remote.checksum, target.name, target.parent, progressbar=True))
        except (OSError, ValueError) as error:
            failures.append(f"\n  {url}: {error}")
    todo = f"Put the right file there by hand ({method} {expected}) or name a folder that has it (root or $UQLAB_DATA)."
    if wrong:
        found = "".join(f"\n  {path}: {method} {checksum}" for path, checksum in wrong.items())
        raise ValueError(
            f"corrupted file, not used; expected {method} {expected}, found{found}\n"
            f"Fetching it again as {root / file} failed:{''.join(failures)}\n{todo}"
        )
    raise FileNotFoundError(f"{root / file} is missing and no mirror delivered it:{''.join(failures)}\n{todo}")
