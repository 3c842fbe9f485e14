"""Sounds as images: spoken digits, everyday sounds, and recordings of ESC-50.

Beside what all readers return there are the clips themselves (`about`): their `waves`,
int16 [N, T] at RATE, and the `fold` (1 to 5) or the `speaker` (0 to 5) of each. The
last fold is the test split.
"""

import math
from functools import cache

import numpy as np
from scipy.io import wavfile

from uqlab.core.files import existing
from uqlab.data.readers import Items, asset_split, npz, reading, source

RATE = 16_000  # samples a second
MELS = 128
# The natural logarithms of an energy that stand for 0 (silence) and for 1 (above the
# loudest).
LOG_MEL = (math.log(2**-23), 12.0)
FOLDS = 5  # of ESC-50
SECONDS = 5  # of a clip of ESC-50
SHORT = 0.8  # seconds of an embedded clip


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
    up = (at - corners[:-2]) / widths[:-1]
    down = (corners[2:] - at) / widths[1:]
    return np.minimum(up, down).clip(0)


def _mel(hertz):
    return 1127 * np.log1p(hertz / 700)


def _set(waves, labels, classes, **about):
    """Return the spectrograms of waves, and the waves with what is known of them."""
    # Frames take much memory.
    batches = [spectrogram(waves[k : k + 64]) for k in range(0, len(waves), 64)]
    about = {"waves": waves, **about}
    return Items(np.concatenate(batches), labels, classes, about=about)


def _at_rate(waves, rate):
    """Return waves [..., samples] of a rate at RATE."""
    from scipy.signal import resample_poly  # takes half a second

    return resample_poly(waves, RATE, rate, axis=-1)


@cache
def recordings(name, classes, split):
    """Return short recordings of a file in `assets/`, which are stored at 8 kHz."""
    arrays = asset_split(name, split)
    waves = _waves(arrays["mulaw"], arrays["lengths"], int(SHORT * RATE / 2))
    waves = _int16(_at_rate(waves, RATE // 2))
    about = {"speaker": arrays["speaker"]} if "speaker" in arrays else {}
    return _set(waves, arrays["y"], classes, **about)


def _waves(mulaw, lengths, size):
    """Return clips [N, size] of 8 bits by the mu-law, stored one after the other.

    They are cut or filled with silence.
    """
    loudness = mulaw / np.float32(127.5) - 1
    samples = np.sign(loudness) * (256 ** np.abs(loudness) - 1) / 255 * 2**15
    clips = np.split(samples, lengths.cumsum()[:-1])
    return np.stack([_filled(clip[:size], size) for clip in clips])


def _filled(clip, size):
    return np.pad(clip, (0, size - len(clip)))


def _int16(waves):
    return np.rint(waves.clip(-(2**15), 2**15 - 1)).astype(np.int16)


# In local folders


@source("esc50")
def esc50(split, root):
    """Read ESC-50 (Piczak 2015): 50 classes, 1600 train, 400 test clips.

    Each has five seconds; the five folds hold eight clips of each class.
    """
    names = ("esc50", "ESC-50-master", "ESC-50", ".")
    tables = [root / name / "meta/esc50.csv" for name in names]
    table = existing(
        next((path for path in tables if path.is_file()), tables[0]),
        "no checksum of ESC-50 is published, so it is not fetched: unpack "
        "github.com/karolpiczak/ESC-50 there (meta, audio), or name its folder (root).",
    )
    with reading(table):
        rows = np.genfromtxt(
            table, delimiter=",", names=True, dtype=None, encoding="utf-8"
        )
        _, first, labels = np.unique(
            rows["target"], return_index=True, return_inverse=True
        )
        classes = tuple(rows["category"][first].tolist())
        chosen = (rows["fold"] == FOLDS) == (split == "test")
        rows = rows[chosen]
        labels = labels[chosen]
    audio = table.parents[1] / "audio"
    waves = np.stack([_recording(audio / file) for file in rows["filename"]])
    return _set(waves, labels, classes, fold=rows["fold"].copy())


@source("esc10")
def esc10(split, root):
    """Read ESC-10, ten classes of ESC-50: 320 train, 80 test clips of five seconds.

    One file holds them at RATE, in 8 bits by the mu-law.
    """
    path = existing(
        root / "sounds" / "esc10.npz",
        "data/README.md says what it holds. `esc50` reads the recordings as their "
        "author publishes them.",
    )
    arrays = npz(path, "waves_mulaw", "lengths", "labels", "folds", "classes")
    with reading(path):
        waves = _waves(arrays["waves_mulaw"], arrays["lengths"], SECONDS * RATE)
        rows = (arrays["folds"] == FOLDS) == (split == "test")
        labels = arrays["labels"][rows]
        fold = arrays["folds"][rows]
        classes = tuple(arrays["classes"].tolist())
    return _set(_int16(waves[rows]), labels, classes, fold=fold)


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
    clip = _at_rate(clip, rate)[: SECONDS * RATE]
    return _int16(_filled(clip, SECONDS * RATE))
