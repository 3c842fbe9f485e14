"""A user's own files as data sets: arrays of images, tables of texts."""

import gzip
import io
import re

import numpy as np
import pytest
import torch
from same import near

from uqlab import data


def test_own_arrays(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (6, 3, 5, 7), np.uint8)
    y = np.array([0, 1, 2, 2, 1, 0], np.uint8)
    expected = torch.from_numpy(x).float() / 255
    path = tmp_path / "own.npz"
    splits = "train", "test"
    for stored in (x, x.transpose(0, 2, 3, 1), x.astype(np.float32) / 255, x / 255):
        np.savez(path, x=stored, y=y)
        np.savez(tmp_path / "given.npz", x_train=stored, y_train=y)
        d = data.load(tmp_path / "given.npz", "train")
        near(d.inputs, expected)
        assert d.inputs.dtype == torch.float32
        assert d.labels.tolist() == y.tolist()
        parts = [data.load(str(path), split) for split in splits]
        near(torch.cat([part.inputs for part in parts]).sum(0), d.inputs.sum(0))
        assert d.classes == parts[0].classes == parts[1].classes == ("0", "1", "2")
    chosen = torch.cat([data.load(f"{path}[1-2]", split).labels for split in splits])
    assert chosen.bincount().tolist() == [2, 2]
    assert [data.load(f"{path}{part}").name for part in ("", "[1-2]")] == [
        "own",
        "own[1-2]",
    ]  # as pages show it
    np.savez(path, x=x[:, 0])
    for split in splits:  # grey, no labels
        d = data.load(path, split)
        assert torch.equal(d.inputs, expected[:, :1])
        assert d.labels.tolist() == [-1] * 6
    with pytest.raises(ValueError, match="no labels"):
        data.load(f"{path}[0]")


def test_own_arrays_are_split_by_class_into_disjoint_parts(tmp_path):
    sizes = torch.tensor([200, 100, 33, 10, 4, 2])
    y = torch.arange(6).repeat_interleave(sizes)[torch.randperm(349)].numpy()
    x = (
        np.arange(2 * 349, dtype=np.uint16).view(np.uint8).reshape(349, 1, 4)
    )  # every image differs
    np.savez(tmp_path / "own.npz", x=x, y=y)
    train, test = (
        data.load(tmp_path / "own.npz", split, seed=seed)
        for seed, split in enumerate(("train", "test"))
    )
    found = [
        tuple(image.flatten().tolist())
        for image in torch.cat([train.inputs, test.inputs])
    ]
    assert len(set(found)) == len(found) == 349
    assert (test.labels.bincount(minlength=6) - 0.3 * sizes).abs().max() < 1
    assert train.labels.bincount().min() >= 1
    label_of = {
        tuple((image / np.float32(255)).flatten().tolist()): label
        for image, label in zip(x, y, strict=True)
    }
    assert [label_of[image] for image in found] == [
        *train.labels.tolist(),
        *test.labels.tolist(),
    ]
    again = data.load(tmp_path / "own.npz", "train", seed=7)
    assert torch.equal(again.inputs, train.inputs)


def test_own_splits(tmp_path, monkeypatch):
    x = np.arange(4 * 4, dtype=np.uint8).reshape(4, 2, 2)
    np.savez(
        tmp_path / "own.npz",
        x_train=x[:3],
        y_train=np.array([0, 1, 2]),
        x_test=x[3:],
        y_test=np.array([0]),
    )
    monkeypatch.chdir(tmp_path)
    train, test = data.load("own.npz", "train"), data.load("own.npz", "test")
    assert [len(train), len(test)] == [3, 1]
    assert train.classes == test.classes == ("0", "1", "2")
    np.savez(tmp_path / "own.npz", x_train=x)
    with pytest.raises(ValueError, match=r"neither x nor x_test, but \['x_train'\]"):
        data.load("own.npz")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "other.npz"))):
        data.load("other.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.full((2, 3, 3), np.nan)}, "must be .* in .0, 1. without NaN"),
        ({"x": np.full((2, 3, 3), 1.5)}, "must be .* in .0, 1.*1.5"),
        ({"x": np.zeros((2, 3, 3), np.int64)}, "got int64"),
        ({"x": np.zeros((2, 9))}, "not empty, got"),
        (
            {"x": np.zeros((2, 3, 3)), "y": np.zeros(3, np.int64)},
            "y must be 2 integers",
        ),
        (
            {"x": np.zeros((2, 3, 3)), "y": np.array([0, -1])},
            "class numbers 0, 1, 2, .*got -1 to 0",
        ),
        (
            {"x": np.zeros((4, 3, 3)), "y": np.array([0, 1, 255, 1], np.uint8)},
            "0 to 255; .*leave out",
        ),
        ({"x": np.zeros((4, 3, 3)), "y": np.arange(1, 5)}, "y.min"),
        ({"images": np.zeros((2, 3, 3))}, "neither x nor x_test"),
        ({"x": np.array([None, {}])}, "cannot be read.*arrays of numbers"),
        ({"X_train": np.zeros((2, 3, 3))}, r"but \['X_train'\]"),
        ({"x": np.eye(9, dtype=np.uint8)[None]}, "got uint8 0 to 1; .*up to 255"),
    ],
)
def test_own_arrays_are_refused(arrays, message, tmp_path):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "own.npz")


