"""An audio spectrogram transformer from a folder, on sounds, with LoRA members in its attention."""

import pytest
import torch
from same import near
from small_networks import SMALL
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)

from uqlab import data, ensembles, models, training
from uqlab.study import methods


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    ASTForAudioClassification(
        ASTConfig(max_length=64, num_labels=7, **SMALL)
    ).save_pretrained(tmp_path)
    return tmp_path


def test_lora_members_of_an_audio_transformer(folder):
    task = data.load("spoken-digits[0-3]", "train", limit=12)
    backbone = methods.backbone(str(folder), task)
    ensemble = ensembles.lora(backbone, 2, rank=2)
    adapted = [
        name.removesuffix(".weight")
        for name, part in ensemble.seen.items()
        if isinstance(part.kind, ensembles.LowRank)
    ]
    assert len(adapted) == 8  # queries, keys, values and output of two blocks
    assert (
        sum(
            name.endswith(("query", "key", "value", "q_proj", "k_proj", "v_proj"))
            for name in adapted
        )
        == 6
    )

    own = ASTForAudioClassification.from_pretrained(folder).eval()
    x = models.LogMel(64, data.LOG_MEL)(task.inputs)
    with torch.no_grad():  # before training members differ in their classifiers alone
        state = ensemble.member(1).state_dict()
        dense = {
            name: w
            for name, w in state.items()
            if name.endswith(("dense.weight", "dense.bias"))
        }
        head = {
            name.rpartition(".")[2]: w
            for name, w in dense.items()
            if ".classifier." in name
        }
        pooled = own.classifier.layernorm(
            own.audio_spectrogram_transformer(x).pooler_output
        )
        near(ensemble(task.inputs)[1], pooled @ head["weight"].T + head["bias"])

    settings = {"epochs": 2, "lr": 0.01, "rank": 2, "warmup": 0}
    trained = methods.train(
        "lora", backbone, task.inputs, task.labels, members=2, **settings
    )
    logits = training.predict(trained, task.inputs)
    for m in range(2):
        alone = training.predict(
            ensembles.from_members([trained.member(m)]), task.inputs
        )
        near(alone[0], logits[m])


def test_a_network_on_waves_is_refused(tmp_path):
    config = Wav2Vec2Config(
        conv_dim=(8,), conv_stride=(5,), conv_kernel=(10,), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, classifier_proj_size=8, **SMALL,
    )  # fmt: skip
    Wav2Vec2ForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match="takes waves; for sounds give an audio spectrogram transformer",
    ):
        models.from_pretrained(tmp_path, 3, "sound")
