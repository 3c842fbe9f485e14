"""Write the files of `uqlab/data/assets/` that are made of images and recordings: `python tools/make_embedded.py FOLDER [TARGET]`.

FOLDER is laid out as $UQLAB_DATA. `load` checks the official files by their checksums; those of what is written are
printed, and stand in `assets/README.md`. The same FOLDER gives the same arrays; their packed bytes depend on liblzma.
"""

import io
import lzma
import sys
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.signal import resample_poly
from sklearn.datasets import load_digits, load_sample_images
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import euclidean_distances
from sklearn.model_selection import train_test_split

from uqlab.core.files import sha256
from uqlab.data import load
from uqlab.data.readers import ASSETS

SEED = 0
MOST = 6400  # samples of a recording, 0.8 seconds at 8 kHz
MINIS: dict[
    str, tuple[str, dict[Literal["train", "test"], int]]
] = {  # name -> official set, images of each split
    "mnist-mini": ("mnist", {"train": 6000, "test": 2000}),
    "fashion-mini": ("fashion-mnist", {"train": 4000, "test": 2000}),
    "kmnist-mini": ("kmnist", {"test": 1000}),
}
MIXED = {  # set -> the images that are mixed, mixtures of each split, C of the reference, precision of the weights
    "ambiguous-digits": ("digits", {"train": 500, "test": 200}, 10, np.float64),
    "ambiguous-mnist-mini": ("mnist-mini", {"train": 1200, "test": 400}, 0.1, np.float32),
}  # fmt: skip
KMNIST = {  # the authors' files, of which `load` knows no checksum
    "kmnist-test-imgs.npz": "692d824896bec8f3c357ebf7a0fe904ed67ac632ce953d0b58f7fbef7bb27d87",
    "kmnist-test-labels.npz": "660f13a4705431ea2a6391c41ecbe384cd0d932c595a101ec4f3b8989e785046",
}


