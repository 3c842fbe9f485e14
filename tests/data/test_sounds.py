"""Sounds: embedded recordings, those in local files, and spectrograms as AST takes them."""

import numpy as np
import pytest
import small_sounds
import torch
from same import near
from transformers import ASTFeatureExtractor

from uqlab import data, models


def test_spoken_digits_keep_the_contract():
    train, test = (data.load("spoken-digits", split) for split in ("train", "test"))
    for d, count in ((train, 7), (test, 3)):
        assert d.inputs.shape == (60 * count, 1, 128, 78)
        assert 0 <= d.inputs.min() < d.inputs.max() <= 1
        assert d.kind == "sounds"
        assert d.about["waves"].dtype == torch.int16
        assert d.about["waves"].shape == (len(d), 0.8 * data.RATE)
        said = 10 * d.about["speaker"].long() + d.labels
        assert said.bincount().tolist() == [count] * 60  # of each speaker and digit
    assert torch.cdist(test.inputs.flatten(1), train.inputs.flatten(1)).min() > 1
    d = data.load("everyday-sounds")
    assert d.labels.bincount().tolist() == [4] * 10
    heard = [(each.about["waves"] != 0).sum(1).float() for each in (d, train)]
    assert abs(heard[0].mean() / heard[1].mean() - 1) < 0.1  # as long as digits


def test_what_is_known_of_a_clip_goes_with_it():
    every = data.load("spoken-digits", "train")
    part = data.load("spoken-digits[7,4]", "train", limit=20, seed=1).resize(28)
    assert part.classes == ("7", "4")
    assert part.inputs.shape == (20, 1, 28, 28)
    for chosen in (part, part[torch.arange(5)], part[3:4]):
        for clip, label, speaker in zip(
            chosen.about["waves"], chosen.labels, chosen.about["speaker"], strict=True
        ):
            (row,) = (every.about["waves"] == clip).all(1).nonzero()
            assert every.classes[every.labels[row]] == part.classes[label]
            assert every.about["speaker"][row] == speaker


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")
@pytest.mark.parametrize("length", [100, 78, 40])
def test_spectrograms_are_those_of_transformers(length):
    d = data.load("spoken-digits")[::20]
    waves = list(d.about["waves"].numpy() / 2**15)
    theirs = ASTFeatureExtractor(max_length=length)
    expected = theirs(waves, sampling_rate=data.RATE, return_tensors="pt")
    found = models.LogMel(length, data.LOG_MEL)(d.inputs)
    near(found, expected["input_values"], atol=1e-4)


def test_environmental_sounds_from_one_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*esc10\.npz"):
        data.load("esc10", root=tmp_path)
    path = small_sounds.esc10(tmp_path)
    train, test = (data.load("esc10", split, root=tmp_path) for split in ("train", "test"))  # fmt: skip
    assert (len(train), len(test)) == (24, 6)
    assert test.inputs.shape == (6, 1, 128, 498)
    assert train.classes == ("dog", "rain", "clock")
    assert test.about["fold"].tolist() == [5] * 6
    waves = test.about["waves"].float()
    assert waves.shape == (6, 5 * data.RATE)  # four seconds, filled with silence
    assert not waves[:, -data.RATE + 100 :].any()
    hertz = torch.fft.rfft(waves[:, : data.RATE]).abs().argmax(1)  # of a second
    assert torch.equal(hertz, 500 * 2**test.labels)
    assert waves.abs().max() == pytest.approx(20_000, rel=0.1)
    np.savez(path, waves_mulaw=np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match=r"esc10\.npz cannot be read"):
        data.load("esc10", root=tmp_path)
