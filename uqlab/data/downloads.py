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


def _weights(repository, files):
    """Network weights of a GitHub repository at a commit: {file: (path there, checksum)}."""
    return {
        f"resnet_cifar10/{file}": Remote(
            f"sha256:{checksum}", (f"https://raw.githubusercontent.com/{repository}/{path}",), (file,)
        )
        for file, (path, checksum) in files.items()
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
    # CIFAR-10 networks of Y. Idelbayev; a file's name holds the first eight digits of its checksum
    **_weights(
        "akamaster/pytorch_resnet_cifar10/d5489e8995e81e91ce6b1d69dcc98ad579b0b153",
        {
            file: (f"pretrained_models/{file}", checksum)
            for file, checksum in (
                ("resnet20-12fca82f.th", "12fca82f0bebc4135bf1f32f6e3710e61d5108578464b84fd6d7f5c1b04036c8"),
                ("resnet32-d509ac18.th", "d509ac1820d7f25398913559d7e81a13229b1e7adc5648e3bfa5e22dc137f850"),
                ("resnet44-014dd654.th", "014dd6541728a1c700b1642ab640e211dc6eb8ed507d70697458dc8f8a0ae2e4"),
                ("resnet56-4bfd9763.th", "4bfd97631478d6b638d2764fd2baff3edb1d7d82252d54439343b6596b9b5367"),
            )
        },
    ),
    # five ResNet-20 trained alike; the checksums are those of the files at this commit, none are published
    **_weights(
        "DanSun18/pytorch_resnet_cifar10/b3e085b7539af6d46a00868869dfbee55c373c10",
        {
            f"ensemble_resnet20_{run}.th": (f"experiments/run_8/run_run_8-{run}/save_resnet20/checkpoint.th", checksum)
            for run, checksum in (
                (1, "3f947ad5e274bad92b8977cf625cb75294abbdb6b6fa7ee992640705f9cd48e8"),
                (2, "7b6496a38166953ce3a8ed0c50204868c4838cf361d0d30c9b4dc87f08d45be9"),
                (3, "5c199a3694bc0c17bf81f9ff604ac1c0ccc3439f74a8574b28a358e25f8eace8"),
                (4, "764b3d9570dc0e741d04842eba4b174496b6b0350cc446e440b337cd3a4f19df"),
                (5, "3970e36192ae583f4eacc97f6d9d148c82a3d02c21131a7f6ca21af8a22aae66"),
            )
        },
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
