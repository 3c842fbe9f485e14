"""Four members of a pretrained convolutional network: explicit, and as LoRA-Ensemble of rank 8.

EfficientNet-Lite0, pretrained on ImageNet (the wheels of the extra `backbones`), with a
classifier for ten classes, on 500 CIFAR-10 photographs of 96 x 96 pixels; where
$UQLAB_DATA does not hold them, on random images. LoRA changes the 32 pointwise
convolutions. Timed are six training steps of 16 images by `training.fit`, and the
prediction of 256 images by `training.predict`: 16 at a time, and all at once as is its
default, where the maps of a layer no longer fit the caches and every network takes about
three times as long. Targets for LoRA-Ensemble: at most 0.85 of the explicit ensemble's
time in training, and 1.05 in both evaluations. Exit status 1 if one is missed.

    python benchmarks/lite0.py [NAME ...] [--repeats R]        NAME: explicit, lora
"""

import argparse
import copy
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _timing import DEVICE, interleaved, report
from torch import Tensor, nn

from uqlab import data, ensembles, models, training
from uqlab.ensembles import Ensemble

MEMBERS, RANK, BATCH, STEPS, SHOWN, PIXELS = 4, 8, 16, 6, 256, 96
POINTWISE = r"\._(expand_conv|project_conv|conv_head)$"
TRAINING, EVALUATION = 0.85, 1.05  # at most so much of the explicit ensemble's time


def photographs(count: int = 500) -> tuple[Tensor, Tensor]:
    """Images [count, 3, 96, 96] and their labels."""
    folder = Path(os.environ.get("UQLAB_DATA") or "nowhere")
    if not (folder / "cifar-10-batches-bin").is_dir():
        print("$UQLAB_DATA holds no cifar-10-batches-bin: random images")
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(count, 3, PIXELS, PIXELS, generator=generator)
        return images.to(DEVICE), (torch.arange(count) % 10).to(DEVICE)
    found = data.load("cifar10", "train", root=folder, limit=count).resize(PIXELS)
    return found.inputs.to(DEVICE), found.labels.to(DEVICE)


def explicit(backbone: nn.Module) -> Ensemble:
    """Four copies, each trained whole; their classifiers differ."""
    members = []
    for m in range(MEMBERS):
        torch.manual_seed(m)
        member = copy.deepcopy(backbone)
        member[1]._fc.reset_parameters()
        members.append(member)
    return ensembles.from_members(members)


def lora(backbone: nn.Module) -> Ensemble:
    return ensembles.lora(backbone, MEMBERS, rank=RANK, target=POINTWISE)


MAKERS: dict[str, Callable[[nn.Module], Ensemble]] = {
    "explicit": explicit,
    "lora": lora,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MAKERS))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    names = arguments.names or list(MAKERS)

    torch.manual_seed(0)
    backbone = models.pretrained("efficientnet-lite0", 10).to(DEVICE)
    images, labels = photographs()
    made = {name: MAKERS[name](backbone) for name in names}
    for name, ensemble in made.items():
        trained = sum(p.numel() for p in ensemble.parameters() if p.requires_grad)
        print(f"{name}: {trained:,} trained parameters")
    few = STEPS * BATCH

    def train(ensemble: Ensemble) -> None:
        how = {"optimizer": "adamw", "batch_size": BATCH, "progress": False}
        training.fit(ensemble, images[:few], labels[:few], epochs=1, lr=1e-3, **how)

    def evaluate(ensemble: Ensemble) -> None:
        training.predict(ensemble, images[-SHOWN:], batch_size=BATCH)

    def evaluate_at_once(ensemble: Ensemble) -> None:
        training.predict(ensemble, images[-SHOWN:])

    tasks = {
        f"train, {STEPS} steps of {BATCH} images": (train, TRAINING),
        f"evaluate {SHOWN} images, {BATCH} at a time": (evaluate, EVALUATION),
        f"evaluate {SHOWN} images at once": (evaluate_at_once, EVALUATION),
    }
    missed = 0
    for what, (act, limit) in tasks.items():
        print(f"\n{what}")
        acts = {
            name: lambda each=each, act=act: act(each) for name, each in made.items()
        }
        seconds = interleaved(acts, arguments.repeats)
        ratios = report(seconds, names[0])
        for name, times in seconds.items():
            print(f"{name}: {min(times):.2f} to {max(times):.2f} s")
        if {"explicit", "lora"} <= set(names):
            pairs = zip(seconds["lora"], seconds["explicit"], strict=True)
            each = [a / b for a, b in pairs]
            ratio = ratios["lora"] / ratios["explicit"]
            said = "kept" if ratio <= limit else "MISSED"
            missed += said == "MISSED"
            print(
                f"LoRA / explicit {ratio:.2f}, in rounds {min(each):.2f} to "
                f"{max(each):.2f}, median {statistics.median(each):.2f}; "
                f"target {limit}: {said}"
            )
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
