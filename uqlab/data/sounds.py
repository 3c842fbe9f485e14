"""Sounds as images: synthesised ones, and recordings in the layout of ESC-50.

Beside what all readers return there are the clips themselves (`about`): the `fold`
(1 to 5) of each and its `waves`, int16 [N, T] at RATE. The last fold is the test split.
"""

import math
from functools import cache

import numpy as np
from scipy.io import wavfile
from scipy.signal import resample_poly, sosfilt

from uqlab.data.readers import Items, reading, source

RATE = 16_000  # samples a second
MELS = 128
# The natural logarithms of an energy that stand for 0 (silence) and for 1 (above the
# loudest).
LOG_MEL = (math.log(2**-23), 12.0)
SOUNDS = (
    "rising chirp", "falling chirp", "tremolo", "vibrato", "harmonic tone", "clicks",
    "filtered noise", "bell", "trill", "hum", "siren", "rattle",
)  # fmt: skip
FOLDS, PER_CLASS, SECONDS = 5, 40, 5  # as in ESC-50
NOISE = (6, 26)  # dB that a synthesised sound is louder than the noise
TIME = np.arange(RATE // 2) / RATE  # of a synthesised sound, in seconds
BELL = (1, 2.0, 2.76, 3.76, 5.4)  # its partial tones, which are not harmonic
TURN = 2 * np.pi


def spectrogram(waves: np.ndarray) -> np.ndarray:
    """Return log-mel energies [N, 1, 128, frames] of int16 waves [N, T]; low below.

    LOG_MEL scales them to [0, 1]. They are what `ASTFeatureExtractor` of transformers
    computes before it pads: frames of 25 ms every 10 ms without their mean, with
    preemphasis and a Hann window, and 128 triangles from 20 Hz to 8 kHz.
    """
    windows = np.lib.stride_tricks.sliding_window_view(waves, 400, axis=-1)
    frames = windows[:, ::160] / np.float32(2**15)
    frames = frames - frames.mean(-1, keepdims=True)
    later = frames[..., 1:] - 0.97 * frames[..., :-1]
    emphasised = np.concatenate([0.03 * frames[..., :1], later], -1)
    spectrum = np.fft.rfft(emphasised * np.hanning(400), 512)
    energies = np.abs(spectrum) ** 2 @ _triangles()
    low, high = LOG_MEL
    scaled = (np.log(np.maximum(energies, math.exp(low))) - low) / (high - low)
    return scaled.swapaxes(1, 2)[:, None, ::-1].clip(0, 1).astype(np.float32)


@cache
def _triangles():
    """Return the weights [257, 128] of a frame's frequencies in the bands.

    The bands are triangles on the mel scale.
    """
    corners = np.linspace(_mel(20), _mel(RATE / 2), MELS + 2)
    widths = np.diff(corners)
    at = _mel(np.arange(257)[:, None] * RATE / 512)
    up, down = (at - corners[:-2]) / widths[:-1], (corners[2:] - at) / widths[1:]
    return np.minimum(up, down).clip(0)


def _mel(hertz):
    return 1127 * np.log1p(hertz / 700)


def _set(waves, labels, folds, classes):
    """Return the spectrograms of waves, and the waves with their folds."""
    # Frames take much memory.
    batches = [spectrogram(waves[k : k + 64]) for k in range(0, len(waves), 64)]
    about = {"waves": waves, "fold": folds}
    return Items(np.concatenate(batches), labels, classes, about=about)


# Synthesised


@cache
def sounds(split):
    """Return twelve kinds of synthesised half seconds: 384 train, 96 test.

    There are 40 of each kind in five folds.
    """
    rng = np.random.default_rng(0)
    clips = np.stack([_clip(name, rng) for name in SOUNDS for _ in range(PER_CLASS)])
    labels, k = np.divmod(np.arange(len(clips)), PER_CLASS)
    folds = k % FOLDS + 1
    rows = (folds == FOLDS) == (split == "test")
    return _set(clips[rows], labels[rows], folds[rows], SOUNDS)


def _clip(name, rng):
    """Return a sound with a random pitch, echo, level and noise, int16 [8000]."""
    clip = _sound(name, rng)
    clip = clip / np.sqrt(np.mean(clip**2))
    delay = rng.integers(400, 1600)  # 25 to 100 ms
    clip[delay:] += rng.uniform(0, 0.6) * clip[:-delay]
    brown = [[1, 0, 0, 1, -rng.uniform(0, 0.95), 0]]  # white to brown
    noise = np.asarray(sosfilt(brown, rng.standard_normal(len(clip))))
    quiet = 10 ** (-rng.uniform(*NOISE) / 20)
    clip = clip + noise / noise.std() * np.sqrt(np.mean(clip**2)) * quiet
    level = 10 ** (-rng.uniform(0, 20) / 20)
    return np.rint(clip / np.abs(clip).max() * level * 32_000).astype(np.int16)


def _sing(hertz):
    """Return a sine of this frequency, a number or one for each sample."""
    return np.sin(TURN * np.cumsum(hertz * np.ones_like(TIME)) / RATE)


def _sound(name, rng):
    """Return a sound before echo, noise and level."""
    draw = rng.uniform
    pitch, rate = 200 * 2 ** draw(0, 3), draw(5, 14)  # Hz, Hz
    rise, beats = draw(0.7, 1.8), rate * TIME + draw()  # octaves, count
    beat = np.sin(TURN * beats)
    match name:
        case "rising chirp":
            return _sing(pitch * 2 ** (2 * rise * TIME))
        case "falling chirp":
            return _sing(pitch * 2 ** (rise - 2 * rise * TIME))
        case "tremolo":
            return (1 + draw(0.6, 1) * beat) * _sing(2 * pitch)
        case "vibrato" | "trill":
            bend = beat if name == "vibrato" else np.sign(beat)
            return _sing(2 * pitch * 2 ** (draw(0.08, 0.25) * bend))
        case "siren":  # up and down once, or the other way
            swing = 1 - np.cos(TURN * (2 * TIME + draw()))
            return _sing(pitch * 2 ** (rise * swing / 2))
        case "clicks" | "rattle" | "filtered noise":
            return _noise(name, pitch, rate, rng)
    return _chord(name, pitch, draw)


def _chord(name, pitch, draw):
    """Return a sound of several tones, those below half the rate."""
    if name == "hum":
        return sum(_sing(draw(45, 110) * (k + draw(-0.02, 0.02))) for k in (1, 2, 3))
    if name == "harmonic tone":
        tones = [k for k in range(1, 7) if pitch * k < RATE / 2]
        return sum(_sing(pitch * k) / k ** draw(0, 1) for k in tones)
    tones = [k for k in BELL if pitch * k < RATE / 2]
    fading = np.exp(-TIME * draw(4, 10))
    return fading * sum(_sing(pitch * k) * np.exp(-TIME * k) for k in tones)


def _noise(name, pitch, rate, rng):
    """Return clicks, clicks that ring, or noise around a pitch."""
    hiss = rng.standard_normal(len(TIME))
    if name == "filtered noise":
        turn, width = TURN * 2 * pitch / RATE, rng.uniform(0.9, 0.98)
        resonance = [[1, 0, -1, 1, -2 * width * np.cos(turn), width**2]]
        return np.asarray(sosfilt(resonance, hiss))
    since = np.modf(rate * TIME + rng.uniform())[0]  # the last click, in periods
    if name == "clicks":
        return hiss * (since < 0.05)
    return _sing(2 * pitch) * np.exp(-since * rng.uniform(4, 12))


# Recorded


@source("esc50")
def esc50(split, root):
    """Read ESC-50 (Piczak 2015): 50 classes, 1600 train, 400 test clips.

    Each has five seconds; the five folds hold eight clips of each class.
    """
    folders = [root / name for name in ("esc50", "ESC-50-master", "ESC-50", ".")]
    tables = [path for folder in folders for path in folder.glob("meta/esc50.csv")]
    if not tables:
        raise FileNotFoundError(
            f"{folders[0] / 'meta/esc50.csv'} is missing, and no checksum of ESC-50 is "
            "published, so it is not fetched: unpack github.com/karolpiczak/ESC-50 "
            "there (meta, audio), or name its folder (root)."
        )
    with reading(tables[0]):
        rows = np.genfromtxt(
            tables[0], delimiter=",", names=True, dtype=None, encoding="utf-8"
        )
        _, first, labels = np.unique(
            rows["target"], return_index=True, return_inverse=True
        )
        classes = tuple(rows["category"][first].tolist())
        chosen = (rows["fold"] == FOLDS) == (split == "test")
        rows, labels = rows[chosen], labels[chosen]
    audio = tables[0].parents[1] / "audio"
    waves = np.stack([_recording(audio / file) for file in rows["filename"]])
    return _set(waves, labels, rows["fold"].copy(), classes)


def _recording(path):
    """Return a .wav of 16 bits as int16 [80000] at RATE.

    Channels are averaged; it is cut or filled with silence to five seconds.
    """
    with reading(path):
        rate, clip = wavfile.read(path)
        if clip.dtype != np.int16 or not len(clip):
            raise ValueError(
                f"it must hold samples of 16 bits, got {len(clip)} of {clip.dtype}"
            )
    clip = clip.reshape(len(clip), -1).mean(1)
    clip = resample_poly(clip, RATE, rate)[: SECONDS * RATE]
    clip = np.pad(clip, (0, SECONDS * RATE - len(clip)))
    return np.rint(clip.clip(-(2**15), 2**15 - 1)).astype(np.int16)
