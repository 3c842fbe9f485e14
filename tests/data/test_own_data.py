"""A user's own files as data sets: arrays of images, tables of texts."""

import gzip
import re

import numpy as np
import pytest
import torch
from same import near

from uqlab import data

SPLITS = "train", "test"


def test_own_arrays(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (6, 3, 5, 7), np.uint8)
    y = np.array([0, 1, 2, 2, 1, 0], np.uint8)
    expected = torch.from_numpy(x).float() / 255
    path = tmp_path / "own.npz"
    for stored in (x, x.transpose(0, 2, 3, 1), x.astype(np.float32) / 255, (x / 255).astype(">f8")):  # fmt: skip
        np.savez(path, x=stored, y=y)
        np.savez(tmp_path / "given.npz", x_train=stored, y_train=y.astype(">i8"))
        d = data.load(tmp_path / "given.npz", "train")
        near(d.inputs, expected)
        assert d.inputs.dtype == torch.float32
        assert d.labels.tolist() == y.tolist()
        parts = [data.load(str(path), split) for split in SPLITS]
        near(torch.cat([part.inputs for part in parts]).sum(0), d.inputs.sum(0))
        assert d.classes == parts[0].classes == parts[1].classes == ("0", "1", "2")
    chosen = torch.cat([data.load(f"{path}[1-2]", split).labels for split in SPLITS])
    assert chosen.bincount().tolist() == [2, 2]
    found = [data.load(f"{path}{part}").name for part in ("", "[1-2]")]
    assert found == ["own", "own[1-2]"]  # as pages show it
    np.savez(path, x=x[:, 0])
    for split in SPLITS:  # grey, no labels
        d = data.load(path, split)
        assert torch.equal(d.inputs, expected[:, :1])
        assert d.labels.tolist() == [-1] * 6


def test_own_arrays_are_split_by_class_into_disjoint_parts(tmp_path):
    sizes = torch.tensor([200, 100, 33, 10, 4, 2])
    y = torch.arange(6).repeat_interleave(sizes)[torch.randperm(349)].numpy()
    # every image differs
    x = np.arange(2 * 349, dtype=np.uint16).view(np.uint8).reshape(349, 1, 4)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    parts = [data.load(tmp_path / "own.npz", split) for split in SPLITS]
    train, test = parts
    images = torch.cat([part.inputs for part in parts]).flatten(1) * 255
    found = [tuple(image) for image in images.round().byte().tolist()]
    labels = dict(zip(map(tuple, x.reshape(349, 4).tolist()), y, strict=True))
    assert {*found} == {*labels}
    assert [labels[image] for image in found] == [*train.labels, *test.labels]
    assert (test.labels.bincount(minlength=6) - 0.3 * sizes).abs().max() < 1
    assert train.labels.bincount().min() >= 1
    again = data.load(tmp_path / "own.npz", "train", seed=7)
    assert torch.equal(again.inputs, train.inputs)


def test_own_splits(tmp_path, monkeypatch):
    x, y = np.arange(16, dtype=np.uint8).reshape(4, 2, 2), np.array([0, 1, 2, 0])
    np.savez(
        tmp_path / "own.npz", x_train=x[:3], y_train=y[:3], x_test=x[3:], y_test=y[3:]
    )
    monkeypatch.chdir(tmp_path)
    train, test = data.load("own.npz", "train"), data.load("own.npz", "test")
    assert [len(train), len(test)] == [3, 1]
    assert train.classes == test.classes == ("0", "1", "2")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "other.npz"))):
        data.load("other.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.full((2, 3, 3), np.nan)}, "without NaN"),
        ({"x": np.full((2, 3, 3), 1.5)}, r"in \[0, 1\].*1.5"),
        ({"x": np.zeros((2, 3, 3), np.int64)}, "got int64"),
        ({"x": np.zeros((2, 9))}, "not empty, got"),
        ({"x": np.zeros((2, 3, 3)), "y": np.zeros(3, np.int64)}, "y must be 2"),
        ({"x": np.zeros((2, 3, 3)), "y": np.eye(2, dtype=int)}, "y must be 2"),
        ({"x": np.zeros((2, 3, 3)), "y": np.array([0, -1])}, "without a gap"),
        ({"x": np.zeros((2, 3, 3)), "y": np.array([0, 255])}, "without a gap"),
        ({"x": np.zeros((2, 3, 3)), "y": np.array([1, 2])}, "without a gap"),
        ({"x": np.zeros((2, 3, 3)), "y": np.array(["a", "b"])}, "class numbers"),
        ({"x_train": np.zeros((2, 3, 3))}, "must hold arrays x, or x_test"),
        ({"X": np.zeros((2, 3, 3)), "Y": np.arange(2)}, r"got \['X', 'Y'\]"),
        ({"x": np.array([None, {}])}, "own.npz cannot be read"),
        ({"x": np.eye(9, dtype=np.uint8)[None]}, r"up to 255.*astype\(float\)"),
    ],
)
def test_own_arrays_are_refused(arrays, message, tmp_path):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "own.npz")


