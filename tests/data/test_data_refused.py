"""What claims to be larger than any memory is refused by its numbers."""

import zipfile

import numpy as np
import pytest
from same import near

from uqlab import data


def test_a_range_of_classes_is_not_built():
    with pytest.raises(
        ValueError,
        match=r"classes are 0\.\.9, got 99999999999",
    ):
        data.load("digits[0-99999999999]")


def test_an_array_is_as_large_as_its_file(tmp_path):
    path = tmp_path / "own.npz"
    with zipfile.ZipFile(path, "w") as file, file.open("x.npy", "w") as array:
        about = {
            "descr": "|u1",
            "fortran_order": False,
            "shape": (2**40, 8, 8),
        }  # 64 TiB
        np.lib.format.write_array_header_1_0(array, about)
        array.write(b"0" * 100)
    with pytest.raises(
        ValueError,
        match=r"own.npz cannot be read",
    ):
        data.load(path)


@pytest.mark.parametrize("kind", [">f4", ">f8", "<f4"])
def test_the_order_of_bytes_does_not_matter(kind, tmp_path):
    images, labels = np.linspace(0, 1, 4 * 9).reshape(4, 3, 3), np.array([0, 1, 0, 1])
    np.savez(
        tmp_path / "own.npz", x_test=images.astype(kind), y_test=labels.astype(">i8")
    )
    found = data.load(tmp_path / "own.npz")
    near(found.inputs[:, 0], images)
    assert found.labels.tolist() == labels.tolist()
