"""Sounds as images: synthesised ones, which need no download, and recordings in the layout of ESC-50.

Each builder gives what the readers of images give, with a fifth item: the `fold` (1 to 5) of each clip and its `waves`,
int16 [N, T] at RATE. The last fold is the test split, the others train.
"""

import csv
import math
import wave
from functools import cache

import numpy as np
from scipy.signal import resample_poly, sosfilt

from uqlab.data.readers import reading, source

RATE = 16_000  # samples a second
MELS = 128
# The natural logarithms of an energy that stand for 0 (silence) and for 1 (above the loudest).
LOG_MEL = (math.log(2**-23), 12.0)
SOUNDS = (
    "rising chirp", "falling chirp", "tremolo", "vibrato", "harmonic tone", "clicks", "filtered noise", "bell", "trill",
    "hum", "siren", "rattle",
)  # fmt: skip
FOLDS, PER_CLASS, SECONDS = 5, 40, 5  # as in ESC-50
NOISE = (6, 26)  # dB that a synthesised sound is louder than the noise


def spectrogram(waves: np.ndarray) -> np.ndarray:
    """Log-mel energies of int16 waves [N, T] in [0, 1], as LOG_MEL scales them, [N, 1, 128, frames]; low tones below.

    They are what `ASTFeatureExtractor` of transformers computes before it pads: frames of 25 ms every 10 ms without
    their mean, with preemphasis and a Hann window, and 128 triangles from 20 Hz to 8 kHz.
    """
    frames = np.lib.stride_tricks.sliding_window_view(waves, 400, axis=-1)[
        :, ::160
    ] / np.float32(2**15)
    frames = frames - frames.mean(-1, keepdims=True)
    frames = np.concatenate(
        [0.03 * frames[..., :1], frames[..., 1:] - 0.97 * frames[..., :-1]], -1
    ) * np.hanning(400)
    energies = np.abs(np.fft.rfft(frames, 512)) ** 2 @ _triangles()
    low, high = LOG_MEL
    scaled = (np.log(np.maximum(energies, math.exp(low))) - low) / (high - low)
    return scaled.swapaxes(1, 2)[:, None, ::-1].clip(0, 1).astype(np.float32)


@cache
def _triangles():
    """Weights [257, 128] of the frequencies of a frame in the bands, which are triangles on the mel scale."""
    mel = lambda hertz: 1127 * np.log1p(hertz / 700)  # noqa: E731
    corners = np.linspace(mel(20), mel(RATE / 2), MELS + 2)
    at = mel(np.arange(257)[:, None] * RATE / 512)
    up, down = (
        (at - corners[:-2]) / np.diff(corners)[:-1],
        (corners[2:] - at) / np.diff(corners)[1:],
    )
    return np.minimum(up, down).clip(0)


def _sets(waves, labels, classes, fold):
    parts = [
        spectrogram(waves[k : k + 64]) for k in range(0, len(waves), 64)
    ]  # frames take much memory
    return np.concatenate(parts), labels, classes, None, {"waves": waves, "fold": fold}


# synthesised -----------------------------------------------------------------------------------------------------


@cache
def sounds(split):
    """Twelve kinds of synthesised half seconds, 40 of each in five folds: 384 train, 96 test."""
    rng = np.random.default_rng(0)
    made = [
        (_clip(name, rng), label, k % FOLDS + 1)
        for label, name in enumerate(SOUNDS)
        for k in range(PER_CLASS)
    ]
    waves, labels, fold = (np.array(column) for column in zip(*made, strict=True))
    rows = (fold == FOLDS) == (split == "test")
    return _sets(
        waves[rows], labels[rows].astype(np.int64), SOUNDS, fold[rows].astype(np.int64)
    )