@pytest.mark.parametrize("kept", [0, 200, -30])
def test_a_damaged_npz_is_refused(kept, tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((9, 8, 8), np.uint8))
    whole = (tmp_path / "own.npz").read_bytes()
    (tmp_path / "own.npz").write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=r"own\.npz cannot be read"):
        data.load(tmp_path / "own.npz")


# texts -------------------------------------------------------------------------------


TABLE = "label\tsentence\n" + "".join(
    f"{('good', 'bad', 'dull')[i % 3]}\ttext {i}\n" for i in range(30)
)


@pytest.mark.parametrize("name", ["own.tsv", "own.tsv.gz", "own.csv", "own.csv.gz"])
def test_own_texts(name, tmp_path):
    commas = TABLE.replace("\t", ",").replace("sentence", "Text")
    content = (TABLE if ".tsv" in name else commas).encode()
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(packed)
    train, test = (data.load(tmp_path / name, split) for split in SPLITS)
    assert train.classes == test.classes == ("bad", "dull", "good")
    assert train.labels.bincount().tolist() == [7] * 3
    assert sorted(train.inputs + test.inputs) == sorted(f"text {i}" for i in range(30))
    for text, label in zip(test.inputs, test.labels, strict=True):
        assert ("good", "bad", "dull")[int(text.split()[1]) % 3] == test.classes[label]
    chosen = data.load(f"{tmp_path / name}[2]", limit=2)
    assert (len(chosen), chosen.classes, chosen.kind) == (2, ("good",), "texts")


def test_own_texts_are_read_as_their_format_says(tmp_path):
    (tmp_path / "own.csv").write_bytes(
        b'\xef\xbb\xbftext,label\r\n"one, ""two""\nthree",10\r\nfour,9\r\n'
    )
    parts = [data.load(tmp_path / "own.csv", split) for split in SPLITS]
    assert sorted(parts[0].inputs + parts[1].inputs) == ["four", 'one, "two"\nthree']
    assert parts[0].classes == ("9", "10")  # numbers in their order
    (tmp_path / "own.tsv").write_text(
        f'sentence\tother\n a "quoted" one\tx\nnext\x85line\ty\n{200_000 * "a"}\t\n'
    )
    for split in SPLITS:  # no labels
        d = data.load(tmp_path / "own.tsv", split)
        assert d.inputs == ['a "quoted" one', "next\x85line", 200_000 * "a"]
        assert d.labels.tolist() == [-1] * 3
    rows = "".join(f"text\t{name}\n" for name in (2**53, 2**53 + 1))
    (tmp_path / "own.tsv").write_text("text\tlabel\n" + rows)
    assert len(data.load(tmp_path / "own.tsv", "train").classes) == 2
    (tmp_path / "own.tsv").write_text("text\tlabel\na\t1\nb\t1.0\nc\t0\nd\t0\n")
    assert len(data.load(tmp_path / "own.tsv", "train").classes) == 2


def test_the_split_that_a_table_says(tmp_path):
    rows = "one,a,Train\ntwo,b,test\nthree,c,train\n"
    (tmp_path / "own.csv").write_text(f"text,label,split\n{rows}")
    train, test = (data.load(tmp_path / "own.csv", split) for split in SPLITS)
    assert (train.inputs, train.labels.tolist()) == (["one", "three"], [0, 2])
    assert (test.inputs, test.labels.tolist()) == (["two"], [1])
    assert test.classes == ("a", "b", "c")
    (tmp_path / "own.csv").write_text("text,label,split\none,a,val\n")
    with pytest.raises(ValueError, match=r"train or test, got .*val"):
        data.load(tmp_path / "own.csv", "test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read"),
        ("words,label\none,1\n", "a column sentence or text.*words"),
        ("text,label\none,1\ntwo, too,0\n", "cannot be read"),
        ("text,label\none,more,1\ntwo,too,0\n", "cannot be read"),
        ("text,label,Label\none,1,0\ntwo,0,1\n", "no name twice"),
        ("text,label,label\none,1,0\ntwo,0,1\n", "no name twice"),
        ("text,label\nok,0.0\ntwo,-1.0\n", "row 2 below"),
        *(
            (f"text,label,split\nok,0,test\n{row}\n", "row 2 below")
            for row in ("some,None,test", "some,-1,test", "some,?,test", " ,1,test",
                        "NaN,1,test", "some,1,", "some,1")
        ),
    ],
)  # fmt: skip
def test_own_texts_are_refused(content, message, tmp_path):
    (tmp_path / "own.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "own.csv")
