"""Members by vmap beside members one after the other: the rule of `mode="auto"`.

Predictions and steps of training (forward and backward, a batch of its own for each member) of LoRA-Ensembles and deep
ensembles, by the multiply-adds of one member's pass. The rule, `SMALL_WORK` in ensembles/base.py, takes vmap up to
1.5e9 of them. No target.

    python benchmarks/ways.py [REPEATS]
"""

import sys

import torch
from _timing import DEVICE, interleaved, report

from uqlab import ensembles, heads, models

REPEATS = int(sys.argv[1]) if len(sys.argv) > 1 else 7
CASES = {
    "perceptron of width 64": (lambda: models.mlp(64, (64, 64)), (64,), (8, 128, 1024)),
    "perceptron of width 768": (
        lambda: models.mlp(768, (768, 768)),
        (768,),
        (8, 64, 512),
    ),
    "ViT of width 96, 17 tokens": (
        lambda: models.vit(8, 2, width=96, layers=6, heads=6),
        (1, 8, 8),
        (1, 8, 64),
    ),
    "ViT of width 192, 50 tokens": (
        lambda: models.vit(28, 4, width=192, layers=6, heads=6),
        (1, 28, 28),
        (1, 4, 8, 16),
    ),
}
METHODS = {
    "lora": lambda make, members: ensembles.lora(make(), members),
    "deep": ensembles.deep,
}


def predicting(ensemble, x, mode):
    def run():
        ensemble.mode = mode
        with torch.no_grad():
            ensemble(x)

    return run


def learning(ensemble, x, mode):
    many = x.expand(ensemble.members, *x.shape)

    def run():
        ensemble.mode = mode
        for rows in ensemble.passes(many):
            ensemble.run(many[rows], rows).square().mean().backward()

    return run


def main():
    for case, (make, shape, batches) in CASES.items():
        for method, build in METHODS.items():
            for members in (4, 16):
                torch.manual_seed(0)
                ensemble = build(make, members).to(DEVICE).eval()
                for batch in batches:
                    x = torch.rand(batch, *shape, device=DEVICE)
                    work = heads.multiply_adds(ensemble.member(0), x)
                    for what, way in (("predict", predicting), ("train", learning)):
                        print(
                            f"\n{case}, {method}, {members} members, {batch} inputs, {work:.1e} multiply-adds, {what}"
                        )
                        ways = {
                            mode: way(ensemble, x, mode) for mode in ("loop", "vmap")
                        }
                        report(interleaved(ways, REPEATS), "loop")


if __name__ == "__main__":
    main()
