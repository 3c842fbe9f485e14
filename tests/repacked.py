"""Turn data sets that were packed in another way, where they lie, into the files that the package reads.

tests/conftest.py calls it for $UQLAB_DATA. Whatever is there already stays, and each file appears whole or not at all.
"""

import gzip
from pathlib import Path

import numpy as np

from uqlab.core.files import writing


def cifar100(target, source):
    """Rows of the official binary version: coarse label (0, not known), fine label, planes of pixels."""
    with np.load(source) as arrays:
        x, y = arrays["x"].transpose(0, 3, 1, 2), arrays["y"]
    rows = [np.zeros((len(y), 1)), y[:, None], x.reshape(len(y), -1)]
    np.concatenate(rows, axis=1).astype(np.uint8).tofile(target)


def cifar10h(target, source):
    with np.load(source) as arrays, target.open("wb") as file:
        np.save(file, arrays["counts"])


def letters(target, source):
    """A user's own test split, labels from 0."""
    with np.load(source) as arrays, target.open("wb") as file:
        np.savez(file, x_test=arrays["x"], y_test=arrays["y"].astype(np.int64) - 1)


def lines(source):
    return gzip.decompress(source.read_bytes()).decode().splitlines(keepends=True)


def tables(target, first, *others):
    """One table of several with the same header."""
    rows = lines(first) + [row for other in others for row in lines(other)[1:]]
    target.write_text("".join(rows), encoding="utf-8", newline="")


def questions(target, source):
    """Lines of the official form: a label and a question."""
    rows = [row.rstrip("\n").split("\t") for row in lines(source)[1:]]
    text = "".join(f"{label} {question}\n" for question, label in rows)
    target.write_text(text, encoding="latin-1", newline="")


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
                make(temporary, *paths)
