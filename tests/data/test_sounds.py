"""Sounds: embedded recordings, those in local folders, and spectrograms as AST takes them."""

import numpy as np
import pytest
import small_sounds
import torch
from same import near
from small_sounds import write
from transformers import ASTFeatureExtractor

from uqlab import data, models


def test_spoken_digits_keep_the_contract():
    train, test = (data.load("spoken-digits", split) for split in ("train", "test"))
    for d, count in ((train, 7), (test, 3)):
        assert d.inputs.shape == (60 * count, 1, 128, 78)
        assert d.inputs.dtype == torch.float32
        assert 0 <= d.inputs.min() < d.inputs.max() <= 1
        assert d.kind == "sounds"
        assert d.about["waves"].dtype == torch.int16
        assert d.about["waves"].shape == (len(d), 0.8 * data.RATE)
        said = 10 * d.about["speaker"].long() + d.labels
        assert said.bincount().tolist() == [count] * 60  # of each speaker and digit
    assert torch.cdist(test.inputs.flatten(1), train.inputs.flatten(1)).min() > 1


def test_everyday_sounds_are_as_long_as_digits():
    d, digits = data.load("everyday-sounds"), data.load("spoken-digits", "train")
    assert d.labels.bincount().tolist() == [4] * 10
    silent = [(each.about["waves"] != 0).sum(1).float() for each in (d, digits)]
    assert abs(silent[0].mean() / silent[1].mean() - 1) < 0.1
    with pytest.raises(ValueError, match="everyday-sounds has no train split"):
        data.load("everyday-sounds", "train")


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


def test_pitch_is_high_above_and_a_digit_begins_on_the_left():
    d = data.load("spoken-digits[6]", "train")  # the hiss of "six" begins and ends it
    high, low = d.inputs[:, 0, 35:55, :20], d.inputs[:, 0, 100:, :20]
    assert (high.mean((1, 2)) > 0.2).float().mean() > 0.9
    assert d.inputs[:, 0, :, :20].mean() > 2 * d.inputs[:, 0, :, -20:].mean()
    assert low.shape == (42, 28, 20)
    assert d.inputs[:, 0, :25].mean() < 0.5 * d.inputs[:, 0, 35:].mean()  # above 4 kHz


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")
@pytest.mark.parametrize("length", [100, 78, 40])
def test_spectrograms_are_those_of_transformers(length):
    d = data.load("spoken-digits")[::20]
    theirs = ASTFeatureExtractor(max_length=length)
    expected = theirs(
        list(d.about["waves"].numpy() / 2**15),
        sampling_rate=data.RATE,
        return_tensors="pt",
    )
    found = models.LogMel(length, data.LOG_MEL)(d.inputs)
    near(found, expected["input_values"], atol=1e-4)


# recordings in a local folder ------------------------------------------------------------------------------------


def split_by_folds(name, root):
    """The sets of a folder: four folds to train, the fifth to test; its waves."""
    train, test = (data.load(name, split, root=root) for split in ("train", "test"))
    assert (len(train), len(test)) == (24, 6)
    assert train.classes == ("dog", "rain", "clock")
    assert test.about["fold"].tolist() == [5] * 6
    waves = test.about["waves"].float()
    assert waves.shape == (6, 5 * data.RATE)  # four seconds, filled with silence
    hertz = torch.fft.rfft(waves[:, : data.RATE]).abs().argmax(1)  # of a second
    assert torch.equal(hertz, 500 * 2**test.labels)
    assert waves.abs().max() == pytest.approx(20_000, rel=0.1)
    return test, waves


def test_esc10_from_one_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*esc10\.npz"):
        data.load("esc10", root=tmp_path)
    path = small_sounds.esc10(tmp_path)
    split_by_folds("esc10", tmp_path)
    np.savez(path, waves_mulaw=np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match=r"esc10\.npz cannot be read: 'lengths'"):
        data.load("esc10", root=tmp_path)


@pytest.fixture
def esc50(tmp_path):
    return small_sounds.esc50(tmp_path)


def test_esc50_from_a_local_folder(esc50):
    test, waves = split_by_folds("esc50", esc50)
    assert test.inputs.shape == (6, 1, 128, 498)
    assert not waves[:, -data.RATE + 100 :].any()
    assert test.inputs[..., -90:].max() == 0
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
