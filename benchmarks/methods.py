"""Four members of each method against the plain loop over its members, forward and with a backward pass.

On a convolutional network (28 x 28, width 32) and on the embedded vision transformer, 64 images. Exit status 1 if an
ensemble and its members disagree.

    python benchmarks/methods.py [REPEATS]

How to read it: the ratio is of medians, and the brackets hold its quartiles. Below 1 the ensemble is faster than its
members one after the other. The loop's members are plain networks with merged weights, so it does the least arithmetic
that there is, and a method gains only where the members share products. What a network cannot carry is said.

Not here: "deep" (deep_ensemble.py), "masks" and "tiles" (extraction.py), "hydra" (fused.py); "laplace_lora" and
"lora_single", whose layers are those of "lora"; "snapshot", whose members are separate networks, so that the ensemble
is the loop; "dropout", which is one network, asked several times.
"""

import sys

import torch
import torch.nn.functional as F
from _timing import DEVICE, interleaved, report
from torch import nn

from uqlab import ensembles, models

MEMBERS, BATCH = 4, 64
REPEATS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 5
METHODS = {
    "lora": lambda net: ensembles.lora(net, MEMBERS, 4),
    "batch": lambda net: ensembles.batch(net, MEMBERS),
    "batch_additive": lambda net: ensembles.batch(net, MEMBERS, additive=True),
    "singular_value": lambda net: ensembles.singular_value(net, MEMBERS),
    "masksembles": lambda net: ensembles.masksembles(net, MEMBERS),
    "film": lambda net: ensembles.film(net, MEMBERS),
    "packed": lambda net: ensembles.packed(net, MEMBERS),
    "mimo": lambda net: ensembles.mimo(net, MEMBERS),
}


def forward(model: nn.Module, x: torch.Tensor):
    def run():
        model.eval()
        with torch.no_grad():
            return model(x)

    return run


def backward(model: nn.Module, x: torch.Tensor):
    """A training step's products, each member on a batch of its own; MIMO's members go through together."""
    many, labels = (
        x.expand(MEMBERS, *x.shape),
        torch.arange(len(x), device=DEVICE).repeat(MEMBERS) % 10,
    )

    def run():
        model.train()
        for rows in model.passes(many):
            logits = model.run(many[rows], rows)
            F.cross_entropy(
                logits.flatten(0, 1), labels[: len(logits) * len(x)]
            ).backward()

    return run


def main() -> int:
    torch.manual_seed(0)
    x, wrong = torch.rand(BATCH, 1, 28, 28, device=DEVICE), []
    for network, net in {
        "small-cnn": models.small_cnn().to(DEVICE),
        "embedded": models.embedded().to(DEVICE),
    }.items():
        for name, make in METHODS.items():
            try:
                ensemble = make(net).to(DEVICE).eval()
            except ValueError as error:
                print(f"-- {network}, {name}: {error}")
                continue
            loop = ensembles.from_members(
                [ensemble.member(m) for m in range(MEMBERS)]
            ).eval()
            with torch.no_grad():
                if not torch.allclose(ensemble(x), loop(x), rtol=1e-3, atol=1e-3):
                    wrong.append(f"{name} on {network}")
            for kind, passed in (
                ("forward", forward),
                ("forward and backward", backward),
            ):
                print(f"-- {network}, {name}, {kind}")
                each = {
                    "its members one by one": passed(loop, x),
                    "the ensemble": passed(ensemble, x),
                }
                report(interleaved(each, REPEATS), "its members one by one")
    for case in wrong:
        print(f"the members of {case} are not what the ensemble answers")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
