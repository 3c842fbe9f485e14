"""Today's ensembles beside those of another commit: the same calls, in turn, one process for each version.

    git worktree add ../before 0e38689
    python benchmarks/beside.py ../before [WORK ...] [--rounds R]        WORK: the beginning of a name

What is called is the same in both versions. Every line of the table is the median of the new time over the old one in
each round, with quartiles. Targets: 1.3 for eight inputs and more, 1.7 for one. Exit status 1 if one is missed.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
MEMBERS = 16
METHODS = {
    "lora": (4,),
    "batch": (),
    "singular_value": (),
    "masksembles": (),
    "film": (),
    "packed": (),
    "mimo": (),
}


def works():
    """name -> (inputs, a function that makes the function to time)."""
    import torch
    from torch import nn

    from uqlab import ensembles, extraction, heads, models, training

    made = {}

    def predicting(make, x):
        ensemble = make().eval()

        def run():
            with torch.no_grad():
                return ensemble(x)

        return run

    def learning(make, x, **settings):
        """At least four steps of training."""
        how = {"epochs": 1, "lr": 1e-3, "batch_size": len(x), "progress": False}
        if "batch_size" not in settings:
            x = torch.cat([x] * 4)
        ensemble, y = make(), torch.arange(len(x)) % 10
        return lambda: training.fit(ensemble, x, y, **how | settings)

    def add(name, make, x, *, train=True, predict=True, **settings):
        n = settings.get("batch_size", len(x))
        if predict:
            made[f"{name}, predict {n}"] = n, lambda: predicting(make, x[:n])
        if train:
            made[f"{name}, train {n}"] = n, lambda: learning(make, x, **settings)

    def vit():
        torch.manual_seed(0)
        return models.vit(28, 4, width=192, layers=6, heads=6)

    for name in ("lora", "singular_value", "batch"):
        for n in (1, 8, 16, 64):
            make = getattr(ensembles, name)
            add(
                f"implicit, {name}",
                lambda make=make: make(vit(), MEMBERS),
                torch.rand(n, 1, 28, 28),
                train=n > 1,
            )

    def perceptron():
        torch.manual_seed(0)
        layers = [nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(768, 10))

    for n in (8, 64, 512):
        add(
            "perceptron, lora",
            lambda: ensembles.lora(perceptron(), MEMBERS),
            torch.rand(n, 768),
        )

    for width, steps in ((1, 20), (4, 20), (16, 5)):
        shape = 784, (64 * width, 32 * width)
        for dropout in (0.0, 0.1):
            add(
                f"deep, perceptrons x{width}, dropout {dropout}",
                lambda s=shape, d=dropout: ensembles.deep(
                    lambda: models.mlp(*s, dropout=d), 10
                ),
                torch.rand(128 * steps, 784),
                batch_size=128,
                predict=not dropout,
            )

        def masks(s=shape, steps=steps):
            torch.manual_seed(0)
            found = extraction.masks(models.mlp(*s), 10)
            x, y = torch.rand(128 * steps, 784), torch.arange(128 * steps) % 10
            how = {"steps": steps, "batch_size": 128, "progress": False}
            return lambda: extraction.fit_masks(found, x, y, **how)

        made[f"extraction, masks x{width}, train 128"] = 128, masks
    add(
        "extraction, tiles",
        lambda: extraction.tiles(models.cifar_resnet(20).eval(), 8),
        torch.rand(64, 3, 32, 32),
        train=False,
    )

    for channels, side in ((1, 8), (3, 32)):

        def network(channels=channels):
            layers: list[nn.Module] = []
            for i, before in enumerate((channels, 16, 32)):
                after = 16 * 2**i
                layers += [nn.Conv2d(before, after, 3, 1 + (i > 0), 1)]
                layers += [nn.BatchNorm2d(after), nn.ReLU()]
            pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
            return nn.Sequential(*layers, *pool)

        x = torch.rand(64, channels, side, side)
        add(
            f"convolutions {side}, deep",
            lambda make=network: ensembles.deep(make, 10),
            x,
        )
        add(
            f"convolutions {side}, from_members",
            lambda make=network: ensembles.from_members([make() for _ in range(10)]),
            x,
        )

    def lite0():
        torch.manual_seed(0)
        backbone = models.pretrained("efficientnet-lite0", 10)
        target = r"\._(expand_conv|project_conv|conv_head)$"
        return ensembles.lora(backbone, 4, rank=8, target=target)

    add("lite0, lora", lite0, torch.rand(16, 3, 96, 96), optimizer="adamw")
    add("lite0, lora", lite0, torch.rand(256, 3, 96, 96), train=False)

    for image, patch, width in ((8, 2, 96), (28, 4, 192)):

        def fused(image=image, patch=patch, width=width, even=True):
            torch.manual_seed(0)
            full = models.vit(image, patch, width=width, layers=6, heads=6).eval()
            pairs = [(layer, head) for layer in range(6) for head in range(6)]
            kept = [
                [(layer, (layer + m + i) % 6) for layer in range(6) for i in (0, 3)]
                for m in range(3)
            ]
            sets = kept if even else heads.sample_heads(pairs, 12, 3)
            return heads.fuse([heads.prune(copy.deepcopy(full), s) for s in sets])

        for n in (1, 8, 64):
            x = torch.rand(n, 1, image, image)
            add(f"fused {width}", fused, x, train=False)
            add(
                f"fused {width}, uneven",
                lambda make=fused: make(even=False),
                x,
                train=False,
            )

    for network, net in (("small-cnn", models.small_cnn), ("vit", models.embedded)):
        for name, settings in METHODS.items():
            if network == "vit" and name == "packed":
                continue
            make = getattr(ensembles, name)
            add(
                f"methods, {network}, {name}",
                lambda make=make, net=net, s=settings: make(net(), 4, *s),
                torch.rand(64, 1, 28, 28),
            )
    return made


def serve():
    """Run works by name, as the other process asks for them, and print seconds."""
    import warnings

    warnings.filterwarnings("ignore")
    every, name, run = works(), "", None
    for line in sys.stdin:
        command, _, asked = line.strip().partition(" ")
        if command == "list":
            print(repr({name: n for name, (n, _) in every.items()}), flush=True)
            continue
        try:
            if asked != name:
                run = None  # frees the last one's memory
                name, run = asked, every[asked][1]()
                run()
            start = time.perf_counter()
            run()
            print(time.perf_counter() - start, flush=True)
        except Exception as error:
            print(f"! {type(error).__name__}: {error}".splitlines()[0], flush=True)


class Version:
    """A process with the package of one checkout."""

    def __init__(self, checkout: Path):
        self.process = subprocess.Popen(
            [sys.executable, HERE, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
        )

    def ask(self, line: str) -> str:
        """Send a line, and return the answer."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("names", nargs="*", metavar="WORK")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    versions = [Version(HERE.parent.parent), Version(arguments.before)]
    sizes = eval(versions[0].ask("list"))
    missed = []
    print("| work | new / old | quartiles | old, ms |\n|---|--:|---|--:|")
    for name, n in sizes.items():
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        rounds = []
        for _ in range(arguments.rounds):
            new, old = (version.ask(f"time {name}") for version in versions)
            if "!" in new + old:
                print(f"| {name} | new: {new}, old: {old} | | |", flush=True)
                break
            rounds.append((float(new), float(old)))
        else:
            low, middle, high = statistics.quantiles((a / b for a, b in rounds), n=4)
            before = 1e3 * statistics.median(old for _, old in rounds)
            spread = f"{low:.2f} to {high:.2f}"
            print(f"| {name} | {middle:.2f} | {spread} | {before:.1f} |", flush=True)
            if middle > (1.3 if n > 1 else 1.7):
                missed.append(name)
    print("\nmissed: " + ("; ".join(missed) or "none"))
    return min(len(missed), 1)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve()
    else:
        sys.exit(main())
