"""An audio spectrogram transformer from a folder, on sounds, with LoRA members in its attention."""

import torch
from same import near
from small_networks import SMALL
from transformers import ASTConfig, ASTForAudioClassification

from uqlab import data, ensembles, models, training
from uqlab.study import methods


def test_lora_members_of_an_audio_transformer(tmp_path):
    torch.manual_seed(0)
    config = ASTConfig(max_length=64, num_labels=7, **SMALL)
    own = ASTForAudioClassification(config).eval()
    own.save_pretrained(tmp_path)
    task = data.load("spoken-digits[0-3]", "train", limit=12)
    backbone = methods.backbone(str(tmp_path), task)
    ensemble = ensembles.lora(backbone, 2, rank=2)
    x = models.LogMel(64, data.LOG_MEL)(task.inputs)
    with torch.no_grad():  # before training members differ in their classifiers alone
        network = own.audio_spectrogram_transformer
        pooled = own.classifier.layernorm(network(x).pooler_output)
        head = ensemble.member(1)[1].classifier.dense
        near(ensemble(task.inputs)[1], head(pooled))
    settings = {"epochs": 2, "lr": 0.01, "rank": 2, "warmup": 0}
    trained = methods.train(
        "lora", backbone, task.inputs, task.labels, members=2, **settings
    )
    logits = training.predict(trained, task.inputs)
    for m in range(2):
        alone = ensembles.from_members([trained.member(m)])
        near(training.predict(alone, task.inputs)[0], logits[m])
