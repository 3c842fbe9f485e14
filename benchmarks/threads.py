"""When do threads pay in training? `training.fit` in one thread and in all, by the multiply-adds of a step.

Members that share nothing are trained side by side, a shard in each thread; what is trained together, and one network,
has its products split. The columns say how many multiply-adds a step has, how long it takes in one thread, and the time
in all threads over that in one. There is no target: this script is the reason for `modules.ONE_THREAD`.
"""

import statistics

import torch
from _timing import interleaved
from torch.utils.flop_counter import FlopCounterMode

from uqlab import ensembles, models, training
from uqlab.core import modules

STEPS = 4
NETWORKS = {
    "perceptron 256": lambda: models.mlp(784, (256, 128)),
    "convolutional 8": lambda: models.small_cnn(10, width=8, patch=2),
    "convolutional 16": lambda: models.small_cnn(10, width=16, patch=2),
    "transformer 32": lambda: models.vit(28, 7, width=32, layers=4, heads=2),
    "transformer 128": models.embedded,
}
METHODS = {
    "one": lambda network: ensembles.from_members([network]),
    "lora": lambda network: ensembles.lora(network, 4, rank=3),
    "film": lambda network: ensembles.film(network, 4),
}


def main() -> None:
    images = torch.rand(64 * STEPS, 1, 28, 28)
    labels = torch.arange(len(images)) % 10
    for title, make in NETWORKS.items():
        for method, ensemble_of in METHODS.items():
            try:
                ensemble = ensemble_of(make())
            except ValueError:  # a perceptron has no norm
                continue
            for batch in (8, 64):
                compare(
                    f"{title}, {method}, {batch} images",
                    ensemble,
                    images,
                    labels,
                    batch,
                )


def compare(title, ensemble, images, labels, batch):
    """Print how long a step takes in one thread, and in all of them."""

    def train(limit):
        modules.ONE_THREAD = limit
        how = {"epochs": 1, "lr": 1e-4, "batch_size": batch, "progress": False}
        training.fit(ensemble, images[: STEPS * batch], labels[: STEPS * batch], **how)

    acts = {"one": lambda: train(float("inf")), "all": lambda: train(0)}
    seconds = {
        name: statistics.median(times) for name, times in interleaved(acts, 5).items()
    }
    counted = FlopCounterMode(display=False)
    with torch.no_grad(), counted:
        ensemble(images[:1])
    work = counted.get_total_flops() / 2 * batch
    print(
        f"{title:<38} {work:9.1e}  {1e3 * seconds['one'] / STEPS:7.1f} ms  {seconds['all'] / seconds['one']:.2f}"
    )


if __name__ == "__main__":
    main()
