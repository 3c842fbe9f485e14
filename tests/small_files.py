"""Files of data sets, made up and tiny, for the tests of downloads and of readers."""

import gzip
import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(os.environ.get("UQLAB_DATA") or "/nowhere")


def needs(*files):
    """Skip a test where $UQLAB_DATA does not hold these."""
    missing = [file for file in files if not (FOLDER / file).exists()]
    return pytest.mark.skipif(
        bool(missing), reason=f"$UQLAB_DATA does not hold {missing}"
    )


def same(a, b):
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels)


def idx(array):
    return gzip.compress(
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        + array.tobytes()
    )


def digest(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()


IMAGES = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)
MNIST = {
    "mnist/t10k-images-idx3-ubyte.gz": idx(IMAGES),
    "mnist/t10k-labels-idx1-ubyte.gz": idx(LABELS),
}


def below(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
