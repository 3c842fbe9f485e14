"""Backbones of transformers: plain logits, checkpoints from folders, texts as token ids, implicit ensembles on them."""

import copy
import json
import shutil

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


def vit(**kwargs):
    return models.vit(8, 4, width=16, layers=2, heads=2, classes=3, **kwargs)


def images(count=6):
    """The brighter, the higher the class."""
    noise, y = (
        torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1)),
        torch.arange(count) % 3,
    )
    return noise + y.view(-1, 1, 1, 1), y


def save(folder, network, tokenizer=True, pooling=None):
    """A checkpoint as transformers and sentence-transformers write it."""
    network.save_pretrained(folder)
    if tokenizer:
        (folder / "vocab.txt").write_text("\n".join(WORDS))
        BertTokenizer(str(folder / "vocab.txt"), model_max_length=32).save_pretrained(
            folder
        )
    if pooling:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({f"pooling_mode_{pooling}": True})
        )
    return folder


def bert(kind=BertForSequenceClassification, **kwargs):
    torch.manual_seed(0)
    return kind(
        BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SMALL), **kwargs
    ).eval()


# Images ---------------------------------------------------------------------------------------------------------------
def test_vit_is_that_of_transformers():
    torch.manual_seed(0)
    model, (x, _) = vit(), images()
    torch.manual_seed(0)
    plain = ViTForImageClassification(
        ViTConfig(**SMALL | {"intermediate_size": 64}, **PIXELS, num_labels=3)
    )
    assert torch.equal(model(x), plain(x).logits)
    assert torch.equal(model.train()(x), model.eval()(x))  # no dropout
    assert not torch.equal(vit()(x), model(x))  # the global seed has moved on


def test_images_from_a_folder(tmp_path):
    torch.manual_seed(0)
    encoder = ViTModel(ViTConfig(**SMALL, **PIXELS), add_pooling_layer=False)
    model, (x, _) = (
        models.from_pretrained(save(tmp_path, encoder, tokenizer=False), 3),
        images(),
    )
    features = encoder.eval()(x).last_hidden_state[:, 0]
    near(model(x), model.classifier(features))
    assert model.name == str(tmp_path)
    assert not model.training


def test_a_classifier_that_fits_is_kept(tmp_path):
    torch.manual_seed(0)
    trained = ViTForImageClassification(
        ViTConfig(**SMALL, **PIXELS, num_labels=3)
    ).eval()
    folder, (x, _) = save(tmp_path, trained, tokenizer=False), images()
    assert torch.equal(models.from_pretrained(folder, 3)(x), trained(x).logits)
    assert models.from_pretrained(folder, 5)(x).shape == (6, 5)


def test_clip_without_its_text_half_or_dropout(tmp_path):
    torch.manual_seed(0)
    config = CLIPConfig(
        vision_config={**SMALL, **PIXELS, "attention_dropout": 0.5},
        text_config=SMALL,
        num_labels=3,
    )
    folder, (x, _) = (
        save(tmp_path, CLIPForImageClassification(config), tokenizer=False),
        images(),
    )
    model = models.from_pretrained(folder, 4)
    assert model(x).shape == (6, 4)
    assert torch.equal(model.train()(x), model.eval()(x))


def test_fine_tuned_copies_of_one_backbone(tmp_path):
    """An explicit ensemble of a pretrained backbone: one encoder, classifiers of their own."""
    save(tmp_path, ViTModel(ViTConfig(**SMALL, **PIXELS)), tokenizer=False)
    ensemble = ensembles.deep(lambda: models.from_pretrained(tmp_path, 3), 2)

    def weights():
        return [dict(ensemble.member(m).named_parameters()) for m in range(2)]

    (a, b), (x, y) = weights(), images()
    assert [name for name in a if not torch.equal(a[name], b[name])] == [
        "classifier.weight"
    ]  # biases start at 0
    training.fit(ensemble, x, y, epochs=1, lr=0.1, progress=False)
    a, b = weights()
    assert not torch.equal(a["vit.embeddings.cls_token"], b["vit.embeddings.cls_token"])


# Texts ----------------------------------------------------------------------------------------------------------------
def test_texts_become_padded_token_ids(tmp_path):
    model = models.from_pretrained(save(tmp_path, bert()), 2, "text")
    assert model.encode(TEXTS[:3]).tolist() == [
        [2, 5, 6, 8, 11, 3],  # [CLS] a good film . [SEP]
        [2, 9, 9, 7, 3, 0],
        [2, 7, 10, 3, 0, 0],  # [CLS] bad ##ly [SEP]
    ]
    assert model.encode(TEXTS, max_length=4).shape == (4, 4)
    assert model.longest == 32
    assert (
        copy.deepcopy(model).tokenizer is model.tokenizer
    )  # of 30,000 words or more, and never changed


