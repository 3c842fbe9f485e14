"""Training the masks of ten sub-models against as many steps of a plain ensemble of ten networks of the same width.

The plain ensemble is ours (training.fit, SGD with momentum), itself several times faster than a loop over modules.
Target: at most 1.5x its time at every width. `no input masks` leaves the input features unmasked. Then tiles: 64
members of one residual network in one pass, against the network's own prediction and against a pass for each member.
Exit status 1 if the target is missed.
"""

import sys

import torch
from _timing import DEVICE, interleaved, report

from uqlab import ensembles, extraction, models, training

MEMBERS, BATCH, TARGET = 10, 128, 1.5
SETTINGS = {
    1: (60, 9),
    4: (20, 9),
    16: (10, 5),
    64: (2, 3),
}  # width of a network on 784 pixels: steps, rounds


def mask_candidates(width, steps, pixels=784):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(BATCH * steps, pixels, generator=generator)
    labels = torch.randint(0, 10, (BATCH * steps,), generator=generator)
    plain = ensembles.deep(
        lambda: models.mlp(pixels, (64 * width, 32 * width)), MEMBERS
    ).to(DEVICE)
    masks = {
        kept: extraction.masks(plain.member(0), MEMBERS, inputs=kept)
        for kept in (True, False)
    }

    def train():
        training.fit(
            plain,
            inputs,
            labels,
            epochs=1,
            lr=0.01,
            momentum=0.9,
            batch_size=BATCH,
            progress=False,
        )

    def extract(inputs_masked=True):
        extraction.fit_masks(
            masks[inputs_masked],
            inputs,
            labels,
            steps=steps,
            batch_size=BATCH,
            progress=False,
        )

    return {"plain": train, "masks": extract, "no input masks": lambda: extract(False)}


def tile_candidates():
    network = models.cifar_resnet(20).eval().to(DEVICE)
    x = torch.rand(64, 3, 32, 32, device=DEVICE)
    tiles = extraction.tiles(network, 8)
    tiles(x[:1])  # the first call checks the model
    some = [tiles.member(m) for m in range(4)]

    def predict(model):
        with torch.no_grad():
            return model(x)

    return {
        "network": lambda: predict(network),
        "64 tiles": lambda: predict(tiles),
        "4 members one by one": lambda: [predict(member) for member in some],
    }


if __name__ == "__main__":
    missed = []
    for width, (steps, rounds) in SETTINGS.items():
        print(
            f"\n{MEMBERS} members, MLP 784-{64 * width}-{32 * width}-10, {steps} steps of {BATCH}"
        )
        ratios = report(interleaved(mask_candidates(width, steps), rounds), "plain")
        if ratios["masks"] > TARGET:
            missed.append(f"masks at width x{width}: {ratios['masks']:.2f} > {TARGET}")
    print("\nResNet-20 on 64 images of 32 x 32, an 8 x 8 map")
    report(interleaved(tile_candidates(), 9), "network")
    if missed:
        sys.exit("targets missed: " + "; ".join(missed))