def test_an_npz_that_is_none_is_refused(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((9, 8, 8), np.uint8))
    whole = (tmp_path / "own.npz").read_bytes()
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    for content in (
        b"",
        b"text",
        whole[:-30],
        whole[:200] + b"\xff" * 8 + whole[208:],
        buffer.getvalue(),
    ):
        (tmp_path / "own.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"own\.npz cannot be read"):
            data.load(tmp_path / "own.npz")


# texts -----------------------------------------------------------------------------------------------------------


TABLE = "label\tsentence\n" + "".join(
    f"{('good', 'bad', 'dull')[i % 3]}\ttext {i}\n" for i in range(30)
)


@pytest.mark.parametrize("name", ["own.tsv", "own.tsv.gz", "own.csv", "own.csv.gz"])
def test_own_texts(name, tmp_path):
    content = (
        TABLE
        if ".tsv" in name
        else TABLE.replace("\t", ",").replace("sentence", "Text")
    ).encode()
    (tmp_path / name).write_bytes(
        gzip.compress(content) if name.endswith(".gz") else content
    )
    train, test = (data.load(tmp_path / name, split) for split in ("train", "test"))
    assert train.classes == test.classes == ("bad", "dull", "good")
    assert [part.labels.bincount().tolist() for part in (train, test)] == [
        [7] * 3,
        [3] * 3,
    ]
    assert sorted(train.inputs + test.inputs) == sorted(f"text {i}" for i in range(30))
    for text, label in zip(test.inputs, test.labels, strict=True):
        assert ("good", "bad", "dull")[int(text.split()[1]) % 3] == test.classes[label]
    chosen = data.load(f"{tmp_path / name}[2]", limit=2)
    assert (len(chosen), chosen.classes) == (2, ("good",))


def test_own_texts_are_read_as_their_format_says(tmp_path):
    (tmp_path / "own.csv").write_bytes(
        b'\xef\xbb\xbftext,label\r\n"one, ""two""\nthree",10\r\nfour,9\r\n'
    )
    parts = [data.load(tmp_path / "own.csv", split) for split in ("train", "test")]
    assert sorted(parts[0].inputs + parts[1].inputs) == ["four", 'one, "two"\nthree']
    assert parts[0].classes == ("9", "10")  # numbers in their order
    (tmp_path / "own.tsv").write_text(
        'sentence\tother\n a "quoted" one\tx\nnext\x85line\ty\n'
    )
    for split in ("train", "test"):  # no labels
        d = data.load(tmp_path / "own.tsv", split)
        assert d.inputs == ['a "quoted" one', "next\x85line"]
        assert d.labels.tolist() == [-1, -1]
    (tmp_path / "own.tsv").write_text(
        "text\tlabel\tsplit\none\ta\ttrain\ntwo\tb\ttest\nthree\tc\ttrain\n"
    )
    train, test = (
        data.load(tmp_path / "own.tsv", split) for split in ("train", "test")
    )
    assert (train.inputs, train.labels.tolist()) == (["one", "three"], [0, 2])
    assert (test.inputs, test.labels.tolist(), test.classes) == (
        ["two"],
        [1],
        ("a", "b", "c"),
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "own.tsv",
            b"",
            "must hold a column sentence or text, and rows",
        ),
        (
            "own.tsv",
            b"sentence1\tlabel\none\t1\n",
            r"must hold a column sentence or text.*\['sentence1', 'label'\]",
        ),
        (
            "own.csv",
            b"text,label\none,1\ntwo, too,0\n",
            "line 3 must have 2 fields like the header, got 3",
        ),
        ("own.csv", b"text,label\n\xff,1\n", r"own\.csv cannot be read"),
        (
            "own.tsv.gz",
            gzip.compress(TABLE.encode())[:-9],
            r"own\.tsv\.gz cannot be read",
        ),
    ],
)
def test_own_texts_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / name)


def test_a_split_that_a_table_does_not_have_is_named(tmp_path):
    rows = "".join(
        f"text {i},{i % 2},{'Train' if i % 3 else 'val'}\n" for i in range(9)
    )
    (tmp_path / "own.csv").write_text("text,label,split\n" + rows)
    assert len(data.load(tmp_path / "own.csv", "train")) == 6
    with pytest.raises(ValueError, match="train or test, got only Train, val"):
        data.load(tmp_path / "own.csv", "test")


def test_a_text_may_be_long(tmp_path):
    (tmp_path / "own.csv").write_text(f"text\n{200_000 * 'a'}\n")
    assert data.load(tmp_path / "own.csv").inputs == [200_000 * "a"]


MISSING = ["None", "null", "NULL", "NA", "N/A", "#N/A", "<NA>", "NaN", " ", "\u200b"]


@pytest.mark.parametrize(
    "row",
    [
        *(f"some\t{label}\ttest" for label in [*MISSING, "-1", "-100", "-1.0", "?"]),
        *(f"{text}\t1\ttest" for text in MISSING),
        "some\t1\t",
    ],
)
def test_what_is_missing_in_a_table_is_no_class_and_no_text(row, tmp_path):
    (tmp_path / "own.tsv").write_text(f"text\tlabel\tsplit\nok\t0\ttest\n{row}\n")
    with pytest.raises(ValueError, match=r"line 3 has no (text|label|split).*leave"):
        data.load(tmp_path / "own.tsv")


def test_labels_that_mean_no_and_large_numbers_are_classes(tmp_path):
    names = ["none", str(2**53), str(2**53 + 1)]
    for some in (names, names[1:]):
        rows = "".join(f"text\t{name}\n" for name in some)
        (tmp_path / "own.tsv").write_text("text\tlabel\n" + rows)
        assert {*data.load(tmp_path / "own.tsv", "train").classes} == {*some}
