"""Sounds: the synthesised set, recordings in the layout of ESC-50, and spectrograms as AST takes them."""

import numpy as np
import pytest
import small_sounds
import torch
from small_sounds import write
from transformers import ASTFeatureExtractor

from uqlab import data, models


def test_sounds_keep_the_contract():
    train, test = (data.load("sounds", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (384, 96)
    for d, folds in ((train, [1, 2, 3, 4]), (test, [5])):
        assert d.inputs.shape == (len(d), 1, 128, 48)
        assert d.inputs.dtype == torch.float32
        assert d.inputs.min() >= 0
        assert d.inputs.max() <= 1
        assert d.about["waves"].dtype == torch.int16
        assert d.about["waves"].shape == (len(d), data.RATE // 2)
        assert d.about["fold"].unique().tolist() == folds
        for fold in folds:  # eight of each class
            assert d.labels[d.about["fold"] == fold].bincount().tolist() == [8] * 12
    assert torch.cdist(test.inputs.flatten(1), train.inputs.flatten(1)).min() > 1


def test_what_is_known_of_a_clip_goes_with_it():
    every = data.load("sounds", "train")
    part = data.load("sounds[10,4]", "train", limit=20, seed=1).resize(28)
    assert part.classes == ("siren", "harmonic tone")
    assert part.inputs.shape == (20, 1, 28, 28)
    for chosen in (part, part[torch.arange(5)], part[3:4]):
        for clip, label, fold in zip(
            chosen.about["waves"], chosen.labels, chosen.about["fold"], strict=True
        ):
            (row,) = (every.about["waves"] == clip).all(1).nonzero()
            assert every.classes[every.labels[row]] == part.classes[label]
            assert every.about["fold"][row] == fold


def test_pitch_is_high_above_and_time_runs_to_the_right():
    classes = data.load("sounds").classes
    for name, sign in (("rising chirp", 1), ("falling chirp", -1)):
        x = data.load(f"sounds[{classes.index(name)}]", "train").inputs[:, 0]
        change = x[:, :, -12:].mean(2) - x[:, :, :12].mean(2)  # the noise stays
        assert (sign * (change.argmin(1) - change.argmax(1)) > 0).float().mean() > 0.9


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")
@pytest.mark.parametrize("length", [64, 48, 40])
def test_spectrograms_are_those_of_transformers(length):
    d = data.load("sounds")[::12]
    theirs = ASTFeatureExtractor(max_length=length)
    expected = theirs(
        list(d.about["waves"].numpy() / 2**15),
        sampling_rate=data.RATE,
        return_tensors="pt",
    )
    found = models.LogMel(length, data.LOG_MEL)(d.inputs)
    assert torch.allclose(found, expected["input_values"], atol=1e-4)


# recordings in a local folder ------------------------------------------------------------------------------------


@pytest.fixture
def esc50(tmp_path):
    return small_sounds.esc50(tmp_path)


def test_esc50_from_a_local_folder(esc50):
    train, test = (data.load("esc50", split, root=esc50) for split in ("train", "test"))
    assert (len(train), len(test)) == (24, 6)
    assert train.classes == ("dog", "rain", "clock")
    assert test.about["fold"].tolist() == [5] * 6
    assert test.inputs.shape == (6, 1, 128, 498)
    waves = test.about["waves"]
    assert waves.shape == (6, 5 * data.RATE)  # four seconds, filled with silence
    assert not waves[:, -data.RATE + 100 :].any()
    assert test.inputs[..., -90:].max() == 0
    spectrum = (
        torch.fft.rfft(waves[:, : data.RATE].float()).abs().argmax(1)
    )  # of a second: Hz
    assert torch.equal(spectrum, 500 * 2**test.labels)
    assert waves.abs().max() == pytest.approx(20_000, rel=0.1)
    assert len(data.load("esc50[0,2]", "train", root=esc50 / "ESC-50-master")) == 16


def test_stereo_at_another_rate_becomes_one_channel(esc50):
    pair = np.stack([np.full(8000, 1000), np.full(8000, 3000)], axis=1).astype("<i2")
    write(
        esc50 / "ESC-50-master" / "audio" / "5-0-A-0.wav", pair, rate=8000, channels=2
    )
    clip = data.load("esc50", root=esc50).about["waves"][0]
    assert (clip[100:15_000] - 2000).abs().max() < 100
    assert not clip[16_100:].any()


def spoil_table(text):
    return lambda folder: (folder / "meta" / "esc50.csv").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "audio" / "5-0-A-0.wav").write_bytes(b"RIFF"),
            "5-0-A-0.wav cannot be read",
        ),
        (
            lambda folder: (folder / "audio" / "5-0-A-0.wav").write_bytes(b"no sound"),
            "5-0-A-0.wav cannot be read",
        ),
        (
            lambda folder: (folder / "audio" / "5-0-A-0.wav").unlink(),
            "5-0-A-0.wav cannot be read: .*No such file",
        ),
        (
            lambda folder: write(
                folder / "audio" / "5-0-A-0.wav", np.zeros(9, "u1"), width=1
            ),
            "samples of 16 bits, got 9 of uint8",
        ),
        (
            lambda folder: write(folder / "audio" / "5-0-A-0.wav", np.zeros(0, "<i2")),
            "samples of 16 bits, got 0 of int16",
        ),
        (spoil_table("filename,fold\n1.wav,5\n"), "esc50.csv cannot be read: .*target"),
    ],
)
def test_a_damaged_folder_is_refused(esc50, spoil, message):
    spoil(esc50 / "ESC-50-master")
    with pytest.raises(ValueError, match=message):
        data.load("esc50", root=esc50)


def test_no_folder_says_what_to_do(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"no checksum .* is published.*unpack github.com/karolpiczak/ESC-50",
    ):
        data.load("esc50", root=tmp_path)
