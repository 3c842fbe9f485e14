"""Networks as people have them at full size: a pretrained convolutional network, a text encoder, ViT-Ti."""

import numpy as np
import pytest
import torch
from same import unchanged
from transformers import ViTConfig, ViTForImageClassification

from uqlab import ensembles, models, training

TEXTS = [
    "A film of rare charm.",
    "The plot is an insult, and long at that.",
    "Meh",
    "Nobody should sit through it.",
]


def lite0():
    """A new classifier of ten classes; images of 96 x 96."""
    torch.manual_seed(0)
    return models.pretrained("efficientnet-lite0", 10), torch.rand(4, 3, 96, 96)


def minilm():
    torch.manual_seed(0)
    network = models.pretrained("minilm", 2)
    return network, network.encode(TEXTS)


def vit_ti():
    """ViT-Ti with random weights; images of 64 x 64."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        num_labels=10,
    )
    return ViTForImageClassification(config).eval(), torch.rand(4, 3, 64, 64)


NETWORKS = {"lite0": lite0, "minilm": minilm, "vit-ti": vit_ti}
METHODS = {
    "lora": lambda net: ensembles.lora(net, 2, rank=4, seed=1),
    "singular_value": lambda net: ensembles.singular_value(net, 2, seed=1),
    "batch": lambda net: ensembles.batch(net, 2, seed=1),
    "masksembles": lambda net: ensembles.masksembles(net, 2, seed=1),
    "film": lambda net: ensembles.film(net, 2, seed=1),
    "mimo": lambda net: ensembles.mimo(net, 2, repeats=1, seed=1),
}


def labels(count=4):
    return torch.arange(count) % 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_training_and_the_separate_members(name, method):
    network, inputs = NETWORKS[name]()
    if (name, method) == ("minilm", "mimo"):  # token ids have no channels
        with pytest.raises(ValueError, match="begins with Embedding"):
            METHODS[method](network)
        return
    ensemble = METHODS[method](network)
    start = [p.detach().clone() for p in ensemble.parameters() if p.requires_grad]
    how = {"epochs": 1, "lr": 1e-3, "batch_size": 4, "optimizer": "adamw"}
    with unchanged(network):
        history = training.fit(ensemble, inputs, labels(), **how, progress=False)
    assert history.loss.isfinite().all()
    now = [p.detach() for p in ensemble.parameters() if p.requires_grad]
    moved = [not torch.equal(a, b) for a, b in zip(start, now, strict=True)]
    assert np.mean(moved) > 0.5

    together = training.predict(ensemble, inputs)
    for m in range(2):
        alone = training.predict(ensemble.member(m), inputs)[0]
        assert (alone - together[m]).norm() < 1e-3 * alone.norm()
    assert (together[0] - together[1]).norm() > 1e-3 * together.norm()
