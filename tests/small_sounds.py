"""A local folder in the layout of ESC-50, with tones for recordings."""

import csv
import wave

import numpy as np


def write(path, samples, rate=44_100, channels=1, width=2):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())


def esc50(folder):
    """Three classes, two clips of each in a fold: four seconds of 500, 1000 and 2000 Hz with a little noise."""
    folder = folder / "ESC-50-master"
    (folder / "meta").mkdir(parents=True)
    (folder / "audio").mkdir()
    names, rows, rng = ["dog", "rain", "clock"], [], np.random.default_rng(0)
    for fold in range(1, 6):
        for k in range(6):
            target = k % 3
            tone = np.sin(2 * np.pi * 500 * 2**target * np.arange(4 * 44_100) / 44_100)
            rows.append(
                (
                    f"{fold}-{k}-A-{target}.wav",
                    fold,
                    target,
                    names[target],
                    False,
                    k,
                    "A",
                )
            )
            write(
                folder / "audio" / rows[-1][0],
                (20_000 * tone + 300 * rng.standard_normal(len(tone))).astype("<i2"),
            )
    with (folder / "meta" / "esc50.csv").open("w", newline="") as file:
        columns = (
            "filename",
            "fold",
            "target",
            "category",
            "esc10",
            "src_file",
            "take",
        )
        csv.writer(file).writerows([columns, *rows])
    return folder.parent


def esc10(folder):
    """The same clips at 16 kHz in one file, 8 bits by the mu-law, which is returned."""
    clips, labels, folds = [], [], []
    for fold in range(1, 6):
        for k in range(6):
            time = np.arange(4 * 16_000) / 16_000
            level = 20_000 / 2**15 * np.sin(2 * np.pi * 500 * 2 ** (k % 3) * time)
            loudness = np.sign(level) * np.log1p(255 * abs(level)) / np.log(256)
            clips.append(np.rint((loudness + 1) * 127.5).astype(np.uint8))
            labels.append(k % 3)
            folds.append(fold)
    path = folder / "sounds" / "esc10.npz"
    path.parent.mkdir()
    np.savez(
        path, waves_mulaw=np.concatenate(clips), lengths=[len(clip) for clip in clips],
        labels=labels, folds=folds, classes=["dog", "rain", "clock"],
    )  # fmt: skip
    return path
