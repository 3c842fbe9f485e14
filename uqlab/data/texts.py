"""Sets of texts: fetched ones, samples put there by hand, and tables of the user."""

import csv
import gzip
import io
import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from uqlab.core.files import existing
from uqlab.data.downloads import fetch, places
from uqlab.data.readers import Items, reading, source, split_rows, unpacked

TAB_SEPARATED: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
NEEDED = {"sentence", "sentence1", "sentence2", "text", "label", "split"}
# What pandas, spreadsheets and databases write where there is nothing; as pandas reads.
MISSING = {"", "nan", "NaN", "NAN", "-nan", "-NaN", "None", "null", "NULL", "NA"}
MISSING |= {"N/A", "n/a", "#N/A", "#NA", "<NA>"}
NO_LABEL = re.compile(r"\?|-\d+(\.0*)?")  # and what stands for no class: -1, -100
csv.field_size_limit(2**31 - 1)  # texts may be long
EDGES = re.compile(r"^[\s\u200b-\u200d\u2060\ufeff]+|[\s\u200b-\u200d\u2060\ufeff]+\Z")
WHOLE = re.compile(r"[+-]?\d+(\.0*)?")
NEWS = ("World", "Sports", "Business", "Sci/Tech")
QUESTIONS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
# Name -> the table text/<it>.tsv.gz; no checksum of them is published, so they are not
# fetched.
SAMPLES = {
    "imdb": "imdb_1k",
    "mnli": "mnli_matched_1k",
    "rte": "rte_all",
    "snli": "snli_1k",
    "subj": "subj",
    "yelp": "yelp_1k",
}


def table(path: Path, split: str) -> Items:
    """Return one split of a table; `datasets.load` says what it must hold."""
    columns = _columns(path)
    if {"sentence1", "sentence2"} <= {*columns}:
        pairs = zip(columns["sentence1"], columns["sentence2"], strict=True)
        texts = [" ".join(pair) for pair in pairs]
    else:
        texts = columns.get("sentence") or columns.get("text")
    if not texts:
        raise ValueError(
            f"{path} must hold a column sentence or text, and rows; "
            f"got the columns {[*columns]}"
        )
    if "label" not in columns:
        return Items(texts, np.full(len(texts), -1), ())
    names: list[Any] = columns["label"]
    if all(map(WHOLE.fullmatch, names)):  # 1, 01 and 1.0 are one class
        names = [int(name.partition(".")[0]) for name in names]
    classes = sorted({*names})
    y = np.array([classes.index(name) for name in names])
    rows = split_rows(y, split)
    if "split" in columns:
        rows = _named_rows(path, columns["split"], split)
    return Items([texts[row] for row in rows], y[rows], tuple(map(str, classes)))


def _named_rows(path: Path, names: list[str], split: str) -> np.ndarray:
    """Return the rows of a split by their names; ValueError if there are none."""
    rows = np.flatnonzero([name.lower() == split for name in names])
    if not len(rows):
        there = ", ".join(sorted({*names}))
        raise ValueError(f"{path}: split must be train or test, got only {there}")
    return rows


