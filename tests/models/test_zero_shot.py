"""CLIP against prompts: the logits of transformers, from folders and from models, and what is refused."""

import copy

import pytest
import torch
from same import near
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
)

from uqlab import ensembles, training
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
def test_logits_are_scaled_cosines(folder):
    network = clip_zero_shot(folder, TEXTS)
    found = network(images()) / network.scale.exp()
    assert found.abs().max() <= 1
    f, g = network.vision(images()), network.text(network.prompts)
    near(f.norm(dim=1), torch.ones(5))
    near(found[2, 1], torch.cosine_similarity(f[2], g[1], dim=0))


@torch.no_grad()
def test_other_prompts_share_the_towers(folder):
    network = clip_zero_shot(folder, TEXTS)
    others = network.prompted(["a star", "red"])
    assert others.text is network.text
    near(others(images()), theirs(["a star", "red"]))
    near(network.prompted(others.prompts)(images()), others(images()))
    assert network.prompts.shape[0] == 3


def test_an_ensemble_of_them_trains_and_predicts(folder):
    network = clip_zero_shot(folder, TEXTS)
    for p in network.vision.parameters():  # locked, as in LiT
        p.requires_grad_(False)
    ensemble = ensembles.from_members([network, copy.deepcopy(network)])
    labels = torch.tensor([0, 1, 2, 0, 1])
    before = {name: p.clone() for name, p in network.named_parameters()}
    training.fit(
        ensemble, images(), labels, epochs=2, lr=0.01, optimizer="adamw", progress=False
    )
    moved = {
        name.split(".")[0]
        for name, p in network.named_parameters()
        if not torch.equal(p, before[name])
    }
    assert moved == {"text", "scale"}
    assert training.predict(ensemble, images(), batch_size=2).shape == (2, 5, 3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("a star", TypeError, "must be a list.*got 'a star'"),
        ([], TypeError, "list of at least one text"),
    ],
)
def test_prompts_that_do_not_fit(folder, prompts, error, message):
    with pytest.raises(error, match=message):
        clip_zero_shot(folder, prompts)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_clip(folder, tmp_path):
    with pytest.raises(ValueError, match=r"came from no folder.*give token ids"):
        clip_zero_shot(clip(), TEXTS)
    with pytest.raises(TypeError, match="CLIPModel or its folder, got Linear"):
        clip_zero_shot(torch.nn.Linear(1, 1), TEXTS)
    BertModel(BertConfig(**SIZES, vocab_size=9)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"no checkpoint for CLIPModel.*BertConfig"):
        clip_zero_shot(tmp_path / "bert", TEXTS)
    whole = clip()
    CLIPVisionModel(whole.config.vision_config).save_pretrained(tmp_path / "half")
    whole.config.save_pretrained(tmp_path / "half")
    with pytest.raises(
        ValueError, match=r"lacks \d+ weights of CLIPModel.*: logit_scale"
    ):
        clip_zero_shot(tmp_path / "half", TEXTS)
    clip().save_pretrained(tmp_path / "mute")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        clip_zero_shot(tmp_path / "mute", TEXTS)
    with pytest.raises(ValueError, match="no checkpoint for CLIPModel: Unrecognized"):
        clip_zero_shot(tmp_path, TEXTS)
