"""Three fused ViTs with 2/3 of their heads, against a deep ensemble of three full ViTs and against a single one.

Every member keeps 4 of 6 heads in each layer, as after Taylor pruning. Targets, for a ViT of 17 tokens (8 x 8 images):
at least 1.7x faster than the deep ensemble at batch 1 and 4, no slower at batch 64. The multiply-adds are about those
of the pruned networks together, so a small batch gains because there are fewer calls; at batch 4 with 50 tokens of
width 192 little of this gain is left. That case is reported without a target, and so are members that keep 2/3 of all
heads but different numbers in each layer, as circuits do. `unsplit` takes the whole batch at once. Exit status 1 if a
target is missed.

    python benchmarks/fused.py [REPEATS]
"""

import sys

import torch
from _timing import DEVICE, interleaved, report

from uqlab import ensembles, heads, models

MEMBERS, LAYERS, HEADS = 3, 6, 6
REPEATS = int(sys.argv[1]) if len(sys.argv) > 1 else 9
LIMITS = {1: 1 / 1.7, 4: 1 / 1.7, 64: 1.0}
CASES = {
    "8 x 8 images, width 96": (8, 2, 96),
    "28 x 28 images, width 192": (28, 4, 192),
}


def unsplit(ensemble):
    ensemble.inputs_per_pass = lambda x: sys.maxsize
    return ensemble


def passes(model, x):
    def call():
        with torch.no_grad():
            model(x)

    return call


def main():
    missed = []
    for case, (image, patch, width) in CASES.items():
        torch.manual_seed(0)
        full = [
            models.vit(image, patch, width=width, layers=LAYERS, heads=HEADS)
            .eval()
            .to(DEVICE)
            for _ in range(MEMBERS)
        ]
        every = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
        even = [
            [
                (layer, (layer + m + i) % HEADS)
                for layer in range(LAYERS)
                for i in (0, 3)
            ]
            for m in range(MEMBERS)
        ]
        sets = {
            "fused": even,
            "fused, uneven": heads.sample_heads(every, len(every) // 3, MEMBERS),
        }
        pruned = {
            name: [heads.prune(full[0], pairs) for pairs in each]
            for name, each in sets.items()
        }
        made = {"deep": ensembles.from_members(full), "single": full[0]}
        made |= {name: heads.fuse(members) for name, members in pruned.items()}
        made |= {
            "unsplit": unsplit(heads.fuse(pruned["fused"])),
            "pruned": ensembles.from_members(pruned["fused"]),
        }
        x = torch.rand(64, 1, image, image, device=DEVICE)
        counts = {
            name: heads.multiply_adds(model, x) / 64e6 for name, model in made.items()
        }
        sizes = {
            name: sum(p.numel() for p in model.parameters()) / 1e6
            for name, model in made.items()
        }
        print(f"\n{case}; multiply-adds an input and parameters, millions: ", end="")
        print(
            ", ".join(
                f"{name} {counts[name]:.1f} and {sizes[name]:.2f}" for name in made
            )
        )
        print(
            "heads of the uneven members",
            [heads.count_heads(member) for member in pruned["fused, uneven"]],
        )
        for batch, limit in LIMITS.items():
            some = x[:batch]
            print(f"\nbatch {batch}")
            repeats = REPEATS if batch > 4 else 6 * REPEATS
            seconds = interleaved(
                {name: passes(model, some) for name, model in made.items()},
                repeats,
                warmup=3,
            )
            ratios = report(seconds, "deep")
            print(
                "ratio to single: "
                + ", ".join(
                    f"{name} {ratios[name] / ratios['single']:.2f}" for name in sets
                )
            )
            if width == 96 and ratios["fused"] > limit:
                missed.append(
                    f"batch {batch}: {ratios['fused']:.2f} > {limit:.2f} of the deep ensemble"
                )
    if missed:
        sys.exit("targets missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
