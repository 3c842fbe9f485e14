"""How ten convolutional members with BatchNorm train fastest on a CPU.

Routes: one after the other; as grouped convolutions; by torch.func.vmap; and what `training.fit` does with them, shards
of members side by side, one thread each. The network has three convolutions; a step is forward, backward and SGD, on
inputs of 1 x 8 x 8 and 3 x 32 x 32. There is no target: this script is the reason for the route that `fit` takes.
"""

import itertools

import torch
import torch.nn.functional as F
from _timing import DEVICE, interleaved, report
from torch import nn

from uqlab import ensembles, training

MEMBERS, BATCH = 10, 64


def network(members: int, channels: int) -> nn.Sequential:
    """`members` copies side by side in the channels, each seeing its own group; members=1 is the plain network."""
    sizes = [channels, 16, 32, 64]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(sizes)):
        convolution = nn.Conv2d(
            before * members, after * members, 3, 1 + (i > 0), padding=1, groups=members
        )
        layers += [convolution, nn.BatchNorm2d(after * members), nn.ReLU()]
    layers += [
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(64 * members, 10 * members, 1, groups=members),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers).to(DEVICE)


def steps(channels: int, side: int):
    x = torch.randn(MEMBERS, BATCH, channels, side, side, device=DEVICE)
    y = torch.randint(0, 10, (MEMBERS, BATCH), device=DEVICE)

    nets = [network(1, channels) for _ in range(MEMBERS)]
    optimizer = torch.optim.SGD(
        [p for net in nets for p in net.parameters()], 0.01, fused=True
    )

    def loop():
        optimizer.zero_grad()
        for m, net in enumerate(nets):
            F.cross_entropy(net(x[m]), y[m]).backward()
        optimizer.step()

    wide = network(MEMBERS, channels)
    wide_optimizer = torch.optim.SGD(wide.parameters(), 0.01, fused=True)
    side_by_side = (
        x.transpose(0, 1).flatten(1, 2).contiguous()
    )  # [batch, members * channels, side, side]

    def grouped():
        wide_optimizer.zero_grad()
        logits = wide(side_by_side).unflatten(1, (MEMBERS, 10)).transpose(0, 1)
        (F.cross_entropy(logits.flatten(0, 1), y.flatten()) * MEMBERS).backward()
        wide_optimizer.step()

    copies = [network(1, channels) for _ in range(MEMBERS)]
    for copy in copies:  # vmap cannot update running statistics in place
        for layer in copy.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.track_running_stats, layer.running_mean, layer.running_var = (
                    False,
                    None,
                    None,
                )
                layer.num_batches_tracked = None
    weights, buffers = torch.func.stack_module_state(copies)
    stacked_optimizer = torch.optim.SGD(list(weights.values()), 0.01, fused=True)

    def loss(weight, buffer, inputs, labels):
        return F.cross_entropy(
            torch.func.functional_call(copies[0], (weight, buffer), (inputs,)), labels
        )

    def vmapped():
        stacked_optimizer.zero_grad()
        torch.func.vmap(loss)(weights, buffers, x, y).sum().backward()
        stacked_optimizer.step()

    ensemble = ensembles.from_members([network(1, channels) for _ in range(MEMBERS)])
    settings = {"epochs": 1, "lr": 0.01, "batch_size": BATCH, "progress": False}

    def ours():
        training.fit(ensemble, x[0], y[0], **settings)

    return {"loop": loop, "grouped": grouped, "vmap": vmapped, "ours": ours}


if __name__ == "__main__":
    for channels, side in ((1, 8), (3, 32)):
        print(
            f"\n{MEMBERS} members, batch {BATCH}, inputs {channels} x {side} x {side}"
        )
        report(interleaved(steps(channels, side), repeats=9), "loop")