def test_a_trained_head_is_that_of_transformers(tmp_path):
    own = bert()
    model = models.from_pretrained(save(tmp_path, own), 2, "text")
    tokens = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    near(model(model.encode(TEXTS)), own(**tokens).logits)
    assert models.from_pretrained(tmp_path, 5, "text")(model.encode(TEXTS)).shape == (
        4,
        5,
    )
    assert torch.equal(
        model.train()(model.encode(TEXTS)), model.eval()(model.encode(TEXTS))
    )  # no dropout


def test_a_trained_pooler_is_used(tmp_path):
    encoder = bert(BertModel)
    model = models.from_pretrained(save(tmp_path, encoder), 2, "text")
    tokens = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    expected = model.network.classifier(encoder(**tokens).pooler_output)
    near(model(model.encode(TEXTS)), expected)


def mean_of_tokens(encoder, tokens):
    states = encoder(**tokens).last_hidden_state
    return torch.stack(
        [
            h[mask.bool()].mean(0)
            for h, mask in zip(states, tokens["attention_mask"], strict=True)
        ]
    )


@pytest.mark.parametrize("pooling", [None, "mean_tokens", "cls_token"])
def test_a_pooler_that_was_not_trained_is_left_out(tmp_path, pooling):
    encoder = bert(BertModel, add_pooling_layer=pooling is not None)
    model = models.from_pretrained(save(tmp_path, encoder, pooling=pooling), 2, "text")
    tokens = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    first = encoder(**tokens).last_hidden_state[:, 0]
    expected = model.classifier(
        first if pooling == "cls_token" else mean_of_tokens(encoder, tokens)
    )
    near(model(model.encode(TEXTS)), expected)
    assert not any("pooler" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    "encoder",
    [
        lambda: RobertaModel(
            RobertaConfig(
                vocab_size=12, max_position_embeddings=34, pad_token_id=0, **SMALL
            )
        ),
        lambda: DistilBertModel(
            DistilBertConfig(
                vocab_size=12, dim=16, n_layers=2, n_heads=2, hidden_dim=32
            )
        ),
    ],
    ids=["roberta", "distilbert"],
)
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
def test_padding_changes_no_logit(tmp_path, pooling):
    model = models.from_pretrained(
        save(tmp_path, bert(BertModel), pooling=pooling), 2, "text"
    )
    ids = model.encode(TEXTS)
    together = model(ids)
    assert together.std(0).min() > 1e-6
    near(model(nn.functional.pad(ids, (0, 7))), together)
    for i, text in enumerate(TEXTS):
        near(model(model.encode([text]))[0], together[i])


def test_columns_of_padding_are_never_computed(tmp_path):
    model = models.from_pretrained(save(tmp_path, bert()), 2, "text")
    seen = []
    model.network.bert.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(
            kwargs.get("input_ids", args[0] if args else None).shape
        ),
        with_kwargs=True,
    )
    ids = nn.functional.pad(model.encode(TEXTS), (0, 7))
    model(ids)
    model(ids[2:3])
    model(torch.tensor([[2, 0, 5, 0]]))  # what is inside stays
    assert seen == [(4, 6), (1, 4), (1, 3)]


@pytest.mark.parametrize("pooling", [None, "mean_tokens"])
def test_members_that_read_texts(tmp_path, pooling):
    backbone = models.from_pretrained(
        save(tmp_path, bert(BertModel), pooling=pooling), 2, "text"
    )
    ids, ensemble = backbone.encode(TEXTS), moved(ensembles.lora(backbone, 3, 2))
    together = ensemble(ids)
    for m in range(3):
        near(ensemble.member(m)(ids), together[m])
    apart = ensemble.forward_each(torch.stack([ids, ids.flip(0), ids.roll(1, 0)]))
    near(apart[1].flip(0), together[1])
    near(training.predict(ensemble, ids, batch_size=3), together.detach())


