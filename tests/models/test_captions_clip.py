"""The CLIP in the package: what it has seen and that it names what it has not."""

import json

import make_clip
import torch
from safetensors import safe_open

from uqlab import data, metrics, models, training
from uqlab.core.files import sha256

SHA256 = "5976df48d76f9876ade928dc7b30fba530d4c8eb893de618c4022c7de75714a4"
WEIGHTS = models.CAPTIONS_CLIP / "model.safetensors"


def zero_shot(classes):
    return models.clip_zero_shot(
        models.CAPTIONS_CLIP, [models.PROMPT.format(label) for label in classes]
    )


def test_the_folder_says_what_it_has_seen():
    assert sha256(WEIGHTS) == SHA256
    with safe_open(WEIGHTS, "pt") as file:
        about = json.loads(file.metadata()["provenance"])
    assert about["pictures"] == make_clip.STEPS * 231
    assert about["accuracy"] > 0.75
    assert len(about["commit"]) == 40


def test_it_names_pairs_of_colour_and_shape_that_it_has_never_seen():
    test = data.load("captions", limit=400)
    logits = training.predict(zero_shot(test.classes), test.inputs)
    assert metrics.accuracy(logits, test.labels) > 0.75
    names = [label.split()[2] for label in test.classes]
    colours = torch.tensor([sorted({*names}).index(name) for name in names])
    assert (colours[logits[0].argmax(1)] == colours[test.labels]).double().mean() > 0.95
