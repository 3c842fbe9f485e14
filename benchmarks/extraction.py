"""Training the masks of ten sub-models against as many steps of a plain ensemble of ten networks of the same width.

The plain ensemble is ours (training.fit, SGD with momentum), itself several times faster than a loop over modules.
Target: at most 1.5x its time at every width. `autograd` is the same training without the written-out step, `no input
masks` multiplies the first layer once for all members. Then tiles: 64 members of one residual network in one pass,
against the network's own prediction and against a pass for each member. Exit status 1 if the target is missed.
"""

import sys

import torch
from _timing import interleaved, report

from uqlab import ensembles, extraction, models, training
from uqlab.extraction import fit

MEMBERS, BATCH, TARGET = 10, 128, 1.5
SETTINGS = {(64, 1): (60, 9), (64, 8): (20, 9), (784, 16): (10, 5), (784, 64): (2, 3)}  # pixels, width: steps, rounds


def autograd(run):
    """`run` with every network on the step that serves any of them."""
    written = fit.make_mask_step

    def call():
        fit.make_mask_step = lambda ensemble, flat: fit.AutogradMaskStep(ensemble)
        try:
            return run()
        finally:
            fit.make_mask_step = written

    return call


def mask_candidates(pixels, width, steps):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(BATCH * steps, pixels, generator=generator)
    labels = torch.randint(0, 10, (BATCH * steps,), generator=generator)
    plain = ensembles.deep(lambda: models.mlp(pixels, (64 * width, 32 * width)), MEMBERS)
    masks = {kept: extraction.masks(plain.member(0), MEMBERS, inputs=kept) for kept in (True, False)}

    def train():
        training.fit(plain, inputs, labels, epochs=1, lr=0.01, momentum=0.9, batch_size=BATCH, progress=False)

    def extract(inputs_masked=True):
        extraction.fit_masks(masks[inputs_masked], inputs, labels, steps=steps, batch_size=BATCH, progress=False)

    return {"plain": train, "masks": extract, "no input masks": lambda: extract(False), "autograd": autograd(extract)}


def tile_candidates():
    network = models.cifar_resnet(20).eval()
    x = torch.rand(64, 3, 32, 32)
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
    for (pixels, width), (steps, rounds) in SETTINGS.items():
        print(f"\n{MEMBERS} members, MLP {pixels}-{64 * width}-{32 * width}-10, {steps} steps of {BATCH}")
        ratios = report(interleaved(mask_candidates(pixels, width, steps), rounds), "plain")
        if ratios["masks"] > TARGET:
            missed.append(f"masks at {pixels} pixels, width x{width}: {ratios['masks']:.2f} > {TARGET}")
    print("\nResNet-20 on 64 images of 32 x 32, an 8 x 8 map")
    report(interleaved(tile_candidates(), 9), "network")
    if missed:
        sys.exit("targets missed: " + "; ".join(missed))