def _columns(path: Path) -> dict[str, list[str]]:
    """Return the columns of a table by their names in lower case."""
    (_, names), *rows = _rows(path)
    names = [name.lower() for name in names]
    if len({*names}) < len(names):
        raise ValueError(f"{path} has two columns of one name: {', '.join(names)}")
    for line, row in rows:
        _check_row(f"{path}: line {line}", names, row)
    return {name: [row[i] for _, row in rows] for i, name in enumerate(names)}


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows of a table with the numbers of their lines, the header first."""
    opened = gzip.open if path.suffix == ".gz" else open
    form = TAB_SEPARATED if ".tsv" in path.suffixes else {}
    with reading(path), opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        if ";" in first and "," not in first:  # as spreadsheets write it in Europe
            form = form or {"delimiter": ";"}
        reader = csv.reader(itertools.chain([first], file), **form)
        rows = [(reader.line_num, row) for row in reader if row] or [(1, [])]
    return [(line, [EDGES.sub("", field) for field in row]) for line, row in rows]


def _check_row(where: str, names: list[str], row: list[str]) -> None:
    """Raise ValueError for another number of fields, and for what is missing."""
    if len(row) != len(names):
        raise ValueError(
            f"{where} must have {len(names)} fields like the header, got {len(row)}"
        )
    for name, field in zip(names, row, strict=True):
        none = field in MISSING or (name == "label" and NO_LABEL.fullmatch(field))
        if name in NEEDED and none:
            raise ValueError(
                f"{where} has no {name}, got {field!r}; fill it in, leave out the "
                "line, or, if it means something, write another word"
            )


def sample(split, root, file):
    """Return one part of a table text/<file>.tsv.gz."""
    hint = "it is not fetched; put a table with a header there"
    return table(existing(root / "text" / f"{file}.tsv.gz", hint), split)


for _name, _file in SAMPLES.items():
    source(_name)(partial(sample, file=_file))


def labelled(path, rows, values, classes):
    """Return the items of rows (text, label), where class k is written as values[k]."""
    with reading(path):
        texts, names = zip(*rows, strict=True)
        labels = [values.index(name.strip()) for name in names]
    return Items([text.strip() for text in texts], np.array(labels), classes)


# tensorflow-datasets url_checksums/glue.txt, huggingface/datasets
# sst2/dataset_infos.json, torchtext
@source(
    "sst2",
    ["https://dl.fbaipublicfiles.com/glue/data/"],
    {
        "SST-2.zip": (
            "sha256:d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"
        ),
    },
    also=["."],
)
def sst2(split, root):
    """Return GLUE's training split, or its development split as test.

    The labels of GLUE's own test split are not public.
    """
    member = "SST-2/train.tsv" if split == "train" else "SST-2/dev.tsv"
    path, (content,) = unpacked("sst2/SST-2.zip", [member], root)
    with reading(path):
        lines = io.StringIO(content.decode())
        _, *rows = [row for row in csv.reader(lines, **TAB_SEPARATED) if row]
    return labelled(path, rows, ("0", "1"), ("negative", "positive"))


# huggingface/datasets ag_news/dataset_infos.json; the address of torchtext
@source(
    "agnews",
    [
        "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/"
        "ag_news_csv/"
    ],
    {
        "train.csv": (
            "sha256:76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e"
        ),
        "test.csv": (
            "sha256:521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699"
        ),
    },
)
def agnews(split, root):
    """Return titles and descriptions.

    Where the files are not there, return a part of a sample of the descriptions, if
    that is.
    """
    there = places(f"agnews/{split}.csv", root)
    if not there and (root / "text" / "agnews_test.tsv.gz").is_file():
        items = sample(split, root, "agnews_test")
        numbers = np.array([NEWS.index(name) for name in items.classes])
        return items._replace(labels=numbers[items.labels], classes=NEWS)
    path = fetch(f"agnews/{split}.csv", root)
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        rows = [(" ".join(fields), label) for label, *fields in csv.reader(file)]
    return labelled(path, rows, ("1", "2", "3", "4"), NEWS)


# huggingface/datasets trec/dataset_infos.json
@source(
    "trec",
    ["https://cogcomp.seas.upenn.edu/Data/QA/QC/"],
    {
        "train_5500.label": (
            "sha256:9e4c8bdcaffb96ed61041bd64b564183d52793a8e91d84fc3a8646885f466ec3"
        ),
        "TREC_10.label": (
            "sha256:033f22c028c2bbba9ca682f68ffe204dc1aa6e1cf35dd6207f2d4ca67f0d0e8e"
        ),
    },
)
def trec(split, root):
    """Return questions by what they ask for: the six coarse classes."""
    path = fetch(f"trec/{'train_5500' if split == 'train' else 'TREC_10'}.label", root)
    rows = []
    for line in path.read_text("latin-1").splitlines():
        label, _, text = line.partition(" ")  # DESC:manner How did ...
        rows.append((text, label.partition(":")[0]))
    return labelled(path, rows, QUESTIONS, QUESTIONS)
