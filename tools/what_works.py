"""Write the table "What works on my network?" of the book: every method on every network of tests/networks.py.

python tools/what_works.py
"""

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from every_method import BOOK, METHODS, outcome
from networks import NETWORKS

INTRODUCTION = """# What works on my network?

Give a method any classifier: a model of transformers, of timm, or your own file. `ensembles.lora(network, 8)` finds the
attention's projections, or without attention every convolution and every linear and recurrent layer; other methods find
what they need in the same way. Nothing of your network is changed. (`tools/what_works.py` writes the table.)

The table is made by running each method on {count} small networks as people have them. "yes" means: `predict`, a pass
with gradients and the separate members agree to four digits, the members differ, a saved ensemble answers the same, and
the network itself is unchanged. A number stands for a refusal, in one sentence below. Of the eighteen methods, a
single network and snapshots take what a deep ensemble takes, and one larger LoRA network what a LoRA-Ensemble takes.

A member is your network called with other weights, so whatever its `forward` does stays as it is. Where there is little work, and on a
GPU, all members run in one pass of `torch.func.vmap`; otherwise, and where vmap refuses a network (recurrent layers, values that make
shapes), one after the other. `print(ensemble)` says which and why; `ensemble.mode = "loop"` or `"vmap"` chooses.
"""


def main() -> None:
    torch.set_num_threads(1)
    reasons: dict[str, int] = {}
    header = ["network", *(method.label for method in METHODS.values())]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, network in NETWORKS.items():
        cells = [name]
        for method in METHODS:
            with tempfile.TemporaryDirectory() as folder:
                why = outcome(network, method, Path(folder))
            if why:
                number = reasons.setdefault(reason(why, name), len(reasons) + 1)
            cells.append(str(number) if why else "yes")
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"{number}. {why}" for why, number in reasons.items()]
    text = INTRODUCTION.format(count=len(NETWORKS))
    BOOK.write_text(
        "\n".join([text, *lines, "", "## Why not", "", *notes, ""]), encoding="utf-8"
    )


def reason(said: str, network: str) -> str:
    """A refusal without the names of one network's class and layers."""
    kind = type(NETWORKS[network].make()).__name__
    said = re.sub(
        rf"\b{kind}\b(?= (has|uses|begins|finds|needs))|(?<=configuration of ){kind}",
        "the network",
        said,
    )
    said = re.sub(r"^'[\w.]*\d[\w.]*'", "a layer", said)
    return re.sub(r" ?'[\w.]*\d[\w.]*'", "", said).replace("\n", " ").replace("|", "or")


if __name__ == "__main__":
    main()