def _clip(name, rng):
    """Half a second of one kind with a random pitch, echo, level and noise, int16 [8000]."""
    t = np.arange(RATE // 2) / RATE
    clip = _tone(name, t, rng)
    clip = clip / np.sqrt(np.mean(clip**2))
    delay = rng.integers(400, 1600)  # 25 to 100 ms
    clip[delay:] += rng.uniform(0, 0.6) * clip[:-delay]
    noise = np.asarray(
        sosfilt([[1, 0, 0, 1, -rng.uniform(0, 0.95), 0]], rng.standard_normal(len(t)))
    )  # white to brown
    clip = clip + noise / noise.std() * np.sqrt(np.mean(clip**2)) * 10 ** (
        -rng.uniform(*NOISE) / 20
    )
    level = 10 ** (-rng.uniform(0, 20) / 20)
    return np.rint(clip / np.abs(clip).max() * level * 32_000).astype(np.int16)


def _tone(name, t, rng):
    """The clip itself, before echo, noise and level: `t` in seconds."""
    draw = rng.uniform
    pitch, rate, rise = (
        200 * 2 ** draw(0, 3),
        draw(5, 14),
        draw(0.7, 1.8),
    )  # Hz, Hz, octaves
    beat = np.sin(2 * np.pi * (rate * t + draw()))
    sing = lambda hertz: np.sin(2 * np.pi * np.cumsum(hertz * np.ones_like(t)) / RATE)  # noqa: E731
    if name == "rising chirp":
        return sing(pitch * 2 ** (2 * rise * t))
    if name == "falling chirp":
        return sing(pitch * 2 ** (rise - 2 * rise * t))
    if name == "tremolo":
        return (1 + draw(0.6, 1) * beat) * sing(2 * pitch)
    if name == "vibrato":
        return sing(2 * pitch * 2 ** (draw(0.08, 0.25) * beat))
    if name == "trill":
        return sing(2 * pitch * 2 ** (np.sign(beat) * draw(0.08, 0.25)))
    if name == "siren":  # up and down once, or the other way
        return sing(
            pitch * 2 ** (rise * (1 - np.cos(2 * np.pi * (2 * t + draw()))) / 2)
        )
    if name == "harmonic tone":
        return sum(
            sing(pitch * k) / k ** draw(0, 1)
            for k in range(1, 7)
            if pitch * k < RATE / 2
        )
    if name == "hum":
        return sum(sing(draw(45, 110) * (k + draw(-0.02, 0.02))) for k in (1, 2, 3))
    if name == "bell":
        parts = (1, 2.0, 2.76, 3.76, 5.4)  # not harmonic
        return np.exp(-t * draw(4, 10)) * sum(
            sing(pitch * k) * np.exp(-t * k) for k in parts if pitch * k < RATE / 2
        )
    hiss = rng.standard_normal(len(t))
    if name == "clicks":
        return hiss * (np.modf(rate * t + draw())[0] < 0.05)
    if name == "rattle":  # clicks that ring
        return sing(2 * pitch) * np.exp(-np.modf(rate * t + draw())[0] * draw(4, 12))
    turn, width = 2 * np.pi * 2 * pitch / RATE, draw(0.9, 0.98)
    return sosfilt(
        [[1, 0, -1, 1, -2 * width * np.cos(turn), width**2]], hiss
    )  # filtered noise


# recorded --------------------------------------------------------------------------------------------------------


@source("esc50")
def esc50(split, root):
    """ESC-50 (Piczak 2015): five seconds each, 50 classes of 40 clips in five folds, 1600 train, 400 test."""
    places = (
        root / folder / "meta" / "esc50.csv"
        for folder in ("esc50", "ESC-50-master", "ESC-50", ".")
    )
    table = next((place for place in places if place.is_file()), None)
    if table is None:
        raise FileNotFoundError(
            f"{root / 'esc50' / 'meta' / 'esc50.csv'} is missing, and no checksum of ESC-50 is published, so it is not "
            "fetched: unpack github.com/karolpiczak/ESC-50 there (meta, audio), or name its folder (root)."
        )
    with reading(table), table.open(encoding="utf-8", newline="") as file:
        rows = [
            (row["filename"], int(row["fold"]), int(row["target"]), row["category"])
            for row in csv.DictReader(file)
        ]
        named = {target: name for _, _, target, name in rows}
        rows = [row for row in rows if (row[1] == FOLDS) == (split == "test")]
        if sorted(named) != list(range(len(named))) or not rows:
            raise ValueError(
                f"{split} has {len(rows)} clips; targets must be 0, 1, 2, ..., got {sorted(named)}"
            )
    waves = np.stack(
        [_recording(table.parents[1] / "audio" / file) for file, *_ in rows]
    )
    fold, labels = (np.array([row[k] for row in rows], np.int64) for k in (1, 2))
    return _sets(waves, labels, tuple(named[target] for target in sorted(named)), fold)


def _recording(path):
    """A .wav of 16 bits as int16 [80000] at RATE: channels averaged, cut or filled with silence to five seconds."""
    with reading(path), wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(
                f"samples must have 16 bits, got {8 * file.getsampwidth()}"
            )
        clip = (
            np.frombuffer(file.readframes(file.getnframes()), "<i2")
            .reshape(-1, file.getnchannels())
            .mean(1)
        )
        rate = file.getframerate()
        if not len(clip):
            raise ValueError("it holds no samples")
    clip = resample_poly(
        clip, RATE // math.gcd(RATE, rate), rate // math.gcd(RATE, rate)
    )[: SECONDS * RATE]
    return np.rint(
        np.pad(clip, (0, SECONDS * RATE - len(clip))).clip(-(2**15), 2**15 - 1)
    ).astype(np.int16)