def balanced(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` rows in rising order, drawn without replacement, as many of each class."""
    classes = range(labels.max() + 1)
    share = count // len(classes)
    rows = [rng.permutation(np.flatnonzero(labels == c))[:share] for c in classes]
    return np.sort(np.concatenate(rows))


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


def spoken_digits(root: Path) -> dict[str, np.ndarray]:
    """Ten recordings of each digit and speaker: seven to train on, and three of the first five, FSDD's own test split."""
    kept = np.load(root / "sounds" / "fsdd.npz", allow_pickle=False)
    clips = np.split(kept["waves"], kept["lengths"].cumsum()[:-1])
    speakers = np.unique(kept["speakers"], return_inverse=True)[1]
    rng = np.random.default_rng(SEED)
    chosen: dict[str, list[int]] = {"train": [], "test": []}
    for speaker in range(6):
        for digit in range(10):
            said = (speakers == speaker) & (kept["labels"] == digit)
            for split, count in {"test": 3, "train": 7}.items():
                rows = np.flatnonzero(
                    said & ((kept["numbers"] < 5) == (split == "test"))
                )
                chosen[split] += np.sort(rng.permutation(rows)[:count]).tolist()
    arrays = {}
    for split, rows in chosen.items():
        pieces = [clips[row] for row in rows]
        arrays |= recorded(pieces, kept["labels"][rows], split)
        arrays[f"speaker_{split}"] = speakers[rows].astype(np.uint8)
    return arrays


def everyday_sounds(root: Path, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Four sources of each class of ESC-10; of each the loudest piece that is as long as a random spoken digit."""
    kept = np.load(root / "sounds" / "esc10.npz", allow_pickle=False)
    clips = np.split(kept["waves_mulaw"], kept["lengths"].cumsum()[:-1])
    rng, pieces, chosen = np.random.default_rng(SEED), [], []
    for label in range(10):
        rows = np.flatnonzero(kept["labels"] == label)
        sources = [name.partition("-")[0] for name in kept["names"][rows]]
        rows = rows[np.unique(sources, return_index=True)[1]]
        chosen += np.sort(rng.permutation(rows)[:4]).tolist()
    for row in chosen:
        loudness = clips[row] / 127.5 - 1
        wave = np.sign(loudness) * (256 ** abs(loudness) - 1) / 255 * 2**15
        wave = resample_poly(wave, 1, 2)  # 8 kHz
        length = min(rng.choice(lengths), MOST)
        energy = np.cumsum(np.append(0, wave**2))
        start = np.argmax(energy[length:] - energy[:-length])
        pieces.append(wave[start : start + length])
    print("everyday-sounds:", ", ".join(kept["names"][chosen]))
    return recorded(pieces, kept["labels"][chosen], "test")


def recorded(pieces, labels, split) -> dict[str, np.ndarray]:
    """Recordings one after the other, 8 bits by the mu-law, cut to 0.8 seconds."""
    pieces = [piece[:MOST] for piece in pieces]
    level = np.concatenate(pieces).clip(-(2**15), 2**15) / 2**15
    loudness = np.sign(level) * np.log1p(255 * abs(level)) / np.log(256)
    return {
        f"mulaw_{split}": np.rint((loudness + 1) * 127.5).astype(np.uint8),
        f"lengths_{split}": np.array([len(piece) for piece in pieces], np.int32),
        f"y_{split}": labels.astype(np.uint8),
    }


def digits() -> dict[str, np.ndarray]:
    """Handwritten digits of scikit-learn (UCI, Alpaydin & Kaynak 1998): 1257 train, 540 test, stratified."""
    data = load_digits()
    rows = train_test_split(
        np.arange(len(data.target)), test_size=0.3, stratify=data.target, random_state=0
    )
    arrays = {}
    for split, chosen in zip(("train", "test"), rows, strict=True):
        # counts of set pixels in 4x4 blocks of a bitmap
        arrays[f"x_{split}"] = (data.images[chosen] / 16).astype(np.float16)
        arrays[f"y_{split}"] = data.target[chosen].astype(np.uint8)
    return arrays


def textures() -> dict[str, np.ndarray]:
    """Grey patches of scikit-learn's two photographs, from disjoint bands: 800 train, 400 test, the least flat ones."""
    arrays = {}
    for split, count in (("train", 400), ("test", 200)):
        patches = []
        for photo in load_sample_images().images:  # uint8 [427, 640, 3]
            grey = (
                photo[:424] @ np.array([0.299, 0.587, 0.114]) / 255
            )  # luma of ITU-R BT.601
            columns = grey.reshape(53, 8, 80, 8).transpose(2, 0, 1, 3)
            band = (np.arange(80) // 8 % 3 == 2) == (
                split == "test"
            )  # every third of 64 pixels
            shown = columns[band].reshape(-1, 8, 8)
            order = np.argsort(
                -shown.std((1, 2)), kind="stable"
            )  # sky and blurred background come last
            patches.append(shown[np.sort(order[:count])])
        arrays[f"x_{split}"] = np.concatenate(patches).astype(np.float32)
        arrays[f"y_{split}"] = np.repeat(np.arange(2, dtype=np.uint8), count)
    return arrays


def ambiguous(name: str) -> dict[str, np.ndarray]:
    """Which images of a set are mixed, and how; the reference is fitted to its training images."""
    base, counts, inverse_penalty, precision = MIXED[name]
    sets = {split: load(base, split) for split in counts}
    x = {split: np.asarray(d.inputs).reshape(len(d), -1) for split, d in sets.items()}
    reference = LogisticRegression(C=inverse_penalty, max_iter=1000)
    reference.fit(x["train"], sets["train"].labels.numpy())
    arrays = {}
    for seed, (split, count) in enumerate(counts.items()):
        rng = np.random.default_rng(SEED + seed)
        found = between(x[split], sets[split].labels.numpy(), reference, count, rng)
        kinds = {"pairs": np.int16, "weights": precision, "probs": np.float32, "sampled": np.uint8}  # fmt: skip
        for (kind, dtype), values in zip(kinds.items(), found, strict=True):
            arrays[f"{kind}_{split}"] = values.astype(dtype)
    return arrays


def between(images, labels, reference, count, rng):
    """Pairs of near images of different classes, their weights [count, 2], soft labels [count, 2], five drawn labels.

    As in Ambiguous-MNIST (Mukhoti et al. 2023), a classifier gives the soft label. The log-odds of logistic regression
    are linear between two images: the weight for a wanted probability q is exact, and the soft label is (q, 1 - q).
    """
    x = images.astype(np.float64)
    distance = euclidean_distances(x, squared=True)
    distance[labels[:, None] == labels] = np.inf
    near = np.argsort(distance, axis=1, kind="stable")[
        :, :3
    ]  # the three nearest images of other classes
    pairs = np.stack([np.repeat(np.arange(len(x)), 3), near.ravel()], axis=1)
    i, j = np.unique(np.sort(pairs, axis=1), axis=0).T

    q = rng.uniform(0.2, 0.8, len(i))  # probability of the class of i
    scores = reference.decision_function(x)
    first, second = labels[i], labels[j]
    odds_i, odds_j = (
        scores[i, first] - scores[i, second],
        scores[j, first] - scores[j, second],
    )
    weight = (np.log(q / (1 - q)) - odds_j) / (odds_i - odds_j)
    probs = reference.predict_proba(
        weight[:, None] * x[i] + (1 - weight[:, None]) * x[j]
    )
    row = np.arange(len(i))
    plausible = (
        (odds_i > 0) & (odds_j < 0) & (abs(weight - 0.5) < 0.15)
    )  # both right, and a mixture of both
    plausible &= probs[row, first] + probs[row, second] > 0.95  # no third class
    order = np.argsort(distance[i, j], kind="stable")
    order = order[plausible[order]]
    couple = np.sort([first[order], second[order]], axis=0).T @ [10, 1]
    rank = [
        (couple[:k] == c).sum() for k, c in enumerate(couple)
    ]  # the nearest of each pair of classes first, so
    chosen = order[np.argsort(rank, kind="stable")][
        :count
    ]  # that 3-9 and 5-9 do not crowd out the others
    i, j, weight, q = i[chosen], j[chosen], weight[chosen], q[chosen]
    sampled = np.where(
        rng.random((len(chosen), 5)) < q[:, None], labels[i, None], labels[j, None]
    )
    return (
        np.stack([i, j], axis=1),
        np.stack([weight, 1 - weight], axis=1),
        np.stack([q, 1 - q], axis=1),
        sampled,
    )


def made(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """File of `assets/` -> its arrays; the ambiguous ones are made of the images that are embedded."""
    for name, checksum in KMNIST.items():
        path = folder / "kmnist" / name
        if path.is_file() and sha256(path) != checksum:
            raise ValueError(
                f"{path} is not the authors' file: its SHA-256 must be {checksum}"
            )
    spoken = spoken_digits(folder)
    sounds = {
        "spoken-digits": spoken,
        "everyday-sounds": everyday_sounds(folder, spoken["lengths_train"]),
    }
    minis = {name: mini(name, folder) for name in MINIS}
    mixed = {name: ambiguous(name) for name in MIXED}
    return minis | sounds | {"digits": digits(), "textures": textures()} | mixed


def write(files: dict[str, dict[str, np.ndarray]], target: str | Path) -> None:
    """Write each file's arrays to the folder `target`, and print its checksum."""
    for name, arrays in files.items():
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        packed = lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)
        path = Path(target) / f"{name}.npz.xz"
        path.write_bytes(packed)
        print(f"{sha256(path)}  {path.name}  {len(packed):,} bytes")


if __name__ == "__main__":
    write(made(Path(sys.argv[1])), *sys.argv[2:] or [ASSETS])
