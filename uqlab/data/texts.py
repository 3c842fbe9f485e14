"""Sets of texts: fetched ones, samples that were put there by hand, and tables of the user's own."""

import csv
import gzip
import io
from functools import partial
from typing import Any

import numpy as np

from uqlab.data.downloads import fetch, places
from uqlab.data.readers import part, reading, source, unpacked

TAB_SEPARATED: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
NEWS = ("World", "Sports", "Business", "Sci/Tech")
QUESTIONS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
SAMPLES = {  # name -> the table text/<it>.tsv.gz; no checksum of them is published, so they are not fetched
    "imdb": "imdb_1k", "mnli": "mnli_matched_1k", "rte": "rte_all", "snli": "snli_1k", "subj": "subj",
    "yelp": "yelp_1k",
}  # fmt: skip


def table(path, split):
    """Texts and labels of one split of a table with a header; `datasets.load` says what it must hold."""
    opened = gzip.open if path.suffix == ".gz" else open
    form = TAB_SEPARATED if ".tsv" in path.suffixes else {}
    with reading(path), opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        first, *rows = [row for row in csv.reader(file, **form) if row] or [[]]
    header = [name.strip().lower() for name in first]
    pair = ("sentence1", "sentence2") if {"sentence1", "sentence2"} <= {*header} else ()
    found = pair or [name for name in ("sentence", "text") if name in header][:1]
    if not found or not rows:
        raise ValueError(
            f"{path} must hold a column sentence or text, and rows; got {header}, {len(rows)} rows"
        )
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(
                f"{path}: row {number} must have {len(header)} fields like the header, got {len(row)}"
            )
    columns = {
        name: [field.strip() for field in fields]
        for name, *fields in zip(header, *rows, strict=True)
    }
    texts = [
        " ".join(parts)
        for parts in zip(*(columns[name] for name in found), strict=True)
    ]
    if "label" not in columns:
        return texts, np.full(len(texts), -1), (), None
    names = columns["label"]
    classes = sorted(
        set(names), key=int if all(name.isdecimal() for name in names) else None
    )
    y = np.array([classes.index(name) for name in names], np.int64)
    own = columns.get("split")
    rows = (
        part(y, split)
        if own is None
        else [row for row, its in enumerate(own) if its == split]
    )
    return [texts[row] for row in rows], y[rows], tuple(classes), None


def sample(split, root, file):
    """One part of a table text/<file>.tsv.gz."""
    path = root / "text" / f"{file}.tsv.gz"
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path}: it is not fetched; put a table with a header there"
        )
    return table(path, split)


for _name, _file in SAMPLES.items():
    source(_name)(partial(sample, file=_file))


def labelled(path, rows, values, classes):
    """Texts and labels from rows of (text, label), where class k is written as values[k]."""
    with reading(path):
        texts, labels = zip(
            *((text.strip(), values.index(label.strip())) for text, label in rows),
            strict=True,
        )
    return list(texts), np.array(labels, np.int64), classes, None


@source(  # tensorflow-datasets url_checksums/glue.txt, huggingface/datasets sst2/dataset_infos.json, torchtext
    "sst2",
    ["https://dl.fbaipublicfiles.com/glue/data/"],
    {
        "SST-2.zip": "sha256:d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"
    },
    also=["."],
)
def sst2(split, root):
    """GLUE's training split; its development split serves as test, because the labels of its test are not public."""
    member = "SST-2/train.tsv" if split == "train" else "SST-2/dev.tsv"
    path, (content,) = unpacked("sst2/SST-2.zip", [member], root)
    with reading(path):
        _, *rows = [
            row
            for row in csv.reader(io.StringIO(content.decode()), **TAB_SEPARATED)
            if row
        ]
    return labelled(path, rows, ("0", "1"), ("negative", "positive"))


@source(  # huggingface/datasets ag_news/dataset_infos.json; the address of torchtext
    "agnews",
    [
        "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
    ],
    {
        "train.csv": "sha256:76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
        "test.csv": "sha256:521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
    },
)
def agnews(split, root):
    """Titles and descriptions; where the files are not there, parts of a sample of the descriptions, if that is."""
    if (
        not places(f"agnews/{split}.csv", root)
        and (root / "text" / "agnews_test.tsv.gz").is_file()
    ):
        texts, y, classes, _ = sample(split, root, "agnews_test")
        return texts, np.array([NEWS.index(name) for name in classes])[y], NEWS, None
    path = fetch(f"agnews/{split}.csv", root)
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        rows = [(" ".join(fields), label) for label, *fields in csv.reader(file)]
    return labelled(path, rows, ("1", "2", "3", "4"), NEWS)


@source(  # huggingface/datasets trec/dataset_infos.json
    "trec",
    ["https://cogcomp.seas.upenn.edu/Data/QA/QC/"],
    {
        "train_5500.label": "sha256:9e4c8bdcaffb96ed61041bd64b564183d52793a8e91d84fc3a8646885f466ec3",
        "TREC_10.label": "sha256:033f22c028c2bbba9ca682f68ffe204dc1aa6e1cf35dd6207f2d4ca67f0d0e8e",
    },
)
def trec(split, root):
    """Questions by what they ask for: the six coarse classes."""
    path = fetch(f"trec/{'train_5500' if split == 'train' else 'TREC_10'}.label", root)
    with reading(path):
        rows = [
            line.partition(" ")[::2] for line in path.read_text("latin-1").splitlines()
        ]
        return labelled(
            path,
            [(text, label.partition(":")[0]) for label, text in rows],
            QUESTIONS,
            QUESTIONS,
        )
