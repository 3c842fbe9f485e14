"""Small networks of transformers and implicit ensembles of them, for several test files."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from uqlab import ensembles, models

MAKERS = {
    "lora": lambda backbone, members=3, **kw: ensembles.lora(
        backbone, members, kw.pop("rank", 2), **kw
    ),
    "singular_value": lambda backbone, members=3, **kw: ensembles.singular_value(
        backbone, members, **kw
    ),
    "batch": lambda backbone, members=3, **kw: ensembles.batch(backbone, members, **kw),
    "batch++": lambda backbone, members=3, **kw: ensembles.batch(
        backbone, members, additive=True, **kw
    ),
}
EVERY = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
# Those whose members train the backbone together.
TRAINED = {
    "masksembles": lambda backbone, members=3, **kw: ensembles.masksembles(
        backbone, members, **({"total_members": 5} | kw)
    ),
    "film": lambda backbone, members=3, **kw: ensembles.film(backbone, members, **kw),
}
FOLDED = pytest.mark.parametrize(
    "make", (MAKERS | TRAINED).values(), ids=MAKERS | TRAINED
)
# Members of one width, as if there were five.
APART = {
    "packed": lambda backbone, members=3, **kw: ensembles.packed(
        backbone, members, **({"alpha": 2.5, "total_members": 5} | kw)
    ),
}
ALL = pytest.mark.parametrize(
    "make", (MAKERS | TRAINED | APART).values(), ids=MAKERS | TRAINED | APART
)
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
PIXELS = {"image_size": 8, "patch_size": 4, "num_channels": 1}


def vit(layers=2):
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(**SMALL | {"num_hidden_layers": layers}, **PIXELS, num_labels=3)
    ).eval()


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=50, **SMALL)).eval()


def clip():
    torch.manual_seed(0)
    return CLIPForImageClassification(
        CLIPConfig(vision_config={**SMALL, **PIXELS}, num_labels=3)
    ).eval()


def cnn():
    torch.manual_seed(0)
    return models.small_cnn(3, width=8).eval()


def resnet():
    torch.manual_seed(0)
    return models.wide_resnet(10, 1, 3, channels=1).eval()


def mlp():
    torch.manual_seed(0)
    return models.mlp(64, (12, 6), 3).eval()


def images(count=4):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, 8, 8, generator=generator), torch.arange(count) % 3


def moved(ensemble):
    """The ensemble with its trainable parameters somewhere else: away from zeros and equal members."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in ensemble.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn(p.shape, generator=generator)
    return ensemble.eval()


def owned(ensemble, kind):
    """What members hold for weights that they see by such a module, [members, ...] each, by the layer's name."""
    return {
        name.removesuffix(".weight"): part.kind
        for name, part in ensemble.seen.items()
        if isinstance(part.kind, kind)
    }


def generators(count):
    return [torch.Generator().manual_seed(m) for m in range(count)]


def logits(model, x):
    output = model(x)
    return getattr(output, "logits", output)


def count(ensemble):
    return sum(p.numel() for p in ensemble.parameters() if p.requires_grad)
