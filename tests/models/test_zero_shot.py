"""CLIP against prompts: the logits of transformers, from folders and from models, and what is refused."""

import pytest
import torch
from same import near
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
)

from uqlab.models import clip_zero_shot

WORDS = ["<pad>", "<start>", "<unknown>", "<end>", "a", "red", "blue", "star"]
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TEXTS = ["a red star", "a blue star", "star"]


def clip():
    torch.manual_seed(0)
    text = {
        **SIZES,
        "vocab_size": len(WORDS),
        "max_position_embeddings": 8,
        "eos_token_id": 3,
        "attention_dropout": 0.5,
    }
    vision = {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1}
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=6)
    ).eval()


def tokenizer():
    made = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unknown>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<start>", 1), ("<end>", 3)]
    made.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<start>", eos_token="<end>"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip")
    clip().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def images(count=5):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def theirs(texts=TEXTS, x=None):
    given = tokenizer()(texts, padding=True, return_tensors="pt")
    ids, mask = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        found = clip()(
            input_ids=ids,
            attention_mask=mask,
            pixel_values=images() if x is None else x,
        )
    return found.logits_per_image


@torch.no_grad()
def test_logits_are_those_of_transformers(folder):
    network = clip_zero_shot(folder, TEXTS)
    assert not network.training
    near(network(images()), theirs())
    shared = clip()
    ids = torch.tensor([[1, 4, 5, 7, 3], [1, 4, 6, 7, 3], [1, 7, 3, 0, 0]])
    near(clip_zero_shot(shared, ids)(images()), theirs())
    assert clip_zero_shot(shared, ids).vision.encoder is shared.vision_model


@torch.no_grad()
def test_other_prompts_share_the_towers(folder):
    network = clip_zero_shot(folder, TEXTS)
    others = network.prompted(["a star", "red"])
    assert others.text is network.text
    near(others(images()), theirs(["a star", "red"]))
    near(network.prompted(others.prompts)(images()), others(images()))
    assert network.prompts.shape[0] == 3


def test_bad_prompts_and_what_is_not_a_clip(folder, tmp_path, unchecked):
    with pytest.raises(TypeError, match=r"must be a list.*got 'a star'"):
        clip_zero_shot(folder, "a star")
    with pytest.raises(ValueError, match="give token ids"):
        clip_zero_shot(clip(), TEXTS)
    with pytest.raises(TypeError, match="CLIPModel or its folder, got Linear"):
        clip_zero_shot(torch.nn.Linear(1, 1), TEXTS)
    BertModel(BertConfig(**SIZES, vocab_size=9)).save_pretrained(tmp_path / "bert")
    clip().save_pretrained(tmp_path / "mute")
    for name, message in (("bert", "lacks .* weights"), ("mute", "no tokenizer")):
        with pytest.raises(ValueError, match=message):
            clip_zero_shot(tmp_path / name, TEXTS)