# A real one -----------------------------------------------------------------------------------------------------------
def test_minilm():
    model = models.from_pretrained(models.minilm(), 2, "text")
    assert model.pooling == "mean"
    assert model.longest == 512
    texts = [
        "A film of rare charm.",
        "The plot is an insult, and long at that; nobody should sit through it.",
        "Meh",
    ]
    ids = model.encode(texts)
    plain = AutoModelForSequenceClassification.from_pretrained(
        models.minilm(), num_labels=2, use_safetensors=True
    ).eval()
    tokens = model.tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(tokens["input_ids"], ids)
    with torch.no_grad():
        expected = model.classifier(mean_of_tokens(plain.bert, tokens))
        near(model(ids), expected)
        near(model(nn.functional.pad(ids[2:], (0, 20)))[0], expected[2])
        embedding = nn.functional.normalize(mean_of_tokens(plain.bert, model.tokenizer(
            ["a wonderful movie", "what a great film", "tax law of Norway"], padding=True, return_tensors="pt"
        )))  # fmt: skip
    alike, unlike = embedding[0] @ embedding[1], embedding[0] @ embedding[2]
    assert alike > 0.7 > 0.3 > unlike  # as sentence-transformers has it
    lost = model.lose(ids, 0.5, torch.Generator().manual_seed(0))
    changed, padding = lost != ids, ids == model.tokenizer.pad_token_id
    assert 0 < changed.sum() < (~padding).sum()
    assert not (changed & padding).any()
    assert (lost[changed] == model.tokenizer.unk_token_id).all()


# Bad input ------------------------------------------------------------------------------------------------------------
def test_loading_is_silent(tmp_path, capfd):
    save(tmp_path, bert(BertModel))
    capfd.readouterr()
    models.from_pretrained(tmp_path, 2, "text")
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("spoil", "classes", "task", "message"),
    [
        (lambda folder: None, 1, "text", "classes must be at least 2, got 1"),
        (lambda folder: None, 2, "texts", 'task must be "image", "sound" or "text"'),
        (
            lambda folder: None,
            2,
            "image",
            "no checkpoint for AutoModelForImageClassification",
        ),
        (
            lambda folder: (folder / "config.json").unlink(),
            2,
            "text",
            "no checkpoint .* its config.json",
        ),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            2,
            "text",
            "cannot be read: .*no file named model.safetensors.*give a folder",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(
                folder / "pytorch_model.bin"
            ),
            2,
            "text",
            "no file named model.safetensors.*pickled weights could run code",
        ),
        (
            lambda folder: [
                (folder / name).unlink() for name in ("tokenizer.json", "vocab.txt")
            ],
            2,
            "text",
            "holds no tokenizer",
        ),
        (
            lambda folder: BertConfig(
                vocab_size=12, **SMALL | {"num_hidden_layers": 3}
            ).save_pretrained(folder),
            2,
            "text",
            r"lacks .* weights of BertForSequenceClassification.*layer\.2",
        ),
    ],
)
def test_bad_folders(tmp_path, spoil, classes, task, message):
    folder = save(tmp_path / "checkpoint", bert(BertModel))
    spoil(folder)
    with pytest.raises(ValueError, match=message) as error:
        models.from_pretrained(folder, classes, task)
    assert "checkpoint" in str(error.value) or "got" in str(error.value)


def test_weights_of_images_that_are_not_there(tmp_path):
    save(tmp_path, ViTModel(ViTConfig(**SMALL, **PIXELS)), tokenizer=False)
    ViTConfig(**SMALL | {"num_hidden_layers": 3}, **PIXELS).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"lacks .* weights of ViTForImageClassification"
    ):
        models.from_pretrained(tmp_path, 3)


def test_no_such_folder_and_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in (tmp_path / "nowhere", "./nowhere", "a/b/c"):
        with pytest.raises(OSError, match=f"'{name}' is no folder here"):
            models.from_pretrained(name, 2)
    with pytest.raises(
        OSError,
        match=r"'nobody/nothing' is no folder here.*check the name and the network",
    ):
        models.from_pretrained("nobody/nothing", 2)


def test_a_folder_may_move(tmp_path, monkeypatch):
    folder = save(tmp_path / "one", bert())
    shutil.move(folder, tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    assert models.from_pretrained("two", 2, "text").name == "two"


@pytest.mark.usefixtures("unchecked")
def test_bad_texts(tmp_path):
    model = models.from_pretrained(save(tmp_path, bert()), 2, "text")
    for texts in ("a film", []):
        with pytest.raises(TypeError, match=r"at least one text.*give \[text\]"):
            model.encode(texts)
    with pytest.raises(ValueError, match="max_length must be at least 3"):
        model.encode(TEXTS, 2)
    assert model.encode(["film " * 40], 33).shape == (1, 32)  # the network's limit
    for ids in (torch.rand(2, 3), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"token ids \[batch, tokens\]"):
            model(ids)
