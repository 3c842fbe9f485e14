"""Fetched sets of texts."""

import csv
import io
from typing import Any

import numpy as np

from uqlab.data.downloads import fetch
from uqlab.data.readers import reading, source, unpacked

TAB_SEPARATED: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
NEWS = ("World", "Sports", "Business", "Sci/Tech")


def labelled(path, rows, values, classes):
    """Texts and labels from rows of (text, label), where class k is written as values[k]."""
    with reading(path):
        texts, labels = zip(*((text.strip(), values.index(label.strip())) for text, label in rows), strict=True)
    return list(texts), np.array(labels, np.int64), classes, None


@source(  # tensorflow-datasets url_checksums/glue.txt, huggingface/datasets sst2/dataset_infos.json, torchtext
    "sst2",
    ["https://dl.fbaipublicfiles.com/glue/data/"],
    {"SST-2.zip": "sha256:d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"},
    also=["."],
)
def sst2(split, root):
    """GLUE's training split; its development split serves as test, because the labels of its test are not public."""
    member = "SST-2/train.tsv" if split == "train" else "SST-2/dev.tsv"
    path, (content,) = unpacked("sst2/SST-2.zip", [member], root)
    with reading(path):
        _, *rows = [row for row in csv.reader(io.StringIO(content.decode()), **TAB_SEPARATED) if row]
    return labelled(path, rows, ("0", "1"), ("negative", "positive"))


@source(  # huggingface/datasets ag_news/dataset_infos.json; the address of torchtext
    "agnews",
    ["https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"],
    {
        "train.csv": "sha256:76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
        "test.csv": "sha256:521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
    },
)
def agnews(split, root):
    path = fetch(f"agnews/{split}.csv", root)
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        rows = [(" ".join(fields), label) for label, *fields in csv.reader(file)]
    return labelled(path, rows, ("1", "2", "3", "4"), NEWS)
