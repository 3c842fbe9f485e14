"""Backbones of transformers: plain logits, checkpoints from folders, texts as token ids, implicit ensembles on them."""

import copy
import json

import huggingface_hub.constants
import pytest
import torch
from same import near
from small_networks import PIXELS, SMALL, moved
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    CLIPConfig,
    CLIPForImageClassification,
    DistilBertConfig,
    DistilBertModel,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from uqlab import ensembles, models, training

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "good",
    "bad",
    "film",
    "very",
    "##ly",
    ".",
]
TEXTS = ["a good film .", "very very bad", "badly", "a film"]


def images(count=6):
    """The brighter, the higher the class."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(count) % 3
    return torch.rand(count, 1, 8, 8, generator=generator) + y.view(-1, 1, 1, 1), y


def save(folder, network, tokenizer=True, pooling=None):
    """A checkpoint as transformers and sentence-transformers write it."""
    network.save_pretrained(folder)
    if tokenizer:
        vocabulary = folder / "vocab.txt"
        vocabulary.write_text("\n".join(WORDS))
        made = BertTokenizer(str(vocabulary), model_max_length=32)
        made.save_pretrained(folder)
    if pooling:
        (folder / "1_Pooling").mkdir()
        config = json.dumps({f"pooling_mode_{pooling}": True})
        (folder / "1_Pooling" / "config.json").write_text(config)
    return folder


def bert(kind=BertForSequenceClassification, **kwargs):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SMALL)
    return kind(config, **kwargs).eval()


# Images ------------------------------------------------------------------------------


def test_vit_is_that_of_transformers():
    torch.manual_seed(0)
    model = models.vit(8, 4, width=16, layers=2, heads=2, classes=3)
    x, _ = images()
    torch.manual_seed(0)
    config = ViTConfig(**SMALL | {"intermediate_size": 64}, **PIXELS, num_labels=3)
    assert torch.equal(model(x), ViTForImageClassification(config)(x).logits)
    assert torch.equal(model.train()(x), model.eval()(x))  # no dropout


def test_images_from_a_folder(tmp_path):
    torch.manual_seed(0)
    encoder = ViTModel(ViTConfig(**SMALL, **PIXELS), add_pooling_layer=False)
    folder, (x, _) = save(tmp_path, encoder, tokenizer=False), images()
    model = models.from_pretrained(folder, 3)
    near(model(x), model.classifier(encoder.eval()(x).last_hidden_state[:, 0]))
    assert model.name == str(tmp_path)
    assert not model.training


def test_a_classifier_that_fits_is_kept(tmp_path):
    torch.manual_seed(0)
    trained = ViTForImageClassification(ViTConfig(**SMALL, **PIXELS, num_labels=3))
    folder, (x, _) = save(tmp_path, trained.eval(), tokenizer=False), images()
    assert torch.equal(models.from_pretrained(folder, 3)(x), trained(x).logits)


def test_clip_without_its_text_half_or_dropout(tmp_path):
    torch.manual_seed(0)
    vision = {**SMALL, **PIXELS, "attention_dropout": 0.5}
    config = CLIPConfig(vision_config=vision, text_config=SMALL, num_labels=3)
    save(tmp_path, CLIPForImageClassification(config), tokenizer=False)
    model, (x, _) = models.from_pretrained(tmp_path, 4), images()
    assert model(x).shape == (6, 4)
    assert torch.equal(model.train()(x), model.eval()(x))


# Texts -------------------------------------------------------------------------------


def test_texts_become_padded_token_ids(tmp_path):
    model = models.from_pretrained(save(tmp_path, bert()), 2, "text")
    assert model.encode(TEXTS[:3]).tolist() == [
        [2, 5, 6, 8, 11, 3],  # [CLS] a good film . [SEP]
        [2, 9, 9, 7, 3, 0],
        [2, 7, 10, 3, 0, 0],  # [CLS] bad ##ly [SEP]
    ]
    assert model.encode(TEXTS, max_length=4).shape == (4, 4)
    assert model.longest == 32
    assert copy.deepcopy(model).tokenizer is model.tokenizer  # slow to copy
    with pytest.raises(TypeError, match="at least one text"):
        model.encode("a film")


def test_a_trained_head_or_pooler_is_that_of_transformers(tmp_path):
    own = bert()
    model = models.from_pretrained(save(tmp_path / "head", own), 2, "text")
    tokens = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    ids = model.encode(TEXTS)
    near(model(ids), own(**tokens).logits)
    assert torch.equal(model.train()(ids), model.eval()(ids))  # no dropout
    encoder = bert(BertModel)
    model = models.from_pretrained(save(tmp_path / "pooler", encoder), 2, "text")
    near(model(ids), model.network.classifier(encoder(**tokens).pooler_output))


def mean_of_tokens(encoder, tokens):
    states = encoder(**tokens).last_hidden_state
    mask = tokens["attention_mask"].bool()
    return torch.stack([h[kept].mean(0) for h, kept in zip(states, mask, strict=True)])


@pytest.mark.parametrize("pooling", [None, "mean_tokens", "cls_token"])
def test_a_pooler_that_was_not_trained_is_left_out(tmp_path, pooling):
    encoder = bert(BertModel, add_pooling_layer=pooling is not None)
    model = models.from_pretrained(save(tmp_path, encoder, pooling=pooling), 2, "text")
    tokens = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    pooled = mean_of_tokens(encoder, tokens)
    if pooling == "cls_token":
        pooled = encoder(**tokens).last_hidden_state[:, 0]
    near(model(model.encode(TEXTS)), model.classifier(pooled))


@pytest.mark.parametrize(
    "encoder",
    [
        lambda: RobertaModel(RobertaConfig(
            vocab_size=12, max_position_embeddings=34, pad_token_id=0, **SMALL
        )),
        lambda: DistilBertModel(DistilBertConfig(
            vocab_size=12, dim=16, n_layers=2, n_heads=2, hidden_dim=32
        )),
    ],
    ids=["roberta", "distilbert"],
)  # fmt: skip
def test_heads_with_new_layers_inside_are_left_out(tmp_path, encoder):
    """Of RoBERTa and DistilBERT two layers of the head are new: frozen, the first would be random for good."""
    torch.manual_seed(0)
    encoder = encoder().eval()
    model = models.from_pretrained(save(tmp_path, encoder), 2, "text")
    tokens = model.tokenizer(
        TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False
    )
    near(model(model.encode(TEXTS)), model.classifier(mean_of_tokens(encoder, tokens)))


@pytest.mark.parametrize("pooling", [None, "mean_tokens"])
def test_padding_changes_no_logit_and_members_read_texts(tmp_path, pooling):
    save(tmp_path, bert(BertModel), pooling=pooling)
    model = models.from_pretrained(tmp_path, 2, "text")
    ids = model.encode(TEXTS)
    together = model(ids)
    assert together.std(0).min() > 1e-6
    near(model(nn.functional.pad(ids, (0, 7))), together)
    for i, text in enumerate(TEXTS):
        near(model(model.encode([text]))[0], together[i])
    ensemble = moved(ensembles.lora(model, 3, 2))
    together = ensemble(ids)
    for m in range(3):
        near(ensemble.member(m)(ids), together[m])
    apart = ensemble.forward_each(torch.stack([ids, ids.flip(0), ids.roll(1, 0)]))
    near(apart[1].flip(0), together[1])
    near(training.predict(ensemble, ids, batch_size=3), together.detach())


def test_columns_of_padding_are_never_computed(tmp_path):
    model = models.from_pretrained(save(tmp_path, bert()), 2, "text")
    seen = []
    model.network.bert.register_forward_pre_hook(
        lambda _, args, named: seen.append([*args, *named.values()][0].shape),
        with_kwargs=True,
    )
    ids = nn.functional.pad(model.encode(TEXTS), (0, 7))
    model(ids)
    model(ids[2:3])
    model(torch.tensor([[2, 0, 5, 0]]))  # what is inside stays
    assert seen == [(4, 6), (1, 4), (1, 3)]


def test_minilm():
    model = models.from_pretrained(models.minilm(), 2, "text")
    assert (model.pooling, model.longest) == ("mean", 512)
    texts = ["a wonderful movie", "what a great film", "tax law of Norway"]
    ids = model.encode(texts)
    plain = AutoModelForSequenceClassification.from_pretrained(
        models.minilm(), num_labels=2, use_safetensors=True
    ).eval()
    tokens = model.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = mean_of_tokens(plain.bert, tokens)
        near(model(ids), model.classifier(states))
    lost = model.lose(ids, 0.5, torch.Generator().manual_seed(0))
    changed, padding = lost != ids, ids == model.tokenizer.pad_token_id
    assert 0 < changed.sum() < (~padding).sum()
    assert not (changed & padding).any()
    assert (lost[changed] == model.tokenizer.unk_token_id).all()


# Bad input ---------------------------------------------------------------------------


def three_layers(folder):
    config = BertConfig(vocab_size=12, **SMALL | {"num_hidden_layers": 3})
    config.save_pretrained(folder)


def no_tokenizer(folder):
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "task", "message"),
    [
        (lambda folder: None, "image", "checkpoint' cannot be loaded"),
        (lambda folder: (folder / "config.json").unlink(), "text", "cannot be loaded"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "text",
         "no file named model.safetensors"),
        (no_tokenizer, "text", "holds no tokenizer"),
        (three_layers, "text", r"lacks .* weights of Bert.*layer\.2"),
    ],
)  # fmt: skip
def test_bad_folders(tmp_path, spoil, task, message, capfd):
    folder = save(tmp_path / "checkpoint", bert(BertModel))
    spoil(folder)
    capfd.readouterr()
    with pytest.raises(ValueError, match=message):
        models.from_pretrained(folder, 2, task)
    assert capfd.readouterr() == ("", "")


def test_no_such_folder_and_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in (tmp_path / "nowhere", "./nowhere", "nobody/nothing"):
        with pytest.raises(OSError, match=f"'{name}' cannot be loaded"):
            models.from_pretrained(name, 2)
