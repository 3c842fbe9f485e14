"""The CLIP in the package: what it has seen, that it names what it has not, and how it was made."""

import json

import make_clip
import pytest
import torch
from safetensors import safe_open

from uqlab import data, metrics, models, training
from uqlab.core.files import sha256
from uqlab.data import captions

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


def test_prompts_may_be_any_texts():
    """Words alone, too: not one of its captions leaves a word out."""
    shown = captions.pictures(
        [
            f"large filled {colour} circle"
            for colour in ("red", "green", "blue")
            for _ in range(50)
        ]
    )
    logits = training.predict(
        zero_shot(["red circle", "green circle", "blue circle"]), shown
    )
    assert metrics.accuracy(logits, torch.arange(3).repeat_interleave(50)) > 0.9


# how it was made ------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """Every caption that the script draws a picture of."""
    given, draw = [], captions.pictures

    def noted(texts, **how):
        given.extend(texts)
        return draw(texts, **how)

    monkeypatch.setattr(captions, "pictures", noted)
    monkeypatch.setattr(make_clip, "EVERY", 1)
    return given


@pytest.mark.release
def test_it_is_made_from_the_captions_of_training_alone(drawn, tmp_path, capsys):
    make_clip.main(str(tmp_path / "run"), tmp_path / "made", steps=2)
    about = json.loads(capsys.readouterr().out)
    train, test = (data.load("captions", split).classes for split in ("train", "test"))
    assert len(drawn) == about["pictures"] == 2 * 231
    assert set(drawn) <= set(train)
    assert not set(drawn) & set(test)
    network = models.clip_zero_shot(tmp_path / "made", ["A photo of a red star."])
    ours = zero_shot(["red star"])
    assert network.state_dict().keys() == ours.state_dict().keys()
