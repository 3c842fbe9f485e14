"""Data sets by name: embedded ones, downloads checked by checksum, and your own files.

>>> test, ood = load("digits[0-6]"), load("digits[7-9]")
>>> far = load("captions", limit=100).resize(8, channels=1)
>>> far
Dataset(captions, test: 100 x [1, 8, 8], 114 classes)
"""

from uqlab.data.datasets import Dataset, check, fetched, file, load, names, read
from uqlab.data.sounds import LOG_MEL, RATE

__all__ = [
    "LOG_MEL",
    "RATE",
    "Dataset",
    "check",
    "fetched",
    "file",
    "load",
    "names",
    "read",
]
