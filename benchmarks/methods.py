"""Four members of each implicit method against the plain loop over its members, forward and with a backward pass.

On a convolutional network (28 x 28, width 32) and on the embedded vision transformer, 64 images. Prints ratios of
medians: below 1 the ensemble is faster than its members one after the other. Exit status 1 if the two disagree.

    python benchmarks/methods.py [REPEATS]
"""

import sys

import torch
import torch.nn.functional as F
from _timing import interleaved, report
from torch import nn

from uqlab import ensembles, models

MEMBERS, BATCH = 4, 64
REPEATS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 5
METHODS = {
    "lora": lambda net: ensembles.lora(net, MEMBERS, 4),
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
    many, labels = x.expand(MEMBERS, *x.shape), torch.arange(len(x)).repeat(MEMBERS) % 10

    def run():
        model.train()
        for rows in model.passes(many):
            logits = model.run(many[rows], rows)
            F.cross_entropy(logits.flatten(0, 1), labels[: len(logits) * len(x)]).backward()

    return run


def main() -> int:
    torch.manual_seed(0)
    x, wrong = torch.rand(BATCH, 1, 28, 28), []
    for network, net in {"small-cnn": models.small_cnn(), "embedded": models.embedded()}.items():
        for name, make in METHODS.items():
            ensemble = make(net).eval()
            loop = ensembles.from_members([ensemble.member(m) for m in range(MEMBERS)]).eval()
            with torch.no_grad():
                if not torch.allclose(ensemble(x), loop(x), rtol=1e-3, atol=1e-3):
                    wrong.append(f"{name} on {network}")
            for kind, passed in (("forward", forward), ("forward and backward", backward)):
                print(f"-- {network}, {name}, {kind}")
                each = {"its members one by one": passed(loop, x), "the ensemble": passed(ensemble, x)}
                report(interleaved(each, REPEATS), "its members one by one")
    for case in wrong:
        print(f"the members of {case} are not what the ensemble answers")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
