"""Sounds as images: spoken digits, everyday sounds, and clips of ESC-10 and ESC-50.

Beside what all readers return there are the clips themselves (`about`): their `waves`,
int16 [N, T] at RATE, and the `fold` (1 to 5) or the `speaker` (0 to 5) of each.
"""

import math
from functools import cache, partial

import numpy as np

from uqlab.core.files import existing
from uqlab.data.readers import Items, asset_split, npz, reading

RATE = 16_000  # samples a second
# The natural logarithms of an energy that stand for 0 (silence) and for 1 (above the
# loudest).
LOG_MEL = (math.log(2**-23), 12.0)
SHORT = 0.8  # seconds of an embedded clip


def _spectrogram(waves: np.ndarray) -> np.ndarray:
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
    """Return the weights [257, 128] of frequencies in triangles on the mel scale."""
    corners = np.linspace(_mel(20), _mel(RATE / 2), 130)
    widths = np.diff(corners)
    at = _mel(np.arange(257)[:, None] * RATE / 512)
    up = (at - corners[:-2]) / widths[:-1]
    down = (corners[2:] - at) / widths[1:]
    return np.minimum(up, down).clip(0)


def _mel(hertz):
    return 1127 * np.log1p(hertz / 700)


def _items(waves, labels, classes, **about):
    """Return the spectrograms of waves, and the waves as int16."""
    waves = np.rint(waves.clip(-(2**15), 2**15 - 1)).astype(np.int16)
    # Frames take much memory.
    batches = [_spectrogram(waves[k : k + 64]) for k in range(0, len(waves), 64)]
    about = {"waves": waves, **about}
    return Items(np.concatenate(batches), labels, classes, about=about)


def _waves(mulaw, lengths, size):
    """Return clips [N, size] of 8 bits by the mu-law, stored one after the other.

    They are cut or filled with silence.
    """
    loudness = mulaw / np.float32(127.5) - 1
    samples = np.sign(loudness) * (256 ** np.abs(loudness) - 1) / 255 * 2**15
    clips = np.split(samples, lengths.cumsum()[:-1])
    return np.stack([np.pad(c[:size], (0, size - len(c[:size]))) for c in clips])


@cache
def recordings(name, classes, split):
    """Return short recordings of a file in `assets/`, which are stored at 8 kHz."""
    from scipy.signal import resample_poly  # takes half a second

    arrays = asset_split(name, split)
    waves = _waves(arrays["mulaw"], arrays["lengths"], int(SHORT * RATE / 2))
    waves = resample_poly(waves, 2, 1, axis=-1)
    about = {"speaker": arrays["speaker"]} if "speaker" in arrays else {}
    return _items(waves, arrays["y"], classes, **about)


def _environmental(name, split, root):
    """Read ESC-10 or ESC-50 (Piczak 2015), clips of five seconds, from one file.

    The last of five folds is the test split.
    """
    path = existing(
        root / "sounds" / f"{name}.npz",
        "no checksum of it is published, so it is not fetched; data/README.md says "
        "what the file holds",
    )
    stored = npz(path, "waves_mulaw|lengths|labels|folds|classes")
    with reading(path):
        fold = stored["folds"]
        rows = (fold == 5) == (split == "test")
        waves = _waves(stored["waves_mulaw"], stored["lengths"], 5 * RATE)[rows]
        classes = tuple(stored["classes"].tolist())
        return _items(waves, stored["labels"][rows], classes, fold=fold[rows])


ENVIRONMENTAL = {name: partial(_environmental, name) for name in ("esc10", "esc50")}
