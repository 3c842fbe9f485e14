"""Transformers of several families, whose heads influence the logits, and inputs for them: for the tests of heads."""

import types

import pytest
import torch
from networks import logits as call  # noqa: F401
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPForImageClassification,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)

from uqlab import models
from uqlab.models.checkpoints import plain_logits

LAYERS, HEADS, CLASSES = 3, 4, 3
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class ClipText(nn.Module):
    """CLIP's text encoder: causal attention, and a classifier that reads the last token of a text."""

    def __init__(self):
        super().__init__()
        self.text = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=50, **SIZES, max_position_embeddings=12, eos_token_id=49
            )
        )
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, ids):
        return self.classifier(self.text(ids).pooler_output)


def text_classifier(pooling="mean"):
    tokenizer = types.SimpleNamespace(pad_token_id=0, model_max_length=12)
    encoder = BertModel(
        BertConfig(vocab_size=50, **SIZES, **DROPOUT), add_pooling_layer=False
    )
    return models.TextClassifier(encoder, tokenizer, nn.Linear(16, CLASSES), pooling)


MAKERS = {
    "vit": lambda: models.vit(8, 4, width=16, layers=LAYERS, heads=HEADS, classes=CLASSES),
    "standardized vit": lambda: nn.Sequential(models.Standardize([0.4], [0.2]), MAKERS["vit"]()),
    "clip": lambda: plain_logits(
        CLIPForImageClassification(
            CLIPConfig(
                vision_config={**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1}, num_labels=CLASSES
            )
        )
    ),
    "clip text": ClipText,
    "bert": lambda: BertForSequenceClassification(BertConfig(vocab_size=50, **SIZES, **DROPOUT, num_labels=CLASSES)),
    "distilbert": lambda: DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=50, dim=16, n_layers=LAYERS, n_heads=HEADS, hidden_dim=24, num_labels=CLASSES,
            dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
        )
    ),
    "text": text_classifier,
    "text, first token": lambda: text_classifier("first"),
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", MAKERS)


def clip_model():
    """CLIP with three layers for texts and two for images."""
    text = {
        **SIZES,
        "vocab_size": 50,
        "max_position_embeddings": 12,
        "eos_token_id": 49,
    }
    vision = {
        **SIZES,
        "num_hidden_layers": 2,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
    }
    return strong(
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    )


def two_towers():
    """It, with four prompts of several lengths."""
    prompts = [
        [1, 7, 3, 49, 0, 0],
        [1, 9, 9, 4, 2, 49],
        [1, 30, 49, 0, 0, 0],
        [1, 5, 6, 7, 49, 0],
    ]
    return models.clip_zero_shot(clip_model(), torch.tensor(prompts))


def make(name="vit", seed=0):
    """A network in float64 whose attention is far from uniform and whose heads differ strongly."""
    torch.manual_seed(seed)
    return strong(MAKERS[name]())


def strong(model):
    model = model.double().eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim == 2 and "embed" not in key:
                p.copy_(torch.randn(p.shape, dtype=p.dtype) / p.shape[1] ** 0.5)
            elif "bias" in key:
                p.copy_(0.3 * torch.randn(p.shape, dtype=p.dtype))
            elif "norm" in key.lower():
                p.copy_(1 + 0.3 * torch.randn(p.shape, dtype=p.dtype))
            else:
                p.mul_(10)  # embeddings, which are drawn small
    return model


def inputs(name="vit", count=5, seed=1):
    """Images, or token ids of texts of several lengths; tensors by name for plain models of transformers."""
    generator = torch.Generator().manual_seed(seed)
    if "vit" in name or name == "clip":
        return torch.rand(count, 1, 8, 8, generator=generator, dtype=torch.float64)
    ids = torch.randint(1, 48, (count, 7), generator=generator)
    used = torch.arange(7) < torch.randint(3, 8, (count, 1), generator=generator)
    if name == "clip text":
        return ids.where(used, 49)  # the first token 49 ends the text
    ids = ids * used
    return (
        ids
        if name.startswith("text")
        else {"input_ids": ids, "attention_mask": used.long()}
    )


def labels(count=5, seed=2):
    return torch.randint(
        CLASSES, (count,), generator=torch.Generator().manual_seed(seed)
    )


SETS = {
    "one": [(1, 2)],
    "several": [(0, 3), (1, 0), (1, 2), (2, 1)],
    "a whole layer": [(1, 0), (1, 1), (1, 2), (1, 3)],
    "but one": [(0, 0), (0, 2), (0, 3), (2, 0), (2, 1), (2, 3)],
    "all": [(layer, head) for layer in range(LAYERS) for head in range(HEADS)],
}
