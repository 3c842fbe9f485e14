"""Sets of texts, and a user's own data by path: images in an .npz, texts in a table."""

import csv
import io
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from uqlab.core.extras import extra
from uqlab.core.files import existing
from uqlab.data.readers import Items, fetch, npz, reading, split_rows, unpacked

NEWS = ("World", "Sports", "Business", "Sci/Tech")
TEXTS = ("sentence", "sentence1", "sentence2", "text")  # columns, joined
TABS: dict[str, Any] = {"sep": "\t", "quoting": csv.QUOTE_NONE}
QUESTIONS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")


def _pandas():
    with extra("notebooks"):
        import pandas
    return pandas


def _table(path: Path, split: str) -> Items:
    """Return one split of a table; `datasets.load` says what it must hold."""
    frame = _frame(path)
    names = [name for name in TEXTS if name in frame]
    texts = frame[names].agg(" ".join, axis=1).to_numpy()
    if "label" not in frame:
        return Items([*texts], np.full(len(texts), -1), ())
    labels: Any = frame["label"]
    with suppress(ValueError):  # numbers: 01 and 1.0 are 1, and 9 is before 10
        numbers: Any = _pandas().to_numeric(labels)
        if numbers.abs().max() < 2**53:  # of larger ones floats would merge some
            labels = numbers.astype(int) if (numbers % 1 == 0).all() else numbers
    classes, y = np.unique(labels, return_inverse=True)
    rows = split_rows(y, split)
    if "split" in frame:
        there = frame["split"].str.lower()
        rows = np.flatnonzero(there == split)
        if not there.isin(["train", "test"]).all():
            known = set(there)
            raise ValueError(f"{path}: split must be train or test, got {known}")
    return Items([*texts[rows]], y[rows], tuple(map(str, classes)))


def _frame(path):
    """Return the columns of a table that count; ValueError where an entry is missing.

    Missing is what pandas takes for it, and for a label what stands for no class.
    """
    pandas = _pandas()
    with reading(path):
        # so that a longer row is an error, and no name is changed
        frame = pandas.read_csv(path, dtype=str, header=None, **_form(path))
    frame.columns = frame.iloc[0].str.strip().str.lower()
    frame = frame.iloc[1:]
    if frame.empty or not {*TEXTS} & {*frame} or frame.columns.has_duplicates:
        raise ValueError(
            f"{path} must have rows and a column sentence or text, or sentence1 and "
            f"sentence2, and no name twice, got the columns {[*frame]}"
        )
    known = frame[frame.columns.intersection([*TEXTS, "label", "split"])]
    # Spaces that no eye sees, too
    known = known.apply(lambda column: column.str.strip().str.strip("\u200b\ufeff"))
    known = known.replace({"label": r"^(\?|-\d+(\.0*)?)$"}, pandas.NA, regex=True)
    missing = (known.isna() | (known == "")).any(axis=1)
    if missing.any():
        raise ValueError(
            f"{path} has no text, label or split in row {missing.idxmax()} below "
            "the header (? and numbers below 0 are no labels); fill it in, rename the "
            "label, or leave out the row"
        )
    return known


def _form(path) -> dict[str, Any]:
    """Return how columns are separated; spreadsheets of some countries write ";"."""
    if ".tsv" in path.suffixes:
        return TABS
    names = _pandas().read_csv(path, header=None, nrows=1, quoting=csv.QUOTE_NONE)
    return {"sep": ";"} if names.shape == (1, 1) and ";" in str(names.iat[0, 0]) else {}


def _sample(file, split, root):
    """Return one split of a table text/<file>.tsv.gz; it has no published checksum."""
    hint = "it is not fetched; put a table with a header there"
    return _table(existing(root / "text" / f"{file}.tsv.gz", hint), split)


def _sst2(split, root):
    """Return GLUE's training split, or its development split as test.

    The labels of GLUE's own test split are not public.
    """
    member = "SST-2/train.tsv" if split == "train" else "SST-2/dev.tsv"
    [content] = unpacked("sst2/SST-2.zip", [member], root)
    pandas = _pandas()
    with reading(root / member):
        frame = pandas.read_csv(io.BytesIO(content), keep_default_na=False, **TABS)
        texts = frame["sentence"].str.strip().tolist()
    return Items(texts, frame["label"].to_numpy(), ("negative", "positive"))


