"""Train backbones of several sizes on letters, for `notebooks/rows/observatory.ipynb`.

    python tools/letters_backbones.py FOLDER BACKBONES [WIDTHS] [SEEDS] [SERIES]

FOLDER is laid out as $UQLAB_DATA. Each network is a file of BACKBONES; those that are there are not trained again, so
the command can be stopped and started at any time. WIDTHS, "32,64,96x2": x and a number of blocks that is not four.
Two series. Of "epochs" every network sees all letters four times, with a cosine, so that wide ones get better. Of
"accuracy" each is stopped where it is first right on 70 % of letters that it never saw, less half a point: a
constant rate, asked every 20 steps. The architecture is that of `models.embedded()`, with heads 16 wide. A GPU is
used if there is one; what is random is drawn on the CPU.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from make_backbone import BATCH, LETTERS, LR, SMOOTHING, joined, made_by, sources, warp
from safetensors.torch import save_file
from torch import Tensor, nn

from uqlab import data, models
from uqlab.core.files import writing
from uqlab.training import device, predict

EPOCHS, WARMUP = 4, 300
TARGET, WITHIN, ASKED_EVERY, LONGEST = 0.70, 0.005, 20, 60  # LONGEST: epochs
WIDTHS = "32,64,128,256,96,48,192,96x2,96x8"


def accuracy(network: nn.Module, items: data.Dataset) -> float:
    """Return the share of images that a network is right on; it trains on afterwards."""
    answers = predict(network, torch.as_tensor(items.inputs))[0].argmax(1).cpu()
    network.train()
    return (answers == items.labels).double().mean().item()


def pretrain(
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    held_out: data.Dataset,
    series: str,
    seed: int,
) -> dict[str, float]:
    """Train a network in place; return the epochs that it took and its accuracy."""
    generator = torch.Generator().manual_seed(seed)
    where = device("auto")
    network.to(where)
    optimizer = torch.optim.AdamW(network.parameters(), LR, weight_decay=0.05)
    per_epoch = -(-len(y) // BATCH)
    steps = per_epoch * (EPOCHS if series == "epochs" else LONGEST)

    def factor(step: int) -> float:
        fall = 0.5 * (1 + torch.tensor(step / steps * torch.pi).cos().item())
        return min(1.0, (step + 1) / WARMUP) * (fall if series == "epochs" else 1.0)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    order = torch.empty(0, dtype=torch.long)
    network.train()
    for step in range(steps):
        if not len(order):
            order = torch.randperm(len(y), generator=generator)
        rows, order = order[:BATCH], order[BATCH:]
        optimizer.zero_grad()
        inputs = warp(x[rows][None], [generator])[0].to(where)
        answers = network(inputs)
        F.cross_entropy(
            answers, y[rows].to(where), label_smoothing=SMOOTHING
        ).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if series == "accuracy" and step % ASKED_EVERY == 0 and step > WARMUP / 3:
            right = accuracy(network, held_out)
            if right >= TARGET - WITHIN:
                return {"epochs": (step + 1) / per_epoch, "accuracy": right}
    return {"epochs": steps / per_epoch, "accuracy": accuracy(network, held_out)}


def main(
    folder: str,
    target: str,
    widths: str = WIDTHS,
    seeds: str = "0",
    series: str = "epochs,accuracy",
) -> None:
    """Train what is missing."""
    sets = sources(Path(folder))
    held_out = sets.pop("held out")
    x, y = joined(sets)
    Path(target).mkdir(parents=True, exist_ok=True)
    wanted = [
        (kind, size, int(s))
        for kind in series.split(",")
        for s in seeds.split(",")
        for size in widths.split(",")
    ]
    for kind, size, seed in wanted:
        width, layers = (
            int(n) for n in (size if "x" in size else f"{size}x4").split("x")
        )
        path = Path(target, f"{kind}_{width}x{layers}_{seed}.safetensors")
        if path.is_file():
            continue
        torch.manual_seed(seed)
        network = models.vit(
            28, 7, width=width, layers=layers, heads=width // 16, classes=len(LETTERS)
        )
        started = time.time()
        about = pretrain(network, x, y, held_out, kind, seed)
        about |= {"seconds": round(time.time() - started), **made_by()}
        weights = {
            name: w.half().contiguous().cpu()
            for name, w in network.state_dict().items()
        }
        with writing(path) as temporary:
            save_file(weights, temporary, {"provenance": json.dumps(about)})
        print(path.stem, json.dumps(about), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
