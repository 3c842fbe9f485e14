"""Turn data sets that were packed in another way, where they lie, into the files that the package reads.

`python tests/repacked.py FOLDER`; tests/conftest.py calls it for $UQLAB_DATA. Whatever is there already stays, and
each file appears whole or not at all, so that several processes may do this at once.
"""

import gzip
import sys
from pathlib import Path

import numpy as np

from uqlab.core.files import writing


def cifar100(source, target):
    """Rows of the official binary version: coarse label (0, not known), fine label, planes of pixels."""
    with np.load(source) as arrays:
        x, y = arrays["x"].transpose(0, 3, 1, 2), arrays["y"]
    rows = np.concatenate(
        [np.zeros((len(y), 1)), y[:, None], x.reshape(len(y), -1)], axis=1
    )
    rows.astype(np.uint8).tofile(target)


def cifar10h(source, target):
    with np.load(source) as arrays, target.open("wb") as file:
        np.save(file, arrays["counts"])


def letters(source, target):
    """A user's own test split, labels from 0."""
    with np.load(source) as arrays, target.open("wb") as file:
        np.savez(file, x_test=arrays["x"], y_test=arrays["y"].astype(np.int64) - 1)


def tables(*sources_and_target):
    """One table of several with the same header."""
    *sources, target = sources_and_target
    texts = [gzip.decompress(source.read_bytes()).decode() for source in sources]
    target.write_text(
        texts[0] + "".join(text.partition("\n")[2] for text in texts[1:]),
        encoding="utf-8",
        newline="",
    )


def questions(source, target):
    """Lines of the official form: a label and a question."""
    _, *rows = gzip.decompress(source.read_bytes()).decode().splitlines()
    lines = ["{1} {0}\n".format(*row.split("\t")) for row in rows]
    target.write_text("".join(lines), encoding="latin-1", newline="")


FORMS = {  # target: how it is made, and of what
    "cifar-100-binary/test.bin": (cifar100, "cifar100-test.npz"),
    "cifar10h-counts.npy": (cifar10h, "cifar10h_counts.npz"),
    "emnist/letters.npz": (letters, "emnist/emnist_letters_test_10400.npz"),
    "SST-2/train.tsv": (tables, "text/sst2_train.tsv.gz", "text/sst2_heldout.tsv.gz"),
    "SST-2/dev.tsv": (tables, "text/sst2_dev.tsv.gz"),
    "trec/train_5500.label": (questions, "text/trec_train.tsv.gz"),
    "trec/TREC_10.label": (questions, "text/trec_test.tsv.gz"),
}


def unpack(folder):
    """Make what can be made below a folder and is not there."""
    folder = Path(folder)
    for name, (make, *sources) in FORMS.items():
        paths = [folder / source for source in sources]
        if not (folder / name).exists() and all(path.is_file() for path in paths):
            with writing(folder / name) as temporary:
                make(*paths, temporary)


if __name__ == "__main__":
    unpack(sys.argv[1])