def _agnews(split, root):
    """Return titles and descriptions; without the files, descriptions of a sample."""
    official = root / f"agnews/{split}.csv"
    if not official.is_file() and (root / "text/agnews_test.tsv.gz").is_file():
        items = _sample("agnews_test", split, root)
        numbers = np.array([NEWS.index(name) for name in items.classes])
        return items._replace(labels=numbers[items.labels], classes=NEWS)
    path = fetch(f"agnews/{split}.csv", root)
    frame = _pandas().read_csv(path, header=None, keep_default_na=False)
    texts = (frame[1] + " " + frame[2]).str.strip()
    return Items(texts.tolist(), frame[0].to_numpy() - 1, NEWS)


def _trec(split, root):
    """Return questions by what they ask for: the six coarse classes."""
    path = fetch(f"trec/{'train_5500' if split == 'train' else 'TREC_10'}.label", root)
    texts, labels = [], []
    for line in path.read_text("latin-1").splitlines():
        label, _, text = line.partition(" ")  # DESC:manner How did ...
        texts.append(text.strip())
        labels.append(QUESTIONS.index(label.partition(":")[0]))
    return Items(texts, np.array(labels), QUESTIONS)


FETCHED_TEXTS = {
    "sst2": _sst2,
    "agnews": _agnews,
    "trec": _trec,
    "mnli": partial(_sample, "mnli_matched_1k"),
    "rte": partial(_sample, "rte_all"),
    "yelp": partial(_sample, "yelp_1k"),
}


SUFFIXES = (".npz", ".tsv", ".tsv.gz", ".csv", ".csv.gz")


def own_file(path: Path, split: str) -> Items:
    """Return one split; `datasets.load` says what the file must hold."""
    path = existing(path)
    return _images(path, split) if path.suffix == ".npz" else _table(path, split)


def _images(path: Path, split: str) -> Items:
    """Return one split of an .npz; without splits, a part of each class."""
    arrays = npz(path, "[xy](_train|_test)?")
    end = "" if "x" in arrays else f"_{split}"
    if f"x{end}" not in arrays:
        there = [*np.load(path)]
        raise ValueError(f"{path} must hold arrays x, or x_{split}, got {there}")
    x = _scaled(path, arrays[f"x{end}"])
    if f"y{end}" not in arrays:
        return Items(x, np.full(len(x), -1), ())
    y = arrays[f"y{end}"]
    every = [arrays[name] for name in arrays if "y" in name]
    classes = _classes(path, y, len(x), np.concatenate(every))
    rows = np.arange(len(y)) if end else split_rows(y, split)
    return Items(x[rows], y[rows].astype(int), classes)


def _classes(path: Path, y: np.ndarray, count: int, every: np.ndarray) -> Any:
    """Return the names of classes; ValueError unless labels are 0, 1, 2, ..."""
    numbers = np.unique(every)
    whole = every.dtype.kind in "iu" and (numbers == np.arange(len(numbers))).all()
    if y.shape != (count,) or not whole:
        raise ValueError(
            f"{path}: y must be {count} class numbers 0, 1, 2, ... without a gap, got "
            f"{y.dtype} {y.shape} of {numbers[:9]}; leave out images without a class, "
            "and use numpy.unique(y, return_inverse=True)[1]"
        )
    return tuple(map(str, numbers))


def _scaled(path: Path, x: np.ndarray) -> np.ndarray:
    """Return images [N, C, H, W]; ValueError unless uint8 or in [0, 1]."""
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4 or not x.size:
        raise ValueError(
            f"{path}: x must be [N, H, W], [N, H, W, C] or [N, C, H, W] and not empty, "
            f"got {x.shape}"
        )
    if x.shape[3] < x.shape[1]:
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.max() != 1:
        return x
    # The comparison is False for NaN too.
    if x.dtype.kind != "f" or not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(
            f"{path}: x must be uint8 up to 255, or floating point in [0, 1] without "
            f"NaN, got {x.dtype} {x.min()} to {x.max()}; of zeros and ones give "
            "x.astype(float)"
        )
    return x.astype(np.float32)
