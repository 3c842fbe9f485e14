"""Write the files of `assets/` from the official ones: `python -m uqlab.data.make_embedded FOLDER [TARGET]`.

FOLDER is laid out as $UQLAB_DATA. `load` checks the official files by their checksums; those of what is written are
printed, and stand in `assets/README.md`. The same FOLDER gives the same arrays; their packed bytes depend on liblzma.
"""

import io
import lzma
import sys
from pathlib import Path
from typing import Literal

import numpy as np
from sklearn.linear_model import LogisticRegression

from uqlab.core.files import sha256
from uqlab.data.datasets import load
from uqlab.data.embedded import ASSETS, between

SEED = 0
MINIS: dict[
    str, tuple[str, dict[Literal["train", "test"], int]]
] = {  # name -> official set, images of each split
    "mnist-mini": ("mnist", {"train": 6000, "test": 2000}),
    "fashion-mini": ("fashion-mnist", {"train": 4000, "test": 2000}),
    "kmnist-mini": ("kmnist", {"test": 1000}),
}
MIXED = {"train": 1200, "test": 400}
KMNIST = {  # the authors' files, of which `load` knows no checksum
    "kmnist-test-imgs.npz": "692d824896bec8f3c357ebf7a0fe904ed67ac632ce953d0b58f7fbef7bb27d87",
    "kmnist-test-labels.npz": "660f13a4705431ea2a6391c41ecbe384cd0d932c595a101ec4f3b8989e785046",
}


def balanced(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` rows in rising order, drawn without replacement, as many of each class."""
    classes = range(labels.max() + 1)
    share = count // len(classes)
    return np.sort(
        np.concatenate(
            [
                rng.permutation(np.flatnonzero(labels == label))[:share]
                for label in classes
            ]
        )
    )


def mini(name: str, root: Path) -> dict[str, np.ndarray]:
    official, counts = MINIS[name]
    arrays, rng = {}, np.random.default_rng(SEED)
    for split, count in counts.items():
        d = load(official, split, root=root)
        images = (np.asarray(d.inputs)[:, 0] * 255).round().astype(np.uint8)
        rows = balanced(d.labels.numpy(), count, rng)
        arrays |= {
            f"x_{split}": images[rows],
            f"y_{split}": d.labels.numpy()[rows].astype(np.uint8),
        }
    return arrays


def ambiguous(base: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Which images of mnist-mini are mixed, and how; the reference is fitted to its training images."""
    x = {split: base[f"x_{split}"] / np.float32(255) for split in MIXED}
    reference = LogisticRegression(C=0.1, max_iter=1000).fit(
        x["train"].reshape(len(x["train"]), -1), base["y_train"]
    )
    arrays = {}
    for seed, (split, count) in enumerate(MIXED.items()):
        found = between(
            x[split],
            base[f"y_{split}"],
            reference,
            count,
            np.random.default_rng(SEED + seed),
        )
        kinds = {
            "pairs": np.int16,
            "weights": np.float32,
            "probs": np.float32,
            "sampled": np.uint8,
        }
        for (kind, dtype), values in zip(kinds.items(), found, strict=True):
            arrays[f"{kind}_{split}"] = values.astype(dtype)
    return arrays


def made(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """File of `assets/` -> its arrays."""
    for name, checksum in KMNIST.items():
        path = folder / "kmnist" / name
        if path.is_file() and sha256(path) != checksum:
            raise ValueError(
                f"{path} is not the authors' file: its SHA-256 must be {checksum}"
            )
    minis = {name: mini(name, folder) for name in MINIS}
    return minis | {"ambiguous-mnist-mini": ambiguous(minis["mnist-mini"])}


def main(folder: str, target: str | Path = ASSETS) -> None:
    for name, arrays in made(Path(folder)).items():
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        packed = lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)
        path = Path(target) / f"{name}.npz.xz"
        path.write_bytes(packed)
        print(f"{sha256(path)}  {path.name}  {len(packed):,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
