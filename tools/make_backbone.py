"""Train the network of `models.embedded()`: `python tools/make_backbone.py FOLDER CHECKPOINT`.

FOLDER is laid out as $UQLAB_DATA. CHECKPOINT is written after every epoch and resumed from: stop and start as you like.
The sources hold letters only, handwritten and printed: no digit, no clothes, no Kuzushiji.
"""

import json
import math
import platform
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from uqlab import data, ensembles, models
from uqlab.core.files import writing
from uqlab.data.images import idx
from uqlab.training import History, fit, predict

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
EPOCHS, BATCH, LR, SMOOTHING = 32, 128, 1.5e-3, 0.1
TARGET = Path(models.__file__).parent / "assets" / "letters-vit.safetensors"
EMNIST, HELD_OUT = (
    400,
    40,
)  # images of each class that are used, and of those the last, which are never trained on


def sources(folder: Path) -> dict[str, data.Dataset]:
    """The images to train on and, under "held out", those to test on; labels are numbers of `LETTERS`, case ignored."""
    # The first 400 test images of each letter, upright; and davidflanagan's IDX files
    emnist = data.load(folder / "emnist" / "letters.npz")
    files = [f"t10k-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    x, y = (idx((folder / "notmnist" / file).read_bytes()) for file in files)
    rank = (
        F.one_hot(emnist.labels).cumsum(0).gather(1, emnist.labels[:, None])[:, 0]
    )  # 1, 2, ... in each class
    last = (rank > EMNIST - HELD_OUT) & (rank <= EMNIST)
    glyphs = data.load("glyphs", "train").resize(28)
    glyphs.labels[:] = torch.tensor(
        [LETTERS.index(glyphs.classes[label].upper()) for label in glyphs.labels]
    )
    return {
        "EMNIST letters": emnist[rank <= EMNIST - HELD_OUT],
        "notMNIST": data.read(torch.tensor(x)[:, None] / 255, y.astype(int)),
        "glyphs": glyphs,
        "held out": emnist[last],
    }


def joined(sets: dict[str, data.Dataset]) -> tuple[Tensor, Tensor]:
    """All images and their labels, handwriting twice."""
    parts = [*sets.values(), sets["EMNIST letters"]]
    return torch.cat([torch.as_tensor(part.inputs) for part in parts]), torch.cat(
        [part.labels for part in parts]
    )


def warp(x: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Random affine maps, smooth displacements and widths of strokes, x [1, batch, 1, height, width]."""
    (generator,), x = generators, x[0]

    def draw(*shape: int) -> Tensor:
        return torch.rand(len(x), *shape, generator=generator) * 2 - 1

    angle, shear, shift = 0.25 * draw(), 0.25 * draw(), 0.12 * draw(2)
    scale = 1 + 0.2 * draw(2)
    cos, sin = angle.cos(), angle.sin()
    rows = [
        torch.stack([cos, shear - sin], 1) * scale,
        torch.stack([sin, cos], 1) * scale,
    ]
    grid = F.affine_grid(
        torch.cat([torch.stack(rows, 1), shift[:, :, None]], 2),
        list(x.shape),
        align_corners=False,
    )
    bend = F.interpolate(0.07 * draw(2, 4, 4), x.shape[2:], mode="bicubic")
    x = F.grid_sample(x, grid + bend.permute(0, 2, 3, 1), align_corners=False)
    bold, thin = F.max_pool2d(x, 3, 1, 1), -F.max_pool2d(-x, 3, 1, 1)
    width = draw(1, 1, 1)
    return (
        x
        + 0.6
        * (width.clamp(min=0) * (bold - x) + width.clamp(max=0).abs() * (thin - x))
    )[None]


def smooth_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each member with labels smoothed by `SMOOTHING`."""
    members = zip(logits, labels, strict=True)
    return torch.stack(
        [F.cross_entropy(z, y, label_smoothing=SMOOTHING) for z, y in members]
    )


def train(
    sets: dict[str, data.Dataset], checkpoint: Path | None, epochs: int = EPOCHS
) -> tuple[torch.nn.Module, History]:
    """The network, with one output for each letter, and how it was trained."""
    torch.manual_seed(0)
    start = models.vit(28, 7, width=128, layers=4, heads=8, classes=len(LETTERS))
    ensemble = ensembles.deep(lambda: start, 1)
    inputs, labels = joined(sets)
    history = fit(
        ensemble, inputs, labels, epochs=epochs, lr=LR, batch_size=BATCH, optimizer="adamw", weight_decay=0.05,
        max_grad_norm=1.0, scheduler="cosine", warmup=300, augment=warp, loss=smooth_cross_entropy, resume=checkpoint,
        progress=False,
    )  # fmt: skip
    return ensemble.member(0), history


def made_by() -> dict[str, str]:
    """The commit and the machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    machine = f"{torch.get_num_threads()} threads, {platform.machine()}"
    return {"machine": machine, "commit": commit.stdout.strip()}


def main(folder: str, checkpoint: str, target: str | Path = TARGET) -> None:
    """Train, test on letters held out, and write the weights in half precision."""
    sets = sources(Path(folder))
    held_out = sets.pop("held out")
    network, history = train(sets, Path(checkpoint))
    right = (
        predict(network, torch.as_tensor(held_out.inputs))[0].argmax(1)
        == held_out.labels
    )
    done = (
        EPOCHS * math.ceil(len(joined(sets)[1]) / BATCH) / max(history.steps, 1)
    )  # 1 if not resumed
    about = {
        "seen": {
            name: f"{len(part)} images of its {part.split} split"
            for name, part in sets.items()
        },
        "never seen": "MNIST, Fashion-MNIST, KMNIST, any digit",
        "classes": LETTERS,
        "epochs": EPOCHS,
        "images": EPOCHS * len(joined(sets)[1]),
        "seconds": round(history.seconds * done),
        "accuracy": right.double().mean().item(),
        "tested on": f"{len(held_out)} EMNIST letters held out",
        **made_by(),
    }
    weights = {name: w.half().contiguous() for name, w in network.state_dict().items()}
    with writing(target) as temporary:
        save_file(weights, temporary, {"provenance": json.dumps(about)})
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
